"""What operators return, without running them: asked once of torch's shape functions, then remembered.

Shape functions know of devices: some results differ between the CPU and CUDA, such as the statistics of a layer norm in
16 bits. For the CPU, FakeTensorMode with its fake CPU device is asked. For CUDA, of which there can be no fake tensors
where there is no CUDA, it is torch's meta device, whose functions take CUDA's side; what has none there is asked of
FakeTensorMode.

Some answers are put right by the kernels' sources: layouts, oneDNN's LSTM, and what bags of embeddings leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from sweep.errors import CannotPredict
from sweep.memory.ledger_log import round_up
from sweep.memory.onednn import LSTM_BACKWARD, LSTM_LAYER, lstm_workspace


@dataclass(frozen=True, slots=True)
class Result:
    """What one resulting tensor looks like. `stride` and `offset` in elements."""

    nbytes: int  # of the storage
    rounded: int
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
                    given = _prepared(name, _on_meta(args))
                    out = func(*given, **{key: _on_meta(value) for key, value in kwargs.items()})
                    return _laid_out(name, _form(out, {}, []), given, contiguous_groups=True)
                except NotImplementedError:
                    pass
            with self._fake:
                given = _prepared(name, _fake(args))
                out = func(*given, **{key: _fake(value) for key, value in kwargs.items()})
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
    return (*results, replace(workspace, nbytes=nbytes, rounded=round_up(nbytes), shape=(nbytes,), stride=(1,)))


def _with_bags(form: Form, weight: Tensor, indices: Any, offsets: Any, scale: Any = False, mode: int = 0) -> Form:
    """Of the bags of all indices the CPU's kernel (EmbeddingBag.cpp) makes one more than it keeps; where it sums rows
    of bf16, which the shape function does not know of, it makes none."""
    out, bags, *others = form
    if not bags.nbytes:
        return form
    none = mode == 0 and weight.dtype is torch.bfloat16 and weight.stride(1) == 1
    nbytes = 0 if none else bags.nbytes + bags.nbytes // bags.shape[0]
    bags = replace(bags, nbytes=nbytes, rounded=round_up(nbytes), shape=(0,) if none else bags.shape)
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
    return replace(result, nbytes=nbytes, rounded=round_up(nbytes))


def _strides(memory_format: torch.memory_format, shape: Any) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def _depends_on_values(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


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


def _on_meta(item: Any) -> Any:
    """Like `item`, with tensors and devices replaced by meta ones."""
    if isinstance(item, Tensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    if isinstance(item, torch.device):
        return torch.device("meta")
    if isinstance(item, (list, tuple)):
        return type(item)(map(_on_meta, item))
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
        return Result(nbytes, round_up(nbytes), tuple(item.shape), tuple(item.stride()), item.dtype, offset, earlier)
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
