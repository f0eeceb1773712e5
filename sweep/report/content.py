"""The questions of a reader who was not there, answered from the stored results of one comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweep.config.strategy_names import Knobs
from sweep.decide.verdict import UNDECIDED
from sweep.format import EVIDENCE_SHORT, NOT_KNOWN, OUTCOME_WORDS, count, error, loss, mib, ms, number, percent
from sweep.report.data import Row, Section, shown_path
from sweep.report.notes import (
    change_cell,
    evidence_line,
    largest_line,
    lasting_mib,
    memory_row,
    memory_shares,
    next_lines,
    noisy_words,
    prediction_summary,
    premise_lines,
    quality_cell,
    reasons_words,
    says,
    seeds_words,
    spread,
    time_words,
    verdict_line,
)
from sweep.report.phrases import change_words, operator_words, sentence
from sweep.results import RANGES, Category, Change, Drift, Evidence, Outcome

#: How soon a block is left out where there is little room: never, before the essential, first.
ALWAYS: int = 0
USEFUL: int = 1
DETAIL: int = 2


@dataclass
class Text:
    """A paragraph; `lead` is shown in bold before it."""

    text: str
    lead: str = ""
    rank: int = ALWAYS


@dataclass
class Points:
    """A list; each item with what is shown in bold before it, "" for nothing."""

    items: list[tuple[str, str]]
    rank: int = ALWAYS
    title: str = ""
    per_trial: bool = False  # may be shortened, most important first


@dataclass
class Grid:
    """A table. `trials` are the section's rows that its own are about, parallel to `rows`; empty for other tables."""

    header: list[str]
    rows: list[list[str]]
    left: frozenset[str] = frozenset()  # headers of the columns that hold words; the first always does
    trials: list[int] = field(default_factory=list)
    strong: int | None = None  # the trial whose row is emphasised
    rank: int = ALWAYS
    title: str = ""
    folded: bool = False  # shown on demand where that is possible


@dataclass
class Commands:
    """What to type or open: label and line."""

    lines: list[tuple[str, str]]
    rank: int = ALWAYS


@dataclass
class Picture:
    """Where a picture belongs; shown only where a file of this name was drawn, or where `path` is one."""

    name: str  # without its suffix
    caption: str
    path: Path | None = None  # of one that lies elsewhere
    rank: int = ALWAYS


Block = Text | Points | Grid | Commands | Picture


@dataclass
class Answer:
    """One question of a reader who was not there, and what is known of it."""

    question: str
    blocks: list[Block]


def cost(section: Section) -> Answer:
    blocks: list[Block]
    if section.predicts:
        blocks = [Text(_predicted_words(section)), _predicted_grid(section)]
        return Answer("What did it cost?", blocks)
    row = section.preferred or _cheapest(section)
    if row is None or row.step_ms is None:
        words = "Not known: no trial was timed (0 of " + count(len(section.rows), "trial") + ")."
        return Answer("What did it cost?", [Text(words)])
    blocks = [Points(_points(section, row), title=_title(section, row)), _measured_grid(section)]
    blocks += [
        Picture("pareto", "Peak memory against throughput"),
        Picture("loss", "Training loss against the baseline's, and held-out loss"),
    ]
    return Answer("What did it cost?", blocks)


def _cheapest(section: Section) -> Row | None:
    """Where nothing is preferred: the fastest that was timed."""
    timed = [r for r in section.rows if r.step_ms is not None and not r.is_baseline]
    return min(timed, key=lambda r: r.step_ms or 0.0, default=None)


def _title(section: Section, row: Row) -> str:
    kind = "the preferred trial" if row is section.preferred else "not accepted; the fastest that was timed"
    return f"{row.name} ({kind}, {EVIDENCE_SHORT.get(row.evidence, row.evidence)})"


def _points(section: Section, row: Row) -> list[tuple[str, str]]:
    points = [("Time:", time_words(section, row)), ("Quality:", quality_words(section, row))]
    moved = (row.to_host_mib or 0.0) + (row.from_host_mib or 0.0)
    points.append(("Host memory:", host_words(row)))
    words = (
        "0 MiB per step"
        if not moved
        else (
            f"{mib(row.to_host_mib)} to the host and {mib(row.from_host_mib)} back per step, "
            f"{mib(1000 * moved / row.step_ms)} per second"
            if row.step_ms
            else mib(moved)
        )
    )
    points.append(("Moved:", f"{words}."))
    return points


