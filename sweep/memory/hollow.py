"""Tensors without memory, and a ledger that runs a training step on them.

A hollow tensor is a plain CPU tensor whose storage has the right size and no memory behind it, so that modules, autograd,
checkpointing and saved-tensor hooks treat it like any other. It must only be used inside of the ledger's context, where no
kernel ever runs: what an operator would return is asked of torch's FakeTensorMode, once for each combination of operator and
argument shapes, and remembered. FakeTensorMode alone gives the same answers several times slower, since it asks again for
every call and for every look at a tensor's device.

Small tensors whose values are known (`torch.tensor(0.0)`, `torch.arange(n)`: an optimizer's step counters, a gradient
scaler's scale, position numbers) stay real, and operators on them alone are computed, so that their values can be read.
Every other look at a value raises CannotPredict.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils.flop_counter import flop_registry

from sweep.errors import CannotPredict
from sweep.memory.ledger import Ledger, Workspace, _host
from sweep.memory.ledger_ops import Effect, Op, describe
from sweep.memory.ledger_log import round_up
from sweep.results import Category

CPU = torch.device("cpu")
#: Operators from here run on any device through torch's own kernels; others are custom, and what they allocate is unknown.
KNOWN_NAMESPACES = {"aten", "prim", "prims", "profiler", "_c10d_functional"}
#: Elements up to which tensors of known values stay real: whole numbers, and others (masks are read, weights are not).
REAL_INTEGERS, REAL_FLOATS = 65536, 256
#: Operators that give a value to Python.
READS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::allclose"}

_FLOPS = object()
_storage_of = torch._C._construct_storage_from_data_pointer
_no_data = torch._C._set_throw_on_mutable_data_ptr


def hollow(shape: Iterable[int], dtype: torch.dtype, stride: Iterable[int] | None = None) -> Tensor:
    """A tensor of this shape with no memory. Call it outside of the ledger's context, or it is asked of the ledger."""
    shape = tuple(shape)
    if stride is None:
        like = torch.empty(shape, dtype=dtype, device="meta")
    else:
        like = torch.empty_strided(shape, tuple(stride), dtype=dtype, device="meta")
    return _make(like.untyped_storage().nbytes(), shape, like.stride(), dtype, 0)[0]


def _make(
    nbytes: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, offset: int
) -> tuple[Tensor, torch.UntypedStorage]:
    storage = _storage_of(0, CPU, nbytes)
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    _no_data(tensor)  # a kernel that wanted to write here would raise
    return tensor, storage


@dataclass(frozen=True, slots=True)
class _Result:
    """What one result of an operator looks like."""

    nbytes: int
    rounded: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    same_storage_as: int = -1  # position of an earlier result with the same storage


