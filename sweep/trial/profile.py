"""A look inside a few steps: a profiler trace with named ranges, and the memory over one step. Nothing is timed here.

Two passes of their own, since each disturbs what the other shows and both disturb times: a few steps under
torch.profiler (its trace opens in https://ui.perfetto.dev), and one step under the ledger. On CUDA torch's own account
of the allocator is kept as well (it opens in https://pytorch.org/memory_viz).
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from sweep.config.schema import Config
from sweep.memory.ledger import Ledger
from sweep.results import RANGES, Evidence, Phase, Trace
from sweep.strategy import Applied, accumulation_steps, applied
from sweep.trial.measure import LEDGER_STEPS, Progress, no_progress, planned_steps, settled_scaler
from sweep.trial.outcomes import one_line
from sweep.trial.predict import plan_of
from sweep.trial.timeline import Recorder, timeline, write
from sweep.workload import DataSource, Workload, build_workload
from sweep.workload.batch import seed_everything
from sweep.workload.step import FROM_HOST, TO_HOST, Phases, StepResult, run_step

#: Around each optimizer step. The phases lie inside of it.
STEP = "optimizer step"
COPY_TO_HOST, COPY_FROM_HOST = "copy to host", "copy from host"
_DIRECTIONS = {TO_HOST: COPY_TO_HOST, FROM_HOST: COPY_FROM_HOST}


class Ranges:
    """A listener of `sweep.workload.step.Phases` that opens a range of the profiler for each phase.

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
    """What the range of a phase is called (see sweep.results.RANGES)."""
    return _DIRECTIONS.get(detail, COPY_FROM_HOST) if phase == Phase.transfer.value else phase


#: The categories that the profiler gives its events.
RANGE, OPERATOR, KERNEL, COPY, FILL = "user_annotation", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset"
LAUNCHES = ("cuda_runtime", "cuda_driver")
OTHER = "other"
COPIES = ("copy to host", "copy from host")

Event = dict[str, Any]
Span = tuple[float, float]  # begin and end, us


@dataclass
class Reading:
    """All in milliseconds over the whole trace; `operators` and `steps` are numbers."""

    steps: int
    step_ms: float  # sum of the steps
    ranges_ms: dict[str, float] = field(default_factory=dict)  # own time of each range, on the host
    operators: int = 0
    on_device: bool = False  # whether the device's kernels were recorded
    device_ms: dict[str, float] = field(default_factory=dict)  # kernels, by the range that launched them
    device_busy_ms: float = 0.0  # kernels, those that ran at the same time once
    copy_ms: float = 0.0  # the strategy's copies between host and device
    copy_hidden_ms: float = 0.0  # the part of them that ran beside kernels


def load(path: Path) -> list[Event]:
    """The events of a trace file, plain or gzipped."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[Event] = json.loads(content)["traceEvents"]
    return events


def read(events: list[Event], step_name: str) -> Reading:
    """Take a trace apart. `step_name`: the range around each optimizer step; what lies outside of them is left out."""
    whole = [e for e in events if e.get("ph") == "X"]
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in whole:
        by_category[event.get("cat", "")].append(event)
    steps = [_span(e) for e in by_category[RANGE] if e["name"] == step_name]
    inside = [e for e in by_category[RANGE] if e["name"] in RANGES]
    own = list(_innermost([*((*s, OTHER) for s in steps), *((*_span(e), e["name"]) for e in inside)]))
    found = Reading(len(steps), _ms(sum(end - begin for begin, end in steps)))
    times: dict[str, float] = defaultdict(float)
    for begin, end, name in own:
        times[name] += end - begin
    found.ranges_ms = {name: _ms(times[name]) for name in RANGES if name in times}
    found.operators = _called_by_host(by_category[OPERATOR], steps)
    if by_category[KERNEL]:
        _read_device(found, by_category, own)
    return found


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _ms(us: float) -> float:
    return us / 1000.0


def _innermost(ranges: list[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Pieces of time and the innermost range in each, in order. Ranges of other threads nest in time as well."""
    stack: list[tuple[float, str]] = []  # end and name
    since = 0.0

    def close(until: float) -> Iterator[tuple[float, float, str]]:
        nonlocal since
        while stack and stack[-1][0] <= until:
            end, name = stack.pop()
            if end > since:
                yield since, end, name
                since = end

    for begin, end, name in sorted(ranges, key=lambda r: (r[0], -r[1])):
        yield from close(begin)
        if stack and begin > since:
            yield since, begin, stack[-1][1]
        since = max(since, begin)
        # Clocks of two threads may differ by less than a microsecond: a range never outlives the one around it.
        stack.append((min(end, stack[-1][0]) if stack else end, name))
    yield from close(float("inf"))


