"""The pictures of a report, drawn without a display: peak against throughput, what fills the peak, and the losses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from sweep.decide.budgets import MEMORY, THROUGHPUT_RATIO, Area, Axis, shown
from sweep.decide.causes import moment
from sweep.decide.statistics import Curves, curves
from sweep.format import EVIDENCE_SHORT, count, mib, number
from sweep.report.budgets import FLOORS, GATES, Survey
from sweep.report.content import SMALL, change_of, signed
from sweep.report.data import Report, Row, Section
from sweep.report.phrases import CATEGORY_WORDS, PART_WORDS
from sweep.results import Category, Change, Evidence, Part, Phase, Timeline

#: Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
LINES = ("-", "--", "-.", ":")
CATEGORY_COLOURS = {
    Category.parameter.value: "#0072B2",
    Category.buffer.value: "#999999",
    Category.gradient.value: "#56B4E9",
    Category.optimizer_state.value: "#009E73",
    Category.input.value: "#F0E442",
    Category.activation.value: "#D55E00",
    Category.temporary.value: "#CC79A7",
}
#: A cap or a predicted peak beyond this many times the largest measured one would squeeze the points together.
FAR = 2.5


def colour(section: Section, row: Row) -> str:
    """A trial's colour, the same in every picture."""
    return COLOURS[_index(section, row) % len(COLOURS)]


def line_style(section: Section, row: Row) -> str:
    """A trial's kind of line: neighbours differ, and so do those of one colour."""
    index = _index(section, row)
    return LINES[(index + index // len(COLOURS)) % len(LINES)]


def _index(section: Section, row: Row) -> int:
    return next(i for i, other in enumerate(section.rows) if other is row)


def short(name: str, most: int = 34) -> str:
    """A name that fits beside a point: of a long one both ends, since like names differ in theirs."""
    if len(name) > most:
        end = (most - 1) * 2 // 3
        name = f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"
    return name.replace("$", r"\$")  # a dollar sign would begin a formula


def note(left_out: int) -> str:
    """How many trials a picture has no room for."""
    return f"; {count(left_out, 'more trial')} not shown" if left_out > 0 else ""


#: Beyond this many candidates lines and names cannot be told apart; shown are the preferred and the worst in loss.
MOST_CURVES = 12


def losses(section: Section) -> Figure | None:
    """Training loss over the steps less the baseline's, and held-out loss with its interval.

    The left panel shows the losses themselves with the baseline's band over its seeds (one seed: its line), the one
    below it each candidate's mean less the baseline's: there differences can be seen that the slope hides. None where
    there is not more than one trial with more than a point to show.
    """
    found = [(r, curves(m)) for r, t in zip(section.rows, section.results) if (m := t.measurement) is not None]
    found = [(r, c) for r, c in found if len(c.mean) > 1]
    if len(found) < 2:
        return None
    left_out = len(found)
    found = _most(section, found)
    left_out -= len(found)
    base = next((c for r, c in found if r is section.baseline), None)
    held_out = [(r, c) for r, c in found if c.held_out_mean is not None]
    figure = Figure(figsize=(9, 6.2 + 0.12 * max(0, len(found) - 6)), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.55, 1), height_ratios=(1.3, 1))
    right = bool(held_out)
    above = figure.add_subplot(grid[0, 0] if right else grid[0, :])
    _draw_curves(above, section, found, base)
    if base is not None:
        below = figure.add_subplot(grid[1, 0] if right else grid[1, :], sharex=above)
        _draw_differences(below, section, found, base)
        above.tick_params(labelbottom=False)
        above.set_xlabel("")
    if right:
        _draw_held_out(figure.add_subplot(grid[:, 1]), section, held_out)
    evidence = EVIDENCE_SHORT.get(section.comparison.evidence, section.comparison.evidence)
    figure.suptitle(f"{section.title}: losses ({evidence}{note(left_out)})", fontsize=11)
    handles, labels = above.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3)
    return figure


def _most(section: Section, found: list[tuple[Row, Curves]]) -> list[tuple[Row, Curves]]:
    """The baseline first, and of many candidates the preferred and those with the highest losses in the end."""
    rest = [(r, c) for r, c in found if r is not section.baseline]
    if len(rest) > MOST_CURVES:
        kept = sorted(rest, key=lambda item: (item[0] is not section.preferred, -item[1].mean[-1]))[:MOST_CURVES]
        rest = [item for item in rest if any(item is k for k in kept)]
    return [(r, c) for r, c in found if r is section.baseline] + rest


