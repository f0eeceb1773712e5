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
import mmap
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils.flop_counter import flop_registry

from sweep.errors import CannotPredict
from sweep.memory.ledger import Ledger, host, host_memory
from sweep.memory.operators import ADD, Effect, Op, Workspace, describe, replaced, storage_id
from sweep.results import Category, Phase

LSTM_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
#: Multiplications up to which the layer itself is run: about half a second on one core.
AFFORDABLE = 1e10
PAGE_ROWS = 64


def lstm_workspace(args: Any) -> int:
    """Bytes, for the arguments of mkldnn_rnn_layer: (steps, samples, features) and two weights first.

    Raises CannotPredict for a layer that is too large to ask for and whose workspace follows from no smaller one.
    """
    steps, samples, features = args[0].shape
    rows = tuple(args[1].shape), tuple(args[2].shape), args[0].dtype, tuple(args[7:])
    per_step = float(args[1].numel() + args[2].numel())
    if per_step * steps * samples <= AFFORDABLE:
        return _asked(steps, samples, features, *rows)
    one, two, three = (_asked(n, PAGE_ROWS, features, *rows) for n in (1, 2, 3))
    if samples % PAGE_ROWS or three - two != two - one:
        raise CannotPredict(
            f"oneDNN's workspace for an LSTM of {steps} steps and {samples} samples is not known without running it; "
            f"give a multiple of {PAGE_ROWS} samples, or fewer"
        )
    return samples // PAGE_ROWS * (one + (steps - 1) * (two - one))


def _asked(
    steps: int, samples: int, features: int, weights: Any, recurrent: Any, dtype: torch.dtype, options: Any
) -> int:
    hidden = recurrent[1]
    given = [torch.zeros(size, dtype=dtype) for size in ((steps, samples, features), weights, recurrent)]
    bias, state = torch.zeros(weights[0], dtype=dtype), torch.zeros(1, samples, hidden, dtype=dtype)
    return LSTM_LAYER(*given, bias, bias, state, state, *options)[3].untyped_storage().nbytes()


CPU, META = torch.device("cpu"), torch.device("meta")

_storage_of = torch._C._construct_storage_from_data_pointer
_refuse_access = torch._C._set_throw_on_mutable_data_ptr


def _zero_pages() -> tuple[int, int]:
    """Address and size of a region that reads as zeros and takes no memory; (0, 0) where the system gives none.

    Hollow tensors point to it, so that showing one by accident (a debugger, a traceback with values) reads zeros rather
    than ending the process.
    """
    for tib in (1.0, 1 / 16, 1 / 256):
        nbytes = int(tib * 2**40)
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            region = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ)
        except (OSError, ValueError, AttributeError, OverflowError):
            continue
        _kept.append(region)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to is the point
            return torch.frombuffer(region, dtype=torch.uint8, count=1).data_ptr(), nbytes
    return 0, 0


_kept: list[mmap.mmap] = []
_ZEROS, _ZEROS_BYTES = _zero_pages()


def hollow(shape: Iterable[int], dtype: torch.dtype, stride: Iterable[int] | None = None) -> Tensor:
    """A tensor of this shape with no memory. `stride` in elements, None: contiguous.

    To be called outside of a ledger's context, or from inside of its dispatch.
    """
    shape = tuple(shape)
    if stride is None:
        like = torch.empty(shape, dtype=dtype, device="meta")
    else:
        like = torch.empty_strided(shape, tuple(stride), dtype=dtype, device="meta")
    return make(like.untyped_storage().nbytes(), shape, like.stride(), dtype, 0)[0]


def make(
    nbytes: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, offset: int
) -> tuple[Tensor, torch.UntypedStorage]:
    """A hollow tensor on a storage of `nbytes`, and the storage. `stride` and `offset` in elements."""
    storage: Any = _storage_of(_ZEROS if nbytes <= _ZEROS_BYTES else 0, CPU, nbytes)
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    _refuse_access(tensor)  # a kernel that wanted to write here would raise
    return tensor, storage


