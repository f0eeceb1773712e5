"""A small vision transformer (arXiv:2010.11929): the GPT's blocks without the causal mask, on patches of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sweep import schema
from sweep.errors import BadInput
from sweep.workload.gpt import Block, make_dropout, make_linear, scale_residual


class VisionTransformer(nn.Module):
    """Images (B, channels, image_size, image_size) -> logits (B, classes); the mean over patches is classified.

    Args:
        image_size: height and width in pixels; a multiple of `patch_size`.
        patch_size: height and width of a patch in pixels; a sample becomes (image_size / patch_size)^2 positions.
        channels: image channels.
        classes: number of classes.
        layers, d_model, heads, d_ff, dropout, attention: as in `sweep.workload.gpt.Transformer`.

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
