"""Does a strategy compute what the baseline computes? Checked before anything is measured.

Both start from the same seed and see the same batches. Compared: loss, outputs, every parameter's gradient, the
gradients at the block inputs, buffers, the random state after the step, and the numbers of optimizer and scheduler
steps.

The relative error of a tensor is ||a - b|| / max(||b||, FLOOR * ||all tensors of its kind||): tensors whose true value
is zero (the gradient of an attention's key bias, say) hold rounding noise only and must not decide. Infinities and NaNs
(a mask's -inf, an overflow before the scaler has settled) must be the same in both and are left out of the norms.
"""

from __future__ import annotations

import copy
import gc
import json
import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from sweep.outcomes import is_out_of_memory
from sweep.results import MIB, Verification
from sweep.schema import Config, Dtype, Granularity, StrategyConf, WorkloadConf, plain
from sweep.strategy import micro_batch_size
from sweep.verify_run import NoDropout, Record, run_and_record
from sweep.workload import DataSource, build_outline

__all__ = ["FLOOR", "TOLERANCE", "NoDropout", "Record", "judge", "verify"]

#: Largest relative error allowed. fp32: sums in another order. 16-bit: a few units of the last place (2**-8 for bf16,
#: 2**-11 for fp16), since micro-batches round each partial gradient.
TOLERANCE = {Dtype.fp32: 1e-4, Dtype.amp_bf16: 3e-2, Dtype.bf16: 3e-2, Dtype.amp_fp16: 1e-2}
FLOOR = 1e-3


def verify(config: Config, device: torch.device, data: DataSource, capacity_mib: float | None = None) -> Verification:
    """Compare `config.strategy` with the baseline on `device`; on fewer blocks and a smaller batch where it must be."""
    too_large = _gradients_do_not_fit(config, device, capacity_mib)
    if not too_large:
        try:
            return _compare(config, device, data, reduced=False)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler: the traceback held the failed attempt's tensors.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return _compare(config, device, data, reduced=True)


def _gradients_do_not_fit(config: Config, device: torch.device, capacity_mib: float | None) -> bool:
    """Whether parameters and two copies of the gradients exceed the device."""
    if capacity_mib is None:
        return False
    size = sum(p.numel() * p.element_size() for p in build_outline(config.workload).parameters())
    return 3 * size > capacity_mib * MIB


def _compare(config: Config, device: torch.device, data: DataSource, *, reduced: bool) -> Verification:
    steps = config.measure.verify_steps
    strategy, workload_conf = config.strategy, config.workload
    accumulates = micro_batch_size(strategy, workload_conf.global_batch_size) < workload_conf.global_batch_size
    scope, blocks_kept = "full", None
    if reduced:
        workload_conf, strategy, blocks_kept = _reduce(workload_conf, strategy)
    baseline = StrategyConf(name="baseline")

    def run(s: StrategyConf) -> Record:
        return run_and_record(
            workload_conf, s, strategy, device, data, steps, dropout=not accumulates, blocks_kept=blocks_kept
        )

    c = strategy.checkpoint
    watched = c.segment_size if c.granularity is Granularity.segments else 1
    key = [plain(workload_conf), str(device), data.version, steps, accumulates, blocks_kept, watched]
    expected = _reference(json.dumps(key, sort_keys=True), lambda: run(baseline))
    actual = run(strategy)
    if reduced:
        scope = f"reduced: at most {blocks_kept} blocks, {workload_conf.global_batch_size} samples"
    return judge(expected, actual, TOLERANCE[workload_conf.dtype], dropout=not accumulates, steps=steps, scope=scope)


#: What the baseline computed, by everything that it depends on. A sweep in one process compares all its trials with two
#: of them: one with dropout on, one with dropout off.
_references: OrderedDict[str, Record] = OrderedDict()
KEPT_REFERENCES = 2


def _reference(key: str, compute: Callable[[], Record]) -> Record:
    if key not in _references:
        record = compute()
        while len(_references) >= KEPT_REFERENCES:
            _references.popitem(last=False)
        _references[key] = record
    return _references[key]


