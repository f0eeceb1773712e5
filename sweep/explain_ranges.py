"""Named ranges for torch.profiler: one for each phase of a step, and the two directions of a transfer apart."""

from __future__ import annotations

from torch.autograd.profiler import record_function

from sweep.results import Phase
from sweep.step import FROM_HOST, TO_HOST, Phases

#: Around each optimizer step. The phases lie inside of it.
STEP = "optimizer step"
COPY_TO_HOST, COPY_FROM_HOST = "copy to host", "copy from host"
_DIRECTIONS = {TO_HOST: COPY_TO_HOST, FROM_HOST: COPY_FROM_HOST}


class Ranges:
    """A listener of `sweep.step.Phases` that opens a range of the profiler for each phase.

    A phase is left in the thread that entered it, and the thread that called backward() waits while autograd's own
    thread recomputes or copies: so the ranges of each thread nest, and one stack holds those of all.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._open: list[record_function] = []

    def enter_phase(self, phase: str) -> None:
        span = record_function(range_of(phase, self._phases.details[-1]))
        span.__enter__()
        self._open.append(span)

    def leave_phase(self, phase: str) -> None:
        self._open.pop().__exit__(None, None, None)


def range_of(phase: str, detail: str) -> str:
    """What the range of a phase is called (see sweep.findings.RANGES)."""
    return _DIRECTIONS.get(detail, COPY_FROM_HOST) if phase == Phase.transfer.value else phase
