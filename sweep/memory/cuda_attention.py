"""scaled_dot_product_attention as CUDA runs it: which backend is chosen, and what that one saves and allocates.

The choice follows ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.11 to 2.13) for dense inputs: flash where dtype,
head size, mask and hardware allow, else the memory-efficient kernel, else plain operators (`math`), which store the
probabilities; on Hopper and data-center Blackwell cuDNN comes first. The chosen kernel's own operator is then called,
so that autograd saves what it saves on CUDA.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
Capability = tuple[int, int]  # compute capability


class Backend(Enum):
    flash = auto()
    efficient = auto()
    cudnn = auto()
    math = auto()


def choose(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, grouped: bool, cc: Capability
) -> Backend:
    """The backend that CUDA takes for (batch, heads, length, head size) tensors on this compute capability."""
    checks = {
        Backend.cudnn: lambda: _cudnn_can(q, k, v, dropout, cc),
        Backend.flash: lambda: _flash_can(q, k, v, mask, dropout, causal, grouped, cc),
        Backend.efficient: lambda: _efficient_can(q, k, v, grouped, cc),
    }
    order = [Backend.flash, Backend.efficient]
    # check_prefer_cudnn_attention, cuDNN newer than 9.15
    if cc in ((9, 0), (10, 0), (10, 3)) and not os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED"):
        order = [Backend.cudnn, *order]
    enabled = {
        Backend.cudnn: torch.backends.cuda.cudnn_sdp_enabled(),
        Backend.flash: torch.backends.cuda.flash_sdp_enabled(),
        Backend.efficient: torch.backends.cuda.mem_efficient_sdp_enabled(),
    }
    return next((b for b in order if enabled[b] and checks[b]()), Backend.math)


def _dense(query: Tensor, key: Tensor, value: Tensor, grouped: bool, supports_grouped: bool) -> bool:
    """check_tensor_shapes and check_batch_size_and_num_heads_dense."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    heads = query.shape[1], key.shape[1], value.shape[1]
    if 0 in (query.shape[2], key.shape[2]):
        return False
    if grouped and supports_grouped:
        return heads[1] == heads[2] and heads[0] % heads[1] == 0
    return heads[0] == heads[1] == heads[2]


def _last_stride_is_1(*tensors: Tensor) -> bool:
    return all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)


def _flash_can(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, grouped: bool, cc: Capability
) -> bool:
    size = q.shape[-1]
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not (8, 0) <= cc <= (12, 1) or q.dtype not in HALVES or not q.dtype == k.dtype == v.dtype or mask is not None:
        return False
    if not size == k.shape[-1] == v.shape[-1] or size > 256 or not _dense(q, k, v, grouped, True):
        return False
    consumer = (8, 6) <= cc <= (8, 9) or (12, 0) <= cc <= (12, 1)
    if needs_grad and consumer and (192 < size <= 224 or (size > 224 and dropout > 0)):
        return False
    return _last_stride_is_1(q, k, v) and not (causal and q.shape[-2] != k.shape[-2])


