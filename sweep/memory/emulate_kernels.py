"""Memory that CUDA's kernels take inside of one operator, beside its results.

Each function gives sizes in bytes from the operator's arguments; a ledger adds them for the duration of the operator.
Sources are files of ATen/native/cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Sizes = Callable[[Any, Any, Any], Iterable[int]]


def embedding_backward(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
    """embedding_dense_backward_cuda (Embedding.cu, EmbeddingBackwardKernel.cu).

    Up to 3072 indices, gradients are added up directly. Beyond, indices are sorted (two arrays of their size and type,
    and as much again for the sort itself), cut into segments of equal indices and these into parts of 10, each summed
    in fp32: at most n / 10 + min(n, rows) parts, since the number is not asked of the device.
    """
    gradient, indices, rows = args[0], args[1], args[2]
    yield from _copy(gradient)
    scale_by_frequency = args[4] if len(args) > 4 else kwargs.get("scale_grad_by_freq", False)
    n, width = indices.numel(), gradient.shape[-1]
    if n <= 3072 and not scale_by_frequency:
        return
    itemsize = indices.element_size()
    segments = min(n, rows)
    parts = n // 10 + segments
    yield n * itemsize
    yield n * itemsize
    yield 2 * n * itemsize
    yield segments * itemsize
    yield segments * itemsize
    yield parts * itemsize
    yield parts * width * 4


def index_put_accumulate(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
    """index_put_with_sort_kernel (Indexing.cu): linear indices, their order, both sorted; the sort's own. int64."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate:
        return
    n = 1
    for size in torch.broadcast_shapes(*(i.shape for i in args[1] if i is not None)):
        n *= size
    for _ in range(4):
        yield n * 8
    yield 2 * n * 8


def sort(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
    """sort_cuda_kernel (Sort.cpp): up to 4096 elements are sorted in place; of longer ones cub takes another copy,
    beside that of the values and their positions that it sorts from."""
    tensor = args[0]
    dim = next((a for a in (*args[1:], kwargs.get("dim")) if type(a) is int), -1)
    if tensor.dim() and tensor.shape[dim] > 4096:
        yield tensor.numel() * tensor.element_size()
        yield tensor.numel() * 8
        yield tensor.numel() * (tensor.element_size() + 8)


def foreach_norm(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
    """foreach_tensor_norm_cuda (ForeachReduceOp.cu): one partial norm for each 65536 elements of the largest tensor."""
    tensors = args[0]
    yield len(tensors) * max(-(-t.numel() // 65536) for t in tensors) * 4


def contiguous(*positions: int) -> Sizes:
    """Kernels that work on contiguous inputs copy others first: softmax, norms and losses (SoftMax.cu, ...)."""

    def sizes(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
        for position in positions:
            if position < len(args) and isinstance(args[position], Tensor):
                yield from _copy(args[position])

    return sizes


def _copy(tensor: Tensor) -> Iterable[int]:
    if not tensor.is_contiguous():
        yield tensor.numel() * tensor.element_size()


def matrices(*positions: int) -> Sizes:
    """prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas (Blas.cpp).

    A matrix whose rows or columns are not dense, such as an expanded one, is copied.
    """

    def sizes(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
        for position in positions:
            matrix = args[position]
            (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
            by_rows = across == 1 and down >= max(1, columns)
            by_columns = down == 1 and across >= max(1, rows)
            if not by_rows and not by_columns and matrix.numel() > 0:
                yield matrix.numel() * matrix.element_size()

    return sizes


#: Operators that cuBLAS runs, and the matrices that they take.
GEMM: dict[Any, Sizes] = {
    aten.mm.default: matrices(0, 1),
    aten.addmm.default: matrices(1, 2),
    aten.bmm.default: matrices(0, 1),
    aten.baddbmm.default: matrices(1, 2),
    aten._addmm_activation.default: matrices(1, 2),
    aten.mv.default: matrices(0),
    aten.addmv.default: matrices(1),
    aten.dot.default: contiguous(),
}
WORKSPACES: dict[Any, Sizes] = {
    aten.embedding_dense_backward.default: embedding_backward,
    aten.index_put_.default: index_put_accumulate,
    aten.index_put.default: index_put_accumulate,
    aten._index_put_impl_.default: index_put_accumulate,
    aten._foreach_norm.Scalar: foreach_norm,
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten._softmax.default: contiguous(0),
    aten._softmax_backward_data.default: contiguous(0, 1),
    aten._log_softmax.default: contiguous(0),
    aten._log_softmax_backward_data.default: contiguous(0, 1),
    aten.native_layer_norm.default: contiguous(0),
    aten.native_layer_norm_backward.default: contiguous(0, 1),
    aten._fused_rms_norm.default: contiguous(0),
    aten._fused_rms_norm_backward.default: contiguous(0, 1),
    aten.nll_loss_forward.default: contiguous(0, 1),
    aten.nll_loss_backward.default: contiguous(1, 2),
}
CONVOLUTION = "not counted: cuDNN's workspaces for convolutions"
#: What is said of a prediction in which operators ran that take memory of an unknown size, by their names.
UNCOUNTED: dict[str, tuple[str, ...]] = {
    CONVOLUTION: ("convolution", "convolution_backward", "_slow_conv2d_forward"),
    "not counted: cuDNN's workspaces for attention": ("_scaled_dot_product_cudnn_attention",),
    "not counted: cub's own memory for selections and scans (top-k, unique, cumulative sums, masks)": (
        *("topk", "kthvalue", "median", "nanmedian", "mode", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
        *("_unique2", "unique_dim", "unique_consecutive", "nonzero", "masked_select", "masked_scatter", "bincount"),
        *("histc", "multinomial", "randperm"),
    ),
    "not counted: cuFFT's workspaces": ("_fft_r2c", "_fft_c2r", "_fft_c2c"),
    "not counted: cuSOLVER's workspaces for linear algebra": (
        *("linalg_lu_factor_ex", "linalg_lu", "linalg_lu_solve", "_linalg_solve_ex", "linalg_inv_ex", "linalg_qr"),
        *("linalg_cholesky_ex", "cholesky", "cholesky_solve", "cholesky_inverse", "_linalg_svd", "_linalg_eigh"),
        *("linalg_eig", "_linalg_eigvals", "linalg_lstsq", "linalg_ldl_factor_ex", "linalg_ldl_solve", "_linalg_det"),
        *("_linalg_slogdet", "linalg_householder_product", "linalg_solve_triangular", "triangular_solve", "ormqr"),
    ),
    "not counted: what torch's fused layer of a transformer takes inside": (
        *("_transformer_encoder_layer_fwd", "_native_multi_head_attention"),
    ),
}


def caveats_of(operators: Iterable[str]) -> list[str]:
    """What is not counted of the operators of these names ("aten.mm") that have run."""
    ran = {name.removeprefix("aten.").removesuffix("_out") for name in operators}
    return [said for said, names in UNCOUNTED.items() if ran.intersection(names)]


#: Operators for which CUDA has a kernel of another form than the CPU, that is not emulated.
REFUSED = {
    **{
        f"{kind}.{form}": "cuDNN's recurrent kernels"
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for form in ("input", "data")
    },
    "lstm_cell": "CUDA's fused cell",
    "gru_cell": "CUDA's fused cell",
    "embedding_bag": "CUDA's kernel",
    "embedding_bag.padding_idx": "CUDA's kernel",
}