def quality_words(section: Section, row: Row) -> str:
    if row.eval_loss_mean is None and row.quality is None:
        return "held-out loss was not evaluated (measure.eval_batches=0)."
    if row.is_baseline or row.quality is None:
        return f"held-out loss {loss(row.eval_loss_mean)}."
    q = row.quality
    verdict = {"equal": "equal to the baseline's", "unknown": "not known"}.get(
        q.verdict, f"{q.verdict} than the baseline's"
    )
    return f"held-out loss {loss(q.loss)}, {verdict}: {q.why}."


def host_words(row: Row) -> str:
    if row.host_peak_mib is None:
        return "not known: the ledger saw no step."
    return f"{mib(row.host_peak_mib)} of copies at most (the ledger's)."


def _measured_grid(section: Section) -> Grid:
    has_quality = any(r.quality is not None and not r.is_baseline for r in section.rows)
    header = ["strategy", "step ms", "against the baseline", "samples/s", "held-out loss"]
    header += ["quality"] if has_quality else []
    header += ["host MiB", "moved MiB per step", "grad err", "evidence"]
    rows = []
    for r in section.rows:
        moved = None if r.to_host_mib is None or r.from_host_mib is None else r.to_host_mib + r.from_host_mib
        cells = [r.name, spread(r), change_cell(r), number(r.samples_per_s), loss(r.eval_loss_mean)]
        cells += [quality_cell(r)] if has_quality else []
        rows.append([*cells, number(r.host_peak_mib), number(moved), error(r.grad_rel_err), r.evidence])
    grid = Grid(
        header, rows, frozenset(["quality", "evidence"]), list(range(len(rows))), section.comparison.preferred_index
    )
    return grid


def _predicted_words(section: Section) -> str:
    row = section.preferred
    words = "Time, quality and host memory are not known: nothing was run. Theoretical, from what a step would do: "
    of = next((r for r in [row, *section.candidates] if r is not None and r.predicted is not None), None)
    if of is None or of.predicted is None:
        return "Nothing is known of it: 0 trials were run or predicted."
    p = of.predicted
    transfer = f" ({ms(p.transfer_round_trip_ms)} at the link's bandwidth)" if p.transfer_round_trip_ms else ""
    moved = mib(p.to_host_mib + p.from_host_mib)
    return (
        f"{words}{of.name} would recompute {percent(p.recompute_flops_ratio)} of a step's FLOPs "
        f"and move {moved} per step{transfer}."
    )


def _predicted_grid(section: Section) -> Grid:
    header = ["strategy", "recompute (theoretical)", "would move MiB", "transfer ms (theoretical)"]
    rows = []
    for r in section.rows:
        p = r.predicted
        cells = [NOT_KNOWN] * 3
        if p is not None:
            moved = number(p.to_host_mib + p.from_host_mib)
            cells = [percent(p.recompute_flops_ratio), moved, number(p.transfer_round_trip_ms)]
        rows.append([r.name, *cells])
    return Grid(header, rows, trials=list(range(len(rows))), strong=section.comparison.preferred_index)


def hold(section: Section) -> Answer:
    points = [("Evidence:", evidence_words(section))]
    if not section.predicts:
        points.append(("Noise:", noise_words(section)))
        points.append(("Drift:", drift_words(section.comparison.drift)))
        points.append(("Disturbed:", disturbed_words(section)))
        points.append(("Seeds:", seeds_words(section)))
        points.append(("Same computation:", equality_words(section)))
    points.append(("Predicted peaks:", prediction_summary(section)))
    blocks: list[Block] = [Points([(lead, says(section, words)) for lead, words in points])]
    if section.survival:
        items = [("", says(section, line)) for line in section.survival]
        blocks.append(Points(items, USEFUL, "Under other budgets"))
    blocks.append(Picture("budgets", "Which trial is preferred under which budget"))
    return Answer("Does it hold?", blocks)


