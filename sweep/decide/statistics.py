"""How sure a time is: bootstrap intervals of medians and of their ratios, the machine's drift, and what disturbed it.

The bootstrap resamples in two stages, first the repeats and then the steps inside of each, since the steps of one
process are not independent of each other (A. C. Davison and D. V. Hinkley, Bootstrap Methods and their Application,
Cambridge 1997, section 3.8). Resampled repeats differ by (R - 1) / R of their true variance, so each repeat's distance
from the common median is stretched by sqrt(R / (R - 1)) first. What an interval covers, on made-up samples: about 95 %
where the steps are all of the noise; with three repeats that differ by more than their steps do, about 80 %, since no
method learns how processes differ from three of them; ten repeats are enough.

A ratio of two trials is resampled round by round: a round ran both, one soon after the other, so that whatever slowed
the machine for a while slowed both, and cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sweep.format import known
from sweep.results import CONFIDENCE, Difference, Drift, Finding, Measurement, Quality, Run

RESAMPLES = 2000
SEED = 20250101  # fixed, so that a report made again says the same
#: Even the span from the smallest to the largest of n values misses the median in 2 * 0.5**n of all cases: 6 % of five.
MIN_VALUES = 5
#: A GPU whose clock stood below this share of the highest seen in the comparison was held back.
CLOCK_RATIO = 0.9

Array = NDArray[np.float64]
#: Step times in ms by round, as a key that can be remembered.
_Times = tuple[tuple[int, tuple[float, ...]], ...]


def median_interval(runs: list[list[float]]) -> tuple[float, float] | None:
    """The interval (CONFIDENCE) of the median over all values of all repeats, in their unit; None: too few values."""
    times = tuple((i, tuple(values)) for i, values in enumerate(runs) if values)
    return _median_interval(times) if _enough(times) else None


def difference(own: Measurement, base: Measurement, drift: Drift | None = None) -> Difference:
    """Median step time of `own` over that of `base`, with its interval.

    `none`: the interval includes 1, or the difference is smaller than the machine's own drift over the comparison.
    Where the steps themselves are not known, the interval is that of the quartiles.
    """
    mine, its = _times_of(own), _times_of(base)
    ratio = own.step_ms / base.step_ms if base.step_ms > 0 else math.nan
    if _enough(mine) and _enough(its):
        low, high = _ratio_interval(mine, its)
        low, high = min(low, ratio), max(high, ratio)
    else:
        low = own.step_ms_low / base.step_ms_high if base.step_ms_high > 0 else math.nan
        high = own.step_ms_high / base.step_ms_low if base.step_ms_low > 0 else math.nan
    none = not (low > 1 or high < 1) or _smaller(ratio, drift)
    return Difference(ratio, low, high, none)


def same_time(own: Measurement, other: Measurement, drift: Drift | None = None) -> bool:
    """Whether two step times cannot be told apart: `difference(...).none`, without a bootstrap where none is needed."""
    mine, its = _times_of(own), _times_of(other)
    if _enough(mine) and _enough(its) and not _smaller(own.step_ms / other.step_ms, drift):
        a, b = (_Runs([values for _, values in times]).values for times in (mine, its))
        if np.nanmin(a) > np.nanmax(b) or np.nanmax(a) < np.nanmin(b):  # so would every resample be
            return False
    return difference(own, other, drift).none


def _smaller(ratio: float, drift: Drift | None) -> bool:
    """Whether a ratio is nearer to 1 than the drift that was found."""
    if drift is None or drift.difference.none or not (ratio > 0 and drift.difference.ratio > 0):
        return False
    return abs(math.log(ratio)) < abs(math.log(drift.difference.ratio))


def drift_of(baseline: Measurement) -> Drift | None:
    """The machine's own change over a comparison: the baseline's repeat at the end over its first.

    None where it was not repeated at the end, or where one of the two has too few steps to say anything.
    """
    good = good_runs(baseline)
    first, last = (good[0], good[-1]) if good else (None, None)
    if first is None or last is None or first is last or not last.at_end:
        return None
    if min(len(first.step_times_ms), len(last.step_times_ms)) < MIN_VALUES:
        return None
    first_ms, last_ms = float(np.median(first.step_times_ms)), float(np.median(last.step_times_ms))
    low, high = _ratio_interval(((0, tuple(last.step_times_ms)),), ((1, tuple(first.step_times_ms)),))
    ratio = last_ms / first_ms
    found = Difference(ratio, min(low, ratio), max(high, ratio), none=low <= 1 <= high)
    return Drift(first_ms, last_ms, found, _minutes(first.started_at, last.started_at))


def good_runs(measurement: Measurement) -> list[Run]:
    """The repeats that came to their end, in order of their rounds."""
    return sorted((r for r in measurement.runs if not r.error and r.step_times_ms), key=lambda r: r.index)


def disturbances(own: Measurement, base: Measurement | None = None) -> list[Finding]:
    """Why the times of `own` may not be its own, each with its repeat (from 1; 0: it ran once). Empty: quiet.

    A clock is judged against the highest that `own` or `base` ran at: what a card reaches depends on its cooling.
    """
    clocks = [
        run.conditions.gpu_clock_mhz
        for m in (own, base)
        if m is not None
        for run in m.runs
        if run.conditions is not None and run.conditions.gpu_clock_mhz is not None
    ]
    highest, found, runs = max(clocks, default=0.0), [], good_runs(own)
    for run in runs:
        if (seen := run.conditions) is None:
            continue
        repeat = {"repeat": run.index + 1.0} if len(runs) > 1 else {}
        values = {"cores": seen.cpu_others, "of_cores": seen.cpu_cores}
        values |= {"processes": seen.gpu_other_processes, "other_mib": seen.gpu_other_mib}
        numbers = repeat | {name: float(value) for name, value in values.items() if value is not None}
        throttled = {"throttled": ", ".join(seen.gpu_throttled)}
        found += [Finding(code, numbers, throttled) for code in seen.disturbed]
        if seen.gpu_clock_mhz is not None and seen.gpu_clock_mhz < CLOCK_RATIO * highest:
            found.append(Finding("gpu_clock", repeat | {"clock_mhz": seen.gpu_clock_mhz, "highest_mhz": highest}))
    return found


# ---- the bootstrap


def _times_of(m: Measurement) -> _Times:
    runs = tuple((run.index, tuple(run.step_times_ms)) for run in good_runs(m))
    return runs or ((0, tuple(m.step_times_ms)),)


def _enough(times: _Times) -> bool:
    return sum(len(values) for _, values in times) >= MIN_VALUES


@lru_cache(maxsize=4096)
def _median_interval(times: _Times) -> tuple[float, float]:
    rng = np.random.default_rng(SEED)
    data = _Runs([values for _, values in times])
    return _bounds(data.medians(data.picks(rng), rng))


@lru_cache(maxsize=4096)
def _ratio_interval(own: _Times, base: _Times) -> tuple[float, float]:
    """Of median over median. Rounds that both ran are drawn for both at once; the others are always in."""
    rng = np.random.default_rng(SEED)
    shared = sorted({index for index, _ in own} & {index for index, _ in base})
    if len(shared) < 2:
        mine, its = _Runs([v for _, v in own]), _Runs([v for _, v in base])
        return _bounds(mine.medians(mine.picks(rng), rng) / its.medians(its.picks(rng), rng))
    drawn = rng.integers(len(shared), size=(RESAMPLES, len(shared)))
    medians = []
    for times in (own, base):
        paired = [values for index, values in times if index in shared]
        rest = [values for index, values in times if index not in shared]
        kept = np.broadcast_to(np.arange(len(shared), len(shared) + len(rest)), (RESAMPLES, len(rest)))
        medians.append(_Runs([*paired, *rest]).medians(np.concatenate([drawn, kept], axis=1), rng))
    return _bounds(medians[0] / medians[1])


class _Runs:
    """Values by repeat, padded to a rectangle, the distances between repeats stretched (see the module's docstring)."""

    def __init__(self, runs: list[tuple[float, ...]]) -> None:
        self.lengths = np.array([len(r) for r in runs])
        self.values: Array = np.full((len(runs), int(self.lengths.max())), np.nan)
        common = float(np.median(np.concatenate([np.asarray(r) for r in runs])))
        stretch = math.sqrt(len(runs) / (len(runs) - 1)) - 1 if len(runs) > 1 else 0.0
        for row, run in zip(self.values, runs):
            middle = float(np.median(run))
            # By a factor, so that a time stays above zero.
            factor = (middle / common) ** stretch if middle > 0 and common > 0 else 1.0
            row[: len(run)] = np.asarray(run) * factor

    def picks(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Which repeats each resample consists of: (RESAMPLES, repeats)."""
        return rng.integers(len(self.lengths), size=(RESAMPLES, len(self.lengths)))

    def medians(self, picks: NDArray[np.int64], rng: np.random.Generator) -> Array:
        """The median of each resample (RESAMPLES,): the picked repeats, their steps drawn anew."""
        width = self.values.shape[1]
        whole = bool((self.lengths == width).all())
        at_once = max(1, 2_000_000 // (picks.shape[1] * width))  # values in memory
        found = []
        for start in range(0, len(picks), at_once):
            some = picks[start : start + at_once, :, None]
            lengths = self.lengths[some]
            drawn = self.values[some, (rng.random((*some.shape[:2], width)) * lengths).astype(np.int64)]
            if not whole:
                drawn[np.arange(width) >= lengths] = np.nan
            flat = drawn.reshape(len(drawn), -1)
            found.append(np.median(flat, axis=1) if whole else np.nanmedian(flat, axis=1))
        return np.concatenate(found)


def _bounds(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _minutes(first: str, last: str) -> float:
    """Between two times in ISO 8601; 0 where one of them cannot be read."""
    try:
        return (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds() / 60
    except (ValueError, TypeError):
        return 0.0


#: Losses are computed in single precision: a difference below this share of the loss is rounding.
ROUNDING = 1e-6


@dataclass
class Curves:
    """What a picture of a trial's losses needs. Lists over the steps run parallel; a loss is a mean over targets."""

    seeds: list[int] = field(default_factory=list)  # of `by_seed`; [0] where the seed is not known
    by_seed: list[list[float]] = field(default_factory=list)  # training loss per step, cut to the shortest
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)  # lowest over the seeds
    high: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)  # held-out loss by seed
    held_out_mean: float | None = None
    held_out_low: float | None = None  # interval of the mean over seeds; None: one seed
    held_out_high: float | None = None


