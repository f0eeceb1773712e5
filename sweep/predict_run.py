"""A few optimizer steps on hollow tensors: the real step and strategy code, with nothing computed."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sweep.errors import CannotPredict
from sweep.memory.device import cublas_workspace_kept, cublas_workspace_mib
from sweep.memory.emulate import CublasWorkspaces, cuda_workspaces, emulated_cuda
from sweep.memory.emulate_device import CudaAnswers
from sweep.memory.hollow import CPU, hollow
from sweep.memory.hollow_ledger import HollowLedger
from sweep.results import MIB, Category, Phase
from sweep.schema import Config, DeviceConf, WorkloadConf, plain
from sweep.step import Phases, accumulate_gradients, run_step, split
from sweep.strategy import Applied, applied
from sweep.strategy import offload as offload_strategy
from sweep.strategy.copier import CudaCopier, PlainCopier
from sweep.workload import (
    Batch,
    Block,
    DataSource,
    Loss,
    Workload,
    build_optimizer,
    build_scheduler,
    build_workload,
    to_device,
)

STEPS = 2
MICRO_STEPS = 2
#: Workloads whose models are kept for the next prediction; they hold no memory.
KEPT_WORKLOADS = 4
#: Operator results that are remembered over predictions; a large sweep has a few thousand.
KEPT_RESULTS = 200_000

_workloads: OrderedDict[str, Workload] = OrderedDict()
_results: dict[bool, dict[Any, Any]] = {True: {}, False: {}}  # by whether CUDA is emulated


class HollowRun:
    """The steps, and what they left behind. Raises CannotPredict where a value would be needed."""

    def __init__(self, config: Config, device: DeviceConf, on_cuda: bool) -> None:
        self.config, self.device, self.on_cuda = config, device, on_cuda
        self.capability = _capability(device) if on_cuda else (0, 0)
        if len(_results[on_cuda]) > KEPT_RESULTS:
            _results[on_cuda].clear()
        cublas = _cublas(device) if on_cuda else None
        self.ledger = HollowLedger(
            workspaces=None if cublas is None else cuda_workspaces(cublas, device.multiprocessors),
            count_python_data=not on_cuda,
            known=_results[on_cuda],
            as_cuda=on_cuda,
        )
        if cublas is not None:
            cublas.ledger = self.ledger
        self.answers = CudaAnswers(device, self.capability, self.ledger) if on_cuda else None
        self.mark = 0  # where in the ledger's log the last step begins
        self.first_peak = 0  # bytes, of the first step
        self.to_host = self.from_host = 0  # bytes, of the last step as it was run
        self.flops: dict[str, float] = {}  # of the last step, by phase
        self.scale = 1.0  # whole window over what was run
        self.notes: list[str] = []  # of the strategy
        self.block_share: float | None = None  # of the activations that lie in the blocks

    def go(self, data: DataSource, steps: int, what: str, eval_batches: int) -> None:
        try:
            self._go(data, steps, what, eval_batches)
        except BaseException:
            _workloads.clear()  # whatever state a model was left in, it is not used again
            raise

    def _go(self, data: DataSource, steps: int, what: str, eval_batches: int) -> None:
        conf, ledger, phases = self.config.workload, self.ledger, Phases()
        workload = _hollow_workload(conf, data, self.device if self.on_cuda else None)
        batches = [_hollow_batch(workload, step) for step in range(steps)]
        with ExitStack() as stack:
            if self.on_cuda:
                stack.enter_context(emulated_cuda(self.capability, self.answers))
                stack.enter_context(_held_sources())
            workload = dataclasses.replace(workload, device=CPU if self.answers is None else self.answers.device)
            with ledger:  # some optimizers make their state at once
                workload = _fresh_optimizer(workload)
            strategy = stack.enter_context(
                applied(
                    self.config.strategy, workload.model, workload.blocks, conf.global_batch_size, phases,
                    workload.device,
                    workload.loss_state,
                )
            )
            stack.callback(_drop_gradients, workload)
            stack.enter_context(ledger)
            stack.enter_context(phases.listening(ledger))
            ledger.track(workload.model, workload.optimizer, workload.loss_state)
            for batch, targets in batches:
                self.first_peak = max(self.first_peak, ledger.peak_bytes)
                self.mark = len(ledger.log.order)
                ledger.reset_peak()
                ledger.flops.clear()
                strategy.moved.reset()
                loop = dataclasses.replace(workload, loss=_KnownCount(workload.loss, targets))
                _WHAT[what](loop, batch, phases, strategy)
                for _ in range(eval_batches):
                    _evaluate(loop, batch, phases, strategy)
            if what != "forward":
                strategy.require_effect()
                self.notes = strategy.notes()
                self.block_share = _share_of(workload.blocks, ledger, self.mark)
        self.to_host, self.from_host = strategy.moved.to_host_bytes, strategy.moved.from_host_bytes
        self.flops = dict(ledger.flops)
        samples = min(conf.global_batch_size, strategy.micro_batch_size * MICRO_STEPS)
        self.scale = conf.global_batch_size / samples


def _share_of(blocks: list[Block], ledger: HollowLedger, mark: int) -> float | None:
    """The share of the activations, by bytes, that were made within the blocks since `mark`. None: there are none."""
    log, names = ledger.log, tuple(f"{block.name}." for block in blocks)
    made = [id for id in log.order[mark:] if id >= 0 and log.category[id] is Category.activation]
    whole = sum(log.bytes[id] for id in made)
    inside = sum(log.bytes[id] for id in made if f"{log.module[id]}.".startswith(names))
    return inside / whole if whole else None


def _train(workload: Workload, batch: Batch, phases: Phases, strategy: Applied) -> None:
    run_step(
        workload,
        batch,
        phases,
        micro_batch_size=strategy.micro_batch_size,
        around_forward=strategy.around_forward,
        max_micro_steps=MICRO_STEPS,
    )


def _forward_backward(workload: Workload, batch: Batch, phases: Phases, strategy: Applied) -> None:
    workload.optimizer.zero_grad(set_to_none=True)
    parts = list(split(batch, strategy.micro_batch_size))[:MICRO_STEPS]
    accumulate_gradients(workload, parts, workload.loss.count(batch), phases, strategy.around_forward)


def _forward(workload: Workload, batch: Batch, phases: Phases, strategy: Applied) -> None:
    for part in list(split(batch, strategy.micro_batch_size))[:MICRO_STEPS]:
        with phases(Phase.data):
            inputs = to_device(part, workload.device)
        with phases(Phase.forward), torch.no_grad(), workload.autocast():
            workload.model(inputs["inputs"])


def _evaluate(workload: Workload, batch: Batch, phases: Phases, strategy: Applied) -> None:
    part = next(split(batch, strategy.micro_batch_size))
    with phases(Phase.data):
        inputs = to_device(part, workload.device)
    with workload.evaluating(), phases(Phase.forward), torch.no_grad(), workload.autocast():
        workload.loss(workload.model, inputs)


_WHAT = {"train": _train, "forward_backward": _forward_backward, "forward": _forward}


class _KnownCount:
    """A loss whose number of targets was counted on the real batch, since the hollow one has no values."""

    def __init__(self, loss: Loss, targets: int) -> None:
        self._loss, self._targets = loss, targets

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch)

    def count(self, batch: Batch) -> int:
        return self._targets


# -- the workload, without memory -----------------------------------------------------------------------------------


def _hollow_workload(conf: WorkloadConf, data: DataSource, device: DeviceConf | None) -> Workload:
    """The workload on hollow tensors. Its model is kept and used again: a step changes nothing in it.

    device: that is emulated where it is CUDA's, since a model may ask for it as it is made.
    """
    asked = [plain(dataclasses.replace(conf, global_batch_size=1)), None if device is None else plain(device)]
    key = json.dumps(asked, sort_keys=True)
    kept = _workloads.pop(key, None)
    if kept is None:
        ledger = HollowLedger(known=_results[False])
        told = nullcontext() if device is None else CudaAnswers(device, _capability(device), ledger).installed()
        with ledger, told:
            kept = build_workload(conf, CPU, data)
        for _, module in kept.modules_with_state():
            _refuse_compiled(module)
    _workloads[key] = kept
    while len(_workloads) > KEPT_WORKLOADS:
        _workloads.popitem(last=False)
    return dataclasses.replace(kept, conf=conf, data=data)


def _fresh_optimizer(workload: Workload) -> Workload:
    """The workload with optimizer, scheduler and scaler as they are before the first step."""
    optimizer = build_optimizer(workload.conf, *(m for _, m in workload.modules_with_state()))
    scaler = None if workload.scaler is None else torch.amp.GradScaler(workload.device.type)
    return dataclasses.replace(
        workload, optimizer=optimizer, scheduler=build_scheduler(workload.conf, optimizer), scaler=scaler
    )


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled or any(cls.__name__ == "ScriptModule" for cls in type(module).__mro__):
            kind = "compiled" if compiled else "a TorchScript module"
            raise CannotPredict(
                f"{name or 'the model'} is {kind}: its kernels and their memory are not known in advance"
            )


def _drop_gradients(workload: Workload) -> None:
    for parameter in workload.parameters():
        parameter.grad = None


def _hollow_batch(workload: Workload, step: int) -> tuple[Batch, int]:
    """A batch of the data's shapes with no memory, and the number of targets in the real one."""
    real = workload.train_batch(step)
    return {name: hollow(t.shape, t.dtype, t.stride()) for name, t in real.items()}, workload.loss.count(real)


# -- CUDA -----------------------------------------------------------------------------------------------------------


def _cublas(device: DeviceConf) -> CublasWorkspaces:
    return CublasWorkspaces(round(cublas_workspace_mib(device) * MIB), cublas_workspace_kept())


def _capability(device: DeviceConf) -> tuple[int, int]:
    if device.compute_capability is None:
        raise CannotPredict(f"device {device.name}: its compute capability is not known; set device.compute_capability")
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)


class _HoldingCopier(PlainCopier):
    """Keeps the sources of the copies that are under way, as the side stream of CudaCopier does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._flying: deque[Tensor] = deque(maxlen=CudaCopier.IN_FLIGHT)

    def to_host(self, flat: Tensor) -> Tensor:
        host = super().to_host(flat)
        self._flying.append(flat)
        return host

    def finish_forward(self) -> None:
        self._flying.clear()

    release = finish_forward


def _holding_copier_for(device: torch.device, *, pin: bool) -> _HoldingCopier:
    return _HoldingCopier(device)


@contextmanager
def _held_sources() -> Iterator[None]:
    original = offload_strategy.copier_for
    offload_strategy.copier_for = _holding_copier_for
    try:
        yield
    finally:
        offload_strategy.copier_for = original