def evidence_words(section: Section) -> str:
    words = evidence_line(section)
    measured = [r.measurement for r in section.results if r.measurement is not None]
    if not measured:
        return f"{words} 0 of {count(len(section.rows), 'trial')} ran."
    # The baseline has one repeat more, for the drift.
    m = min(measured, key=lambda m: len(m.runs) or m.repeats)
    runs = [run for run in m.runs if not run.error]
    repeats = len(runs) or m.repeats
    how = ""
    if runs:
        fresh = all(run.fresh_process for run in runs)
        turns = len({run.index for run in runs}) > 1
        how = (", each in a fresh process" if fresh else ", in one process") + (
            ", in turn over the trials" if turns else ""
        )
    failed = sum(bool(run.error) for other in measured for run in other.runs)
    lost = f" {count(failed, 'repeat')} did not come to an end and do not count." if failed else ""
    least = min(len(x.step_times_ms) or x.steps * x.repeats for x in measured)
    return (
        f"{words} {len(measured)} of {count(len(section.rows), 'trial')} ran; {count(repeats, 'repeat')} of "
        f"{count(m.steps, 'timed step')}{how}: at least {count(least, 'step time')} per trial.{lost}"
    )


def noise_words(section: Section) -> str:
    timed = [r for r in section.rows if r.step_ms is not None]
    if not timed:
        return "not known: 0 trials were timed"
    with_interval = [r for r in timed if r.step_ms_ci_low is not None and r.step_ms_ci_high is not None and r.step_ms]
    words = []
    if with_interval:
        widest = max(with_interval, key=lambda r: _half_width(r))
        words.append(
            f"95 % bootstrap intervals of the median step times, the widest ± {percent(_half_width(widest), 1)} "
            f"({widest.name})"
        )
    else:
        spread = max((r.step_half_spread_ms or 0.0) / r.step_ms for r in timed if r.step_ms)
        words.append(f"half the distance between the quartiles is at most {percent(spread, 1)} of the step time")
    same = [r.name for r in section.candidates if r.step is not None and r.step.none]
    if same:
        words.append(f"no difference in time beyond the noise: {', '.join(same)}")
    noisy = noisy_words(section)
    return "; ".join(words) + (f". {noisy}" if noisy else "")


def _half_width(row: Row) -> float:
    """Half of the interval as a share of the step time."""
    return ((row.step_ms_ci_high or 0.0) - (row.step_ms_ci_low or 0.0)) / 2 / row.step_ms if row.step_ms else 0.0


def drift_words(drift: Drift | None) -> str:
    """What the machine itself did between the first and the last repeat of the baseline."""
    if drift is None:
        return "not known: the baseline was not repeated at the end (0 repeats; measure.drift=true repeats it)"
    d = drift.difference
    change = f"{percent(d.ratio - 1, 1, sign=True)}"
    interval = f"95 % interval {percent(d.low - 1, 1, sign=True)} to {percent(d.high - 1, 1, sign=True)}"
    said = "none beyond the noise" if d.none else "beyond the noise, so differences of this size may be the machine's"
    return (
        f"the baseline took {ms(drift.first_ms)} per step at first and {ms(drift.last_ms)} in the end, "
        f"{number(drift.minutes)} minutes later: {change} ({interval}), {said}"
    )


def disturbed_words(section: Section) -> str:
    """Whose times may not be their own."""
    disturbed = [r for r in section.rows if r.disturbed]
    if disturbed:
        told = [
            f"{r.name} ({r.disturbed[0]}{f'; and {len(r.disturbed) - 1} more' if len(r.disturbed) > 1 else ''})"
            for r in disturbed
        ]
        return f"{len(disturbed)} of {count(len(section.rows), 'trial')}: {', '.join(told)}"
    observed = sum(run.conditions is not None for r in section.results if r.measurement for run in r.measurement.runs)
    if not observed:
        return "not known: the machine was not observed (0 readings)"
    of = count(len(section.rows), "trial")
    return f"0 of {of}, by {count(observed, 'reading')} of the machine while steps were timed"


