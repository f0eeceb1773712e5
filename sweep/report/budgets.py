"""Other budgets over stored results: what is concluded at each value asked about, each pair of values, and as files."""

from __future__ import annotations

import argparse
import math
import re
import warnings
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import combinations
from pathlib import Path
from typing import Any

from sweep.config.schema import BudgetConf, plain
from sweep.decide.budgets import (
    AXES,
    LOSS,
    LOSS_RATIO,
    MEMORY,
    SAMPLES,
    THROUGHPUT_RATIO,
    Answer,
    Axis,
    Sensitivity,
    axes_of,
    caveats,
    chain_words,
    now_words,
    plain_value,
    words_of,
)
from sweep.decide.verdict import Group, grouped
from sweep.errors import BadInput
from sweep.format import EVIDENCE_WORDS, NOT_KNOWN, count, loss, mib, number, ratio
from sweep.results import TrialResult, to_dict, write_json

#: More values than this are more than a table can show.
MOST_VALUES = 60

_HELP = {
    "memory_mib": ("MIB", "memory caps in MiB; none: the device's own memory"),
    "min_throughput_ratio": ("RATIO", "throughput floors as a ratio to the baseline's"),
    "min_samples_per_s": ("RATE", "throughput floors in samples per second"),
    "max_eval_loss_ratio": ("RATIO", "quality gates as a ratio to the baseline's held-out loss"),
    "max_eval_loss": ("LOSS", "quality gates on the held-out loss"),
}

#: The values asked about, by the budget's field, the strictest memory cap and the loosest floor first; None: unset.
Asked = dict[str, list[float | None]]


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "other budgets",
        "Judge the stored results under other budgets; nothing is run. Each takes values (0.7,0.8), a range "
        "(START:STOP:STEP, both ends included) or none. One value each: the whole report under that budget.",
    )
    for key, (metavar, words) in _HELP.items():
        group.add_argument(option(key), metavar=metavar, help=words)


def option(key: str) -> str:
    """`memory_mib` as `--memory-mib`."""
    return "--" + key.replace("_", "-")


def asked_in(arguments: argparse.Namespace) -> Asked:
    """What was asked about. Raises BadInput for what is no value or no range."""
    given = {key: text for key in AXES if (text := getattr(arguments, key)) is not None}
    return {key: parse_values(AXES[key], text) for key, text in given.items()}


def parse_values(axis: Axis, text: str) -> list[float | None]:
    """`8000,12000:16000:2000,none` as numbers, each once, in rising order; none stands where it is loosest."""
    found: set[float | None] = set()
    for part in text.split(","):
        found |= _part(axis, part.strip())
        if len(found) > MOST_VALUES:
            raise BadInput(option(axis.key), text, f"more than {MOST_VALUES} values", "take a larger step")
    return sorted(found, key=lambda v: axis.loosest if v is None else v)


def _part(axis: Axis, text: str) -> set[float | None]:
    key = option(axis.key)
    if text.lower() in ("none", "null"):
        return {None}
    if ":" not in text:
        return {float(_number(axis, text))}
    ends = text.split(":")
    if len(ends) != 3:
        raise BadInput(key, text, "is no range", f"write START:STOP:STEP, such as {_example(axis)}")
    start, stop, step = _number(axis, ends[0]), _number(axis, ends[1]), _decimal(axis, ends[2])
    if step <= 0 or stop < start:
        wrong = "has a step that is not above zero" if step <= 0 else "ends before it starts"
        raise BadInput(key, text, wrong, f"write START:STOP:STEP, such as {_example(axis)}")
    steps = int((stop - start) / step)
    if steps >= MOST_VALUES:
        raise BadInput(key, text, f"more than {MOST_VALUES} values", "take a larger step")
    return {float(start + i * step) for i in range(steps + 1)}


def _number(axis: Axis, text: str) -> Decimal:
    value = _decimal(axis, text)
    if value < 0 or (value == 0 and axis is MEMORY):
        raise BadInput(option(axis.key), text, "is not above zero", "give a positive number, or none for no limit")
    return value


def _decimal(axis: Axis, text: str) -> Decimal:
    """Decimal, so that 0.7:0.9:0.1 ends at 0.9 and 0.8 is 0.8."""
    key = option(axis.key)
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise BadInput(key, text or "''", "is no number", f"give numbers, such as {_example(axis)}, or none") from None
    if not value.is_finite() or not math.isfinite(float(value)):
        raise BadInput(key, text, "is not finite", "give a number, or none for no limit")
    return value


