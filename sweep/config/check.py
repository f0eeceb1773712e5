"""From a composed config to `Config`: unknown keys refused, values checked by themselves and against each other.

Needs no model and no data: what depends on the model is checked by `sweep.strategy.check_blocks`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sweep.config.addresses import conceal
from sweep.config.schema import Config, Granularity, Mode, Placement, StrategyConf, TrackingConf
from sweep.errors import BadInput

#: The least value of each field, or of each value in a list.
AT_LEAST = {
    "workload.global_batch_size": 1, "workload.seq_len": 1, "workload.optimizer.weight_decay": 0,
    "workload.scheduler.warmup_steps": 0, "workload.scheduler.total_steps": 1,
    "strategy.micro_batch_size": 1, "strategy.checkpoint.every_k": 1, "strategy.checkpoint.segment_size": 1,
    "strategy.offload.min_tensor_kib": 0, "strategy.offload.keep_last": 0,
    "budget.min_throughput_ratio": 0, "budget.max_eval_loss_ratio": 0, "budget.min_saving_mib": 0,
    "device.index": 0, "device.cublas_workspace_mib": 0, "device.context_mib": 0,
    "measure.warmup_steps": 0, "measure.steps": 1, "measure.repeats": 1, "measure.seeds": 1,
    "measure.eval_batches": 0, "measure.verify_steps": 1,
    "search.n_trials": 1, "search.margin": 0, "search.plan_points": 0, "search.report_best": 1,
    "search.space.micro_batch_sizes": 1, "search.space.every_k": 1, "search.space.first_blocks": 1,
    "search.space.min_tensor_kib": 0,
}  # fmt: skip
ABOVE_ZERO = (
    "workload.optimizer.lr", "workload.grad_clip_norm", "budget.memory_mib", "budget.min_samples_per_s",
    "budget.max_eval_loss", "device.capacity_mib", "device.memory_bandwidth_gb_s", "device.link_bandwidth_gb_s",
    "device.peak_tflops", "measure.timeout_s", "search.timeout_s",
)  # fmt: skip


def typed(cfg: DictConfig | dict[str, Any], *, whole: bool = True) -> Config:
    """The composed config as dataclasses, interpolations resolved and values checked. Raises BadInput.

    MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME stand where the config leaves these at their defaults.

    whole: False for one that lacks the words that a search adds, so that nothing can be said of several fields yet.
    """
    node = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(cfg)
    _refuse_unknown(node, Config, "")
    if OmegaConf.get_type(node) is not Config:
        node = OmegaConf.merge(OmegaConf.structured(Config), node)  # type: ignore[assignment]
    config = OmegaConf.to_object(node)
    assert isinstance(config, Config)
    if whole:
        check(config)
    t = config.tracking
    t.uri = t.uri if t.uri is not None else os.environ.get("MLFLOW_TRACKING_URI") or None
    if t.experiment == TrackingConf().experiment:
        t.experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or t.experiment
    if t.uri is not None:
        t.uri = conceal(t.uri)
    return config


def _refuse_unknown(node: DictConfig, cls: Any, prefix: str) -> None:
    """Hydra's + adds keys that no one reads. Raise BadInput for them, as for any other unknown key."""
    hints = typing.get_type_hints(cls)
    for key in map(str, node):
        if key not in hints:
            raise BadInput(f"{prefix}{key}", node._get_node(key), "there is no such key", "leave it out; see --help")
        if dataclasses.is_dataclass(hints[key]) and not OmegaConf.is_missing(node, key) and node[key] is not None:
            _refuse_unknown(node[key], hints[key], f"{prefix}{key}.")