def equality_words(section: Section) -> str:
    """Whether what was compared computes the same."""
    checked = [r for r in section.candidates if r.verified is not None]
    if not checked:
        return "0 trials were verified against the baseline"
    unknown = [r.name for r in checked if r.verified_status in UNDECIDED]
    bad = [r.name for r in checked if not r.verified and r.name not in unknown]
    worst = max((r.grad_rel_err for r in checked if r.grad_rel_err is not None and r.verified), default=None)
    allowed = max((r.tolerance for r in checked if r.tolerance is not None), default=None)
    of = f"{len(checked) - len(bad) - len(unknown)} of {count(len(checked), 'trial')}"
    words = (
        f"loss, gradients, buffers and updates of {of} equal the baseline's; "
        f"largest relative error of a gradient {error(worst)} (allowed {error(allowed)})"
    )
    how: dict[str, list[str]] = {}
    for row in checked:
        if row.verified_how:
            how.setdefault(row.verified_how, []).append(row.name)
    words += "".join(f"; compared: {said}: {', '.join(names)}" for said, names in how.items())
    words += f"; not known: {', '.join(unknown)}" if unknown else ""
    return words + (f"; not equal: {', '.join(bad)}" if bad else "")


#: Sentences that a reader takes in, and trials whose words are not read one by one any more.
MOST_LINES, MOST_TRIALS = 6, 12
#: Parts below this share of the largest value are added up as "smaller parts".
SMALL = 0.01


def why(section: Section) -> Answer:
    explained = [r for r in section.candidates if r.explanation is not None]
    if not explained and not section.why:
        words = "Not known: there are not two trials with a peak to compare (0 explanations)."
        return Answer("Why?", [Text(words)])
    blocks: list[Block] = []
    if section.why:
        lines = [("", says(section, line)) for line in section.why]
        blocks.append(Points(lines[:MOST_LINES], per_trial=True))
        if len(lines) > MOST_LINES:
            blocks.append(Points(lines[MOST_LINES:], DETAIL, "And", per_trial=True))
    told = next((r for r in explained if r is section.preferred), None)
    if told is not None:
        blocks.append(_told(told))
    blocks += [Picture("peak_change", "The change of the peak, taken apart"), *_changes(section, "peak")]
    blocks += [Picture("time_change", "The change of the step time, taken apart"), *_changes(section, "time")]
    others = [("", _told(r).text) for r in explained if r is not told]
    if others:
        left_out = len(others) - MOST_TRIALS
        more = [("", f"{left_out} more are in report.json.")] if left_out > 0 else []
        blocks.append(Points(others[:MOST_TRIALS] + more, DETAIL, "The other trials", per_trial=True))
    findings = finding_lines(section)
    if findings:
        items = [(f"{name}:", sentence(line, first=False)) for name, line in findings]
        blocks.append(Points(items, USEFUL, "What does not add up, or surprises"))
    return Answer("Why?", blocks + _traces(section))


def _told(row: Row) -> Text:
    """A trial's explanation, which begins with its name."""
    assert row.explanation is not None
    words = " ".join(row.explanation.words)
    return Text(words if words.startswith(row.name) else f"{row.name}: {words}")


def finding_lines(section: Section) -> list[tuple[str, str]]:
    """Names of trials and a finding, the preferred trial's first; what differs in its numbers alone is told once."""
    rows = sorted(section.candidates, key=lambda r: r is not section.preferred)
    disturbed = [words for row in section.rows for words in row.disturbed]  # told where it is asked what disturbed
    found: dict[str, tuple[str, list[str]]] = {}
    for row in rows:
        for line in row.explanation.findings if row.explanation is not None else []:
            if any(words in line for words in disturbed):
                continue
            alike = re.sub(r"\d[\d.]*", "#", line.replace(row.name, "*"))
            found.setdefault(alike, (line, []))[1].append(row.name)
    return [(names[0] + _alike(names[1:]), line) for line, names in found.values()]


def _alike(names: list[str]) -> str:
    return f" (and {', '.join(names)} alike)" if names else ""


