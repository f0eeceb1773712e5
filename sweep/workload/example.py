"""A workload of one's own, to copy: a model, batches and a loss. `workload=custom` runs it.

Nothing here is known to the rest of the project, which reaches it by import path alone (conf/workload/custom.yaml).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Maps (batch, 64) floats to as many. Its blocks are found by themselves: the longest list of like modules."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.inputs = nn.Linear(64, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.outputs = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        state = self.inputs(x)
        for layer in self.layers:
            state = state + layer(state)
        return self.outputs(state)


class Data:
    """Noise. Batches are host tensors, depend on the step alone and have the sample as dimension 0."""

    version = "1"  # of the bytes: trials on other data are not compared

    def describe(self) -> dict[str, str | int]:
        return {"source": "noise, to be shifted by one place"}

    def train_batch(self, step: int, size: int) -> dict[str, Tensor]:
        x = torch.randn(size, 64, generator=torch.Generator().manual_seed(step))
        return {"inputs": x, "targets": x.roll(1, dims=1)}

    def eval_batch(self, index: int, size: int) -> dict[str, Tensor]:
        return self.train_batch(10**6 + index, size)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the samples. (An object with `count(batch)` gives the sum over the targets instead.)"""
    return (model(batch["inputs"]) - batch["targets"]).square().mean()
