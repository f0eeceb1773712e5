"""Sees each storage that an operator returns for the first time, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sweep.errors import DeviceOutOfMemory
from sweep.memory.accumulation import ADD, can_be_added_in_place, in_engine, storage_id
from sweep.memory.host import host
from sweep.memory.ledger_log import NO_NODE, Log, round_up
from sweep.memory.ledger_modules import ModuleNames
from sweep.memory.ledger_ops import Effect, Op, describe
from sweep.memory.ledger_tensors import storages_in, strided
from sweep.results import MIB, Category

#: Bytes that a kernel takes inside of one operator: f(args, kwargs, result) -> sizes, all alive together.
Workspace = Callable[[tuple[Any, ...], dict[str, Any], Any], Iterable[int]]

#: Position in the log of what has not ended.
NEVER = 1 << 62


class _Storage(weakref.ref):
    """Weak reference to a storage; torch keeps the Python object of a storage alive as long as the storage itself."""

    __slots__ = ("id", "key")
    id: int
    key: int


class Watcher:
    """The part of a ledger that records allocations: which, where, how large, and until when.

    What it needs to know of the moment (phase, module, micro-step) is set by Ledger.
    """

    def __init__(
        self,
        capacity_bytes: int | None,
        device_type: str,
        workspaces: Mapping[Any, Workspace] | None,
        count_python_data: bool,
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
        """Count `nbytes` that no tensor stands for, such as a library's workspace. Returns the id for `free`."""
        id = self._record(round_up(nbytes), category, operator)
        if module is not None:
            self.log.module[id], self.log.node[id], self.log.forward[id] = module, NO_NODE, False
        return id

    def free(self, id: int) -> None:
        self.log.end(id)

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
        """Run an operator and see what it allocates (see sweep.memory.intercept)."""
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = describe(func, self._workspaces.get(func))
        if op.effect is Effect.resizes:
            return self._resizing(op, func, args, kwargs)
        if func is ADD and self._adds_gradients(args, kwargs):
            return args[0].add_(args[1])
        out = func(*args, **kwargs)
        if op.workspace is not None:
            self._with_workspace(op, args, kwargs, out)
        elif op.effect is Effect.one_new:
            self._see(out, op.name)
        elif op.effect is Effect.new:
            self._see_all(out, op)
        elif op.effect is Effect.python_data and self._count_python_data:
            self._see(out, op.name)
        return out

    def _adds_gradients(self, args: Any, kwargs: Any) -> bool:
        """Whether autograd's engine adds up gradients, and would do so in place (see sweep.memory.accumulation)."""
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

    def _with_workspace(self, op: Op, args: Any, kwargs: Any, out: Any) -> None:
        assert op.workspace is not None
        ids: list[int] = []
        try:
            ids.extend(self.allocate(nbytes, op.name) for nbytes in op.workspace(args, kwargs, out) if nbytes > 0)
            if op.effect in (Effect.one_new, Effect.new):
                self._see_all(out, op)
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