def check(config: Config) -> None:
    """Raise BadInput for values that are wrong by themselves or against each other."""
    _check_least(vars(config), AT_LEAST)
    for key in ABOVE_ZERO:
        for name, value in _values(config, key):
            if not 0 < value < math.inf:
                raise BadInput(name, value, "is not above zero", "give a positive number")
    _check_workload(config)
    check_strategy(config.strategy)
    if config.strategy.micro_batch_size is not None:
        _within_batch(config, "strategy.micro_batch_size", config.strategy.micro_batch_size)
    d, m, space = config.device, config.measure, config.search.space
    if d.type not in ("auto", "cpu", "cuda"):
        raise BadInput("device.type", d.type, "is not a kind of device", "give auto, cpu or cuda")
    if d.compute_capability is not None and not re.fullmatch(r"\d+\.\d+", str(d.compute_capability)):
        raise BadInput("device.compute_capability", d.compute_capability, "is no version", "give one such as '8.9'")
    if m.verify not in (True, False, "quick"):
        raise BadInput("measure.verify", m.verify, "is no way to verify", "give true, false or quick")
    for size in space.micro_batch_sizes or ():
        _within_batch(config, "search.space.micro_batch_sizes", size)
    if not space.placements:
        raise BadInput("search.space.placements", "[]", "leaves nothing to choose", "give [none] for no offload")
    if config.mode is Mode.diagnose:
        check_diagnosis(config)


def _check_least(groups: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        for name, value in _values(SimpleNamespace(**groups), key):
            if not value >= AT_LEAST[key]:
                raise BadInput(name, value, f"is below {AT_LEAST[key]}", f"give {AT_LEAST[key]} or more")


def _values(config: Any, key: str) -> list[tuple[str, float]]:
    """The numbers that a field holds, each with its own key; none where it is null."""
    value = attrgetter(key)(config)
    if isinstance(value, dict):
        return [(f"{key}.{name}", inner) for name, inner in value.items()]
    return [(key, inner) for inner in (value if isinstance(value, list) else [value]) if inner is not None]


def _check_workload(config: Config) -> None:
    w = config.workload
    for key, name in (
        ("strategy.name", config.strategy.name),
        ("workload.name", w.name),
        ("device.name", config.device.name),
    ):
        if not name.strip() or set(name) & set("/\\\0") or name in (".", ".."):
            wrong = "is no name: folders are called by it"
            raise BadInput(key, repr(name), wrong, "give one without path separators, such as my_own")
    if not -(2**63) <= w.seed < 2**63:
        raise BadInput("workload.seed", w.seed, "has more than 64 bits", "give a smaller number")
    for group, node in (("model", w.model), ("data", w.data), ("loss", w.loss)):
        if "_target_" not in node:
            todo = "give the import path of a class or function"
            raise BadInput(f"workload.{group}._target_", None, "is missing", todo)
    patterns = w.blocks if isinstance(w.blocks, list) else [w.blocks]
    if w.blocks is not None and not (patterns and all(isinstance(p, str) and p.strip() for p in patterns)):
        todo = "give a pattern such as layers.*, or a list of them"
        raise BadInput("workload.blocks", w.blocks, "is no pattern of module names", todo)


def check_strategy(s: StrategyConf) -> None:
    """Raise BadInput for values of a strategy that are wrong whatever the workload is."""
    _check_least({"strategy": s}, [key for key in AT_LEAST if key.startswith("strategy.")])
    if s.checkpoint.granularity is Granularity.parts and not s.checkpoint.parts:
        todo = "give patterns such as [attn] or [mlp]"
        raise BadInput("strategy.checkpoint.parts", [], "names no part of a block", todo)
    if s.offload.placement is Placement.blocks and not s.offload.blocks:
        todo = "give first:N, every:K or a list such as 0,3,5"
        raise BadInput("strategy.offload.blocks", s.offload.blocks, "names no block", todo)


def _within_batch(config: Config, key: str, samples: int) -> None:
    most = config.workload.global_batch_size
    if samples > most:
        todo = f"give 1 to {most}, or raise workload.global_batch_size"
        raise BadInput(key, samples, f"is larger than the global batch of {most} samples", todo)


def check_diagnosis(config: Config) -> None:
    """A diagnosis looks at the baseline and predicts; what asks for more than that would be left out silently."""
    if config.search.name is not None:
        raise BadInput("search", config.search.name, "mode=diagnose searches for nothing", "leave one of the two out")
    s = config.strategy
    plain = s.checkpoint.granularity is Granularity.none and s.offload.placement is Placement.none
    if s.name != "baseline" or not plain or s.micro_batch_size is not None:
        name = s.name if s.name != "baseline" else "baseline, changed"
        wrong = "mode=diagnose looks at the baseline, and predicts every kind of strategy beside it"
        raise BadInput("strategy", name, wrong, "leave it out, or take mode=predict for this one")
    if config.explain:
        raise BadInput("explain", True, "mode=diagnose runs nothing that could be traced", "leave it out")
