"""A trace of real steps: its ranges are there and nest, it sums up, and the memory over a step peaks as measured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_workloads import config, data_of
from torch.profiler import profile

import sweep.trial.profile as module
from sweep.results import RANGES, Phase, Trace, from_dict, to_dict
from sweep.trial.measure import memory_pass
from sweep.trial.profile import (
    RANGE,
    SNAPSHOT,
    STEP,
    STEPS,
    TRACE,
    Ranges,
    allocator_snapshot,
    loop_of,
    merged,
    overlap,
    read,
    trace_trial,
)
from sweep.workload.step import FROM_HOST, TO_HOST, Phases

CPU = torch.device("cpu")
#: The ranges that each strategy must have, beside those of every step.
EXTRA: dict[str, set[str]] = {
    "baseline": set(),
    "micro_batch": set(),
    "hybrid_selective": {"recompute", "copy to host", "copy from host"},  # hooks and dispatch modes at once
    "everything": {"recompute", "copy to host", "copy from host"},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Path]]:
    found = {}
    for strategy in EXTRA:
        folder = tmp_path_factory.mktemp(strategy)
        c = config("gpt", strategy)
        found[strategy] = trace_trial(c, CPU, data_of(c.workload), folder, strategy), folder
    return found


def ranges(folder: Path) -> list[dict[str, Any]]:
    """As Perfetto reads them."""
    found = json.loads(gzip.decompress((folder / TRACE).read_bytes()))["traceEvents"]
    return [e for e in found if e.get("cat") == RANGE and e["ph"] == "X" and e["name"] in {*RANGES, STEP}]


#: What each range lies in.
WITHIN = {
    "forward": {STEP},
    "recompute": {"backward"},
    "copy to host": {"forward", "recompute"},
    "copy from host": {"backward", "recompute"},
}


@pytest.mark.parametrize("strategy", EXTRA)
def test_the_ranges_of_each_strategy_are_there_and_lie_in_those_they_belong_to(
    traces: dict[str, tuple[Trace, Path]], strategy: str
) -> None:
    found = ranges(traces[strategy][1])
    assert {e["name"] for e in found} == {STEP, "data", "forward", "backward", "optimizer"} | EXTRA[strategy]
    around: list[tuple[str, float]] = []
    for event in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
        begin, end, name = event["ts"], event["ts"] + event["dur"], event["name"]
        while around and around[-1][1] <= begin:
            around.pop()
        assert not around or end <= around[-1][1], name
        assert around[-1][0] in WITHIN[name] if name in WITHIN else len(around) <= 1
        around.append((name, end))


def test_ranges_follow_the_phases_also_out_of_an_error() -> None:
    phases = Phases()
    with profile() as profiler, phases.listening(Ranges(phases)):
        with pytest.raises(ZeroDivisionError), phases(Phase.forward), phases(Phase.transfer, TO_HOST):
            raise ZeroDivisionError
        with phases(Phase.backward), phases(Phase.transfer, FROM_HOST):
            pass
    counts = {e.key: e.count for e in profiler.key_averages()}
    assert {name: counts[name] for name in ("forward", "copy to host", "backward", "copy from host")} == {
        "forward": 1, "copy to host": 1, "backward": 1, "copy from host": 1,
    }  # fmt: skip


@pytest.mark.parametrize("strategy", EXTRA)
def test_the_summary_adds_up_per_step(traces: dict[str, tuple[Trace, Path]], strategy: str) -> None:
    found, folder = traces[strategy]
    assert found.steps == STEPS and found.evidence == "cpu" and not found.failed
    assert sum(found.ranges_ms.values()) == pytest.approx(found.step_ms, rel=1e-3)
    assert EXTRA[strategy] <= set(found.ranges_ms) and found.ranges_ms["other"] >= 0
    assert found.device_busy_ms is None and found.copy_ms is None and not found.device_ms  # there is no device
    assert set(found.files) == {TRACE, "memory_timeline.png", "memory_timeline.json"}
    assert all((folder / name).stat().st_size > 0 for name in found.files)
    assert from_dict(Trace, to_dict(found)) == found


def test_recomputation_and_micro_steps_call_more_operators(traces: dict[str, tuple[Trace, Path]]) -> None:
    calls = {strategy: found.operators for strategy, (found, _) in traces.items()}
    assert calls["micro_batch"] > 1.5 * calls["baseline"]
    assert calls["hybrid_selective"] > 1.05 * calls["baseline"]
    assert traces["micro_batch"][0].micro_steps == 4 and traces["baseline"][0].micro_steps == 1


@pytest.mark.parametrize("strategy", EXTRA)
def test_the_memory_over_a_step_peaks_as_measured(traces: dict[str, tuple[Trace, Path]], strategy: str) -> None:
    c = config("gpt", strategy)
    peak = memory_pass(c, CPU, data_of(c.workload)).peak
    data = json.loads((traces[strategy][1] / "memory_timeline.json").read_text())
    totals = [sum(values) for values in zip(*data["mib"].values())]
    assert max(totals) == pytest.approx(peak.mib, abs=1e-3) == pytest.approx(data["peak"]["mib"], abs=1e-3)
    assert totals[data["positions"].index(data["peak_position"])] == max(totals)
    assert (data["peak"]["phase"], data["evidence"]) == (peak.phase, "cpu")
    assert ("recomputed" in data["mib"]) == ("recompute" in EXTRA[strategy])


def test_progress_is_told_and_an_account_that_fails_is_said_while_the_trace_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "write_json", fails)
    seen: list[tuple[int, int]] = []
    c = config("gpt")
    progress = lambda done, total, _: seen.append((done, total))
    found = trace_trial(c, CPU, data_of(c.workload), tmp_path, "baseline", progress)
    total = module.WARMUP_STEPS + 1 + STEPS + 2
    assert seen == [(i + 1, total) for i in range(total)]
    assert found.files == [TRACE] and found.ranges_ms
    assert list(found.failed.values()) == ["OSError: no space left"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_allocators_history_is_recorded_over_one_step_and_switched_off_with_a_mocked_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    calls: list[object] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    c = config("gpt")
    with loop_of(c, CPU, data_of(c.workload)) as loop:
        if fails:
            with pytest.raises(OSError):
                allocator_snapshot(loop, tmp_path / "missing" / SNAPSHOT)
        else:
            allocator_snapshot(loop, tmp_path / SNAPSHOT)
            assert (tmp_path / SNAPSHOT).read_bytes() == b"snapshot"
    assert calls == ["all", None]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["baseline", "hybrid"])
def test_on_a_gpu_kernels_copies_and_the_snapshot_are_there(tmp_path: Path, strategy: str) -> None:
    c = config("gpt", strategy, device={"name": "auto", "type": "cuda"})
    found = trace_trial(c, torch.device("cuda"), data_of(c.workload), tmp_path, strategy)
    assert not found.failed
    assert found.device_busy_ms is not None and 0 < found.device_busy_ms <= found.step_ms
    assert {"forward", "backward", "optimizer"} <= set(found.device_ms)
    assert (tmp_path / SNAPSHOT).stat().st_size > 0
    if strategy == "hybrid":
        assert found.copy_ms is not None and found.copy_hidden_ms is not None
        assert 0 <= found.copy_hidden_ms <= found.copy_ms and found.copy_ms > 0
        assert found.device_ms["recompute"] > 0


# -- reading made-up events: times in microseconds, as the profiler writes them ---------------------------------------


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def span(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return event("user_annotation", name, ts, dur, tid)


#: One step of 10 ms: recomputation and a copy run in autograd's own thread (2) while thread 1 waits in backward.
HOST = [
    span(STEP, 0, 10_000),
    span("data", 0, 500),
    span("forward", 500, 3000),
    span("copy to host", 1000, 200),
    span("backward", 3600, 5000),
    span("recompute", 4000, 2000, tid=2),
    span("copy from host", 4500, 300, tid=2),
    span("optimizer", 8600, 1000),
    span("ProfilerStep#3", 0, 10_000),
]


def read_host(*more: dict[str, Any]) -> Trace:
    return read([*HOST, *more])


def test_each_range_has_its_own_time_across_threads_and_the_sum_is_the_step() -> None:
    found = read_host()
    assert (found.steps, found.step_ms) == (1, 10.0)
    assert found.ranges_ms == pytest.approx({
        "data": 0.5, "forward": 2.8, "backward": 3.0, "recompute": 1.7, "copy to host": 0.2, "copy from host": 0.3,
        "optimizer": 1.0, "other": 0.5,
    })  # fmt: skip
    assert found.device_ms == {} and found.device_busy_ms is None  # no kernels, so nothing is said of a device


def test_a_range_that_seems_to_outlive_the_one_around_it_is_cut() -> None:
    """Clocks of two threads may differ a little."""
    found = read([span(STEP, 0, 1000), span("backward", 100, 500), span("recompute", 300, 400, tid=2)])
    assert found.ranges_ms == pytest.approx({"backward": 0.2, "recompute": 0.3, "other": 0.5})


def test_all_is_the_mean_of_the_steps() -> None:
    found = read_host(span(STEP, 20_000, 5000), span("forward", 20_000, 5000))
    assert (found.steps, found.step_ms) == (2, 7.5)
    assert found.ranges_ms["forward"] == pytest.approx(3.9)


def test_operators_are_counted_as_the_host_called_them() -> None:
    found = read_host(
        event("cpu_op", "aten::linear", 600, 100),
        event("cpu_op", "aten::addmm", 610, 50),  # called by linear
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 4100, 400, tid=2),
        event("cpu_op", "aten::mm", 4100, 100, tid=2),
        event("cpu_op", "aten::mm", 4200, 100, tid=2),  # right after the one before
        event("cpu_op", "aten::mm", 4150, 40),  # at the same time in another thread
        event("cpu_op", "aten::mm", 11_000, 40),  # after the step
    )
    assert found.operators == 4


def test_kernels_belong_to_the_range_that_launched_them_whenever_they_run() -> None:
    found = read_host(
        event("cuda_runtime", "cudaLaunchKernel", 600, 5, correlation=1),
        event("kernel", "gemm", 5000, 1000, tid=7, correlation=1),  # runs while the host is in recompute
        event("cuda_runtime", "cudaLaunchKernel", 4100, 5, tid=2, correlation=2),
        event("kernel", "gemm", 5500, 1000, tid=8, correlation=2),  # on another stream, half of it beside the first
        event("cuda_driver", "cuLaunchKernel", 8700, 5, correlation=3),
        event("kernel", "adam", 9000, 300, tid=7, correlation=3),
        event("cuda_runtime", "cudaMemsetAsync", 8800, 5, correlation=4),
        event("gpu_memset", "Memset (Device)", 9400, 100, tid=7, correlation=4),
        event("kernel", "warm-up", 100, 400, tid=7, correlation=99),  # launched before the trace began
    )
    assert found.device_ms == pytest.approx({"forward": 1.0, "recompute": 1.0, "optimizer": 0.4})
    assert found.device_busy_ms == pytest.approx(1.5 + 0.3 + 0.1)


def test_only_the_strategys_copies_count_and_as_hidden_what_ran_beside_kernels() -> None:
    def copy(correlation: int, at: float, ts: float, dur: float, kind: str) -> list[dict[str, Any]]:
        return [
            event("cuda_runtime", "cudaMemcpyAsync", at, 5, correlation=correlation),
            event("gpu_memcpy", f"Memcpy {kind}", ts, dur, tid=9, correlation=correlation),
        ]

    found = read_host(
        event("cuda_runtime", "cudaLaunchKernel", 600, 5, correlation=1),
        event("kernel", "gemm", 1000, 1000, tid=7, correlation=1),
        *copy(2, 1010, 1500, 1000, "DtoH (Device -> Pinned)"),  # half of it beside the kernel
        *copy(3, 4600, 5000, 400, "HtoD (Pinned -> Device)"),  # beside nothing
        *copy(4, 100, 150, 300, "HtoD (Pageable -> Device)"),  # the batch's
        *copy(5, 700, 3000, 100, "DtoD (Device -> Device)"),  # a kernel's work
    )
    assert found.copy_ms == pytest.approx(1.4)
    assert found.copy_hidden_ms == pytest.approx(0.5)
    assert found.device_busy_ms == pytest.approx(1.1)


def test_spans_are_merged_and_overlaps_measured() -> None:
    busy = merged([(5, 6), (0, 2), (1, 3), (3, 4)])
    assert busy == [(0, 4), (5, 6)]
    assert overlap((2, 5.5), busy) == 2.5
    assert overlap((4, 5), busy) == 0 == overlap((7, 9), busy) == overlap((0, 1), [])
