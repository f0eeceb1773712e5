"""A look inside a few steps: a profiler trace with named ranges, and the memory over one step. Nothing is timed here.

Passes of their own, since each disturbs what the other shows: a few steps under torch.profiler (its trace opens in
https://ui.perfetto.dev), one step under the ledger, and on CUDA one with torch's own account of the allocator (it opens
in https://pytorch.org/memory_viz).
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from sweep.config.schema import Config
from sweep.errors import one_line
from sweep.memory.ledger import Ledger
from sweep.report.plots import draw_timeline
from sweep.results import MIB, RANGES, Band, Evidence, Phase, Timeline, Trace, part_of, write_json
from sweep.strategy import TrainingLoop, accumulation_steps, training
from sweep.trial.measure import STEPS as LEDGER_STEPS
from sweep.trial.measure import Progress, no_progress, planned_steps, settled_scaler
from sweep.trial.predict import plan_of
from sweep.workload import DataSource, build_workload
from sweep.workload.data import seed_everything
from sweep.workload.step import TO_HOST, Phases

#: Around each optimizer step. The phases lie inside of it.
STEP, OTHER = "optimizer step", "other"
COPY_TO_HOST, COPY_FROM_HOST = "copy to host", "copy from host"
#: Optimizer steps that are recorded. Enough to see one end and the next begin; more only make the file larger.
STEPS = 3
#: Before them, the first few steps: kernels are chosen, the optimizer's state is made.
WARMUP_STEPS = 2
TRACE, TIMELINE, PICTURE = "trace.json.gz", "memory_timeline.json", "memory_timeline.png"
SNAPSHOT = "memory_snapshot.pickle"
#: The categories that the profiler gives its events.
RANGE, OPERATOR, KERNEL, COPY, FILL = "user_annotation", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset"
LAUNCHES = ("cuda_runtime", "cuda_driver")

Event = dict[str, Any]
Span = tuple[float, float]  # begin and end, us
Named = tuple[float, float, str]


def trace_trial(
    config: Config, device: torch.device, data: DataSource, folder: Path, name: str, progress: Progress = no_progress
) -> Trace:
    """Trace STEPS optimizer steps and the memory of one more, into `folder`. Returns the summary, per step.

    name: what the trial is called. Raises what the profiler or a step raises; what else fails is in Trace.failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total, done = WARMUP_STEPS + 1 + STEPS + LEDGER_STEPS, 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, what)

    with loop_of(config, device, data) as loop:
        found = read(_profiled(loop, folder / TRACE, advance))
    found.evidence = (Evidence.smoke if device.type == "cuda" else Evidence.cpu).value
    found.micro_steps = accumulation_steps(config.strategy, config.workload.global_batch_size)
    found.files.append(TRACE)
    if device.type == "cuda" and found.device_busy_ms is None:
        found.failed[TRACE] = "the profiler recorded no kernels of the device (CUPTI)"
    with _noted(found, PICTURE, TIMELINE), loop_of(config, device, data) as loop:
        memory = _memory_over_a_step(loop, planned_steps(config), found.evidence, advance)
        write_json(memory, folder / TIMELINE)
        draw_timeline(memory, f"{config.workload.name}, {name}", folder / PICTURE)
    if device.type == "cuda":
        with _noted(found, SNAPSHOT), loop_of(config, device, data) as loop:
            allocator_snapshot(loop, folder / SNAPSHOT)
    return found


@contextmanager
def _noted(found: Trace, *files: str) -> Iterator[None]:
    try:
        yield
        found.files += files
    except Exception as error:
        found.failed[files[0]] = one_line(error)


@contextmanager
def loop_of(config: Config, device: torch.device, data: DataSource) -> Iterator[TrainingLoop]:
    workload = build_workload(config.workload, device, data)
    seed_everything(config.workload.seed + 1)
    with training(workload, config.strategy, Phases()) as loop:
        yield loop


class Ranges:
    """A listener of `Phases` that opens a range of the profiler for each phase, in the thread that enters it.

    Who called backward() waits while autograd's own thread recomputes or copies: so one stack holds those of all.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._open: list[record_function] = []

    def enter_phase(self, phase: str) -> None:
        if phase == Phase.transfer.value:
            phase = COPY_TO_HOST if self._phases.details[-1] == TO_HOST else COPY_FROM_HOST
        self._open.append(record_function(phase))
        self._open[-1].__enter__()

    def leave_phase(self, phase: str) -> None:
        self._open.pop().__exit__(None, None, None)


def _profiled(loop: TrainingLoop, path: Path, advance: Callable[[str], None]) -> list[Event]:
    """The events of a trace, which is written to `path`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it writes each start and stop to the terminal otherwise
    device = loop.workload.device
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    for index in range(WARMUP_STEPS):
        loop.step(index)
        advance("warm-up")
    # The profiler's own first step is thrown away: starting it takes time.
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler, loop.phases.listening(Ranges(loop.phases)):
        for index in range(WARMUP_STEPS, WARMUP_STEPS + 1 + STEPS):
            with record_function(STEP):
                loop.step(index)
                if device.type == "cuda":  # else a step's kernels run on beside the next one's launches
                    torch.cuda.synchronize(device)
            profiler.step()
            advance("profiler")
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary) / "trace.json"
        profiler.export_chrome_trace(str(plain))  # torch's own way to a .gz goes line by line and takes far longer
        content = plain.read_bytes()
    path.write_bytes(gzip.compress(content))
    events: list[Event] = json.loads(content)["traceEvents"]
    return events


# -- reading a trace --------------------------------------------------------------------------------------------------


