"""What operators do to memory, read from their schemas; and how they are seen without being noticed.


While a TorchDispatchMode is active, autograd takes its tensors for subclasses and avoids writing to them: gradients are
added up in new memory (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace), and the backward of max, gather
and indexing copies (areAnyTensorSubclassLike). A ledger that was such a mode would change what it measures. So
operators are caught at a dispatch key below autograd which none of these checks looks at: `Fake`, which torch keeps for
fake tensors in C++ and has no kernels for.

FakeTensorMode's tensors are subclasses by themselves, and their operators run other operators inside; there a mode is
used, and so it is on a torch that has no such key: gradients that are added up then take one tensor more for a moment.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Bytes that a kernel takes inside of one operator: f(args, kwargs, result) -> sizes, all alive together.
Workspace = Callable[[Any, Any, Any], Iterable[int]]


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
    workspace: Workspace | None = None
    written: tuple[int, ...] = ()  # positions of the arguments that are written to
    returned: tuple[int, ...] | None = None  # positions of the arguments that are returned
    names: tuple[str, ...] = ()  # of the arguments
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


def describe(func: Any, workspace: Workspace | None = None) -> Op:
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
        effect, known = Effect.one_new if one else Effect.new, schema.name in _KNOWN_VALUES
        return Op(name, effect, all_fresh, workspace, written, None, names, known=known)
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


# -- how they are seen -------------------------------------------------------------------------------------------------

ADD = torch.ops.aten.add.Tensor


#: Nodes that add tensors themselves, into new memory (FunctionsManual.cpp).
_ADDING_NODES = ("VarMeanBackward", "StdMeanBackward", "RenormBackward", "CumprodBackward")


def in_engine() -> bool:
    """Whether a backward pass runs and the engine may be adding up gradients."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    node = torch._C._current_autograd_node()
    return node is None or not node.name().startswith(_ADDING_NODES)


def can_be_added_in_place(first: Tensor, second: Any, storage_owners: int) -> bool:
    """`storage_owners`: references to the storage of a tensor that nobody else has."""
    return (
        isinstance(second, Tensor)
        and first.shape == second.shape
        and first.dtype is second.dtype
        and _references(first) == references_of_the_engine()
        and torch._C._storage_Use_Count(storage_id(first)) <= storage_owners
        and _is_dense(first)
    )


def storage_id(tensor: Any) -> int:
    """What identifies the tensor's storage, without making Python's object for it."""
    return getattr(torch._C, "_storage_id")(tensor)  # noqa: B009 - not in torch's stubs


def _references(tensor: Any) -> int:
    return tensor._use_count()


@functools.cache
def references_of_the_engine() -> int:
    """References to a gradient that only the engine has, as seen while it is being added to. 0: never added to.

    What Python code adds in a backward pass has one fewer, since no C++ variable holds it. To be called first where no
    backward pass runs.
    """
    seen: list[int] = []

    class Watch:
        def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
            if func is ADD and in_engine():
                seen.append(_references(args[0]))
            # Another owner of the storage keeps the engine from adding in place, which could not be seen here.
            out = func(*args, **kwargs)
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor):
                    tensor.untyped_storage()
            return out

    with torch.enable_grad(), Intercept(Watch()):
        middle = torch.ones(2, requires_grad=True) * 2
        (torch.tanh(middle) * torch.sigmoid(middle)).sum().backward()
    return min(seen, default=0)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps or overlaps, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


_KeySet = torch._C.DispatchKeySet


class Receiver(Protocol):
    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. What is called in here is not caught again."""


def _key(name: str) -> Any:
    """The key set of one functionality by name, since Python's enumeration does not list them all. None: unknown."""
    first = _KeySet(torch._C.DispatchKey.BackendSelect).raw_repr()
    for distance in range(1, 8):
        candidate = _KeySet.from_raw_repr(first << distance)
        if str(candidate) == f"DispatchKeySet({name})":
            return candidate
    return None


_FAKE = _key("Fake")
#: Where modes come after this key (older torch), operators are handed on to them first.
_BEFORE_MODES = _FAKE is not None and _FAKE.raw_repr() > _KeySet(torch._C.DispatchKey.Python).raw_repr()

#: Views allocate nothing and need not be seen. `detach` must not be: a Parameter is made from its result, which may
#: have no Python object yet.
_UNSEEN = """
alias as_strided detach diagonal expand permute select.int slice.Tensor split.Tensor split_with_sizes squeeze
squeeze.dim squeeze.dims t transpose.int unbind.int unfold unsqueeze view view.dtype _reshape_alias _unsafe_view
"""

_receivers: list[Receiver] = []  # innermost last; shared by all threads, since autograd's own run backward
_libraries: list[torch.library.Library] = []  # registrations last as long as these


def _caught(keys: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    if _BEFORE_MODES and torch._C._len_torch_dispatch_stack():
        return func.redispatch(keys & _KeySet.from_raw_repr(_FAKE.raw_repr() - 1), *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(_FAKE):
        if not _receivers:
            return func(*args, **kwargs)
        return _receivers[-1].dispatch(func, args, kwargs)


class _Mode(TorchDispatchMode):
    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self._receiver = receiver

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._receiver.dispatch(func, args, kwargs or {})


class Intercept:
    """A context in which this thread's operators, and those of backward passes that it starts, go to a receiver.

    May be entered again, in other threads too.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._local = threading.local()

    def __enter__(self) -> None:
        stack = ExitStack()
        if _FAKE is None or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            stack.enter_context(_Mode(self._receiver))
        else:
            _register()
            _receivers.append(self._receiver)
            stack.callback(_receivers.remove, self._receiver)
            stack.enter_context(_included())
        if not hasattr(self._local, "stacks"):
            self._local.stacks = []
        self._local.stacks.append(stack)

    def __exit__(self, *error: object) -> None:
        self._local.stacks.pop().close()


def _register() -> None:
    if _libraries:
        return
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend([everything, aten])
    everything.fallback(_caught, "Fake", with_keyset=True)
    for name in _UNSEEN.split():
        aten.impl(name, torch.library.fallthrough_kernel, "Fake")


def _included() -> AbstractContextManager[object]:
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included | _FAKE, excluded)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """The attribute in place of what is there; afterwards what was there, or was inherited, is back."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
