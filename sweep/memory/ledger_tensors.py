"""The tensors and storages that a value consists of."""

from __future__ import annotations

from collections.abc import Iterator
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
