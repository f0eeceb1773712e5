"""What is logged of a trial, before MLflow sees it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from enum import Enum

import pytest
import tracking_parts as parts

from sweep.results import Decision, Outcome
from sweep.tracking.values import (
    NAME_LIMIT,
    PARAM_LIMIT,
    TAG_LIMIT,
    cut_markdown,
    dataset_of,
    decision_metrics_of,
    end_status,
    metrics_of,
    one_line,
    params_of,
    plan_tags_of,
    result_tags_of,
)


def test_params_are_dotted_and_written_as_on_the_command_line() -> None:
    assert params_of(parts.config()) == {
        "workload.name": "gpt_tiny",
        "workload.data._target_": "sweep.workload.data.StandardLibrary",
        "workload.data.fraction": "0.5",
        "workload.optimizer.name": "adamw",
        "workload.optimizer.lr": "0.0003",
        "workload.optimizer.kwargs.betas": "[0.9, 0.95]",
        "workload.grad_clip_norm": "null",
        "strategy.name": "checkpoint",
        "strategy.checkpoint.granularity": "blocks",
        "strategy.checkpoint.every_k": "2",
        "strategy.checkpoint.parts": "[]",
        "measure.verify": "true",
        "measure.steps": "5",
    }


class Colour(Enum):
    red = "#f00"


def test_params_of_odd_values() -> None:
    odd = {"empty": "", "dict": {}, "enum": Colour.red, "nan": math.nan, "object": {1: {2, 3} - {3}}, "text": "a: [b"}
    assert params_of(odd) == {
        "empty": "''",
        "dict": "{}",
        "enum": "red",
        "nan": "NaN",
        "object.1": '"{2}"',
        "text": "a: [b",
    }
    assert params_of({}) == {}


def test_param_names_with_characters_that_mlflow_refuses_stay_apart() -> None:
    params = params_of({"+a@[b=": 1, "~a@[b=": 2, "x": {"": 3}, "": 4, "..": 5, "é/µ": 6})
    assert list(params.values()) == ["1", "2", "3", "4", "5", "6"]
    assert "_a__b_" in params
    assert "_a__b__2" in params


def test_long_param_names_and_values_are_cut_and_stay_apart() -> None:
    params = params_of({"k" * 300 + "1": "v" * 7000, "k" * 300 + "2": "w"})
    assert len(params) == 2
    assert all(len(name) <= NAME_LIMIT for name in params)
    value = next(iter(params.values()))
    assert len(value) == PARAM_LIMIT
    assert value.endswith("v [cut]")


def test_metrics_of_a_full_result() -> None:
    result = parts.finished(steps=3, decision=parts.accepted())
    logged = metrics_of(result)
    single = {name: value for name, value, step in logged if step == 0}
    expected = {
        "memory/peak_allocated_mib": 100.0,
        "memory/saved_mib": 40.0,
        "memory/peak_mib": 100.0,
        "memory/host_peak_mib": 7.0,
        "memory/at_peak/parameter_mib": 10.0,
        "memory/at_peak/activation_mib": 14.0,
        "memory/phase_peak/backward_mib": 52.0,
        "time/step_ms": 50.0,
        "time/step_ms_low": 49.0,
        "time/step_ms_high": 52.0,
        "time/backward_ms": 25.0,
        "throughput/samples_per_s": 320.0,
        "throughput/tokens_per_s": 40960.0,
        "throughput/ratio": 0.8,
        "quality/eval_loss": 5.2,
        "quality/eval_loss_before": 5.6,
        "quality/eval_loss_ratio": 1.001,
        "verify/passed": 1.0,
        "verify/grad_rel_err": 3e-6,
        "verify/loss_rel_err": 1e-6,
        "verify/block_input_grad_rel_err": 2e-6,
        "verify/rng_equal": 1.0,
        "transfer/to_host_mib": 5.0,
        "transfer/from_host_mib": 6.0,
        "predicted/allocated_mib": 101.0,
        "predicted/reserved_mib": 120.0,
        "predicted/headroom_mib": 880.0,
        "predicted/error_ratio": 0.01,
        "predicted/at_peak/temporary_mib": 16.0,
        "trial/wall_s": 12.5,
        "trial/parameters": 1_200_000.0,
    }
    assert {name: single.get(name) for name in expected} == expected
    assert "memory/peak_reserved_mib" not in single  # None: not known on a CPU
    assert [(v, s) for n, v, s in logged if n == "quality/train_loss"] == [(5.5, 0), (5.49, 1), (5.48, 2)]
    assert len([n for n, _, _ in logged if n == "time/each_step_ms"]) == 15
    names = [(name, step) for name, _, step in logged]
    assert len(names) == len(set(names))


def test_only_finite_metrics_are_logged() -> None:
    result = parts.finished()
    measurement, verification = result.measurement, result.verification
    assert measurement is not None
    assert verification is not None
    measurement.train_loss = [5.0, math.nan, math.inf, 4.0]
    measurement.eval_loss, measurement.tokens_per_s = math.nan, None
    verification.grad_rel_err = math.inf
    logged = metrics_of(result)
    assert all(math.isfinite(value) for _, value, _ in logged)
    assert [(v, s) for n, v, s in logged if n == "quality/train_loss"] == [(5.0, 0), (4.0, 3)]
    names = {name for name, _, _ in logged}
    assert not names & {"quality/eval_loss", "throughput/tokens_per_s", "verify/grad_rel_err"}


def test_metrics_of_a_trial_that_never_ran() -> None:
    assert metrics_of(parts.planned(wall_s=1.0)) == [("trial/wall_s", 1.0, 0)]
    assert decision_metrics_of(parts.planned()) == []


def test_tags() -> None:
    result = parts.finished(
        is_baseline=True, decision=Decision("reject", ["over_memory", "below_throughput"], "try hybrid")
    )
    tags = result_tags_of(result)
    expected = {
        "outcome": "ok",
        "evidence": "cpu",
        "verdict": "reject",
        "reasons": "over_memory, below_throughput",
        "strategy": "checkpoint",
        "workload": "gpt_tiny",
        "device": "cpu",
        "mode": "measure",
        "is_baseline": "true",
        "data_version": result.data_version,
        "peak_phase": "backward",
        "peak_operator": "aten.mm",
        "verified": "true",
        "error": "",
    }
    assert {name: tags.get(name) for name in expected} == expected
    assert "outcome" not in plan_tags_of(result)  # only a trial that was logged whole has one
    assert "verdict" not in result_tags_of(parts.finished())


@pytest.mark.parametrize("outcome", list(Outcome))
def test_end_status(outcome: Outcome) -> None:
    good = outcome in (Outcome.ok, Outcome.over_budget)
    assert end_status(outcome.value) == ("FINISHED" if good else "FAILED")


def test_markdown_is_cut_between_lines() -> None:
    text = "# Report\n" + "".join(f"| row {i} | {'x' * 50} |\n" for i in range(400))
    short = cut_markdown(text)
    assert len(short) <= TAG_LIMIT
    *rows, note = short.splitlines()
    assert "whole text" in note
    assert all(row in text.splitlines() for row in rows if row)
    assert cut_markdown("short") == "short"
    assert len(cut_markdown("y" * 9000)) <= TAG_LIMIT


def test_dataset_fields() -> None:
    fields = dataset_of(parts.finished())
    assert fields is not None
    assert fields["name"] == "standard-library"
    assert fields["digest"] == "0123456789abcdef0123456789abcdef0123"  # MLflow holds 36 characters
    assert json.loads(fields["source"]) == {"tags": {"mlflow.source.name": "sweep.workload.data.StandardLibrary"}}
    assert json.loads(fields["profile"])["files"] == 700

    fields = dataset_of(parts.finished(data={"path": "/data/book.txt"}))
    assert fields is not None
    assert (fields["name"], fields["source_type"]) == ("StandardLibrary", "local")
    assert json.loads(fields["source"]) == {"uri": "/data/book.txt"}
    assert dataset_of(parts.finished(data_version="")) is None


def test_errors_are_shown_on_one_line_without_passwords() -> None:
    assert one_line(ValueError("\n\n  cannot open postgresql://me:secret@host/db\nmore\n")) == (
        "cannot open postgresql://me:***@host/db"
    )
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 1000))) < 310


def test_importing_the_module_imports_neither_mlflow_nor_torch() -> None:
    code = "import sys, sweep.tracking; print([m for m in ('mlflow', 'torch', 'sqlalchemy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=parts.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
