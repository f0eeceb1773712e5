"""The picture of the losses: training curves against the baseline's band, and held-out loss with intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sweep.quality import Curves, curves
from sweep.report_data import Section
from sweep.report_plots_style import colour, line_style, note, short
from sweep.report_rows import Row
from sweep.words import EVIDENCE_SHORT, count

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