def because(section: Section) -> list[str]:
    """Why, in a line or two: what changed at the preferred trial's peak and in its step, else what the trials share."""
    row = section.preferred
    told = row.explanation if row is not None else None
    if told is None or section.predicts:
        # What fills the baseline's peak is shown beside this already.
        shared = [line for line in section.why if not line.startswith("The peak of ")]
        return shared[: 4 if section.predicts else 2]
    lines = []
    if told.peak is not None:
        moved = told.moment_before != told.moment_after
        where = f"from {told.moment_before} to {told.moment_after}" if moved else f"in {told.moment_after} as before"
        lines.append(f"peak {signed(told.peak.total)} MiB, {where}: {_parts_words(told.peak)}")
    if told.time is not None and row is not None and not (row.step is not None and row.step.none):
        lines.append(f"step {signed(told.time.total)} ms: {_parts_words(told.time)}")
    return lines


def _parts_words(change: Change, most: int = 3) -> str:
    """`activations -183.9 MiB, temporaries +3.1 MiB`."""
    least = 0.02 * max([abs(change.total), *(abs(p.value) for p in change.parts)])
    shown = [f"{p.name} {signed(p.value)} {change.unit}" for p in change.parts[:most] if abs(p.value) > least]
    return ", ".join(shown) or "by nothing that is known"


def _changes(section: Section, which: str) -> list[Block]:
    """One table: a column per part, the residual and the total, a row per trial."""
    changes = [(i, r, change) for i, r in enumerate(section.rows) if (change := change_of(r, which)) is not None]
    if not changes:
        return []
    unit = changes[0][2].unit
    size: dict[str, float] = {}
    for _, _, change in changes:
        for part in change.parts:
            size[part.name] = max(size.get(part.name, 0.0), abs(part.value))
    biggest = max(size.values(), default=0.0)
    names = [n for n in sorted(size, key=lambda n: -size[n]) if size[n] > SMALL * biggest]
    small = ["smaller parts"] if len(names) < len(size) else []
    header = ["strategy", "before", *names, *small, "not explained", "after"]
    lines = []
    for _, row, change in changes:
        parts = {part.name: part.value for part in change.parts}
        cells = [signed(parts[n]) if n in parts else "0" for n in names]
        if small:
            cells.append(signed(sum(value for name, value in parts.items() if name not in names)))
        lines.append([row.name, number(change.before), *cells, signed(change.residual), number(change.after)])
    how = EVIDENCE_SHORT.get(changes[0][1].evidence, changes[0][1].evidence)
    what = "Peak" if which == "peak" else "Step time"
    title = f"{what} in {unit}: before + parts + what is not explained = after ({how})"
    return [Grid(header, lines, trials=[i for i, _, _ in changes], rank=DETAIL, title=title, folded=len(lines) > 12)]


def change_of(row: Row, which: str) -> Change | None:
    """The change of the peak or of the time of a row."""
    if row.explanation is None:
        return None
    return row.explanation.peak if which == "peak" else row.explanation.time


def signed(value: float) -> str:
    return number(value) if value <= 0 or number(value) in ("0", "0.00") else f"+{number(value)}"


#: What the files of a trace are.
_KINDS = {
    "trace.json.gz": "trace",
    "memory_timeline.png": "picture of the memory",
    "memory_timeline.json": "memory over a step",
    "memory_snapshot.pickle": "allocator's snapshot",
}


def _paths(row: Row, files: list[str]) -> list[Path]:
    return [Path(row.folder) / name for name in files]


def _traces(section: Section) -> list[Block]:
    """The traces that were taken: shares of a step, and the files."""
    traced = [r for r in section.rows if r.trace is not None]
    if not traced:
        return []
    names = [n for n in RANGES if any((r.trace and r.trace.ranges_ms.get(n)) for r in traced)]
    lines = []
    for row in traced:
        assert row.trace is not None
        total = sum(row.trace.ranges_ms.values())
        shares = [percent(row.trace.ranges_ms.get(n, 0.0) / total) if total else NOT_KNOWN for n in names]
        lines.append([row.name, ms(row.trace.step_ms), *shares, number(float(row.trace.operators))])
    header = ["traced", "step under the profiler", *names, "operators per step"]
    title = "Shares of a step under the profiler, which slows it down"
    grid = Grid(header, lines, rank=DETAIL, title=title)
    blocks: list[Block] = [grid]
    files = [(row.name, path) for row in traced if row.trace is not None for path in _paths(row, row.trace.files)]
    blocks += [
        Picture(path.stem, f"Memory of {name} over one optimizer step, by what it holds", path, DETAIL)
        for name, path in files
        if path.suffix == ".png"
    ]
    if files:
        told = [(f"{_KINDS.get(path.name, 'recorded')} of {name}", shown_path(path)) for name, path in files]
        blocks += [Text("Traces open at ui.perfetto.dev.", rank=DETAIL), Commands(told, DETAIL)]
    return blocks


