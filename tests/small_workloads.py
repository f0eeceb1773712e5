"""Small workloads that train in milliseconds, and every strategy: what the contract suite runs against each other.

A workload joins by being listed in WORKLOADS; a strategy by a file in conf/strategy/ or an entry in VARIANTS.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sweep.config.check import check, typed
from sweep.config.schema import Config, WorkloadConf
from sweep.workload import DataSource, build_data

CONF = Path(__file__).parents[1] / "conf"
TOKENS = {"_target_": "sweep.workload.data.RandomTokens", "vocab_size": 32, "seq_len": 16}
DIGITS = {"_target_": "sweep.workload.data.Digits"}
GPT: dict[str, Any] = {
    "_target_": "sweep.workload.models.Transformer", "vocab_size": 32, "max_seq_len": 16, "layers": 4, "d_model": 32,
    "heads": 4, "dropout": 0.1,
}  # fmt: skip
LLAMA = GPT | {
    "kv_heads": 2, "norm": "rms", "position": "rope", "mlp": "swiglu", "bias": False, "d_ff": 48, "dropout": 0.0,
    "tied": False,
}  # fmt: skip
VIT = {
    "_target_": "sweep.workload.models.VisionTransformer", "image_size": 8, "patch_size": 2, "channels": 1,
    "classes": 10, "layers": 4, "d_model": 32, "heads": 4, "dropout": 0.1,
}  # fmt: skip
CONVNET = {
    "_target_": "sweep.workload.models.ResidualNet", "channels": 1, "classes": 10, "layers": 4, "features": 8,
}  # fmt: skip

WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT, "data": TOKENS, "grad_clip_norm": 1.0, "scheduler": {"name": "cosine", "warmup_steps": 2}},
    "gpt_eager": {"model": GPT | {"attention": "eager"}, "data": TOKENS},
    "llama": {"model": LLAMA, "data": TOKENS, "optimizer": {"implementation": "fused"}},
    "llama_eager": {"model": LLAMA | {"attention": "eager"}, "data": TOKENS},
    "gpt_bf16": {"model": GPT, "data": TOKENS, "dtype": "bf16"},
    "gpt_amp_bf16": {"model": GPT, "data": TOKENS, "dtype": "amp_bf16"},
    "gpt_amp_fp16": {"model": GPT, "data": TOKENS, "dtype": "amp_fp16", "grad_clip_norm": 1.0},
    "vit": {"model": VIT, "data": DIGITS, "optimizer": {"name": "adam"}},
    "convnet": {"model": CONVNET, "data": DIGITS, "optimizer": {"name": "sgd", "kwargs": {"momentum": 0.9}}},
    "dicts": {"model": {"_target_": "small_models.DictModel"}, "data": TOKENS},
    "tuples": {"model": {"_target_": "small_models.TupleModel"}, "data": TOKENS},
    "tied": {"model": {"_target_": "small_models.TiedBlocks"}, "data": TOKENS},
    "fourier": {"model": {"_target_": "small_models.ComplexModel"}, "data": TOKENS},
    "stateful": {"model": {"_target_": "small_models.StatefulModel"}, "data": TOKENS},
}

#: Small tensors are moved too, or nothing in models this small would be.
SMALL = {"min_tensor_kib": 0.25}
VARIANTS: dict[str, dict[str, Any]] = {
    "micro_batch_unequal": {"micro_batch_size": 3},
    "checkpoint_every_2": {"checkpoint": {"granularity": "blocks", "every_k": 2}},
    "segments_2": {"checkpoint": {"granularity": "segments", "segment_size": 2}},
    "segments_3": {"checkpoint": {"granularity": "segments", "segment_size": 3}},
    "parts_all": {"checkpoint": {"granularity": "parts", "parts": ["*"]}},  # parts inside of parts, too
    "selective_nothing": {"checkpoint": {"granularity": "selective", "keep_ops": []}},
    "selective_two": {"checkpoint": {"granularity": "selective", "keep_ops": ["aten.addmm", "aten.mul.Tensor"]}},
    "offload_everything": {"offload": {"placement": "all", "keep_last": 0, "min_tensor_kib": 0}},
    "offload_inputs": {"offload": {"placement": "inputs", **SMALL}},
    "offload_first_2": {"offload": {"placement": "blocks", "blocks": "first:2", **SMALL}},
    "offload_every_2": {"offload": {"placement": "blocks", "blocks": "every:2", "keep_last": 0, **SMALL}},
    "offload_list": {"offload": {"placement": "blocks", "blocks": "0,2", "min_tensor_kib": 0}},
    "save_on_cpu": {"offload": {"placement": "all", "implementation": "save_on_cpu"}},
    "hybrid_every_2": {"checkpoint": {"granularity": "blocks", "every_k": 2}, "offload": {"placement": "all", **SMALL}},
    "hybrid_segments": {
        "checkpoint": {"granularity": "segments", "segment_size": 2},
        "offload": {"placement": "all", "keep_last": 0, **SMALL},
    },
    "hybrid_selective": {"checkpoint": {"granularity": "selective"}, "offload": {"placement": "all", **SMALL}},
    "everything": {
        "micro_batch_size": 3,
        "checkpoint": {"granularity": "blocks", "every_k": 2},
        "offload": {"placement": "all", "keep_last": 1, **SMALL},
    },
}


def strategies() -> dict[str, dict[str, Any]]:
    """Those of conf/strategy/, read from disk so that a new one joins by itself, and the variants."""
    from_disk = {}
    for path in sorted((CONF / "strategy").glob("*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(node, dict)
        if node.get("offload"):
            node["offload"] |= SMALL
        from_disk[path.stem] = node
    return from_disk | {name: {"name": name} | node for name, node in VARIANTS.items()}


STRATEGIES = strategies()


def config(workload: str | dict[str, Any], strategy: str | dict[str, Any] = "baseline", **more: Any) -> Config:
    """A whole config. `more`: further groups, such as measure={"steps": 1}."""
    if isinstance(workload, str) and isinstance(strategy, str) and not more:
        # Composing takes longer than a step of these models does, so each group is composed once.
        both = copy.deepcopy(_composed(workload, "baseline"))
        both.strategy = copy.deepcopy(_composed("gpt", strategy).strategy)
        check(both)
        return both
    return _compose(workload, strategy, **more)


@cache
def _composed(workload: str, strategy: str) -> Config:
    return _compose(workload, strategy)


def _compose(workload: str | dict[str, Any], strategy: str | dict[str, Any], **more: Any) -> Config:
    name = workload if isinstance(workload, str) else "own"
    w = copy.deepcopy(WORKLOADS[workload] if isinstance(workload, str) else workload)
    w = {"name": name, "global_batch_size": 8, "seed": 3} | w
    w["optimizer"] = {"lr": 0.01} | w.get("optimizer", {})
    if w["data"] == TOKENS:
        w["seq_len"] = TOKENS["seq_len"]
    s = copy.deepcopy(STRATEGIES[strategy]) if isinstance(strategy, str) else {"name": "own"} | strategy
    m = {"warmup_steps": 1, "steps": 2, "repeats": 2, "eval_batches": 2} | more.pop("measure", {})
    d = {"name": "cpu", "type": "cpu"} | more.pop("device", {})
    return typed({"workload": w, "strategy": s, "device": d, "measure": m} | more)


_DATA: dict[str, DataSource] = {}


def data_of(conf: WorkloadConf) -> DataSource:
    """The workload's data, made once."""
    key = str(conf.data)
    if key not in _DATA:
        _DATA[key] = build_data(conf)
    return _DATA[key]
