"""Quality over seeds: paired differences, their interval, and the band of the loss curves."""

from __future__ import annotations

import random

import pytest
from made_up import measurement
from scipy.stats import ttest_rel

from sweep.decide.statistics import curves, mean_interval, quality_of
from sweep.format import signed_loss
from sweep.report.phrases import quality_why
from sweep.results import Measurement, Run

BASE = [3.21, 3.25, 3.18, 3.22]


def over_seeds(
    held_out: list[float | None], train: list[list[float]] | None = None, first_seed: int = 7
) -> Measurement:
    runs = [
        Run(i, first_seed + i, "2025-01-01T00:00:00Z", train_loss=train[i] if train else [5.0, 4.0], eval_loss=value)
        for i, value in enumerate(held_out)
    ]
    return measurement(100.0, 50.0, runs=runs)


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    own = [3.25, 3.26, 3.24, 3.27]
    found = quality_of(over_seeds(list(own)), over_seeds(list(BASE)))
    assert found is not None
    peer = ttest_rel(own, BASE).confidence_interval(0.95)
    assert (found.difference_low, found.difference_high) == pytest.approx((peer.low, peer.high))
    assert found.difference == pytest.approx(0.04)
    assert (found.seeds, found.loss) == (4, pytest.approx(3.255))
    assert found.loss_low is not None and found.loss_high is not None
    assert found.loss_low < found.loss < found.loss_high


@pytest.mark.parametrize(
    ("own", "verdict", "why"),
    [
        (list(BASE), "equal", "equal to the last bit (4 seeds)"),
        ([b + 0.05 + 0.001 * i for i, b in enumerate(BASE)], "worse", "+0.05"),
        ([b - 0.05 + 0.001 * i for i, b in enumerate(BASE)], "better", "-0.04"),
        ([b + (0.01, -0.012, 0.004, -0.003)[i] for i, b in enumerate(BASE)], "equal", "is not ruled out"),
        # The same sign everywhere, and no more than what single precision rounds off.
        ([b + 1e-7 + 1e-9 * i for i, b in enumerate(BASE)], "equal", "within the noise"),
        (BASE[:1], "equal", "equal to the last bit (1 seed)"),
        ([BASE[0] + 0.3], "unknown", "measure.seeds=3"),
    ],
)
def test_every_verdict(own: list[float], verdict: str, why: str) -> None:
    found = quality_of(over_seeds(list(own)), over_seeds(list(BASE)))
    assert found is not None
    assert found.verdict == verdict
    assert why in quality_why(found)
    if len(own) == 1:
        assert found.difference_low is None and found.loss_low is None


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(3)
    called = 0
    for _ in range(400):
        noise = [draw.gauss(0, 0.01) for _ in range(3)]
        found = quality_of(over_seeds([b + n for b, n in zip(BASE, noise)]), over_seeds(list(BASE[:3])))
        assert found is not None
        called += found.verdict != "equal"
    assert 0.02 < called / 400 < 0.09


def test_seeds_are_paired_and_those_of_one_side_are_left_out() -> None:
    own, base = over_seeds([3.3, 3.4, 3.5], first_seed=8), over_seeds([1.0, 3.2, 3.3, 3.4], first_seed=7)
    found = quality_of(own, base)
    assert found is not None
    assert (found.seeds, found.difference) == (3, pytest.approx(0.1))
    assert quality_of(over_seeds([3.3], first_seed=1), over_seeds([3.2], first_seed=2)) is None


def test_repeats_of_one_seed_and_failed_runs_are_no_seeds_of_their_own() -> None:
    base = over_seeds([3.2, None, None])
    for run in base.runs:
        run.seed = 7
    found = quality_of(base, base)
    assert found is not None
    assert (found.seeds, found.verdict, found.curve_outside_ratio) == (1, "equal", None)
    broken = over_seeds(list(BASE))
    broken.runs[0].error = "OutOfMemoryError"
    assert list(curves(broken).held_out) == [8, 9, 10]


def test_results_without_runs_are_one_seed() -> None:
    own, base = measurement(1.0, 1.0, eval_loss=3.3), measurement(1.0, 1.0)
    found = quality_of(own, base)
    assert found is not None
    assert (found.verdict, found.seeds, found.difference) == ("unknown", 1, pytest.approx(0.09))
    assert curves(base).mean == base.train_loss
    assert quality_of(own, measurement(1.0, 1.0, eval_loss=None)) is None
    assert quality_of(measurement(1.0, 1.0, eval_loss=float("nan")), base) is None


def test_the_share_of_steps_outside_of_the_band() -> None:
    base = over_seeds([3.2, 3.3], [[5.0, 4.0, 3.0, 2.0], [5.2, 4.2, 3.2, 2.2]])
    inside = over_seeds([3.2, 3.3], [[5.0, 4.1, 3.1, 2.0], [5.2, 4.1, 3.1, 2.2]])
    half = over_seeds([3.2, 3.3], [[5.1, 4.1, 3.5, 1.0], [5.1, 4.1, 3.5, 1.0]])
    shares = [q.curve_outside_ratio for m in (base, inside, half) if (q := quality_of(m, base)) is not None]
    assert shares == [0.0, 0.0, 0.5]
    found = curves(base)
    assert (found.low, found.high) == ([5.0, 4.0, 3.0, 2.0], [5.2, 4.2, 3.2, 2.2])
    assert found.mean == pytest.approx([5.1, 4.1, 3.1, 2.1])


def test_curves_of_different_length_are_cut_to_the_shortest() -> None:
    found = curves(over_seeds([3.2, 3.3], [[5.0, 4.0, 3.0], [5.2, 4.2]]))
    assert [len(c) for c in found.by_seed] == [2, 2]
    assert curves(measurement(1.0, 1.0, train_loss=[], eval_loss=None)).held_out_mean is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (0.00412, "+0.0041"), (-0.3251, "-0.33"), (1.26, "+1.3"), (-3.14e-7, "-3.1e-7"), (None, "-")],
)
def test_a_difference_of_losses_has_two_digits_and_its_sign(value: float | None, expected: str) -> None:
    assert signed_loss(value) == expected


def test_one_value_has_no_interval() -> None:
    assert mean_interval([2.0]) == (2.0, None, None)
