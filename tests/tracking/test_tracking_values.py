"""What is logged of a trial, before MLflow sees it."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import made_up
import pytest
import tracking_parts as parts

from sweep.results import Decision, Difference, Quality
from sweep.tracking.values import (
    BASELINE_COLOR,
    NAME_LIMIT,
    PARAM_LIMIT,
    TAG_LIMIT,
    color_of,
    cut_markdown,
    decision_metrics_of,
    knobs_of,
    metrics_of,
    one_line,
    params_of,
    plan_tags_of,
    result_tags_of,
)


class Colour(Enum):
    red = "#f00"


# Parameters


def test_params_are_dotted_and_written_as_on_the_command_line() -> None:
    optimizer = {"name": "adamw", "lr": 3e-4, "kwargs": {"betas": [0.9, 0.95]}}
    odd = {"empty": "", "dict": {}, "enum": Colour.red, "nan": math.nan, "object": {1: {2, 3} - {3}}, "text": "a: [b"}
    config = {"workload": {"optimizer": optimizer, "grad_clip_norm": None}, "measure": {"verify": True}, **odd}
    assert params_of(config) == {
        "workload.optimizer.name": "adamw",
        "workload.optimizer.lr": "0.0003",
        "workload.optimizer.kwargs.betas": "[0.9, 0.95]",
        "workload.grad_clip_norm": "null",
        "measure.verify": "true",
        "empty": "''",
        "dict": "{}",
        "enum": "red",
        "nan": "NaN",
        "object.1": '"{2}"',
        "text": "a: [b",
    }
    assert params_of({}) == {}


def test_names_that_mlflow_refuses_and_long_ones_stay_apart() -> None:
    params = params_of({"+a@[b=": 1, "~a@[b=": 2, "x": {"": 3}, "": 4, "..": 5, "é/µ": 6})
    assert list(params.values()) == ["1", "2", "3", "4", "5", "6"]
    assert {"_a__b_", "_a__b__2"} <= set(params)
    params = params_of({"k" * 300 + "1": "v" * 7000, "k" * 300 + "2": "w"})
    assert len(params) == 2
    assert all(len(name) <= NAME_LIMIT for name in params)
    assert len(next(iter(params.values()))) == PARAM_LIMIT
    assert next(iter(params.values())).endswith("v [cut]")


SEGMENTS = {"checkpoint__granularity": "segments", "checkpoint__segment_size": 3}
PARTS = {"checkpoint__granularity": "parts", "checkpoint__parts": ["attn", "mlp"]}


@pytest.mark.parametrize(
    ("strategy", "knobs", "expected"),
    [
        ("baseline", {}, ("16", "1", "none", "none")),
        ("micro_batch", {"micro_batch_size": 5}, ("5", "4", "none", "none")),
        ("micro_batch", {"micro_batch_size": 64}, ("16", "1", "none", "none")),
        ("checkpoint", {"checkpoint__every_k": 2}, ("16", "1", "blocks/2", "none")),
        ("checkpoint_selective", {}, ("16", "1", "selective", "none")),
        ("checkpoint", SEGMENTS, ("16", "1", "segments of 3", "none")),
        ("checkpoint", PARTS, ("16", "1", "attn+mlp", "none")),
        ("offload", {"offload__min_tensor_kib": 1.0, "offload__keep_last": 2}, ("16", "1", "none", "all >=1K keep 2")),
        ("offload", {"offload__placement": "blocks", "offload__blocks": "first:2"}, ("16", "1", "none", "first:2")),
        ("offload", {"offload__implementation": "save_on_cpu"}, ("16", "1", "none", "all save_on_cpu")),
        ("hybrid", {"offload__placement": "inputs"}, ("16", "1", "blocks", "inputs")),
    ],
)
def test_knobs(strategy: str, knobs: dict[str, Any], expected: tuple[str, str, str, str]) -> None:
    found = knobs_of(made_up.trial(strategy, knobs=knobs))
    assert found.pop("strategy") == strategy
    assert tuple(found.values()) == expected
    assert list(found) == ["micro_batch", "accumulation", "checkpoint", "offload"]


def test_no_strategy_no_knobs() -> None:
    assert knobs_of(made_up.trial("own", config={})) == {}


def test_colours_tell_kinds_apart_and_sizes_by_their_shade() -> None:
    colors = {result.strategy: color_of(result) for result in made_up.sweep_of_six()}
    assert colors["baseline"] == BASELINE_COLOR
    assert len(set(colors.values())) == 6
    sizes = (16, 8, 4, 2, 1)
    shades = [color_of(made_up.trial("checkpoint", 1.0, knobs={"micro_batch_size": size})) for size in sizes]
    assert len(set(shades)) == 5
    assert all(int(shade[1:3], 16) > int(shade[3:5], 16) > int(shade[5:7], 16) for shade in shades)  # orange
    assert shades == sorted(shades, reverse=True)  # darker and darker


# Metrics


def test_metrics_of_a_full_result() -> None:
    result = parts.finished(steps=3, decision=parts.accepted())
    logged = metrics_of(result)
    single = {name: value for name, value, step in logged if step == 0}
    expected = {
        "memory/peak_allocated_mib": 100.0,
        "memory/saved_mib": 40.0,
        "memory/peak_mib": 100.0,
        "memory/host_peak_mib": 7.0,
        "memory/at_peak/activation_mib": 14.0,
        "memory/phase_peak/backward_mib": 52.0,
        "time/step_ms": 50.0,
        "time/step_ms_high": 51.0,
        "time/backward_ms": 30.0,
        "throughput/samples_per_s": 320.0,
        "throughput/ratio": 0.8,
        "quality/eval_loss": 5.2,
        "quality/eval_loss_before": 5.62,
        "quality/eval_loss_ratio": 1.001,
        "verify/passed": 1.0,
        "verify/grad_rel_err": 3e-6,
        "verify/block_input_grad_rel_err": 2e-6,
        "verify/rng_equal": 1.0,
        "transfer/from_host_mib": 6.0,
        "predicted/allocated_mib": 101.0,
        "predicted/fits": 1.0,
        "predicted/error_ratio": 0.01,
        "predicted/at_peak/temporary_mib": 16.0,
        "predicted/phase_peak/backward_mib": 52.0,
        "trial/timed_steps": 5.0,
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
    assert result.measurement is not None
    assert result.verification is not None
    result.measurement.train_loss = [5.0, math.nan, math.inf, 4.0]
    result.measurement.eval_loss, result.measurement.tokens_per_s = math.nan, None
    result.verification.grad_rel_err = math.inf
    logged = metrics_of(result)
    assert [(v, s) for n, v, s in logged if n == "quality/train_loss"] == [(5.0, 0), (4.0, 3)]
    names = {name for name, _, _ in logged}
    assert not names & {"quality/eval_loss", "throughput/tokens_per_s", "verify/grad_rel_err"}
    assert metrics_of(parts.planned(wall_s=1.0)) == [("trial/wall_s", 1.0, 0)]
    assert decision_metrics_of(parts.planned()) == []


def test_numbers_have_the_digits_that_mean_something() -> None:
    result = made_up.trial("checkpoint", 268.13281251, 131.094599999, measure={"eval_loss": 3.268112349})
    result.verification = made_up.verified(3.123456789e-7)
    logged = {name: value for name, value, _ in metrics_of(result)}
    assert logged["memory/peak_allocated_mib"] == 268.133
    assert (logged["time/step_ms"], logged["time/step_ms_low"]) == (131.095, 128.473)
    assert logged["quality/eval_loss"] == 3.26811
    assert logged["verify/grad_rel_err"] == 3.123456789e-7  # errors are small: all digits


def test_differences_carry_their_intervals() -> None:
    result = made_up.trial("checkpoint", 100.0)
    quality = Quality("equal", 3, 3.2, 3.1, 3.3, 0.01, -0.02, 0.04, 0.0)
    result.decision = Decision("accept", step=Difference(1.2, 1.15, 1.25, False), quality=quality)
    logged = {name: value for name, value, _ in decision_metrics_of(result)}
    assert (logged["time/step_low_ratio"], logged["time/step_high_ratio"]) == (1.15, 1.25)
    assert (logged["quality/loss_difference_low"], logged["quality/loss_difference_high"]) == (-0.02, 0.04)


# Tags, texts


def test_tags() -> None:
    result = parts.finished(is_baseline=True, decision=Decision("reject", ["over_memory", "below_throughput"]))
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


def test_texts_are_cut_where_nothing_is_torn_apart() -> None:
    text = "# Report\n" + "".join(f"| row {i} | {'x' * 50} |\n" for i in range(400))
    short = cut_markdown(text)
    assert len(short) <= TAG_LIMIT
    *rows, note = short.splitlines()
    assert "whole text" in note
    assert all(row in text.splitlines() for row in rows if row)
    assert cut_markdown("short") == "short"
    assert len(cut_markdown("y" * 9000)) <= TAG_LIMIT
    error = ValueError("\n\n  cannot open postgresql://me:secret@host/db\nmore\n")
    assert one_line(error) == "cannot open postgresql://me:***@host/db"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 1000))) < 310
