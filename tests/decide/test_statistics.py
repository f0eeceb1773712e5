"""Intervals, differences and drift: what they cover on made-up samples, and what they say of hand-made ones."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
from made_up import measurement

import sweep.decide.statistics as module
from sweep.decide.statistics import (
    MIN_VALUES,
    difference,
    disturbances,
    drift_of,
    good_runs,
    median_interval,
    same_time,
)
from sweep.report.phrases import disturbed, drift_found
from sweep.results import Conditions, Difference, Drift, Measurement, Run

RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _same_samples() -> None:
    """Each test draws its own, whichever others run."""
    global RNG
    RNG = np.random.default_rng(7)


def samples(repeats: int, steps: int, between: float, within: float) -> list[list[float]]:
    """Step times around 100 ms whose repeats and steps vary by these standard deviations, in ms."""
    middles = 100 + between * RNG.standard_normal(repeats)
    return [[float(t) for t in middle + within * RNG.standard_normal(steps)] for middle in middles]


def measured(times: list[list[float]], at_end: bool = False, first: int = 0) -> Measurement:
    runs = [Run(i, 0, f"2025-01-01T00:{5 * i:02}:00+00:00", values) for i, values in enumerate(times, start=first)]
    runs[-1].at_end = at_end
    pooled = [t for values in times for t in values]
    return measurement(200.0, statistics.median(pooled), runs=runs, step_times_ms=pooled)


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage is counted over many samples, each of which needs no smooth interval."""
    monkeypatch.setattr(module, "RESAMPLES", 500)


# -- coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize(("repeats", "steps", "between", "within", "least", "most"), [
    (1, 15, 0.0, 2.0, 0.88, 0.99),  # one run
    (3, 5, 0.0, 2.0, 0.92, 1.0),  # the steps are all of the noise
    (3, 5, 1.0, 2.0, 0.88, 0.99),  # processes differ by half as much
    (10, 5, 4.0, 1.0, 0.88, 0.99),  # processes differ by more than steps: ten are enough ...
    (3, 5, 4.0, 1.0, 0.68, 0.9),  # ... and three are not, as the documentation says
])  # fmt: skip
def test_how_often_the_interval_holds_the_true_median(
    repeats: int, steps: int, between: float, within: float, least: float, most: float
) -> None:
    hits = 0
    for _ in range(200):
        interval = median_interval(samples(repeats, steps, between, within))
        assert interval is not None
        hits += interval[0] <= 100 <= interval[1]
    assert least <= hits / 200 <= most


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize(("true_ratio", "least", "most"), [(1.0, 0.94, 1.0), (1.02, 0.3, 0.9), (1.06, 0.0, 0.03)])
def test_how_often_a_difference_is_called_none(true_ratio: float, least: float, most: float) -> None:
    """Steps vary by 2 ms of 100, so that the ratio of two medians of 15 is known to about 1 %."""
    none = 0
    for _ in range(200):
        own = [[true_ratio * t for t in run] for run in samples(3, 5, 0.3, 2.0)]
        none += difference(measured(own), measured(samples(3, 5, 0.3, 2.0))).none
    assert least <= none / 200 <= most


@pytest.mark.usefixtures("few_resamples")
def test_what_slows_a_whole_round_cancels() -> None:
    """Interleaved rounds that differ by 10 % between each other, alike for both: the ratio is known far better."""
    found = []
    for _ in range(60):
        slow = 1 + 0.1 * RNG.random(6)
        base = [[t * s for t in run] for s, run in zip(slow, samples(6, 5, 0.0, 0.5))]
        own = [[1.03 * t * s for t in run] for s, run in zip(slow, samples(6, 5, 0.0, 0.5))]
        paired, apart = difference(measured(own), measured(base)), difference(measured(own, first=10), measured(base))
        found.append((paired.high - paired.low, apart.high - apart.low, paired.none, apart.none))
    widths = [statistics.mean(w) for w in list(zip(*found))[:2]]
    assert widths[0] < 0.75 * widths[1]
    assert sum(f[2] for f in found) < sum(f[3] for f in found)


# -- intervals -------------------------------------------------------------------------------------------------------


def test_too_few_values_have_no_interval() -> None:
    assert median_interval([]) is None
    assert median_interval([[1.0] * (MIN_VALUES - 1)]) is None
    assert median_interval([[1.0, 2.0], [], [3.0, 4.0]]) is None
    assert median_interval([[1.0, 2.0], [3.0, 4.0, 5.0]]) is not None


