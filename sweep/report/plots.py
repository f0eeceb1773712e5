"""The pictures of a report and of a traced step, drawn without a display."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.transforms import Bbox

from sweep.decide.budgets import MEMORY, THROUGHPUT_RATIO, Area, Axis
from sweep.decide.causes import parts_of
from sweep.decide.statistics import Curves, curves
from sweep.format import EVIDENCE_SHORT, count, mib
from sweep.report.budgets import FLOORS, GATES, Survey
from sweep.report.content import moment_words
from sweep.report.data import Report, Row, Section
from sweep.report.phrases import PART_WORDS, shown
from sweep.results import Category, Evidence, Phase, Timeline, Verdict

#: Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
LINES = ("-", "--", "-.", ":")
HATCHES = ("", "..", "xx", "++", "oo")
PART_COLOURS = {
    Category.parameter.value: "#0072B2",
    Category.buffer.value: "#999999",
    Category.optimizer_state.value: "#009E73",
    Category.gradient.value: "#56B4E9",
    Category.input.value: "#F0E442",
    Category.activation.value: "#D55E00",
    "recomputed": "#E69F00",
    "brought_back": "#000000",
    Category.temporary.value: "#CC79A7",
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
#: A cap or a predicted peak beyond this many times the largest measured one would squeeze the points together.
FAR = 2.5
#: Curves, names and bars that can still be told apart.
MOST, MOST_BARS = 12, 30


def draw(report: Report) -> list[Path]:
    """Draw what there is data for into the report's folder; returns the PNG files in reading order."""
    files = []
    for i, section in enumerate(report.sections, 1):
        for name, picture in PICTURES.items():
            figure = picture(section)
            if figure is not None:
                suffix = _suffix(i, section.title, len(report.sections))
                files.append(_save(figure, report.folder / f"{name}{suffix}.png"))
    return files


def draw_surveys(surveys: list[Survey], folder: Path) -> list[Path]:
    """The regions of each comparison under other budgets."""
    names = [f"sensitivity{_suffix(i, found.title, len(surveys))}.png" for i, found in enumerate(surveys, 1)]
    return [_save(regions(found), folder / name) for found, name in zip(surveys, names)]


def draw_timeline(found: Timeline, name: str, path: Path) -> None:
    cpu = found.evidence == Evidence.cpu.value
    where = "on this CPU: the ledger's device memory" if cpu else "the ledger's account"
    _save(over_a_step(found, f"{name}: memory over one optimizer step ({where})"), path)


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _suffix(index: int, title: str, of: int) -> str:
    return "" if of == 1 else f"_{index}_{re.sub(r'[^a-zA-Z0-9]+', '_', title).strip('_')}"


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _title(section: Section, what: str, more: str = "") -> str:
    evidence = section.comparison.evidence
    return f"{section.title}: {what} ({EVIDENCE_SHORT.get(evidence, evidence)}{more})"


def short(name: str, most: int = 34) -> str:
    """A name that fits beside a point: of a long one both ends, since like names differ in theirs."""
    if len(name) > most:
        end = (most - 1) * 2 // 3
        name = f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"
    return name.replace("$", r"\$")  # a dollar sign would begin a formula


def _label(section: Section, row: Row) -> str:
    return short(row.name) + (" (preferred)" if row is section.preferred else "")


def _left_out(found: int, most: int) -> str:
    """How many trials a picture has no room for."""
    return f"; {count(found - most, 'more trial')} not shown" if found > most else ""


