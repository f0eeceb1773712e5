"""Memory that CUDA's kernels take inside of one operator, beside its results.

Each function gives sizes in bytes from the operator's arguments; a ledger adds them for the duration of the operator.
Sources are files of ATen/native/cuda.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

aten = torch.ops.aten


def embedding_backward(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
    """embedding_dense_backward_cuda (Embedding.cu, EmbeddingBackwardKernel.cu).

    Up to 3072 indices, gradients are added up directly. Beyond, indices are sorted (two arrays of their size and type
    beside the sort's own), cut into segments of equal indices and these into parts of 10, and each part is summed in
    fp32: at most n / 10 + min(n, rows) parts, since the number is not asked of the device.
    """
    gradient, indices, rows = args[0], args[1], args[2]
    scale_by_frequency = args[4] if len(args) > 4 else kwargs.get("scale_grad_by_freq", False)
    n, width = indices.numel(), gradient.shape[-1]
    if n <= 3072 and not scale_by_frequency:
        return
    itemsize = indices.element_size()
    segments = min(n, rows)
    parts = n // 10 + segments
    yield n * itemsize
    yield n * itemsize
    yield segments * itemsize
    yield segments * itemsize
    yield parts * itemsize
    yield parts * width * 4


def index_put_accumulate(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
    """index_put_with_sort_kernel (Indexing.cu): linear indices, their order, and both sorted, int64."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate:
        return
    n = 1
    for size in torch.broadcast_shapes(*(i.shape for i in args[1] if i is not None)):
        n *= size
    for _ in range(4):
        yield n * 8


WORKSPACES = {
    aten.embedding_dense_backward.default: embedding_backward,
    aten.index_put_.default: index_put_accumulate,
    aten.index_put.default: index_put_accumulate,
    aten._index_put_impl_.default: index_put_accumulate,
}