class HollowLedger(Ledger):
    """A ledger that runs nothing: see the module's docstring. Takes what Ledger takes.

    Raises CannotPredict, naming the operator and the module, for values that are read, shapes that depend on values, custom
    operators and sparse tensors.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        workspaces: Mapping[Any, Workspace] | None = None,
        count_python_data: bool = True,
        known: dict[Any, Any] | None = None,
    ) -> None:
        super().__init__(capacity_bytes, "cpu", workspaces, count_python_data)
        self._known: dict[Any, Any] = known if known is not None else {}  # may be shared between ledgers
        self.flops: dict[str, float] = {}  # by phase, of matrix products, convolutions and attention
        self._real: dict[int, weakref.ref[Any]] = {}  # storages of the tensors that have values
        self._fake = FakeTensorMode()

    # -- dispatch -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self._ops.get(func)
        if op is None:
            op = self._describe(func)
        effect = op.effect
        if effect is Effect.view:
            return func(*args, **kwargs) if kwargs else func(*args)  # metadata only
        if effect is Effect.mutates:
            if self._real and self._all_real(args, kwargs):
                return func(*args, **(kwargs or {}))
            if op.workspace is not None:
                self._with_workspace(op, args, kwargs or {}, None)
            return self._mutated(op, args, kwargs)
        if effect is Effect.one_new or effect is Effect.new:
            if self._real and self._all_real(args, kwargs) and self._result_is_small(op, func, args, kwargs):
                return self._computed(op, func, args, kwargs)
            key = _key(func, args, kwargs)
            form = self._known.get(key)
            if form is None:
                form = self._known[key] = self._ask(op, func, args, kwargs or {})
            if op.known and _small(form.shape, form.dtype):
                return self._computed(op, func, args, kwargs)
            if op.flops is not None:
                count = self._known.get((_FLOPS, key))
                if count is None:
                    count = self._known[_FLOPS, key] = _flops(op, args, kwargs or {}, form)
                self.flops[self._phase] = self.flops.get(self._phase, 0.0) + count
            if op.workspace is not None:
                return self._made_with_workspace(op, args, kwargs or {}, form)
            if effect is Effect.one_new:
                return self._new(form, op.name)
            return self._built(form, op.name)
        return self._rare(op, func, args, kwargs or {})

    def _describe(self, func: Any) -> Op:
        op = describe(func, self._workspaces.get(func))
        counter = flop_registry.get(getattr(func, "overloadpacket", None))
        op = op if counter is None else replace(op, flops=counter)
        schema = getattr(func, "_schema", None)
        if schema is None or schema.name.split("::")[0] not in KNOWN_NAMESPACES:
            raise CannotPredict(f"{op.name} is a custom operator, whose memory is unknown{self._where()}")
        self._ops[func] = op
        return op

    def _where(self) -> str:
        return f" (in {self._modules[-1]})" if self._modules else ""

    # -- results ----------------------------------------------------------------------------------------------------------

    def _new(self, result: _Result, operator: str) -> Tensor:
        tensor, storage = _make(result.nbytes, result.shape, result.stride, result.dtype, result.offset)
        if result.nbytes:
            if _host.depth:
                category = Category.host
            else:
                category = Category.input if self._in_data else Category.temporary
            self._watch(storage, result.rounded, category, operator)
        return tensor

    def _built(self, form: Any, operator: str) -> Any:
        """The results of an operator that returns several: a nested structure of _Result and other values."""
        made: list[Tensor] = []
        return self._build(form, operator, made)

    def _build(self, form: Any, operator: str, made: list[Tensor]) -> Any:
        # No inner function that calls itself: that would be a reference cycle, which keeps `made` alive.
        if isinstance(form, _Result):
            if form.same_storage_as >= 0:
                base = made[form.same_storage_as].untyped_storage()
                tensor = torch.empty(0, dtype=form.dtype).set_(base, form.offset, form.shape, form.stride)
            else:
                tensor = self._new(form, operator)
            made.append(tensor)
            return tensor
        if isinstance(form, (list, tuple)):
            return type(form)(self._build(item, operator, made) for item in form)
        return form

    def _made_with_workspace(self, op: Op, args: Any, kwargs: Any, form: Any) -> Any:
        assert op.workspace is not None
        ids = [self.allocate(nbytes, op.name) for nbytes in op.workspace(args, kwargs, form) if nbytes > 0]
        try:
            return self._built(form, op.name)
        finally:
            for id in reversed(ids):
                self.log.end(id)

    def _ask(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        """The form of what the operator would return, as FakeTensorMode says."""
        try:
            with self._fake:
                out = func(*_fake(args), **{name: _fake(value) for name, value in kwargs.items()})
            return _form(out, {}, [])
        except (DataDependentOutputException, DynamicOutputShapeException, _DependsOnValues) as error:
            raise CannotPredict(f"{op.name} depends on values, which are not there{self._where()}") from error
        except UnsupportedOperatorException as error:
            raise CannotPredict(f"torch cannot say what {op.name} returns{self._where()}") from error
        except _Sparse as error:
            raise CannotPredict(f"{op.name} returns a sparse tensor{self._where()}") from error

    def _mutated(self, op: Op, args: Any, kwargs: Any) -> Any:
        """What an operator returns that writes to its arguments: these."""
        if self._real:
            for position in op.written:
                self._forget(args[position] if isinstance(position, int) and position < len(args) else None)
        returned = op.returned
        if returned is None:
            return None
        values = [args[p] if isinstance(p, int) and p < len(args) else (kwargs or {})[op.names[p]] for p in returned]
        return values[0] if len(values) == 1 else tuple(values)

    # -- tensors that have values -----------------------------------------------------------------------------------------

    def _keep_real(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._real[key] = weakref.ref(storage, lambda _: self._real.pop(key, None))

    def _forget(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._real.pop(value.untyped_storage()._cdata, None)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._forget(item)

    def _all_real(self, args: Any, kwargs: Any) -> bool:
        found = False
        stack = [*args, *kwargs.values()] if kwargs else list(args)
        while stack:
            item = stack.pop()
            if isinstance(item, Tensor):
                if item.untyped_storage()._cdata not in self._real:
                    return False
                found = True
            elif isinstance(item, (list, tuple)):
                stack.extend(item)
        return found

    def _result_is_small(self, op: Op, func: Any, args: Any, kwargs: Any) -> bool:
        key = _key(func, args, kwargs)
        if key not in self._known:
            try:
                self._known[key] = self._ask(op, func, args, kwargs or {})
            except CannotPredict:  # a shape that depends on values, which are there
                return True
        return all(_small(result.shape, result.dtype) for result in _results(self._known[key]))

    def _computed(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else []:
            if isinstance(tensor, Tensor):
                if _small(tensor.shape, tensor.dtype):
                    self._keep_real(tensor)
                self._see(tensor, op.name)
        return out

    # -- the rest -----------------------------------------------------------------------------------------------------------

    def _rare(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if op.effect is Effect.python_data:
            tensor = args[0]
            if _small(tensor.shape, tensor.dtype):
                self._keep_real(tensor)
                if self._count_python_data:
                    self._see(tensor, op.name)
                return tensor
            like = hollow(tensor.shape, tensor.dtype, tensor.stride())
            if self._count_python_data:
                self._see(like, op.name)
            return like
        if op.effect is Effect.resizes:
            return self._resized(op, func, args, kwargs)
        if name in READS and not self._all_real(args, kwargs):
            raise CannotPredict(f"{op.name} reads a value, which is not there{self._where()}")
        if name.startswith("aten::_assert"):
            return None
        if any(isinstance(a, Tensor) for a in args) and not self._all_real(args, kwargs) and func._schema.returns:
            raise CannotPredict(f"{op.name} gives a value to Python, which is not there{self._where()}")
        return func(*args, **kwargs)

    def _resized(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        """resize_, set_ and out=: the storage of an argument may change."""
        name = func._schema.name
        if name.startswith("aten::set_"):
            return self._resizing(op, func, args, kwargs)
        if name in ("aten::resize_", "aten::resize_as_"):
            target = args[0]
            shape = args[1].shape if name == "aten::resize_as_" else tuple(args[1])
            self._give_storage(target, shape, op.name)
            return target
        outs = [kwargs[a.name] if a.name in kwargs else args[i] for i, a in enumerate(func._schema.arguments) if a.is_out]
        form = self._ask(op, func, args, {k: v for k, v in kwargs.items() if v is not None})
        for target, result in zip(outs, form if isinstance(form, tuple) else (form,), strict=True):
            self._forget(target)
            if tuple(target.shape) != result.shape:
                self._give_storage(target, result.shape, op.name)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _give_storage(self, tensor: Tensor, shape: Any, operator: str) -> None:
        shape = tuple(shape)
        new = hollow(shape, tensor.dtype)
        old = tensor.untyped_storage()
        if new.untyped_storage().nbytes() <= old.nbytes():
            tensor.set_(old, tensor.storage_offset(), shape, new.stride())
            return
        known = self._live.pop(old._cdata, None)
        category = self.log.category[known.id] if known is not None else Category.temporary
        tensor.set_(new.untyped_storage(), 0, shape, new.stride())
        self._watch(new.untyped_storage(), new.untyped_storage().nbytes(), category, operator)
        if known is not None:
            self.log.end(known.id)


def _small(shape: Iterable[int], dtype: torch.dtype) -> bool:
    return math.prod(shape) <= (REAL_FLOATS if dtype.is_floating_point or dtype.is_complex else REAL_INTEGERS)


class _DependsOnValues(Exception):
    pass


class _Sparse(Exception):
    pass


def _fake(item: Any) -> Any:
    """Like `item`, with fake tensors in place of tensors. To be called inside of a FakeTensorMode."""
    if isinstance(item, Tensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype)
    if isinstance(item, (list, tuple)):
        return type(item)(map(_fake, item))
    return item


def _form(item: Any, seen: dict[int, int], made: list[None]) -> Any:
    """Like `item`, with a _Result in place of each tensor."""
    if isinstance(item, Tensor):
        if item.layout is not torch.strided:
            raise _Sparse
        storage = item.untyped_storage()
        nbytes = storage.nbytes()
        if not isinstance(nbytes, int):
            raise _DependsOnValues
        first = seen.setdefault(storage._cdata, len(made))
        earlier = first if first < len(made) else -1
        made.append(None)
        shape, stride = tuple(item.shape), tuple(item.stride())
        return _Result(nbytes, round_up(nbytes), shape, stride, item.dtype, item.storage_offset(), earlier)
    if isinstance(item, (list, tuple)):
        return type(item)(_form(i, seen, made) for i in item)
    if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _DependsOnValues
    return item


def _flops(op: Op, args: Any, kwargs: Any, form: Any) -> float:
    """FLOPs of one call, by torch's own formulas (torch.utils.flop_counter)."""
    assert op.flops is not None
    return float(op.flops(*args, **kwargs, out_val=_shapes(form)))


def _shapes(form: Any) -> Any:
    if isinstance(form, _Result):
        return torch.empty(form.shape, device="meta")
    if isinstance(form, (list, tuple)):
        return type(form)(_shapes(item) for item in form)
    return form


def _results(form: Any) -> Iterator[_Result]:
    if isinstance(form, _Result):
        yield form
    elif isinstance(form, (list, tuple)):
        for item in form:
            yield from _results(item)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What the result's form depends on. Floating-point numbers matter only where no tensor is given (arange)."""
    key: list[Any] = [func]
    seen = _describe_arguments(args, key)
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            seen |= _describe_arguments((value,), key)
    if not seen:
        key.append(repr((args, kwargs)))
    return tuple(key)


def _describe_arguments(items: Any, key: list[Any]) -> bool:
    tensors = False
    for item in items:
        kind = type(item)
        if isinstance(item, Tensor):
            key += (item.shape, item.stride(), item.dtype)
            tensors = True
        elif kind is float:
            key.append(float)
        elif kind is list or kind is tuple:
            key.append(len(item))
            tensors |= _describe_arguments(item, key)
        elif item is None or kind is torch.Generator:
            key.append(None)
        else:
            key += (kind, item)
    return tensors
