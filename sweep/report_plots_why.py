"""The changes of peak and step time, taken apart: a waterfall per candidate from the baseline's value to its own."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sweep.findings import Change, Part
from sweep.report_answers_why import SMALL, change_of, signed
from sweep.report_data import Section
from sweep.report_plots_style import note, short
from sweep.report_rows import Row
from sweep.words import EVIDENCE_SHORT, number

#: More panels than this cannot be read side by side.
MOST = 12
MOST_PARTS = 6
BEFORE, AFTER, LESS, MORE, RESIDUAL = "#8c8c8c", "#404040", "#009E73", "#D55E00", "#F0E442"


def changes(section: Section, which: str) -> Figure | None:
    """which: "peak" (MiB) or "time" (ms). None where no candidate's change is known."""
    ordered = sorted(section.candidates, key=lambda r: r is not section.preferred)
    found = [(r, c) for r in ordered if (c := change_of(r, which)) is not None]
    if not found:
        return None
    left_out, found = len(found) - MOST, found[:MOST]
    bars = [bars_of(c) for _, c in found]
    columns = 1 if len(found) == 1 else 2
    rows = math.ceil(len(found) / columns)
    tallest = [max(len(b) for b in bars[i * columns : (i + 1) * columns]) for i in range(rows)]
    figure = Figure(figsize=(5 + 4.2 * (columns - 1), 1.1 + sum(0.7 + 0.26 * n for n in tallest)), dpi=120)
    figure.set_layout_engine("constrained")
    grid = figure.add_gridspec(rows, columns, height_ratios=[0.7 + 0.26 * n for n in tallest])
    unit = found[0][1].unit
    ends = [end for own in bars for _, start, length, _ in own for end in (start, start + length)]
    low, high = min(ends), max(ends)
    for i, ((row, change), own) in enumerate(zip(found, bars)):
        axes = figure.add_subplot(grid[i // columns, i % columns])
        _draw(axes, own, change.unit)
        axes.set_xlim(low, low + 1.24 * (high - low) if high > low else 1.0)
        axes.set_ylim(tallest[i // columns] - 0.5, -0.5)
        axes.set_title(_title(section, row, which), fontsize=9, loc="left")
        if i // columns == rows - 1 or i + columns >= len(found):
            axes.set_xlabel(f"{'peak, ' if which == 'peak' else 'step time, '}{unit}", fontsize=9)
    what = "change of the peak" if which == "peak" else "change of the step time"
    figure.suptitle(f"{section.title}: {what} against the baseline{note(left_out)}", fontsize=11)
    return figure


def _title(section: Section, row: Row, which: str) -> str:
    preferred = " (preferred)" if row is section.preferred else ""
    evidence = row.explanation.evidence if row.explanation is not None else row.evidence
    noise = "; inside the noise" if which == "time" and row.step is not None and row.step.none else ""
    return f"{short(row.name)}{preferred}: {EVIDENCE_SHORT.get(evidence, evidence)}{noise}"


def bars_of(change: Change) -> list[tuple[str, float, float, str]]:
    """Name, start, length and colour of each bar, from the value before to the one after; small parts together."""
    size = max([abs(change.total), *(abs(p.value) for p in change.parts), abs(change.residual)])
    large = [p for p in change.parts if abs(p.value) > SMALL * size][:MOST_PARTS]
    rest = sum(p.value for p in change.parts if p not in large)
    parts = [*large, *([Part("smaller parts", rest)] if abs(rest) > SMALL * size / 10 else [])]
    bars = [("before", 0.0, change.before, BEFORE)]
    at = change.before
    for part in parts:
        bars.append((part.name, at, part.value, LESS if part.value < 0 else MORE))
        at += part.value
    left = change.after - at
    if abs(left) > SMALL * size or not change.closes:
        bars.append(("not explained", at, left, RESIDUAL))
    return [*bars, ("after", 0.0, change.after, AFTER)]


def _draw(axes: Axes, bars: list[tuple[str, float, float, str]], unit: str) -> None:
    ends = [max(start, start + length) for _, start, length, _ in bars]
    for y, ((name, start, length, colour), end) in enumerate(zip(bars, ends)):
        axes.barh(y, length, left=start, color=colour, height=0.62, edgecolor="black", linewidth=0.4)
        if y + 1 < len(bars):  # the level that the next bar begins at
            level = start + length
            axes.plot([level, level], [y + 0.31, y + 0.69], color="black", linewidth=0.6)
        words = f"{number(length) if name in ('before', 'after') else signed(length)} {unit}"
        axes.annotate(words, (end, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
