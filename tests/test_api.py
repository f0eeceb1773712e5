"""`sweep.predict` and `sweep.compare`: a model that is there gets the numbers that its workload has in a config."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_workloads import CONVNET, DIGITS, GPT, LLAMA, TOKENS, config
from torch import Tensor, nn

import sweep
from sweep.errors import BadInput, CannotPredict
from sweep.trial.predict import predict as predict_config
from sweep.workload import build_data, build_model
from sweep.workload.loss import CrossEntropy

MEASURE = {"warmup_steps": 1, "steps": 2, "repeats": 1, "eval_batches": 1}


def given(workload: dict[str, Any], **more: Any) -> tuple[Any, nn.Module, dict[str, Tensor]]:
    c = config({**workload, "global_batch_size": 8, "seed": 0, **more})
    return c, build_model(c.workload), build_data(c.workload).train_batch(0, 8)


@pytest.mark.parametrize(
    "workload",
    [
        {"model": GPT, "data": TOKENS},
        {"model": LLAMA, "data": TOKENS, "dtype": "amp_bf16"},
        {"model": CONVNET, "data": DIGITS},
        {"model": {"_target_": "small_models.TiedBlocks"}, "data": TOKENS},
    ],
)
@pytest.mark.parametrize("device", ["cpu", "a100_80gb"])
def test_a_model_that_is_there_is_predicted_as_its_config(workload: dict[str, Any], device: str) -> None:
    c, model, batch = given(workload)
    before = copy.deepcopy(model.state_dict())
    more = {"dtype": workload.get("dtype", "fp32"), "optimizer": {"lr": 0.01}}
    found = sweep.predict(model, CrossEntropy(), batch, device=device, strategy="baseline", workload=more)
    factory = sweep.predict(lambda: build_model(c.workload), CrossEntropy(), batch, device=device, workload=more)
    from omegaconf import OmegaConf

    from sweep.environment import CONF

    own = OmegaConf.to_container(OmegaConf.load(CONF / "device" / f"{device}.yaml"))
    expected = predict_config(config({**workload, "global_batch_size": 8, "seed": 0}, device=own, mode="predict"))
    assert found.allocated_mib == factory.allocated_mib == expected.allocated_mib
    assert found.reserved_mib == expected.reserved_mib
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items())


def test_strategies_lower_the_predicted_peak_and_what_cannot_be_known_is_said() -> None:
    _, model, batch = given({"model": GPT, "data": TOKENS})
    whole = sweep.predict(model, CrossEntropy(), batch, device="h100_80gb")
    less = sweep.predict(model, CrossEntropy(), batch, device="h100_80gb", checkpoint={"granularity": "blocks"})
    parts = sweep.predict(model, CrossEntropy(), batch, device="h100_80gb", strategy="micro_batch")
    assert max(less.allocated_mib, parts.allocated_mib) < whole.allocated_mib and whole.fits

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if float(self.layer(x).sum()) > 0 else x

    with pytest.raises(CannotPredict):
        sweep.predict(Reads(), lambda m, b: m(b).mean(), torch.randn(8, 4), device="cpu")
    with pytest.raises(BadInput, match="no_such_card"):
        sweep.predict(model, CrossEntropy(), batch, device="no_such_card")


def test_compare_measures_verifies_and_prefers_and_leaves_the_model_alone() -> None:
    _, model, batch = given({"model": GPT, "data": TOKENS})
    before = copy.deepcopy(model.state_dict())

    def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    own = {"name": "half", "micro_batch_size": 4}
    found = sweep.compare(model, mean, [batch, batch], strategies=["checkpoint", own], device="cpu", measure=MEASURE)
    assert [r.name for r in found.results] == ["baseline", "checkpoint", "half"]
    assert {r.outcome for r in found.results} == {"ok"} and found.preferred is not None
    assert all(r.verification is not None and r.verification.passed for r in found.results[1:])
    peaks = [r.peak_mib for r in found.results]
    assert all(r.prediction is not None and r.prediction.allocated_mib == p for r, p in zip(found.results, peaks))
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items())
    text = str(found)
    assert "Verdict: accept" in text and "checkpoint" in text and "<html" in found._repr_html_()
    assert found.plot().axes
    tight = sweep.compare(
        model, mean, batch, strategies=["checkpoint"], device="cpu", measure=MEASURE, memory_mib=peaks[1] * 1.001
    )
    assert tight.preferred is not None and tight.preferred.name == "checkpoint"
    with sweep.apply(model, tight.preferred) as strategy:
        mean(model, batch).backward()
        strategy.check()


def test_for_a_device_that_is_not_here_it_predicts() -> None:
    _, model, batch = given({"model": LLAMA, "data": TOKENS})
    found = sweep.compare(model, CrossEntropy(), batch, device="t4", strategies=["checkpoint", "offload"])
    assert found.comparison.mode == "predict" and {r.evidence for r in found.results} == {"predicted"}
    assert "Predicted, not measured" in str(found) and found.plot().axes


def test_a_loss_with_parameters_is_new_in_each_trial() -> None:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.zeros(10, 10))

        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch["inputs"]) @ (self.centres + torch.eye(10)), batch["targets"])

    loss = Centres()
    _, model, batch = given({"model": {**CONVNET, "layers": 2}, "data": DIGITS})
    found = sweep.compare(model, loss, batch, strategies=["checkpoint"], device="cpu", measure=MEASURE)
    assert [r.outcome for r in found.results] == ["ok", "ok"] and not loss.centres.any()


def test_training_arguments_say_workload_and_strategy() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=4, gradient_checkpointing=True,
        optim="adamw_torch_fused", learning_rate=0.01, weight_decay=0.1, bf16=True, use_cpu=True,
    )  # fmt: skip
    said = sweep.from_training_arguments(arguments)
    assert said["strategy"] == {"micro_batch_size": 2, "checkpoint": {"granularity": "blocks"}}
    _, model, batch = given({"model": LLAMA, "data": TOKENS})
    found = sweep.predict(model, CrossEntropy(), batch, device="l4", **said)
    own = {"dtype": "amp_bf16", "optimizer": {"implementation": "fused"}, "grad_clip_norm": 1.0}
    whole = sweep.predict(model, CrossEntropy(), batch, device="l4", workload=own)
    assert found.allocated_mib < whole.allocated_mib
    arguments.optim = "adafactor"
    with pytest.raises(BadInput, match="adafactor"):
        sweep.from_training_arguments(arguments)
