"""Autocast as CUDA does it, on CPU tensors.

Autocast decides by device which operators run in which precision, and CUDA's lists differ from the CPU's: softmax,
norms, sums and losses run in fp32 there, einsum in lower precision, and cat is left to type promotion. The lists are
those of ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
AT_FORALL_PROMOTE), which CUDA registers in full. Operators of lower precision that the CPU lists as well keep torch's
own kernels and cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sweep.memory.operators import replaced


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
