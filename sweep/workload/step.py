"""One optimizer step over micro-batches, and the phases that it goes through.

The global batch is kept whatever the micro-batch size: each micro-batch's loss sum is divided by the number of targets
of the whole window, so that unequal, shorter and fully ignored micro-batches add up to exactly the gradient of the
undivided batch, and there is one optimizer step and one scheduler step per global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sweep.results import Phase
from sweep.workload import Batch, Workload, to_device
from sweep.workload.data import part_of, samples_in

#: Details of Phase.transfer: which way the bytes go.
TO_HOST, FROM_HOST = "to host", "from host"


class PhaseListener(Protocol):
    def enter_phase(self, phase: str) -> None: ...

    def leave_phase(self, phase: str) -> None: ...


class Phases:
    """Where a step is. Shared by the step, the strategies and whoever listens (clock, ledger, profiler).

    A plain stack and not a context variable: recomputation and transfers are entered from autograd's own threads, while
    the thread that called backward() waits.
    """

    def __init__(self) -> None:
        self.stack: list[Phase] = []
        self.details: list[str] = []  # beside the stack: which of a phase's kinds it is, "" where there is one only
        self._listeners: list[PhaseListener] = []

    @contextmanager
    def __call__(self, phase: Phase, detail: str = "") -> Iterator[None]:
        self.stack.append(phase)
        self.details.append(detail)
        for listener in self._listeners:
            listener.enter_phase(phase.value)
        try:
            yield
        finally:
            self.stack.pop()
            self.details.pop()
            for listener in reversed(self._listeners):
                listener.leave_phase(phase.value)

    @contextmanager
    def listening(self, listener: PhaseListener) -> Iterator[None]:
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


class Outputs:
    """What the model returned in a micro-batch, held as the name holds it in `logits = model(x)` of a training loop.

    It goes when the next micro-batch's first output is there, and when the optimizer's step has ended.
    """

    def __init__(self) -> None:
        self._replaced = False

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Hold what `model` returns, inside."""
        if model._compiled_call_impl is not None:  # compiled in place: a hook would become a part of its code
            yield
            return
        hook = model.register_forward_hook(self._returned)
        try:
            yield
        finally:
            hook.remove()
            self.release()

    def next_micro_batch(self) -> None:
        self._replaced = True

    def _returned(self, module: nn.Module, given: Any, output: Any) -> None:
        if self._replaced:
            self.release()
        self._replaced = False
        self.hold(output)

    def hold(self, output: Any) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError


class HeldOutputs(Outputs):
    def __init__(self) -> None:
        super().__init__()
        self._held: list[Any] = []

    def hold(self, output: Any) -> None:
        self._held.append(output)

    def release(self) -> None:
        self._held.clear()


@dataclass
class StepResult:
    loss: Tensor  # 0-dim, on the device: mean over the window's targets
    targets: int  # that the loss was divided by
    micro_steps: int
    updates: int  # optimizer steps taken (0: a gradient scaler skipped it)


def run_step(
    workload: Workload,
    batch: Batch,
    phases: Phases,
    *,
    micro_batch_size: int | None = None,
    around_forward: Callable[[], AbstractContextManager[object]] = nullcontext,
    max_micro_steps: int | None = None,
    outputs: Outputs | None = None,
) -> StepResult:
    """Run one optimizer step on `batch` (host tensors, dimension 0 the sample).

    `around_forward` is entered around model and loss of each micro-batch (the strategy's saved-tensor hooks).
    `max_micro_steps` cuts the window short; prediction uses it, since the peak repeats from the second micro-step on.
    `outputs` holds the model's outputs where `workload.hold_outputs` asks for it.
    """
    workload.optimizer.zero_grad(set_to_none=True)
    targets = workload.loss.count(batch)
    parts = list(split(batch, micro_batch_size))[:max_micro_steps]
    with holding(workload, outputs) as held:
        loss = accumulate_gradients(workload, parts, targets, phases, around_forward, held)
        with phases(Phase.optimizer):
            updates = update(workload)
    return StepResult(loss, targets, len(parts), updates)


@contextmanager
def holding(workload: Workload, outputs: Outputs | None = None) -> Iterator[Outputs | None]:
    """The model's outputs are held, inside, where `workload.hold_outputs` asks for it."""
    if not workload.conf.hold_outputs:
        yield None
        return
    outputs = HeldOutputs() if outputs is None else outputs
    with outputs.of(workload.model):
        yield outputs


def accumulate_gradients(
    workload: Workload,
    parts: list[Batch],
    targets: int,
    phases: Phases,
    around_forward: Callable[[], AbstractContextManager[object]] = nullcontext,
    outputs: Outputs | None = None,
) -> Tensor:
    """Forward and backward over the window's micro-batches. Returns the mean loss over `targets`, 0-dim."""
    total: Tensor | None = None
    for part in parts:
        if outputs is not None:
            outputs.next_micro_batch()
        with phases(Phase.data):
            inputs = to_device(part, workload.device)
        with phases(Phase.forward), around_forward(), workload.autocast():
            loss = workload.loss(workload.model, inputs) / max(targets, 1)
        with phases(Phase.backward):
            scaled = loss if workload.scaler is None else workload.scaler.scale(loss)
            scaled.backward()
        total = loss.detach() if total is None else total + loss.detach()
        del loss, scaled, inputs  # the next micro-batch must not find the last one's graph in memory
    assert total is not None, "a batch has at least one sample"
    return total


def evaluate_part(workload: Workload, part: Batch, phases: Phases) -> Tensor:
    """The loss of a held-out micro-batch, in evaluation mode. 0-dim, on the device."""
    with phases(Phase.data):
        inputs = to_device(part, workload.device)
    with workload.evaluating(), phases(Phase.evaluation), workload.autocast():
        return held_out_loss(workload, inputs)


def held_out_loss(workload: Workload, inputs: Batch) -> Tensor:
    """The loss without a graph, or, where it takes gradients itself (a gradient penalty, forces), with one."""
    try:
        with torch.no_grad():
            return workload.loss(workload.model, inputs)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return workload.loss(workload.model, inputs).detach()


def update(workload: Workload) -> int:
    """Clip, step, schedule. Returns the number of optimizer steps that took effect."""
    optimizer, scaler = workload.optimizer, workload.scaler
    if workload.grad_clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(workload.parameters(), workload.grad_clip_norm)
    updates = 1
    if scaler is None:
        optimizer.step()
    else:
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        updates = int(scaler.get_scale() >= scale)  # the scale only falls when non-finite gradients skipped the step
    if workload.scheduler is not None and updates:
        workload.scheduler.step()
    return updates


def split(batch: Batch, size: int | None) -> Iterator[Batch]:
    """The batch in slices of `size` samples, the last one possibly shorter. None: the batch itself."""
    samples = samples_in(batch)
    if size is None or size >= samples:
        yield batch
        return
    for start in range(0, samples, size):
        yield part_of(batch, start, start + size)
