"""One run of a few steps, and everything that verification compares of it, on the host."""

from __future__ import annotations

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

from sweep.outcomes import NotFinite
from sweep.schema import Granularity, StrategyConf, WorkloadConf
from sweep.step import Phases, run_step
from sweep.strategy import applied
from sweep.workload import DataSource, Workload, build_workload

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


def run_and_record(
    conf: WorkloadConf, strategy: StrategyConf, watched: StrategyConf, device: torch.device, data: DataSource,
    steps: int, *, dropout: bool, blocks_kept: int | None,
) -> Record:  # fmt: skip
    """Run `steps` optimizer steps of `conf` under `strategy` from the seed and keep what the last one computed.

    watched: the strategy under verification, whose layout decides which block inputs exist in both runs. dropout: off
    where the masks cannot be equal. blocks_kept: cut the model to so many blocks.
    """
    record, phases = Record(), Phases()
    workload = build_workload(conf, device, data)
    if blocks_kept is not None:
        _keep_blocks(workload, blocks_kept)
    record.batch_dependent = [n for n, m in workload.model.named_modules() if isinstance(m, _BATCH_DEPENDENT)]
    torch.manual_seed(conf.seed + 1)  # dropout
    with ExitStack() as stack:
        strategy_in_force = stack.enter_context(
            applied(
                strategy, workload.model, workload.blocks, conf.global_batch_size, phases, device, workload.loss_state
            )
        )
        if not dropout:
            stack.enter_context(NoDropout())
        handle = workload.optimizer.register_step_post_hook(lambda *_: _count(record))
        stack.callback(handle.remove)
        for step in range(steps):
            watching = stack.enter_context(_watching(workload, watched)) if step == steps - 1 else None
            result = run_step(
                workload,
                workload.train_batch(step),
                phases,
                micro_batch_size=strategy_in_force.micro_batch_size,
                around_forward=strategy_in_force.around_forward,
            )
            record.loss.append(result.loss.item())
            if not math.isfinite(record.loss[-1]) and strategy is not watched:
                raise NotFinite(f"the baseline's loss is {record.loss[-1]} in step {step + 1} of the verification")
    assert watching is not None
    record.outputs, record.block_inputs = watching.outputs(), watching.block_inputs()
    record.grads = {n: _host(p.grad) for n, p in workload.named_parameters() if p.grad is not None}
    record.buffers = {n: _host(b) for n, b in workload.named_buffers()}
    record.rng = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    if workload.scheduler is not None:
        record.scheduler_steps = workload.scheduler.last_epoch
    return record


def _count(record: Record) -> None:
    record.updates += 1


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
