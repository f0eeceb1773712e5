"""Any causal language model of the transformers library as a workload: from config values, with random weights.

Nothing is downloaded. transformers is an optional extra and imported only when such a workload is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from sweep.errors import BadInput

KEY = "workload.model.config"


def causal_lm(config: Mapping[str, Any] | str | None, attention: Any = "sdpa") -> nn.Module:
    """The model that `config` describes, in fp32, with random weights and without a key/value cache.

    config: values of a transformers config with its `model_type`, such as {model_type: llama, hidden_size: 2048}; what
        is left out has the library's default. Or the path of a `config.json`.
    attention: "sdpa" or "eager".

    It takes token ids [B, S] int64 as its first argument and returns an object with `.logits` [B, S, vocabulary].

    Raises:
        BadInput: transformers is not installed, or the values do not make a model.
    """
    try:
        import transformers
    except ImportError as error:
        raise BadInput(
            "workload.model._target_",
            "sweep.workload.hf.causal_lm",
            "needs the transformers library, which is not installed",
            "pip install 'transformers>=4.56', or choose another workload",
        ) from error
    example = "such as '{model_type: llama, hidden_size: 2048, num_hidden_layers: 16}'"
    if config is None:
        raise BadInput(KEY, None, "has to be given", f"give values, {example}, or the path of a config.json")
    values = dict(_read(config) if isinstance(config, str) else config)
    kind = values.pop("model_type", None)
    if kind is None:
        raise BadInput(KEY, config, "has no model_type", f"give one, {example}")
    for meaningless in ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path"):
        values.pop(meaningless, None)
    values["use_cache"] = False  # a cache grows under recomputation, and training has no use for one
    try:
        settings = transformers.AutoConfig.for_model(kind, **values)
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(KEY, kind, f"is no model of transformers {transformers.__version__}", _hint(error)) from error
    implementation = str(getattr(attention, "value", attention))
    try:
        model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation=implementation)
    except (ValueError, KeyError, TypeError, AssertionError, ZeroDivisionError) as error:
        raise BadInput(KEY, kind, "cannot be built from these values", _hint(error)) from error
    return _without_packing(model)


def _without_packing(model: nn.Module) -> nn.Module:
    """Keep transformers from looking for several sequences packed into one, which this project's samples never are.

    Versions 4.53 to 4.57 build a mask of S x S for it, which keeps the fused attention kernels away; later ones read a
    value, which makes the device wait and cannot be predicted.
    """
    from transformers import masking_utils as library

    masking_utils: Any = library
    original = getattr(masking_utils, "find_packed_sequence_indices", None)
    if original is None:
        return model

    def switch_off(*_: Any) -> None:
        masking_utils.find_packed_sequence_indices = _none

    def switch_on(*_: Any) -> None:
        masking_utils.find_packed_sequence_indices = original

    model.register_forward_pre_hook(switch_off)
    model.register_forward_hook(switch_on, always_call=True)
    return model


def _none(*_: Any, **__: Any) -> None:
    return None


def _read(path: str) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(
            KEY, path, f"cannot be read ({_hint(error)})", "give values, or the path of a config.json"
        ) from error
    if not isinstance(values, dict):
        raise BadInput(KEY, path, "holds no object", "give the config.json of a model")
    return values


def _hint(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