def _draw_curves(axes: Axes, section: Section, found: Sequence[tuple[Row, Curves]], base: Curves | None) -> None:
    for row, c in found:
        steps = range(1, len(c.mean) + 1)
        if c is base:
            # Below all others and thick, so that a curve that is equal can be seen on it.
            name = short(row.name) + ("" if row.name == "baseline" else " (baseline)")
            if len(c.seeds) > 1:
                words = f"{name}: lowest to highest of {count(len(c.seeds), 'seed')}"
                axes.fill_between(steps, c.low, c.high, color="black", alpha=0.18, linewidth=0, label=words, zorder=1)
                axes.plot(steps, c.mean, color="black", linewidth=1, zorder=1.5)
            else:
                words = f"{name}, 1 seed"
                axes.plot(steps, c.mean, color="black", linewidth=5, alpha=0.25, label=words, zorder=1)
            continue
        width, style = (2.2, "-") if row is section.preferred else (1.2, line_style(section, row))
        words = short(row.name) + (" (preferred)" if row is section.preferred else "")
        axes.plot(steps, c.mean, style, color=colour(section, row), linewidth=width, label=words, zorder=2)
    axes.set_xlabel("optimizer step, warm-up included")
    several = any(len(c.seeds) > 1 for _, c in found)
    axes.set_ylabel("training loss, mean over seeds" if several else "training loss")
    axes.grid(alpha=0.25)


def _draw_differences(axes: Axes, section: Section, found: Sequence[tuple[Row, Curves]], base: Curves) -> None:
    """Each candidate's mean less the baseline's at every step, and the baseline's band about its own mean."""
    if len(base.seeds) > 1:
        low = [a - b for a, b in zip(base.low, base.mean)]
        high = [a - b for a, b in zip(base.high, base.mean)]
        axes.fill_between(range(1, len(base.mean) + 1), low, high, color="black", alpha=0.18, linewidth=0)
    axes.axhline(0, color="black", linewidth=4 if len(base.seeds) == 1 else 1, alpha=0.25)
    for row, c in found:
        if c is base:
            continue
        values = [a - b for a, b in zip(c.mean, base.mean)]
        width, style = (2.2, "-") if row is section.preferred else (1.2, line_style(section, row))
        axes.plot(range(1, len(values) + 1), values, style, color=colour(section, row), linewidth=width)
    axes.set_ylabel("less the baseline's", fontsize=9)
    axes.set_xlabel("optimizer step, warm-up included")
    axes.grid(alpha=0.25)
    spread = max((abs(a - b) for r, c in found for a, b in zip(c.mean, base.mean)), default=0.0)
    if spread == 0 and len(base.seeds) == 1:
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])


def _draw_held_out(axes: Axes, section: Section, found: Sequence[tuple[Row, Curves]]) -> None:
    """Held-out loss after the last step: one point per seed, the mean and its 95 % interval."""
    base = next((c for r, c in found if r is section.baseline), None)
    if base is not None and base.held_out_low is not None and base.held_out_high is not None:
        axes.axvspan(base.held_out_low, base.held_out_high, color="black", alpha=0.1, linewidth=0)
    if base is not None and base.held_out_mean is not None:
        axes.axvline(base.held_out_mean, color="black", linewidth=1, linestyle=":")
    for y, (row, c) in enumerate(found):
        own = "black" if row is section.baseline else colour(section, row)
        mean = c.held_out_mean
        assert mean is not None
        axes.plot(list(c.held_out.values()), [y] * len(c.held_out), "o", color=own, markersize=3, alpha=0.5)
        if c.held_out_low is not None and c.held_out_high is not None:
            bar = [[mean - c.held_out_low], [c.held_out_high - mean]]
            axes.errorbar(mean, y, xerr=bar, color=own, capsize=3, linewidth=1.6)
        axes.plot(mean, y, "D", color=own, markersize=5)
    quality = {id(r): r.quality.verdict for r, _ in found if r.quality is not None and r is not section.baseline}
    words = {"equal": "equal", "better": "better", "worse": "worse", "unknown": "not known"}
    names = [short(r.name, 22) + (f"\n{words[quality[id(r)]]}" if id(r) in quality else "") for r, _ in found]
    axes.set_yticks(range(len(found)), names, fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.locator_params(axis="x", nbins=4)
    seeds = max(len(c.held_out) for _, c in found)
    how = f"mean of {seeds} seeds, 95 % interval;\nverdicts by differences of equal seeds"
    axes.set_xlabel(f"held-out loss\n({how if seeds > 1 else '1 seed, no interval'})", fontsize=9)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.grid(axis="x", alpha=0.25)


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


def draw_budgets(found: Survey, path: Path) -> list[Path]:
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


#: More names than this would cover the points.
_MOST_LABELS = 14


def draw(report: Report) -> list[Path]:
    """Draw what there is data for into the report's folder; returns the PNG files in reading order."""
    files: list[Path] = []
    for i, section in enumerate(report.sections):
        suffix = "" if len(report.sections) == 1 else f"_{i + 1}_{_slug(section.title)}"
        for name, picture in PICTURES.items():
            figure = picture(section)
            if figure is not None:
                path = report.folder / f"{name}{suffix}.png"
                FigureCanvasAgg(figure).print_png(str(path))
                files.append(path)
    return files


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "_", text).strip("_")


