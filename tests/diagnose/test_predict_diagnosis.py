"""Diagnoses of real workloads, by prediction: every number against a prediction of its own, and what is printed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from rich.console import Console
from small_workloads import GPT, TOKENS, config, data_of

from sweep import tracking
from sweep.config.schema import Config, DeviceConf, Dtype, Implementation, Mode, StrategyConf
from sweep.diagnose import command_of, diagnoses_in, print_all, run_diagnosis
from sweep.diagnose.advice import ALL, CHECKPOINT, DIRECTIONS, HYBRID, MICRO, OFFLOAD, SELECTIVE, Diagnosis, Facts, Row
from sweep.diagnose.predict import compute_ms, diagnose, floor_of
from sweep.report.phrases import diagnosed
from sweep.trial.predict import predict

CARD = {
    "name": "card",
    "type": "cuda",
    "capacity_mib": 1000.0,
    "context_mib": 100.0,
    "compute_capability": "8.9",
    "link_bandwidth_gb_s": 25.0,
    "peak_tflops": {"fp32": 20.0},
    "torch_name": "no such card",
}
#: Long enough that its activations are what fills the memory.
LONG: dict[str, Any] = {
    "model": GPT | {"max_seq_len": 256, "d_model": 128},
    "data": TOKENS | {"seq_len": 256},
    "global_batch_size": 8,
}
#: One sample at a time of a model that is wide for its 16 tokens: the optimizer's step is the peak.
WIDE: dict[str, Any] = {"model": GPT | {"d_model": 512}, "data": TOKENS, "global_batch_size": 1}


def configured(workload: dict[str, Any] | str, **more: Any) -> Config:
    made = config(workload, **more)
    return replace(made, mode=Mode.diagnose, strategy=StrategyConf(name="baseline"))


@cache
def long(on_card: bool) -> Diagnosis:
    """Of one workload, made once."""
    words = ["mode=diagnose", "workload=mine", "strategy.micro_batch_size=null"]
    found = diagnose(configured(LONG, **({"device": CARD} if on_card else {})), words)
    found.folder = "nowhere"
    return found


def facts_of(found: Diagnosis) -> Facts:
    assert found.facts is not None
    return found.facts


def printed(found: Diagnosis, width: int = 120) -> str:
    text = io.StringIO()
    print_all([found], Console(file=text, width=width))
    return text.getvalue()


def test_activations_on_a_cpu_without_a_cap() -> None:
    found = long(False)
    facts = facts_of(found)
    assert found.answer == "yes" and found.evidence == "predicted" and found.feasible
    assert facts.fits is None and facts.known == facts.extremes
    assert [s.direction for s in facts.extremes] == list(DIRECTIONS)
    assert found.first is not None and found.first.row == "micro_batch"
    assert command_of(found, found.first) == (
        "python train.py workload=mine strategy=micro_batch strategy.micro_batch_size=2"
    )
    assert facts.here and facts.host_free_mib is not None and facts.host_free_mib > 100


def test_a_command_is_made_of_words_that_compose() -> None:
    words = ["mode=diagnose", "+workload.optimizer.kwargs.betas=[0.9,0.95]", "workload.dtype=fp32", "compare=false"]
    found = Diagnosis("no", overrides=words)
    row = Row("other", True, [], ["mode=diagnose", "workload.dtype=bf16", "~workload.optimizer.kwargs.betas"])
    assert command_of(found, row) == "python train.py mode=diagnose workload.dtype=bf16"
    assert command_of(replace(found, overrides=["device=cpu"]), row) == (
        "python train.py device=cpu mode=diagnose workload.dtype=bf16 '~workload.optimizer.kwargs.betas'"
    )


@pytest.mark.parametrize("on_card", [False, True])
def test_each_extreme_is_the_prediction_of_what_is_typed(on_card: bool) -> None:
    facts = facts_of(long(on_card))
    all_of_it = {"offload": {"placement": "all", "keep_last": 0}}
    blocks = {"checkpoint": {"granularity": "blocks"}}
    typed: dict[str, dict[str, Any]] = {
        MICRO: {"micro_batch_size": 1},
        SELECTIVE: {"checkpoint": {"granularity": "selective"}},
        CHECKPOINT: blocks,
        OFFLOAD: all_of_it,
        HYBRID: blocks | all_of_it,
        ALL: {"micro_batch_size": 1} | blocks | all_of_it,
    }
    for direction, strategy in typed.items():
        wanted = config(LONG, strategy, **({"device": CARD} if on_card else {}))
        setting, p = facts.extreme(direction), predict(wanted, data_of(wanted.workload))
        assert setting is not None
        assert (setting.allocated_mib, setting.reserved_mib) == (p.allocated_mib, p.reserved_mib)
        assert setting.saved_mib == facts.peak_mib - p.allocated_mib
        assert setting.recompute_flops_ratio == p.recompute_flops_ratio
        assert setting.moved_mib == p.to_host_mib + p.from_host_mib
        assert setting.transfer_ms == p.transfer_round_trip_ms
        assert p.peak is not None and setting.host_mib == p.peak.host_peak_mib
        assert setting.accumulation_steps == (8 if "micro_batch_size" in strategy else 1)


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_the_floor_is_what_the_optimizers_step_takes_under_any_strategy(implementation: str) -> None:
    workload = WIDE | {"optimizer": {"implementation": implementation}}
    conf = config(workload, device=CARD)
    floor = floor_of(predict(conf, data_of(conf.workload)))
    parameters = floor["parameter"]
    assert floor["gradient"] == parameters
    assert floor["optimizer_state"] == pytest.approx(2 * parameters, rel=0.01)
    # What stays of the temporaries: cuBLAS's workspace, and foreach's list as long as the parameters.
    extra = parameters if implementation == "foreach" else 0.0
    assert floor["temporary"] == pytest.approx(extra + 8.125 * 2, abs=0.15 * parameters)
    for strategy in ("checkpoint", "hybrid"):
        other = config(workload, strategy, device=CARD)
        p = predict(other, data_of(other.workload))
        assert p.peak is not None
        assert p.peak.phase_peaks_mib["optimizer"] == pytest.approx(sum(floor.values()), rel=0.001)
        assert p.allocated_mib >= sum(floor.values()) - 0.01


def test_what_fits_is_kept_and_what_does_not_gets_the_mildest_setting() -> None:
    whole = facts_of(long(False)).peak_mib
    found = diagnose(configured(LONG, budget={"memory_mib": whole + 1}))
    assert found.first is not None and found.first.row == "keep"
    found = diagnose(configured(LONG, budget={"memory_mib": 0.6 * whole}))
    facts = facts_of(found)
    assert facts.fits is False and found.feasible
    mild = facts.mild(MICRO)
    assert found.first is not None and found.first.setting is mild and mild is not None
    assert mild.fits and 1 < mild.micro_batch_size < 8
    twice = config(LONG, {"micro_batch_size": 2 * mild.micro_batch_size})
    assert 2 * mild.micro_batch_size == 8 or predict(twice, data_of(twice.workload)).allocated_mib > 0.6 * whole


def test_nothing_fits_under_the_floor() -> None:
    found = diagnose(configured(LONG, budget={"memory_mib": 0.9 * facts_of(long(False)).floor_mib}))
    found.folder = "nowhere"
    assert not found.feasible
    assert found.first is not None and found.first.row == "other"
    room = facts_of(found).floor_room_mib
    assert room is not None and room < 0 and "No strategy here brings it under the cap" in printed(found)


def test_a_peak_in_the_optimizer_is_answered_with_no_and_another_optimizer() -> None:
    found = diagnose(configured(WIDE, device=CARD | {"capacity_mib": 250.0}))
    found.folder = "nowhere"
    facts = facts_of(found)
    fused = next(w for w in facts.what_if if w.change == "fused")
    assert fused.phase_saved_mib == pytest.approx(facts.floor["parameter"], rel=0.02)
    refused = [s.refused.code for s in facts.extremes if s.refused is not None and s.direction in (MICRO, ALL)]
    assert refused == ["one_sample"] * 2
    assert found.answer == "no" and next(a for a in found.order if a.row == "other").applies
    assert fused.override in printed(found)
    conf = configured(WIDE, device=CARD)
    conf.workload.optimizer.implementation = Implementation.fused
    assert diagnose(conf).answer != "yes"


def test_models_without_blocks_and_with_batch_norm_say_why_rows_do_not_apply() -> None:
    plain = {
        "model": {"_target_": "torch.nn.Linear", "in_features": 64, "out_features": 10},
        "data": {"_target_": "sweep.workload.data.RandomImages", "shape": [64], "classes": 10},
    }
    facts = facts_of(diagnose(configured(plain)))
    refused = {s.direction: diagnosed(s.refused) for s in facts.extremes if s.refused is not None}
    assert "no repeated blocks" in refused[CHECKPOINT] and "no repeated blocks" in refused[SELECTIVE]
    assert MICRO not in refused
    found = diagnose(configured("convnet"))
    micro = next(a for a in found.order if a.row == "micro_batch")
    assert not micro.applies
    assert "(BatchNorm2d) takes statistics over the whole batch" in diagnosed(*micro.because)


class ReadsValues(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 32)

    def forward(self, x: Any) -> Any:
        return self.embedding(x) * float(self.embedding.weight.sum().item() > 0)


def test_a_model_that_cannot_be_predicted_says_so() -> None:
    found = diagnose(configured({"model": {"_target_": f"{__name__}.ReadsValues"}, "data": TOKENS}))
    assert found.answer == "not known" and not found.feasible and found.facts is None
    assert "CannotPredict" in found.error
    found.folder = "nowhere"
    assert found.error in printed(found)
    console = Console(file=io.StringIO())
    assert not print_all([found, found], console)
    assert print_all([found, replace(found, feasible=True)], console), "one of the command's workloads is enough"


def test_theoretical_computing_time() -> None:
    device = DeviceConf(name="card", peak_tflops={"fp32": 20.0, "bf16": 100.0})
    assert compute_ms(device, Dtype.fp32, 2e12) == pytest.approx(100.0)
    assert compute_ms(device, Dtype.amp_bf16, 2e12) == pytest.approx(20.0)
    assert compute_ms(device, Dtype.amp_fp16, 2e12) is None
    assert compute_ms(device, Dtype.fp32, 0.0) is None


# -- what is printed and kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("on_card", [False, True])
def test_the_text_begins_with_the_answer_and_fits(width: int, on_card: bool) -> None:
    text = printed(long(on_card), width)
    lines = text.splitlines()
    assert text.count("[predicted]") == 1
    assert lines.index(next(x for x in lines if x.startswith(("Yes:", "In part:", "No:")))) <= 5
    # Commands are not wrapped: they are there to be copied.
    assert len([x for x in lines if "python train.py" in x]) >= 3
    assert all(len(x.rstrip()) <= width for x in lines if "python train.py" not in x)
    assert ("This machine has no card" in text) == on_card
    for words in ("What filled the memory?", "The floor that no", "The order in which to try", "do not conclude"):
        assert words in text


def test_a_job_leaves_its_files_and_a_run(tmp_path: Path) -> None:
    store = tracking.store_location(f"sqlite:///{tmp_path}/mlflow.db", tmp_path, "diagnoses")
    tracking.initialise(store)
    conf = configured(LONG, budget={"memory_mib": 10.0})
    found = run_diagnosis(conf, tmp_path / "job", ["mode=diagnose", "workload=mine"], store, lambda what: None)
    assert [d.mlflow_run_id for d in diagnoses_in(tmp_path, found.started_at)] == [found.mlflow_run_id]
    assert diagnoses_in(tmp_path, "9999") == []
    markdown = (tmp_path / "job" / "diagnosis.md").read_text()
    assert found.because is not None and diagnosed(found.because) in markdown and "| direction |" in markdown
    assert json.loads((tmp_path / "job" / "diagnosis.json").read_text())["answer"] == found.answer

    client = MlflowClient(store.uri)
    run = client.get_run(str(found.mlflow_run_id))
    tags, metrics = run.data.tags, run.data.metrics
    assert run.info.status == "FINISHED" and "mlflow.parentRunId" not in tags
    assert (tags["kind"], tags["evidence"], tags["answer"]) == ("diagnosis", "predicted", found.answer)
    assert tags["mlflow.note.content"] == markdown
    facts = facts_of(found)
    assert metrics["diagnosis/peak_mib"] == facts.peak_mib
    assert metrics["diagnosis/floor_mib"] == facts.floor_mib
    assert metrics["diagnosis/room_mib"] == facts.room_mib
    assert metrics["diagnosis/saved/micro_batch_and_hybrid_mib"] == facts.extremes[-1].saved_mib
    assert {a.path for a in client.list_artifacts(run.info.run_id)} >= {"diagnosis.json", "diagnosis.md", "config.yaml"}
    assert run.data.params["budget.memory_mib"] == "10.0"
