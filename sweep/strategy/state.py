"""What a forward changes beside its result, and what it was before: computing it again must begin from there.

Guarded are the buffers, frozen parameters and plain attributes of modules: tensors, numbers, texts, random generators,
and containers and objects of these. Computing again works on copies of what was there before the first run (a block
that runs several times in a step has its own for each run) and leaves behind what the first runs left.

What is rebound needs no copy, the reference is kept. What is changed in place is copied before each run: all that is
small, and of the rest what the first run was seen to change. These copies are memory and count as such.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copyreg import _slotnames  # type: ignore[attr-defined]
from dataclasses import dataclass, field
from enum import Enum
from operator import is_
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sweep.errors import NotEquivalent
from sweep.memory.hollow import is_hollow

#: Tensors and containers that are no larger are copied before each run without asking, also since kernels may change
#: them without a trace.
SMALL_BYTES, SMALL_ITEMS = 64 * 1024, 32
#: What has more items (a vocabulary, a registry) or levels is no state.
MOST_ITEMS, MOST_LEVELS = 2000, 8

_IMMUTABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size, torch.layout}
)
_SHARED = (nn.Module, type, ModuleType, Enum)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_NOT_STATE = sys.stdlib_module_names | {"torch"}  # where the classes of objects that are left alone come from
_MISSING: Any = object()


class Copier:
    """Copies containers and objects, each once however often it occurs. Tensors become what `tensor` makes of them."""

    def __init__(self, tensor: Callable[[Any], Any]) -> None:
        self._tensor = tensor
        self._memo: dict[int, tuple[Any, Any, int, int, bool]] = {}  # the original, too, so that nothing gets its id
        self.items = self.nbytes = 0  # so far
        self.objects = False  # whether there are others than tensors and containers

    def copy(self, value: Any, level: int = 0) -> Any:
        self.items += 1
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            self.items += known[2]
            self.nbytes += known[3]
            self.objects = self.objects or known[4]
            return known[1]
        items, nbytes = self.items, self.nbytes
        new = value
        if isinstance(value, Tensor):
            self.nbytes += _nbytes(value)
            new = self._tensor(value)
        elif isinstance(value, Leaf):
            new = self._tensor(value)
        elif isinstance(value, np.ndarray):
            self.nbytes += value.nbytes
            new = value.copy()
        elif isinstance(value, _GENERATORS):
            new = value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
        elif not isinstance(value, _SHARED) and level < MOST_LEVELS and self.items < MOST_ITEMS:
            new = self._container(value, kind, level + 1)
        self._memo[id(value)] = (value, new, self.items - items, self.nbytes - nbytes, self.objects)
        return new

    def _container(self, value: Any, kind: Any, level: int) -> Any:
        if isinstance(value, tuple):
            items = [self.copy(item, level) for item in value]
            return value if all(map(is_, items, value)) else tuple.__new__(kind, items)
        base: Any = next((b for b in (OrderedDict, dict, list, deque, set) if isinstance(value, b)), None)
        if base is None:
            fixed = kind.__module__.partition(".")[0] in _NOT_STATE and kind is not SimpleNamespace
            if fixed or not (hasattr(value, "__dict__") or _slotnames(kind)):
                return value
            self.objects = True
        try:
            new = (base or object).__new__(kind)
        except TypeError:  # made in C, in a way of its own
            return value
        self._memo[id(value)] = (value, new, 0, 0, base is None)
        if isinstance(value, dict):
            if isinstance(value, defaultdict):
                new.default_factory = value.default_factory
            for key, item in list(value.items()):
                base.__setitem__(new, key, self.copy(item, level))
        elif base is deque:
            deque.__init__(new, [self.copy(item, level) for item in value], value.maxlen)
        elif base is not None:
            base.__init__(new, [self.copy(item, level) for item in value])
        for name, item in _attributes(value):
            object.__setattr__(new, name, self.copy(item, level))
        return new


def _attributes(value: Any) -> list[tuple[str, Any]]:
    slots = [(n, getattr(value, n)) for n in _slotnames(type(value)) if hasattr(value, n)]
    return slots + list(getattr(value, "__dict__", {}).items())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- arguments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """Stands for a tensor that is kept elsewhere."""

    index: int


def without_tensors(value: Any) -> tuple[Any, list[Tensor]]:
    """`value` with leaves instead of its tensors, in containers of its own, and the tensors, each once."""
    tensors: list[Tensor] = []

    def leaf(tensor: Tensor) -> Leaf:
        tensors.append(tensor)
        return Leaf(len(tensors) - 1)

    return Copier(leaf).copy(value), tensors


def with_tensors(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    """The inverse of `without_tensors`, in new containers each time."""
    return Copier(lambda found: tensors[found.index] if isinstance(found, Leaf) else found).copy(value)


# -- modules ---------------------------------------------------------------------------------------------------------


@dataclass
class _Home:
    """A dict that holds state by name: a module's attributes, its buffers or its parameters."""

    state: dict[str, Any]
    owner: str  # the module's qualified name
    skip: frozenset[str] = frozenset()
    frozen: bool = False  # parameters: those that take no gradients, and none is copied for being small
    #: Buffers whose former values do not matter, though each run changes them: statistics for evaluation.
    statistics: bool = False
    copied: dict[str, bool] = field(default_factory=dict)  # whether it is copied before each run; not there: not known
    looks: int = 3  # to take before the next runs; one more after something was rebound
    mutable: list[str] = field(default_factory=list)  # names of what could be changed in place, as of the last look

    def look(self) -> list[str]:
        if self.looks:
            self.looks -= 1
            self.mutable = [n for n, v in self.state.items() if n not in self.skip and self._can(v)]
        return [n for n in self.mutable if n in self.state] if self.mutable else []

    def _can(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return not value.requires_grad
        return not (self.frozen or type(value) in _IMMUTABLE or isinstance(value, _SHARED))


@dataclass
class _Before:
    """A home as it was before a run."""

    home: _Home
    bound: dict[str, Any]
    copies: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, Any] = field(default_factory=dict)  # see `_mark`: of tensors that are not copied


