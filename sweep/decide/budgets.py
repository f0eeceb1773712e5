"""Would the choice survive another budget? In words, from stored results alone; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sweep.config.schema import BudgetConf
from sweep.decide.reasons import lasting_mib, peak_of
from sweep.decide.verdict import Facts, conclude, decide, memory_cap, preferred_of
from sweep.format import EVIDENCE_SHORT, count, known, mib, ratio
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

    @property
    def strictest(self) -> float:
        return 0.0 if self.rising else math.inf

    def admits(self, value: float, threshold: float | None) -> bool:
        """Whether `value` admits a trial whose own number is `threshold`; None: nothing does."""
        if threshold is None:
            return False
        return value >= threshold if self.rising else value <= threshold


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


_UNITS = {
    MEMORY.key: " MiB",
    THROUGHPUT_RATIO.key: "x",
    SAMPLES.key: " samples/s",
    LOSS_RATIO.key: "x",
    LOSS.key: "",
}


def survival_words(results: list[TrialResult], budget: BudgetConf, capacity_mib: float | None) -> list[str]:
    """How far the budget can move before the choice changes: a sentence for each setting, and what is not known.

    results: the trials of one comparison (one `fixed_id`, else ValueError), at least one. capacity_mib: of the device;
    the cap where the budget names none.
    """
    return survival_of(Sensitivity(results, budget, capacity_mib))


def survival_of(asked: Sensitivity) -> list[str]:
    """The same of what was asked about already."""
    return [words_of(asked, axis, asked.spans(axis)) for axis in axes_of(asked)] + caveats(asked)


def axes_of(asked: Sensitivity) -> list[Axis]:
    """The settings that say something here: the memory cap, and floors and gates that something can be held against."""
    found = [MEMORY]
    for relative, absolute in ((THROUGHPUT_RATIO, SAMPLES), (LOSS_RATIO, LOSS)):
        if getattr(asked.budget, absolute.key) is not None:
            found.append(absolute)
        # The ratio is the usual question; without a baseline that ran there is none.
        if asked.matters(relative):
            found.append(relative)
        elif asked.matters(absolute) and absolute not in found:
            found.append(absolute)
    return found


def words_of(asked: Sensitivity, axis: Axis, spans: list[Span]) -> str:
    """`Memory cap (now 70.0 MiB): checkpoint stays the choice from 62.3 up to 87.3 MiB; below 62.3 MiB offload; ...`"""
    value = getattr(asked.budget, axis.key)
    now = asked.cap_mib({}) if axis is MEMORY else value
    unset = now is None
    at = axis.loosest if now is None else now
    here = next(i for i, span in enumerate(spans) if span.holds(at, axis) or (unset and span_is_loosest(span, axis)))
    loosest = spans[-1 if axis.rising else 0]
    present = Answer.of(asked.present)
    head = f"{axis.label.capitalize()} ({now_words(asked, axis)}): "
    if unset and loosest.answer.preferred_index != present.preferred_index:
        # Some trial has no number that a cap or a gate could be held against.
        name = choice(present)
        return f"{head}{name} while there is none; with any, {chain_words(axis, spans, from_loosest=True)}"
    span = spans[here]
    if all(s.answer.preferred is None for s in spans):
        return f"{head}{choice(present)}, whatever it is"
    looser, stricter = (here + 1, here - 1) if axis.rising else (here - 1, here + 1)
    parts = [_stays(axis, span)]
    if 0 <= looser < len(spans):
        parts.append(_looser(axis, span, spans[looser].answer))
    if 0 <= stricter < len(spans):
        parts.append(_stricter(axis, span, spans[stricter].answer))
        last = spans[0 if axis.rising else -1]
        beyond = _last_accepting(axis, spans)
        if last.answer.preferred is None and spans[stricter].answer.preferred is not None and beyond is not None:
            edge = beyond.low if axis.rising else beyond.high
            parts.append(f"{'below' if axis.rising else 'above'} {shown(axis, edge)} nothing is accepted")
    return head + "; ".join(parts)


def span_is_loosest(span: Span, axis: Axis) -> bool:
    return span.high == math.inf if axis.rising else span.low == 0.0


def now_words(asked: Sensitivity, axis: Axis) -> str:
    """`now 70.0 MiB`, or that there is none."""
    value = getattr(asked.budget, axis.key)
    if value is not None:
        return f"now {plain_value(axis, value)}{_UNITS[axis.key]}"
    if axis is MEMORY and asked.capacity_mib is not None:
        return f"now the device's {mib(asked.capacity_mib)}"
    return "none is set"


def chain_words(axis: Axis, spans: list[Span], from_loosest: bool = False) -> str:
    """Every choice along one setting, strictest first unless told otherwise."""
    ordered = list(spans) if axis.rising else list(reversed(spans))
    parts = []
    for span in reversed(ordered) if from_loosest else ordered:
        parts.append(f"{choice(span.answer)} {range_words(axis, span)}")
    return "; ".join(parts)


def range_words(axis: Axis, span: Span) -> str:
    """`from 62.3 up to 87.3 MiB`. Ends that still hold are rounded so that the number shown does hold."""
    has_low, has_high = span.low > 0, span.high < math.inf
    if not has_low and not has_high:
        return "at any value"
    if axis.rising:
        if not has_high:
            return f"from {shown(axis, span.low)} on"
        top = shown(axis, span.high)
        return f"from {_bound(axis, span.low)} up to {top}" if has_low else f"below {top}"
    if not has_high:
        return f"above {shown(axis, span.low)}"
    above = f"above {_bound(axis, span.low)} and " if has_low else ""
    return f"{above}up to {shown(axis, span.high)}"


def choice(answer: Answer) -> str:
    return answer.preferred if answer.preferred is not None else f"nothing is accepted ({answer.verdict})"


def caveats(asked: Sensitivity) -> list[str]:
    """What the limits rest on, and what they cannot know."""
    lines = []
    here = [n for n in asked.never_run if not n.needs_other_device]
    elsewhere = [n for n in asked.never_run if n.needs_other_device]
    if here:
        least = min(n.from_mib for n in here)
        were = count(len(here), "candidate was", "candidates were")
        lines.append(
            f"Not known from a cap of {shown(MEMORY, least)} on: {were} predicted not to fit and never run, and one of "
            "them may be faster"
        )
    if elsewhere:
        least = min(n.from_mib for n in elsewhere)
        lines.append(
            f"Not known for a larger device: {count(len(elsewhere), 'candidate does', 'candidates do')} not fit this "
            f"one; from {shown(MEMORY, least)} on one of them may be faster"
        )
    too_large = sum(r.mode == "predict" and r.outcome == Outcome.over_budget.value for r in asked.results)
    if too_large:
        do = count(too_large, "trial does", "trials do")
        lines.append(f"{do} not fit this device, whatever the cap: predict for a larger one with device=...")
    if any(n.index == asked.present.baseline_index for n in asked.never_run):
        lines.append("The baseline has no measurement, so floors and gates relative to it do not apply")
    lines += _noise(asked)
    ran = sum(r.measurement is not None for r in asked.results)
    evidence = EVIDENCE_SHORT.get(asked.present.evidence, asked.present.evidence)
    if ran:
        lines.append(f"These limits are numbers of the {count(ran, 'trial')} that ran ({evidence})")
    else:
        lines.append("Peaks are predicted and nothing was run, so there is no throughput and no loss to hold against")
    return lines


def _noise(asked: Sensitivity) -> list[str]:
    """That the exact ratio of the choice is known to within an interval only."""
    index = asked.present.preferred_index
    decision = None if index is None else asked.present.decisions[index]
    if decision is None or decision.step is None or decision.throughput_ratio is None or decision.step.low <= 0:
        return []
    slow, fast = 1 / decision.step.high, 1 / decision.step.low
    return [
        f"The throughput of {asked.present.preferred} is {ratio(decision.throughput_ratio)} the baseline's by the "
        f"median, and between {ratio(slow)} and {ratio(fast)} for all that is sure: a floor between these may fall "
        "either way"
    ]


def shown(axis: Axis, value: float) -> str:
    return f"{_bound(axis, value)}{_UNITS[axis.key]}"


def plain_value(axis: Axis, value: float) -> str:
    """A value as it was set."""
    return f"{value:.1f}" if axis is MEMORY and 1 <= value < 1000 else f"{value:g}"


def _bound(axis: Axis, value: float) -> str:
    """An end of a span: rounded to the side that admits the trial it comes from."""
    digits = _digits(axis, value)
    scaled = value * 10**digits
    rounded = round(scaled, 6)  # 62.3 is not exactly 623 tenths
    text = f"{(math.ceil(rounded) if axis.rising else math.floor(rounded)) / 10**digits:.{digits}f}"
    while axis in (THROUGHPUT_RATIO, LOSS_RATIO) and text.endswith("0") and text[-3] != ".":
        text = text[:-1]  # 0.90, 1.00, but 0.902
    return text


def _digits(axis: Axis, value: float) -> int:
    if axis is MEMORY:
        return 0 if value >= 1000 else 1 if value >= 1 else 3
    if axis is SAMPLES:
        return 0 if value >= 1000 else 1 if value >= 10 else 3
    return 3 if axis is THROUGHPUT_RATIO else 4


def _stays(axis: Axis, span: Span) -> str:
    if span.answer.preferred is None:
        return choice(span.answer)
    how = f"down to {shown(axis, span.low)}" if _open_above(axis, span) else range_words(axis, span)
    of = {THROUGHPUT_RATIO.key: " the baseline's throughput", LOSS_RATIO.key: " the baseline's held-out loss"}
    return f"{span.answer.preferred} stays the choice {how}{of.get(axis.key, '') if how.endswith('x') else ''}"


def _open_above(axis: Axis, span: Span) -> bool:
    return axis.rising and span.high == math.inf and span.low > 0


def _looser(axis: Axis, span: Span, answer: Answer) -> str:
    edge = span.high if axis.rising else span.low
    return f"with {shown(axis, edge)} or {'more' if axis.rising else 'less'}, {choice(answer)}"


def _stricter(axis: Axis, span: Span, answer: Answer) -> str:
    edge = "that" if _says_edge(axis, span) else shown(axis, span.low if axis.rising else span.high)
    return f"{'below' if axis.rising else 'above'} {edge}, {choice(answer)}"


def _says_edge(axis: Axis, span: Span) -> bool:
    """Whether the words for the span itself end with the edge at which it becomes too strict."""
    if span.answer.preferred is None:
        return False
    return span.high == math.inf if axis.rising else True


def _last_accepting(axis: Axis, spans: list[Span]) -> Span | None:
    """The strictest span in which something is accepted."""
    ordered = spans if axis.rising else list(reversed(spans))
    return next((s for s in ordered if s.answer.preferred is not None), None)