#: From here on a table is long enough to be shown on demand.
MANY = 12


def lead(section: Section) -> list[Block]:
    """What a reader takes away who reads no further."""
    c = section.comparison
    return [
        Text(says(section, c.why), f"Verdict: {verdict_line(section)}."),
        Text(sentence(c.next_action, first=False), "Next:"),
        *(Text(note) for note in section.notes),
    ]


def answers(section: Section) -> list[Answer]:
    """In the order in which they are asked."""
    return [
        pressure(section),
        changed(section),
        saved(section),
        cost(section),
        why(section),
        hold(section),
        what_next(section),
    ]


def pressure(section: Section) -> Answer:
    """Memory at the baseline's peak against the cap, and what fills it."""
    blocks: list[Block] = [Text(_pressure_words(section))]
    row = memory_row(section)
    if row is None:
        return Answer("What was the pressure?", [*blocks, Text("What filled the memory is not known: no peak is.")])
    total = sum(row.at_peak_mib.values())
    activations, lasting = row.at_peak_mib.get(Category.activation.value, 0.0), lasting_mib(row)
    blocks.append(
        Text(
            f"Of it {mib(activations)} ({percent(activations / total)}) are activations, which is what the strategies "
            f"here lower; {mib(lasting)} ({percent(lasting / total)}) are parameters, gradients and optimizer state, "
            f"which none of them does. {_source(row)}"
        )
    )
    other = section.preferred if section.preferred is not row else None
    beside = {name: value for name, value, _ in memory_shares(other)} if other is not None else {}
    header = [f"at the peak of {row.name}", "MiB", "share"] + (["MiB at the preferred's peak"] if beside else [])
    rows = [
        [name, number(value), percent(share)] + ([number(beside.get(name, 0.0))] if beside else [])
        for name, value, share in memory_shares(row)
    ]
    blocks.append(Grid(header, rows, rank=USEFUL))
    largest = largest_line(row)
    if largest:
        blocks.append(Text(f"{largest}.", "Largest:", rank=USEFUL))
    return Answer("What was the pressure?", [*blocks, Picture("at_peak", "What is alive at the peak of each trial")])


def _pressure_words(section: Section) -> str:
    """The baseline's peak against the cap."""
    c, row = section.comparison, section.baseline
    cap = f"the cap of {mib(c.cap_mib)} ({c.cap_source})" if c.cap_mib is not None else ""
    if row is None:
        return f"There is no baseline here, so the pressure is not known{f'; allowed is {cap}' if cap else ''}."
    peak, how = row.peak_mib, EVIDENCE_SHORT.get(row.evidence, row.evidence)
    words = ""
    if row.outcome != Outcome.ok.value:
        words = f"The baseline {OUTCOME_WORDS.get(row.outcome, row.outcome)}. "
        if row.predicted is not None:
            peak, how = row.predicted.allocated_mib, EVIDENCE_SHORT[Evidence.predicted.value]
    if peak is None:
        return f"{words}Its peak is not known{f'; allowed is {cap}' if cap else ''}."
    where = _where(row)
    words += f"The baseline's peak is {mib(peak)} ({how}){f', in {where}' if where else ''}"
    if c.cap_mib is None:
        return f"{words}. No memory cap is set (budget.memory_mib) and the device's capacity is not known."
    over = peak - c.cap_mib
    against = f"{mib(over)} over" if over > 0 else f"{mib(-over)} below"
    return f"{words}: {percent(peak / c.cap_mib)} of {cap}, {against} it."


def _where(row: Row) -> str:
    if row.peak is not None and row.outcome == Outcome.ok.value:
        phase, operator, module = row.peak.phase, row.peak.operator, row.peak.module
    elif row.predicted is not None:
        phase, operator, module = row.predicted.peak_phase, row.predicted.peak_operator, ""
    else:
        return ""
    return phase + (f" at {operator_words(operator)}" if operator else "") + (f" of {module}" if module else "")


