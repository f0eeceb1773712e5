"""A small residual network with BatchNorm: its running statistics show whether recomputation counts a batch twice."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sweep.config import schema
from sweep.errors import BadInput

NORMS, POSITIONS, MLPS = ("layer", "rms"), ("learned", "rope"), ("gelu", "swiglu")
INIT_STD = 0.02


class Transformer(nn.Module):
    """Token ids (B, S) int64 -> logits (B, S, V). Pre-norm blocks, found as `blocks.0`, `blocks.1`, ...

    Args:
        vocab_size: V, the number of token ids.
        max_seq_len: the longest S; the size of the position table.
        layers: number of blocks.
        d_model: D, the width of the residual stream.
        heads: H, query heads; D must be a multiple of it.
        kv_heads: K, key/value heads, each shared by H / K query heads (grouped-query attention, arXiv:2305.13245);
            None: H.
        d_ff: width inside the MLP; None: 4 D.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm, arXiv:1910.07467).
        norm_eps: added to the variance; None: 1e-5.
        position: "learned" (a table added to the embedding) or "rope" (queries and keys rotated, arXiv:2104.09864).
        rope_base: base of the rotation's wavelengths.
        mlp: "gelu" (tanh approximation, as GPT-2) or "swiglu" (arXiv:2002.05202).
        bias: whether linear layers and LayerNorm have one.
        dropout: probability for the embedding, the attention's probabilities and each residual branch.
        tied: whether the output layer shares the token embedding's weight.
        attention: "sdpa" or "eager".

    Raises:
        BadInput: a choice that does not exist, or sizes that do not divide.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocab_size: int,
        max_seq_len: int,
        layers: int,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        d_ff: int | None = None,
        norm: str = "layer",
        norm_eps: float = 1e-5,
        position: str = "learned",
        rope_base: float = 10000.0,
        mlp: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        tied: bool = True,
        attention: schema.Attention | str = schema.Attention.sdpa,
    ) -> None:
        super().__init__()
        _one_of("position", position, POSITIONS)
        for name, value in (("vocab_size", vocab_size), ("max_seq_len", max_seq_len), ("layers", layers)):
            if value < 1:
                raise _bad(name, value, "is below 1", "give 1 or more")
        self.max_seq_len = max_seq_len
        self.tokens = make_embedding(vocab_size, d_model)
        self.positions = make_embedding(max_seq_len, d_model) if position == "learned" else None
        self.dropout = make_dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(d_model, heads, kv_heads, d_ff, norm, norm_eps, mlp, bias, dropout, causal=True, attention=attention)
            for _ in range(layers)
        )
        self.norm = make_norm(norm, d_model, norm_eps, bias)
        if tied:
            # Its own weight is never used: on meta it costs neither memory nor time.
            self.head = nn.Linear(d_model, vocab_size, bias=False, device="meta")
            self.head.weight = self.tokens.weight
        else:
            self.head = make_linear(d_model, vocab_size, bias=False)
        self.rope = position == "rope"
        if self.rope:
            cos, sin = rope_tables(max_seq_len, d_model // heads, rope_base)
            # One table for all blocks, not in checkpoints: it follows from the arguments.
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        scale_residual(self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (B, S) int64, S <= max_seq_len -> logits (B, S, V), in the parameters' dtype or autocast's."""
        seq_len = tokens.shape[1]
        if seq_len > self.max_seq_len:
            raise ValueError(f"{seq_len} tokens are more than the model's max_seq_len={self.max_seq_len}")
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[:seq_len]
        x = self.dropout(x)
        # Positional, since a checkpointed call hides keyword tensors from outer saved-tensor hooks.
        tables = (self.cos[:seq_len], self.sin[:seq_len]) if self.rope else ()
        for block in self.blocks:
            x = block(x, *tables)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """A pre-norm layer (B, S, D) -> (B, S, D): x + attn(norm1(x)), then x + mlp(norm2(x)), with dropout on both."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        d_ff: int | None = None,
        norm: str = "layer",
        norm_eps: float = 1e-5,
        mlp: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
        attention: schema.Attention | str = schema.Attention.sdpa,
    ) -> None:
        super().__init__()
        _one_of("mlp", mlp, MLPS)
        width = 4 * d_model if d_ff is None else d_ff
        self.norm1 = make_norm(norm, d_model, norm_eps, bias)
        self.attn = SelfAttention(d_model, heads, kv_heads, bias, dropout, causal, attention)
        self.norm2 = make_norm(norm, d_model, norm_eps, bias)
        self.mlp = SwiGlu(d_model, width, bias) if mlp == "swiglu" else Mlp(d_model, width, bias)
        self.dropout = make_dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        """x (B, S, D) and, with rotary positions, the tables cos and sin (S, h/2) -> (B, S, D)."""
        x = x + self.dropout(self.attn(self.norm1(x), cos, sin))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class SelfAttention(nn.Module):
    """Multi-head attention of x with itself; K < H shares each key/value head among H / K query heads.

    "sdpa" leaves the kernel to torch: fused kernels save queries, keys, values, output and log-sum-exp.
    "eager" writes it out and saves the probabilities (B, H, S, S), again after dropout.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
        attention: schema.Attention | str = schema.Attention.sdpa,
    ) -> None:
        super().__init__()
        if heads < 1 or d_model % heads:
            raise _bad("heads", heads, f"does not divide d_model={d_model}", "give a divisor of d_model")
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise _bad("kv_heads", kv_heads, f"does not divide heads={heads}", "give a divisor of heads")
        _one_of("attention", attention, [kind.name for kind in schema.Attention])
        self.kind = schema.Attention[attention] if isinstance(attention, str) else attention
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d_model // heads
        self.causal, self.dropout_p = causal, dropout
        self.query = make_linear(d_model, heads * self.head_dim, bias=bias)
        self.key = make_linear(d_model, kv_heads * self.head_dim, bias=bias)
        self.value = make_linear(d_model, kv_heads * self.head_dim, bias=bias)
        self.out = make_linear(heads * self.head_dim, d_model, bias=bias)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        """x (B, S, D), tables (S, h/2) or None -> (B, S, D)."""
        batch, seq_len, _ = x.shape
        q = self.query(x).view(batch, seq_len, self.heads, self.head_dim).transpose(1, 2)  # (B, H, S, h)
        k = self.key(x).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)  # (B, K, S, h)
        v = self.value(x).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        dropout_p = self.dropout_p if self.training else 0.0
        if self.kind is schema.Attention.sdpa:
            shared = self.kv_heads != self.heads
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=self.causal, enable_gqa=shared)
        else:
            y = eager_attention(q, k, v, dropout_p, self.causal)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq_len, self.heads * self.head_dim))
        return out

    def extra_repr(self) -> str:
        heads = f"heads={self.heads}, kv_heads={self.kv_heads}"
        return f"{self.kind.name}, {heads}, causal={self.causal}, dropout={self.dropout_p}"


class Mlp(nn.Module):
    """down(gelu(up(x))): (B, S, D) -> (B, S, D), `width` inside."""

    def __init__(self, d_model: int, width: int, bias: bool) -> None:
        super().__init__()
        self.up = make_linear(d_model, width, bias=bias)
        self.down = make_linear(width, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)): (B, S, D) -> (B, S, D), `width` inside (arXiv:2002.05202)."""

    def __init__(self, d_model: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate = make_linear(d_model, width, bias=bias)
        self.up = make_linear(d_model, width, bias=bias)
        self.down = make_linear(width, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def eager_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = True) -> Tensor:
    """softmax(q k^T / sqrt(h)) v, written out. q (B, H, S, h), k and v (B, K, S, h) -> (B, H, S, h).

    The softmax runs in fp32. The mask is made anew for each call and added, which autograd need not save.
    """
    batch, heads, seq_len, head_dim = q.shape
    kv_heads = k.shape[1]
    # The query heads that share a key head become more rows of one product: keys and values are not repeated.
    rows = (q / math.sqrt(head_dim)).reshape(batch, kv_heads, heads // kv_heads * seq_len, head_dim)
    scores = (rows @ k.transpose(-2, -1)).view(batch, heads, seq_len, seq_len)
    if causal:
        future = torch.full((seq_len, seq_len), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
        scores = scores + future
    probabilities = F.dropout(scores.softmax(-1, dtype=torch.float32).to(v.dtype), dropout_p, training=dropout_p > 0)
    out = probabilities.view(batch, kv_heads, heads // kv_heads * seq_len, seq_len) @ v
    return out.view(batch, heads, seq_len, head_dim)


def rope_tables(seq_len: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, (seq_len, head_dim / 2) fp32; frequency i: base^(-2i / head_dim)."""
    if head_dim % 2:
        raise _bad("position", "rope", f"needs an even head size, not {head_dim}", "change workload.model.heads")
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + h/2]) by the angle of its position. x (B, H, S, h), tables (S, h/2) -> like x."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def make_norm(kind: str, d_model: int, eps: float, bias: bool) -> nn.Module:
    """A norm over the last dimension."""
    _one_of("norm", kind, NORMS)
    return nn.RMSNorm(d_model, eps=eps) if kind == "rms" else nn.LayerNorm(d_model, eps=eps, bias=bias)


def make_dropout(probability: float) -> nn.Dropout:
    if not 0 <= probability < 1:
        raise _bad("dropout", probability, "is no probability below 1", "give 0 (off) to 0.9")
    return nn.Dropout(probability)


def make_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """nn.Linear with GPT-2's initial values: normal with deviation 0.02, bias 0.

    It is made on meta, so that torch's own initialisation does nothing: for a billion parameters that is seconds.
    """
    linear = nn.Linear(inputs, outputs, bias=bias, device="meta")
    linear.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(std=INIT_STD))
    if bias:
        linear.bias = nn.Parameter(torch.zeros(outputs))
    return linear


def make_embedding(rows: int, d_model: int) -> nn.Embedding:
    """nn.Embedding, normal with deviation 0.02."""
    return nn.Embedding.from_pretrained(torch.empty(rows, d_model).normal_(std=INIT_STD), freeze=False)


def scale_residual(blocks: nn.ModuleList) -> None:
    """Divide the weights that write to the residual stream by sqrt(their number), as GPT-2 does."""
    with torch.no_grad():
        for block in blocks:
            assert isinstance(block, Block)
            for weight in (block.attn.out.weight, block.mlp.down.weight):
                weight.div_(math.sqrt(2 * len(blocks)))


def _one_of(name: str, value: Any, options: tuple[str, ...] | list[str]) -> None:
    if value not in options and getattr(value, "name", None) not in options:
        raise _bad(name, value, "is not known", f"give {' or '.join(options)}")


def _bad(name: str, value: Any, wrong: str, todo: str) -> BadInput:
    return BadInput(f"workload.model.{name}", value, wrong, todo)


class VisionTransformer(nn.Module):
    """Images (B, channels, image_size, image_size) -> logits (B, classes); the mean over patches is classified.

    Args:
        image_size: height and width in pixels; a multiple of `patch_size`.
        patch_size: height and width of a patch in pixels; a sample becomes (image_size / patch_size)^2 positions.
        channels: image channels.
        classes: number of classes.
        layers, d_model, heads, d_ff, dropout, attention: as in `sweep.workload.models.Transformer`.

    Raises:
        BadInput: sizes that do not divide.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        classes: int,
        layers: int,
        d_model: int,
        heads: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        attention: schema.Attention | str = schema.Attention.sdpa,
    ) -> None:
        super().__init__()
        if patch_size < 1 or image_size % patch_size:
            wrong = f"does not divide image_size={image_size}"
            raise BadInput("workload.model.patch_size", patch_size, wrong, "give a divisor of image_size")
        self.patches = nn.Conv2d(channels, d_model, kernel_size=patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.empty((image_size // patch_size) ** 2, d_model))
        self.dropout = make_dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(d_model, heads, d_ff=d_ff, dropout=dropout, causal=False, attention=attention) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = make_linear(d_model, classes)
        scale_residual(self.blocks)
        # About as large as a patch's embedding: with the mean taken at the end, position is easily lost.
        nn.init.normal_(self.positions, std=0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) float -> logits (B, classes)."""
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, positions, d_model)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


class ResidualNet(nn.Module):
    """Images (B, channels, height, width) -> logits (B, classes). All blocks are alike: same size, same features.

    Args:
        channels: image channels.
        classes: number of classes.
        layers: residual blocks, each of two 3x3 convolutions.
        features: channels between the first layer and the last.
    """

    def __init__(self, channels: int, classes: int, layers: int, features: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, features, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
        )
        self.blocks = nn.Sequential(*(ResidualBlock(features) for _ in range(layers)))
        self.head = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, height, width) float -> logits (B, classes), from the mean over pixels."""
        x = self.blocks(self.stem(images))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """relu(x + norm2(conv2(relu(norm1(conv1(x)))))): (B, features, height, width) -> the same (arXiv:1512.03385)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(features, features, kernel_size=3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(features)
        self.relu = nn.ReLU(inplace=True)  # in place, as residual networks usually are: one activation less each

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        out: Tensor = self.relu(x + self.norm2(self.conv2(y)))
        return out
