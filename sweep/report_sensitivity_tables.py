"""What the terminal and the markdown show of other budgets: the same tables and sentences, as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from sweep.report_sensitivity import Cell, Pair, Range, Survey
from sweep.sensitivity import now_words, plain
from sweep.sensitivity_ranges import AXES, LOSS, LOSS_RATIO, MEMORY, SAMPLES, THROUGHPUT_RATIO, Axis
from sweep.words import EVIDENCE_WORDS, NOT_KNOWN, count, loss, mib, number, ratio

#: What stands behind a cell: candidates that were never run, and a cap that this device does not have.
NOT_RUN, BEYOND = "?", "^"

#: What a value of each setting is.
_UNITS = {
    MEMORY.key: "MiB",
    THROUGHPUT_RATIO.key: "ratio to the baseline's throughput",
    SAMPLES.key: "samples/s",
    LOSS_RATIO.key: "ratio to the baseline's held-out loss",
    LOSS.key: "held-out loss",
}
_SHORT = {
    MEMORY.key: "cap",
    THROUGHPUT_RATIO.key: "floor",
    SAMPLES.key: "floor",
    LOSS_RATIO.key: "gate",
    LOSS.key: "gate",
}


@dataclass
class Grid:
    """A table as text; `verdicts` run parallel to the cells and are "" where a cell says none."""

    title: str
    header: list[str]
    rows: list[list[str]]
    verdicts: list[list[str]]
    left: frozenset[int] = frozenset()  # columns that hold words
    notes: list[str] = field(default_factory=list)


def heading(found: Survey) -> str:
    return f"{found.title}: would the choice survive another budget?"


def basis_lines(found: Survey) -> list[str]:
    """What the answers rest on, and the present one."""
    c, s = found.sensitivity.present, found.sensitivity
    trials = count(len(s.results), "stored result")
    where = EVIDENCE_WORDS.get(c.evidence, c.evidence)
    settings = [f"{axis.label} {now_words(s, axis).removeprefix('now ')}" for axis in _set(found)]
    now = f" ({'; '.join(settings)})" if settings else " (no cap, floor or gate is set)"
    choice = f"{c.verdict} {c.preferred}" if c.preferred is not None else c.verdict
    return [f"Judged again from {trials}; nothing was run for it. The results: {where}.", f"Now: {choice}{now}."]


def _set(found: Survey) -> list[Axis]:
    s = found.sensitivity
    return [
        axis
        for key, axis in AXES.items()
        if getattr(s.budget, key) is not None or (axis is MEMORY and s.capacity_mib is not None)
    ]


def change_lines(found: Survey) -> list[str]:
    """Where the choice changes, what that rests on, and what was asked without an answer; whole sentences."""
    return [f"{line}." for line in (*found.words, *found.caveats, *found.notes)]


def range_grid(found: Survey, asked: Range) -> Grid:
    """One setting over the values asked about, with the numbers of the trial that would be the choice."""
    axis, s = asked.axis, found.sensitivity
    header = [_SHORT[axis.key], "choice", "verdict", "peak MiB", "speed", "eval loss", "beside it"]
    rows, verdicts = [], []
    for cell in asked.cells:
        i = cell.answer.preferred_index
        decision = None if i is None else s.present.decisions[i]
        m = None if i is None else s.results[i].measurement
        numbers = [
            number(decision.peak_mib) if decision is not None else NOT_KNOWN,
            _speed(found, i),
            loss(m.eval_loss) if m is not None else NOT_KNOWN,
        ]
        name = cell.answer.preferred or NOT_KNOWN
        rows.append(
            [value_words(found, axis, cell.values[0]), name, cell.answer.verdict, *numbers, _beside(found, cell)]
        )
        verdicts.append(["", "", cell.answer.verdict, "", "", "", ""])
    keep = [0, 1, 2, 3] if found.predicts else list(range(len(header)))
    keep = [k for k in keep if k != len(header) - 1] + ([len(header) - 1] if any(row[-1] for row in rows) else [])
    return Grid(
        title=f"{axis.label.capitalize()}, {_UNITS[axis.key]} ({now_words(s, axis)}); the rest as it is",
        header=[header[k] for k in keep],
        rows=[[row[k] for k in keep] for row in rows],
        verdicts=[[row[k] for k in keep] for row in verdicts],
        left=frozenset(j for j, k in enumerate(keep) if k in (1, 2, 6)),
    )


def _speed(found: Survey, index: int | None) -> str:
    if index is None:
        return NOT_KNOWN
    decision = found.sensitivity.present.decisions[index]
    if found.sensitivity.results[index].is_baseline:
        return "1.00x" if found.sensitivity.results[index].measurement is not None else NOT_KNOWN
    return ratio(decision.throughput_ratio)


def _beside(found: Survey, cell: Cell) -> str:
    parts = []
    if cell.not_known:
        parts.append(f"{len(cell.not_known)} never run")
    if cell.beyond_device:
        parts.append(f"over this device's {mib(found.sensitivity.capacity_mib)}")
    return ", ".join(parts)


def pair_grid(found: Survey, pair: Pair) -> Grid:
    """Two settings over the values asked about: a row for each of the first, a column for each of the second."""
    header = [f"{_SHORT[pair.x.key]} \\ {_SHORT[pair.y.key]}"]
    header += [value_words(found, pair.y, cell.values[1]) for cell in pair.cells[0]]
    rows = [[value_words(found, pair.x, row[0].values[0]), *map(cell_words, row)] for row in pair.cells]
    cells = [cell for row in pair.cells for cell in row]
    x, y = pair.x, pair.y
    return Grid(
        title=f"{x.label.capitalize()} ({_UNITS[x.key]}) and {y.label} ({_UNITS[y.key]})",
        header=header,
        rows=rows,
        verdicts=[["", *(cell.answer.verdict for cell in row)] for row in pair.cells],
        left=frozenset(range(1, len(header))),
        notes=pair_notes(found, cells),
    )


def pair_notes(found: Survey, cells: list[Cell]) -> list[str]:
    """How the cells of a pair are to be read."""
    notes = []
    if any(cell.answer.preferred is not None for cell in cells):
        notes.append("A name: accepted, and the one to take.")
    if any(cell.answer.preferred is None for cell in cells):
        notes.append("(tune), (reject): nothing is accepted; tune: a knob of some strategy may still get there.")
    if any(cell.not_known for cell in cells):
        most = max(len(cell.not_known) for cell in cells)
        were = "candidate that this cap might admit was" if most == 1 else "candidates that this cap might admit were"
        notes.append(f"{NOT_RUN}: not known, since up to {most} {were} never run.")
    if any(cell.beyond_device for cell in cells):
        has = mib(found.sensitivity.capacity_mib)
        notes.append(f"{BEYOND}: more than the {has} of this device; it would take another.")
    return notes


def cell_words(cell: Cell) -> str:
    """`micro_batch`, or `(tune)` where nothing is accepted, with the marks of what is not known."""
    marks = (NOT_RUN if cell.not_known else "") + (BEYOND if cell.beyond_device else "")
    name = cell.answer.preferred if cell.answer.preferred is not None else f"({cell.answer.verdict})"
    return f"{name} {marks}" if marks else name


def value_words(found: Survey, axis: Axis, value: float | None) -> str:
    """A value as asked for; `none`, with the device's memory where that is the cap then. `*`: the present one."""
    text = "none" if value is None else plain(axis, value)
    if value is None and axis is MEMORY and found.sensitivity.capacity_mib is not None:
        text = f"none ({number(found.sensitivity.capacity_mib)})"
    return f"{text} *" if value == getattr(found.sensitivity.budget, axis.key) else text