def test_an_interval_is_the_same_each_time_and_in_each_process() -> None:
    runs = [[10.0, 11.0, 12.0, 10.5, 11.5], [12.0, 13.0, 12.5, 13.5, 14.0], [11.0, 11.1, 11.2, 11.3, 11.4]]
    interval = median_interval(runs)
    module._median_interval.cache_clear()
    assert median_interval(runs) == interval
    code = f"from sweep.decide.statistics import median_interval; print(median_interval({runs}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(interval)


def test_equal_values_have_an_interval_without_width() -> None:
    assert median_interval([[7.0] * 5] * 3) == (7.0, 7.0)
    assert difference(measured([[7.0] * 5] * 3), measured([[7.0] * 5] * 3)).none
    faster = difference(measured([[6.0] * 5] * 3), measured([[8.0] * 5] * 3))
    assert (faster.ratio, faster.low, faster.high, faster.none) == (0.75, 0.75, 0.75, False)


def test_repeats_that_differ_widen_the_interval_which_steps_of_one_run_do_not_see() -> None:
    steps = [99.0, 99.5, 100.0, 100.5, 101.0]
    alike, apart = [steps] * 3, [[t - 10 for t in steps], steps, [t + 10 for t in steps]]
    narrow, wide = median_interval(alike), median_interval(apart)
    pooled = median_interval([[t for run in apart for t in run]])
    assert narrow is not None
    assert wide is not None
    assert pooled is not None
    assert narrow[1] - narrow[0] < 2
    assert wide[0] < 91
    assert wide[1] > 109
    assert wide[1] - wide[0] >= pooled[1] - pooled[0]


def test_repeats_of_unequal_length_are_resampled_by_their_own_steps() -> None:
    interval = median_interval([[10.0] * 4, [10.0] * 40, [10.0, 10.0, 10.0]])
    assert interval == (10.0, 10.0)
    interval = median_interval([[10.0, 10.2, 9.8], [10.0, 10.1, 9.9, 10.05, 9.95, 10.0]])
    assert interval is not None
    assert 9 < interval[0] < 10 < interval[1] < 11


def test_hundreds_of_comparisons_take_no_time() -> None:
    own, base = measured(samples(3, 5, 1, 1)), measured(samples(4, 5, 1, 1), at_end=True)
    began = time.perf_counter()
    difference(own, base, drift_of(base))
    assert time.perf_counter() - began < 0.5
    began = time.perf_counter()
    for _ in range(500):
        difference(own, base, drift_of(base))
    assert time.perf_counter() - began < 1.0


def test_thousands_of_steps_are_resampled_in_bounded_memory() -> None:
    began = time.perf_counter()
    interval = median_interval([[float(t) for t in 100 + RNG.standard_normal(3000)]])
    assert interval is not None
    assert interval[1] - interval[0] < 0.3
    assert time.perf_counter() - began < 5


# -- differences without runs ----------------------------------------------------------------------------------------


def test_an_older_result_without_runs_uses_its_step_times() -> None:
    times = [100.0 + 0.1 * i for i in range(15)]
    base = measurement(300.0, 100.7, step_times_ms=times)
    own = measurement(200.0, 120.7, step_times_ms=[t + 20 for t in times])
    found = difference(own, base)
    assert found.low > 1.19
    assert found.high < 1.21
    assert not found.none


def test_without_step_times_the_quartiles_decide_as_they_stand() -> None:
    base = measurement(300.0, 100.0)
    assert difference(measurement(200.0, 103.0), base).none  # 101 to 105 against 98 to 102
    found = difference(measurement(200.0, 110.0), base)
    assert not found.none
    assert (found.low, found.high) == pytest.approx((110 * 0.98 / 102, 110 * 1.02 / 98))


def test_two_steps_are_judged_by_their_quartiles() -> None:
    own, base = measured([[110.0, 112.0]]), measured([[100.0, 102.0]])
    found = difference(own, base)
    assert found.low == pytest.approx(own.step_ms_low / base.step_ms_high)


def test_a_time_that_is_not_known_is_no_difference() -> None:
    found = difference(
        measurement(200.0, 110.0),
        dataclasses.replace(measurement(300.0, 1.0), step_ms=0.0, step_ms_low=0.0, step_ms_high=0.0),
    )
    assert math.isnan(found.ratio)
    assert found.none


def test_a_repeat_that_went_wrong_does_not_count() -> None:
    m = measured([[10.0] * 5, [11.0] * 5, [500.0] * 5])
    m.runs[2].error = "TimedOut: too long"
    assert [r.index for r in good_runs(m)] == [0, 1]
    m.step_ms = 10.5
    found = difference(m, measured([[10.0] * 5, [11.0] * 5]))
    assert found.high < 2


