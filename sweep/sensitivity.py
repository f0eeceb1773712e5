"""Would the choice survive another budget? In words, from stored results alone; nothing is run."""

from __future__ import annotations

import math

from sweep.results import Outcome, TrialResult
from sweep.schema import BudgetConf
from sweep.sensitivity_ranges import (
    LOSS,
    LOSS_RATIO,
    MEMORY,
    SAMPLES,
    THROUGHPUT_RATIO,
    Answer,
    Axis,
    Sensitivity,
    Span,
)
from sweep.words import EVIDENCE_SHORT, count, mib, ratio

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
        return f"now {plain(axis, value)}{_UNITS[axis.key]}"
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


def plain(axis: Axis, value: float) -> str:
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