def quality_of(candidate: Measurement, baseline: Measurement) -> Quality | None:
    """The candidate's held-out loss against the baseline's; None where no seed was evaluated in both."""
    own, base = curves(candidate), curves(baseline)
    seeds = [s for s in own.held_out if s in base.held_out]
    if not seeds:
        return None
    mean, low, high = mean_interval([own.held_out[s] for s in seeds])
    differences = [own.held_out[s] - base.held_out[s] for s in seeds]
    difference, difference_low, difference_high = mean_interval(differences)
    return Quality(
        verdict=_verdict(differences, abs(mean)),
        seeds=len(seeds),
        loss=mean,
        loss_low=low,
        loss_high=high,
        difference=difference,
        difference_low=difference_low,
        difference_high=difference_high,
        curve_outside_ratio=outside_ratio(own, base),
    )


def _verdict(differences: Sequence[float], size: float) -> str:
    """equal, better, worse or unknown. size: of the loss, to tell rounding from a difference."""
    mean, low, high = mean_interval(differences)
    if not any(differences):
        return "equal"
    if low is None or high is None:
        return "unknown"
    if max(abs(low), abs(high)) <= ROUNDING * size or low <= 0 <= high:
        return "equal"
    return "worse" if mean > 0 else "better"


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean and Student's t interval of the mean (CONFIDENCE); without an interval for a single value.

    mean ± t(n - 1) s / sqrt(n), s the standard deviation with n - 1: W. S. Gosset, "The probable error of a mean",
    Biometrika 6 (1908).
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None, None
    from scipy.stats import t  # only now: it takes a second to import

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def curves(measurement: Measurement) -> Curves:
    """Training losses over the steps and held-out losses, by seed. Without runs: those of the measurement, as one seed.

    Of several repeats with one seed the first counts: the others compute the same, or differ by the machine's own
    order of additions. Runs that did not come to their end do not count.
    """
    train: dict[int, list[float]] = {}
    held_out: dict[int, float] = {}
    for run in measurement.runs:
        if run.error:
            continue
        if run.train_loss:
            train.setdefault(run.seed, run.train_loss)
        if known(run.eval_loss) is not None and run.eval_loss is not None:
            held_out.setdefault(run.seed, run.eval_loss)
    only = next(iter(train), 0)
    if not train and measurement.train_loss:
        train[only] = measurement.train_loss
    if not held_out and known(measurement.eval_loss) is not None and measurement.eval_loss is not None:
        held_out[only] = measurement.eval_loss
    found = Curves(seeds=list(train), held_out=held_out)
    steps = min(map(len, train.values()), default=0)
    found.by_seed = [values[:steps] for values in train.values()]
    for at_step in zip(*found.by_seed):
        found.mean.append(math.fsum(at_step) / len(at_step))
        found.low.append(min(at_step))
        found.high.append(max(at_step))
    if held_out:
        found.held_out_mean, found.held_out_low, found.held_out_high = mean_interval(list(held_out.values()))
    return found


def outside_ratio(candidate: Curves, baseline: Curves) -> float | None:
    """Share of the steps whose mean training loss lies outside of the baseline's lowest to highest over the seeds.

    The mean is over the seeds that both ran. None: fewer than two seeds of the baseline, which span no band, or no
    seed in common. A band over few seeds is narrow: a strategy that changes nothing but the masks can leave it.
    """
    both = [s for s in candidate.seeds if s in baseline.seeds]
    if len(baseline.seeds) < 2 or not both:
        return None
    of_both = [candidate.by_seed[candidate.seeds.index(s)] for s in both]
    steps = min(len(baseline.mean), *map(len, of_both))
    outside = 0
    for i in range(steps):
        mean = math.fsum(values[i] for values in of_both) / len(of_both)
        slack = ROUNDING * abs(mean)
        outside += not baseline.low[i] - slack <= mean <= baseline.high[i] + slack
    return outside / steps if steps else None
