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
from sweep.measure_run import planned_steps
from sweep.memory.device import cublas_workspace_kept, cublas_workspace_mib
from sweep.memory.emulate import CublasWorkspaces, cuda_workspaces, emulated_cuda
from sweep.memory.emulate_device import CudaAnswers
from sweep.memory.hollow import CPU, hollow
from sweep.memory.hollow_ledger import REAL_INTEGERS, HollowLedger
from sweep.memory.passes import STEPS, Found, Plan, plan_of, run_plan
from sweep.outcomes import one_line
from sweep.predict_state import state_of
from sweep.results import MIB, Category, Phase
from sweep.schema import Config, DeviceConf, WorkloadConf, plain
from sweep.step import Outputs, Phases, accumulate_gradients, evaluate_part, holding, run_step, split
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
    compiled_module,
    map_batch,
    to_device,
)
from sweep.workload.batch import leaves_of
from sweep.workload.randomness import seed_everything

MICRO_STEPS = 2
#: Workloads whose models are kept for the next prediction, where a step left nothing in them; they hold no memory.
KEPT_WORKLOADS = 4
#: Operator results that are remembered over predictions; a large sweep has a few thousand.
KEPT_RESULTS = 200_000

_workloads: OrderedDict[str, tuple[Workload, Any]] = OrderedDict()
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
        self.mark = 0  # where in the ledger's log the steps begin that count
        self.to_host = self.from_host = 0  # bytes, of the step with the peak as it was run
        self.flops: dict[str, float] = {}  # of that step, by phase
        self.held_outputs = 0  # bytes at its peak that are there since the loop holds the model's outputs
        self.scale = 1.0  # whole window over what was run
        self.notes: list[str] = []  # of the strategy
        self.block_share: float | None = None  # of the activations that lie in the blocks
        self.plan: Plan
        self.found: Found
        self.not_evaluated = ""  # why not

    def go(self, data: DataSource, steps: int | None, what: str, eval_batches: int) -> None:
        try:
            self._go(data, steps, what, eval_batches)
        except BaseException:
            _workloads.clear()  # whatever state a model was left in, it is not used again
            raise

    def _go(self, data: DataSource, steps: int | None, what: str, eval_batches: int) -> None:
        conf, ledger, phases, m = self.config.workload, self.ledger, Phases(), self.config.measure
        key, workload, before = _hollow_workload(conf, data, self.device if self.on_cuda else None)
        if steps is None and what == "train":
            self.plan = plan_of(workload, planned_steps(self.config), m.eval_batches)
        else:
            self.plan = Plan(list(range(STEPS if steps is None else steps)), [], STEPS if steps is None else steps)
        batches = {step: self._hollow(workload.train_batch(step), workload) for step in set(self.plan.steps)}
        held_out = {
            index: self._hollow(workload.eval_batch(index, conf.global_batch_size), workload)
            for index in self.plan.evaluation
        }
        seed_everything(conf.seed + 1)
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
            outputs, begun = _KeptOutputs(ledger), list[int]()

            def step(index: int) -> None:
                batch, targets = batches[index]
                begun.append(len(ledger.log.order))
                ledger.flops.clear()
                strategy.moved.reset()
                outputs.gone.clear()
                loop = dataclasses.replace(workload, loss=_KnownCount(workload.loss, targets))
                _WHAT[what](loop, batch, phases, strategy, outputs)
                for _ in range(eval_batches):
                    _evaluate(loop, batch, phases, strategy)

            def at_best() -> None:
                self.to_host, self.from_host = strategy.moved.to_host_bytes, strategy.moved.from_host_bytes
                self.flops = dict(ledger.flops)
                self.held_outputs = outputs.at(ledger.log.peak_at)

            def evaluate(index: int) -> bool:
                try:
                    _evaluate(workload, held_out[index][0], phases, strategy)
                except Exception as error:  # training is predicted all the same
                    self.not_evaluated = one_line(error)
                    return False
                return True

            self.found = run_plan(self.plan, ledger, step, evaluate, at_best)
            self.mark = begun[1 if steps is None else -1]
            if what != "forward":
                strategy.require_effect()
                self.notes = strategy.notes()
                self.block_share = _share_of(workload.blocks, ledger, self.mark)
        if before is not None and state_of(workload) == before:
            _keep(key, workload, before)
        samples = min(conf.global_batch_size, strategy.micro_batch_size * MICRO_STEPS)
        self.scale = conf.global_batch_size / samples

    def _hollow(self, real: Batch, workload: Workload) -> tuple[Batch, int]:
        """A batch of these shapes without memory, and the number of its targets.

        Small whole numbers and booleans keep their values: masks, lengths and positions are looked at by models.
        """

        def change(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > REAL_INTEGERS:
                return hollow(tensor.shape, tensor.dtype, tensor.stride())
            self.ledger.keep_real(tensor)
            return tensor

        return map_batch(change, real), workload.loss.count(real)


def _share_of(blocks: list[Block], ledger: HollowLedger, mark: int) -> float | None:
    """The share of the activations, by bytes, that were made within the blocks since `mark`. None: there are none."""
    log, names = ledger.log, tuple(f"{block.name}." for block in blocks)
    made = [id for id in log.order[mark:] if id >= 0 and log.category[id] is Category.activation]
    whole = sum(log.bytes[id] for id in made)
    inside = sum(log.bytes[id] for id in made if f"{log.module[id]}.".startswith(names))
    return inside / whole if whole else None


def _train(workload: Workload, batch: Batch, phases: Phases, strategy: Applied, outputs: Outputs) -> None:
    run_step(
        workload,
        batch,
        phases,
        micro_batch_size=strategy.micro_batch_size,
        around_forward=strategy.around_forward,
        max_micro_steps=MICRO_STEPS,
        outputs=outputs,
    )


def _forward_backward(workload: Workload, batch: Batch, phases: Phases, strategy: Applied, outputs: Outputs) -> None:
    workload.optimizer.zero_grad(set_to_none=True)
    parts = list(split(batch, strategy.micro_batch_size))[:MICRO_STEPS]
    with holding(workload, outputs) as held:
        accumulate_gradients(workload, parts, workload.loss.count(batch), phases, strategy.around_forward, held)


def _forward(workload: Workload, batch: Batch, phases: Phases, strategy: Applied, outputs: Outputs) -> None:
    for part in list(split(batch, strategy.micro_batch_size))[:MICRO_STEPS]:
        with phases(Phase.data):
            inputs = to_device(part, workload.device)
        with phases(Phase.forward), torch.no_grad(), workload.autocast():
            workload.model(inputs["inputs"])


def _evaluate(workload: Workload, batch: Batch, phases: Phases, strategy: Applied) -> None:
    evaluate_part(workload, next(split(batch, strategy.micro_batch_size)), phases)


_WHAT = {"train": _train, "forward_backward": _forward_backward, "forward": _forward}


class _KeptOutputs(Outputs):
    """Holds outputs as HeldOutputs does, but their storages by the ledger alone: so it is seen when each would have
    gone."""

    def __init__(self, ledger: HollowLedger) -> None:
        super().__init__()
        self._ledger = ledger
        self._others: list[Any] = []
        self._ids: list[int] = []
        self.gone: list[tuple[int, int, int]] = []  # id, where in the log it would have ended, and where it did

    def hold(self, output: Any) -> None:
        for _, leaf in leaves_of(output):
            if not isinstance(leaf, Tensor):
                self._others.append(leaf)
                continue
            self._others.append(leaf.grad_fn)
            id = self._ledger.keep(leaf)
            if id is not None:
                self._ids.append(id)

    def release(self) -> None:
        self._others.clear()
        now = len(self._ledger.log.order)
        self.gone += [(id, self._ledger.let_go(id), now) for id in self._ids]
        self._ids.clear()

    def at(self, position: int) -> int:
        """Bytes that are there at a position of the log and would have ended before it."""
        return sum(self._ledger.log.bytes[id] for id, ended, end in self.gone if ended < position <= end)


class _KnownCount:
    """A loss whose number of targets was counted on the real batch, since the hollow one has no values."""

    def __init__(self, loss: Loss, targets: int) -> None:
        self._loss, self._targets = loss, targets

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch)

    def count(self, batch: Batch) -> int:
        return self._targets