# -- drift -----------------------------------------------------------------------------------------------------------


def drifting(*middles: float, at_end: bool = True, steps: int = 5) -> Measurement:
    return measured([[m + 0.1 * i for i in range(steps)] for m in middles], at_end=at_end)


def test_drift_is_the_last_of_the_baselines_repeats_over_its_first() -> None:
    drift = drift_of(drifting(100, 103, 104, 107))
    assert drift is not None
    assert (drift.first_ms, drift.last_ms, drift.minutes) == (100.2, 107.2, 15)
    assert drift.difference.ratio == pytest.approx(107.2 / 100.2)
    assert drift.difference.low <= drift.difference.ratio <= drift.difference.high
    assert not drift.difference.none
    assert "7 % slower than at the start, over 15.0 minutes" in drift_found(drift)
    assert "10 % faster" in drift_found(drift_of(drifting(100, 103, 104, 90)))


def test_no_drift_is_told_where_none_was_looked_for_or_found() -> None:
    assert drift_of(drifting(100, 107, at_end=False)) is None
    assert drift_of(drifting(100)) is None
    assert drift_of(drifting(100, 107, steps=MIN_VALUES - 1)) is None
    assert drift_of(measurement(300.0, 100.0)) is None
    steady = drift_of(drifting(100, 101, 100.05))
    assert steady is not None
    assert steady.difference.none
    assert drift_found(steady) == drift_found(None) == ""


def test_a_last_repeat_that_went_wrong_gives_no_drift() -> None:
    m = drifting(100, 101, 107)
    m.runs[-1].error = "crashed"
    assert drift_of(m) is None


def test_a_difference_smaller_than_the_drift_is_none_whichever_way_it_goes() -> None:
    base, drift = drifting(100, 100, 100), Drift(100, 107, Difference(1.07, 1.06, 1.08, False), 10)
    for middle, none in ((104, True), (97, True), (109, False), (91, False)):
        own = drifting(middle, middle, middle)
        assert difference(own, base, drift).none is none
        assert not difference(own, base).none
    steady = dataclasses.replace(drift, difference=Difference(1.07, 0.98, 1.15, True))  # it is noise itself
    assert not difference(drifting(104, 104, 104), base, steady).none


def test_start_times_that_cannot_be_read_leave_the_minutes_out() -> None:
    m = drifting(100, 107)
    m.runs[0].started_at = ""
    drift = drift_of(m)
    assert drift is not None
    assert drift.minutes == 0
    assert "meanwhile" in drift_found(drift)


# -- disturbances ----------------------------------------------------------------------------------------------------


def test_what_disturbed_is_told_with_its_repeat_and_its_numbers() -> None:
    m = drifting(100, 101, 102)
    assert disturbances(m) == []
    m.runs[1].conditions = Conditions(gpu_other_processes=2, gpu_other_mib=900.0, disturbed=["gpu_processes"])
    assert [disturbed(f) for f in disturbances(m)] == ["repeat 2: 2 other processes on the GPU (900.0 MiB)"]
    one = drifting(100)
    older = "what an earlier version said"
    one.runs[0].conditions = Conditions(cpu_others=1.6, cpu_cores=2, disturbed=["cpu_others", older])
    told = [disturbed(f) for f in disturbances(one)]
    assert told == ["other processes used 1.6 of 2 cores", older]


def test_a_low_clock_is_judged_against_the_highest_of_both_trials() -> None:
    own, base = drifting(100, 101), drifting(90, 91)
    for m, clocks in ((own, (1500.0, 1700.0)), (base, (1800.0, 1790.0))):
        for run, clock in zip(m.runs, clocks):
            run.conditions = Conditions(gpu_clock_mhz=clock)
    words = "repeat 1: the GPU's clock was down to 1500 MHz, from 1800"
    assert [disturbed(f) for f in disturbances(own, base)] == [words]
    assert [f.numbers["highest_mhz"] for f in disturbances(own)] == [1700.0]
    assert disturbances(base, own) == []


def test_same_time_is_what_the_difference_says() -> None:
    for shift, between in itertools.product((0.0, 0.5, 2.0, 8.0), (0.0, 2.0)):
        own, base = (measured([[t + s for t in run] for run in samples(3, 5, between, 1.0)]) for s in (shift, 0.0))
        for drift in (None, Drift(100, 104, Difference(1.04, 1.03, 1.05, False), 10)):
            assert same_time(own, base, drift) == difference(own, base, drift).none
