"""What operators do to memory, read from their schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor


def strided(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with a storage that a tensor consists of: itself, or a sparse tensor's indices and values."""
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors with a storage in a nested structure, such as an optimizer's state."""
    if isinstance(value, Tensor):
        yield from strided(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def storages_in(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages in an operator's arguments or results."""
    if isinstance(value, torch.UntypedStorage):
        yield value
    elif isinstance(value, Tensor):
        for tensor in strided(value):
            yield tensor.untyped_storage()
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from storages_in(item)


class Effect(Enum):
    none = auto()  # returns no tensor and writes to none
    view = auto()  # returns views, or changes nothing but shape and strides
    mutates = auto()  # writes to arguments and returns them or nothing
    one_new = auto()  # one new tensor
    new = auto()  # new tensors, perhaps beside others
    resizes = auto()  # may change the storage of an argument
    python_data = auto()  # a tensor made from Python's numbers


@dataclass(frozen=True, slots=True)
class Op:
    name: str  # such as aten.mm
    effect: Effect
    fresh: frozenset[int] | None = None  # positions of the new results; None: all
    workspace: Callable[[Any, Any, Any], Iterable[int]] | None = None
    written: tuple[int, ...] = ()  # positions of the arguments that are written to
    returned: tuple[int, ...] | None = None  # positions of the arguments that are returned
    names: tuple[str, ...] = field(default=())  # of the arguments
    flops: Callable[..., int] | None = None  # formula, where it is counted
    known: bool = False  # a factory whose values follow from its arguments


#: Their schemas promise a new tensor, but the result shares the argument's storage.
_VIEWS = {"aten::_unsafe_view", "aten::lift", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}
#: Factories whose values follow from their arguments.
_KNOWN_VALUES = {
    f"aten::{name}"
    for name in ["arange", "zeros", "ones", "full", "linspace", "scalar_tensor", "eye", "tril_indices", "triu_indices"]
}
_RESIZING = ("aten::resize", "aten::set_", "aten::_resize_output")


def describe(func: Any, workspace: Callable[[Any, Any, Any], Iterable[int]] | None = None) -> Op:
    """The effect of an operator overload (or of anything else that a dispatch mode is given)."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Op(getattr(func, "__name__", str(func)), Effect.new, None, workspace)
    name = schema.name.replace("::", ".")
    arguments, returns = schema.arguments, schema.returns
    names = tuple(a.name for a in arguments)
    written = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    fresh = frozenset(i for i, r in enumerate(returns) if r.alias_info is None and "Tensor" in str(r.type))
    all_fresh = None if len(returns) == 1 or len(fresh) == len(returns) else fresh

    if schema.name == "aten::lift_fresh":
        return Op(name, Effect.python_data, None, workspace)
    if schema.name.startswith(_RESIZING) or any(a.is_out for a in arguments):
        return Op(name, Effect.resizes, None, workspace, written, None, names)
    if fresh and schema.name not in _VIEWS:
        one = len(returns) == 1 and str(returns[0].type) == "Tensor"
        return Op(
            name,
            Effect.one_new if one else Effect.new,
            all_fresh,
            workspace,
            written,
            None,
            names,
            known=schema.name in _KNOWN_VALUES,
        )
    if torch.Tag.inplace_view in getattr(func, "tags", ()):
        return Op(name, Effect.view, None, workspace)
    if written:
        sets = {i: arguments[i].alias_info.before_set for i in written}
        aliases = [r.alias_info.before_set for r in returns if r.alias_info is not None]
        returned = tuple(next(i for i in written if sets[i] == alias) for alias in aliases)
        return Op(name, Effect.mutates, None, workspace, written, returned or None, names)
    if (returns and all(r.alias_info is not None for r in returns)) or schema.name in _VIEWS:
        return Op(name, Effect.view, None, workspace)
    return Op(name, Effect.none, None, workspace)
