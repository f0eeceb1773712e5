"""Whether a step left something behind in a model: tables and caches as plain attributes, counters, buffers."""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sweep.workload import Workload

#: Values that cannot change, and so are what they are compared by.
_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type, types.ModuleType),
    *(types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic),
)


class _UnknownError(Exception):
    pass


def state_of(workload: Workload) -> list[Any] | None:
    """All that forward and backward could have changed in the model and the loss but the values in tensors, to be
    compared with `==`. None: there is something that cannot be looked into."""
    found: list[Any] = []
    seen: set[int] = set()
    try:
        for _, module in workload.modules_with_state():
            _add(module, found, seen)
        _add(workload.loss, found, seen)
    except (_UnknownError, RecursionError):
        return None
    return found


def _add(value: Any, found: list[Any], seen: set[int]) -> None:
    if isinstance(value, _CONSTANT):
        found.append(value)
        return
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise _UnknownError
        found.append((id(value), value.shape, value.dtype, value.requires_grad, value.untyped_storage()._cdata))
        return
    found.append(id(value))
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for name, item in vars(value).items():
            found.append(name)
            if item is None or item is True or item is False or (isinstance(item, dict) and not item):
                found.append(item is True or item is not None)  # most of a module's attributes are these
            else:
                _add(item, found, seen)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(key, found, seen)
            _add(item, found, seen)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            _add(item, found, seen)
    elif isinstance(value, types.MethodType):
        _add(value.__self__, found, seen)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            _add(cell.cell_contents, found, seen)
    elif isinstance(value, functools.partial):
        for item in (value.func, value.args, value.keywords):
            _add(item, found, seen)
    elif hasattr(value, "__dict__") and type(value).__module__ != "builtins":
        _add(vars(value), found, seen)
    else:
        raise _UnknownError
