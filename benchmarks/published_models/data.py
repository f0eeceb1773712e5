"""Random inputs, as the published runs used: memory depends on their shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor

Batch = dict[str, Tensor]


class RandomTokens:
    """inputs and targets [B, seq_len] int64, uniform over the vocabulary; the same for every step, as published."""

    same_shapes = True

    def __init__(self, vocabulary: int, seq_len: int, seed: int = 0, targets_are_inputs: bool = False) -> None:
        self.vocabulary, self.seq_len, self.seed = vocabulary, seq_len, seed
        self.targets_are_inputs = targets_are_inputs
        self.version = f"random tokens {vocabulary} x {seq_len}, seed {seed}"

    def describe(self) -> dict[str, str | int]:
        return {"source": "random tokens", "vocabulary": self.vocabulary, "seq_len": self.seq_len}

    @property
    def eval_samples(self) -> int:
        return 1 << 20

    def train_batch(self, step: int, size: int) -> Batch:
        return self._batch(self.seed, size)

    def eval_batch(self, index: int, size: int) -> Batch:
        return self._batch(self.seed + 1 + index, size)

    def _batch(self, seed: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocabulary, (size, self.seq_len + 1), generator=generator)
        inputs = tokens[:, :-1].contiguous()
        return {"inputs": inputs, "targets": inputs.clone() if self.targets_are_inputs else tokens[:, 1:].contiguous()}


class RandomImages:
    """inputs [B, 3, side, side] fp32 and targets [B] int64 below `classes`."""

    same_shapes = True

    def __init__(self, side: int = 224, classes: int = 10, seed: int = 0) -> None:
        self.side, self.classes, self.seed = side, classes, seed
        self.version = f"random images {side}, {classes} classes, seed {seed}"

    def describe(self) -> dict[str, str | int]:
        return {"source": "random images", "side": self.side, "classes": self.classes}

    @property
    def eval_samples(self) -> int:
        return 1 << 20

    def train_batch(self, step: int, size: int) -> Batch:
        return self._batch(self.seed, size)

    def eval_batch(self, index: int, size: int) -> Batch:
        return self._batch(self.seed + 1 + index, size)

    def _batch(self, seed: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return {
            "inputs": torch.rand(size, 3, self.side, self.side, generator=generator),
            "targets": torch.randint(self.classes, (size,), generator=generator),
        }
