"""Why peaks and step times differ from the baseline's: words first, then the parts with their numbers."""

from __future__ import annotations

import re
from pathlib import Path

from sweep.findings import RANGES, Change
from sweep.report_blocks import DETAIL, USEFUL, Answer, Block, Commands, Grid, Picture, Points, Text
from sweep.report_data import Section
from sweep.report_notes import shown_path
from sweep.report_rows import Row
from sweep.report_words import says, sentence
from sweep.words import EVIDENCE_SHORT, NOT_KNOWN, ms, number, percent

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
