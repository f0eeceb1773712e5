"""CUDA's memory behaviour on CPU tensors, where the CPU's differs.

Each emulation is one named thing with its source, and none is fitted to measurements. They hold only inside of
`emulated_cuda(...)`, for all threads, so nothing real may run on the CPU at the same time:

- attention (`cuda_attention`): the backend that CUDA would choose, and what it saves and allocates
- autocast (`cuda_autocast`): CUDA's operator lists, and its cache of weights in lower precision
- dropout: CUDA's fused kernel saves a mask of one byte per element, where the CPU saves a scaled mask of the input's
  type (Dropout.cpp, is_fused_kernel_acceptable)
- rms_norm: one kernel that saves the reciprocal root mean squares (layer_norm.cpp, rms_norm_symint); the CPU computes
  it from several operators, each with a result
- optimizers and gradient clipping: foreach by default, as on CUDA (torch/utils/_foreach_utils.py)
- scalars made from Python's numbers, such as an optimizer's step counters, live on the host
- cuBLAS: one workspace per thread that multiplies matrices, forward's and autograd's (CublasHandlePool.cpp)
- kernels that take memory inside of one operator
- answers to code that asks for the device, and which tensors are on it (`device`)

Not emulated, since it is not documented or depends on the library's own choice at run time: what is listed as UNCOUNTED
and said of each prediction in which it ran, and the partial sums of large reductions (at most a
few MiB).
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils._foreach_utils
from torch import Tensor

from sweep.errors import CannotPredict
from sweep.memory.cuda_attention import WORKSPACES as ATTENTION_WORKSPACES
from sweep.memory.cuda_attention import CudaAttention, flash_forward_workspace
from sweep.memory.device import CudaAnswers
from sweep.memory.ledger import Ledger
from sweep.memory.operators import Workspace, replaced

aten = torch.ops.aten


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


def contiguous(*positions: int) -> Workspace:
    """Kernels that work on contiguous inputs copy others first: softmax, norms and losses (SoftMax.cu, ...)."""

    def sizes(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
        for position in positions:
            if position < len(args) and isinstance(args[position], Tensor):
                yield from _copy(args[position])

    return sizes


def _copy(tensor: Tensor) -> Iterable[int]:
    if not tensor.is_contiguous():
        yield tensor.numel() * tensor.element_size()


def matrices(*positions: int) -> Workspace:
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
GEMM: dict[Any, Workspace] = {
    aten.mm.default: matrices(0, 1),
    aten.addmm.default: matrices(1, 2),
    aten.bmm.default: matrices(0, 1),
    aten.baddbmm.default: matrices(1, 2),
    aten._addmm_activation.default: matrices(1, 2),
    aten.mv.default: matrices(0),
    aten.addmv.default: matrices(1),
    aten.dot.default: contiguous(),
}
KERNEL_WORKSPACES: dict[Any, Workspace] = {
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
_RECURRENT = [f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")]
REFUSED = {
    **dict.fromkeys(_RECURRENT, "cuDNN's recurrent kernels"),
    "lstm_cell": "CUDA's fused cell",
    "gru_cell": "CUDA's fused cell",
    "embedding_bag": "CUDA's kernel",
    "embedding_bag.padding_idx": "CUDA's kernel",
}


FLASH = aten._scaled_dot_product_flash_attention.default


class CublasWorkspaces:
    """Allocates the workspace when a thread first multiplies matrices; it then stays. To be given to a ledger.

    nbytes: per cuBLAS handle and stream (sweep.config.device.cublas_workspace_mib).
    kept: False: it is taken for each product and given back (cublas_workspace_kept).
    """

    def __init__(self, nbytes: int, kept: bool = True) -> None:
        self.nbytes, self.kept = nbytes, kept
        self.ledger: Ledger | None = None
        self._threads: set[str] = set()

    def _reserve(self) -> None:
        ledger = self.ledger
        if ledger is not None and len(self._threads) < 2:
            # On CUDA, backward runs on a thread of autograd's own, recomputation included.
            thread = "autograd" if ledger.in_backward else "main"
            if thread not in self._threads:
                self._threads.add(thread)
                ledger.allocate(self.nbytes, f"cuBLAS workspace ({thread} thread)", module="")

    def before(self, sizes: Workspace) -> Workspace:
        def with_workspace(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
            if not self.kept:
                return [*sizes(args, kwargs, out), self.nbytes]
            self._reserve()
            return sizes(args, kwargs, out)

        return with_workspace


def cuda_workspaces(
    cublas: CublasWorkspaces, multiprocessors: int | None = None
) -> Mapping[Any, Workspace]:
    """What the ledger of an emulated CUDA device needs as `workspaces`.

    multiprocessors: the card's, by which flash attention splits keys; None: not known, it never does.
    """
    products = {op: cublas.before(sizes) for op, sizes in GEMM.items()}
    split = {} if multiprocessors is None else {FLASH: flash_forward_workspace(multiprocessors)}
    return {**KERNEL_WORKSPACES, **ATTENTION_WORKSPACES, **split, **products}


@contextmanager
def emulated_cuda(capability: tuple[int, int], answers: CudaAnswers | None = None) -> Iterator[None]:
    """CPU operators behave as CUDA's do for memory, inside. With `answers`, who asks for the device is told of CUDA."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            library.impl("scaled_dot_product_attention", CudaAttention(capability), "AutogradCPU", allow_override=True)
            library.impl("dropout", _dropout, "AutogradCPU", allow_override=True)
            library.impl("rms_norm", _rms_norm, "AutogradCPU", allow_override=True)
            # With a kernel of its own it is one operator with its own backward, as on CUDA; it is never run.
            library.impl("_fused_rms_norm", _never, "CPU")
            for name, why in REFUSED.items():
                library.impl(name, _refusal(name, why), "AutogradCPU", allow_override=True)
            stack.enter_context(CudaAutocast().installed(library))
            stack.enter_context(_foreach_by_default())
            if answers is not None:
                stack.enter_context(answers.installed())
            yield
    finally:
        library._destroy()


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    if p < 1:
        return aten.native_dropout(input, p, train)[0]
    return input * torch.zeros((), dtype=input.dtype)


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    fused = not input.is_complex() and (weight is None or weight.dtype is input.dtype)
    if fused and not (input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)):
        return aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
    scale = torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + (eps or 0.0))
    normed = (input.float() * scale).type_as(input)
    return normed if weight is None else normed * weight