# -- the workload, without memory -----------------------------------------------------------------------------------


def _hollow_workload(
    conf: WorkloadConf, data: DataSource, device: DeviceConf | None
) -> tuple[str, Workload, list[Any] | None]:
    """The workload on hollow tensors, what it is kept under, and its state: as it is built, or one that a step has
    left as it was built.

    device: that is emulated where it is CUDA's, since a model may ask for it as it is made.
    """
    asked = [plain(dataclasses.replace(conf, global_batch_size=1)), None if device is None else plain(device)]
    key = json.dumps(asked, sort_keys=True)
    workload, state = _workloads.pop(key, (None, None))
    if workload is None:
        ledger = HollowLedger(known=_results[False])
        told = nullcontext() if device is None else CudaAnswers(device, _capability(device), ledger).installed()
        with ledger, told:
            workload = build_workload(conf, CPU, data)
        for _, module in workload.modules_with_state():
            _refuse_compiled(module)
        state = state_of(workload)
    return key, dataclasses.replace(workload, conf=conf, data=data), state


def _keep(key: str, workload: Workload, state: Any) -> None:
    _workloads[key] = (workload, state)
    while len(_workloads) > KEPT_WORKLOADS:
        _workloads.popitem(last=False)


def _fresh_optimizer(workload: Workload) -> Workload:
    """The workload with optimizer, scheduler and scaler as they are before the first step."""
    optimizer = build_optimizer(workload.conf, *(m for _, m in workload.modules_with_state()))
    scaler = None if workload.scaler is None else torch.amp.GradScaler(workload.device.type)
    return dataclasses.replace(
        workload, optimizer=optimizer, scheduler=build_scheduler(workload.conf, optimizer), scaler=scaler
    )


def _refuse_compiled(model: nn.Module) -> None:
    name = compiled_module(model)
    if name is not None:
        raise CannotPredict(
            f"{name or 'the model'} is compiled or TorchScript: its kernels and their memory are not known in advance"
        )


def _drop_gradients(workload: Workload) -> None:
    for parameter in workload.parameters():
        parameter.grad = None


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
