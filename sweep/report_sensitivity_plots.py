"""The picture of other budgets: which trial would be the choice, over memory cap and throughput floor or quality gate.

Areas are drawn with the exact edges that `Sensitivity.areas` gives; no grid is sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from sweep.report_data import Section
from sweep.report_sensitivity import FLOORS, GATES, Survey
from sweep.sensitivity import shown
from sweep.sensitivity_ranges import MEMORY, THROUGHPUT_RATIO, Area, Axis
from sweep.words import EVIDENCE_SHORT, count, mib

#: Okabe and Ito's palette without its black, which the colour-blind can tell apart; hatches beyond seven.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_HATCHES = ("", "..", "xx", "++", "oo")
#: More names than this would take the room of the picture.
_MOST_NAMES = 15
#: A cap beyond this many times the largest peak would squeeze everything else together.
_FAR = 2.0
#: Edges nearer to each other than this share of an axis are not all labelled.
_NEAR = 0.045

_ASKED, _OWN = "asked about (on the edge: not set)", "the sweep's own budget"

_LABELS = {
    "memory_mib": "memory cap, MiB",
    "min_throughput_ratio": "throughput floor, ratio to the baseline's",
    "min_samples_per_s": "throughput floor, samples/s",
    "max_eval_loss_ratio": "quality gate, ratio to the baseline's held-out loss",
    "max_eval_loss": "quality gate, held-out loss",
}


@dataclass(frozen=True)
class _Window:
    """What of an axis is shown."""

    low: float
    high: float

    def clip(self, value: float) -> float:
        return min(max(value, self.low), self.high)


def draw(found: Survey, path: Path) -> list[Path]:
    """Draw one comparison into `path`; returns it."""
    FigureCanvasAgg(picture(found)).print_png(str(path))
    return [path]


def budgets(section: Section) -> Figure | None:
    """The same for a sweep's own report; None where no memory cap changes the choice."""
    s = section.sensitivity
    if s is None or len({span.answer.preferred_index for span in s.spans(MEMORY)}) < 2 or len(s.results) < 2:
        return None
    return picture(Survey(section.title, s, [], []))


def picture(found: Survey) -> Figure:
    """A panel of memory cap and throughput floor, one more of cap and quality gate where that was asked about.

    Where nothing was timed there is only the memory cap: a strip.
    """
    panels = _panels(found)
    height = 4.3 * len(panels) if panels else 2.0
    figure = Figure(figsize=(8.5, height + 1.1), dpi=120, layout="constrained")
    grid = figure.subplots(max(1, len(panels)), 1, squeeze=False)
    styles = _Styles(found)
    handles: dict[str, Artist] = {}
    if not panels:
        _strip(grid[0][0], found, styles, handles)
    for axes, y in zip(grid[:, 0], panels):
        _panel(axes, found, y, styles, handles)
    evidence = EVIDENCE_SHORT.get(found.sensitivity.present.evidence, "")
    figure.suptitle(f"{found.title}: the choice under other budgets ({evidence})", fontsize=11)
    handles = {**styles.handles(), **handles}
    figure.legend(list(handles.values()), list(handles), fontsize=8, loc="outside lower center", ncols=3)
    return figure


def _panels(found: Survey) -> list[Axis]:
    """What stands on the upright axis of each panel."""
    s = found.sensitivity
    asked = {r.axis.key for r in found.ranges}
    chosen = []
    for axes in (FLOORS, GATES):
        named = [a for a in axes if a.key in asked]
        usual = [a for a in axes if s.matters(a)] if axes is FLOORS else []
        chosen += named[:1] or usual[:1]
    return chosen


