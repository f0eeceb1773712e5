"""Seeing every operator without being seen.

While a TorchDispatchMode is active, autograd takes its tensors for subclasses and avoids writing to them: gradients are
added up in new memory (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace), and the backward of max, gather
and indexing copies (areAnyTensorSubclassLike). A ledger that was such a mode would change what it measures. So
operators are caught at a dispatch key below autograd which none of these checks looks at: `Fake`, which torch keeps for
fake tensors in C++ and has no kernels for.

FakeTensorMode's tensors are subclasses by themselves, and their operators run other operators inside; there a mode is
used, and so it is on a torch that has no such key: gradients that are added up then take one tensor more for a moment.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
_VIEWS = """
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
    for name in _VIEWS.split():
        aten.impl(name, torch.library.fallthrough_kernel, "Fake")


def _included() -> AbstractContextManager[object]:
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included | _FAKE, excluded)