def _called_by_host(operators: list[Event], steps: list[Span]) -> int:
    """Operators that Python or autograd called, not those that operators call themselves."""
    begins = [begin for begin, _ in steps]
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in operators:
        at = bisect_right(begins, event["ts"]) - 1
        if event["name"].startswith("aten::") and at >= 0 and event["ts"] <= steps[at][1]:
            by_thread[event.get("pid"), event.get("tid")].append(event)
    count = 0
    for events in by_thread.values():
        free_from = float("-inf")
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            if event["ts"] >= free_from:
                count += 1
                free_from = event["ts"] + event["dur"]
    return count


def _read_device(found: Reading, by_category: dict[str, list[Event]], own: list[tuple[float, float, str]]) -> None:
    launched_at = {
        e["args"]["correlation"]: e["ts"]
        for category in LAUNCHES
        for e in by_category[category]
        if "correlation" in e.get("args", {})
    }
    begins = [begin for begin, _, _ in own]

    def range_of(event: Event) -> str | None:
        """The range in which the host asked for it; None outside of the steps."""
        launched = launched_at.get(event.get("args", {}).get("correlation"))
        if launched is None:
            return None
        at = bisect_right(begins, launched) - 1
        return own[at][2] if at >= 0 and launched <= own[at][1] else None

    kernels: list[Span] = []
    copies: list[Span] = []
    device: dict[str, float] = defaultdict(float)
    for event in [*by_category[KERNEL], *by_category[FILL], *by_category[COPY]]:
        name = range_of(event)
        if name is None:
            continue
        between = event["cat"] == COPY and ("HtoD" in event["name"] or "DtoH" in event["name"])
        if not between:
            kernels.append(_span(event))
            device[name] += event["dur"]
        elif name in COPIES:
            copies.append(_span(event))
    busy = merged(kernels)
    found.on_device = True
    found.device_ms = {name: _ms(device[name]) for name in RANGES if name in device}
    found.device_busy_ms = _ms(sum(end - begin for begin, end in busy))
    found.copy_ms = _ms(sum(end - begin for begin, end in copies))
    found.copy_hidden_ms = _ms(sum(overlap(copy, busy) for copy in copies))


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(span: Span, busy: list[Span]) -> float:
    """How much of a span lies within the spans of `busy`, which are in order and apart from each other."""
    begin, end = span
    at = max(0, bisect_right(busy, (begin, float("inf"))) - 1)
    total = 0.0
    while at < len(busy) and busy[at][0] < end:
        total += max(0.0, min(end, busy[at][1]) - max(begin, busy[at][0]))
        at += 1
    return total


#: Optimizer steps that are recorded. Enough to see one end and the next begin; more only make the file larger.
STEPS = 3
#: Before them, the first few steps: kernels are chosen, the optimizer's state is made.
WARMUP_STEPS = 2
TRACE, SNAPSHOT = "trace.json.gz", "memory_snapshot.pickle"
#: Allocations and ends that torch's own history holds.
SNAPSHOT_ENTRIES = 200_000


@dataclass
class _Loop:
    """A workload with its strategy in force, ready for steps."""

    workload: Workload
    strategy: Applied
    phases: Phases

    def step(self, index: int) -> StepResult:
        with self.phases(Phase.data):
            batch = self.workload.train_batch(index)
        return run_step(
            self.workload,
            batch,
            self.phases,
            micro_batch_size=self.strategy.micro_batch_size,
            around_forward=self.strategy.around_forward,
        )


def trace_trial(
    config: Config,
    device: torch.device,
    data: DataSource,
    folder: Path,
    *,
    name: str = "",
    progress: Progress = no_progress,
) -> Trace:
    """Trace STEPS optimizer steps and the memory of one more, into `folder`. Returns the summary, per step.

    name: what the trial is called, for the picture's title.

    Leaves trace.json.gz, memory_timeline.png and memory_timeline.json, on CUDA memory_snapshot.pickle too. Raises what
    the profiler or a step raises; a memory account that fails is a note.
    """
    folder.mkdir(parents=True, exist_ok=True)
    evidence = (Evidence.smoke if device.type == "cuda" else Evidence.cpu).value
    total, done = WARMUP_STEPS + 1 + STEPS + LEDGER_STEPS, 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, what)

    reading = _profiled(config, device, data, folder / TRACE, advance)
    micro = accumulation_steps(config.strategy, config.workload.global_batch_size)
    found = _summary(reading, evidence, micro)
    found.files.append(TRACE)
    with _noted(found, "the memory timeline"):
        paths = _memory_over_a_step(config, device, data, folder, evidence, name or config.strategy.name, advance)
        found.files += [path.name for path in paths]
    if device.type == "cuda":
        with _noted(found, "the allocator's snapshot"):
            found.files.append(allocator_snapshot(config, device, data, folder / SNAPSHOT).name)
    return found


