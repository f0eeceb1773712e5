"""Gradients that autograd would add up in place if the ledger did not hold on to storages.

When a second gradient arrives for the same input, the engine writes the sum into the first one if nobody else has it
(torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace). To notice the end of a storage the ledger needs Python's
object for it, which the engine takes for another owner. So the ledger decides for it, by the same rule: the tensor is
dense, the engine's reference is its only one, and no other tensor shares its storage.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sweep.memory.intercept import Intercept

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