def _reduce(workload: WorkloadConf, strategy: StrategyConf) -> tuple[WorkloadConf, StrategyConf, int]:
    """Few blocks of the same model, four samples in as many micro-batches as the strategy would make, at most 4."""
    workload, strategy = copy.deepcopy(workload), copy.deepcopy(strategy)
    samples = min(4, workload.global_batch_size)
    if strategy.micro_batch_size is not None:
        strategy.micro_batch_size = max(1, strategy.micro_batch_size * samples // workload.global_batch_size)
    workload.global_batch_size = samples
    c, o = strategy.checkpoint, strategy.offload
    blocks = max(2, o.keep_last + 1, c.every_k + 1 if c.every_k > 1 else 1, c.segment_size)
    if c.granularity is Granularity.segments:
        blocks = max(blocks, c.segment_size + 1)
    if o.blocks and not o.blocks.startswith(("first:", "every:")):
        o.blocks = "first:1"
    elif o.blocks and o.blocks.startswith("first:"):
        o.blocks = f"first:{min(int(o.blocks[6:]), blocks - o.keep_last)}"
    o.min_tensor_kib = 0.0
    return workload, strategy, blocks


def judge(
    expected: Record, actual: Record, tolerance: float, *, dropout: bool = True, steps: int = 1, scope: str = "full"
) -> Verification:
    """Compare two records of `steps` optimizer steps."""
    loss = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(actual.loss, expected.loss, strict=True))
    found = {
        "loss": (loss, ""),
        "outputs": _largest_error(expected.outputs, actual.outputs),
        "gradients": _largest_error(expected.grads, actual.grads),
        "gradients at the block inputs": _largest_error(expected.block_inputs, actual.block_inputs),
        "buffers": _largest_error(expected.buffers, actual.buffers),
    }
    errors = {name: error for name, (error, _) in found.items()}
    rng_equal = all(map(torch.equal, expected.rng, actual.rng)) if dropout else None
    wrong = [
        f"{name} differ by {error:.2g}" + (f", most at {where}" if where else "")
        for name, (error, where) in found.items()
        if not error <= tolerance
    ]
    if rng_equal is False:
        wrong.append("the random state after the step differs")
    if actual.updates != expected.updates:
        wrong.append(f"{actual.updates} optimizer steps instead of {expected.updates}")
    if actual.scheduler_steps != expected.scheduler_steps:
        wrong.append(f"{actual.scheduler_steps} scheduler steps instead of {expected.scheduler_steps}")
    finite = [e for e in errors.values() if math.isfinite(e)]
    reason = "; ".join(wrong)
    if wrong and actual.batch_dependent and not dropout:
        reason += f"; {actual.batch_dependent[0]} computes its result from the whole batch, so micro-batches change it"
    return Verification(
        passed=not wrong,
        tolerance=tolerance,
        max_rel_err=max(errors.values()) if len(finite) == len(errors) else None,
        loss_rel_err=errors["loss"],
        output_rel_err=errors["outputs"],
        grad_rel_err=errors["gradients"],
        grad_worst=found["gradients"][1],
        block_input_grad_rel_err=errors["gradients at the block inputs"],
        buffer_rel_err=errors["buffers"],
        rng_equal=rng_equal,
        updates_expected=expected.updates,
        updates=actual.updates,
        bit_equal=not wrong and not any(errors.values()),
        dropout="on" if dropout else "off",
        scope=scope,
        reason=reason,
        notes=[] if dropout else ["compared with dropout off: micro-batches draw other masks than the whole batch"],
    )


def _largest_error(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error and where it is. Infinite where a tensor is missing, misshapen or not a number."""
    if expected.keys() != actual.keys():
        return math.inf, ", ".join(sorted(expected.keys() ^ actual.keys())[:3])
    norms = {n: _norm(_finite(t)) for n, t in expected.items()}
    floor = FLOOR * math.sqrt(sum(v * v for v in norms.values()))
    largest, where = 0.0, ""
    for name, reference in expected.items():
        other = actual[name]
        if other.shape != reference.shape:
            return math.inf, name
        if not _same_specials(other, reference):
            return math.inf, name
        difference = 0.0 if torch.equal(other, reference) else _norm(_finite(other) - _finite(reference))
        error = difference / max(norms[name], floor) if difference else 0.0
        if not math.isfinite(error):
            return math.inf, name
        if error > largest:
            largest, where = error, name
    return largest, where


def _norm(tensor: Tensor) -> float:
    return tensor.norm().item()


def _finite(tensor: Tensor) -> Tensor:
    """In double precision, with zeros for infinities and NaNs: a causal mask's -inf must not hide every other error."""
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0.0)


def _same_specials(a: Tensor, b: Tensor) -> bool:
    """Whether infinities and NaNs are the same ones in the same places."""
    special = ~a.isfinite()
    if not torch.equal(special, ~b.isfinite()):
        return False
    return not special.any() or torch.allclose(a[special], b[special], equal_nan=True)
