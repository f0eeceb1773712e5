"""The decoder of Stanford's CS336 course (BasicsTransformerLM of assignment 2), written anew.

Pre-norm blocks; RMSNorm computed in fp32; rotary positions from one cos/sin table that all blocks share; linear layers
without bias through einsum; SwiGLU; attention written out with a boolean causal mask, torch.where and a softmax of max,
sub, exp, sum and div; an output layer of its own. Each expression makes the temporaries that the course's makes:

- every linear layer is an einsum, so under autocast its input is cast anew for each of q, k, v and of the two SwiGLU
  inputs, while the weight's cast is cached;
- the embedding's output has a name of its own in the model's forward, so it lives as long as the layers run;
- the rotary table is only viewed, and the rotated halves are put side by side, not interleaved;
- each layer builds its own S x S mask, and torch.where keeps it for backward; the maximum keeps its int64 indices;
- silu is x * sigmoid(x), which keeps both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: d_model, d_ff, layers, heads. The course's 2026 sizes.
SIZES: dict[str, tuple[int, int, int, int]] = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (2560, 10240, 32, 32),
}
VOCABULARY = 10_000


class Projection(nn.Module):
    """A linear layer (d_in -> d_out) without bias, as an einsum over the last dimension."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in).normal_(std=math.sqrt(2 / (d_in + d_out))))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Lookup(nn.Module):
    """Token embedding by indexing, whose backward is an accumulating index_put."""

    def __init__(self, vocabulary: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, d_model).normal_())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class RmsNorm(nn.Module):
    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    """Rotates pairs of the last dimension by an angle that grows with the position."""

    table: Tensor  # [2 (cos, sin), context, d_head / 2]

    def __init__(self, context: int, d_head: int, theta: float = 10_000.0) -> None:
        super().__init__()
        speeds = theta ** -(torch.arange(0, d_head, 2) / d_head)
        angles = torch.outer(torch.arange(context).float(), speeds)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, S, d_head], contiguous or a view of [B, S, H, d_head]."""
        *outer, length, d_head = x.shape
        even, odd = x.view(*outer, length, d_head // 2, 2).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, :length, :].unbind(0)
        rotated_even = cos * even - sin * odd
        rotated_odd = sin * even + cos * odd
        return torch.concat((rotated_even, rotated_odd), dim=-1)


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension. The order of the operations decides what backward keeps."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q, k, v [B, H, S, d_head], mask [1, S, S], true where a query may look."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)  # the scores live until attention is done, as in the course's function
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, d_model: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (Projection(d_model, d_model) for _ in range(3))
        self.output_proj = Projection(d_model, d_model)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d_model = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        order = torch.arange(length, device=x.device)
        mask = (order.view(length, 1) >= order.view(1, length)).unsqueeze(0)
        out = attend(q, k, v, mask).transpose(1, 2).reshape(batch, length, d_model)
        return self.output_proj(out)


class SwiGlu(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Projection(d_model, d_ff), Projection(d_ff, d_model), Projection(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, d_model: int, d_ff: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.attn = Attention(d_model, heads, rotary)
        self.ffn = SwiGlu(d_model, d_ff)
        self.ln1, self.ln2 = RmsNorm(d_model), RmsNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        # All of these names live until the block is done, as in the course's forward.
        attended = self.attn(self.ln1(x))
        middle = x + attended
        fed = self.ffn(self.ln2(middle))
        out = middle + fed
        return out


class LanguageModel(nn.Module):
    """tokens [B, S] int64 -> logits [B, S, vocabulary]. `size` is a key of SIZES."""

    def __init__(self, size: str, context: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        d_model, d_ff, layers, heads = SIZES[size]
        self.token_embeddings = Lookup(vocabulary, d_model)
        self.rotary = Rotary(context, d_model // heads)
        self.layers = nn.ModuleList(Block(d_model, d_ff, heads, self.rotary) for _ in range(layers))
        self.ln_final = RmsNorm(d_model)
        self.lm_head = Projection(d_model, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.token_embeddings(tokens)  # a name of its own: see the module's docstring
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.ln_final(x)
        return self.lm_head(x)


class HeldCrossEntropy:
    """torch's cross_entropy on fp32 logits, averaged, as the published loops call it.

    Those loops hold the logits in a local while they run backward; so does this object, until its next call. (The
    course's own hand-written log-softmax would keep one more tensor of the logits' size in backward.)
    Has no `count`: it returns the mean over the samples (all have as many targets).
    """

    def __init__(self) -> None:
        self.held: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        self.held = None
        self.held = model(batch["inputs"])
        return F.cross_entropy(self.held.flatten(0, -2).float(), batch["targets"].flatten())