def _source(row: Row) -> str:
    if row.peak is None:
        return "These shares are predicted."
    return "The shares are the ledger's account." if row.evidence != Evidence.cpu.value else ""


def changed(section: Section) -> Answer:
    """What is equal for all trials, and what each changes."""
    rows = [[row.name, strategy_words(Knobs.of(result))] for row, result in zip(section.rows, section.results)]
    grid = Grid(["strategy", "what it does"], rows, frozenset(["what it does"]), list(range(len(rows))))
    grid.strong, grid.rank, grid.folded = section.comparison.preferred_index, USEFUL, len(rows) > MANY
    return Answer("What was changed?", [Text(f"Only the strategy. {fixed_words(section)}"), grid])


def fixed_words(section: Section) -> str:
    """What all trials of a comparison have in common."""
    first, c = section.results[0], section.comparison
    workload = first.config.get("workload") or {}
    optimizer = workload.get("optimizer") or {}
    parts = [c.workload]
    if first.parameters is not None:
        blocks = f" in {count(first.blocks, 'block')}" if first.blocks else ""
        parts[0] += f" with {parameters_words(first.parameters)} parameters{blocks}"
    if workload.get("global_batch_size") is not None:
        parts.append(f"{count(int(workload['global_batch_size']), 'sample')} per optimizer step")
    if workload.get("seq_len") is not None:
        parts.append(f"sequences of {workload['seq_len']}")
    if workload.get("dtype") is not None:
        parts.append(str(workload["dtype"]))
    if optimizer.get("name") or optimizer.get("lr") is not None:
        rate = f" with learning rate {optimizer['lr']:g}" if isinstance(optimizer.get("lr"), (int, float)) else ""
        parts.append(f"{optimizer.get('name') or 'optimizer'}{rate}")
    if workload.get("seed") is not None:
        parts.append(f"seed {workload['seed']}")
    if first.data_version:
        parts.append(f"data {first.data_version[:12]}")
    return f"Equal for all trials on {c.device}: {', '.join(parts)}."


def parameters_words(parameters: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)


def strategy_words(knobs: Knobs) -> str:
    """What a strategy does, with its numbers."""
    parts = []
    whole = knobs.global_batch_size
    if knobs.splits:
        of = f" of {whole}" if whole is not None else ""
        pieces = (
            f", {count(math.ceil(whole / knobs.micro_batch_size), 'piece')}" if whole and knobs.micro_batch_size else ""
        )
        parts.append(f"computes {knobs.micro_batch_size}{of} samples at once{pieces}")
    if knobs.checkpoints:
        which = {
            "blocks": "every block" if knobs.every_k == 1 else f"one block in {knobs.every_k}",
            "segments": f"segments of {count(knobs.segment_size, 'block')}",
            "selective": "every block but for matmul and attention results"
            if knobs.every_k == 1
            else f"one block in {knobs.every_k} but for matmul and attention results",
            "parts": "parts of each block",
        }.get(knobs.granularity, knobs.granularity)
        parts.append(f"recomputes {which} in backward")
    if knobs.offloads:
        what = {"all": "what is saved", "inputs": "the inputs of blocks", "blocks": "what chosen blocks save"}
        least = f" of {knobs.min_tensor_kib:g} KiB and more" if knobs.min_tensor_kib > 0 else ""
        but = f", but for the last {count(knobs.keep_last, 'block')}" if knobs.keep_last > 0 else ""
        pinned = "" if knobs.pin_memory else ", pageable"
        parts.append(f"moves {what.get(knobs.placement, knobs.placement)}{least} to host memory{pinned}{but}")
    if not parts:
        at_once = f": {count(whole, 'sample')} at once" if whole is not None else ""
        return f"nothing{at_once}, all activations kept on the device"
    return "; ".join(parts)


