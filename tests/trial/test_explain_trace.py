"""Reading a trace, from made-up events whose answers are known: times in microseconds, as the profiler writes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sweep.trial.profile import Reading, load, merged, overlap, read

STEP = "optimizer step"


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


def read_host(*more: dict[str, Any]) -> Reading:
    return read([*HOST, *more], STEP)


def test_each_range_has_its_own_time_across_threads_and_the_sum_is_the_step() -> None:
    found = read_host()
    assert (found.steps, found.step_ms) == (1, 10.0)
    assert found.ranges_ms == pytest.approx({
        "data": 0.5, "forward": 2.8, "backward": 3.0, "recompute": 1.7, "copy to host": 0.2, "copy from host": 0.3,
        "optimizer": 1.0, "other": 0.5,
    })  # fmt: skip


def test_a_range_that_seems_to_outlive_the_one_around_it_is_cut() -> None:
    """Clocks of two threads may differ a little."""
    found = read([span(STEP, 0, 1000), span("backward", 100, 500), span("recompute", 300, 400, tid=2)], STEP)
    assert found.ranges_ms == pytest.approx({"backward": 0.2, "recompute": 0.3, "other": 0.5})


def test_ranges_outside_of_the_steps_count_for_no_step() -> None:
    found = read([*HOST, span(STEP, 20_000, 5000), span("forward", 20_000, 5000)], STEP)
    assert (found.steps, found.step_ms) == (2, 15.0)
    assert found.ranges_ms["forward"] == pytest.approx(7.8)


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


def test_without_kernels_nothing_is_said_of_a_device() -> None:
    found = read_host()
    assert not found.on_device and found.device_ms == {} and found.device_busy_ms == 0


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
    assert found.on_device
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


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_traces_are_read_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    content = json.dumps({"traceEvents": HOST}).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert load(tmp_path / name) == HOST
