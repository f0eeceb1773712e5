"""Times steps and their phases: on CUDA by events, on a CPU by a monotonic clock."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict

import torch

#: Milliseconds of a step, and by phase.
StepTime = tuple[float, dict[str, float]]


class Clock(ABC):
    """A listener of `sweep.workload.step.Phases`. A phase's time is its own, less that of the phases inside of it."""

    def __init__(self) -> None:
        self._stack: list[str] = []

    @abstractmethod
    def start(self) -> None:
        """A step begins."""

    @abstractmethod
    def stop(self) -> None:
        """The step has ended."""

    @abstractmethod
    def read(self) -> list[StepTime]:
        """The steps since the last read."""

    @abstractmethod
    def _charge(self) -> None:
        """What has passed since the last border belongs to the innermost phase."""

    def enter_phase(self, phase: str) -> None:
        self._charge()
        self._stack.append(phase)

    def leave_phase(self, phase: str) -> None:
        self._charge()
        self._stack.pop()


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


class CpuClock(Clock):
    """A monotonic clock."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[StepTime] = []
        self._by_phase: dict[str, float] = defaultdict(float)
        self._since = self._started = 0.0

    def start(self) -> None:
        self._by_phase = defaultdict(float)
        self._since = self._started = time.perf_counter()

    def stop(self) -> None:
        self._steps.append(((time.perf_counter() - self._started) * 1000, dict(self._by_phase)))

    def read(self) -> list[StepTime]:
        steps, self._steps = self._steps, []
        return steps

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self._by_phase[self._stack[-1]] += (now - self._since) * 1000
        self._since = now


class CudaClock(Clock):
    """CUDA events at the borders, read after one synchronisation: timing itself does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._marks: list[tuple[str, torch.cuda.Event]] = []  # charged phase, event at its end
        self._steps: list[tuple[torch.cuda.Event, list[tuple[str, torch.cuda.Event]], torch.cuda.Event]] = []
        self._begin = self._event()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def start(self) -> None:
        self._marks = []
        self._begin = self._event()

    def stop(self) -> None:
        self._steps.append((self._begin, self._marks, self._event()))

    def read(self) -> list[StepTime]:
        torch.cuda.synchronize(self._device)
        steps = []
        for begin, marks, end in self._steps:
            by_phase: dict[str, float] = defaultdict(float)
            last = begin
            for phase, event in marks:
                if phase:
                    by_phase[phase] += last.elapsed_time(event)
                last = event
            steps.append((begin.elapsed_time(end), dict(by_phase)))
        self._steps = []
        return steps

    def _charge(self) -> None:
        self._marks.append((self._stack[-1] if self._stack else "", self._event()))
