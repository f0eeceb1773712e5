"""The pictures of a report, drawn without a display: peak against throughput, what fills the peak, and the losses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from sweep.report_data import Report, Section
from sweep.report_plots_loss import losses
from sweep.report_plots_style import CATEGORY_COLOURS, FAR, colour, short
from sweep.report_plots_why import changes
from sweep.report_rows import Row
from sweep.report_sensitivity_plots import budgets
from sweep.report_words import CATEGORY_WORDS
from sweep.results import Evidence
from sweep.words import EVIDENCE_SHORT, mib

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


#: In reading order: name of the file, and what draws it.
PICTURES: dict[str, Callable[[Section], Figure | None]] = {
    "pareto": pareto,
    "at_peak": at_peak,
    "peak_change": lambda section: changes(section, "peak"),
    "time_change": lambda section: changes(section, "time"),
    "loss": losses,
    "budgets": budgets,
}
