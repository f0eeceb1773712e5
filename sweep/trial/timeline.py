"""The memory over one optimizer step, by part, from the ledger's events.

The horizontal axis is not time: a position is one allocation or its end, in order. The ledger slows a step down
unevenly, so that times under it would mean nothing; the order is what the real step has too.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from sweep.memory.ledger import Ledger
from sweep.results import MIB, Band, Timeline, part_of

#: Positions that are kept, about; a large model has a hundred thousand.
MOST_POINTS = 2000


class Recorder:
    """Notes where each phase begins and ends in the ledger's log. A listener of `sweep.workload.step.Phases`."""

    def __init__(self, ledger: Ledger) -> None:
        self._order = ledger.log.order
        self._stack: list[str] = []
        self.begin()

    def begin(self) -> None:
        """The step that counts begins."""
        self.bands: list[Band] = []
        self._since = self.start = len(self._order)

    def enter_phase(self, phase: str) -> None:
        self._close()
        self._stack.append(phase)

    def leave_phase(self, phase: str) -> None:
        self._close()
        self._stack.pop()

    def _close(self) -> None:
        start, stop = self._since - self.start, len(self._order) - self.start
        self._since = len(self._order)
        if not self._stack or stop == start:
            return
        last = self.bands[-1] if self.bands else None
        if last is not None and (last.phase, last.stop) == (self._stack[-1], start):
            last.stop = stop
        else:
            self.bands.append(Band(self._stack[-1], start, stop))


def timeline(ledger: Ledger, recorder: Recorder, evidence: str) -> Timeline:
    """The memory from `recorder.begin()` on, at no more than about MOST_POINTS positions."""
    log, start = ledger.log, recorder.start
    events = log.order[start:]
    changes: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(events) + 1))

    def change(id: int) -> np.ndarray:
        return changes[part_of(log.category[id].value, log.phase[id])]

    for id in log.alive_at(start):
        change(id)[0] += log.bytes[id]
    for position, entry in enumerate(events, 1):
        id = entry if entry >= 0 else ~entry
        change(id)[position] += log.bytes[id] if entry >= 0 else -log.bytes[id]
    levels = {part: np.cumsum(values) / MIB for part, values in changes.items()}
    kept = _kept(sum(levels.values(), np.zeros(len(events) + 1)))
    return Timeline(
        events=len(events),
        positions=kept.tolist(),
        mib={part: values[kept].round(4).tolist() for part, values in levels.items()},
        phases=recorder.bands,
        peak_position=max(0, log.peak_at - start),
        peak=ledger.peak(),
        evidence=evidence,
    )


def _kept(total: np.ndarray) -> np.ndarray:
    """Positions to keep: all, or the highest and the lowest of each piece, so that no peak is lost."""
    if len(total) <= MOST_POINTS:
        return np.arange(len(total))
    picked = {0, len(total) - 1}
    for a, b in pairwise(np.linspace(0, len(total), MOST_POINTS // 2 + 1).astype(int)):
        picked |= {a + int(total[a:b].argmax()), a + int(total[a:b].argmin())}
    return np.array(sorted(picked))
