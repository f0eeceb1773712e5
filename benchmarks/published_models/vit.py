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


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, dropout=0.0, batch_first=True)
        self.dropout = nn.Dropout(0.0)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden)

    def forward(self, given: Tensor) -> Tensor:
        x = self.ln_1(given)
        x, _ = self.self_attention(x, x, x, need_weights=False)
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

    Has no `count`: it returns the mean over the samples. With `accumulation` micro-batches per step, only the first clears.
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