def _efficient_can(q: Tensor, k: Tensor, v: Tensor, grouped: bool, cc: Capability) -> bool:
    half = q.dtype in HALVES
    allowed = (torch.float16, torch.bfloat16, torch.float32) if cc >= (8, 0) else (torch.float16, torch.float32)
    if not (5, 0) <= cc <= (12, 1) or q.dtype not in allowed or not q.dtype == k.dtype == v.dtype:
        return False
    alignment = 4 if cc >= (8, 0) else 1  # minimum_gemm_alignment
    if cc >= (8, 0) or (cc >= (7, 0) and half):
        alignment = max(alignment, 128 // (16 if half else 32))
    if q.shape[-1] != k.shape[-1] or q.shape[-1] % alignment or v.shape[-1] % alignment:
        return False
    grouped_heads = grouped and q.shape[1] != k.shape[1]
    return not grouped_heads and _dense(q, k, v, False, False) and all(t.stride(-1) == 1 for t in (q, k, v))


def _cudnn_can(q: Tensor, k: Tensor, v: Tensor, dropout: float, cc: Capability) -> bool:
    if not (8, 0) <= cc <= (12, 1) or q.dtype not in HALVES or not q.dtype == k.dtype == v.dtype:
        return False
    limit = 256 if cc == (9, 0) else 192 if cc[0] == 10 and (q.shape[-1], v.shape[-1]) == (192, 128) else 128
    if max(q.shape[-1], v.shape[-1]) > limit or q.shape[-1] % 8 or v.shape[-1] % 8:
        return False
    if k.shape[-2] == 1 or (q.shape[-2] == 1 and dropout) or torch.are_deterministic_algorithms_enabled():
        return False
    heads_fit = q.shape[1] % k.shape[1] == 0 and q.shape[1] % v.shape[1] == 0
    return q.dim() == 4 and heads_fit and _last_stride_is_1(q, k, v)


class CudaAttention:
    """Replaces scaled_dot_product_attention; see the module's docstring."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        backend = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, self.capability)
        if backend is Backend.math:
            out, _ = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
            return out
        if backend is Backend.flash:
            size = query.shape[-1]
            scale = 1.0 / math.sqrt(size) if scale is None else scale
            padded = [_pad_to(t, 8) for t in (query, key, value)]
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
            return out if out.shape[-1] == size else out[..., :size]
        bias = _as_bias(attn_mask, query.dtype)
        keep = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if backend is Backend.cudnn:
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, keep, dropout_p, is_causal, False, scale=scale
            )[0]
        if bias is not None:
            bias = _aligned(bias, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keep, dropout_p, is_causal, scale=scale
        )[0]


def _pad_to(tensor: Tensor, multiple: int) -> Tensor:
    """pad_last_dim of attention.cpp."""
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """convert_boolean_attn_mask of attention.cpp."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype))


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """preprocess_mask and pad_bias of attention.cpp: rows of 16 elements, expanded to batch and heads."""
    length = bias.shape[-1]
    if length % 16:
        bias = F.pad(bias, (0, -length % 16))[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def flash_backward_workspace(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
    """What mha_bwd of flash_api.cpp allocates: the rows' sums, dq in fp32, and one dk, dv per query head under GQA."""
    _, query, key = args[:3]
    batch, heads, length, size = query.shape
    rows = -(-length // 128) * 128
    yield batch * heads * rows * 4
    yield batch * rows * heads * _rounded(size) * 4
    if key.shape[1] != heads:
        expanded = batch * key.shape[2] * heads * size * query.element_size()
        yield expanded
        yield expanded


def efficient_backward_workspace(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
    """What _efficient_attention_backward allocates (attention_backward.cu).

    delta, the rows' sums of gradient times output. The kernels for 16 bits compute it themselves and add up dq in fp32;
    for those of fp32 torch makes the product, its sums and their transpose.
    """
    query, value = args[1], args[3]
    batch, heads, length, size = query.shape
    yield batch * heads * length * 4
    if query.dtype in HALVES:
        yield batch * heads * (-(-length // 64) * 64) * (-(-size // 64) * 64) * 4
    else:
        yield batch * heads * length * 4
        yield batch * heads * length * value.shape[-1] * 4


def flash_forward_workspace(multiprocessors: int) -> Callable[[Any, Any, Any], Iterable[int]]:
    """set_params_splitkv of flash_api.cpp: where there are too few blocks of queries for the card, keys are split, and
    each part has results and row sums of its own, in fp32."""

    def sizes(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
        query, key = args[:2]
        batch, heads, length, size = query.shape
        dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
        parts = 1 if dropout else _splits(batch * heads * -(-length // 64), key.shape[2], size, multiprocessors)
        if parts > 1:
            yield parts * batch * heads * length * 4
            yield parts * batch * heads * length * _rounded(size) * 4

    return sizes


def _splits(blocks: int, keys: int, size: int, multiprocessors: int) -> int:
    """num_splits_heuristic: the fewest parts that fill the card at least 85 % as well as the best number does."""
    slots = 2 * multiprocessors
    if blocks >= 0.8 * slots:
        return 1
    key_blocks = -(-keys // (256 if size <= 64 else 128 if size <= 128 else 64))
    per_part = {n: -(-key_blocks // n) for n in range(1, min(128, slots, key_blocks) + 1)}
    filled = {
        n: blocks * n / slots / math.ceil(blocks * n / slots)
        for n in per_part
        if n == 1 or per_part[n] != per_part[n - 1]
    }
    return next((n for n, share in filled.items() if share >= 0.85 * max(filled.values())), 1)


def _rounded(size: int) -> int:
    """A head's size as the flash kernels pad it."""
    return -(-size // 32) * 32 if size <= 192 else 256


WORKSPACES = {
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward_workspace,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward_workspace,
}