def _refusal(name: str, why: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CannotPredict(f"aten.{name} runs {why} on CUDA, whose memory is not known")

    return refuse


def _never(*_: Any) -> Any:
    raise NotImplementedError("there is no such kernel on the CPU")


@contextmanager
def _foreach_by_default() -> Iterator[None]:
    name = "_get_foreach_kernels_supported_devices"
    original: Any = getattr(torch.utils._foreach_utils, name)
    named = ("torch.optim", "torch.nn.utils", "torch.utils")
    modules = [m for n, m in sys.modules.items() if n.startswith(named) and getattr(m, name, None) is original]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, name, lambda: [*original(), "cpu"]))
        yield


# -- autocast as CUDA does it, on CPU tensors ------------------------------------------------------------------------
# Autocast decides by device which operators run in which precision, and CUDA's lists differ from the CPU's: softmax,
# norms, sums and losses run in fp32 there, einsum in lower precision, and cat is left to type promotion. The lists are
# those of ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
# AT_FORALL_PROMOTE), which CUDA registers in full. Operators of lower precision that the CPU lists as well keep torch's
# own kernels and cache.

def _names(text: str) -> list[str]:
    return text.split()


#: AT_FORALL_FP32: arguments cast to fp32.
FP32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
)
#: AT_FORALL_FP32_SET_OPT_DTYPE: the optional dtype becomes fp32; the argument is cast by the operator itself.
FP32_BY_DTYPE = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
#: AT_FORALL_LOWER_PRECISION_FP, less what the CPU lists as well.
LOWER = _names(
    "einsum mv addmv addr chain_matmul linalg_multi_dot _convolution convolution lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell"
)
#: AT_FORALL_PROMOTE: floating-point arguments cast to the widest of them.
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _below(op: Any, args: Any, kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):
        return op(*args, **kwargs)


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


