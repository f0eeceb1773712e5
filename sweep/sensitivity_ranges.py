"""Where the preferred trial changes as memory cap, throughput floor and quality gate do, and where nothing is known.

Pure functions of stored results. Every answer is what `sweep.decide.conclude` says under the changed budget. Where it
changes is exact: a trial is accepted from a cap of its own peak on, up to a floor of its own throughput ratio, and so
on; these values are found trial by trial, and each change is confirmed by concluding on either side of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sweep.checks import Facts
from sweep.decide import conclude, decide, memory_cap, preferred_of
from sweep.next_step import lasting_mib, peak_of
from sweep.results import Comparison, Outcome, TrialResult, Verdict
from sweep.schema import BudgetConf
from sweep.words import known


@dataclass(frozen=True)
class Axis:
    """One setting of the budget that can be asked about. `rising`: a larger value admits more trials."""

    key: str  # field of BudgetConf
    label: str
    rising: bool

    @property
    def loosest(self) -> float:
        return math.inf if self.rising else 0.0

    @property
    def strictest(self) -> float:
        return 0.0 if self.rising else math.inf

    def admits(self, value: float, threshold: float | None) -> bool:
        """Whether `value` admits a trial whose own number is `threshold`; None: nothing does."""
        if threshold is None:
            return False
        return value >= threshold if self.rising else value <= threshold


MEMORY = Axis("memory_mib", "memory cap", rising=True)
THROUGHPUT_RATIO = Axis("min_throughput_ratio", "throughput floor", rising=False)
SAMPLES = Axis("min_samples_per_s", "throughput floor", rising=False)
LOSS_RATIO = Axis("max_eval_loss_ratio", "quality gate", rising=True)
LOSS = Axis("max_eval_loss", "quality gate", rising=True)
AXES = {axis.key: axis for axis in (MEMORY, THROUGHPUT_RATIO, SAMPLES, LOSS_RATIO, LOSS)}


@dataclass(frozen=True)
class Answer:
    """What is concluded under one budget."""

    verdict: str
    preferred: str | None
    preferred_index: int | None

    @classmethod
    def of(cls, comparison: Comparison) -> Answer:
        return cls(comparison.verdict, comparison.preferred, comparison.preferred_index)


@dataclass(frozen=True)
class Span:
    """Values of one setting with one answer. A rising axis: low <= value < high; a falling one: low < value <= high."""

    low: float  # 0: no lower end
    high: float  # infinite: no upper end
    answer: Answer

    def holds(self, value: float, axis: Axis) -> bool:
        return self.low <= value < self.high if axis.rising else self.low < value <= self.high or value <= 0 == self.low


@dataclass(frozen=True)
class Area:
    """Values of two settings with one preferred trial, in the axes' half-open sense (see Span)."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    preferred_index: int | None  # None: nothing is accepted


@dataclass(frozen=True)
class NeverRun:
    """A trial without a measurement that might have one under a larger cap."""

    index: int
    name: str
    from_mib: float  # at caps of at least so much it might run
    needs_other_device: bool  # it does not fit this device, whatever the cap
    why: str


