"""The 124M GPT of "Build a Large Language Model From Scratch" in the steps of its speed comparison, written anew.

Variants, each on top of the one before (the optimizer is the workload's business: fused AdamW from `bf16` on):

- baseline: attention written out, a fp32 causal mask as a buffer of each layer, LayerNorm and tanh-GELU by hand;
- mask_on_the_fly: the mask is made by each call;
- bf16: the same in bfloat16;
- torch_layernorm_gelu: torch's LayerNorm and GELU;
- sdpa: one projection for q, k and v, and torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VARIANTS = ("baseline", "mask_on_the_fly", "bf16", "torch_layernorm_gelu", "sdpa")


class WrittenOutAttention(nn.Module):
    def __init__(self, width: int, context: int, heads: int, dropout: float, mask_buffer: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.mask: Tensor | None
        self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1) if mask_buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys = keys.view(batch, length, self.heads, -1).transpose(1, 2)
        values = values.view(batch, length, self.heads, -1).transpose(1, 2)
        queries = queries.view(batch, length, self.heads, -1).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        if self.mask is not None:
            hidden = self.mask.bool()[:length, :length]
        else:
            hidden = torch.triu(torch.ones(length, length, device=x.device, dtype=torch.bool), diagonal=1)
        scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch, length, width)
        return self.out_proj(context)


class SdpaAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x)
        qkv = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        out = out.transpose(1, 2).contiguous().view(batch, length, width)
        return self.proj(out)


class WrittenOutLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class WrittenOutGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))  # stays on the host, as in the book
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    def __init__(self, width: int, context: int, heads: int, dropout: float, variant: str) -> None:
        super().__init__()
        step = VARIANTS.index(variant)
        if variant == "sdpa":
            self.att: nn.Module = SdpaAttention(width, heads, dropout)
        else:
            self.att = WrittenOutAttention(width, context, heads, dropout, mask_buffer=variant == "baseline")
        written_out = step < VARIANTS.index("torch_layernorm_gelu")
        gelu = WrittenOutGelu() if written_out else nn.GELU(approximate="tanh")
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        norm = WrittenOutLayerNorm if written_out else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.drop_shortcut = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.att(x)
        x = self.drop_shortcut(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        x = self.drop_shortcut(x)
        x = x + shortcut
        return x


class Gpt(nn.Module):
    """tokens [B, S] int64 -> logits [B, S, vocabulary]."""

    def __init__(
        self,
        variant: str = "baseline",
        vocabulary: int = 50257,
        context: int = 1024,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(vocabulary, width)
        self.pos_emb = nn.Embedding(context, width)
        self.drop_emb = nn.Dropout(dropout)
        self.trf_blocks = nn.Sequential(*(Block(width, context, heads, dropout, variant) for _ in range(layers)))
        last = WrittenOutLayerNorm if VARIANTS.index(variant) < VARIANTS.index("torch_layernorm_gelu") else nn.LayerNorm
        self.final_norm = last(width)
        self.out_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        token_part = self.tok_emb(tokens)
        position_part = self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        x = token_part + position_part
        x = self.drop_emb(x)
        x = self.trf_blocks(x)
        x = self.final_norm(x)
        return self.out_head(x)


class MeanCrossEntropy:
    """The book's loss: torch's cross_entropy on the logits in the precision that they come in, averaged.

    Has no `count`: it returns the mean over the samples (all have as many targets).
    """

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["inputs"])
        return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())
