"""Qwen2.5-0.5B and its loss as the published notebooks take it: from transformers, which shifts the labels itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

#: Public config values of Qwen/Qwen2.5-0.5B-Instruct (494,032,768 parameters).
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


class LabelsLoss:
    """The mean loss that the model computes from `labels`. Targets are the unshifted inputs."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(input_ids=batch["inputs"], labels=batch["targets"]).loss
        return loss
