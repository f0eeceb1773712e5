"""Other budgets over stored results: what is asked, what is concluded for each, as blocks and as sensitivity.json."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import product
from typing import Any

from sweep.config.schema import plain
from sweep.decide.budgets import (
    AXES,
    MEMORY,
    THROUGHPUT_RATIO,
    Answer,
    Axis,
    Sensitivity,
)
from sweep.errors import BadInput
from sweep.format import EVIDENCE_WORDS, NOT_KNOWN, count, loss, mib, number, ratio
from sweep.report.blocks import Block, Heading, Picture, Points, Table, Text
from sweep.report.data import Judged, title_of
from sweep.report.phrases import caveats, now_words, plain_value, sentence, words_of
from sweep.results import to_dict

#: More values of one setting, or more budgets in all, than this are more than a table can show.
MOST_VALUES, MOST_CELLS = 60, 600
_HELP = {
    "memory_mib": ("MIB", "memory caps in MiB; none: the device's own memory"),
    "min_throughput_ratio": ("RATIO", "throughput floors as a ratio to the baseline's"),
    "min_samples_per_s": ("RATE", "throughput floors in samples per second"),
    "max_eval_loss_ratio": ("RATIO", "quality gates as a ratio to the baseline's held-out loss"),
    "max_eval_loss": ("LOSS", "quality gates on the held-out loss"),
}
_EXAMPLES = {"memory_mib": "8000:16000:2000", "min_throughput_ratio": "0.7:0.9:0.1"}

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
    asked = {key: parse_values(AXES[key], text) for key, text in given.items()}
    if math.prod(map(len, asked.values())) > MOST_CELLS:
        raise BadInput(option(next(iter(asked))), "...", f"more than {MOST_CELLS} budgets in all", "give fewer values")
    return asked


def parse_values(axis: Axis, text: str) -> list[float | None]:
    """`8000,12000:16000:2000,none` as numbers, each once, in rising order; none stands where it is loosest."""
    found: set[float | None] = set()
    for part in text.split(","):
        found |= _values(axis, part.strip())
        if len(found) > MOST_VALUES:
            raise BadInput(option(axis.key), text, f"more than {MOST_VALUES} values", "take a larger step")
    return sorted(found, key=lambda v: axis.loosest if v is None else v)


def _values(axis: Axis, text: str) -> set[float | None]:
    """Decimal, so that 0.7:0.9:0.1 ends at 0.9 and 0.8 is 0.8."""
    example = _EXAMPLES.get(axis.key, "1.0:1.2:0.1")
    if text.lower() in ("none", "null"):
        return {None}

    def bad(what: str, instead: str) -> BadInput:
        return BadInput(option(axis.key), text or "''", what, instead)

    try:
        ends = [Decimal(end) for end in text.split(":")]
    except InvalidOperation:
        raise bad("is no number", f"give numbers, such as {example}, or none") from None
    if any(not end.is_finite() or not math.isfinite(float(end)) for end in ends):
        raise bad("is not finite", "give a number, or none for no limit")
    if any(end < 0 or (end == 0 and axis is MEMORY) for end in ends[:2]):
        raise bad("is not above zero", "give a positive number, or none for no limit")
    if len(ends) == 1:
        return {float(ends[0])}
    if len(ends) != 3:
        raise bad("is no range", f"write START:STOP:STEP, such as {example}")
    start, stop, step = ends
    if step <= 0 or stop < start:
        wrong = "has a step that is not above zero" if step <= 0 else "ends before it starts"
        raise bad(wrong, f"write START:STOP:STEP, such as {example}")
    if (stop - start) / step >= MOST_VALUES:
        raise bad(f"more than {MOST_VALUES} values", "take a larger step")
    return {float(start + i * step) for i in range(int((stop - start) / step) + 1)}


@dataclass(frozen=True)
class Cell:
    """One budget and what is concluded under it."""

    values: dict[str, float | None]  # by setting asked about; None: unset
    answer: Answer
    cap_mib: float | None  # the memory cap that applies
    not_known: list[str]  # candidates without a measurement that might be the choice
    beyond_device: bool  # the cap is larger than the device's memory


@dataclass
class Survey:
    """One comparison under all budgets asked about."""

    title: str
    sensitivity: Sensitivity
    cells: list[Cell]
    unanswered: list[str]  # what was asked and has no answer here, in words

    @property
    def keys(self) -> list[str]:
        return list(self.cells[0].values) if self.cells else []

    def words(self) -> list[tuple[str, str]]:
        """Where the choice changes: each setting, and what is chosen under it."""
        s, axes = self.sensitivity, list(self.sensitivity.axes)
        axes += [AXES[key] for key in self.keys if AXES[key] not in axes]
        return [words_of(s, axis, s.spans(axis)) for axis in axes]

    def data(self) -> dict[str, Any]:
        """The comparison with the keys of sensitivity.json. An open end of a range is null."""
        s, c = self.sensitivity, self.sensitivity.present
        return {
            **{k: getattr(c, k) for k in ("workload", "device", "mode", "evidence", "fixed_id")},
            "budget": plain(s.budget),
            "capacity_mib": s.capacity_mib,
            "present": {"verdict": c.verdict, "preferred": c.preferred, "cap_mib": c.cap_mib},
            "words": [f"{head}: {words}" for head, words in self.words()],
            "caveats": [*caveats(s), *self.unanswered],
            "changes": {axis.key: _spans(s, axis) for axis in s.axes},
            "never_run": [{k: v for k, v in to_dict(n).items() if k != "index"} for n in s.never_run],
            "cells": [
                {**to_dict(cell), **cell.values, "verdict": cell.answer.verdict, "preferred": cell.answer.preferred}
                for cell in self.cells
            ],
        }


def _spans(s: Sensitivity, axis: Axis) -> list[dict[str, Any]]:
    ends = {"includes": "low" if axis.rising else "high"}
    spans = [(x.low, x.high, x.answer) for x in s.spans(axis)]
    return [{"low": a, "high": b, **ends, "verdict": x.verdict, "preferred": x.preferred} for a, b, x in spans]


def survey(judged: list[Judged], asked: Asked) -> list[Survey]:
    """One survey per comparison; what is not asked about stays as it is."""
    return [_survey(one, asked) for one in judged]


def _survey(judged: Judged, asked: Asked) -> Survey:
    group, present = judged
    s = Sensitivity(group.results, group.budget, group.capacity_mib, present)
    answerable = [key for key in asked if AXES[key] is MEMORY or s.matters(AXES[key])]
    cells = []
    for values in product(*(asked[key] for key in answerable)) if answerable else []:
        budget = dict(zip(answerable, values))
        cap = s.cap_mib(budget)
        beyond = cap is not None and s.capacity_mib is not None and cap > s.capacity_mib
        cells.append(Cell(budget, s.answer(budget), cap, [n.name for n in s.not_known(cap)], beyond))
    unanswered = [f"{option(key)}: {_no_answer(s, AXES[key])}" for key in asked if key not in answerable]
    return Survey(title_of(group, present), s, cells, unanswered)


def _no_answer(s: Sensitivity, axis: Axis) -> str:
    what = "throughput" if "throughput" in axis.label else "held-out loss"
    if s.present.mode == "predict":
        return f"nothing was run, so no {what} is known; a prediction has the memory cap alone"
    if axis.key.endswith("_ratio") and (s.baseline is None or s.baseline.measurement is None):
        return f"there is no baseline that ran to its end, so no trial has a ratio to its {what}"
    return f"no trial beside the baseline has a {what} to hold it against"


def survey_blocks(found: Survey, picture: str = "sensitivity") -> list[Block]:
    """What the answers rest on, where the choice changes, and what each budget asked about gives."""
    s, c = found.sensitivity, found.sensitivity.present
    set_ones = [a for k, a in AXES.items() if getattr(s.budget, k) is not None or (a is MEMORY and s.capacity_mib)]
    now = "; ".join(f"{a.label} {now_words(s, a).removeprefix('now ')}" for a in set_ones)
    choice = f"{c.verdict} {c.preferred}" if c.preferred is not None else c.verdict
    blocks: list[Block] = [
        Heading(f"{found.title}: would the choice survive another budget?", 1),
        Text(f"Judged again from {count(len(s.results), 'stored result')}; nothing was run for it."),
        Text(f"The results: {EVIDENCE_WORDS.get(c.evidence, c.evidence)}."),
        Text(f"Now: {choice} ({now or 'no cap, floor or gate is set'})."),
        Heading("Where the choice changes"),
    ]
    blocks.append(Points([(f"{head}:", sentence(words, first=False)) for head, words in found.words()]))
    blocks.append(Points([("", sentence(line)) for line in [*caveats(s), *found.unanswered]]))
    if found.cells:
        blocks += [Heading("The choice under each budget asked about"), _table(found), *map(_quiet, _notes(found))]
    return [*blocks, Picture(picture, "Regions by the trial to take")]


def _quiet(words: str) -> Text:
    return Text(words, quiet=True)


def _table(found: Survey) -> Table:
    s, rows = found.sensitivity, []
    for cell in found.cells:
        i = cell.answer.preferred_index
        decision, m = (s.present.decisions[i], s.results[i].measurement) if i is not None else (None, None)
        speed = "1.00x" if i is not None and s.results[i].is_baseline and m is not None else NOT_KNOWN
        if decision is not None and i is not None and not s.results[i].is_baseline:
            speed = ratio(decision.throughput_ratio)
        marks = (["?"] if cell.not_known else []) + (["^"] if cell.beyond_device else [])
        rows.append(
            [
                *(_value(s, AXES[key], value) for key, value in cell.values.items()),
                " ".join([cell.answer.preferred or NOT_KNOWN, *marks]),
                cell.answer.verdict,
                number(decision.peak_mib if decision is not None else None),
                speed,
                loss(m.eval_loss if m is not None else None),
            ]
        )
    keys = len(found.keys)
    header = [*(_SHORT[key] for key in found.keys), "choice", "verdict", "peak MiB", "speed", "eval loss"]
    table = Table.of(header, rows, (keys, keys + 1))
    if s.present.mode == "predict":
        table.columns = table.columns[:-2]
    return table


_SHORT = {
    "memory_mib": "cap MiB",
    "min_throughput_ratio": "floor",
    "min_samples_per_s": "floor samples/s",
    "max_eval_loss_ratio": "gate ratio",
    "max_eval_loss": "gate loss",
}


def _value(s: Sensitivity, axis: Axis, value: float | None) -> str:
    """A value as asked for; `none`, with the device's memory where that is the cap then. `*`: the present one."""
    text = "none" if value is None else plain_value(axis, value)
    if value is None and axis is MEMORY and s.capacity_mib is not None:
        text = f"none ({number(s.capacity_mib)})"
    return f"{text} *" if value == getattr(s.budget, axis.key) else text


def _notes(found: Survey) -> list[str]:
    """How the marks in the table are to be read."""
    most, s = max(len(cell.not_known) for cell in found.cells), found.sensitivity
    notes = []
    if any(getattr(s.budget, k) == v for cell in found.cells for k, v in cell.values.items()):
        notes.append("*: the sweep's own budget.")
    if most:
        were = count(most, "candidate that this cap might admit was", "candidates that this cap might admit were")
        notes.append(f"?: not known, since up to {were} never run.")
    if any(cell.beyond_device for cell in found.cells):
        notes.append(f"^: more than the {mib(s.capacity_mib)} of this device; it would take another.")
    return notes


#: What stands on the upright axis of a picture of regions.
FLOORS = (THROUGHPUT_RATIO, AXES["min_samples_per_s"])
GATES = (AXES["max_eval_loss_ratio"], AXES["max_eval_loss"])
