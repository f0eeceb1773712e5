"""A ledger that runs a training step on hollow tensors: nothing is computed, and nothing takes memory.

What an operator would return is asked of torch's shape functions, once for each combination of operator and argument
shapes, and remembered. FakeTensorMode alone gives the same answers several times slower, since it asks again for every
call and for every look at a tensor's device.

Small tensors whose values are known (`torch.tensor(0.0)`, `torch.arange(n)`: an optimizer's step counters, a gradient
scaler's scale, position numbers) stay real, and operators on them alone are computed, so that their values can be read.
Every other look at a value raises CannotPredict, with two exceptions, on which no shape depends: a number that an
optimizer computes of its tensors, such as the norm that Adafactor reads or that gradients are clipped by, is taken to
be 1, and a number that is asked whether it is NaN or infinite (the backward of `max()` does) is taken to be finite.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from sweep.errors import CannotPredict
from sweep.memory.accumulation import ADD, storage_id
from sweep.memory.hollow import CPU, hollow, is_hollow, make
from sweep.memory.hollow_forms import Form, Forms, Result, key_of, results_of, shapes_of
from sweep.memory.host import host
from sweep.memory.ledger import Ledger
from sweep.memory.ledger_log import round_up
from sweep.memory.ledger_ops import Effect, Op, describe
from sweep.memory.ledger_watch import Workspace
from sweep.results import Category, Phase

#: Operators from here are torch's own; others are custom, and what they allocate is unknown.
KNOWN_NAMESPACES = {"aten", "prim", "prims", "profiler"}
#: Elements up to which tensors of known values stay real: of whole numbers (masks and positions are read), and others.
REAL_INTEGERS, REAL_FLOATS = 65536, 256
#: Operators that give a value to Python.
READS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::allclose"}
EMPTY = torch.ops.aten.empty.memory_format
PACK = torch.ops.aten._pack_padded_sequence.default
NAN_CHECKS = {"aten.isnan", "aten.isinf"}
#: Gradients are taken to be finite: a scaler's check leaves its flag as it is.
FINITE_CHECK = "aten._amp_foreach_non_finite_check_and_unscale_"

#: What a random number of [0, 1) is known to be without drawing it: not below a rate of 0, below one of 1. Many models
#: draw one for each layer although none is to be dropped.
BELOW = {torch.ops.aten.lt.Scalar: True, torch.ops.aten.ge.Scalar: False}

_FLOPS = object()


class HollowLedger(Ledger):
    """See the module's docstring. Takes what Ledger takes; for `known` and `as_cuda` see Forms.

    Raises CannotPredict, naming the operator and the module, for values that are read, shapes that depend on values,
    custom operators and sparse tensors. `flops`: by phase, of matrix products, convolutions and attention, by torch's
    own formulas (torch.utils.flop_counter).
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        workspaces: Mapping[Any, Workspace] | None = None,
        count_python_data: bool = True,
        known: dict[Any, Form] | None = None,
        as_cuda: bool = False,
    ) -> None:
        super().__init__(capacity_bytes, "cpu", workspaces, count_python_data)
        self.flops: dict[str, float] = {}
        self._forms = Forms(known, as_cuda)
        self._known = self._forms.known
        self._real: dict[int, weakref.ref[Any]] = {}  # storages of the tensors that have values
        self._drawn: dict[int, weakref.ref[Any]] = {}  # storages of single random numbers of [0, 1)
        self.sides = False  # whether the host's tensors are told from the device's
        self._forced: bool | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if self._entered == 1:
            # tolist reads memory without asking any mode; the others that do (numpy, dlpack) refuse by themselves.
            self._tolist = Tensor.tolist
            Tensor.tolist = self._refuse_tolist()  # type: ignore[method-assign]
            self._truncated = getattr(nn.init, "_no_grad_trunc_normal_", None)
            if self._truncated is not None:
                nn.init._no_grad_trunc_normal_ = self._any_weights
        return self

    def __exit__(self, *error: object) -> None:
        if self._entered == 1:
            Tensor.tolist = self._tolist  # type: ignore[method-assign]
            if self._truncated is not None:
                nn.init._no_grad_trunc_normal_ = self._truncated
        super().__exit__(*error)

    def _refuse_tolist(self) -> Any:
        original = self._tolist

        def tolist(tensor: Tensor) -> Any:
            if is_hollow(tensor):
                raise CannotPredict(f"tolist reads values, which are not there{self._where()}")
            return original(tensor)

        return tolist

    def _any_weights(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """It draws again while a value is out of bounds. Weights that have no values are done as they are."""
        return tensor if is_hollow(tensor) else self._truncated(tensor, *args, **kwargs)  # type: ignore[misc]

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        op = self._ops.get(func)
        if op is None:
            op = self._describe(func)
        effect = op.effect
        if effect is Effect.view:
            return func(*args, **kwargs)  # metadata only
        if effect is Effect.mutates:
            if self._real and self._all_real(args, kwargs):
                return func(*args, **kwargs)
            if op.workspace is not None:
                self._with_workspace(op, args, kwargs, None)
            return self._mutated(op, args, kwargs)
        if effect is Effect.one_new or effect is Effect.new:
            if self.sides:
                return self._result_on_its_side(op, func, args, kwargs)
            return self._result(op, func, args, kwargs)
        return self._rare(op, func, args, kwargs)

    def _result(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        if func is ADD and self._adds_gradients(args, kwargs):
            return args[0]
        if self._real and self._all_real(args, kwargs) and self._result_is_small(op, func, args, kwargs):
            try:
                return self._computed(op, func, args, kwargs)
            except (NotImplementedError, RuntimeError):
                pass  # an operator that only CUDA has: its result has no values
        if func is PACK:
            return self._packed(op, *args)
        if func in BELOW and self._is_decided(*args):
            decided = torch.tensor((args[1] >= 1) is BELOW[func])
            self._keep_real(decided)
            self._see(decided, op.name)
            return decided
        key = key_of(func, args, kwargs)
        form = self._known.get(key)
        if form is None:
            form = self._known[key] = self._ask(op, func, args, kwargs)
        if op.known and _is_small(form.shape, form.dtype):
            return self._computed(op, func, args, kwargs)
        if func is EMPTY and form.dtype is torch.int64 and _is_small(form.shape, form.dtype):
            return self._writable(form, op.name)
        if op.flops is not None:
            self._count_flops(op, key, args, kwargs, form)
        if op.workspace is not None:
            return self._made_with_workspace(op, args, kwargs, form)
        if isinstance(form, Result) and form.shape == () and (self._phase == Phase.optimizer or op.name in NAN_CHECKS):
            return self._assumed(0 if op.name in NAN_CHECKS else 1, form.dtype, op.name)
        if op.effect is not Effect.one_new:
            return self._made(form, op.name, [])
        result = self._new(form, op.name)
        if op.name == "aten.rand" and result.numel() == 1:
            self._remember(self._drawn, result)
        return result

    def _is_decided(self, number: Tensor, rate: float) -> bool:
        return not 0 < rate < 1 and number.untyped_storage()._cdata in self._drawn

    def _packed(self, op: Op, padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """Sequences one after the other, and how many there are at each step, as a tensor with memory gives it."""
        if not self._all_real([lengths], {}):
            raise CannotPredict(f"{op.name} needs the sequences' lengths, which are not there{self._where()}")
        one, sizes = PACK(torch.zeros(*padded.shape[:2], 1), lengths, batch_first)
        shape = (len(one), *padded.shape[2:])
        nbytes = math.prod(shape) * padded.element_size()
        like = torch.empty(shape, device="meta").stride()
        data = self._new(Result(nbytes, round_up(nbytes), shape, like, padded.dtype, 0), op.name)
        self._keep_real(sizes)
        if self.sides:
            return data, sizes  # on the host
        self._see(sizes, op.name)
        return data, sizes

    def _writable(self, form: Result, operator: str) -> Tensor:
        """With memory, since torch writes lengths and the like into it without an operator; without known values."""
        tensor = torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
        self._see(tensor, operator)
        return tensor

    def _assumed(self, value: int, dtype: torch.dtype, operator: str) -> Tensor:
        number = torch.full((), value, dtype=dtype)
        self._keep_real(number)
        self._see(number, operator)
        return number

    # -- host and device ---------------------------------------------------------------------------------------------

    def on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the emulated device, where that and its host are told apart (`sides`)."""
        try:
            known = self._live.get(storage_id(tensor))
        except (NotImplementedError, RuntimeError):  # without a storage
            return True
        if known is None:  # made outside of the ledger, or from Python's numbers
            return isinstance(tensor, nn.Parameter)
        return self.log.category[known.id] is not Category.host

    @contextmanager
    def forced(self, to_device: bool) -> Iterator[None]:
        """What is made in here is on the device (else: on the host), whatever it is made of."""
        before, self._forced = self._forced, to_device
        try:
            yield
        finally:
            self._forced = before

    def _result_on_its_side(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        """A result is on the device if it is asked for there, or an argument is, or there are none."""
        wanted = self._forced
        if kwargs:
            asked = kwargs.get("device")
            if asked is not None and asked.type == "cuda":
                wanted, kwargs = True, {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        depth = host.depth
        if wanted is None:
            wanted = depth == 0 and self._side_of(args, kwargs)
        host.depth = 0 if wanted else 1
        try:
            return self._result(op, func, args, kwargs)
        finally:
            host.depth = depth

    def _side_of(self, args: Any, kwargs: Any) -> bool:
        tensors = False
        stack = [*args, *kwargs.values()] if kwargs else list(args)
        while stack:
            item = stack.pop()
            if isinstance(item, Tensor):
                if self.on_device(item):
                    return True
                tensors = True
            elif isinstance(item, (list, tuple)):
                stack.extend(item)
        return not tensors

    def _claim(self, tensor: Tensor, category: Category, name: str) -> None:
        if self.sides and category in (Category.gradient, Category.optimizer_state) and not self.on_device(tensor):
            return  # such as an optimizer's step counters
        super()._claim(tensor, category, name)

    def _is_here(self, tensor: Tensor) -> bool:
        return True

    def _describe(self, func: Any) -> Op:
        op = describe(func, self._workspaces.get(func))
        schema = getattr(func, "_schema", None)
        if schema is None or schema.name.split("::")[0] not in KNOWN_NAMESPACES:
            raise CannotPredict(f"{op.name} is a custom operator, whose memory is unknown{self._where()}")
        op = self._ops[func] = replace(op, flops=flop_registry.get(func.overloadpacket))
        return op

    def _where(self) -> str:
        return f" (in {self._modules[-1]})" if self._modules else ""

    def _ask(self, op: Op, func: Any, args: Any, kwargs: Any) -> Form:
        try:
            return self._forms.ask(op.name, func, args, kwargs)
        except CannotPredict as error:
            raise CannotPredict(f"{error}{self._where()}") from error

    def _count_flops(self, op: Op, key: Any, args: Any, kwargs: Any, form: Form) -> None:
        assert op.flops is not None
        count = self._known.get((_FLOPS, key))
        if count is None:
            count = self._known[_FLOPS, key] = float(op.flops(*args, **kwargs, out_val=shapes_of(form)))
        self.flops[self._phase] = self.flops.get(self._phase, 0.0) + count

    # -- results -----------------------------------------------------------------------------------------------------

    def _new(self, result: Result, operator: str) -> Tensor:
        tensor, storage = make(result.nbytes, result.shape, result.stride, result.dtype, result.offset)
        if result.nbytes:
            in_data = Category.input if self._in_data else Category.temporary
            self._watch(storage, result.rounded, Category.host if host.depth else in_data, operator)
        return tensor

    def _made(self, form: Form, operator: str, made: list[Tensor]) -> Any:
        """New tensors as `form` says; `made` collects them. No inner function: one that calls itself is a reference
        cycle, which would keep them alive."""
        if isinstance(form, Result):
            if form.same_storage_as >= 0:
                base = made[form.same_storage_as].untyped_storage()
                tensor = torch.empty(0, dtype=form.dtype).set_(base, form.offset, form.shape, form.stride)
            else:
                tensor = self._new(form, operator)
            made.append(tensor)
            return tensor
        if isinstance(form, (list, tuple)):
            return type(form)(self._made(item, operator, made) for item in form)
        return form

    def _made_with_workspace(self, op: Op, args: Any, kwargs: Any, form: Form) -> Any:
        assert op.workspace is not None
        ids: list[int] = []
        try:
            ids.extend(self.allocate(nbytes, op.name) for nbytes in op.workspace(args, kwargs, form) if nbytes > 0)
            return self._made(form, op.name, [])
        finally:
            for id in reversed(ids):
                self.log.end(id)

    def _mutated(self, op: Op, args: Any, kwargs: Any) -> Any:
        """What an operator returns that writes to its arguments: these."""
        if (self._real or self._drawn) and op.name != FINITE_CHECK:
            for position in op.written:
                self._forget(_argument(op, position, args, kwargs))
        if op.returned is None:
            return None
        values = [_argument(op, position, args, kwargs) for position in op.returned]
        return values[0] if len(values) == 1 else tuple(values)

    # -- tensors that have values ------------------------------------------------------------------------------------

    def keep_real(self, tensor: Tensor) -> None:
        """A tensor from outside that has memory and values: operators on it and others of its kind are computed."""
        self._keep_real(tensor)

    def _keep_real(self, tensor: Tensor) -> None:
        self._remember(self._real, tensor)

    @staticmethod
    def _remember(storages: dict[int, weakref.ref[Any]], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        storages[key] = weakref.ref(storage, lambda _: storages.pop(key, None))

    def _forget(self, value: Any) -> None:
        """The tensors in `value` have been written to by something that has no values."""
        if isinstance(value, Tensor):
            for storages in (self._real, self._drawn):
                storages.pop(value.untyped_storage()._cdata, None)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._forget(item)

    def _all_real(self, args: Any, kwargs: Any) -> bool:
        """Whether there are tensors among the arguments and all of them have values."""
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
        key = key_of(func, args, kwargs)
        if key not in self._known:
            try:
                self._known[key] = self._ask(op, func, args, kwargs or {})
            except CannotPredict:  # a shape that depends on values, which are there
                return True
        return all(_is_small(result.shape, result.dtype) for result in results_of(self._known[key]))

    def _computed(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else []:
            if isinstance(tensor, Tensor):
                if _is_small(tensor.shape, tensor.dtype):
                    self._keep_real(tensor)
                self._see(tensor, op.name)
        return out

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _rare(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if op.effect is Effect.python_data:
            return self._from_python(op, args[0])
        if op.effect is Effect.resizes:
            return self._resized(op, func, args, kwargs)
        if name.startswith("aten::_assert"):
            return None
        given = any(isinstance(a, Tensor) for a in args) and not self._all_real(args, kwargs)
        if given and (name in READS or func._schema.returns):
            raise CannotPredict(f"{op.name} reads a value, which is not there{self._where()}")
        return func(*args, **kwargs)

    def _from_python(self, op: Op, tensor: Tensor) -> Tensor:
        if self._live.get(storage_id(tensor)) is not None:
            return tensor  # torch.tensor(..., device="cuda") has been moved there already
        if _is_small(tensor.shape, tensor.dtype):
            self._keep_real(tensor)
        else:
            tensor = hollow(tensor.shape, tensor.dtype, tensor.stride())
        if self._count_python_data:
            self._see(tensor, op.name)
        return tensor

    def _resized(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        """resize_, set_ and out=: the storage of an argument may change."""
        name = func._schema.name
        if name.startswith("aten::set_"):
            return self._resizing(op, func, args, kwargs)
        if name in ("aten::resize_", "aten::resize_as_"):
            self._give_storage(args[0], args[1].shape if name == "aten::resize_as_" else args[1], op.name)
            return args[0]
        form = self._ask(op, func, args, {k: v for k, v in kwargs.items() if v is not None})
        outs = [_argument(op, position, args, kwargs) for position in op.written]
        for target, result in zip(outs, results_of(form), strict=True):
            self._forget(target)
            if tuple(target.shape) != result.shape:
                self._give_storage(target, result.shape, op.name)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _give_storage(self, tensor: Tensor, shape: Any, operator: str) -> None:
        shape = tuple(shape)
        new = hollow(shape, tensor.dtype)
        old, storage = tensor.untyped_storage(), new.untyped_storage()
        if storage.nbytes() <= old.nbytes():
            tensor.set_(old, tensor.storage_offset(), shape, new.stride())
            return
        tensor.set_(storage, 0, shape, new.stride())
        self._replace(self._live.pop(old._cdata, None), storage, storage.nbytes(), operator)


def _argument(op: Op, position: int, args: Any, kwargs: Any) -> Any:
    return args[position] if position < len(args) else kwargs.get(op.names[position])


def _is_small(shape: Iterable[int], dtype: torch.dtype) -> bool:
    return math.prod(shape) <= (REAL_FLOATS if dtype.is_floating_point or dtype.is_complex else REAL_INTEGERS)
