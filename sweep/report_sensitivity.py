"""Other budgets over stored results: what is concluded at each value asked about, each pair of values, and as files."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from sweep.decide import Group, grouped
from sweep.report_sensitivity_options import Asked, option
from sweep.results import TrialResult, to_dict, write_json
from sweep.schema import BudgetConf, plain
from sweep.sensitivity import axes_of, caveats, chain_words, words_of
from sweep.sensitivity_ranges import (
    AXES,
    LOSS,
    LOSS_RATIO,
    MEMORY,
    SAMPLES,
    THROUGHPUT_RATIO,
    Answer,
    Axis,
    Sensitivity,
)

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
    from sweep.report_sensitivity_markdown import markdown

    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Path] = []
    try:
        from sweep.report_sensitivity_plots import draw  # only now: matplotlib takes a second to import

        for i, found in enumerate(surveys):
            suffix = "" if len(surveys) == 1 else f"_{i + 1}_{re.sub(r'[^a-zA-Z0-9]+', '_', found.title).strip('_')}"
            pictures += draw(found, folder / f"sensitivity{suffix}.png")
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
    files[1].write_text(markdown(surveys, command, pictures), encoding="utf-8")
    return [*files, *pictures]