class Sensitivity:
    """One comparison under many budgets. Raises ValueError unless `results` are of one `fixed_id`.

    budget: the present one; what is not asked about stays as it is there. capacity_mib: the device's memory, which is
    the cap where the budget names none; None: not known.
    """

    def __init__(self, results: list[TrialResult], budget: BudgetConf, capacity_mib: float | None) -> None:
        self.results, self.budget, self.capacity_mib = results, budget, capacity_mib
        self.present = conclude(results, budget, capacity_mib)
        index = self.present.baseline_index
        self.baseline = None if index is None else results[index]
        self.never_run = list(_never_run(results, budget))
        self._thresholds: dict[str, list[float | None]] = {}
        self._spans: dict[str, list[Span]] = {}
        self._concluded: dict[tuple[tuple[str, float | None], ...], Answer] = {}

    def with_values(self, values: dict[str, float | None]) -> BudgetConf:
        """The present budget with other values for some of its settings."""
        return replace(self.budget, **values)  # type: ignore[arg-type]

    def answer(self, values: dict[str, float | None]) -> Answer:
        """What is concluded with `values` in the budget; remembered."""
        key = tuple(sorted(values.items()))
        if key not in self._concluded:
            self._concluded[key] = Answer.of(conclude(self.results, self.with_values(values), self.capacity_mib))
        return self._concluded[key]

    def cap_mib(self, values: dict[str, float | None]) -> float | None:
        """The memory cap in MiB that applies with `values` in the budget."""
        return memory_cap(self.with_values(values), self.capacity_mib)[0]

    def not_known(self, cap_mib: float | None) -> list[NeverRun]:
        """The trials without a measurement that a cap of so much might admit; None: no cap."""
        return [n for n in self.never_run if cap_mib is None or cap_mib >= n.from_mib]

    def matters(self, axis: Axis) -> bool:
        """Whether there is anything that this setting could be compared with."""
        return any(threshold is not None for threshold in self._own_numbers(axis))

    def spans(self, axis: Axis) -> list[Span]:
        """The whole range of one setting, low to high, cut where the answer changes; the others as they are."""
        if axis.key not in self._spans:
            self._spans[axis.key] = self._cut(axis)
        return self._spans[axis.key]

    def areas(self, x: Axis, y: Axis) -> list[Area]:
        """The plane of two settings, cut into rectangles of one preferred trial; the others as they are."""
        fixed, xs = self._admitted_by_others(x.key, y.key), self.thresholds(x)
        columns: list[tuple[float, float, list[tuple[float, float, int | None]]]] = []
        for low, high in pairwise(_edges(xs[i] for i in fixed)):
            column = self._walk([i for i in fixed if x.admits(low if x.rising else high, xs[i])], y)
            if columns and columns[-1][2] == column:
                low = columns.pop()[0]
            columns.append((low, high, column))
        return [Area(x_low, x_high, *cell) for x_low, x_high, column in columns for cell in column]

    def _cut(self, axis: Axis) -> list[Span]:
        found = self._walk(self._admitted_by_others(axis.key), axis)
        return _merged([span for low, high, _ in found for span in self._confirmed(axis, low, high)])

    def _walk(self, trials: list[int], axis: Axis) -> list[tuple[float, float, int | None]]:
        """The whole range of one setting, low to high, cut where the choice among `trials` changes: low, high, choice.

        From the loosest value on, trials only drop out. That changes the choice where the choice itself drops out, or
        the fastest, from which the others cannot be told apart or can.
        """
        thresholds = self.thresholds(axis)
        pieces = list(pairwise(_edges(thresholds[i] for i in trials)))
        found: list[tuple[float, float, int | None]] = []
        left, choice, fastest = list(trials), None, None
        for low, high in reversed(pieces) if axis.rising else pieces:
            left = [i for i in left if axis.admits(low if axis.rising else high, thresholds[i])]
            if not found or choice not in left or fastest not in left:
                choice, fastest = preferred_of(self.results, left), self._fastest(left)
            if found and found[-1][2] == choice:
                before = found.pop()
                low, high = min(low, before[0]), max(high, before[1])
            found.append((low, high, choice))
        return found[::-1] if axis.rising else found

    def _fastest(self, trials: list[int]) -> int | None:
        timed = [(m.step_ms, i) for i in trials if (m := self.results[i].measurement) is not None]
        return min(timed)[1] if timed else trials[0] if trials else None

    def thresholds(self, axis: Axis) -> list[float | None]:
        """For each trial the strictest value that admits it, were this the only setting; None: no value does."""
        if axis.key not in self._thresholds:
            numbers = self._own_numbers(axis)
            self._thresholds[axis.key] = [self._threshold(axis, i, numbers[i]) for i in range(len(self.results))]
        return self._thresholds[axis.key]

    def _threshold(self, axis: Axis, index: int, own: float | None) -> float | None:
        if not self._accepts(index, axis.key, axis.loosest):
            return None
        if self._accepts(index, axis.key, axis.strictest):
            return axis.strictest
        if own is not None:
            beyond = math.nextafter(own, axis.strictest)
            if self._accepts(index, axis.key, own) and not self._accepts(index, axis.key, beyond):
                return own
        return _bisect(lambda value: self._accepts(index, axis.key, value), axis.loosest, axis.strictest)[0]

    def _accepts(self, index: int, key: str, value: float | None) -> bool:
        """Whether a trial is accepted with only this one setting in force, beside those that are not asked about."""
        alone: dict[str, Any] = {**dict.fromkeys(AXES), key: value}
        capacity = self.capacity_mib if key == MEMORY.key else None
        decision = decide(self.results[index], self.baseline, replace(self.budget, **alone), capacity)
        return decision.verdict == Verdict.accept.value

    def _admitted_by_others(self, *keys: str) -> list[int]:
        """The trials that every setting of the present budget admits but for those named by `keys`."""
        found = range(len(self.results))
        for key, axis in AXES.items():
            if key in keys:
                continue
            value = getattr(self.budget, key)
            if value is None:
                found = [i for i in found if self._accepts(i, key, None)]  # type: ignore[assignment]
            else:
                thresholds = self.thresholds(axis)
                found = [i for i in found if axis.admits(value, thresholds[i])]  # type: ignore[assignment]
        return list(found)

    def _confirmed(self, axis: Axis, low: float, high: float) -> list[Span]:
        """What is concluded at both ends of a span; cut again where they differ (tune becomes reject, say)."""
        first = low if axis.rising or low == 0 else math.nextafter(low, math.inf)
        last = high if not axis.rising else math.nextafter(high, 0.0)
        at_first, at_last = self.answer({axis.key: first}), self.answer({axis.key: last})
        if at_first == at_last or first >= last:
            return [Span(low, high, at_first)]
        same, other = self._narrow(lambda value: self.answer({axis.key: value}) == at_first, first, last, axis)
        edge = other if axis.rising else same
        return [Span(low, edge, at_first), *self._confirmed(axis, edge, high)]

    def _narrow(self, holds: Callable[[float], bool], inside: float, outside: float, axis: Axis) -> tuple[float, float]:
        """The two neighbouring floats of `_bisect`, by way of the values at which something can change."""
        values = set(self._own_numbers(axis))
        if axis is MEMORY:  # from here on no strategy can fit, which turns tune into reject
            values |= {lasting_mib(peak) for r in self.results if (peak := peak_of(r)) is not None}
        near = sorted(w for v in values if v for w in (math.nextafter(v, 0.0), v, math.nextafter(v, math.inf)))
        between = [v for v in near if inside < v < outside]
        while between:
            middle = between.pop(len(between) // 2)
            if holds(middle):
                inside, between = middle, [v for v in between if v > middle]
            else:
                outside, between = middle, [v for v in between if v < middle]
        return _bisect(holds, inside, outside)

    def _own_numbers(self, axis: Axis) -> list[float | None]:
        facts = [Facts.of(r, None if r.is_baseline else self.baseline) for r in self.results]
        if axis is MEMORY:
            return [f.peak_mib for f in facts]
        if axis is THROUGHPUT_RATIO:
            return [f.throughput_ratio for f in facts]
        if axis is SAMPLES:
            return [None if f.own is None else known(f.own.samples_per_s) for f in facts]
        if axis is LOSS_RATIO:
            return [f.eval_loss_ratio for f in facts]
        return [f.eval_loss for f in facts]


def _edges(thresholds: Iterable[float | None]) -> list[float]:
    """From zero to infinity by way of every threshold."""
    return [0.0, *sorted({t for t in thresholds if t is not None and 0 < t < math.inf}), math.inf]


def _merged(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for span in spans:
        if found and found[-1].answer == span.answer:
            span = Span(found.pop().low, span.high, span.answer)
        found.append(span)
    return found


def _bisect(holds: Callable[[float], bool], inside: float, outside: float) -> tuple[float, float]:
    """Two neighbouring floats between which `holds` ends; it holds at `inside` and not at `outside`. Neither is < 0."""
    while True:
        low, high = min(inside, outside), max(inside, outside)
        if high > 4 * max(low, 1e-9):  # the exponent first, then the digits
            middle = max(low, 1e-9) * min(2.0**64, math.sqrt(high / max(low, 1e-9)))
        else:
            middle = low + (high - low) / 2
        if not low < middle < high:
            return inside, outside
        if holds(middle):
            inside = middle
        else:
            outside = middle


def _never_run(results: list[TrialResult], budget: BudgetConf) -> Iterable[NeverRun]:
    """Trials that were refused by their prediction, or that ran out of this device's memory."""
    for i, r in enumerate(results):
        p = r.prediction
        predicted = None if p is None else known(p.allocated_mib)
        if r.mode != "measure":
            continue  # it has its prediction, which is all that this mode gives
        if r.outcome == Outcome.over_budget.value:
            # A search corrects predictions by what it has measured, so a refusal may lie above the predicted peak. Up
            # to the cap that refused it, it would be refused again.
            old = known((r.config.get("budget") or {}).get("memory_mib", budget.memory_mib))
            short = p is not None and p.headroom_mib is not None and p.headroom_mib < 0
            too_large = short or old is None  # without a cap only the device can have been too small
            start = 0.0 if predicted is None else predicted
            if too_large and r.capacity_mib is not None:
                start = max(start, math.nextafter(r.capacity_mib, math.inf))
            elif old is not None:
                start = max(start, math.nextafter(old, math.inf))
            yield NeverRun(i, r.name, start, too_large, "was predicted not to fit and was not run")
        elif r.outcome == Outcome.oom_device.value and r.capacity_mib is not None:
            start = max(math.nextafter(r.capacity_mib, math.inf), predicted or 0.0)
            yield NeverRun(i, r.name, start, True, f"ran out of the {r.capacity_mib:g} MiB of this device")
