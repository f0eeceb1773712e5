"""Whether a strategy costs quality: losses of a candidate against the baseline's, over the seeds that both ran.

Held-out losses are compared in pairs of equal seed, since a seed fixes the initial weights and the batches, so the two
differ by the strategy alone (micro-batches also draw other dropout masks). What the interval means: were all of this
repeated with other seeds many times, the mean difference over all seeds would lie inside of 95 % of such intervals
(Student's t over the paired differences; it takes them to be about normal, which a handful of seeds cannot show).
What it does not mean:

- "equal" is not "the same": differences up to the ends of the interval are not ruled out, and few seeds make it wide.
- It speaks of this many steps, of these held-out batches and of this data, not of a training run to its end.
- Each candidate has its own interval, not widened for their number: of 20 strategies that change nothing, about one is
  expected to be called better or worse. A verdict that matters is worth a repeat with other seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from sweep.findings import CONFIDENCE, Quality
from sweep.results import Measurement
from sweep.words import count, known, percent, signed_loss

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
    verdict, why = _verdict(differences, abs(mean))
    return Quality(
        verdict=verdict,
        seeds=len(seeds),
        loss=mean,
        loss_low=low,
        loss_high=high,
        difference=difference,
        difference_low=difference_low,
        difference_high=difference_high,
        curve_outside_ratio=outside_ratio(own, base),
        why=why,
    )


def _verdict(differences: Sequence[float], size: float) -> tuple[str, str]:
    """equal, better, worse or unknown, and why in words. size: of the loss, to tell rounding from a difference."""
    mean, low, high = mean_interval(differences)
    seeds = count(len(differences), "seed")
    if not any(differences):
        return "equal", f"held-out loss equal to the last bit ({seeds})"
    if low is None or high is None:
        words = f"{signed_loss(mean)} with one seed, which cannot tell it from chance; measure.seeds=3 would"
        return "unknown", words
    over = f"{signed_loss(mean)} ({percent(CONFIDENCE)} interval {signed_loss(low)} to {signed_loss(high)}, {seeds})"
    if max(abs(low), abs(high)) <= ROUNDING * size:
        return "equal", f"{over}, no more than rounding"
    if low <= 0 <= high:
        return "equal", f"{over}, within the noise; up to {signed_loss(high)} is not ruled out"
    return ("worse" if mean > 0 else "better"), over


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
