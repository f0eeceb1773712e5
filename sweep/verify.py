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
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sweep.outcomes import NotFinite, is_out_of_memory
from sweep.results import MIB, Verification
from sweep.schema import Config, Dtype, Granularity, StrategyConf, WorkloadConf
from sweep.step import Phases, run_step
from sweep.strategy import applied, micro_batch_size
from sweep.workload import Batch, DataSource, Workload, build_outline, build_workload

#: Largest relative error allowed. fp32: sums in another order. 16-bit: a few units of the last place (2**-8 for bf16,
#: 2**-11 for fp16), since micro-batches round each partial gradient.
TOLERANCE = {Dtype.fp32: 1e-4, Dtype.amp_bf16: 3e-2, Dtype.bf16: 3e-2, Dtype.amp_fp16: 1e-2}
FLOOR = 1e-3
#: Larger tensors are compared at evenly spaced elements, so that a large vocabulary does not fill the host.
ELEMENTS_PER_SAMPLE = 2**18


@dataclass
class Record:
    """What one run of a few steps computed, on the host."""

    loss: list[float] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    block_inputs: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rng: list[Tensor] = field(default_factory=list)
    updates: int = 0
    scheduler_steps: int = 0
    batch_dependent: list[str] = field(default_factory=list)  # modules that compute from the whole batch


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
        return _run(workload_conf, s, strategy, device, data, steps, dropout=not accumulates, blocks_kept=blocks_kept)

    expected = run(baseline)
    actual = run(strategy)
    if reduced:
        scope = f"reduced: at most {blocks_kept} blocks, {workload_conf.global_batch_size} samples"
    return judge(expected, actual, TOLERANCE[workload_conf.dtype], dropout=not accumulates, steps=steps, scope=scope)


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


def _run(
    conf: WorkloadConf, strategy: StrategyConf, watched: StrategyConf, device: torch.device, data: DataSource,
    steps: int, *, dropout: bool, blocks_kept: int | None,
) -> Record:  # fmt: skip
    record, phases = Record(), Phases()
    workload = build_workload(conf, device, data)
    if blocks_kept is not None:
        _keep_blocks(workload, blocks_kept)
    record.batch_dependent = [n for n, m in workload.model.named_modules() if isinstance(m, _BATCH_DEPENDENT)]
    torch.manual_seed(conf.seed + 1)  # dropout
    with ExitStack() as stack:
        strategy_in_force = stack.enter_context(
            applied(strategy, workload.model, workload.blocks, conf.global_batch_size, phases, device)
        )
        if not dropout:
            stack.enter_context(NoDropout())
        handle = workload.optimizer.register_step_post_hook(lambda *_: _count(record))
        stack.callback(handle.remove)
        for step in range(steps):
            watching = stack.enter_context(_watching(workload, watched)) if step == steps - 1 else None
            result = run_step(
                workload,
                _batch(workload, step),
                phases,
                micro_batch_size=strategy_in_force.micro_batch_size,
                around_forward=strategy_in_force.around_forward,
            )
            record.loss.append(result.loss.item())
            if not math.isfinite(record.loss[-1]) and strategy is not watched:
                raise NotFinite(f"the baseline's loss is {record.loss[-1]} in step {step + 1} of the verification")
    assert watching is not None
    record.outputs, record.block_inputs = watching.outputs(), watching.block_inputs()
    record.grads = {n: _host(p.grad) for n, p in workload.model.named_parameters() if p.grad is not None}
    record.buffers = {n: _host(b) for n, b in workload.model.named_buffers()}
    record.rng = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    if workload.scheduler is not None:
        record.scheduler_steps = workload.scheduler.last_epoch
    return record


def _count(record: Record) -> None:
    record.updates += 1


def _batch(workload: Workload, step: int) -> Batch:
    return workload.train_batch(step)


def _keep_blocks(workload: Workload, count: int) -> None:
    parent, _, _ = workload.blocks[0].name.rpartition(".") if workload.blocks else ("", "", "")
    container = workload.model.get_submodule(parent)
    if workload.blocks and isinstance(container, (nn.ModuleList, nn.Sequential)) and len(workload.blocks) > count:
        dropped = {id(b.module) for b in workload.blocks[count:]}
        keep = [(n, m) for n, m in container.named_children() if id(m) not in dropped]
        container._modules.clear()
        for index, (_, module) in enumerate(keep):
            container.add_module(str(index), module)
        workload.blocks = workload.blocks[:count]


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


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class _Watch:
    """Collects outputs and the gradients at the block inputs, sample by sample, over a window of micro-batches."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._inputs: dict[str, list[Tensor | None]] = defaultdict(list)

    def outputs(self) -> dict[str, Tensor]:
        return {n: torch.cat(parts) for n, parts in self._outputs.items()}

    def block_inputs(self) -> dict[str, Tensor]:
        joined = {n: [p for p in parts if p is not None] for n, parts in self._inputs.items()}
        return {n: torch.cat(parts) for n, parts in joined.items() if parts}

    def saw_output(self, _: nn.Module, __: Any, output: Any) -> None:
        for name, tensor in _tensors(output):
            if tensor.dim() and tensor.is_floating_point():
                self._outputs[name].append(_sampled(tensor))

    def watch_input(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for tensor in [*args, *kwargs.values()]:
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.dim():
                    slot = len(self._inputs[name])
                    self._inputs[name].append(None)
                    tensor.register_hook(lambda grad, slot=slot: self._fill(name, slot, grad))
                    return

        return hook

    def _fill(self, name: str, slot: int, grad: Tensor) -> None:
        self._inputs[name][slot] = _sampled(grad)


@contextmanager
def _watching(workload: Workload, strategy: StrategyConf) -> Iterator[_Watch]:
    watch = _Watch()
    # Blocks inside a segment are computed by its first one, so only that one's input exists in both runs.
    c = strategy.checkpoint
    stride = c.segment_size if c.granularity is Granularity.segments else 1
    handles = [workload.model.register_forward_hook(watch.saw_output)]
    for block in workload.blocks[::stride]:
        handles.append(block.module.register_forward_pre_hook(watch.watch_input(block.name), with_kwargs=True))
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any, prefix: str = "output") -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield prefix, output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from _tensors(value, f"{prefix}.{key}")
    elif isinstance(output, (list, tuple)):
        for index, value in enumerate(output):
            yield from _tensors(value, f"{prefix}.{index}")


def _sampled(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().unsqueeze(1)
    every = -(-flat.shape[1] // ELEMENTS_PER_SAMPLE)
    return _host(flat[:, ::every])


_BATCH_DEPENDENT = (nn.modules.batchnorm._BatchNorm,)


class NoDropout(TorchFunctionMode):
    """Dropout has no effect inside, whichever module or function asks for it; all else stays in training mode."""

    _FUNCTIONAL = frozenset(
        {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
    )
    _PRIMITIVE = frozenset({torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            # A mode is off while it handles a call, but checkpointed blocks are computed again in backward, and without
            # dropout as well. The engine is called itself: all functions in front of it come back to this handler.
            loss = args[0]
            with self:
                return torch.autograd.Variable._execution_engine.run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if func in self._FUNCTIONAL or func in self._PRIMITIVE:
            return kwargs["input"] if "input" in kwargs else args[0]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) <= 4:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