class _Styles:
    """A colour for each trial that is the choice somewhere, the same in every panel."""

    def __init__(self, found: Survey) -> None:
        s = found.sensitivity
        areas = [a for y in _panels(found) for a in s.areas(MEMORY, y)]
        used = {a.preferred_index for a in areas} | {span.answer.preferred_index for span in s.spans(MEMORY)}
        order = [i for i in range(len(s.results)) if i in used]
        self.names = {i: s.results[i].name for i in order}
        self.sizes: dict[int, float] = {}  # drawn, as a share of the panels
        # Where there are colours for all, a trial has the one that it has in every other picture.
        few = len(s.results) <= len(_COLOURS)
        self._place = {i: i if few else n for n, i in enumerate(order)}

    def of(self, index: int | None) -> dict[str, str]:
        if index is None:
            return {"facecolor": "#ECECEC", "hatch": "//", "edgecolor": "#BDBDBD"}
        n = self._place[index]
        hatch = _HATCHES[n // len(_COLOURS) % len(_HATCHES)]
        return {"facecolor": _COLOURS[n % len(_COLOURS)], "hatch": hatch, "edgecolor": "white"}

    def handles(self) -> dict[str, Artist]:
        """The largest regions first; where there are many trials, the rest are counted."""
        named = sorted(self.names, key=lambda i: -self.sizes.get(i, 0.0))
        shown = sorted(named[:_MOST_NAMES])
        found: dict[str, Artist] = {
            _short(self.names[i]): Patch(**self.of(i))  # type: ignore[arg-type]
            for i in shown
        }
        found["nothing is accepted"] = Patch(**self.of(None))  # type: ignore[arg-type]
        if len(named) > len(shown):
            more = count(len(named) - len(shown), "smaller region")
            found[f"{more}: see sensitivity.json"] = Line2D([], [], linestyle="")
        return found


def _panel(axes: Axes, found: Survey, y: Axis, styles: _Styles, handles: dict[str, Artist]) -> None:
    areas = found.sensitivity.areas(MEMORY, y)
    across, upright = _window(found, MEMORY, areas), _window(found, y, areas)
    for area in areas:
        _rectangle(axes, area, across, upright, styles)
    _limits(axes, found, across, handles)
    _edges(axes, MEMORY, across, sorted({a.x_low for a in areas}), "x")
    _edges(axes, y, upright, sorted({a.y_low if y.rising else a.y_high for a in areas}), "y")
    keys = {(p.x.key, p.y.key): p for p in found.pairs}
    pair = keys.get((MEMORY.key, y.key))
    cells = [cell.values for row in pair.cells for cell in row] if pair is not None else []
    for x_value, y_value in cells:
        at = _at(found, MEMORY, x_value, across), _at(found, y, y_value, upright)
        _mark(axes, at, "o", "black", 4, _ASKED, handles)
    budget = found.sensitivity.budget
    at = _at(found, MEMORY, budget.memory_mib, across), _at(found, y, getattr(budget, y.key), upright)
    _mark(axes, at, "*", "black", 15, _OWN, handles)
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(upright.low, upright.high)
    axes.set_xlabel(_LABELS[MEMORY.key])
    axes.set_ylabel(_LABELS[y.key])


def _strip(axes: Axes, found: Survey, styles: _Styles, handles: dict[str, Artist]) -> None:
    areas = [Area(s.low, s.high, 0.0, 1.0, s.answer.preferred_index) for s in found.sensitivity.spans(MEMORY)]
    across = _window(found, MEMORY, areas)
    for area in areas:
        _rectangle(axes, area, across, _Window(0.0, 1.0), styles)
    _limits(axes, found, across, handles)
    _edges(axes, MEMORY, across, [a.x_low for a in areas], "x")
    for asked in found.ranges:
        for cell in asked.cells if asked.axis is MEMORY else []:
            _mark(axes, (_at(found, MEMORY, cell.values[0], across), 0.5), "o", "black", 4, _ASKED, handles)
    at = _at(found, MEMORY, found.sensitivity.budget.memory_mib, across), 0.5
    _mark(axes, at, "*", "black", 15, _OWN, handles)
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xlabel(_LABELS[MEMORY.key])


def _window(found: Survey, axis: Axis, areas: list[Area]) -> _Window:
    """From a little below the first edge to a little above the last, asked and present values included."""
    s = found.sensitivity
    ends = [e for a in areas for e in ((a.x_low, a.x_high) if axis is MEMORY else (a.y_low, a.y_high))]
    values = [e for e in ends if 0 < e < math.inf]
    values += [v for r in found.ranges if r.axis is axis for cell in r.cells if (v := cell.values[0]) is not None]
    values += [v] if (v := getattr(s.budget, axis.key)) is not None else []
    if axis is MEMORY and s.capacity_mib is not None and s.capacity_mib < _FAR * max(values, default=s.capacity_mib):
        values.append(s.capacity_mib)
    if axis is THROUGHPUT_RATIO:
        values.append(1.0)
    if not values:
        return _Window(0.0, 1.0)
    low, high = min(values), max(values)
    margin = 0.12 * (high - low) or 0.1 * high or 1.0
    return _Window(max(0.0, low - margin), high + margin)


def _at(found: Survey, axis: Axis, value: float | None, window: _Window) -> float:
    """Where a value stands; what is not set stands at the loose end."""
    if value is None and axis is MEMORY:
        value = found.sensitivity.capacity_mib
    if value is None:
        value = axis.loosest
    return window.clip(value)


def _rectangle(axes: Axes, area: Area, across: _Window, upright: _Window, styles: _Styles) -> None:
    x_low, x_high = across.clip(area.x_low), across.clip(area.x_high)
    y_low, y_high = upright.clip(area.y_low), upright.clip(area.y_high)
    if x_high > x_low and y_high > y_low:
        if area.preferred_index is not None:
            share = (x_high - x_low) * (y_high - y_low) / (across.high - across.low) / (upright.high - upright.low)
            styles.sizes[area.preferred_index] = styles.sizes.get(area.preferred_index, 0.0) + share
        style = styles.of(area.preferred_index)
        axes.add_patch(Rectangle((x_low, y_low), x_high - x_low, y_high - y_low, linewidth=0.6, **style))  # type: ignore[arg-type]


def _limits(axes: Axes, found: Survey, across: _Window, handles: dict[str, Artist]) -> None:
    """Where the device ends, and from where on candidates are missing that were never run."""
    s = found.sensitivity
    if s.capacity_mib is not None and across.low < s.capacity_mib < across.high:
        line = axes.axvline(s.capacity_mib, color="black", linestyle="--", linewidth=1.2)
        axes.axvspan(s.capacity_mib, across.high, facecolor="white", alpha=0.45, zorder=2)
        handles[f"this device has {mib(s.capacity_mib)}; paler: it would take another"] = line
    if s.never_run:
        least = min(n.from_mib for n in s.never_run)
        if least < across.high:
            line = axes.axvline(across.clip(least), color="black", linestyle=":", linewidth=1.6)
            names = count(len(s.never_run), "candidate")
            handles[f"right of it: {names} never run, so not known"] = line


def _edges(axes: Axes, axis: Axis, window: _Window, values: list[float], side: str) -> None:
    """The exact values at which the choice changes, on the far side of the panel."""
    last, places, labels = -math.inf, [], []
    for value in values:
        if window.low < value < window.high:
            near = value - last < _NEAR * (window.high - window.low)
            places.append(value)
            labels.append("" if near else shown(axis, value).removesuffix(" MiB").removesuffix(" samples/s"))
            last = last if near else value
    second = axes.secondary_xaxis("top") if side == "x" else axes.secondary_yaxis("right")
    if side == "x":
        second.set_xticks(places, labels, fontsize=7, rotation=45, ha="left")
    else:
        second.set_yticks(places, labels, fontsize=7)


def _mark(
    axes: Axes, at: tuple[float, float], marker: str, colour: str, size: float, label: str, handles: dict[str, Artist]
) -> None:
    style = {"color": colour, "markeredgecolor": "white", "markeredgewidth": 0.9, "markersize": size}
    axes.plot(*at, marker, clip_on=False, zorder=5, **style)  # type: ignore[arg-type]
    handles.setdefault(label, Line2D([], [], marker=marker, linestyle="", **style))  # type: ignore[arg-type]


def _short(name: str) -> str:
    return name if len(name) <= 34 else f"{name[:33]}\N{HORIZONTAL ELLIPSIS}"
