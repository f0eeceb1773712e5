"""Causal language models of transformers as workloads: built from config values, never downloaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sweep.config.schema import CheckpointConf, Granularity, StrategyConf
from sweep.errors import BadInput
from sweep.strategy import applied
from sweep.workload.build import find_blocks
from sweep.workload.hf import causal_lm, lora
from sweep.workload.loss import CrossEntropy
from sweep.workload.step import Phases

transformers = pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WORKLOADS = Path(__file__).parents[2] / "conf" / "workload"


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # what Python does for a package that cannot be imported
    with pytest.raises(BadInput, match=r"needs the transformers library, which is not installed; pip install"):
        causal_lm(LLAMA)


def test_model_trains_with_the_default_loss() -> None:
    model = causal_lm(LLAMA)
    batch = {"inputs": torch.randint(97, (2, 8)), "targets": torch.randint(97, (2, 8))}
    loss = CrossEntropy()(model, batch)
    loss.backward()
    # Random weights know nothing: about log(97) per target.
    assert loss.item() / 16 == pytest.approx(torch.tensor(97.0).log().item(), rel=0.1)
    assert all(p.grad is not None and p.dtype is torch.float32 for p in model.parameters())
    assert [b.name for b in find_blocks(model)] == [f"model.layers.{i}" for i in range(3)]
    assert model.config.use_cache is False


def test_the_loss_is_the_librarys_own() -> None:
    model = causal_lm(LLAMA)
    tokens = torch.randint(97, (2, 9))
    ours = CrossEntropy()(model, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}) / 16
    theirs = model(input_ids=tokens, labels=tokens).loss  # shifts by itself
    torch.testing.assert_close(ours, theirs)


def test_attention_written_out_gives_the_same() -> None:
    tokens = torch.randint(97, (2, 8))
    results = []
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        results.append(causal_lm(LLAMA, attention)(tokens).logits)
    torch.testing.assert_close(*results)


def test_no_mask_is_made_and_the_library_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    real = torch.nn.functional.scaled_dot_product_attention
    seen: list[tuple[Any, Any]] = []

    def recorded(*args: Any, attn_mask: Any = None, is_causal: bool = False, **kwargs: Any) -> Any:
        seen.append((attn_mask, is_causal))
        return real(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    model = causal_lm(LLAMA)
    model(torch.randint(97, (1, 8)))
    assert seen == [(None, True)] * 3
    assert masking_utils.find_packed_sequence_indices is before
    with pytest.raises(IndexError):
        model(torch.full((1, 8), 97))  # no such token: the hook still runs
    assert masking_utils.find_packed_sequence_indices is before


def test_config_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}))
    model = causal_lm(str(path))
    assert len(model.model.layers) == 3 and next(model.parameters()).dtype is torch.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "workload.model.config=null: has to be given; give values, such as '{model_type: llama"),
        ({"hidden_size": 32}, "has no model_type"),
        ({"model_type": "no_such_model"}, "workload.model.config=no_such_model: is no model of transformers"),
        ({**LLAMA, "num_hidden_layers": "three"}, "workload.model.config=llama: "),
        ({"model_type": "vit"}, "workload.model.config=vit: cannot be built from these values"),
        ("missing/config.json", "workload.model.config=missing/config.json: cannot be read"),
    ],
)
def test_bad_values_are_one_line(config: Any, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        causal_lm(config)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_qwen_has_its_published_number_of_parameters() -> None:
    conf = yaml.safe_load((WORKLOADS / "qwen2_5_0_5b.yaml").read_text())
    with torch.device("meta"):
        model = causal_lm(conf["model"]["config"])
    assert sum(p.numel() for p in model.parameters()) == 494_032_768
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(find_blocks(model, conf["blocks"])) == 24


def test_the_cache_of_a_model_that_has_one_is_off_under_checkpointing() -> None:
    transformers = pytest.importorskip("transformers")
    values = {k: v for k, v in LLAMA.items() if k != "model_type"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    assert model.config.use_cache is True
    tokens = torch.randint(97, (2, 8))
    conf = StrategyConf(checkpoint=CheckpointConf(Granularity.blocks))
    model(tokens).logits.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with applied(conf, model, find_blocks(model), 2, Phases(), torch.device("cpu")) as force:
        out = model(tokens)
        assert out.past_key_values is None
        out.logits.square().sum().backward()
        force.require_effect()
        assert ["use_cache=False" in note for note in force.notes()] == [True]
    assert model.config.use_cache is True
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


# -- a folder, and LoRA -----------------------------------------------------------------------------------------------


def test_a_folder_gives_its_weights_and_a_prediction_leaves_them_alone(tmp_path: Path) -> None:
    saved = causal_lm(LLAMA)
    saved.save_pretrained(tmp_path / "model")
    loaded = causal_lm(str(tmp_path / "model"))
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters()))
    assert loaded.config.use_cache is False and all(p.dtype is torch.float32 for p in loaded.parameters())
    with torch.device("meta"):
        assert next(causal_lm(str(tmp_path / "model")).parameters()).is_meta
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(BadInput, match="holds no weights"):
        causal_lm(str(tmp_path / "model"))


@pytest.mark.parametrize("strategy", ["micro_batch", "checkpoint", "offload"])
def test_a_lora_is_predicted_as_measured_and_every_strategy_is_equal(strategy: str) -> None:
    pytest.importorskip("peft")
    from small_workloads import TOKENS, config

    from sweep.trial.trial import run_trial

    workload = {"model": {"_target_": "sweep.workload.hf.lora", "config": {**LLAMA, "vocab_size": 32}}, "data": TOKENS}
    own = {"micro_batch": {"micro_batch_size": 2}, "checkpoint": {"checkpoint": {"granularity": "blocks"}},
           "offload": {"offload": {"placement": "all", "min_tensor_kib": 0.25}}}[strategy]  # fmt: skip
    found = run_trial(config(workload, {"name": strategy, **own}, measure={"repeats": 1}), strategy)
    assert found.outcome == "ok", found.error
    assert found.verification is not None and found.verification.passed
    assert found.prediction is not None and found.prediction.error_ratio == 0
    trained = [n for n, p in lora({**LLAMA}).named_parameters() if p.requires_grad]
    assert trained and all("lora" in n for n in trained)


def test_layers_that_a_model_has_not_are_one_line() -> None:
    pytest.importorskip("peft")
    with pytest.raises(BadInput, match=r"workload\.model\.targets"):
        lora(LLAMA, targets=["no_such_layer"])
