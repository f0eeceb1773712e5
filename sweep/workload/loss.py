"""The loss as a sum over targets, so that the caller can divide by the targets of a whole accumulation window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Targets with this value are left out of the loss and of the count.
IGNORED = -100


class CrossEntropy:
    """Cross-entropy between logits (N, C) and targets (N,), or (N, S, C) and (N, S), of `batch["targets"]`, int64."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the model on `batch["inputs"]`; the sum over all targets but the ignored ones, 0-dim, fp32.

        A batch without a target gives 0 and zero gradients. Logits of a lower precision are cast to fp32 first,
        which is what autocast does on CUDA.

        Raises:
            ValueError: logits and targets do not match in shape.
            TypeError: the model's output holds no logits.
        """
        logits, targets = logits_of(model(batch["inputs"])), batch["targets"]
        if logits.dim() < 2 or logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} do not match targets of shape {tuple(targets.shape)}: "
                "logits need one more dimension, the classes, at the end"
            )
        return F.cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """The number of targets that are not ignored. Reads values: meant for the batch on the host."""
        return int(torch.count_nonzero(batch["targets"] != IGNORED))


def logits_of(output: Any) -> Tensor:
    """The logits of an output: a tensor, a mapping with "logits", an object with `.logits`, or a tuple's first item."""
    if isinstance(output, Tensor):
        return output
    found = None
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the model's output of type {type(output).__name__} holds no logits: give a tensor, a tuple whose first "
            'item is the logits, a mapping with "logits", or an object with .logits'
        )
    return found
