"""The machine's state around timed steps: what others keep busy, and on CUDA the card's clock, heat and other users.

Read before the timed steps, between their windows and after them, never while they run: a sampling thread would be a
disturbance of its own. On CUDA a reading at the end of a window, before the device is waited for, is one under load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import psutil
import torch

from sweep.results import MIB, Conditions

#: Others disturb where they keep busy at least this many cores, and this share of those that the trial uses, ...
CORES, CORES_RATIO = 0.25, 0.05
#: ... and more than this share of the cores that the trial leaves: with plenty to spare, nobody waits for them.
LEFT_RATIO = 0.5
#: The system counts in ticks of 10 ms, so that a shorter time says nothing about others.
LEAST_S = 0.25
#: What a context, the libraries' workspaces and the driver may take of a card beside what torch's allocator reserves.
CONTEXT_MIB = 1536.0


class Watch:
    """Looks at the machine around the timed steps of one run."""

    def __init__(self, device: torch.device, gpu: Gpu | None = None) -> None:
        self._gpu = gpu if gpu is not None or device.type != "cuda" else Gpu.of(device)
        self._started = self._busy_s = self._own_s = 0.0

    def begin(self) -> None:
        """Right before the first timed step."""
        if self._gpu is not None:
            self._gpu.look_around()
        self._started, self._busy_s, self._own_s = time.perf_counter(), _busy_seconds(), _own_seconds()

    def look(self) -> None:
        """At the end of a window of timed steps, while a GPU still works on the last of them."""
        if self._gpu is not None:
            self._gpu.look()

    def end(self) -> Conditions:
        """After the last timed step: what was seen, and what of it disturbs."""
        wall_s = time.perf_counter() - self._started
        own = max(0.0, _own_seconds() - self._own_s) / max(wall_s, 1e-9)
        busy = (_busy_seconds() - self._busy_s) / max(wall_s, 1e-9)
        found = Conditions() if self._gpu is None else self._gpu.look_around()
        if wall_s >= LEAST_S:
            found.cpu_others = max(0.0, busy - own)
            found.cpu_cores = len(_cores())
            if others_disturb(found.cpu_others, own, found.cpu_cores):
                found.disturbed.insert(0, "cpu_others")
        return found


def others_disturb(others: float, own: float, cores: int) -> bool:
    """Whether what others keep busy gets into the way. All in cores; `cores` are those that this process may use."""
    noticeable = others >= CORES and others >= CORES_RATIO * own
    return noticeable and others > LEFT_RATIO * max(0.0, cores - own)


def _cores() -> list[int]:
    try:
        return psutil.Process().cpu_affinity()
    except (AttributeError, psutil.Error):  # not on this system
        return list(range(psutil.cpu_count() or 1))


def _busy_seconds() -> float:
    """Core seconds that the cores which this process may use have worked, for whomever."""
    each, names = psutil.cpu_times(percpu=True), ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(each[i], name, 0.0) for i in _cores() if i < len(each) for name in names)  # guest is in user


def _own_seconds() -> float:
    """Core seconds of this process, of those that it started, and of those that started it (the session)."""
    own = psutil.Process()
    total = sum(own.cpu_times()[:4])  # user, system, and the same of children that have ended
    for others, fields in ((own.children(recursive=True), 4), (own.parents(), 2)):
        for process in others:
            with suppress(psutil.Error):
                total += sum(process.cpu_times()[:fields])
    return total


class Gpu:
    """One card as the driver's management library (NVML) sees it. What it does not tell stays None."""

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """The card behind a torch device, found by its UUID: NVML counts all cards, CUDA_VISIBLE_DEVICES or not."""
        nvml = _nvml()
        handle = None if nvml is None else handle_of(nvml, str(torch.cuda.get_device_properties(device).uuid))
        return None if handle is None else cls(nvml, handle, lambda: torch.cuda.memory_reserved(device) / MIB)

    def __init__(self, nvml: Any, handle: Any, own_mib: Callable[[], float]) -> None:
        self._nvml, self._handle, self._own_mib = nvml, handle, own_mib
        # A slice of a card (MIG) has memory and processes of its own; the clock is that of the whole card.
        self._card = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle
        self._found, self._held_back = Conditions(), False

    def look(self) -> None:
        """The clock while it works; cheap enough for the end of a window."""
        f = self._found
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", self._card)
        if reasons is None:  # a driver older than this name
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self._card) or 0
        f.gpu_throttled += [w for bit, w in THROTTLING.items() if reasons & bit and w not in f.gpu_throttled]
        self._held_back |= any(reasons & bit for bit in THROTTLING if bit != POWER_CAP)
        clock = self._ask("nvmlDeviceGetClockInfo", self._card, self._nvml.NVML_CLOCK_SM)
        if clock is not None and not reasons & IDLE:  # between two steps the clock falls, which says nothing of them
            f.gpu_clock_mhz = clock if f.gpu_clock_mhz is None else min(f.gpu_clock_mhz, clock)

    def look_around(self) -> Conditions:
        """Who else uses it. Returns what was seen so far."""
        f, (others, others_mib) = self._found, self._others()
        f.gpu_other_processes = None if others is None else max(others, f.gpu_other_processes or 0)
        f.gpu_other_mib = max((v for v in (f.gpu_other_mib, others_mib) if v is not None), default=None)
        f.disturbed = ["gpu_processes"] if f.gpu_other_processes else ["gpu_memory"] if f.gpu_other_mib else []
        f.disturbed += ["gpu_throttled"] if self._held_back else []
        return f

    def _others(self) -> tuple[int | None, float | None]:
        """Other processes that compute on it and their memory in MiB, as far as can be known."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", self._handle)
        if processes:
            own = psutil.Process()
            family = {p.pid for p in (own, *own.children(recursive=True), *own.parents())}
            others = [p for p in processes if p.pid not in family]
            if len(others) == len(processes):
                # Seen from inside of a container the ids are the host's. One of them is this process: the one whose
                # memory is nearest to what was reserved here.
                own_mib = self._own_mib()
                others.remove(min(others, key=lambda p: abs((p.usedGpuMemory or 0) / MIB - own_mib)))
            sizes = [p.usedGpuMemory for p in others]
            return len(others), None if None in sizes else sum(sizes) / MIB
        # Not even this process is listed, so that others cannot be, either; their memory shows in what is left.
        memory = self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        return None, None if memory is None else max(0.0, memory.used / MIB - self._own_mib() - CONTEXT_MIB)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """None where the driver or the card does not tell, or may not be asked."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None


#: NVML's reasons for a lower clock (nvml.h, nvmlClocksEventReasons). A power cap does not disturb by itself: many cards
#: always run at theirs, and where it costs clock the comparison of clocks tells.
IDLE, POWER_CAP = 0x1, 0x4
THROTTLING = {
    POWER_CAP: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def handle_of(nvml: Any, uuid: str) -> Any:
    """NVML's handle of a card or of a slice of one. uuid: as torch gives it, without or with its prefix."""
    for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
    return None


@cache
def _nvml() -> Any:
    """The library, started once per process; None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or no permission
        return None
    return pynvml