def pareto(section: Section) -> Figure | None:
    """Peak against throughput with the cap and the front; None where nothing was timed."""
    timed = [r for r in section.rows if r.samples_per_s is not None and r.peak_mib is not None]
    if not timed:
        return None
    in_tokens = all(r.tokens_per_s for r in timed)
    rate: Callable[[Row], float] = lambda r: (r.tokens_per_s if in_tokens else r.samples_per_s) or 0.0
    not_run = len(section.rows) - len(timed)
    figure = Figure(figsize=(8, 5.4 + 0.1 * min(not_run, 20)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    axes = figure.add_subplot()
    _draw_front(axes, timed, rate)
    for row in timed:
        _draw_point(axes, section, row, rate(row))
    right = _draw_not_run(axes, section, max(r.peak_mib or 0.0 for r in timed))
    right = _draw_cap(axes, section, right)
    axes.set_xlim(0, 1.1 * right)
    axes.set_ylim(0, 1.15 * max(rate(r) for r in timed))
    axes.set_xlabel("peak device memory, MiB" + (" (the ledger's)" if _on_cpu(section) else " (allocated)"))
    axes.set_ylabel(
        f"throughput, {'tokens' if in_tokens else 'samples'}/s" + (" (this CPU)" if _on_cpu(section) else "")
    )
    axes.set_title(f"{section.title}: peak memory against throughput ({_evidence(section)})", fontsize=11)
    axes.grid(alpha=0.25)
    intervals = any(r.step_ms_ci_low is not None for r in timed)
    _legend(figure, axes, "95 % interval" if intervals else "middle half of the steps")
    _name_points(axes, section, timed, rate)
    return figure


def _evidence(section: Section) -> str:
    return EVIDENCE_SHORT.get(section.comparison.evidence, section.comparison.evidence)


def _on_cpu(section: Section) -> bool:
    return section.comparison.evidence == Evidence.cpu.value


def _draw_point(axes: Axes, section: Section, row: Row, value: float) -> None:
    """One trial with the spread of its throughput. Filled: accepted; hollow: not; ring: preferred; square: baseline."""
    own = colour(section, row)
    x = row.peak_mib or 0.0
    fast, slow = row.step_ms_ci_low or row.step_ms_low, row.step_ms_ci_high or row.step_ms_high
    if row.step_ms and fast and slow:
        low, high = value * row.step_ms / slow, value * row.step_ms / fast
        axes.errorbar(x, value, yerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color=own, capsize=3, lw=1)
    face = own if row.verdict == "accept" else "white"
    marker = "s" if row.is_baseline else "o"
    axes.plot(x, value, marker, color=own, markerfacecolor=face, markersize=8, markeredgewidth=1.8, zorder=3)
    if row is section.preferred:
        axes.plot(x, value, "o", color="black", markerfacecolor="none", markersize=17, markeredgewidth=1.6, zorder=4)


def _name_points(axes: Axes, section: Section, rows: list[Row], rate: Callable[[Row], float]) -> None:
    """Each point's name beside it, on the side where it covers no other name or point and stays inside."""
    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]  # places the axes, and so the points
    named = [r for r in rows if len(rows) <= _MOST_LABELS or r is section.preferred or r.is_baseline]
    points = [axes.transData.transform((r.peak_mib or 0.0, rate(r))) for r in rows]
    inner = axes.bbox.padded(-6)
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in points]
    for row in sorted(named, key=lambda r: r is not section.preferred):
        words = short(row.name) + (" (preferred)" if row is section.preferred else "")
        best: tuple[float, Bbox, Annotation] | None = None
        for rise in (8, -15, 20, -27):
            for side, shift in (("left", 9), ("right", -9)):
                at = (row.peak_mib or 0.0, rate(row))
                text = axes.annotate(
                    words, at, (shift, rise), textcoords="offset points", ha=side, fontsize=9, zorder=5
                )
                text.set_in_layout(False)  # a long name must not squeeze the axes
                box = text.get_window_extent()
                outside = box.x0 < inner.x0 or box.x1 > inner.x1 or box.y0 < inner.y0
                cost = sum(box.overlaps(other) for other in taken) + 3 * outside + abs(rise) / 100
                if best is None or cost < best[0]:
                    if best is not None:
                        best[2].remove()
                    best = cost, box, text
                else:
                    text.remove()
        assert best is not None
        taken.append(best[1])