def read(events: list[Event]) -> Trace:
    """What a trace says of its steps, on average; what lies outside of them is left out."""
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_category[event.get("cat", "")].append(event)
    steps = [_span(e) for e in by_category[RANGE] if e["name"] == STEP]
    named = {STEP: OTHER} | {name: name for name in RANGES}
    own = list(_innermost([(*_span(e), named[e["name"]]) for e in by_category[RANGE] if e["name"] in named]))
    mean_of = 1000.0 * max(1, len(steps))  # from microseconds in all to milliseconds per step
    found = Trace(
        evidence="",
        steps=len(steps),
        step_ms=_length(steps) / mean_of,
        ranges_ms=_by_range(own, mean_of),
        operators=round(_called_by_host(by_category[OPERATOR], steps) / max(1, len(steps))),
    )
    if by_category[KERNEL]:
        _read_device(found, by_category, own, mean_of)
    return found


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _by_range(spans: Iterable[Named], mean_of: float) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    for begin, end, name in spans:
        times[name] += (end - begin) / mean_of
    return {name: times[name] for name in RANGES if name in times}


def _innermost(ranges: list[Named]) -> Iterator[Named]:
    """Pieces of time and the innermost range in each, in order. Ranges of other threads nest in time as well."""
    stack: list[tuple[float, str]] = []  # end and name
    since = 0.0
    for begin, end, name in [*sorted(ranges, key=lambda r: (r[0], -r[1])), (float("inf"), 0.0, "")]:
        while stack and stack[-1][0] <= begin:
            until, closed = stack.pop()
            if until > since:
                yield since, until, closed
                since = until
        if stack and begin > since:
            yield since, begin, stack[-1][1]
        since = max(since, begin)
        # Clocks of two threads may differ by less than a microsecond: a range never outlives the one around it.
        stack.append((min(end, stack[-1][0]) if stack else end, name))


def _called_by_host(operators: list[Event], steps: list[Span]) -> int:
    """Operators that Python or autograd called, not those that operators call themselves."""
    begins = [begin for begin, _ in steps]
    free_from: dict[Any, float] = defaultdict(float)  # by thread
    count = 0
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        at, thread = bisect_right(begins, event["ts"]) - 1, (event.get("pid"), event.get("tid"))
        within = event["name"].startswith("aten::") and at >= 0 and event["ts"] <= steps[at][1]
        if within and event["ts"] >= free_from[thread]:
            count += 1
            free_from[thread] = event["ts"] + event["dur"]
    return count


def _read_device(found: Trace, by_category: dict[str, list[Event]], own: list[Named], mean_of: float) -> None:
    """What ran on the device, by the range in which the host asked for it."""
    launches = [e for category in LAUNCHES for e in by_category[category]]
    launched_at = {e["args"]["correlation"]: e["ts"] for e in launches if "correlation" in e.get("args", {})}
    begins = [begin for begin, _, _ in own]
    kernels: list[Named] = []
    copies: list[Span] = []
    for event in [*by_category[KERNEL], *by_category[FILL], *by_category[COPY]]:
        launched = launched_at.get(event.get("args", {}).get("correlation"), float("-inf"))
        at = bisect_right(begins, launched) - 1
        if at < 0 or launched > own[at][1]:
            continue
        name = own[at][2]
        if event["cat"] != COPY or not ("HtoD" in event["name"] or "DtoH" in event["name"]):
            kernels.append((*_span(event), name))
        elif name in (COPY_TO_HOST, COPY_FROM_HOST):
            copies.append(_span(event))
    busy = merged((begin, end) for begin, end, _ in kernels)
    found.device_ms = _by_range(kernels, mean_of)
    found.device_busy_ms = _length(busy) / mean_of
    found.copy_ms = _length(copies) / mean_of
    found.copy_hidden_ms = sum(overlap(copy, busy) for copy in copies) / mean_of


def merged(spans: Iterable[Span]) -> list[Span]:
    """The time that spans cover as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(span: Span, busy: list[Span]) -> float:
    """How much of a span lies within the spans of `busy`, which are in order and apart from each other."""
    first = max(0, bisect_right(busy, (span[0], float("inf"))) - 1)
    last = bisect_right(busy, (span[1], float("-inf")))
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in busy[first:last])


# -- the memory -------------------------------------------------------------------------------------------------------


def _memory_over_a_step(loop: TrainingLoop, planned: int, evidence: str, advance: Callable[[str], None]) -> Timeline:
    """The ledger's account of the step that `measure` takes its peak from, with every event in between: the second one,
    or that with the largest batch."""
    w, phases = loop.workload, loop.phases
    w.scaler = settled_scaler(w)
    steps = plan_of(w, planned, 0).steps
    batches = [w.train_batch(step) for step in (steps[0], steps[-1])]  # drawn before the ledger can see them
    with Ledger(device_type=w.device.type) as ledger:
        recorder = Recorder(ledger)
        with phases.listening(ledger), phases.listening(recorder):
            ledger.track(w.model, w.optimizer, w.loss_state)
            for batch in batches:
                ledger.reset_peak()
                recorder.begin()
                loop.step_on(batch)
                advance("memory over a step")
            return timeline(ledger, recorder, evidence)


def allocator_snapshot(loop: TrainingLoop, path: Path) -> None:
    """CUDA's allocator over one step, with the Python stack of each allocation, as torch itself records it."""
    for index in range(WARMUP_STEPS):
        loop.step(index)
    torch.cuda.synchronize(loop.workload.device)
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    try:
        loop.step(WARMUP_STEPS)
        torch.cuda.synchronize(loop.workload.device)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        with suppress(RuntimeError):
            torch.cuda.memory._record_memory_history(enabled=None)


# -- the memory over one step ----------------------------------------------------------------------------------------
# The horizontal axis is not time: a position is one allocation or its end, in order. The ledger slows a step down
# unevenly, so that times under it would mean nothing; the order is what the real step has too.

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