def is_hollow(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # the storage refuses
        return True
    return False


@dataclass(frozen=True, slots=True)
class Result:
    """What one resulting tensor looks like. `stride` and `offset` in elements."""

    nbytes: int  # of the storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    same_storage_as: int = -1  # position of an earlier result with the same storage


#: The results of an operator: a Result in place of each tensor, in lists and tuples as they are returned.
Form = Any

#: Some shape functions are decompositions, whose first result has other strides than the kernels' where the arguments
#: are not all contiguous. That counts: whatever takes a gradient that is not contiguous copies it first.
_CONTIGUOUS = {
    "aten.native_layer_norm_backward", "aten._log_softmax_backward_data", "aten.mse_loss_backward",
    "aten.smooth_l1_loss_backward", "aten.huber_loss_backward",
}  # fmt: skip
#: By the position of the argument that it is laid out like, channels last or contiguous.
_LIKE_IMAGES = {
    "aten.native_batch_norm": 0, "aten.native_batch_norm_backward": 1, "aten.native_group_norm_backward": 1,
    "aten.native_channel_shuffle": 0, "aten.reflection_pad2d_backward": 1, "aten.replication_pad2d_backward": 1,
}  # fmt: skip
#: By the positions of the arguments that a loop over all elements goes by.
_ELEMENTWISE = {
    "aten.hardtanh_backward": (0, 1), "aten.hardsigmoid_backward": (0, 1), "aten.logit_backward": (0, 1),
    "aten.elu_backward": (0, 5), "aten.hardswish_backward": (0, 1), "aten.leaky_relu_backward": (1, 0),
    "aten.native_dropout_backward": (0, 1), "aten.softplus_backward": (0, 1), "aten.threshold_backward": (1, 0),
}  # fmt: skip
#: Kernels that make their result as large as the arguments and then cut it down, which keeps the memory: reduced losses
#: (by the position of the reduction; BinaryOps.cpp, Loss.cpp) and the sum over overlapping patches (Col2Im.cpp).
_CUT_DOWN = {
    "aten.mse_loss": 2, "aten.smooth_l1_loss": 2, "aten.binary_cross_entropy": 3, "aten.col2im": None,
}  # fmt: skip


class Forms:
    """Forms by operator and arguments.

    known: may be shared between those with the same `as_cuda`: a form depends on nothing else.
    as_cuda: take CUDA's side where the CPU's result is another.
    """

    def __init__(self, known: dict[Any, Form] | None = None, as_cuda: bool = False) -> None:
        self.known: dict[Any, Form] = {} if known is None else known
        self._as_cuda = as_cuda
        self._fake = FakeTensorMode()

    def ask(self, name: str, func: Any, args: Any, kwargs: Any) -> Form:
        """Raises CannotPredict where the answer depends on values, or where there is none."""
        try:
            if self._as_cuda and not _depends_on_values(func):
                try:
                    given = _prepared(name, _copied(args, META))
                    out = func(*given, **{key: _copied(value, META) for key, value in kwargs.items()})
                    return _laid_out(name, _form(out, {}, []), given, contiguous_groups=True)
                except NotImplementedError:
                    pass
            with self._fake:
                given = _prepared(name, _copied(args, None))
                out = func(*given, **{key: _copied(value, None) for key, value in kwargs.items()})
                form = _laid_out(name, _form(out, {}, []), given, contiguous_groups=self._as_cuda)
            if name.startswith("aten._embedding_bag") and not name.endswith("backward"):
                return _with_bags(form, *args[:5])
            if func is LSTM_LAYER:
                return _with_workspace(form, lstm_workspace(args))
            return [replace(result, same_storage_as=-1) for result in form] if func is LSTM_BACKWARD else form
        except (DataDependentOutputException, DynamicOutputShapeException, _DependsOnValues) as error:
            raise CannotPredict(f"{name} depends on values, which are not there") from error
        except UnsupportedOperatorException as error:
            raise CannotPredict(f"torch cannot say what {name} returns") from error
        except _Sparse as error:
            raise CannotPredict(f"{name} returns a sparse tensor; sparse gradients are not predicted") from error


def _with_workspace(form: Form, nbytes: int) -> Form:
    """The form of an LSTM layer with `nbytes` of workspace as its last result."""
    *results, workspace = form
    return (*results, replace(workspace, nbytes=nbytes, shape=(nbytes,), stride=(1,)))


def _with_bags(form: Form, weight: Tensor, indices: Any, offsets: Any, scale: Any = False, mode: int = 0) -> Form:
    """Of the bags of all indices the CPU's kernel (EmbeddingBag.cpp) makes one more than it keeps; where it sums rows
    of bf16, which the shape function does not know of, it makes none."""
    out, bags, *others = form
    if not bags.nbytes:
        return form
    none = mode == 0 and weight.dtype is torch.bfloat16 and weight.stride(1) == 1
    nbytes = 0 if none else bags.nbytes + bags.nbytes // bags.shape[0]
    bags = replace(bags, nbytes=nbytes, shape=(0,) if none else bags.shape)
    return (out, bags, *others)


def _prepared(name: str, args: Any) -> Any:
    """The arguments as the shape function can take them: group norm's views a gradient that the kernel would copy."""
    return (args[0].contiguous(), *args[1:]) if name == "aten.native_group_norm_backward" else args


def _laid_out(name: str, form: Form, args: Any, *, contiguous_groups: bool) -> Form:
    """The form with the first result's strides as the kernel makes them. CUDA's group norm knows no channels last."""
    first, *others = (form,) if isinstance(form, Result) else form if isinstance(form, (tuple, list)) else (None,)
    if not isinstance(first, Result):  # None where no gradient is asked for
        return form
    if name in _CUT_DOWN:
        return _cut_down(first, args, _CUT_DOWN[name])
    if name in _CONTIGUOUS:
        stride = _strides(torch.contiguous_format, first.shape)
    elif name in _LIKE_IMAGES:
        plain = contiguous_groups and "group_norm" in name
        like = torch.contiguous_format if plain else suggest_memory_format(args[_LIKE_IMAGES[name]])
        stride = _strides(like, first.shape)
    elif name in _ELEMENTWISE:
        one, other = _ELEMENTWISE[name]
        stride = torch.mul(args[one], args[other]).stride()
    else:
        return form
    first = replace(first, stride=stride)
    return first if isinstance(form, Result) else type(form)([first, *others])


def _cut_down(result: Result, args: Any, reduction: int | None) -> Result:
    if reduction is not None and len(args) > reduction and args[reduction] == 0:
        return result
    made = args[0].shape if reduction is None else torch.broadcast_shapes(args[0].shape, args[1].shape)
    nbytes = max(result.nbytes, math.prod(made) * result.dtype.itemsize)
    return replace(result, nbytes=nbytes)


def _strides(memory_format: torch.memory_format, shape: Any) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def _depends_on_values(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


class _DependsOnValues(Exception):
    pass


class _Sparse(Exception):
    pass


def _copied(item: Any, device: torch.device | None) -> Any:
    """Like `item`, with new tensors and devices on `device`; None: fake ones, to be called inside of FakeTensorMode."""
    if isinstance(item, Tensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device)
    if isinstance(item, torch.device):
        return device or item
    if isinstance(item, (list, tuple)):
        return type(item)(_copied(i, device) for i in item)
    return item


def _form(item: Any, seen: dict[int, int], made: list[None]) -> Form:
    if isinstance(item, Tensor):
        if item.layout is not torch.strided:
            raise _Sparse
        storage = item.untyped_storage()
        nbytes, offset = storage.nbytes(), item.storage_offset()
        if not isinstance(nbytes, int) or not isinstance(offset, int):
            raise _DependsOnValues
        first = seen.setdefault(storage._cdata, len(made))
        earlier = first if first < len(made) else -1
        made.append(None)
        return Result(nbytes, tuple(item.shape), tuple(item.stride()), item.dtype, offset, earlier)
    if isinstance(item, (list, tuple)):
        return type(item)(_form(i, seen, made) for i in item)
    if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _DependsOnValues
    return item


def results_of(form: Form) -> Iterator[Result]:
    if isinstance(form, Result):
        yield form
    elif isinstance(form, (list, tuple)):
        for item in form:
            yield from results_of(item)


def shapes_of(form: Form) -> Any:
    """The form with tensors on torch's meta device: what torch's FLOP formulas take."""
    if isinstance(form, Result):
        return torch.empty(form.shape, device="meta")
    if isinstance(form, (list, tuple)):
        return type(form)(shapes_of(item) for item in form)
    return form


def key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """What a form depends on. Values of floating-point numbers matter only where no tensor is given (arange)."""
    key: list[Any] = [func]
    tensors = _add_to_key(args, key)
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            tensors |= _add_to_key((value,), key)
    if not tensors:
        key.append(repr((args, kwargs)))
    return tuple(key)


def _add_to_key(items: Any, key: list[Any]) -> bool:
    """Append what describes `items`. Returns whether a tensor is among them."""
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
            tensors |= _add_to_key(item, key)
        elif item is None or kind is torch.Generator:
            key.append(None)
        else:
            key += (kind, item)
    return tensors


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
        self._replacements = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        if self._entered == 1:
            # tolist reads memory without asking any mode; the others that do (numpy, dlpack) refuse by themselves.
            self._replacements.enter_context(replaced(Tensor, "tolist", self._tolist()))
            if hasattr(nn.init, "_no_grad_trunc_normal_"):
                self._replacements.enter_context(replaced(nn.init, "_no_grad_trunc_normal_", self._any_weights()))
        return self

    def __exit__(self, *error: object) -> None:
        if self._entered == 1:
            self._replacements.close()
        super().__exit__(*error)

    def _tolist(self) -> Any:
        original = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            if is_hollow(tensor):
                raise CannotPredict(f"tolist reads values, which are not there{self._where()}")
            return original(tensor)

        return tolist

    def _any_weights(self) -> Any:
        """It draws again while a value is out of bounds. Weights that have no values are done as they are."""
        original = nn.init._no_grad_trunc_normal_
        return lambda tensor, *args, **kwargs: tensor if is_hollow(tensor) else original(tensor, *args, **kwargs)

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
                with self._workspace(op, args, kwargs, None):
                    pass
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
            self.keep_real(decided)
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
            with self._workspace(op, args, kwargs, form):
                return self._made(form, op.name, [])
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
        data = self._new(Result(nbytes, shape, like, padded.dtype, 0), op.name)
        self.keep_real(sizes)
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
        self.keep_real(number)
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
        if wanted is None:
            wanted = host.depth == 0 and self._side_of(args, kwargs)
        with host_memory(not wanted):
            return self._result(op, func, args, kwargs)

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
            self._watch(storage, result.nbytes, Category.host if host.depth else in_data, operator)
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
        """A tensor that has memory and values: operators on it and others of its kind are computed."""
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
                    self.keep_real(tensor)
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
            self.keep_real(tensor)
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