def saved(section: Section) -> Answer:
    """Peaks and savings of every trial."""
    blocks: list[Block] = [Text(_saved_words(section))]
    columns: Sequence[str] = ["strategy", "outcome", "peak MiB", "saved MiB", "saved", "peak in", "verdict"]
    rows = []
    for row in section.rows:
        share = percent(row.saved_ratio) if row.saved_ratio is not None else NOT_KNOWN
        cells = [row.name, row.outcome, number(row.peak_mib), number(row.saved_mib), share, _where(row) or NOT_KNOWN]
        rows.append([*cells, f"{row.verdict}{reasons_words(row)}"])
    grid = Grid(list(columns), rows, frozenset(["outcome", "peak in", "verdict"]), list(range(len(rows))))
    grid.strong = section.comparison.preferred_index
    if section.predicts:
        _with_column(grid, "peak MiB", "reserved MiB", [_of(r, "reserved_mib") for r in section.rows])
        _with_column(grid, "reserved MiB", "headroom MiB", [_of(r, "headroom_mib") for r in section.rows])
    elif any(r.reserved_mib is not None for r in section.rows):
        _with_column(grid, "peak MiB", "reserved MiB", [number(r.reserved_mib) for r in section.rows])
    premises = [Points([("", line) for line in lines])] if (lines := premise_lines(section)) else []
    return Answer("What did it save?", [*blocks, grid, *premises])


def _of(row: Row, name: str) -> str:
    return number(getattr(row.predicted, name)) if row.predicted is not None else NOT_KNOWN


def _with_column(grid: Grid, after: str, header: str, cells: list[str]) -> None:
    at = grid.header.index(after) + 1
    grid.header.insert(at, header)
    for row, cell in zip(grid.rows, cells):
        row.insert(at, cell)


def _saved_words(section: Section) -> str:
    """The saving of the preferred trial, or what could be saved where it is the baseline or there is none."""
    preferred = section.preferred
    how = lambda row: EVIDENCE_SHORT.get(row.evidence, row.evidence)
    if preferred is not None and not preferred.is_baseline and preferred.saved_mib is not None:
        what = "saves" if preferred.saved_mib > 0 else "saves nothing: it takes more, by"
        share = f" ({percent(abs(preferred.saved_ratio or 0.0))} of the baseline's peak)"
        return f"{preferred.name} {what} {mib(abs(preferred.saved_mib))}{share}, {how(preferred)}."
    saving = [r for r in section.candidates if r.saved_mib is not None and r.saved_mib > 0]
    if preferred is not None and preferred.is_baseline:
        words = "The preferred trial is the baseline, which saves nothing (0 MiB)."
    elif preferred is not None:
        words = f"{preferred.name} takes {mib(preferred.peak_mib)}; what that saves is not known: there is no baseline."
    else:
        words = "No trial is accepted, so nothing is saved yet (0 MiB)."
    if not saving:
        return words
    most = max(saving, key=lambda r: r.saved_mib or 0.0)
    return (
        f"{words} Most could be saved by {most.name}: {mib(most.saved_mib)} ({percent(most.saved_ratio)}), {how(most)}."
    )


def what_next(section: Section) -> Answer:
    """The next action, what stands against each trial that is not accepted, and what else would lower the peak."""
    blocks: list[Block] = [Text(says(section, section.comparison.next_action))]
    blocked = [(f"{row.name} {row.verdict}{reasons_words(row)}:", words) for row, words in next_lines(section)]
    if blocked:
        blocks.append(Points(blocked, USEFUL, "Not accepted", per_trial=True))
    return Answer("What next?", blocks + _what_if(section))


def _what_if(section: Section) -> list[Block]:
    """Changes that are no strategies: another workload, so that its own baseline has to be compared with."""
    found = [(row, what) for row in section.rows if row.predicted is not None for what in row.predicted.what_if]
    if not found:
        return []
    rows = [
        [row.name, what.override, number(what.allocated_mib), number(what.saved_mib), what.peak_phase]
        for row, what in found
    ]
    header = ["for", "with", "predicted peak MiB", "less by MiB", "peak then in"]
    title = "What else would lower the peak (another workload, to be compared with its own baseline)"
    words = [(w, change_words(w, r.predicted.peak_phase)) for r, w in found if r.predicted is not None]
    told = dict.fromkeys((f"{what.override}:", sentence(said, first=False)) for what, said in words if said)
    blocks: list[Block] = [Grid(header, rows, frozenset(["with", "peak then in"]), rank=USEFUL, title=title)]
    return [*blocks, Points(list(told), DETAIL)] if told else blocks
