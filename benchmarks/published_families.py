"""The families of published measurements as ordinary workloads: from the flags of the command line to a config.

Each family is a model under published_models/ (or of the transformers library) with the training loop of its
description: where gradients are cleared, what is under autocast or no_grad, which optimizer, whether an evaluation lies
in the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.published_models import qwen
from sweep.config.check import typed
from sweep.config.device import cublas_workspace_mib, load_profile
from sweep.config.schema import Config, plain
from sweep.errors import BadInput
from sweep.memory.device import resolve_device

MODELS = "benchmarks.published_models"


@dataclass
class Setting:
    """What one measurement was made of; the command line's flags, by the same names."""

    family: str
    device: str
    batch: int = 1  # samples per micro-batch
    seq: int = 1024
    amp: str = "none"  # none | bf16
    size: str = "medium"  # cs336
    what: str = "train"  # cs336: forward | forward_backward | train
    optimizer: str = "adamw_foreach"  # cs336: course_adamw | adamw_foreach
    checkpoint_group: int = 0  # cs336: blocks per checkpoint, 0: none
    strategy: str = "baseline"  # qwen2_5_0_5b
    variant: str = "baseline"  # gpt_124m
    dtype: str = "fp32"  # vit_l_16: fp32 | amp_fp16 | bf16
    accumulation: int = 1  # vit_l_16: micro-batches per optimizer step
    limit_mib: float | None = None  # the process's own limit on what the allocator reserves
    steps: int = 3  # optimizer steps, the last of which is the window
    eval_batches: int = 0  # evaluations at the end of the window
    torch: str = ""  # version that it was measured with; "": the one that is installed


@dataclass
class Job:
    """What sweep.trial.predict is asked."""

    config: Config
    options: dict[str, Any] = field(default_factory=dict)


def build(setting: Setting) -> Job:
    """Config and options for sweep.trial.predict. Raises BadInput for a family, device or value that does not exist."""
    try:
        family = FAMILIES[setting.family]
    except KeyError:
        raise BadInput("--family", setting.family, "is not known", f"give one of {', '.join(FAMILIES)}") from None
    workload, strategy = family(setting)
    workload["hold_outputs"] = False  # the losses hold what the published loops held
    profile = load_profile(setting.device)
    profile.cublas_workspace_mib = cublas_workspace_mib(profile, setting.torch)
    device = resolve_device(profile)
    if setting.limit_mib is not None:
        device.capacity_mib = setting.limit_mib + (device.context_mib or 0.0)
    config = typed({"workload": workload, "strategy": strategy, "device": plain(device), "mode": "predict"})
    options: dict[str, Any] = {"steps": setting.steps, "eval_batches": setting.eval_batches}
    if setting.what != "train":
        options["what"] = setting.what
    return Job(config, options)


Parts = tuple[dict[str, Any], dict[str, Any]]  # workload, strategy


def _cs336(s: Setting) -> Parts:
    if s.optimizer == "course_adamw":
        optimizer: dict[str, Any] = {"target": f"{MODELS}.course_adamw.CourseAdamW", "lr": 1e-3, "weight_decay": 0.01}
    else:
        optimizer = {"name": "adamw", "implementation": "foreach", "lr": 1e-3, "weight_decay": 0.01}
    workload = {
        "name": f"cs336_{s.size}",
        "model": {"_target_": f"{MODELS}.cs336.LanguageModel", "size": s.size, "context": s.seq},
        "data": {"_target_": f"{MODELS}.data.RandomTokens", "vocabulary": 10_000, "seq_len": s.seq},
        "loss": {"_target_": f"{MODELS}.cs336.HeldCrossEntropy"},
        "optimizer": optimizer,
        "dtype": "amp_bf16" if s.amp == "bf16" else "fp32",
        "blocks": "layers.*",
        "global_batch_size": s.batch,
        "seq_len": s.seq,
    }
    strategy: dict[str, Any] = {"name": "baseline"}
    if s.checkpoint_group:
        checkpoint = {"granularity": "segments", "segment_size": s.checkpoint_group}
        strategy = {"name": "checkpoint", "checkpoint": checkpoint}
    return workload, strategy


def _qwen(s: Setting) -> Parts:
    vocabulary = qwen.CONFIG["vocab_size"]
    data = {"vocabulary": vocabulary, "seq_len": s.seq, "targets_are_inputs": True}
    workload = {
        "name": "qwen2_5_0_5b",
        "model": {"_target_": "sweep.workload.hf.causal_lm", "config": qwen.CONFIG, "attention": "sdpa"},
        "data": {"_target_": f"{MODELS}.data.RandomTokens", **data},
        "loss": {"_target_": f"{MODELS}.qwen.LabelsLoss"},
        "optimizer": {"name": "adamw", "implementation": "foreach", "lr": 1e-5, "weight_decay": 0.01},
        "dtype": "amp_bf16" if s.amp == "bf16" else "fp32",
        "blocks": "model.layers.*",
        "global_batch_size": s.batch,
        "seq_len": s.seq,
    }
    strategy: dict[str, Any] = {"name": s.strategy}
    if s.strategy in ("checkpoint", "hybrid"):
        strategy["checkpoint"] = {"granularity": "blocks", "every_k": 1}
    if s.strategy in ("offload", "hybrid"):
        strategy["offload"] = {"placement": "all", "implementation": "save_on_cpu", "pin_memory": False}
    return workload, strategy


