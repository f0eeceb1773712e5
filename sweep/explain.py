"""A look inside a few steps: a profiler trace with named ranges, and the memory over one step. Nothing is timed here.

Two passes of their own, since each disturbs what the other shows and both disturb times: a few steps under
torch.profiler (its trace opens in https://ui.perfetto.dev), and one step under the ledger. On CUDA torch's own account
of the allocator is kept as well (it opens in https://pytorch.org/memory_viz).
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from sweep.explain_ranges import STEP, Ranges
from sweep.explain_timeline import Recorder, timeline, write
from sweep.explain_trace import Reading, load, read
from sweep.findings import Trace
from sweep.measure import LEDGER_STEPS, Progress, no_progress, settled_scaler
from sweep.measure_run import planned_steps
from sweep.memory.ledger import Ledger
from sweep.memory.passes import plan_of
from sweep.outcomes import one_line
from sweep.results import Evidence, Phase
from sweep.schema import Config
from sweep.step import Phases, StepResult, run_step
from sweep.strategy import Applied, accumulation_steps, applied
from sweep.workload import DataSource, Workload, build_workload
from sweep.workload.randomness import seed_everything

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
        config.strategy, workload.model, workload.blocks, config.workload.global_batch_size, phases, device,
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