def _style(section: Section, row: Row) -> dict[str, Any]:
    """A trial's colour and line, the same in every picture: neighbours differ, and so do those of one colour."""
    i = next(i for i, other in enumerate(section.rows) if other is row)
    preferred = row is section.preferred
    line = "-" if preferred else LINES[(i + i // len(COLOURS)) % len(LINES)]
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": line, "linewidth": 2.2 if preferred else 1.2}


# -- the losses -------------------------------------------------------------------------------------------------------


def losses(section: Section) -> Figure | None:
    """Training loss over the steps, each candidate's less the baseline's below it, and held-out loss with its interval.

    Differences can be seen below that the slope hides above. None without two trials with more than a point to show.
    """
    all_found = [(r, curves(r.measured)) for r in section.rows if r.measured is not None]
    all_found = [(r, c) for r, c in all_found if len(c.mean) > 1]
    if len(all_found) < 2:
        return None
    # Of many candidates the preferred and those with the highest losses in the end.
    rank = lambda item: (item[0] is not section.baseline, item[0] is not section.preferred, -item[1].mean[-1])
    kept = sorted(all_found, key=rank)[: MOST + 1]
    found = [item for item in all_found if any(item is k for k in kept)]
    base = next((c for r, c in found if r is section.baseline), None)
    held_out = [(r, c) for r, c in found if c.held_out_mean is not None]
    figure = _figure(9, 6.2 + 0.12 * max(0, len(found) - 6))
    grid = figure.add_gridspec(2, 2, width_ratios=(1.55, 1), height_ratios=(1.3, 1))
    place = 0 if held_out else slice(None)
    above = figure.add_subplot(grid[0, place] if base is not None else grid[:, place])
    _draw_curves(above, section, found, base, None)
    if base is not None:
        below = figure.add_subplot(grid[1, place], sharex=above)
        _draw_curves(below, section, found, base, base)
        above.tick_params(labelbottom=False)
        above.set_xlabel("")
    if held_out:
        _draw_held_out(figure.add_subplot(grid[:, 1]), section, held_out, base)
    figure.suptitle(_title(section, "losses", _left_out(len(all_found), len(found))), fontsize=11)
    figure.legend(*above.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    return figure


def _draw_curves(
    axes: Axes, section: Section, found: Sequence[tuple[Row, Curves]], base: Curves | None, less: Curves | None
) -> None:
    """The mean losses, less those of `less`. The baseline's band or line is below all others and thick."""

    def values(of: list[float]) -> list[float]:
        return [a - b for a, b in zip(of, less.mean)] if less is not None else of

    for row, c in found:
        steps = range(1, len(values(c.mean)) + 1)
        if c is base:
            name = short(row.name) + ("" if row.name == "baseline" else " (baseline)")
            several = len(c.seeds) > 1
            words = f"{name}: lowest to highest of {count(len(c.seeds), 'seed')}" if several else f"{name}, 1 seed"
            if several:
                axes.fill_between(steps, values(c.low), values(c.high), color="black", alpha=0.18, lw=0, label=words)
            width, label = (1, None) if several else (5, words)
            axes.plot(steps, values(c.mean), color="black", linewidth=width, alpha=0.25, label=label, zorder=1)
        else:
            axes.plot(steps, values(c.mean), label=_label(section, row), zorder=2, **_style(section, row))
    several = any(len(c.seeds) > 1 for _, c in found)
    whole = "training loss, mean over seeds" if several else "training loss"
    axes.set_ylabel(whole if less is None else "less the baseline's", fontsize=9)
    axes.set_xlabel("optimizer step, warm-up included")
    axes.grid(alpha=0.25)
    if less is not None and not any(v for _, c in found for v in values(c.mean)):
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])


def _draw_held_out(axes: Axes, section: Section, found: Sequence[tuple[Row, Curves]], base: Curves | None) -> None:
    """Held-out loss after the last step: one point per seed, the mean and its 95 % interval."""
    if base is not None and base.held_out_mean is not None:
        if base.held_out_low is not None and base.held_out_high is not None:
            axes.axvspan(base.held_out_low, base.held_out_high, color="black", alpha=0.1, linewidth=0)
        axes.axvline(base.held_out_mean, color="black", linewidth=1, linestyle=":")
    names = []
    for y, (row, c) in enumerate(found):
        own = "black" if c is base else _style(section, row)["color"]
        mean, q = c.held_out_mean or 0.0, row.decision.quality
        axes.plot(list(c.held_out.values()), [y] * len(c.held_out), "o", color=own, markersize=3, alpha=0.5)
        if c.held_out_low is not None and c.held_out_high is not None:
            bar = [[mean - c.held_out_low], [c.held_out_high - mean]]
            axes.errorbar(mean, y, xerr=bar, color=own, capsize=3, linewidth=1.6)
        axes.plot(mean, y, "D", color=own, markersize=5)
        verdict = "" if q is None or c is base else "\nnot known" if q.verdict == "unknown" else f"\n{q.verdict}"
        names.append(short(row.name, 22) + verdict)
    axes.set_yticks(range(len(found)), names, fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.locator_params(axis="x", nbins=4)
    seeds = max(len(c.held_out) for _, c in found)
    how = f"mean of {seeds} seeds, 95 % interval;\nverdicts by differences of equal seeds"
    axes.set_xlabel(f"held-out loss\n({how if seeds > 1 else '1 seed, no interval'})", fontsize=9)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.grid(axis="x", alpha=0.25)




# -- which trial under which budget -----------------------------------------------------------------------------------

_LABELS = {
    "memory_mib": "memory cap, MiB",
    "min_throughput_ratio": "throughput floor, ratio to the baseline's",
    "min_samples_per_s": "throughput floor, samples/s",
    "max_eval_loss_ratio": "quality gate, ratio to the baseline's held-out loss",
    "max_eval_loss": "quality gate, held-out loss",
}
#: More names than this would take the room of the picture; edges nearer than this share of an axis are not labelled.
_MOST_NAMES, _NEAR = 15, 0.045


def budgets(section: Section) -> Figure | None:
    """For a sweep's own report; None where no memory cap changes the choice."""
    s = section.sensitivity
    if len(s.results) < 2 or len({x.answer.preferred_index for x in s.spans(MEMORY)}) < 2:
        return None
    return regions(Survey(section.title, s, [], []))


def regions(found: Survey) -> Figure:
    """A panel of memory cap and throughput floor, one more of cap and quality gate where that was asked about.

    Where nothing was timed there is only the memory cap: a strip.
    """
    s = found.sensitivity
    floors = [a for a in FLOORS if a.key in found.keys] or [a for a in FLOORS if s.matters(a)]
    upright: list[Axis | None] = [*floors[:1], *[a for a in GATES if a.key in found.keys][:1]]
    upright = upright or [None]
    strip = [Area(x.low, x.high, 0.0, 1.0, x.answer.preferred_index) for x in s.spans(MEMORY)]
    areas = [strip if y is None else s.areas(MEMORY, y) for y in upright]
    figure = _figure(8.5, 1.1 + (2.0 if upright == [None] else 4.3 * len(upright)))
    used = sorted({a.preferred_index for own in areas for a in own if a.preferred_index is not None})
    styles: dict[int | None, Any] = {None: {"facecolor": "#ECECEC", "hatch": "//", "edgecolor": "#BDBDBD"}}
    for n, i in enumerate(used):
        # Where there are colours for all, a trial has the one that it has in every other picture.
        place = i if len(s.results) < len(COLOURS) else n
        styles[i] = {"facecolor": COLOURS[place % 7], "hatch": HATCHES[place // 7 % len(HATCHES)], "edgecolor": "white"}
    legend: dict[str, Artist] = {short(s.results[i].name): Patch(**styles[i]) for i in used[:_MOST_NAMES]}
    legend["nothing is accepted"] = Patch(**styles[None])
    if len(used) > _MOST_NAMES:
        more = f"{count(len(used) - _MOST_NAMES, 'more region')}: see sensitivity.json"
        legend[more] = Line2D([], [], linestyle="")
    for axes, y, own in zip(figure.subplots(len(upright), 1, squeeze=False)[:, 0], upright, areas):
        _panel(axes, found, y, own, styles, legend)
    evidence = EVIDENCE_SHORT.get(s.present.evidence, "")
    figure.suptitle(f"{found.title}: the choice under other budgets ({evidence})", fontsize=11)
    figure.legend(list(legend.values()), list(legend), fontsize=8, loc="outside lower center", ncols=3)
    return figure


def _panel(
    axes: Axes, found: Survey, y: Axis | None, areas: list[Area], styles: Any, legend: dict[str, Artist]
) -> None:
    """The regions with their exact edges, what was asked about, the present budget, and what is not known."""
    s = found.sensitivity
    x_low, x_high = _window(found, MEMORY, [e for a in areas for e in (a.x_low, a.x_high)])
    y_low, y_high = _window(found, y, [e for a in areas for e in (a.y_low, a.y_high)]) if y is not None else (0.0, 1.0)
    across = lambda value: min(max(value, x_low), x_high)
    up = lambda value: min(max(value, y_low), y_high)
    for a in areas:
        left, bottom = across(a.x_low), up(a.y_low)
        width, height = across(a.x_high) - left, up(a.y_high) - bottom
        if width > 0 and height > 0:
            axes.add_patch(Rectangle((left, bottom), width, height, linewidth=0.6, **styles[a.preferred_index]))
    if s.capacity_mib is not None and x_low < s.capacity_mib < x_high:
        label = f"this device has {mib(s.capacity_mib)}; paler: it would take another"
        legend[label] = axes.axvline(s.capacity_mib, color="black", linestyle="--", linewidth=1.2)
        axes.axvspan(s.capacity_mib, x_high, facecolor="white", alpha=0.45, zorder=2)
    if s.never_run and (least := min(n.from_mib for n in s.never_run)) < x_high:
        label = f"right of it: {count(len(s.never_run), 'candidate')} never run, so not known"
        legend[label] = axes.axvline(across(least), color="black", linestyle=":", linewidth=1.6)
    key = "" if y is None else y.key
    asked = {(c.values.get(MEMORY.key, s.budget.memory_mib), c.values.get(key)) for c in found.cells}
    own = (s.budget.memory_mib, getattr(s.budget, key, None))
    for points, marker, size, label in (
        (asked, "o", 4, "asked about (on the edge: not set)"),
        ({own}, "*", 15, "the sweep's own budget"),
    ):
        look: Any = {"color": "black", "markeredgecolor": "white", "markeredgewidth": 0.9, "markersize": size}
        for cap, value in points:
            cap = s.capacity_mib if cap is None else cap
            loosest = 0.5 if y is None else y.loosest
            at = across(math.inf if cap is None else cap), up(loosest if value is None else value)
            axes.plot(*at, marker, clip_on=False, zorder=5, **look)
            legend.setdefault(label, Line2D([], [], marker=marker, linestyle="", **look))
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(y_low, y_high)
    axes.set_xlabel(_LABELS[MEMORY.key])
    axes.set_xticks(*_ticks(MEMORY, x_low, x_high, {a.x_low for a in areas}), fontsize=8, rotation=30, ha="right")
    if y is None:
        axes.set_yticks([])
    else:
        axes.set_ylabel(_LABELS[y.key])
        edges = {a.y_low if y.rising else a.y_high for a in areas}
        axes.set_yticks(*_ticks(y, y_low, y_high, edges), fontsize=8)


def _window(found: Survey, axis: Axis, ends: list[float]) -> tuple[float, float]:
    """From a little below the first edge to a little above the last, asked and present values included."""
    s = found.sensitivity
    asked = [cell.values.get(axis.key) for cell in found.cells] + [getattr(s.budget, axis.key)]
    values = [e for e in ends if 0 < e < math.inf] + [v for v in asked if v is not None]
    if axis is MEMORY and s.capacity_mib is not None and s.capacity_mib < 2 * max(values, default=s.capacity_mib):
        values.append(s.capacity_mib)
    values += [1.0] if axis is THROUGHPUT_RATIO or not values else []
    margin = 0.12 * (max(values) - min(values)) or 0.1 * max(values)
    return max(0.0, min(values) - margin), max(values) + margin


def _ticks(axis: Axis, low: float, high: float, edges: set[float]) -> tuple[list[float], list[str]]:
    """The exact values at which the choice changes, as far as there is room for their labels."""
    places: list[float] = []
    for value in sorted(edges):
        if low < value < high and (not places or value - places[-1] > _NEAR * (high - low)):
            places.append(value)
    return places, [shown(axis, value).removesuffix(" MiB").removesuffix(" samples/s") for value in places]


# -- peak and speed ---------------------------------------------------------------------------------------------------


def pareto(section: Section) -> Figure | None:
    """Peak against throughput with the cap and the front; None where nothing was timed."""
    timed = [r for r in section.rows if r.measured is not None and r.peak_mib is not None]
    if not timed:
        return None
    in_tokens = all(r.measured is not None and r.measured.tokens_per_s for r in timed)

    def rate(row: Row) -> float:
        m = row.measured
        return 0.0 if m is None else (m.tokens_per_s or 0.0) if in_tokens else m.samples_per_s

    not_run = [r for r in section.rows if r not in timed]
    figure = _figure(8, 5.4 + 0.1 * min(len(not_run), 20))
    FigureCanvasAgg(figure)  # measures text
    axes = figure.add_subplot()
    best = front(timed, rate)
    if len(best) > 1:
        style: Any = {"color": "grey", "linewidth": 1, "drawstyle": "steps-post", "zorder": 1}
        axes.plot([r.peak_mib or 0.0 for r in best], list(map(rate, best)), label="front: not beaten in both", **style)
    for row in timed:
        _draw_point(axes, section, row, rate(row))
    reach = _draw_not_run(axes, not_run, max(r.peak_mib or 0.0 for r in timed))
    cap, cpu = section.comparison.cap_mib, section.comparison.evidence == Evidence.cpu.value
    if cap is not None and cap > FAR * reach:
        axes.plot([], [], " ", label=f"cap {mib(cap)}, far right")
    elif cap is not None:
        axes.axvline(cap, color="black", linestyle="--", linewidth=1, label=f"cap {mib(cap)}")
        axes.axvspan(cap, 10 * max(reach, cap), color="black", alpha=0.06)
        reach = max(reach, cap)
    axes.set_xlim(0, 1.1 * reach)
    axes.set_ylim(0, 1.15 * max(rate(r) for r in timed))
    axes.set_xlabel("peak device memory, MiB" + (" (the ledger's)" if cpu else " (allocated)"))
    axes.set_ylabel(f"throughput, {'tokens' if in_tokens else 'samples'}/s{' (this CPU)' if cpu else ''}")
    axes.set_title(_title(section, "peak memory against throughput"), fontsize=11)
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    bars = "95 % interval" if any(r.interval_ms for r in timed) else "middle half of the steps"
    for marker, face, words in (("s", "grey", "square: baseline"), ("o", "white", "hollow: not accepted")):
        handles.append(Line2D([], [], marker=marker, linestyle="", color="grey", markerfacecolor=face))
        labels.append(words)
    handles.append(Line2D([], [], marker="|", linestyle="", color="grey", markersize=10))
    figure.legend(handles, [*labels, f"bar: {bars}"], fontsize=8, loc="outside lower center", ncols=2)
    _name_points(axes, section, timed, rate)
    return figure


def front(rows: list[Row], rate: Callable[[Row], float]) -> list[Row]:
    """The trials that no other beats in both peak and throughput, by rising peak; without those not equivalent."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda r: (r.peak_mib or 0.0, -rate(r))):
        v = row.result.verification
        if (v is None or v.passed) and (not found or rate(row) > rate(found[-1])):
            found.append(row)
    return found


def _draw_point(axes: Axes, section: Section, row: Row, value: float) -> None:
    """One trial with the spread of its throughput. Filled: accepted; hollow: not; ring: preferred; square: baseline."""
    m, own, x = row.measured, _style(section, row)["color"], row.peak_mib or 0.0
    assert m is not None
    fast, slow = row.interval_ms or (m.step_ms_low, m.step_ms_high)
    if m.step_ms and fast and slow:
        ends = [[max(0.0, value - value * m.step_ms / slow)], [max(0.0, value * m.step_ms / fast - value)]]
        axes.errorbar(x, value, yerr=ends, color=own, capsize=3, lw=1)
    face = own if row.decision.verdict == Verdict.accept.value else "white"
    marker = "s" if row.is_baseline else "o"
    axes.plot(x, value, marker, color=own, markerfacecolor=face, markersize=8, markeredgewidth=1.8, zorder=3)
    if row is section.preferred:
        axes.plot(x, value, "o", color="black", markerfacecolor="none", markersize=17, markeredgewidth=1.6, zorder=4)


def _draw_not_run(axes: Axes, rows: list[Row], reach: float) -> float:
    """What has no throughput: at its predicted peak on the axis, else in the legend only; returns the reach in MiB."""
    right = reach
    for row in rows[:MOST]:
        p, label = row.predicted, f"{short(row.name)}: {row.result.outcome}"
        x = [p.allocated_mib] if p is not None and p.allocated_mib <= FAR * reach else []
        label += f" (predicted peak {mib(p.allocated_mib)})" if p is not None else ""
        axes.plot(x, [0.0] * len(x), "x", color="#D55E00", markersize=8, clip_on=not x, zorder=4, label=label)
        right = max([right, *x])
    return right


def _name_points(axes: Axes, section: Section, rows: list[Row], rate: Callable[[Row], float]) -> None:
    """Each point's name beside it, on the side where it covers no other name or point and stays inside."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # places the axes, and so the points
    named = [r for r in rows if len(rows) <= MOST + 2 or r is section.preferred or r.is_baseline]
    points = [axes.transData.transform((r.peak_mib or 0.0, rate(r))) for r in rows]
    inner = axes.bbox.padded(-6)
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in points]

    def cost(box: Bbox, rise: int) -> float:
        outside = box.x0 < inner.x0 or box.x1 > inner.x1 or box.y0 < inner.y0
        return sum(box.overlaps(other) for other in taken) + 3 * outside + abs(rise) / 100

    for row in sorted(named, key=lambda r: r is not section.preferred):
        at: Any = (row.peak_mib or 0.0, rate(row))
        tried: list[Any] = []
        for rise in (8, -15, 20, -27):
            for side, shift in (("left", 9), ("right", -9)):
                style: Any = {"textcoords": "offset points", "ha": side, "fontsize": 9, "zorder": 5}
                text = axes.annotate(_label(section, row), at, (shift, rise), **style)
                text.set_in_layout(False)  # a long name must not squeeze the axes
                tried.append((cost(text.get_window_extent(), rise), len(tried), text))
        best = min(tried)[2]
        for _, _, text in tried:
            if text is not best:
                text.remove()
        taken.append(best.get_window_extent())


# -- what is alive ----------------------------------------------------------------------------------------------------


def at_peak(section: Section) -> Figure | None:
    """What is alive at each trial's peak, by part; None where that is not known."""
    rows = [r for r in section.rows if r.peak is not None][:MOST_BARS]
    if not rows:
        return None
    figure = _figure(8, 1.6 + 0.5 * len(rows))
    axes = figure.add_subplot()
    alive = [parts_of(r.peak) for r in rows if r.peak is not None]
    ends = [0.0] * len(rows)
    for part, colour in PART_COLOURS.items():
        widths = [own.get(part, 0.0) for own in alive]
        if any(widths):
            axes.barh(range(len(rows)), widths, left=ends, color=colour, label=PART_WORDS[part], height=0.65)
            ends = [a + b for a, b in zip(ends, widths)]
    reach = max(ends)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    style: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": box}
    names = []
    for i, (row, end) in enumerate(zip(rows, ends)):
        axes.annotate(f"{mib(end)}, in {row.peak.phase if row.peak else ''}", (end, i), **style)
        predicted = not row.peak_was_seen and not section.predicts and row is not section.preferred
        names.append(_label(section, row) + (" (predicted)" if predicted else ""))
    cap = section.comparison.cap_mib
    if cap is not None and cap <= FAR * reach:
        axes.axvline(cap, color="black", linestyle="--", linewidth=1, label=f"cap {mib(cap)}")
        reach = max(reach, cap)
    axes.set_xlim(0, 1.28 * reach)
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    axes.set_title(_title(section, "what is alive at the peak", _left_out(len(section.rows), MOST_BARS)), fontsize=11)
    axes.grid(axis="x", alpha=0.25)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    return figure


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
        f"peak {mib(found.peak.mib)}: {moment_words(found.peak)}",
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
    small: Any = {"fontsize": 8, "frameon": False, "title_fontsize": 8, "alignment": "left"}
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
    "loss": losses,
    "budgets": budgets,
}
