"""Tensors without memory.

A hollow tensor is a plain CPU tensor whose storage has the right size and no memory behind it, so that modules,
autograd, checkpointing and saved-tensor hooks treat it like any other. It must only be used inside of a HollowLedger's
context, where no kernel ever runs.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")

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