@contextmanager
def _noted(found: Trace, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found.notes.append(f"{what} failed: {one_line(error)}")


@contextmanager
def _loop(config: Config, device: torch.device, data: DataSource) -> Iterator[_Loop]:
    phases = Phases()
    workload = build_workload(config.workload, device, data)
    seed_everything(config.workload.seed + 1)
    with applied(
        config.strategy,
        workload.model,
        workload.blocks,
        config.workload.global_batch_size,
        phases,
        device,
        workload.loss_state,
    ) as strategy:
        yield _Loop(workload, strategy, phases)


# -- the trace ------------------------------------------------------------------------------------------------------


def _profiled(
    config: Config, device: torch.device, data: DataSource, path: Path, advance: Callable[[str], None]
) -> Reading:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it writes each start and stop to the terminal otherwise
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with _loop(config, device, data) as loop:
        for index in range(WARMUP_STEPS):
            loop.step(index)
            advance("warm-up")
        with ExitStack() as stack:
            # The profiler's own first step is thrown away: starting it takes time.
            profiler = stack.enter_context(
                profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1))
            )
            stack.enter_context(loop.phases.listening(Ranges(loop.phases)))
            for index in range(1 + STEPS):
                with record_function(STEP):
                    loop.step(WARMUP_STEPS + index)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)  # else a step's kernels run on beside the next one's launches
                profiler.step()
                advance("profiler")
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary) / "trace.json"
        profiler.export_chrome_trace(str(plain))  # torch's own way to a .gz goes line by line and takes far longer
        with plain.open("rb") as source, gzip.open(path, "wb") as target:
            shutil.copyfileobj(source, target)
        return read(load(plain), STEP)


def _summary(reading: Reading, evidence: str, micro_steps: int) -> Trace:
    steps = max(1, reading.steps)
    found = Trace(
        evidence=evidence,
        steps=reading.steps,
        step_ms=reading.step_ms / steps,
        ranges_ms={name: value / steps for name, value in reading.ranges_ms.items()},
        operators=round(reading.operators / steps),
        micro_steps=micro_steps,
    )
    if reading.on_device:
        found.device_busy_ms = reading.device_busy_ms / steps
        found.device_ms = {name: value / steps for name, value in reading.device_ms.items()}
        found.copy_ms = reading.copy_ms / steps
        found.copy_hidden_ms = reading.copy_hidden_ms / steps
    elif evidence != Evidence.cpu.value:
        found.notes.append("the profiler recorded no kernels of the device (is CUPTI allowed here?)")
    return found


# -- the memory -----------------------------------------------------------------------------------------------------


def _memory_over_a_step(
    config: Config,
    device: torch.device,
    data: DataSource,
    folder: Path,
    evidence: str,
    name: str,
    advance: Callable[[str], None],
) -> list[Path]:
    """The ledger's account of the step that `measure` takes its peak from, with every event in between: the second one,
    or that with the largest batch."""
    with _loop(config, device, data) as loop, ExitStack() as stack:
        loop.workload.scaler = settled_scaler(loop.workload)
        plan = plan_of(loop.workload, planned_steps(config), 0)
        # Drawn before the ledger can see them.
        batches = [loop.workload.train_batch(step) for step in (plan.steps[0], plan.steps[-1])]
        ledger = Ledger(device_type=device.type)
        recorder = Recorder(ledger)
        stack.enter_context(ledger)
        stack.enter_context(loop.phases.listening(ledger))
        stack.enter_context(loop.phases.listening(recorder))
        ledger.track(loop.workload.model, loop.workload.optimizer, loop.workload.loss_state)
        for batch in batches:
            ledger.reset_peak()
            recorder.begin()
            run_step(
                loop.workload,
                batch,
                loop.phases,
                micro_batch_size=loop.strategy.micro_batch_size,
                around_forward=loop.strategy.around_forward,
            )
            advance("memory over a step")
        found = timeline(ledger, recorder, evidence)
    where = "on this CPU: the ledger's device memory" if device.type == "cpu" else "the ledger's account"
    return write(found, folder, f"{config.workload.name}, {name}: memory over one optimizer step ({where})")


def allocator_snapshot(config: Config, device: torch.device, data: DataSource, path: Path) -> Path:
    """CUDA's allocator over one step, with the Python stack of each allocation, as torch itself records it."""
    with _loop(config, device, data) as loop:
        for index in range(WARMUP_STEPS):
            loop.step(index)
        torch.cuda.synchronize(device)
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, stacks="python")
        try:
            loop.step(WARMUP_STEPS)
            torch.cuda.synchronize(device)
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            with suppress(RuntimeError):
                torch.cuda.memory._record_memory_history(enabled=None)
    return path