def front(rows: list[Row], rate: Callable[[Row], float]) -> list[Row]:
    """The trials that no other beats in both peak and throughput, by rising peak; without those not equivalent."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda r: (r.peak_mib or 0.0, -rate(r))):
        if row.verified is not False and (not found or rate(row) > rate(found[-1])):
            found.append(row)
    return found


def _draw_front(axes: Axes, rows: list[Row], rate: Callable[[Row], float]) -> None:
    best = front(rows, rate)
    if len(best) > 1:
        xs, ys = [r.peak_mib or 0.0 for r in best], [rate(r) for r in best]
        axes.plot(
            xs, ys, color="grey", linewidth=1, drawstyle="steps-post", zorder=1, label="front: not beaten in both"
        )


def _draw_cap(axes: Axes, section: Section, right: float) -> float:
    """The memory cap as a line, what is over it shaded; returns how far the x axis must reach, in MiB."""
    cap = section.comparison.cap_mib
    if cap is None:
        return right
    if cap > FAR * right:
        axes.plot([], [], " ", label=f"cap {mib(cap)}, far right")
        return right
    axes.axvline(cap, color="black", linestyle="--", linewidth=1, label=f"cap {mib(cap)}")
    axes.axvspan(cap, 10 * max(right, cap), color="black", alpha=0.06)
    return max(right, cap)


def _draw_not_run(axes: Axes, section: Section, right: float) -> float:
    """What has no throughput: at its predicted peak on the axis, else in the legend only; returns the reach in MiB."""
    reach = right
    for row in section.rows:
        if row.samples_per_s is not None and row.peak_mib is not None:
            continue
        p, label = row.predicted, f"{short(row.name)}: {row.outcome}"
        near = p is not None and p.allocated_mib <= FAR * right
        x = [p.allocated_mib] if p is not None and near else []
        label += f" (predicted peak {mib(p.allocated_mib)})" if p is not None else ""
        axes.plot(x, [0.0] * len(x), "x", color="#D55E00", markersize=8, clip_on=not x, zorder=4, label=label)
        reach = max([reach, *x])
    return reach


def _legend(figure: Figure, axes: Axes, bars: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    handles += [
        axes.plot([], [], "s", color="grey")[0],
        axes.plot([], [], "o", color="grey", markerfacecolor="white")[0],
        axes.plot([], [], "|", color="grey", markersize=10)[0],
    ]
    labels += ["square: baseline", "hollow: not accepted", f"bar: {bars}"]
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=2)


def at_peak(section: Section) -> Figure | None:
    """What is alive at each trial's peak, by category; None where that is not known."""
    rows = [r for r in section.rows if r.at_peak_mib]
    if not rows:
        return None
    figure = Figure(figsize=(8, 1.6 + 0.5 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    ends = [0.0] * len(rows)
    for category in CATEGORY_COLOURS:
        widths = [r.at_peak_mib.get(category, 0.0) for r in rows]
        if any(widths):
            fill, words = CATEGORY_COLOURS[category], CATEGORY_WORDS[category]
            axes.barh(range(len(rows)), widths, left=ends, color=fill, label=words, height=0.65)
            ends = [a + b for a, b in zip(ends, widths)]
    reach = max(ends)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    for i, (row, end) in enumerate(zip(rows, ends)):
        phase = (
            row.peak.phase if row.peak is not None else row.predicted.peak_phase if row.predicted is not None else ""
        )
        axes.annotate(
            f"{mib(end)}, in {phase}",
            (end, i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox=box,
        )
    cap = section.comparison.cap_mib
    if cap is not None and cap <= FAR * reach:
        axes.axvline(cap, color="black", linestyle="--", linewidth=1, label=f"cap {mib(cap)}")
        reach = max(reach, cap)
    axes.set_xlim(0, 1.28 * reach)
    axes.set_yticks(range(len(rows)), [short(r.name) + _how(section, r) for r in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    axes.set_title(f"{section.title}: what is alive at the peak ({_evidence(section)})", fontsize=11)
    axes.grid(axis="x", alpha=0.25)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    return figure


def _how(section: Section, row: Row) -> str:
    if row is section.preferred:
        return " (preferred)"
    return " (predicted)" if row.peak is None and not section.predicts else ""


PART_COLOURS = CATEGORY_COLOURS | {
    "recomputed": "#E69F00",
    "brought_back": "#000000",
    "optimizer_temporary": "#882255",
}
PHASE_COLOURS = {
    Phase.data.value: "#F0E442",
    Phase.forward.value: "#56B4E9",
    Phase.backward.value: "#0072B2",
    Phase.recompute.value: "#E69F00",
    Phase.transfer.value: "#000000",
    Phase.optimizer.value: "#009E73",
}


def draw_timeline(found: Timeline, name: str, path: Path) -> None:
    on_cpu = found.evidence == Evidence.cpu.value
    where = "emulated on a CPU" if on_cpu else "the ledger's account"
    figure = over_a_step(found, f"{name}: memory over one optimizer step ({where})")
    FigureCanvasAgg(figure).print_png(str(path))


def over_a_step(found: Timeline, title: str) -> Figure:
    """Memory over one step, stacked by part with what lasts at the bottom, the phases below it, and the peak marked."""
    figure = Figure(figsize=(10, 5.2), dpi=120, layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(16, 1), gridspec_kw={"hspace": 0.02})
    parts = [part for part in PART_WORDS if part in found.mib]
    axes.stackplot(
        found.positions,
        [found.mib[part] for part in parts],
        colors=[PART_COLOURS[part] for part in parts],
        labels=[PART_WORDS[part] for part in parts],
        step="post",
        linewidth=0,
    )
    axes.plot([found.peak_position], [found.peak.mib], "v", color="black", markersize=6, clip_on=False)
    left = found.peak_position < found.events / 2
    axes.annotate(
        f"peak {mib(found.peak.mib)}: {moment(found.peak)}",
        (found.peak_position, found.peak.mib),
        xytext=(8 if left else -8, 6),
        textcoords="offset points",
        ha="left" if left else "right",
        fontsize=8,
    )
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("device memory, MiB")
    axes.set_xlim(0, max(1, found.events))
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    for band in found.phases:
        below.axvspan(band.start, band.stop, color=PHASE_COLOURS.get(band.phase, "#999999"), linewidth=0)
    below.set_yticks([])
    below.spines[["top", "right", "left"]].set_visible(False)
    below.set_xlabel(f"allocations and their ends, in order ({found.events} in one optimizer step)")
    small = {"fontsize": 8, "frameon": False, "title_fontsize": 8, "alignment": "left"}
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", title="alive", **small)
    phases = dict.fromkeys(band.phase for band in found.phases)
    patches = [Patch(color=PHASE_COLOURS.get(phase, "#999999"), label=phase) for phase in phases]
    figure.legend(handles=patches, loc="outside right lower", title="phase, below", **small)
    return figure


#: In reading order: name of the file, and what draws it.
PICTURES: dict[str, Callable[[Section], Figure | None]] = {
    "pareto": pareto,
    "at_peak": at_peak,
    "peak_change": lambda section: changes(section, "peak"),
    "time_change": lambda section: changes(section, "time"),
    "loss": losses,
    "budgets": budgets,
}
