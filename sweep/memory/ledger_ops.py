"""Which operators bring new memory, read from their schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class Effect(Enum):
    none = auto()  # returns views, mutated arguments or no tensor
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


#: Their schemas promise a new tensor, but the result shares the argument's storage.
_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias_copy", "aten::lift"}


def describe(func: Any, workspace: Callable[[Any, Any, Any], Iterable[int]] | None = None) -> Op:
    """The effect of an operator overload (or of anything else that a dispatch mode is given)."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Op(getattr(func, "__name__", str(func)), Effect.new, None, workspace)
    name = schema.name.replace("::", ".")
    returns = schema.returns
    if schema.name == "aten::lift_fresh":
        return Op(name, Effect.python_data, None, workspace)
    if schema.name in _VIEWS or not returns:
        return Op(name, Effect.none, None, workspace)
    if schema.name.startswith(("aten::resize", "aten::set_", "aten::_resize_output")) or any(
        a.is_out for a in schema.arguments
    ):
        return Op(name, Effect.resizes, None, workspace)
    fresh = frozenset(i for i, r in enumerate(returns) if r.alias_info is None and "Tensor" in str(r.type))
    if not fresh:
        return Op(name, Effect.none, None, workspace)
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        return Op(name, Effect.one_new, None, workspace)
    return Op(name, Effect.new, None if len(returns) == 1 or len(fresh) == len(returns) else fresh, workspace)