def _example(axis: Axis) -> str:
    return {"memory_mib": "8000:16000:2000", "min_throughput_ratio": "0.7:0.9:0.1"}.get(axis.key, "1.0:1.2:0.1")


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
class BudgetGrid:
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


def range_grid(found: Survey, asked: Range) -> BudgetGrid:
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
    return BudgetGrid(
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


def pair_grid(found: Survey, pair: Pair) -> BudgetGrid:
    """Two settings over the values asked about: a row for each of the first, a column for each of the second."""
    header = [f"{_SHORT[pair.x.key]} \\ {_SHORT[pair.y.key]}"]
    header += [value_words(found, pair.y, cell.values[1]) for cell in pair.cells[0]]
    rows = [[value_words(found, pair.x, row[0].values[0]), *map(cell_words, row)] for row in pair.cells]
    cells = [cell for row in pair.cells for cell in row]
    x, y = pair.x, pair.y
    return BudgetGrid(
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
    text = "none" if value is None else plain_value(axis, value)
    if value is None and axis is MEMORY and found.sensitivity.capacity_mib is not None:
        text = f"none ({number(found.sensitivity.capacity_mib)})"
    return f"{text} *" if value == getattr(found.sensitivity.budget, axis.key) else text


SCHEMA_VERSION = 1
#: More changes than this are not told in one sentence.
MOST_SPANS = 12
FLOORS, GATES = (THROUGHPUT_RATIO, SAMPLES), (LOSS_RATIO, LOSS)


@dataclass(frozen=True)
class Cell:
    """One budget and what is concluded under it."""

    values: tuple[float | None, ...]  # of the settings asked about; None: unset
    answer: Answer
    cap_mib: float | None  # the memory cap that applies
    not_known: tuple[str, ...] = ()  # candidates without a measurement that might be the choice
    beyond_device: bool = False  # the cap is larger than the device's memory


@dataclass
class Range:
    """One setting over the values asked about; the others as in the sweep's own budget."""

    axis: Axis
    cells: list[Cell]


@dataclass
class Pair:
    """Two settings over the values asked about: `cells` has a row for each value of `x`, and in it one of `y`."""

    x: Axis
    y: Axis
    cells: list[list[Cell]]


@dataclass
class Survey:
    """One comparison under all budgets asked about."""

    title: str
    sensitivity: Sensitivity
    words: list[str]  # where the choice changes, a sentence for each setting
    caveats: list[str]  # what that rests on and what is not known
    ranges: list[Range] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was asked and has no answer here

    @property
    def predicts(self) -> bool:
        return self.sensitivity.present.mode == "predict"

    def cell(self, keys: tuple[str, ...], values: tuple[float | None, ...]) -> Cell:
        asked = dict(zip(keys, values))
        s = self.sensitivity
        cap = s.cap_mib(asked)
        beyond = cap is not None and s.capacity_mib is not None and cap > s.capacity_mib
        names = tuple(n.name for n in s.not_known(cap))
        return Cell(values, s.answer(asked), cap, names, beyond)

    def data(self) -> dict[str, Any]:
        """The comparison with the keys of sensitivity.json. An open end of a range is null."""
        s, c = self.sensitivity, self.sensitivity.present
        return {
            "workload": c.workload,
            "device": c.device,
            "mode": c.mode,
            "evidence": c.evidence,
            "fixed_id": c.fixed_id,
            "budget": plain(s.budget),
            "capacity_mib": s.capacity_mib,
            "present": {"verdict": c.verdict, "preferred": c.preferred, "cap_mib": c.cap_mib},
            "words": self.words,
            "caveats": self.caveats + self.notes,
            "changes": {axis.key: _spans_data(s, axis) for axis in axes_of(s)},
            "never_run": [{k: v for k, v in to_dict(n).items() if k != "index"} for n in s.never_run],
            "ranges": [
                {"key": r.axis.key, "cells": [_cell_data((r.axis.key,), cell) for cell in r.cells]} for r in self.ranges
            ],
            "pairs": [
                {
                    "keys": [p.x.key, p.y.key],
                    "cells": [_cell_data((p.x.key, p.y.key), cell) for row in p.cells for cell in row],
                }
                for p in self.pairs
            ],
        }


def _spans_data(s: Sensitivity, axis: Axis) -> list[dict[str, Any]]:
    return [
        {
            "low": span.low,
            "high": span.high,
            "includes": "low" if axis.rising else "high",
            "verdict": span.answer.verdict,
            "preferred": span.answer.preferred,
        }
        for span in s.spans(axis)
    ]


def _cell_data(keys: tuple[str, ...], cell: Cell) -> dict[str, Any]:
    return {
        **dict(zip(keys, cell.values)),
        "verdict": cell.answer.verdict,
        "preferred": cell.answer.preferred,
        "cap_mib": cell.cap_mib,
        "beyond_device": cell.beyond_device,
        "not_known": list(cell.not_known),
    }


def survey(
    results: list[TrialResult], budget: BudgetConf | None, capacity_mib: float | None, asked: Asked
) -> list[Survey]:
    """One survey per comparison. budget, capacity_mib: None: each's own; what is not asked about stays as it is."""
    return [_survey(group, asked) for group in grouped(results, budget, capacity_mib)]


def _survey(group: Group, asked: Asked) -> Survey:
    s = Sensitivity(group.results, group.budget, group.capacity_mib)
    axes = axes_of(s)
    axes += [axis for key, axis in AXES.items() if key in asked and axis not in axes and s.matters(axis)]
    found = Survey(
        title=f"{s.present.workload} on {s.present.device}" + (f", {group.under}" if group.under else ""),
        sensitivity=s,
        words=[line for axis in axes for line in _change_words(s, axis)],
        caveats=caveats(s),
    )
    answerable = []
    for key in asked:
        if AXES[key] is MEMORY or s.matters(AXES[key]):
            answerable.append(AXES[key])
        else:
            found.notes.append(f"{option(key)}: {_no_answer(found, AXES[key])}")
    for axis in answerable:
        found.ranges.append(Range(axis, [found.cell((axis.key,), (v,)) for v in asked[axis.key]]))
    for x, y in combinations(answerable, 2):
        keys = (x.key, y.key)
        found.pairs.append(Pair(x, y, [[found.cell(keys, (a, b)) for b in asked[y.key]] for a in asked[x.key]]))
    return found


def _change_words(s: Sensitivity, axis: Axis) -> list[str]:
    """The nearest changes, and where there are more of them, all."""
    spans = s.spans(axis)
    nearest = words_of(s, axis, spans)
    if not 3 < len(spans) <= MOST_SPANS:
        return [nearest]
    return [nearest, f"{axis.label.capitalize()}, all of it: {chain_words(axis, spans)}"]


def _no_answer(found: Survey, axis: Axis) -> str:
    what = "throughput" if axis in FLOORS else "held-out loss"
    if found.predicts:
        return f"nothing was run, so no {what} is known; a prediction has the memory cap alone"
    baseline = found.sensitivity.baseline
    if axis in (THROUGHPUT_RATIO, LOSS_RATIO) and (baseline is None or baseline.measurement is None):
        return f"there is no baseline that ran to its end, so no trial has a ratio to its {what}"
    return f"no trial beside the baseline has a {what} to hold it against"


def write_survey(surveys: list[Survey], folder: Path, asked: Asked, command: str) -> list[Path]:
    """Write sensitivity.json, sensitivity.md and the pictures into `folder`; returns them. Nothing else is touched.

    A picture that cannot be drawn is a warning, as in a report.
    """
    from sweep.report.markdown import budgets_markdown

    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Path] = []
    try:
        from sweep.report.plots import draw_budgets  # only now: matplotlib takes a second to import

        for i, found in enumerate(surveys):
            suffix = "" if len(surveys) == 1 else f"_{i + 1}_{re.sub(r'[^a-zA-Z0-9]+', '_', found.title).strip('_')}"
            pictures += draw_budgets(found, folder / f"sensitivity{suffix}.png")
    except Exception as error:
        warnings.warn(f"no picture was drawn: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
    data = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "asked": asked,
        "plots": [path.name for path in pictures],
        "comparisons": [found.data() for found in surveys],
    }
    files = [folder / "sensitivity.json", folder / "sensitivity.md"]
    write_json(data, files[0])
    files[1].write_text(budgets_markdown(surveys, command, pictures), encoding="utf-8")
    return [*files, *pictures]
