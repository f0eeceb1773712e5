"""A trace of real steps: its ranges are there and nest, it sums up, and the memory over a step peaks as measured."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_workloads import config, data_of

import sweep.trial.profile as module
from sweep.results import RANGES, Trace, from_dict, to_dict
from sweep.trial.measure import ledger_pass
from sweep.trial.profile import RANGE, SNAPSHOT, STEP, STEPS, TRACE, allocator_snapshot, load, trace_trial

CPU = torch.device("cpu")
#: The ranges that each strategy must have, beside those of every step.
EXTRA = {
    "baseline": set(),
    "micro_batch": set(),
    "checkpoint": {"recompute"},
    "save_on_cpu": {"copy to host", "copy from host"},
    "everything": {"recompute", "copy to host", "copy from host"},
}
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Path]]:
    found = {}
    for strategy in EXTRA:
        folder = tmp_path_factory.mktemp(strategy)
        c = config("gpt", strategy)
        found[strategy] = trace_trial(c, CPU, data_of(c.workload), folder, name=strategy), folder
    return found


@cache
def ranges(folder: Path) -> Events:
    named = {*RANGES, STEP}
    return [e for e in load(folder / TRACE) if e.get("cat") == RANGE and e["ph"] == "X" and e["name"] in named]


@pytest.mark.parametrize("strategy", EXTRA)
def test_the_ranges_of_each_strategy_are_there_and_nest_in_their_thread(
    traces: dict[str, tuple[Trace, Path]], strategy: str
) -> None:
    by_thread: dict[Any, Events] = defaultdict(list)
    for event in ranges(traces[strategy][1]):
        by_thread[event["tid"]].append(event)
    names = {event["name"] for events in by_thread.values() for event in events}
    assert names == {STEP, "data", "forward", "backward", "optimizer"} | EXTRA[strategy]
    for events in by_thread.values():
        open_until: list[float] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1], event["name"]
            open_until.append(end)


@pytest.mark.parametrize(("inner", "outer"), [
    ("forward", {STEP}),
    ("recompute", {"backward"}),
    ("copy to host", {"forward", "recompute"}),
    ("copy from host", {"backward", "recompute"}),
])  # fmt: skip
def test_each_range_lies_in_the_one_it_belongs_to(
    traces: dict[str, tuple[Trace, Path]], inner: str, outer: set[str]
) -> None:
    events = ranges(traces["everything"][1])
    around = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in outer]
    for event in events:
        if event["name"] == inner:
            assert any(begin <= event["ts"] and event["ts"] + event["dur"] <= end for begin, end in around)


@pytest.mark.parametrize("strategy", EXTRA)
def test_the_summary_adds_up_per_step(traces: dict[str, tuple[Trace, Path]], strategy: str) -> None:
    found, folder = traces[strategy]
    assert found.steps == STEPS and found.evidence == "cpu"
    assert sum(found.ranges_ms.values()) == pytest.approx(found.step_ms, rel=1e-3)
    assert EXTRA[strategy] <= set(found.ranges_ms) and found.ranges_ms["other"] >= 0
    assert found.device_busy_ms is None and found.copy_ms is None and not found.device_ms  # there is no device
    assert found.files == [TRACE, "memory_timeline.png", "memory_timeline.json"]
    assert all((folder / name).stat().st_size > 0 for name in found.files)
    assert not found.notes
    assert from_dict(Trace, to_dict(found)) == found


def test_recomputation_and_micro_steps_call_more_operators(traces: dict[str, tuple[Trace, Path]]) -> None:
    calls = {strategy: found.operators for strategy, (found, _) in traces.items()}
    assert calls["checkpoint"] > 1.05 * calls["baseline"]
    assert calls["micro_batch"] > 1.5 * calls["baseline"]
    assert traces["micro_batch"][0].micro_steps == 4 and traces["baseline"][0].micro_steps == 1


def test_the_trace_is_chrome_json_that_perfetto_opens(traces: dict[str, tuple[Trace, Path]]) -> None:
    """What the format asks for: an object with traceEvents, complete events with number times and string names."""
    content = json.loads(gzip.decompress((traces["everything"][1] / TRACE).read_bytes()))
    complete = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert len(complete) > 100
    for event in complete:
        assert isinstance(event["name"], str) and event["dur"] >= 0
        assert all(isinstance(event[key], (int, float)) for key in ("ts", "dur"))
        assert "pid" in event and "tid" in event


@pytest.mark.parametrize("strategy", EXTRA)
def test_the_memory_over_a_step_peaks_as_measured(traces: dict[str, tuple[Trace, Path]], strategy: str) -> None:
    c = config("gpt", strategy)
    peak = ledger_pass(c, CPU, data_of(c.workload), None)
    data = json.loads((traces[strategy][1] / "memory_timeline.json").read_text())
    totals = [sum(values) for values in zip(*data["mib"].values())]
    assert max(totals) == pytest.approx(peak.mib, abs=1e-3) == pytest.approx(data["peak"]["mib"], abs=1e-3)
    at = data["positions"].index(data["peak_position"])
    assert totals[at] == max(totals)
    assert data["peak"]["phase"] == peak.phase
    assert data["evidence"] == "cpu" and data["unit"] == "MiB"


@pytest.mark.parametrize("strategy", ["checkpoint_selective", "hybrid_selective", "segments_2", "offload_every_2"])
def test_ranges_may_be_opened_inside_of_hooks_and_dispatch_modes(tmp_path: Path, strategy: str) -> None:
    c = config("gpt_amp_bf16" if strategy == "hybrid_selective" else "gpt", strategy)
    found = trace_trial(c, CPU, data_of(c.workload), tmp_path)
    assert found.steps == STEPS and not found.notes


def test_progress_is_told(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    c = config("gpt")
    trace_trial(c, CPU, data_of(c.workload), tmp_path, progress=lambda done, total, _: seen.append((done, total)))
    total = module.WARMUP_STEPS + 1 + STEPS + 2
    assert seen == [(i + 1, total) for i in range(total)]


def test_a_memory_account_that_fails_is_a_note_and_the_trace_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "write", fails)
    c = config("gpt")
    found = trace_trial(c, CPU, data_of(c.workload), tmp_path)
    assert found.files == [TRACE] and found.ranges_ms
    assert found.notes == ["the memory timeline failed: OSError: no space left"]


def test_the_allocators_snapshot_is_recorded_over_one_step_with_a_mocked_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def record(enabled: str | None = "all", **_: object) -> None:
        calls.append("off" if enabled is None else "on")

    def dump(path: str) -> None:
        calls.append("dump")
        Path(path).write_bytes(b"snapshot")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    c = config("gpt")
    path = allocator_snapshot(c, CPU, data_of(c.workload), tmp_path / SNAPSHOT)
    assert path.read_bytes() == b"snapshot" and calls == ["on", "dump", "off"]


def test_the_allocators_history_is_switched_off_after_an_error_with_a_mocked_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b""))
    c = config("gpt")
    with pytest.raises(OSError):
        allocator_snapshot(c, CPU, data_of(c.workload), tmp_path / "missing" / SNAPSHOT)
    assert calls == ["all", None]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["baseline", "hybrid"])
def test_on_a_gpu_kernels_copies_and_the_snapshot_are_there(tmp_path: Path, strategy: str) -> None:
    c = config("gpt", strategy, device={"name": "auto", "type": "cuda"})
    found = trace_trial(c, torch.device("cuda"), data_of(c.workload), tmp_path)
    assert not found.notes
    assert found.device_busy_ms is not None and 0 < found.device_busy_ms <= found.step_ms
    assert {"forward", "backward", "optimizer"} <= set(found.device_ms)
    assert (tmp_path / SNAPSHOT).stat().st_size > 0
    if strategy == "hybrid":
        assert found.copy_ms is not None and found.copy_hidden_ms is not None
        assert 0 <= found.copy_hidden_ms <= found.copy_ms and found.copy_ms > 0
        assert found.device_ms["recompute"] > 0