def _gpt(s: Setting) -> Parts:
    in_bf16 = s.variant in ("bf16", "torch_layernorm_gelu", "sdpa")
    implementation = "fused" if in_bf16 else "foreach"
    workload = {
        "name": "gpt_124m",
        "model": {"_target_": f"{MODELS}.raschka_gpt.Gpt", "variant": s.variant, "context": s.seq},
        "data": {"_target_": f"{MODELS}.data.RandomTokens", "vocabulary": 50_257, "seq_len": s.seq},
        "loss": {"_target_": f"{MODELS}.raschka_gpt.MeanCrossEntropy"},
        "optimizer": {"name": "adamw", "implementation": implementation, "lr": 5e-4, "weight_decay": 0.1},
        "dtype": "bf16" if in_bf16 else "amp_bf16" if s.amp == "bf16" else "fp32",
        "blocks": "trf_blocks.*",
        "global_batch_size": s.batch,
        "seq_len": s.seq,
    }
    return workload, {"name": "baseline"}


def _vit(s: Setting) -> Parts:
    # The loop that accumulates clears the gradients right after the optimizer's step, the other ones after the forward.
    late = s.accumulation == 1
    optimizer: dict[str, Any] = {"name": "adam", "implementation": "foreach", "lr": 5e-5}
    if late:
        optimizer["target"] = f"{MODELS}.vit.LateAdam"
    workload = {
        "name": "vit_l_16",
        "model": {"_target_": f"{MODELS}.vit.VisionTransformer"},
        "data": {"_target_": f"{MODELS}.data.RandomImages"},
        "loss": {"_target_": f"{MODELS}.vit.LateClearing", "late": late},
        "optimizer": optimizer,
        "dtype": "amp_bf16" if s.amp == "bf16" else s.dtype,
        "blocks": "layers.*",
        "global_batch_size": s.batch * s.accumulation,
    }
    return workload, {"name": "baseline", "micro_batch_size": s.batch}


FAMILIES: dict[str, Callable[[Setting], Parts]] = {
    "cs336": _cs336,
    "qwen2_5_0_5b": _qwen,
    "gpt_124m": _gpt,
    "vit_l_16": _vit,
}
DEVICES = {
    "RTX 4090 (48 GiB variant)": "rtx_4090_48gb",
    "RTX 4090 24 GiB": "rtx_4090",
    "A800-SXM4-80GB": "a800_80gb",
    "H200": "h200",
    "H100 80GB": "h100_80gb",
    "RTX 5070 Ti Laptop 12 GB (12227 MiB)": "rtx_5070_ti_laptop",
    "A100": "a100_80gb",
}


def setting_of(point: dict[str, Any]) -> Setting:
    """What a published point was made of, read from its fields and nothing else."""
    model, strategy, optimizer = point["model"], point["strategy"], point["optimizer"]
    device = next(profile for gpu, profile in DEVICES.items() if point["gpu"].startswith(gpu))
    amp = "bf16" if "bfloat16" in point["amp"] else "none"
    notes = point["notes"]
    s = Setting(family="", device=device, batch=point["batch"], amp=amp, torch=point["torch"])
    if isinstance(point["seq_or_image"], int):
        s.seq = point["seq_or_image"]
    if "allocator limit 23552 MiB" in notes:
        s.limit_mib = 23552.0
    if model.startswith("CS336"):
        s.family, s.size = "cs336", model.split()[1]
        if "forward only" in strategy:
            s.what = "forward"
        elif strategy.startswith("forward+backward"):
            s.what = "forward_backward"
        if "cs336_basics AdamW" in optimizer:
            s.optimizer = "course_adamw"
        if "consecutive groups of" in strategy:
            s.checkpoint_group = int(strategy.split("consecutive groups of ")[1].split()[0])
    elif model.startswith("Qwen"):
        s.family = "qwen2_5_0_5b"
        if "gradient_checkpointing_enable" in strategy:
            s.strategy = "hybrid" if "save_on_cpu" in strategy else "checkpoint"
        elif "save_on_cpu" in strategy:
            s.strategy = "offload"
        s.eval_batches = 1
    elif model.startswith("GPT-124M"):
        s.family = "gpt_124m"
        steps = {"baseline": "baseline", "causal mask": "mask_on_the_fly", "bf16": "bf16"}
        s.variant = next(v for k, v in steps.items() if strategy.startswith(k))
    else:
        s.family = "vit_l_16"
        s.dtype = "amp_fp16" if "fp16" in point["amp"] else "bf16" if point["dtype"].startswith("bf16") else "fp32"
    return s
