"""Any causal language model of the transformers library as a workload: from config values, with random weights, or from
a local folder, with its own; and with a LoRA of the peft library.

Nothing is downloaded. transformers and peft are optional extras, imported only when such a workload is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sweep.errors import BadInput
from sweep.memory.hollow import is_hollow

KEY = "workload.model.config"


def causal_lm(config: Mapping[str, Any] | str | None, attention: Any = "sdpa") -> nn.Module:
    """The model that `config` describes, in fp32, without a key/value cache.

    config: values of a transformers config with its `model_type`, such as {model_type: llama, hidden_size: 2048}; what
        is left out has the library's default. Or the path of a `config.json`: random weights as well. Or a folder that
        `save_pretrained` has written: with its weights, which a prediction leaves alone.
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
    folder = config if isinstance(config, str) and Path(config).is_dir() else None
    values["use_cache"] = False  # a cache grows under recomputation, and training has no use for one
    try:
        settings = transformers.AutoConfig.for_model(kind, **values)
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(KEY, kind, f"is no model of transformers {transformers.__version__}", _hint(error)) from error
    implementation = str(getattr(attention, "value", attention))
    try:
        if folder is not None and not _without_values():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=settings, attn_implementation=implementation, dtype=torch.float32, local_files_only=True
            )
        else:
            model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation=implementation)
    except OSError as error:
        todo = "give a folder that save_pretrained has written, or its config.json for random weights"
        raise BadInput(KEY, config, f"holds no weights ({_hint(error)})", todo) from error
    except (ValueError, KeyError, TypeError, AssertionError, ZeroDivisionError) as error:
        raise BadInput(KEY, kind, "cannot be built from these values", _hint(error)) from error
    return _without_packing(model)


def lora(
    config: Mapping[str, Any] | str | None,
    attention: Any = "sdpa",
    r: int = 8,
    alpha: int = 16,
    dropout: float = 0.0,
    targets: Any = None,
) -> nn.Module:
    """A frozen `causal_lm` with a LoRA on its linear layers: only the LoRA is trained.

    r: rank. alpha: its scale. targets: names of the layers; None: the library's choice for the kind of model.

    Raises BadInput as `causal_lm`, and where peft is not installed or has no such layers.
    """
    model = causal_lm(config, attention)
    try:
        import peft
    except ImportError as error:
        wrong, todo = "needs the peft library, which is not installed", "pip install peft, or choose another workload"
        raise BadInput("workload.model._target_", "sweep.workload.hf.lora", wrong, todo) from error
    wanted = None if targets is None else list(targets)
    settings = peft.LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=wanted, task_type=peft.TaskType.CAUSAL_LM
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise BadInput("workload.model.targets", targets, _hint(error), "name linear layers of the model") from error


def _without_values() -> bool:
    """Whether tensors that are made now have no values: in a prediction, or in an outline."""
    made = torch.empty(1)
    return made.is_meta or is_hollow(made)


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
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(
            KEY, path, f"cannot be read ({_hint(error)})", "give values, or the path of a config.json"
        ) from error
    if not isinstance(values, dict):
        raise BadInput(KEY, path, "holds no object", "give the config.json of a model")
    return values


def _hint(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
