"""The machine's state: what others keep busy is really measured; cards are made up, as there is none here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_workloads import config, data_of

import sweep.trial.machine as module
from sweep.results import MIB
from sweep.trial.machine import Gpu, Watch, handle_of, others_disturb
from sweep.trial.measure import measure

CPU = torch.device("cpu")


def work(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(1000))


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps a core busy and belongs to somebody else: its parent has ended."""
    code = (
        "import os, sys, time\n"
        "pid = os.fork()\n"
        "if pid:\n    print(pid, flush=True)\n    os._exit(0)\n"
        "os.setsid()\n"
        "until = time.time() + 20\n"
        "while time.time() < until: sum(range(1000))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.wait()
    yield parent
    os.kill(pid, 9)


# -- cores -----------------------------------------------------------------------------------------------------------


def test_what_others_keep_busy_is_seen_and_what_we_do_is_not_theirs(neighbour: subprocess.Popen[bytes]) -> None:
    watch = Watch(CPU)
    watch.begin()
    work(1.0)
    found = watch.end()
    assert found.cpu_others is not None
    cores = len(module._cores())
    # One core each, as far as there are two; on one core, or on a busy machine, they share.
    assert 0.25 <= found.cpu_others <= cores
    assert found.gpu_clock_mhz is None
    if cores <= 2:
        assert found.disturbed == ["cpu_others"]


def test_own_work_of_this_process_and_its_children_counts_as_own() -> None:
    before = module._own_seconds()
    work(0.5)
    child = subprocess.Popen([sys.executable, "-c", "import time; t=time.process_time\nwhile t() < 0.5: pass"])
    child.wait()  # its time is that of a child that has ended
    assert 0.55 <= module._own_seconds() - before <= 2.5  # a busy machine gives less
    assert module._busy_seconds() > 0


def test_too_short_a_time_says_nothing_about_others() -> None:
    watch = Watch(CPU)
    watch.begin()
    assert watch.end().cpu_others is None


@pytest.mark.parametrize(("others", "own", "cores", "expected"), [
    (0.0, 1.0, 2, False), (0.2, 1.9, 2, False),  # less than a quarter of a core is noise
    (1.0, 1.0, 2, True), (0.4, 1.0, 2, False), (0.6, 1.0, 2, True),  # of the core that is left, more than half
    (0.3, 1.7, 2, True),  # both cores are wanted
    (10.0, 1.0, 64, False), (40.0, 1.0, 64, True), (2.0, 60.0, 64, False), (6.0, 56.0, 64, True),
    (1.0, 1.0, 1, True),
])  # fmt: skip
def test_others_disturb_where_they_take_what_is_needed(others: float, own: float, cores: int, expected: bool) -> None:
    assert others_disturb(others, own, cores) is expected


def test_each_run_of_a_measurement_knows_its_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("begin", "look", "end"):
        real = getattr(Watch, name)
        monkeypatch.setattr(Watch, name, lambda self, name=name, real=real: seen.append(name) or real(self))
    c = config("gpt", measure={"steps": 2, "repeats": 3, "ledger": False, "eval_batches": 0})
    m = measure(c, CPU, data_of(c.workload))
    assert seen == ["begin", "look", "look", "look", "end"]  # around and between the windows, never inside of one
    assert m.runs[0].conditions is not None


# -- cards, made up --------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


def process(pid: int, mib: float | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else int(mib * MIB))


class MadeUpNvml:
    """Answers as NVML does; what is not in `answers` is not supported."""

    NVML_CLOCK_SM = 1
    NVMLError = NVMLError

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def ask(handle: Any, *_: Any) -> Any:
            self.asked.append((name, handle))
            if name not in self.answers:
                raise NVMLError("not supported")
            answer = self.answers[name]
            if isinstance(answer, list) and name != "nvmlDeviceGetComputeRunningProcesses":
                answer = answer.pop(0) if len(answer) > 1 else answer[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        if not name.startswith("nvml"):
            raise AttributeError(name)
        return ask


def quiet(**changes: Any) -> MadeUpNvml:
    answers = {
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        "nvmlDeviceGetClockInfo": 1800,
        "nvmlDeviceGetComputeRunningProcesses": [process(os.getpid(), 3000)],
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=4000 * MIB),
    }
    return MadeUpNvml(**{k: v for k, v in (answers | changes).items() if v is not ...})


def seen(nvml: MadeUpNvml, looks: int = 1, own_mib: float = 2500.0) -> Any:
    watch = Watch(CPU, Gpu(nvml, "card", lambda: own_mib))
    watch.begin()
    for _ in range(looks):
        watch.look()
    return watch.end()


def test_a_made_up_quiet_card_is_read_and_not_disturbed() -> None:
    found = seen(quiet())
    assert found.gpu_clock_mhz == 1800
    assert (found.gpu_other_processes, found.gpu_other_mib) == (0, 0)
    assert (found.gpu_throttled, found.disturbed) == ([], [])


def test_a_made_up_cards_lowest_clock_is_kept() -> None:
    assert seen(quiet(nvmlDeviceGetClockInfo=[1800, 1500, 1700]), looks=3).gpu_clock_mhz == 1500


def test_a_made_up_idle_cards_clock_is_not_one_under_load() -> None:
    reasons = [0x1, 0x4]
    found = seen(quiet(nvmlDeviceGetCurrentClocksEventReasons=reasons, nvmlDeviceGetClockInfo=[1750]), looks=2)
    assert found.gpu_clock_mhz == 1750
    found = seen(quiet(nvmlDeviceGetCurrentClocksEventReasons=0x1, nvmlDeviceGetClockInfo=210))
    assert found.gpu_clock_mhz is None


@pytest.mark.parametrize(("reasons", "throttled", "disturbs"), [
    (0x20, ["software thermal slowdown"], True), (0x48, ["hardware slowdown", "hardware thermal slowdown"], True),
    (0x80, ["power brake"], True), (0x4, ["power cap"], False), (0x2 | 0x10 | 0x100, [], False),
])  # fmt: skip
def test_a_made_up_card_that_is_held_back_says_why(reasons: int, throttled: list[str], disturbs: bool) -> None:
    found = seen(quiet(nvmlDeviceGetCurrentClocksEventReasons=reasons))
    assert found.gpu_throttled == throttled
    assert found.disturbed == (["gpu_throttled"] if disturbs else [])


def test_a_made_up_driver_that_only_knows_the_older_name_is_understood() -> None:
    older = quiet(nvmlDeviceGetCurrentClocksEventReasons=..., nvmlDeviceGetCurrentClocksThrottleReasons=0x40)
    assert seen(older).gpu_throttled == ["hardware thermal slowdown"]


def test_other_processes_on_a_made_up_card_disturb() -> None:
    mine, parent = process(os.getpid(), 3000), process(os.getppid(), 300)  # the session may hold a context
    found = seen(quiet(nvmlDeviceGetComputeRunningProcesses=[mine, parent, process(1 << 30, 900)]))
    assert (found.gpu_other_processes, found.gpu_other_mib) == (1, 900)
    assert found.disturbed == ["gpu_processes"]
    unknown = [mine, process(1 << 30, None), process((1 << 30) + 1, 10)]
    found = seen(quiet(nvmlDeviceGetComputeRunningProcesses=unknown))
    assert (found.gpu_other_processes, found.gpu_other_mib) == (2, None)  # [N/A] under some drivers
    assert found.disturbed == ["gpu_processes"]


def test_in_a_container_a_made_up_card_lists_ids_of_the_host() -> None:
    """None of them is ours: the one that holds about what we hold is."""
    foreign = [process(1 << 30, 2900), process((1 << 30) + 1, 700)]
    found = seen(quiet(nvmlDeviceGetComputeRunningProcesses=foreign), own_mib=2500)
    assert (found.gpu_other_processes, found.gpu_other_mib) == (1, 700)
    found = seen(quiet(nvmlDeviceGetComputeRunningProcesses=[process(1 << 30, None)]))
    assert (found.gpu_other_processes, found.gpu_other_mib) == (0, 0)


def test_a_made_up_card_that_lists_nobody_is_judged_by_the_memory_that_is_gone() -> None:
    found = seen(quiet(nvmlDeviceGetComputeRunningProcesses=[]), own_mib=3000)
    assert (found.gpu_other_processes, found.gpu_other_mib, found.disturbed) == (None, 0, [])
    full = quiet(nvmlDeviceGetComputeRunningProcesses=[], nvmlDeviceGetMemoryInfo=SimpleNamespace(used=20_000 * MIB))
    found = seen(full, own_mib=3000)
    assert found.gpu_other_mib == 20_000 - 3000 - module.CONTEXT_MIB
    assert found.disturbed == ["gpu_memory"]


def test_a_made_up_card_that_tells_nothing_leaves_everything_open() -> None:
    found = seen(MadeUpNvml())
    assert found.gpu_clock_mhz is None
    assert (found.gpu_other_processes, found.gpu_other_mib) == (None, None)
    assert (found.gpu_throttled, found.disturbed) == ([], [])


def test_a_made_up_slice_of_a_card_has_its_own_memory_and_the_cards_clock() -> None:
    nvml = quiet(nvmlDeviceGetDeviceHandleFromMigDeviceHandle="whole card")
    found = seen(nvml)
    asked = dict(nvml.asked)
    assert asked["nvmlDeviceGetClockInfo"] == "whole card"
    assert asked["nvmlDeviceGetComputeRunningProcesses"] == "card"
    assert found.gpu_clock_mhz == 1800


def test_a_made_up_card_is_found_by_its_uuid_whatever_is_visible() -> None:
    class Known:
        NVMLError = NVMLError

        def __init__(self, *names: str) -> None:
            self.names = names

        def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
            if name not in self.names:
                raise NVMLError("not found")
            return f"handle of {name}"

    assert handle_of(Known("GPU-1-2"), "1-2") == "handle of GPU-1-2"
    assert handle_of(Known("MIG-1-2"), "1-2") == "handle of MIG-1-2"
    assert handle_of(Known("GPU-1-2"), "GPU-1-2") == "handle of GPU-1-2"
    assert handle_of(Known("GPU-other"), "1-2") is None


def test_without_a_driver_there_is_no_made_up_card() -> None:
    """The real library, on a machine that may have none."""
    module._nvml.cache_clear()
    assert module._nvml() is None or hasattr(module._nvml(), "nvmlDeviceGetHandleByUUID")
    if module._nvml() is None:
        assert Gpu.of(torch.device("cuda", 0)) is None
