"""The memory over one optimizer step, by category, from the ledger's events: as data and as a picture.

The horizontal axis is not time: a position is one allocation or its end, in order. The ledger slows a step down
unevenly, so that times under it would mean nothing; the order is what the real step has too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sweep.decide.causes import BY_PHASE, NAMES, TEMPORARIES, moment
from sweep.format import mib
from sweep.memory.ledger import Ledger
from sweep.results import MIB, Category, Peak, Phase, write_json

#: Positions that are kept; a large model has a hundred thousand.
MOST_POINTS = 2000
#: What is drawn, what lasts at the bottom, with Okabe and Ito's palette as in the report's pictures (and two more).
COLOURS = {
    NAMES[Category.parameter.value]: "#0072B2",
    NAMES[Category.buffer.value]: "#999999",
    NAMES[Category.optimizer_state.value]: "#009E73",
    NAMES[Category.gradient.value]: "#56B4E9",
    NAMES[Category.input.value]: "#F0E442",
    NAMES[Category.activation.value]: "#D55E00",
    BY_PHASE[Phase.recompute.value]: "#E69F00",
    BY_PHASE[Phase.transfer.value]: "#000000",
    TEMPORARIES: "#CC79A7",
    BY_PHASE[Phase.optimizer.value]: "#882255",
}
PHASE_COLOURS = {
    Phase.data.value: "#F0E442",
    Phase.forward.value: "#56B4E9",
    Phase.backward.value: "#0072B2",
    Phase.recompute.value: "#E69F00",
    Phase.transfer.value: "#000000",
    Phase.optimizer.value: "#009E73",
}


@dataclass
class Band:
    """A phase without those inside of it, as a piece of the axis."""

    phase: str
    start: int  # position
    stop: int


@dataclass
class Timeline:
    """Device memory over one optimizer step. `positions` and the lists of `mib` run parallel."""

    axis: str
    unit: str
    events: int  # allocations and ends in the step
    positions: list[int]  # some of them where there are too many; the highest point of each piece is kept
    mib: dict[str, list[float]]  # by part, temporaries told apart by the phase that made them
    phases: list[Band]
    peak_position: int
    peak: Peak
    evidence: str = ""
    notes: list[str] = field(default_factory=list)


class Recorder:
    """Notes where each phase begins and ends in the ledger's log. A listener of `sweep.workload.step.Phases`."""

    def __init__(self, ledger: Ledger) -> None:
        self._log = ledger.log
        self._stack: list[str] = []
        self._since = self.start = 0
        self.bands: list[Band] = []

    def begin(self) -> None:
        """The step that counts begins."""
        self.bands = []
        self._since = self.start = len(self._log.order)

    def enter_phase(self, phase: str) -> None:
        self._close()
        self._stack.append(phase)

    def leave_phase(self, phase: str) -> None:
        self._close()
        self._stack.pop()

    def _close(self) -> None:
        now = len(self._log.order)
        if self._stack and now > self._since:
            last = self.bands[-1] if self.bands else None
            if last is not None and last.phase == self._stack[-1] and last.stop == self._since - self.start:
                last.stop = now - self.start
            else:
                self.bands.append(Band(self._stack[-1], self._since - self.start, now - self.start))
        self._since = now


def timeline(ledger: Ledger, recorder: Recorder, evidence: str) -> Timeline:
    """The memory from `recorder.begin()` on, downsampled to MOST_POINTS positions."""
    log, start = ledger.log, recorder.start
    rows = {part: row for row, part in enumerate(COLOURS)}

    def row_of(id: int) -> int:
        category = log.category[id]
        if category is Category.temporary:
            return rows[BY_PHASE.get(log.phase[id], TEMPORARIES)]
        return rows[NAMES[category.value]]

    steps = len(log.order) - start
    change = np.zeros((len(COLOURS), steps + 1))
    for id in log.alive_at(start):
        change[row_of(id), 0] += log.bytes[id]
    for position, entry in enumerate(log.order[start:], 1):
        id = entry if entry >= 0 else ~entry
        change[row_of(id), position] += log.bytes[id] if entry >= 0 else -log.bytes[id]
    levels = np.cumsum(change, axis=1) / MIB
    kept = _kept(levels.sum(axis=0))
    used = [part for part in COLOURS if levels[rows[part]].any()]
    return Timeline(
        axis="allocations and their ends, in order",
        unit="MiB",
        events=steps,
        positions=[int(i) for i in kept],
        mib={part: [round(float(v), 4) for v in levels[rows[part]][kept]] for part in used},
        phases=recorder.bands,
        peak_position=max(0, log.peak_at - start),
        peak=ledger.peak(),
        evidence=evidence,
    )


def _kept(total: np.ndarray) -> np.ndarray:
    """Positions to keep: all, or the highest and the lowest of each piece, so that no peak is lost."""
    if len(total) <= MOST_POINTS:
        return np.arange(len(total))
    borders = np.linspace(0, len(total), MOST_POINTS // 2 + 1).astype(int)
    pieces = [(a, b) for a, b in pairwise(borders) if b > a]
    picked = {0, len(total) - 1}
    for a, b in pieces:
        picked |= {a + int(total[a:b].argmax()), a + int(total[a:b].argmin())}
    return np.array(sorted(picked))


def write(found: Timeline, folder: Path, title: str) -> list[Path]:
    """memory_timeline.png and memory_timeline.json in `folder`."""
    picture, data = folder / "memory_timeline.png", folder / "memory_timeline.json"
    write_json(found, data)
    FigureCanvasAgg(draw(found, title)).print_png(str(picture))
    return [picture, data]


def draw(found: Timeline, title: str) -> Figure:
    """Memory stacked by category, the phases below it, and the peak marked."""
    figure = Figure(figsize=(10, 5.2), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(16, 1), hspace=0.02)
    axes = figure.add_subplot(grid[0])
    below = figure.add_subplot(grid[1], sharex=axes)
    axes.stackplot(
        found.positions,
        list(found.mib.values()),
        colors=[COLOURS[part] for part in found.mib],
        labels=list(found.mib),
        step="post",
        linewidth=0,
    )
    _mark_peak(axes, found)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("device memory, MiB")
    axes.set_xlim(0, max(1, found.events))
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=False)
    handles, labels = axes.get_legend_handles_labels()
    small = {"fontsize": 8, "frameon": False, "title_fontsize": 8, "alignment": "left"}
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", title="alive", **small)
    phases = list(dict.fromkeys(band.phase for band in found.phases))
    patches = [Patch(color=PHASE_COLOURS.get(phase, "#999999"), label=phase) for phase in phases]
    figure.legend(handles=patches, loc="outside right lower", title="phase, below", **small)
    _draw_phases(below, found)
    below.set_xlabel(f"{found.axis} ({found.events} in one optimizer step)")
    return figure


def _mark_peak(axes: Axes, found: Timeline) -> None:
    left = found.peak_position < found.events / 2
    axes.plot([found.peak_position], [found.peak.mib], "v", color="black", markersize=6, clip_on=False)
    axes.annotate(
        f"peak {mib(found.peak.mib)}: {moment(found.peak)}",
        (found.peak_position, found.peak.mib),
        xytext=(8 if left else -8, 6),
        textcoords="offset points",
        ha="left" if left else "right",
        fontsize=8,
    )


def _draw_phases(axes: Axes, found: Timeline) -> None:
    for band in found.phases:
        axes.axvspan(band.start, band.stop, color=PHASE_COLOURS.get(band.phase, "#999999"), linewidth=0)
    axes.set_yticks([])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