class CudaAutocast:
    """Registers the kernels on a library, which the caller destroys."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # weights in lower precision, by id

    @contextmanager
    def installed(self, library: torch.library.Library) -> Iterator[None]:
        for names, make in (
            (_only_on_the_cpu(), lambda op: torch.library.fallthrough_kernel),
            (FP32, self._fp32),
            (FP32_BY_DTYPE, self._fp32_by_dtype),
            (LOWER, self._lower),
            (PROMOTE, self._promote),
        ):
            for name in names:
                op = _overload(name)
                if op is not None:
                    library.impl(name, make(op), "AutocastCPU", allow_override=True)
        # torch's cache is cleared when the outermost autocast ends; so is ours.
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._casts.clear()
            clear()

        with replaced(torch, "clear_autocast_cache", clear_both):
            yield
        self._casts.clear()

    def _fp32(self, op: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return _below(op, _cast(args, torch.float32), {k: _cast(v, torch.float32) for k, v in kwargs.items()})

        return run

    def _fp32_by_dtype(self, op: Any) -> Callable[..., Any]:
        halves = {
            "aten::softmax": torch.ops.aten._softmax.default,
            "aten::log_softmax": torch.ops.aten._log_softmax.default,
        }
        half = halves.get(op._schema.name)
        position = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dtype")

        def run(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("dtype") if len(args) <= position else args[position]
            if not _eligible(args[0]) or given is not None:
                return _below(op, args, kwargs)
            if half is not None and args[0].dtype is torch.float16:
                return _below(half, (args[0], args[1], True), {})  # SoftMax.cpp: fp16 in, fp32 out, without a copy
            return _below(op, args[:position], {**kwargs, "dtype": torch.float32})

        return run

    def _lower(self, op: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            dtype = torch._C.get_autocast_dtype("cpu")
            lowered = [self._lowered(a, dtype) for a in args]
            return _below(op, lowered, kwargs)

        return run

    def _lowered(self, value: Any, dtype: torch.dtype) -> Any:
        """cached_cast of autocast_mode.cpp: fp32 leaves that take gradients are cast once per autocast context."""
        if isinstance(value, (list, tuple)):
            return [self._lowered(v, dtype) for v in value]
        if not _eligible(value) or value.dtype is dtype:
            return value
        keep = (
            value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keep:
            return value.to(dtype)
        known = self._casts.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        cast = value.to(dtype)
        self._casts[id(value)] = weakref.ref(value), cast
        return cast

    def _promote(self, op: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = [a.dtype for a in _flat(args) if _eligible(a)]
            widest = torch.float32 if torch.float32 in found else torch._C.get_autocast_dtype("cpu")
            return _below(op, _cast(args, widest), kwargs)

        return run


def _only_on_the_cpu() -> list[str]:
    """What the CPU casts and CUDA leaves to the operator, such as cat."""
    listed = torch._C._dispatch_get_registrations_for_dispatch_key
    only = set(listed("AutocastCPU")) - set(listed("AutocastCUDA"))
    return sorted(name.removeprefix("aten::") for name in only if name.startswith("aten::"))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(v, dtype) for v in value)
    return value.to(dtype) if _eligible(value) and value.dtype is not dtype else value


def _overload(name: str) -> Any:
    """The operator overload of a registration name such as pow.Scalar; None where this torch has none."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None)
