"""torchvision's ViT-L/16 and its published fine-tuning loop, written anew without torchvision.

The published loop clears the gradients after the forward pass, so those of the step before are alive next to all
activations. `LateAdam` and `LateClearing` together do the same in an ordinary workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Sequential):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, width), nn.Dropout(0.0)
        )


class SelfAttention(nn.Module):
    """nn.MultiheadAttention(batch_first=True) on one input, without weights returned, as torch 2.1 of June 2023 ran it.

    Two things differ from today's torch: the input is laid out anew with the sequence first before it is projected, and
    the attention's result is a tensor of its own whatever the layout of the queries (flash attention 1 filled a fresh
    contiguous one, the memory-efficient kernel still does), so that laying it out for the last projection is a copy.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width).normal_(std=width**-0.5))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, width] -> [B, S, width]."""
        batch, length, width = x.shape
        x = x.transpose(0, 1)
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        packed = packed.unflatten(-1, (3, width)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        q, k, v = (t.view(length, batch, self.heads, -1).permute(1, 2, 0, 3) for t in packed.unbind(0))
        out = F.scaled_dot_product_attention(q, k, v)
        laid_out = out.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)
        return self.out_proj(laid_out.view(length * batch, width)).view(length, batch, width).transpose(0, 1)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = SelfAttention(width, heads)
        self.dropout = nn.Dropout(0.0)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden)

    def forward(self, given: Tensor) -> Tensor:
        x = self.ln_1(given)
        x = self.self_attention(x)
        x = self.dropout(x)
        x = x + given
        y = self.ln_2(x)
        y = self.mlp(y)
        return x + y


class VisionTransformer(nn.Module):
    """images [B, 3, side, side] -> logits [B, classes]; 303.3 million parameters with the defaults."""

    def __init__(
        self,
        side: int = 224,
        patch: int = 16,
        width: int = 1024,
        layers: int = 24,
        heads: int = 16,
        hidden: int = 4096,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.empty(1, (side // patch) ** 2 + 1, width).normal_(std=0.02))
        self.dropout = nn.Dropout(0.0)
        self.layers = nn.Sequential(*(Block(width, hidden, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        batch = images.shape[0]
        x = self.conv_proj(images).reshape(batch, self.class_token.shape[-1], -1).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(batch, -1, -1), x], dim=1)
        x = x + self.pos_embedding
        x = self.ln(self.layers(self.dropout(x)))
        x = x[:, 0]
        return self.head(x)


class LateAdam(torch.optim.Adam):
    """Adam whose gradients are cleared by `LateClearing`, not at the beginning of a step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class LateClearing:
    """Cross-entropy that clears the gradients of the step before once the forward pass is done.

    Has no `count`: it returns the mean over the samples. With `accumulation` micro-batches per step, the first clears.
    """

    def __init__(self, accumulation: int = 1, late: bool = True) -> None:
        self.accumulation, self.late, self.calls = accumulation, late, 0

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits: Any = model(batch["inputs"])
        loss = F.cross_entropy(logits, batch["targets"])
        if self.late and model.training and self.calls % self.accumulation == 0:
            for parameter in model.parameters():
                parameter.grad = None
        self.calls += model.training
        return loss
