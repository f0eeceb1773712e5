"""What is known of a trial before it runs: from its data, its model, its device and this machine."""

from __future__ import annotations

from typing import Any

from torch import nn

from sweep.config.device import AllocatorOptions
from sweep.config.schema import Config, Dtype, Mode
from sweep.config.strategy_names import digest, micro_batch_size
from sweep.errors import BadInput, DoesNotFit, NotEquivalent, NotOnDevice
from sweep.memory.device import machine_has
from sweep.strategy import check_blocks, over_the_batch
from sweep.trial.what_if import has_bf16
from sweep.workload import build_data, build_outline, find_blocks
from sweep.workload.data import checked


def check_trial(config: Config, seen: dict[str, Any]) -> None:
    """Raise BadInput for what only the data, the model or this machine can tell. `seen` spares work in a sweep.

    DoesNotFit is raised last: where all else is right and the strategy does not fit the model's blocks.
    """
    w, name = config.workload, config.device.name
    if config.mode is Mode.measure and not machine_has(config.device):
        todo = "add mode=predict to predict for it, or use device=auto"
        raise BadInput("device", name, "this machine has no such device", todo)
    AllocatorOptions.parse(config.device.alloc_conf, "device.alloc_conf")
    if config.mode is Mode.measure and _lacks_bf16(config):
        raise BadInput("workload.dtype", w.dtype.name, f"{name} has no bfloat16", "use fp32 or amp_fp16")
    data_key, model_key = digest(["data", w.data]), digest(["model", w.model, w.blocks])
    if data_key not in seen:
        source = seen[data_key] = build_data(w)
        checked(source.train_batch(0, w.global_batch_size), w.global_batch_size, source, "train_batch")
    if model_key not in seen:
        seen[model_key] = find_blocks(build_outline(w), w.blocks)
    try:
        check_blocks(config.strategy, seen[model_key])
    except BadInput as error:
        raise DoesNotFit(error.key, error.value, error.wrong, error.todo) from error


def check_known(config: Config, model: nn.Module) -> None:
    """Raise for what is known of a trial without running it.

    model: the workload's outline. Raises NotOnDevice for a number format that the device has not, NotEquivalent for
    micro-batches of a model that computes over the whole batch.
    """
    w = config.workload
    if _lacks_bf16(config):
        raise NotOnDevice(f"workload.dtype={w.dtype.name}: {config.device.name} has no bfloat16; use fp32 or amp_fp16")
    if micro_batch_size(config.strategy, w.global_batch_size) < w.global_batch_size:
        found = over_the_batch(model.train())  # as it is trained: what keeps its norms frozen says so itself
        if found:
            raise NotEquivalent(f"{found}, so micro-batches would not be equivalent", "batch_statistics")


def _lacks_bf16(config: Config) -> bool:
    """Whether it is asked for bfloat16 on a device that is known to have none."""
    unknown = config.device.type == "cuda" and config.device.compute_capability is None
    return config.workload.dtype in (Dtype.bf16, Dtype.amp_bf16) and not unknown and not has_bf16(config.device)
