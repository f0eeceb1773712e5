"""What is wrong with a config by itself: values out of range, or against each other. Needs no model and no data."""

from __future__ import annotations

import math
import re

from sweep.config.schema import Config, Granularity, Mode, Placement, SearchConf
from sweep.errors import BadInput


def check(config: Config) -> None:
    """Raise BadInput for values that are wrong by themselves or against each other. Needs no model."""
    w, s, b, d, m = config.workload, config.strategy, config.budget, config.device, config.measure
    for key, name in (("strategy.name", s.name), ("workload.name", w.name), ("device.name", d.name)):
        if not name.strip() or set(name) & set("/\\\0") or name in (".", ".."):
            wrong = "is no name: folders are called by it"
            raise BadInput(key, repr(name), wrong, "give one without path separators, such as my_own")
    if not -(2**63) <= w.seed < 2**63:
        raise BadInput("workload.seed", w.seed, "has more than 64 bits", "give a smaller number")
    _at_least("workload.global_batch_size", w.global_batch_size, 1)
    _at_least("workload.seq_len", w.seq_len, 1)
    _above_zero("workload.optimizer.lr", w.optimizer.lr)
    _at_least("workload.optimizer.weight_decay", w.optimizer.weight_decay, 0)
    _above_zero("workload.grad_clip_norm", w.grad_clip_norm)
    _at_least("workload.scheduler.warmup_steps", w.scheduler.warmup_steps, 0)
    _at_least("workload.scheduler.total_steps", w.scheduler.total_steps, 1)
    for group, node in (("model", w.model), ("data", w.data), ("loss", w.loss)):
        if "_target_" not in node:
            raise BadInput(
                f"workload.{group}._target_", None, "is missing", "give the import path of a class or function"
            )

    patterns = w.blocks if isinstance(w.blocks, list) else [w.blocks]
    if w.blocks is not None and not (patterns and all(isinstance(p, str) and p.strip() for p in patterns)):
        todo = "give a pattern such as layers.*, or a list of them"
        raise BadInput("workload.blocks", w.blocks, "is no pattern of module names", todo)

    micro = s.micro_batch_size
    _at_least("strategy.micro_batch_size", micro, 1)
    if micro is not None and micro > w.global_batch_size:
        raise BadInput(
            "strategy.micro_batch_size",
            micro,
            f"is larger than the global batch of {w.global_batch_size} samples",
            f"give 1 to {w.global_batch_size}, or raise workload.global_batch_size",
        )
    c, o = s.checkpoint, s.offload
    _at_least("strategy.checkpoint.every_k", c.every_k, 1)
    _at_least("strategy.checkpoint.segment_size", c.segment_size, 1)
    if c.granularity is Granularity.parts and not c.parts:
        raise BadInput(
            "strategy.checkpoint.parts", [], "names no part of a block", "give patterns such as [attn] or [mlp]"
        )
    _at_least("strategy.offload.min_tensor_kib", o.min_tensor_kib, 0)
    _at_least("strategy.offload.keep_last", o.keep_last, 0)
    if o.placement is Placement.blocks and not o.blocks:
        raise BadInput(
            "strategy.offload.blocks", o.blocks, "names no block", "give first:N, every:K or a list such as 0,3,5"
        )

    for name in ("memory_mib", "min_samples_per_s", "max_eval_loss"):
        _above_zero(f"budget.{name}", getattr(b, name))
    for name in ("min_throughput_ratio", "max_eval_loss_ratio", "min_saving_mib"):
        _at_least(f"budget.{name}", getattr(b, name), 0)

    if d.type not in ("auto", "cpu", "cuda"):
        raise BadInput("device.type", d.type, "is not a kind of device", "give auto, cpu or cuda")
    _above_zero("device.capacity_mib", d.capacity_mib)
    _at_least("device.index", d.index, 0)
    _at_least("device.cublas_workspace_mib", d.cublas_workspace_mib, 0)
    if d.compute_capability is not None and not re.fullmatch(r"\d+\.\d+", str(d.compute_capability)):
        raise BadInput("device.compute_capability", d.compute_capability, "is no version", "give one such as '8.9'")
    for dtype, tflops in d.peak_tflops.items():
        _above_zero(f"device.peak_tflops.{dtype}", tflops)
    _at_least("device.context_mib", d.context_mib, 0)
    for name in ("memory_bandwidth_gb_s", "link_bandwidth_gb_s"):
        _above_zero(f"device.{name}", getattr(d, name))
    _at_least("measure.warmup_steps", m.warmup_steps, 0)
    _at_least("measure.steps", m.steps, 1)
    _at_least("measure.repeats", m.repeats, 1)
    _at_least("measure.seeds", m.seeds, 1)
    _at_least("measure.eval_batches", m.eval_batches, 0)
    if m.verify not in (True, False, "quick"):
        raise BadInput("measure.verify", m.verify, "is no way to verify", "give true, false or quick")
    _at_least("measure.verify_steps", m.verify_steps, 1)
    _above_zero("measure.timeout_s", m.timeout_s)
    _check_search(config.search, w.global_batch_size)
    if config.mode is Mode.diagnose:
        check_diagnosis(config)


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


def _check_search(s: SearchConf, global_batch_size: int) -> None:
    _at_least("search.n_trials", s.n_trials, 1)
    _above_zero("search.timeout_s", s.timeout_s)
    _at_least("search.margin", s.margin, 0)
    _at_least("search.plan_points", s.plan_points, 0)
    _at_least("search.report_best", s.report_best, 1)
    for key, least in (("micro_batch_sizes", 1), ("every_k", 1), ("first_blocks", 1), ("min_tensor_kib", 0)):
        for value in getattr(s.space, key) or ():
            _at_least(f"search.space.{key}", value, least)
    for size in s.space.micro_batch_sizes or ():
        if size > global_batch_size:
            raise BadInput(
                "search.space.micro_batch_sizes",
                size,
                f"is larger than the global batch of {global_batch_size} samples",
                f"give 1 to {global_batch_size}",
            )
    if not s.space.placements:
        raise BadInput("search.space.placements", "[]", "leaves nothing to choose", "give [none] for no offload")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise BadInput(key, value, f"is below {least}", f"give {least} or more")


def _above_zero(key: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise BadInput(key, value, "is not above zero", "give a positive number")
