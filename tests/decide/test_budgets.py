"""Other budgets, from stored results: every answer is conclude's, every change lies where it is said to lie."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from made_up import prediction, sweep_of_six, trial

from sweep.config.schema import BudgetConf, MinEvidence
from sweep.decide.budgets import (
    AXES,
    LOSS,
    LOSS_RATIO,
    MEMORY,
    SAMPLES,
    THROUGHPUT_RATIO,
    Axis,
    Sensitivity,
)
from sweep.decide.verdict import conclude
from sweep.report.phrases import next_action, survival
from sweep.results import TrialResult

KINDS = ("micro_batch", "checkpoint", "checkpoint_selective", "offload", "hybrid")


def random_sweep(seed: int, trials: int = 12, evidence: str = "cpu") -> list[TrialResult]:
    """Trials of every outcome, with ties, missing numbers, refused and failed ones."""
    draw = random.Random(seed)
    outcomes = ["ok"] * 7 + ["over_budget", "oom_device", "nan", "invalid"]
    found = [trial("baseline", 300.0, 100.0, evidence=evidence, outcome=draw.choice(["ok"] * 5 + ["oom_device"]))]
    for i in range(trials):
        outcome = draw.choice(outcomes)
        measure: dict[str, Any] = {"eval_loss": draw.choice([3.21, 3.0 + draw.random() / 2, None, math.nan])}
        changes: dict[str, Any] = {"prediction": prediction(draw.uniform(50, 320), fits=outcome != "over_budget")}
        found.append(
            trial(
                draw.choice(KINDS),
                # Rounded, so that some peaks and times are equal.
                draw.choice([round(draw.uniform(60, 320), -1)] * 9 + [math.nan]),
                round(draw.uniform(80, 200), -1),
                evidence=draw.choice([evidence, "smoke"]) if evidence == "measured" else evidence,
                outcome=outcome,
                name=f"trial {i}",
                measure={**measure, "spread": draw.choice([0.01, 0.2])},
                **changes,
            )
        )
    return found


def random_budget(draw: random.Random) -> BudgetConf:
    """Some settings set, some not."""
    ranges = {
        "memory_mib": (60, 320), "min_throughput_ratio": (0.4, 1.2), "min_samples_per_s": (60, 180),
        "max_eval_loss_ratio": (0.95, 1.1), "max_eval_loss": (3.0, 3.5), "min_saving_mib": (0, 40),
    }  # fmt: skip
    values = {key: draw.uniform(*ends) for key, ends in ranges.items() if draw.random() < 0.3}
    return BudgetConf(**values, min_evidence=draw.choice([MinEvidence.auto, MinEvidence.predicted]))


def around(values: list[float], draw: random.Random) -> list[float]:
    """Values at, just below and just above each, and some between."""
    near = [w for v in values if 0 < v < math.inf for w in (math.nextafter(v, 0), v, math.nextafter(v, math.inf))]
    return [*near, *(draw.uniform(0.0, 1.3 * max(near, default=1.0)) for _ in range(4))]


# ---- one setting


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_along_every_setting_the_answer_is_that_of_conclude(seed: int) -> None:
    draw = random.Random(seed)
    results, budget, capacity = random_sweep(seed), random_budget(draw), draw.choice([None, 200.0, 400.0])
    asked = Sensitivity(results, budget, capacity)
    for axis in AXES.values():
        spans = asked.spans(axis)
        assert (spans[0].low, spans[-1].high) == (0.0, math.inf)
        assert all(a.high == b.low for a, b in pairwise(spans))
        assert all(a.answer != b.answer for a, b in pairwise(spans))
        for value in around([s.low for s in spans] + [p.peak_mib or 0.0 for p in results], draw):
            (span,) = [s for s in spans if s.holds(value, axis)]
            expected = conclude(results, replace(budget, **{axis.key: value}), capacity)
            assert (span.answer.verdict, span.answer.preferred) == (expected.verdict, expected.preferred), (axis, value)


@pytest.mark.parametrize("axis", list(AXES.values()), ids=list(AXES))
def test_a_change_is_at_a_number_of_a_trial_exactly(axis: Axis) -> None:
    results = sweep_of_six()
    for i, r in enumerate(results):
        assert r.measurement is not None
        r.measurement.eval_loss = 3.21 + 0.013 * (3 - i) ** 2
    asked = Sensitivity(results, BudgetConf(memory_mib=300), None)
    base = results[0].measurement
    assert base is not None
    assert base.eval_loss is not None
    numbers: dict[str, list[float]] = {
        MEMORY.key: [r.peak_mib or 0.0 for r in results],
        THROUGHPUT_RATIO.key: [m.samples_per_s / base.samples_per_s for r in results if (m := r.measurement)],
        SAMPLES.key: [m.samples_per_s for r in results if (m := r.measurement)],
        LOSS_RATIO.key: [(m.eval_loss or 0.0) / base.eval_loss for r in results if (m := r.measurement)],
        LOSS.key: [m.eval_loss or 0.0 for r in results if (m := r.measurement)],
    }
    edges = [s.high for s in asked.spans(axis) if s.high < math.inf and s.answer.preferred is not None]
    assert edges
    assert set(edges) <= set(numbers[axis.key])


def test_tune_becomes_reject_where_nothing_can_fit_any_more() -> None:
    """60 MiB last through every step of these trials, so no cap below can be met."""
    spans = Sensitivity(sweep_of_six(), BudgetConf(), None).spans(MEMORY)
    assert [(s.low, s.answer.verdict, s.answer.preferred) for s in spans][:3] == [
        (0.0, "reject", None), (60.0, "tune", None), (109.8, "accept", "hybrid"),
    ]  # fmt: skip


# ---- two settings


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("x", "y"), [(MEMORY, THROUGHPUT_RATIO), (MEMORY, LOSS_RATIO), (SAMPLES, LOSS), (THROUGHPUT_RATIO, LOSS_RATIO)],
    ids=lambda axis: axis.key,
)  # fmt: skip
def test_over_the_plane_the_choice_is_that_of_conclude(seed: int, x: Axis, y: Axis) -> None:
    draw = random.Random(seed)
    results, budget = random_sweep(seed), random_budget(draw)
    areas = Sensitivity(results, budget, None).areas(x, y)
    xs, ys = around([a.x_low for a in areas], draw), around([a.y_low for a in areas], draw)
    for at_x, at_y in [(draw.choice(xs), draw.choice(ys)) for _ in range(60)]:
        inside = [
            a
            for a in areas
            if (a.x_low <= at_x < a.x_high if x.rising else a.x_low < at_x <= a.x_high)
            and (a.y_low <= at_y < a.y_high if y.rising else a.y_low < at_y <= a.y_high)
        ]
        assert len(inside) == 1
        expected = conclude(results, replace(budget, **{x.key: at_x, y.key: at_y}), None)
        assert inside[0].preferred_index == expected.preferred_index


def test_what_is_not_asked_about_stays_as_the_budget_has_it() -> None:
    results = sweep_of_six()
    free = Sensitivity(results, BudgetConf(), None).areas(MEMORY, THROUGHPUT_RATIO)
    held = Sensitivity(results, BudgetConf(min_saving_mib=190), None).areas(MEMORY, THROUGHPUT_RATIO)
    assert {a.preferred_index for a in free} == {None, 0, 1, 3, 5}
    assert {a.preferred_index for a in held} == {None, 5}


# ---- one answer


@pytest.mark.parametrize("seed", range(40))
def test_a_stricter_budget_never_gives_a_choice_that_beats_the_looser_one(seed: int) -> None:
    """Faster and smaller would have been accepted before, too. The baseline is kept only while no other is faster."""
    draw = random.Random(seed)
    results, budget = random_sweep(seed, evidence=draw.choice(["cpu", "measured"])), random_budget(draw)
    for axis in AXES.values():
        spans = Sensitivity(results, budget, None).spans(axis)
        chosen = [s.answer.preferred_index for s in (spans if axis.rising else spans[::-1])]  # the strictest first
        for k, looser in enumerate(chosen):
            for stricter in chosen[:k]:
                if looser is None or stricter is None or results[looser].is_baseline:
                    continue
                (a, x), (b, y) = ((results[i].measurement, results[i].peak_mib) for i in (looser, stricter))
                assert a is not None and b is not None and x is not None and y is not None
                assert not (b.step_ms < a.step_ms and y < x), (axis.key, results[looser].name, results[stricter].name)


@pytest.mark.parametrize("seed", range(40))
def test_the_advice_for_less_memory_is_what_is_concluded_with_less_memory(seed: int) -> None:
    results, budget = random_sweep(seed), random_budget(random.Random(seed))
    asked = Sensitivity(results, replace(budget, memory_mib=None), None)
    if asked.present.preferred != "baseline":
        return
    below = [s for s in asked.spans(MEMORY) if s.high < math.inf][-1].answer
    assert asked.present.cheapest_saving == below.preferred
    words = next_action(asked.present, results)
    assert f"if memory gets short, {below.preferred} " in words if below.preferred else "none of the trials" in words


# ---- what is not known


def refused(name: str, predicted_mib: float, cap_mib: float | None, **changes: Any) -> TrialResult:
    """As a search leaves a candidate that it refused: predicted not to fit, never run."""
    found = trial(
        name, outcome="over_budget", evidence="predicted",
        prediction=prediction(predicted_mib, fits=False, **changes),
        capacity_mib=changes.get("capacity_mib", 16000.0),
    )  # fmt: skip
    found.config["budget"]["memory_mib"] = cap_mib
    return found


def test_a_refused_candidate_is_not_known_from_its_predicted_peak_on() -> None:
    results = [*sweep_of_six(), refused("offload", 150.0, 120.0)]
    asked = Sensitivity(results, BudgetConf(memory_mib=120), 16000.0)
    assert [n.name for n in asked.not_known(149.9)] == []
    assert [n.name for n in asked.not_known(150.0)] == ["offload"]
    assert [n.name for n in asked.not_known(None)] == ["offload"]
    assert not asked.never_run[0].needs_other_device
    words = "Not known from a cap of 150.0 MiB on: 1 candidate was predicted not to fit and never run"
    assert any(line.startswith(words) for line in survival(Sensitivity(results, BudgetConf(memory_mib=120), 16000.0)))


def test_a_refusal_by_a_corrected_prediction_holds_up_to_the_cap_that_refused_it() -> None:
    """The search had learned that peaks are larger than predicted, so 118 MiB were too much for 120."""
    asked = Sensitivity([*sweep_of_six(), refused("offload", 118.0, 120.0)], BudgetConf(memory_mib=120), 16000.0)
    assert asked.not_known(120.0) == []
    assert len(asked.not_known(math.nextafter(120.0, math.inf))) == 1


def test_what_does_not_fit_the_device_is_not_known_for_a_larger_one_only() -> None:
    ran_out = trial("offload", outcome="oom_device", evidence="measured", capacity_mib=200.0)
    ran_out.prediction = prediction(250.0, fits=False, capacity_mib=200.0)
    too_large = refused("checkpoint", 150.0, None, capacity_mib=200.0, headroom_mib=-10.0)
    results = [*sweep_of_six("measured"), ran_out, too_large]
    asked = Sensitivity(results, BudgetConf(), 200.0)
    assert asked.not_known(200.0) == []
    assert [n.name for n in asked.not_known(201.0)] == ["checkpoint"]
    assert [n.name for n in asked.not_known(250.0)] == ["offload", "checkpoint"]
    assert all(n.needs_other_device for n in asked.never_run)
    words = "for a larger device: 2 candidates do not fit this one"
    assert any(words in line for line in survival(asked))


def test_a_prediction_is_known_whether_it_fits_or_not() -> None:
    results = [trial(r.name, 1.0, mode="predict", evidence="predicted") for r in sweep_of_six()]
    results[0].outcome = "over_budget"
    assert Sensitivity(results, BudgetConf(), 400.0).never_run == []
    words = "1 trial does not fit this device, whatever the cap: predict for a larger one with device=..."
    assert words in survival(Sensitivity(results, BudgetConf(), 400.0))


def test_without_a_measured_baseline_the_words_say_that_ratios_do_not_apply() -> None:
    results = [trial("baseline", outcome="oom_device", capacity_mib=200.0), *sweep_of_six()[1:]]
    words = survival(Sensitivity(results, BudgetConf(), 200.0))
    assert "The baseline has no measurement, so floors and gates relative to it do not apply" in words
    assert Sensitivity(results, BudgetConf(), 200.0).axes == [MEMORY, SAMPLES, LOSS]


# ---- words


def test_the_words_name_the_nearest_changes_around_the_present_budget() -> None:
    results = sweep_of_six()
    assert results[1].measurement is not None
    results[1].measurement.eval_loss = 3.3
    words = survival(Sensitivity(results, BudgetConf(memory_mib=150), None))
    assert words == [
        "Memory cap (now 150.0 MiB): micro_batch stays the choice from 128.0 up to 312.4 MiB; "
        "with 312.4 MiB or more, baseline; below 128.0 MiB, hybrid; below 109.8 MiB nothing is accepted",
        "Throughput floor (none is set): micro_batch stays the choice up to 0.902x the baseline's throughput; "
        "above that, nothing is accepted (tune)",
        "Quality gate (none is set): micro_batch stays the choice down to 1.0281x the baseline's held-out loss; "
        "below that, checkpoint; below 1.00x nothing is accepted",
        "The throughput of micro_batch is 0.90x the baseline's by the median, and between 0.87x and 0.94x for all that "
        "is sure: a floor between these may fall either way",
        "These limits are numbers of the 6 trials that ran (on this CPU)",
    ]


def test_a_number_that_is_shown_admits_what_it_is_said_to_admit() -> None:
    """62.24 is shown as 62.3 and not as 62.2: under a cap of 62.2 the trial would be over it."""
    results = [
        trial("baseline", 268.13, 100.0), trial("micro_batch", 87.26, 113.7, measure={"eval_loss": 3.32}),
        trial("checkpoint", 62.24, 171.3),
    ]  # fmt: skip
    words = survival(Sensitivity(results, BudgetConf(memory_mib=70), None))
    assert "checkpoint stays the choice from 62.3 up to 87.3 MiB" in words[0]
    assert "up to 0.583x" in words[1]  # 100 / 171.3 = 0.58377
    assert conclude(results, BudgetConf(memory_mib=62.3, min_throughput_ratio=0.583), None).preferred == "checkpoint"
    words = survival(Sensitivity(results, BudgetConf(memory_mib=100), None))
    assert "micro_batch stays the choice down to 1.0343x" in words[2]  # 3.32 / 3.21 = 1.03427
    assert conclude(results, BudgetConf(memory_mib=100, max_eval_loss_ratio=1.0343), None).preferred == "micro_batch"


def test_where_nothing_is_accepted_the_words_say_from_where_something_would_be() -> None:
    words = survival(Sensitivity(sweep_of_six(), BudgetConf(memory_mib=90), None))
    assert words[0] == (
        "Memory cap (now 90.0 MiB): nothing is accepted (tune); with 109.8 MiB or more, hybrid; "
        "below 60.0 MiB, nothing is accepted (reject)"
    )
    assert words[1] == "Throughput floor (none is set): nothing is accepted (tune), whatever it is"


def test_a_trial_whose_peak_is_not_known_is_the_choice_only_without_a_cap() -> None:
    results = [trial("baseline", 300.0, 100.0), trial("checkpoint", math.nan, 50.0)]
    words = survival(Sensitivity(results, BudgetConf(), None))
    assert words[0].startswith(
        "Memory cap (none is set): checkpoint while there is none; with any, baseline from 300.0 MiB"
    )


def test_of_a_prediction_only_the_memory_cap_is_told() -> None:
    results = [trial(r.name, 1.0, mode="predict", evidence="predicted") for r in sweep_of_six()]
    for r, peak in zip(results, sweep_of_six()):
        r.prediction = prediction(peak.peak_mib or 0.0)
    words = survival(Sensitivity(results, BudgetConf(memory_mib=150), 16000.0))
    assert len(words) == 2
    assert words[0].startswith("Memory cap (now 150.0 MiB): micro_batch stays the choice from 128.0 up to 312.4 MiB")
    assert words[1] == "Peaks are predicted and nothing was run, so there is no throughput and no loss to hold against"


def test_two_workloads_are_never_asked_about_together() -> None:
    results = [trial("baseline", 300.0, 100.0), trial("baseline", 300.0, 100.0, fixed_id="f2")]
    with pytest.raises(ValueError, match="fixed_id"):
        survival(Sensitivity(results, BudgetConf(), None))


def test_a_hundred_trials_take_seconds_and_not_minutes() -> None:
    """Every trial is a trade of its own here, so the choice changes as often as it can."""
    results = [trial("baseline", 400.0, 100.0)]
    results += [
        trial("micro_batch", 400.0 - 3 * i, 101.0 + i, name=f"trial {i}", measure={"spread": 0.0})
        for i in range(1, 100)
    ]
    started = time.process_time()
    survival(Sensitivity(results, BudgetConf(memory_mib=150), None))
    asked = Sensitivity(results, BudgetConf(memory_mib=150), None)
    assert len(asked.areas(MEMORY, THROUGHPUT_RATIO)) > 100
    assert len(asked.spans(MEMORY)) == 102
    assert time.process_time() - started < 10.0