Snapshot = list[_Before]


class StateGuard:
    """Guards the state of some modules, given with their qualified names, over all runs of a strategy."""

    INTERNAL = frozenset(vars(nn.Module())) | {"forward"}

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._homes: list[_Home] = []
        names = {m: f"{top}.{name}" if name else top for top, module in modules for name, m in module.named_modules()}
        for module, name in names.items():
            normalises = isinstance(module, nn.modules.batchnorm._NormBase)
            self._homes.append(_Home(vars(module), name, skip=self.INTERNAL))
            self._homes.append(
                _Home(module._buffers, name, statistics=normalises and type(module).__module__.startswith("torch."))
            )
            if any(p is not None and not p.requires_grad for p in module._parameters.values()):
                self._homes.append(_Home(module._parameters, name, frozen=True))

    @torch.no_grad()
    def before(self) -> Snapshot:
        """The state before a run."""
        copier, taken = Copier(_clone), []
        for home in self._homes:
            found = _Before(home, home.state.copy())
            taken.append(found)
            for name in [] if home.statistics else home.look():
                value = home.state[name]
                if home.copied.get(name, True):
                    copier.items, copier.nbytes, copier.objects = 0, 0, False
                    found.copies[name] = copier.copy(value)
                    if copier.items >= MOST_ITEMS:
                        del found.copies[name]
                        home.copied[name] = False
                    elif not (home.frozen or copier.objects) and self._is_small(copier):
                        home.copied[name] = True
                if isinstance(value, Tensor) and not home.copied.get(name, False):
                    found.marks[name] = _mark(value)
        return taken

    @staticmethod
    def _is_small(copier: Copier) -> bool:
        return copier.items <= SMALL_ITEMS and copier.nbytes <= SMALL_BYTES

    @torch.no_grad()
    def after(self, snapshot: Snapshot) -> None:
        """Learn from the run that followed the snapshot, and let go of the copies that are not needed."""
        for found in snapshot:
            home, state = found.home, found.home.state
            for name in [n for n in found.copies if n not in home.copied]:
                now, mark = state.get(name, _MISSING), found.marks.pop(name, None)
                kept = now is not found.bound[name] or (
                    _mark(now) == mark if _without_values(found.copies[name], now) else _same(found.copies[name], now)
                )
                home.copied[name] = not kept
                if kept:
                    del found.copies[name]
            for name, mark in found.marks.items():
                if _mark(found.bound[name]) != mark:
                    raise NotEquivalent(
                        f"{home.owner}.{name} is changed in place, but was not in the first run: what it was before is "
                        "not known when the block is computed again",
                        "state",
                    )


@contextmanager
def restored(snapshot: Snapshot) -> Iterator[None]:
    """The state as it was before the run, inside, in copies of it; the state as it is now, afterwards."""
    now = [(found.home.state, found.home.state.copy()) for found in snapshot]
    with torch.no_grad():
        copier = Copier(_clone)
        for found in snapshot:
            home, state = found.home, found.home.state
            if home.statistics:
                state.update({name: copier.copy(buffer) for name, buffer in state.items()})
                continue
            if _put(state, found.bound):
                home.looks = max(home.looks, 1)
            for name, value in found.copies.items():
                state[name] = copier.copy(value)
    try:
        yield
    finally:
        for state, wanted in now:
            _put(state, wanted)


def _put(state: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Make `state` hold what is wanted. Returns whether it held anything else."""
    if len(state) == len(wanted) and all(map(is_, state.values(), wanted.values())):
        return False
    for name in [n for n in state if n not in wanted]:
        del state[name]
    state.update(wanted)
    return True


def _clone(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        return tensor
    new = tensor.detach().clone()
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new


def _mark(tensor: Tensor) -> Any:
    """Another one after most changes in place: the version, and which memory it is."""
    try:
        return tensor._version, tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # it has no storage
        return tensor._version


def _without_values(*tensors: Any) -> bool:
    """Whether one of them is hollow: in prediction, of a small parameter with values there is a copy without."""
    return any(isinstance(t, Tensor) and is_hollow(t) for t in tensors)


def _same(before: Any, now: Any, level: int = 0) -> bool:
    """Whether what was copied is as it was."""
    if type(before) is not type(now) or level > MOST_LEVELS:
        return False
    deeper = level + 1
    if isinstance(now, Tensor):
        if before is now or _without_values(before, now):
            return True
        try:
            return torch.equal(before, now)
        except (RuntimeError, NotImplementedError):  # no such operator for its layout
            return False
    if isinstance(now, dict):
        equal = before.keys() == now.keys() and all(_same(before[k], v, deeper) for k, v in now.items())
    elif isinstance(now, (list, tuple, deque)):
        equal = len(before) == len(now) and all(_same(a, b, deeper) for a, b in zip(before, now))
    elif isinstance(now, np.ndarray):
        return bool(np.array_equal(before, now))
    elif type(now) in _IMMUTABLE or isinstance(now, set):
        return bool(before == now)
    else:
        equal = True
    if before is now or not equal:
        return equal
    ours, theirs = dict(_attributes(before)), dict(_attributes(now))
    return ours.keys() == theirs.keys() and all(_same(ours[k], v, deeper) for k, v in theirs.items())
