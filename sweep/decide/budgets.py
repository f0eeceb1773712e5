"""Would the choice survive another budget? From stored results alone; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from sweep.config.schema import BudgetConf
from sweep.decide.reasons import lasting_mib, peak_of
from sweep.decide.verdict import (
    Facts,
    baseline_index,
    choice_of,
    conclude,
    decide,
    judge,
    memory_cap,
    preferred_of,
    verdict_of,
)
from sweep.format import known
from sweep.results import Comparison, Outcome, TrialResult, Verdict


@dataclass(frozen=True)
class Axis:
    """One setting of the budget that can be asked about. `rising`: a larger value admits more trials."""

    key: str  # field of BudgetConf
    label: str
    rising: bool

    @property
    def loosest(self) -> float:
        return math.inf if self.rising else 0.0

    def numbers(self, facts: Facts) -> list[float | None]:
        """What this setting is compared with when a trial is decided on, the number of the trial itself first."""
        own, peak = facts.own, peak_of(facts.result)
        lasting = None if peak is None else lasting_mib(peak)  # from there on no strategy can fit
        found: dict[str, list[float | None]] = {
            "memory_mib": [facts.peak_mib, facts.sure_from_mib, lasting],
            "min_throughput_ratio": [facts.throughput_ratio, facts.surest_ratio],
            "min_samples_per_s": [None if own is None else known(own.samples_per_s), facts.surest_samples_per_s],
            "max_eval_loss_ratio": [facts.eval_loss_ratio],
            "max_eval_loss": [facts.eval_loss],
        }
        return found[self.key]


MEMORY: Axis = Axis("memory_mib", "memory cap", rising=True)
THROUGHPUT_RATIO: Axis = Axis("min_throughput_ratio", "throughput floor", rising=False)
SAMPLES: Axis = Axis("min_samples_per_s", "throughput floor", rising=False)
LOSS_RATIO: Axis = Axis("max_eval_loss_ratio", "quality gate", rising=True)
LOSS: Axis = Axis("max_eval_loss", "quality gate", rising=True)
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


class Sensitivity:
    """One comparison under many budgets. Raises ValueError unless `results` are of one `fixed_id`.

    budget: the present one; what is not asked about stays as it is there. capacity_mib: the device's memory, which is
    the cap where the budget names none; None: not known. present: what is concluded under the present one.
    """

    def __init__(
        self,
        results: list[TrialResult],
        budget: BudgetConf,
        capacity_mib: float | None,
        present: Comparison | None = None,
    ) -> None:
        self.results, self.budget, self.capacity_mib = results, budget, capacity_mib
        self.present = present if present is not None else conclude(results, budget, capacity_mib)
        index = baseline_index(results)
        self.baseline = None if index is None else results[index]
        self.facts = [Facts.of(r, self.baseline) for r in results]
        self.never_run = list(_never_run(results, budget))
        self._spans: dict[str, list[Span]] = {}

    def answer(self, values: dict[str, float | None]) -> Answer:
        """What is concluded with `values` in the budget."""
        decisions, index = judge(self.facts, replace(self.budget, **values), self.capacity_mib)  # type: ignore[arg-type]
        return Answer(verdict_of(decisions), None if index is None else self.results[index].name, index)

    def cap_mib(self, values: dict[str, float | None]) -> float | None:
        """The memory cap in MiB that applies with `values` in the budget."""
        return memory_cap(replace(self.budget, **values), self.capacity_mib)[0]  # type: ignore[arg-type]

    def not_known(self, cap_mib: float | None) -> list[NeverRun]:
        """The trials without a measurement that a cap of so much might admit; None: no cap."""
        return [n for n in self.never_run if cap_mib is None or cap_mib >= n.from_mib]

    def matters(self, axis: Axis) -> bool:
        """Whether there is anything that this setting could be compared with."""
        return any(axis.numbers(facts)[0] is not None for facts in self.facts)

    @property
    def axes(self) -> list[Axis]:
        """The settings that say something here: the memory cap, and floors and gates that can be held against."""
        found = [MEMORY]
        for relative, absolute in ((THROUGHPUT_RATIO, SAMPLES), (LOSS_RATIO, LOSS)):
            if getattr(self.budget, absolute.key) is not None:
                found.append(absolute)
            # The ratio is the usual question; without a baseline that ran there is none.
            if self.matters(relative):
                found.append(relative)
            elif self.matters(absolute) and absolute not in found:
                found.append(absolute)
        return found

    def spans(self, axis: Axis) -> list[Span]:
        """The whole range of one setting, low to high, cut where the answer changes; the others as they are."""
        if axis.key not in self._spans:
            changes = [
                (value, i, verdict)
                for i, facts in enumerate(self.facts)
                for value, verdict in self._verdicts(facts, axis, self.budget)
            ]
            found: list[Span] = []
            verdicts: dict[int, str] = {}
            for value, group in groupby(sorted(changes), key=lambda change: change[0]):
                verdicts |= {i: verdict for _, i, verdict in group}
                index = preferred_of(self.facts, [i for i in verdicts if verdicts[i] == Verdict.accept.value])
                verdict = next(v.value for v in Verdict if v.value in verdicts.values())
                answer = Answer(verdict, None if index is None else self.results[index].name, index)
                if not found or answer != found[-1].answer:
                    low = value if axis.rising or value == 0 else math.nextafter(value, 0.0)
                    if found:
                        found[-1] = replace(found[-1], high=low)
                    found.append(Span(low, math.inf, answer))
            self._spans[axis.key] = found
        return self._spans[axis.key]

    def _verdicts(self, facts: Facts, axis: Axis, budget: BudgetConf) -> list[tuple[float, str]]:
        """The verdict on one trial over the whole range of a setting: each, with the value from which on it holds.

        It can change at the trial's own numbers alone, so that these and the floats beside them are asked about.
        """
        own = [n for n in axis.numbers(facts) if n is not None]
        near = {v for n in own for v in (math.nextafter(n, 0.0), n, math.nextafter(n, math.inf))}
        found: list[tuple[float, str]] = []
        for value in [0.0, *sorted(v for v in near if 0 < v < math.inf)]:
            alone = replace(budget, **{axis.key: value})  # type: ignore[arg-type]
            verdict = decide(facts, alone, self.capacity_mib).verdict
            if not found or verdict != found[-1][1]:
                found.append((value, verdict))
        return found

    def areas(self, x: Axis, y: Axis) -> list[Area]:
        """The plane of two settings, cut into rectangles of one preferred trial; the others as they are."""
        xs, ys = self._strictest(x, y), self._strictest(y, x)
        admitted = [i for i in xs if i in ys]
        found: list[tuple[float, float, list[tuple[float, float, int | None]]]] = []
        rests_on: set[int] = set()
        before: set[int] = set()
        for low, high in pairwise(_edges(xs[i] for i in admitted)):
            trials = {i for i in admitted if (xs[i] <= low if x.rising else high <= xs[i])}
            # Where trials were only lost, and none that a choice rests on, or none changed, the column is as before.
            if not found or not trials <= before or rests_on & (before - trials):
                column, rests_on = self._column(trials, ys, y)
            before = trials
            if found and found[-1][2] == column:
                low = found.pop()[0]
            found.append((low, high, column))
        return [Area(x_low, x_high, *cell) for x_low, x_high, column in found for cell in column]

    def _strictest(self, axis: Axis, other: Axis) -> dict[int, float]:
        """By trial the strictest value that accepts it while `other` is as loose as can be; without those never so."""
        budget = replace(self.budget, **{other.key: other.loosest})  # type: ignore[arg-type]
        found = {}
        for i, facts in enumerate(self.facts):
            verdicts = self._verdicts(facts, axis, budget)
            at = next((k for k, (_, verdict) in enumerate(verdicts) if verdict == Verdict.accept.value), None)
            if at is not None and axis.rising:
                found[i] = verdicts[at][0]
            elif at is not None:  # accepted from zero on, up to right before what follows
                found[i] = math.nextafter(verdicts[at + 1][0], 0.0) if at + 1 < len(verdicts) else math.inf
        return found

    def _column(
        self, trials: set[int], strictest: dict[int, float], axis: Axis
    ) -> tuple[list[tuple[float, float, int | None]], set[int]]:
        """The choice among `trials` over the whole range of a setting: low, high and index; and what it rests on."""
        found: list[tuple[float, float, int | None]] = []
        left, rests_on, at = sorted(trials), set[int](), axis.loosest
        while left:  # from the loosest on trials only drop out; the choice stays until one that it rests on does
            present = choice_of(self.facts, left)
            rests_on |= set(present)
            ends = [strictest[i] for i in present]
            end = max(ends) if axis.rising else min(ends)
            left = [i for i in left if (strictest[i] < end if axis.rising else strictest[i] > end)]
            if found and found[-1][2] == present[0]:
                last = found.pop()
                at = last[1] if axis.rising else last[0]
            found.append((end, at, present[0]) if axis.rising else (at, end, present[0]))
            at = end
        if at != (0.0 if axis.rising else math.inf):
            found.append((0.0, at, None) if axis.rising else (at, math.inf, None))
        return found[::-1] if axis.rising else found, rests_on


def _edges(values: Iterable[float]) -> list[float]:
    return [0.0, *sorted({v for v in values if 0 < v < math.inf}), math.inf]


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
            yield NeverRun(i, r.name, start, too_large)
        elif r.outcome == Outcome.oom_device.value and r.capacity_mib is not None:
            start = max(math.nextafter(r.capacity_mib, math.inf), predicted or 0.0)
            yield NeverRun(i, r.name, start, True)
