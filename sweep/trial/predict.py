"""What a training step would take on a device, without running it.

The workload is built from hollow tensors (sweep.memory.hollow) and two optimizer steps of the real step and strategy
code run on them, on the CPU, with CUDA's behaviour emulated where it differs (sweep.memory.cuda). The ledger's
events are then replayed through CUDA's caching allocator, with the device's capacity. The first step creates the
optimizer's state; the second is what every later one looks like and is what is reported, as a measurement does after
its warm-up (where batches differ in shape, where memory grows and for evaluation see sweep.trial.predict).

Accumulation is cut to two micro-steps: from the second one on, each finds the gradients of the earlier ones in memory.
FLOPs and bytes moved are scaled back to the whole window.

Everything here is theoretical: `predicted` is the weakest evidence, and times are bytes over the link's bandwidth.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import time
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sweep.config.device import (
    AllocatorOptions,
    allocator_capacity,
    cublas_workspace_kept,
    cublas_workspace_mib,
    environment_alloc_conf,
)
from sweep.config.schema import Config, DeviceConf, Granularity, Placement, WorkloadConf, plain
from sweep.errors import CannotPredict, one_line
from sweep.memory.allocator import CachingAllocator, make_allocator
from sweep.memory.cuda import CublasWorkspaces, caveats_of, cuda_workspaces, emulated_cuda
from sweep.memory.device import CudaAnswers, resolve_device
from sweep.memory.hollow import CPU, REAL_INTEGERS, HollowLedger, hollow
from sweep.results import MIB, Category, Phase, Prediction
from sweep.strategy import Applied, TrainingLoop, training
from sweep.strategy import offload as offload_strategy
from sweep.strategy.offload import CudaCopier, PlainCopier
from sweep.trial.measure import STEPS, Found, Plan, plan_of, planned_steps, run_plan
from sweep.workload import (
    Batch,
    Block,
    DataSource,
    Loss,
    Workload,
    build_data,
    build_optimizer,
    build_scheduler,
    build_workload,
    compiled_module,
    map_batch,
    to_device,
)
from sweep.workload.data import leaves_of, seed_everything
from sweep.workload.step import Outputs, Phases, accumulate_gradients, evaluate_part, holding, split

#: Values that cannot change, and so are what they are compared by.
_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type, types.ModuleType),
    *(types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic),
)


class _UnknownError(Exception):
    pass


def state_of(workload: Workload) -> list[Any] | None:
    """All that forward and backward could have changed in the model and the loss but the values in tensors, to be
    compared with `==`. None: there is something that cannot be looked into."""
    found: list[Any] = []
    seen: set[int] = set()
    try:
        for _, module in workload.modules_with_state():
            _add(module, found, seen)
        _add(workload.loss, found, seen)
    except (_UnknownError, RecursionError):
        return None
    return found


def _add(value: Any, found: list[Any], seen: set[int]) -> None:
    if isinstance(value, _CONSTANT):
        found.append(value)
        return
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise _UnknownError
        found.append((id(value), value.shape, value.dtype, value.requires_grad, value.untyped_storage()._cdata))
        return
    found.append(id(value))
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for name, item in vars(value).items():
            found.append(name)
            if item is None or item is True or item is False or (isinstance(item, dict) and not item):
                found.append(item is True or item is not None)  # most of a module's attributes are these
            else:
                _add(item, found, seen)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(key, found, seen)
            _add(item, found, seen)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            _add(item, found, seen)
    elif isinstance(value, types.MethodType):
        _add(value.__self__, found, seen)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            _add(cell.cell_contents, found, seen)
    elif isinstance(value, functools.partial):
        for item in (value.func, value.args, value.keywords):
            _add(item, found, seen)
    elif hasattr(value, "__dict__") and type(value).__module__ != "builtins":
        _add(vars(value), found, seen)
    else:
        raise _UnknownError


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
            strategy = stack.enter_context(training(workload, self.config.strategy, phases)).strategy
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
                counted = dataclasses.replace(workload, loss=_KnownCount(workload.loss, targets))
                _WHAT[what](TrainingLoop(counted, phases, strategy), batch, outputs)
                for _ in range(eval_batches):
                    _evaluate(counted, batch, phases, strategy)

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


def _train(loop: TrainingLoop, batch: Batch, outputs: Outputs) -> None:
    loop.step_on(batch, max_micro_steps=MICRO_STEPS, outputs=outputs)


def _forward_backward(loop: TrainingLoop, batch: Batch, outputs: Outputs) -> None:
    w, strategy = loop.workload, loop.strategy
    w.optimizer.zero_grad(set_to_none=True)
    parts = list(split(batch, strategy.micro_batch_size))[:MICRO_STEPS]
    with holding(w, outputs) as held:
        accumulate_gradients(w, parts, w.loss.count(batch), loop.phases, strategy.around_forward, held)


def _forward(loop: TrainingLoop, batch: Batch, outputs: Outputs) -> None:
    workload, phases = loop.workload, loop.phases
    for part in list(split(batch, loop.strategy.micro_batch_size))[:MICRO_STEPS]:
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


def predict(
    config: Config,
    data: DataSource | None = None,
    *,
    emulations: str = "auto",
    allocator: AllocatorOptions | None = None,
    steps: int | None = None,
    what: str = "train",
    eval_batches: int = 0,
) -> Prediction:
    """Predict the peak of one optimizer step of `config.workload` under `config.strategy` on `config.device`.

    data: the workload's data source, where it has been built already; the shapes of its batches matter, and the values
        of small whole numbers and booleans.
    emulations: "cuda" | "cpu" | "auto" (by the device). On "cpu" nothing is emulated and nothing replayed: the result
        is what the ledger measures on a CPU, to the byte.
    allocator: PYTORCH_CUDA_ALLOC_CONF of the run that is predicted; None: what `device.alloc_conf` says.
    steps: how many are run, the peak being that of the later ones. None: what `config.measure` will run: those with
        the largest batches stand for all, evaluation counts where there is one, and memory that grows is followed.
    what: "train" | "forward_backward" (no optimizer) | "forward" (the model alone, under no_grad).
    eval_batches: evaluations of a micro-batch at the end of each step, under no_grad, while the gradients are there.

    Raises:
        CannotPredict: the model reads values, has shapes that depend on values, is compiled, or uses custom operators
            or sparse gradients; the message names the cause.
        BadInput: the strategy does not fit the model.
    """
    started = time.perf_counter()
    device = resolve_device(config.device)
    if allocator is None:
        allocator = AllocatorOptions.parse(device.alloc_conf, "device.alloc_conf")
    on_cuda = device.type == "cuda" if emulations == "auto" else emulations == "cuda"
    data = data if data is not None else build_data(config.workload)
    run = HollowRun(config, device, on_cuda)
    try:
        run.go(data, steps, what, eval_batches)
    except (RuntimeError, AssertionError) as error:
        if "Cannot access data pointer" in str(error):
            raise CannotPredict("the model hands a tensor's memory to other code (such as numpy)") from error
        asks_for_cuda = any(word in str(error).lower() for word in ("cuda", "accelerator"))
        if asks_for_cuda and not isinstance(error, torch.OutOfMemoryError):
            asks = "the model asks for CUDA in a way that has no answer here" if on_cuda else "the model asks for CUDA"
            raise CannotPredict(f"{asks}: {str(error).splitlines()[0].split('. ')[0]}") from error
        raise
    prediction = _on_cuda(run, device, allocator) if on_cuda else _on_cpu(run, device)
    prediction.seconds = time.perf_counter() - started
    return prediction


def _replayed(run: HollowRun, capacity: int | None, options: AllocatorOptions) -> CachingAllocator | None:
    """The allocator after all steps, its peaks those from `run.mark` on. None: it ran out of memory."""
    allocator, log = make_allocator(capacity, options), run.ledger.log
    for position, entry in enumerate(log.order):
        if position == run.mark:
            allocator.reset_peaks()
        if entry < 0:
            allocator.free(~entry)
        elif not allocator.malloc(entry, log.bytes[entry]):
            return None
    return allocator


def _on_cuda(run: HollowRun, device: DeviceConf, options: AllocatorOptions) -> Prediction:
    capacity = allocator_capacity(device)
    bounded = _replayed(run, capacity, options)
    allocator = bounded or _replayed(run, None, options)
    assert allocator is not None
    fits = bounded is not None
    prediction = _prediction(run, device)
    grown = prediction.allocated_mib - prediction.peak.mib if prediction.peak is not None else 0.0
    prediction.allocated_mib = allocator.allocated_peak / MIB + grown
    prediction.reserved_mib = allocator.reserved_peak / MIB + grown
    fits = fits and (capacity is None or prediction.reserved_mib <= capacity / MIB)
    prediction.fits = fits
    prediction.headroom_mib = None if capacity is None else capacity / MIB - prediction.reserved_mib
    prediction.context_mib = device.context_mib or 0.0
    prediction.caveats += run.answers.caveats if run.answers is not None else []
    prediction.caveats += caveats_of(op.name for op in run.ledger.operators)
    unread = environment_alloc_conf()[1]
    if unread:
        prediction.caveats.append(f"not replayed: {unread} of PYTORCH_CUDA_ALLOC_CONF")
    if device.link_bandwidth_gb_s is not None:
        per_ms = device.link_bandwidth_gb_s * 1e9 / 1e3
        prediction.transfer_round_trip_ms = prediction.moved_mib * MIB / per_ms
    return prediction


# -- results --------------------------------------------------------------------------------------------------------


def _on_cpu(run: HollowRun, device: DeviceConf) -> Prediction:
    """What the ledger measures: no allocator between it and the memory."""
    prediction = _prediction(run, device)
    highest = max(run.found.first, run.found.bytes) / MIB
    if device.capacity_mib is not None:
        prediction.headroom_mib = device.capacity_mib - highest
        prediction.fits = prediction.headroom_mib >= 0
    return prediction


def _prediction(run: HollowRun, device: DeviceConf) -> Prediction:
    found, peak = run.found, run.found.peak
    recomputed = run.flops.get(Phase.recompute.value, 0.0)
    s = run.config.strategy
    untouched = s.checkpoint.granularity is Granularity.none and s.offload.placement is Placement.none
    total = sum(run.flops.values())
    caveats = [*run.notes, *found.caveats(run.plan)]
    if run.not_evaluated:
        caveats.append(f"evaluation is not counted: {run.not_evaluated}")
    if run.plan.differ and run.on_cuda:
        caveats.append("what batches of changing shapes leave unused in the allocator's blocks is counted in part only")
    return Prediction(
        device=device.name,
        allocated_mib=found.bytes / MIB,
        reserved_mib=found.bytes / MIB,
        fits=True,
        headroom_mib=None,
        capacity_mib=device.capacity_mib,
        context_mib=0.0,
        peak=peak,
        to_host_mib=run.to_host * run.scale / MIB,
        from_host_mib=run.from_host * run.scale / MIB,
        recompute_flops_ratio=recomputed / (total - recomputed) if total > recomputed else 0.0,
        flops_per_step=total * run.scale,
        peak_phase=peak.phase,
        peak_operator=peak.operator,
        at_peak_mib=dict(peak.at_peak_mib),
        block_share=run.block_share if untouched else None,
        caveats=caveats,
        largest_step=found.step,
        shapes_differ=run.plan.differ,
        growth_mib_per_step=found.growth / MIB,
        evaluation_mib=None if found.evaluation is None else found.evaluation / MIB,
        held_outputs_mib=0.0 if peak.phase == Phase.evaluation.value else run.held_outputs / MIB,
    )
