"""The memory ledger: every tensor storage from first appearance to end, with category, phase, operator and module.

    ledger = Ledger(capacity_bytes=None, device_type="cpu")
    with ledger, phases.listening(ledger):
        ledger.track(model, optimizer)      # parameters, buffers and optimizer state, by storage; names for the report
        run_step(...)                       # warm-up: the optimizer state comes into being
        ledger.reset_peak()
        run_step(...)
    peak = ledger.peak()                    # results.Peak: peak, phase, operator, module, what was alive there

It works on real CPU tensors, on hollow ones (sweep.memory.hollow) with the same numbers to the byte, with
`device_type="cuda"` on CUDA tensors, and on fake ones (torch's FakeTensorMode on the `cpu` device; enter that mode
first, the ledger inside), for which autograd itself allocates a little more. It changes nothing of what it watches.

What it sees: each storage that an operator returns for the first time while the ledger is entered, and what `track` is
given. Tensors made earlier and not tracked are not counted, nor are views or in-place results of them. Memory that a
kernel takes and gives back inside one operator is not visible (on a CPU it is not the device's; for CUDA see the
emulations). A storage's end is seen whenever it comes, between operators too. Bytes are the storage's, rounded up to
512.

Categories: `parameter`, `buffer` (tracked), `input` (allocated in the data phase), `activation` (allocated in a forward
phase and still there when the backward phase of its micro-step begins), `gradient` (held by a tracked parameter's .grad
when a backward phase ends), `optimizer_state` (held by the tracked optimizer when an optimizer phase ends), `temporary`
(all else), and beside the device `host`: what is allocated inside `with host_memory():`. Since some of these are known
only later, an allocation's category may change until `peak()` is called.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from sweep.errors import DeviceOutOfMemory
from sweep.memory.allocator import round_up
from sweep.memory.operators import (
    ADD,
    Effect,
    Intercept,
    Op,
    Workspace,
    can_be_added_in_place,
    describe,
    in_engine,
    references_of_the_engine,
    storage_id,
    storages_in,
    strided,
    tensors_in,
)
from sweep.results import MIB, Category, Holder, Peak, Phase

#: Holders that a report names.
LARGEST = 10
#: Sequence number of graph nodes that no forward operator made (AccumulateGrad).
NO_NODE = -1


class Log:
    """What was allocated and freed in which order, for the device and for host copies beside it. Sizes are bytes.

    An allocation is a number, `id`, counted from 0; lists indexed by it hold what is known of it. What it was for is
    often known only later (a tensor is an activation once the backward pass begins and it is still there), so its
    category may change until the report is made. Recording costs well under a microsecond; all else waits for that.
    """

    def __init__(self) -> None:
        self.order: list[int] = []  # device: id, and ~id when it ends
        self.bytes: list[int] = []
        self.category: list[Category] = []
        self.phase: list[str] = []
        self.operator: list[str] = []
        self.module: list[str] = []
        self.node: list[int] = []  # sequence number of the graph node that was running backward
        self.micro_step: list[int] = []
        self.forward: list[bool] = []  # allocated in a forward phase, and not by recomputation
        self.owner: dict[int, str] = {}  # parameter name, where the id belongs to one
        self.alive: dict[int, int] = {}  # device id -> bytes
        self.in_use = self.peak = 0
        self.peak_at = 0  # length of `order` when the peak was reached
        self.peak_id: int | None = None  # whose allocation made it
        self.peak_phase = ""  # where no allocation made it
        self.host_alive: dict[int, int] = {}
        self.host_in_use = self.host_peak = 0
        self.phase_peaks: dict[str, int] = {}
        self.phase_peaks_at: dict[str, int] = {}  # length of `order` at each
        self._phase, self._phase_high, self._phase_high_at = "", 0, 0
        # Modules by the sequence number of the graph nodes made inside of them: number where a module began or ended.
        self.node_starts: list[int] = []
        self.node_modules: list[str] = []

    # -- recording ---------------------------------------------------------------------------------------------------

    def add(
        self,
        nbytes: int,
        category: Category,
        phase: str,
        operator: str,
        module: str,
        node: int = NO_NODE,
        micro_step: int = -1,
        forward: bool = False,
    ) -> int:
        """Record an allocation of `nbytes` (already rounded). Returns its id."""
        id = len(self.bytes)
        self.bytes.append(nbytes)
        self.category.append(category)
        self.phase.append(phase)
        self.operator.append(operator)
        self.module.append(module)
        self.node.append(node)
        self.micro_step.append(micro_step)
        self.forward.append(forward)
        if category is Category.host:
            self.host_alive[id] = nbytes
            self.host_in_use += nbytes
            self.host_peak = max(self.host_peak, self.host_in_use)
            return id
        self.alive[id] = nbytes
        self.order.append(id)
        self.in_use += nbytes
        used = self.in_use
        if used > self._phase_high:
            self._phase_high, self._phase_high_at = used, len(self.order)
        if used > self.peak:
            self.peak, self.peak_at, self.peak_id = used, len(self.order), id
        return id

    def end(self, id: int) -> None:
        """Record that an allocation is gone. May be called by the garbage collector in the middle of anything."""
        nbytes = self.alive.pop(id, 0)
        if nbytes:
            self.order.append(~id)
            self.in_use -= nbytes
        else:
            self.host_in_use -= self.host_alive.pop(id, 0)

    def switch_phase(self, phase: str) -> None:
        """From now on `phase` runs. What is in use at the border belongs to both."""
        self._flush()
        self._phase = phase
        self._phase_high, self._phase_high_at = self.in_use, len(self.order)

    def reset_peak(self) -> None:
        """Peaks start again from what is in use now."""
        self.peak, self.peak_at, self.peak_id = self.in_use, len(self.order), None
        self.peak_phase = self._phase
        self.host_peak = self.host_in_use
        self.phase_peaks.clear()
        self.phase_peaks_at.clear()
        self._phase_high, self._phase_high_at = self.in_use, len(self.order)

    def _flush(self) -> None:
        if self._phase and self._phase_high > self.phase_peaks.get(self._phase, -1):
            self.phase_peaks[self._phase] = self._phase_high
            self.phase_peaks_at[self._phase] = self._phase_high_at

    def mark_node(self, sequence_number: int, module: str) -> None:
        """Graph nodes from `sequence_number` on are made by `module`, until the next mark."""
        starts = self.node_starts
        if starts and starts[-1] == sequence_number:
            self.node_modules[-1] = module
        else:
            starts.append(sequence_number)
            self.node_modules.append(module)

    # -- reporting ---------------------------------------------------------------------------------------------------

    def module_of(self, id: int) -> str:
        """The module that ran, or, in a backward pass, the one whose forward made the node that ran."""
        module = self.module[id]
        if not module and self.node[id] != NO_NODE:
            at = bisect_right(self.node_starts, self.node[id]) - 1
            module = self.node_modules[at] if at >= 0 else ""
        return module

    def alive_at(self, position: int) -> list[int]:
        """Ids alive after the first `position` entries of `order`, oldest first."""
        alive: dict[int, None] = {}
        for entry in self.order[:position]:
            if entry >= 0:
                alive[entry] = None
            else:
                del alive[~entry]
        return list(alive)

    def categories_at(self, positions: dict[str, int]) -> dict[str, dict[str, float]]:
        """MiB alive by category after the first so many entries of `order`, for several such positions by name."""
        found: dict[str, dict[str, float]] = {}
        alive: dict[Category, int] = defaultdict(int)
        done = 0
        for name, position in sorted(positions.items(), key=lambda item: item[1]):
            for entry in self.order[done:position]:
                id = entry if entry >= 0 else ~entry
                alive[self.category[id]] += self.bytes[id] if entry >= 0 else -self.bytes[id]
            done = position
            found[name] = {c.value: alive[c] / MIB for c in Category if alive[c]}
        return found

    def report(self) -> Peak:
        self._flush()
        by_category: dict[str, int] = defaultdict(int)
        holders: dict[tuple[str, str], list[int]] = defaultdict(list)
        temporary: dict[str, int] = defaultdict(int)
        for id in self.alive_at(self.peak_at):
            category = self.category[id].value
            by_category[category] += self.bytes[id]
            if self.category[id] is Category.temporary:
                temporary[self.phase[id]] += self.bytes[id]
            name = self.owner.get(id) or self.module_of(id) or self.operator[id]
            holders[name, category].append(self.bytes[id])
        ranked = sorted(holders.items(), key=lambda item: -sum(item[1]))[:LARGEST]
        at = self.peak_id
        return Peak(
            mib=self.peak / MIB,
            phase=self.peak_phase if at is None else self.phase[at],
            operator="" if at is None else self.operator[at],
            module="" if at is None else self.module_of(at),
            at_peak_mib={c.value: by_category[c.value] / MIB for c in Category if c.value in by_category},
            largest=[Holder(name, category, sum(sizes) / MIB, len(sizes)) for (name, category), sizes in ranked],
            phase_peaks_mib={phase: high / MIB for phase, high in self.phase_peaks.items()},
            at_phase_peak_mib=self.categories_at(self.phase_peaks_at),
            host_peak_mib=self.host_peak / MIB,
            temporary_mib={phase: size / MIB for phase, size in temporary.items()},
        )


class _Host(threading.local):
    depth = 0


#: `depth` is above zero where this thread is inside of `host_memory`.
host = _Host()


@contextmanager
def host_memory(inside: bool = True) -> Iterator[None]:
    """What this thread allocates in here are host copies: not counted on the device, their peak reported beside it.

    inside: False: it is the device's again.
    """
    before, host.depth = host.depth, host.depth + 1 if inside else 0
    try:
        yield
    finally:
        host.depth = before


class ModuleNames:
    """Hooks on the modules of a model. `stack` holds the names of those that are running, innermost last.

    marked(sequence_number, name): called whenever another module begins to make graph nodes, with the number of the
    next node; not while `paused` (recomputation makes nodes that never run).
    """

    def __init__(self, marked: Callable[[int, str], None]) -> None:
        self.stack: list[str] = []
        self.paused = False
        self._marked = marked
        self._hooks: list[Any] = []

    def install(self, model: nn.Module, prefix: str = "") -> None:
        for name, module in model.named_modules():
            if name:
                self._hooks.append(module.register_forward_pre_hook(self._opener(prefix + name)))
                self._hooks.append(module.register_forward_hook(self._closer(prefix + name), always_call=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.stack.clear()

    def _opener(self, name: str) -> Callable[..., None]:
        def opened(*_: Any) -> None:
            self.stack.append(name)
            self._mark()

        return opened

    def _closer(self, name: str) -> Callable[..., None]:
        def closed(*_: Any) -> None:
            # Recomputation stops early by an exception, which may skip the end of inner modules.
            while self.stack and self.stack.pop() != name:
                pass
            self._mark()

        return closed

    def _mark(self) -> None:
        if not self.paused:
            self._marked(torch.autograd._get_sequence_nr(), self.stack[-1] if self.stack else "")


#: Position in the log of what has not ended.
NEVER = 1 << 62


class _Storage(weakref.ref):
    """Weak reference to a storage; torch keeps the Python object of a storage alive as long as the storage itself."""

    __slots__ = ("id", "key")
    id: int
    key: int


class Ledger:
    """See the module's docstring. Also a listener of `sweep.workload.step.Phases`.

    capacity_bytes: an allocation that would exceed it raises DeviceOutOfMemory and is not recorded. None: no limit.
    device_type: storages of this device type are the device's; on "cuda", CPU tensors count only inside `host_memory`.
    workspaces: what kernels of the emulated device take inside of an operator (sweep.memory.cuda), by overload.
    count_python_data: whether `torch.tensor(...)` counts; off where such tensors live on the host (emulated CUDA).
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        device_type: str = "cpu",
        workspaces: Mapping[Any, Workspace] | None = None,
        count_python_data: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.device_type = device_type
        self.log = Log()
        self._workspaces = workspaces or {}
        self._count_python_data = count_python_data
        self._ops: dict[Any, Op] = {}
        self._names = ModuleNames(self.log.mark_node)
        self._modules = self._names.stack
        self._phase = ""
        self._in_data = self._in_forward = self._in_backward = False
        self._micro_step = -1
        self._tracked: list[tuple[str, nn.Module]] = []  # with the prefix of its names
        self._optimizers: list[torch.optim.Optimizer] = []
        self._phases: list[str] = []
        self._entered = 0
        self._intercept = Intercept(self)
        self._live: dict[int, _Storage] = {}
        self._kept: dict[int, int] = {}  # see `keep`
        live, end, kept, order = self._live, self.log.end, self._kept, self.log.order

        def died(reference: _Storage) -> None:
            if live.pop(reference.key, None) is not None:
                if reference.id in kept:
                    kept[reference.id] = len(order)
                else:
                    end(reference.id)

        self._died = died

    # -- allocations that no operator shows --------------------------------------------------------------------------

    def allocate(
        self, nbytes: int, operator: str, category: Category = Category.temporary, module: str | None = None
    ) -> int:
        """Count `nbytes` that no tensor stands for, such as a library's workspace. Returns its id in the log."""
        id = self._record(round_up(nbytes), category, operator)
        if module is not None:
            self.log.module[id], self.log.node[id], self.log.forward[id] = module, NO_NODE, False
        return id

    def keep(self, tensor: Tensor) -> int | None:
        """Count a tensor's storage until `let_go`, as if someone held it. Returns its id, None: it is not counted."""
        reference = self._live.get(tensor.untyped_storage()._cdata)
        if reference is None or reference.id in self._kept:
            return None
        self._kept[reference.id] = NEVER
        return reference.id

    def let_go(self, id: int) -> int:
        """No one holds it any more. Returns where in the log it would have ended by itself, NEVER: it is still used."""
        ended = self._kept.pop(id)
        if ended != NEVER:
            self.log.end(id)
        return ended

    # -- operators ---------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and see what it allocates (see sweep.memory.operators)."""
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = describe(func, self._workspaces.get(func))
        if op.effect is Effect.resizes:
            return self._resizing(op, func, args, kwargs)
        if func is ADD and self._adds_gradients(args, kwargs):
            return args[0].add_(args[1])
        out = func(*args, **kwargs)
        if op.workspace is not None:
            with self._workspace(op, args, kwargs, out):
                if op.effect in (Effect.one_new, Effect.new):
                    self._see_all(out, op)
        elif op.effect is Effect.one_new:
            self._see(out, op.name)
        elif op.effect is Effect.new:
            self._see_all(out, op)
        elif op.effect is Effect.python_data and self._count_python_data:
            self._see(out, op.name)
        return out

    def _adds_gradients(self, args: Any, kwargs: Any) -> bool:
        """Whether autograd's engine adds up gradients, and would do so in place (see sweep.memory.operators)."""
        if kwargs or len(args) != 2 or not in_engine():
            return False
        owners = 2 if storage_id(args[0]) in self._live else 1
        return can_be_added_in_place(args[0], args[1], owners)

    def _see_all(self, out: Any, op: Op) -> None:
        if isinstance(out, Tensor):
            self._see(out, op.name)
        elif isinstance(out, (tuple, list)):
            for position, item in enumerate(out):
                if op.fresh is None or position in op.fresh:
                    if isinstance(item, (tuple, list)):
                        for tensor in item:
                            self._see(tensor, op.name)
                    else:
                        self._see(item, op.name)

    def _see(self, tensor: Any, operator: str) -> None:
        """Count the tensor's storage if it has not been seen before."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, AttributeError, RuntimeError):  # no tensor, or one without a storage
            if isinstance(tensor, Tensor):
                for part in strided(tensor):
                    self._see(part, operator)
            return
        if storage._cdata in self._live:
            return
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        if host.depth and tensor.device.type == "cpu":
            self._watch(storage, nbytes, Category.host, operator)
        elif tensor.device.type == self.device_type:
            category = Category.input if self._in_data else Category.temporary
            self._watch(storage, nbytes, category, operator)

    def _watch(self, storage: torch.UntypedStorage, nbytes: int, category: Category, operator: str) -> int:
        reference = _Storage(storage, self._died)
        reference.id = id = self._record(round_up(nbytes), category, operator)
        reference.key = key = storage._cdata
        self._live[key] = reference
        return id

    def _record(self, nbytes: int, category: Category, operator: str) -> int:
        log = self.log
        capacity = self.capacity_bytes
        if capacity is not None and log.in_use + nbytes > capacity and category is not Category.host:
            raise DeviceOutOfMemory(self._full(nbytes, operator))
        modules, node = self._modules, NO_NODE
        if modules:
            module = modules[-1]
        else:
            module = ""
            if self._in_backward and (running := torch._C._current_autograd_node()) is not None:
                number = running._sequence_nr()
                node = number if number < 1 << 62 else NO_NODE
        return log.add(nbytes, category, self._phase, operator, module, node, self._micro_step, self._in_forward)

    def _full(self, nbytes: int, operator: str) -> str:
        where = " in " + " of ".join(filter(None, (operator, self._phase))) if operator or self._phase else ""
        assert self.capacity_bytes is not None
        return (
            f"out of memory on the emulated device: tried to allocate {nbytes / MIB:.2f} MiB{where}; "
            f"{self.log.in_use / MIB:.2f} MiB of {self.capacity_bytes / MIB:.2f} MiB are in use"
        )

    @contextmanager
    def _workspace(self, op: Op, args: Any, kwargs: Any, out: Any) -> Iterator[None]:
        """What the operator takes beside its results is there inside."""
        assert op.workspace is not None
        ids: list[int] = []
        try:
            ids.extend(self.allocate(nbytes, op.name) for nbytes in op.workspace(args, kwargs, out) if nbytes > 0)
            yield
        finally:
            for id in reversed(ids):
                self.log.end(id)

    def _resizing(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that may give an existing tensor a larger or another storage."""
        before = {s._cdata: s.nbytes() for s in storages_in((args, tuple(kwargs.values())))}
        out = func(*args, **kwargs)
        for storage in storages_in(out):
            key, nbytes = storage._cdata, storage.nbytes()
            if before.get(key) == nbytes:
                continue
            self._replace(self._live.pop(key, None), storage, nbytes, op.name)
        return out

    def _replace(self, old: _Storage | None, storage: torch.UntypedStorage, nbytes: int, operator: str) -> None:
        """As the allocator does it: the new memory comes first, then the old one goes."""
        try:
            if nbytes > 0:
                category = self.log.category[old.id] if old is not None else Category.temporary
                self._watch(storage, nbytes, category, operator)
        finally:
            if old is not None:
                self.log.end(old.id)

    # -- results -----------------------------------------------------------------------------------------------------

    def peak(self) -> Peak:
        """The highest point since the start or the last `reset_peak`, and what was alive there."""
        return self.log.report()

    @property
    def operators(self) -> Iterable[Op]:
        """The operators that have run so far."""
        return self._ops.values()

    @property
    def in_backward(self) -> bool:
        """Whether a backward phase runs, recomputation included."""
        return self._in_backward

    def reset_peak(self) -> None:
        """Peaks (of phases and of the host, too) start again from what is in use now."""
        self.log.reset_peak()

    # -- what is tracked ---------------------------------------------------------------------------------------------

    def track(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, loss: nn.Module | None = None
    ) -> None:
        """Count the parameters and buffers of the model and of the loss (where it has any) and the optimizer's state,
        each storage once, and know their names.

        What is not known yet is taken to have come in the order of `model.to(device)`: inner modules first.
        """
        added = [("", model), *([] if loss is None else [("loss.", loss)])]
        self._tracked += added
        for prefix, module in added:
            for name, tensor, category in _in_order_of_to(module, prefix):
                self._claim(tensor, category, name)
            if self._entered:
                self._names.install(module, prefix)
        self._claim_gradients()
        if optimizer is not None:
            self._optimizers.append(optimizer)
            self._claim_state()

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((prefix + n, p) for prefix, module in self._tracked for n, p in module.named_parameters())

    def _claim(self, tensor: Tensor, category: Category, name: str) -> None:
        """Give a storage its category and name; count it if it is not known yet."""
        if tensor.layout is not torch.strided or not self._is_here(tensor):
            return
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            id = known.id
            if self.log.category[id] in (Category.parameter, Category.buffer, Category.host):
                return
            self.log.category[id] = category
        elif (nbytes := storage.nbytes()) > 0:
            id = self._watch(storage, nbytes, category, "")
        else:
            return
        self.log.owner.setdefault(id, name)

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_type

    def _claim_gradients(self) -> None:
        for name, parameter in self._named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            for part in strided(gradient):
                self._claim(part, Category.gradient, name)

    def _claim_state(self) -> None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._named_parameters()}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for tensor in tensors_in(state):
                    self._claim(tensor, Category.optimizer_state, names.get(parameter, ""))

    # -- entering, leaving, modules ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._entered += 1
        if self._entered == 1:
            for prefix, module in self._tracked:
                self._names.install(module, prefix)
        references_of_the_engine()
        self._intercept.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._intercept.__exit__(*error)
        self._entered -= 1
        if not self._entered:
            self._names.remove()

    # -- phases ------------------------------------------------------------------------------------------------------

    def enter_phase(self, phase: str) -> None:
        if phase == Phase.forward and not self._phases:
            self._micro_step += 1
            self._modules.clear()
        elif phase == Phase.backward:
            self._keep_activations()
        self._phases.append(phase)
        self._switch()

    def leave_phase(self, phase: str) -> None:
        self._phases.pop()
        self._switch()
        if phase == Phase.backward:
            self._claim_gradients()
        elif phase == Phase.optimizer:
            self._micro_step = -1
            for name, parameter in self._named_parameters():  # an optimizer may have replaced their storages
                self._claim(parameter, Category.parameter, name)
            self._claim_state()

    def _switch(self) -> None:
        self._phase = self._phases[-1] if self._phases else ""
        self._in_data = self._phase == Phase.data
        self._in_backward = self._names.paused = Phase.backward in self._phases
        self._in_forward = Phase.forward in self._phases and not self._in_backward
        self.log.switch_phase(self._phase)

    def _keep_activations(self) -> None:
        log = self.log
        for id in list(log.alive):
            if log.forward[id] and log.micro_step[id] == self._micro_step and log.category[id] is Category.temporary:
                log.category[id] = Category.activation


def _in_order_of_to(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor, Category]]:
    for name, child in model.named_children():
        yield from _in_order_of_to(child, f"{prefix}{name}.")
    for name, parameter in model._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter, Category.parameter
    for name, buffer in model._buffers.items():
        if buffer is not None:
            yield prefix + name, buffer, Category.buffer
