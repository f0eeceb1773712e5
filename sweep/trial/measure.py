"""Run a workload under a strategy and measure it: times, peaks, losses and bytes moved.

On CUDA the peaks are the allocator's own statistics. On a CPU they are the ledger's, from a separate untimed pass on
the emulated device; the ledger is off while steps are timed.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sweep.config.schema import Config, MeasureConf
from sweep.decide.statistics import median_interval
from sweep.errors import BadInput, DeviceOutOfMemory, NotFinite, NothingOffloaded, TimedOut, one_line
from sweep.memory.ledger import Ledger
from sweep.results import MIB, Evidence, Measurement, Peak, Run
from sweep.strategy import training
from sweep.trial.machine import Watch
from sweep.workload import DataSource, Workload, build_data, build_workload, compiled_module, to_device
from sweep.workload.data import Shapes, at_least, largest_of, seed_everything, shapes_of
from sweep.workload.step import Phases, evaluate_part, held_out_loss, split

#: A GPU measurement that is shorter than this is `smoke`: it may be warm-up, clocks or luck.
MIN_WARMUP_STEPS, MIN_TIMED_STEPS, MIN_REPEATS = 2, 10, 2


@dataclass
class Seen:
    """What the memory pass saw, in the words of Measurement."""

    peak: Peak | None = None  # None: there was none
    peak_mib: float = math.nan  # in the last of the planned steps
    largest_step: int | None = None
    shapes_differ: bool = False
    growth_mib_per_step: float = 0.0
    evaluation_mib: float | None = None
    caveats: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, m: Measurement) -> Seen:
        """What was seen for an earlier measurement of the trial."""
        return cls(
            m.peak, m.peak_allocated_mib, m.largest_step, m.shapes_differ, m.growth_mib_per_step, m.evaluation_mib,
            list(m.caveats),
        )  # fmt: skip


def summary(config: Config, runs: list[Run], seen: Seen | None = None) -> Measurement:
    """The measurement of a trial whose repeats are `runs`; those with an error are kept in it and do not count.

    config: as it was resolved. seen: by the ledger, in one untimed pass. Raises ValueError without a run that counts.
    """
    seen, m, w = seen or Seen(), config.measure, config.workload
    on_cuda, good = config.device.type == "cuda", sorted(filter(_counts, runs), key=lambda run: run.index)
    if not good:
        raise ValueError("a measurement needs a run that came to its end")
    first, times = good[0], [t for run in good for t in run.step_times_ms]
    repeats, step_ms = sum(len(run.step_times_ms) // m.steps for run in good), statistics.median(times)
    low, high = quartiles(times)
    ci_low, ci_high = median_interval([run.step_times_ms for run in good]) or (None, None)
    samples_per_s = w.global_batch_size / step_ms * 1000
    outside = [t for run in good for t in outside_of_phases(run)]
    return Measurement(
        evidence=evidence_of(on_cuda, m.warmup_steps, len(times), repeats).value,
        steps=m.steps,
        repeats=repeats,
        step_ms=step_ms,
        step_ms_low=low,
        step_ms_high=high,
        step_ms_ci_low=ci_low,
        step_ms_ci_high=ci_high,
        step_times_ms=times,
        samples_per_s=samples_per_s,
        tokens_per_s=None if w.seq_len is None else samples_per_s * w.seq_len,
        peak_allocated_mib=_highest([r.peak_allocated_mib for r in good], math.nan) if on_cuda else seen.peak_mib,
        peak_reserved_mib=_highest([r.peak_reserved_mib for r in good], math.nan) if on_cuda else None,
        peak=seen.peak,
        phases_ms=_medians([run.phases_ms for run in good]),
        outside_ms=statistics.median(outside) if outside else None,
        train_loss=list(first.train_loss),
        eval_loss_before=first.eval_loss_before,
        eval_loss=first.eval_loss,
        to_host_mib=first.to_host_mib,
        from_host_mib=first.from_host_mib,
        runs=runs,
        largest_step=seen.largest_step,
        shapes_differ=seen.shapes_differ,
        growth_mib_per_step=seen.growth_mib_per_step,
        evaluation_mib=_highest([r.evaluation_mib for r in good], None) if on_cuda else seen.evaluation_mib,
        caveats=list(dict.fromkeys([*seen.caveats, *(note for run in good for note in run.notes)])),
    )


def outside_of_phases(run: Run) -> list[float]:
    """For each timed step, the ms that belong to no phase; [] where the phases of each step are not known."""
    phases = run.phase_times_ms.values()
    return [step_ms - sum(times[i] for times in phases) for i, step_ms in enumerate(run.step_times_ms) if phases]


def evidence_of(on_cuda: bool, warmup_steps: int, timed_steps: int, repeats: int) -> Evidence:
    """What a run is evidence for. timed_steps: over all repeats that were made."""
    if not on_cuda:
        return Evidence.cpu
    enough = warmup_steps >= MIN_WARMUP_STEPS and timed_steps >= MIN_TIMED_STEPS and repeats >= MIN_REPEATS
    return Evidence.measured if enough else Evidence.smoke


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _counts(run: Run) -> bool:
    return not run.error and bool(run.step_times_ms)


def _highest(values: list[float | None], otherwise: float | None) -> Any:
    return max((v for v in values if v is not None), default=otherwise)


def rounds_of(conf: MeasureConf) -> int:
    """Whole runs of each trial: one per repeat, and at least one per seed."""
    return max(conf.repeats, conf.seeds)


def planned_steps(config: Config, *, first_round: bool | None = None) -> int:
    """Optimizer steps of one run of a trial, warm-up included. first_round: whether it is one of several whole runs;
    None: as the config says, since a search repeats at once."""
    m = config.measure
    whole_runs = m.interleave and config.search.name is None if first_round is None else first_round
    return m.warmup_steps + m.steps * (1 if whole_runs or m.seeds > 1 else m.repeats)


def round_config(config: Config, index: int) -> Config:
    """The config of round `index`: with its seed, and without a held-out loss where that seed was evaluated before.

    A data source that is given a seed gets the round's, too; one without has the same batches for every seed.
    """
    config = copy.deepcopy(config)
    shift = index % config.measure.seeds
    config.workload.seed += shift
    if isinstance(config.workload.data.get("seed"), int):
        config.workload.data["seed"] += shift
    if index >= config.measure.seeds:
        config.measure.eval_batches = 0
    return config


def timed_run(
    config: Config,
    device: torch.device,
    data: DataSource,
    advance: Callable[[str], None] = lambda what: None,
    *,
    index: int = 0,
    windows: int = 1,
) -> Run:
    """Run `config` as it is (see `round_config`). Raises what goes wrong.

    windows: times that `measure.steps` steps are timed, the device synchronised and the machine looked at in between.
    """
    m, phases, clock = config.measure, Phases(), clock_for(device)
    run = Run(index=index, seed=config.workload.seed, started_at=datetime.now(UTC).isoformat(timespec="seconds"))
    workload = build_workload(config.workload, device, data)
    seed_everything(config.workload.seed + 1)
    on_cuda = device.type == "cuda"
    differ = on_cuda and plan_of(workload, m.warmup_steps + m.steps * windows, 0).differ
    skipped: list[int] = []
    with ExitStack() as stack:
        loop = stack.enter_context(training(workload, config.strategy, phases))
        strategy = loop.strategy
        stack.enter_context(phases.listening(clock))
        micro = strategy.micro_batch_size
        run.eval_loss_before = evaluate(workload, m, micro)
        step = 0

        def one_step() -> torch.Tensor:
            nonlocal step
            result = loop.step(step)
            if not result.updates:
                skipped.append(step)
            step += 1
            return result.loss

        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(m.warmup_steps):
            run.train_loss.append(_finite(one_step().item(), step))
            advance("warm-up")
        strategy.moved.reset()
        watch = Watch(device)
        if on_cuda:
            torch.cuda.synchronize(device)
            if not differ:  # else the largest batch may have been one of the warm-up's
                torch.cuda.reset_peak_memory_stats(device)
        times: list[StepTime] = []
        watch.begin()
        for _ in range(windows):
            losses = []
            for _ in range(m.steps):
                clock.start()
                losses.append(one_step())
                clock.stop()
                advance("timed steps")
            watch.look()  # before the clock waits for the device: on CUDA its last steps still run
            times += clock.read()
            run.train_loss += [_finite(loss.item(), step) for loss in losses]
        run.conditions = watch.end()
        _read_peaks(run, device)
        strategy.require_effect()
        run.step_times_ms = [step_ms for step_ms, _ in times]
        run.phases_ms = _medians([by_phase for _, by_phase in times])
        run.phase_times_ms = {name: [by_phase.get(name, 0.0) for _, by_phase in times] for name in run.phases_ms}
        run.to_host_mib = strategy.moved.to_host_bytes / MIB / len(times)
        run.from_host_mib = strategy.moved.from_host_bytes / MIB / len(times)
        run.eval_loss = evaluate(workload, m, micro)
        if run.eval_loss is not None:
            run.evaluation_mib = _read_peaks(run, device)
    timed = [step for step in skipped if step >= m.warmup_steps]
    if timed:
        never = ", and with it every update: the peak of a GPU is without the optimizer's state"
        run.notes.append(
            f"the gradient scaler skipped {len(timed)} of the {len(times)} timed steps (overflow)"
            f"{never if len(skipped) == step else ''}; raise measure.warmup_steps"
        )
    return run


def _read_peaks(run: Run, device: torch.device) -> float | None:
    """Raise the run's peaks to CUDA's since the last look, which begins anew. Returns MiB allocated, None off CUDA."""
    if device.type != "cuda":
        return None
    allocated, reserved = (f(device) / MIB for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
    run.peak_allocated_mib = max(run.peak_allocated_mib or 0.0, allocated)
    run.peak_reserved_mib = max(run.peak_reserved_mib or 0.0, reserved)
    torch.cuda.reset_peak_memory_stats(device)
    return allocated


def _medians(by_step: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for phases in by_step for name in phases})
    return {name: statistics.median(phases.get(name, 0.0) for phases in by_step) for name in names}


def evaluate(workload: Workload, conf: MeasureConf, micro_batch_size: int) -> float | None:
    """Held-out loss: mean over the targets of `eval_batches` global batches, in micro-batches. None: none asked for."""
    if not conf.eval_batches:
        return None
    total, count = 0.0, 0
    with workload.evaluating():
        for index in range(conf.eval_batches):
            for part in split(workload.eval_batch(index, workload.conf.global_batch_size), micro_batch_size):
                count += workload.loss.count(part)
                with workload.autocast():
                    total += held_out_loss(workload, to_device(part, workload.device)).item()
    return _finite(total / max(count, 1), None)


def _finite(loss: float, step: int | None) -> float:
    if not math.isfinite(loss):
        where = "on held-out data" if step is None else f"by step {step}"
        raise NotFinite(f"the loss is {loss} {where}; lower workload.optimizer.lr or set workload.grad_clip_norm")
    return loss


Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

#: Steps that a gradient scaler may skip, halving its scale, before the memory pass takes one as it is.
SKIPPED_AT_MOST = 8


def no_progress(done: int, total: int, what: str) -> None:
    pass


def prepared_device(config: Config) -> torch.device:
    """The torch device of a resolved config. A CUDA device is made as small as `device.capacity_mib`: that caps the
    allocator, not the context."""
    conf = config.device
    if conf.type != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", conf.index)
    total = torch.cuda.get_device_properties(device).total_memory
    if conf.capacity_mib is not None and conf.capacity_mib * MIB < total:
        torch.cuda.set_per_process_memory_fraction(conf.capacity_mib * MIB / total, device)
    return device


def measure(
    config: Config,
    device: torch.device,
    data: DataSource,
    *,
    progress: Progress = no_progress,
    first_round: bool = False,
) -> Measurement:
    """Measure `config.strategy` on `config.workload`. Raises what goes wrong; `sweep.trial.trial` makes it an outcome.

    On a CPU the ledger raises DeviceOutOfMemory beyond `device.capacity_mib`.
    first_round: make the first repeat only, since whoever asks makes the others, in turn over several trials. Else all
    are made at once: `measure.repeats` windows of one run, or, with `measure.seeds` above 1, whole runs.
    """
    m = config.measure
    advance = Steps(config, steps_of(config, first_round=first_round), progress)
    planned = planned_steps(config, first_round=first_round)
    seen = Seen()
    if m.ledger and device.type == "cpu":
        seen = _memory(config, device, data, advance, planned)
    if first_round or m.seeds > 1:
        rounds = 1 if first_round else rounds_of(m)
        runs = [repeat(config, device, data, index, advance) for index in range(rounds)]
    else:
        runs = [timed_run(config, device, data, advance, windows=m.repeats)]
    if m.ledger and device.type == "cuda":
        seen = _memory(config, device, data, advance, planned)
    return summary(config, runs, seen)


def _memory(
    config: Config, device: torch.device, data: DataSource, advance: Callable[[str], None], planned: int
) -> Seen:
    """The memory pass. It explains a measurement and never costs one: where it fails, this is noted."""
    try:
        return memory_pass(config, device, data, advance, planned=planned)
    except (BadInput, TimedOut, NothingOffloaded):
        raise
    except DeviceOutOfMemory:
        if device.type == "cpu":
            raise  # the emulated device is full
        return Seen(caveats=["the memory pass ran out of memory, so what was alive at the peak is not known"])
    except Exception as error:
        unknown = "the peak is" if device.type == "cpu" else "what was alive at the peak is"
        return Seen(caveats=[f"the memory pass failed, so {unknown} not known: {one_line(error)}"])


def repeat(
    config: Config, device: torch.device, data: DataSource | None, index: int, advance: Callable[[str], None]
) -> Run:
    """Round `index` of a trial: a whole run of its own. data: where it is of this round's seed. Raises as `measure`."""
    own = round_config(config, index)
    if data is None or own.workload.data != config.workload.data:
        data = build_data(own.workload)
    return timed_run(own, device, data, advance, index=index)


def steps_of(config: Config, *, first_round: bool = False) -> int:
    """Optimizer steps that `measure` runs."""
    m, runs = config.measure, 1 if first_round else rounds_of(config.measure)
    timed = runs * (m.warmup_steps + m.steps) if first_round or m.seeds > 1 else m.warmup_steps + m.steps * m.repeats
    return timed + (STEPS if m.ledger else 0)


class Steps:
    """Counts steps for whoever watches, and ends what takes longer than `measure.timeout_s`."""

    def __init__(self, config: Config, total: int, progress: Progress) -> None:
        self.total, self.done, self.progress = total, 0, progress
        self.timeout_s = config.measure.timeout_s
        self.deadline = time.monotonic() + self.timeout_s

    def __call__(self, what: str) -> None:
        self.done = min(self.done + 1, self.total)  # the memory pass may need more steps than is known before
        self.progress(self.done, self.total, what)
        if time.monotonic() > self.deadline:
            limit = f"measure.timeout_s={self.timeout_s:g}"
            raise TimedOut(f"{limit}: not done after {self.done} of {self.total} steps")


def memory_pass(
    config: Config,
    device: torch.device,
    data: DataSource,
    advance: Callable[[str], None] = lambda what: None,
    *,
    planned: int | None = None,
) -> Seen:
    """The memory of a few steps and of evaluation as the ledger sees it: of those with the largest batches of the
    `planned` optimizer steps (None: those that the config asks for). Nothing is timed.

    Raises DeviceOutOfMemory where the emulated device is full, which the last of the planned steps may be by what each
    of them leaves behind.
    """
    phases, size, limit = Phases(), config.workload.global_batch_size, config.device.capacity_mib
    capacity = int(limit * MIB) if limit is not None and config.device.type != "cuda" else None
    workload = build_workload(config.workload, device, data)
    compiled = compiled_module(workload.model)
    if compiled is not None:
        unknown = "the peak" if device.type == "cpu" else "what is alive at the peak"
        return Seen(caveats=[f"no memory pass: {compiled or 'the model'} is compiled, and {unknown} is not known"])
    workload.scaler = settled_scaler(workload)
    seed_everything(config.workload.seed + 1)
    planned = planned_steps(config) if planned is None else planned
    plan = plan_of(workload, planned, config.measure.eval_batches)
    # In host memory, drawn before the ledger can see it.
    batches = {step: workload.train_batch(step) for step in set(plan.steps)}
    held_out = {index: workload.eval_batch(index, size) for index in plan.evaluation}
    ledger = Ledger(capacity_bytes=capacity, device_type=device.type)
    updates: list[int] = []
    with ExitStack() as stack:
        loop = stack.enter_context(training(workload, config.strategy, phases))
        strategy = loop.strategy
        stack.enter_context(ledger)
        stack.enter_context(phases.listening(ledger))
        ledger.track(workload.model, workload.optimizer, workload.loss_state)
        micro = strategy.micro_batch_size

        def step(index: int) -> None:
            for _ in range(1 + (SKIPPED_AT_MOST if workload.scaler is not None else 0)):
                result = loop.step_on(batches[index])
                if result.updates:
                    break
            updates.append(result.updates)
            advance("memory ledger")

        def evaluate(index: int) -> bool:
            evaluate_part(workload, next(split(held_out[index], micro)), phases)
            return True

        found = run_plan(plan, ledger, step, evaluate)
        strategy.require_effect()
    notes = found.caveats(plan)
    if not all(updates):
        notes.append("the gradient scaler skipped every update looked at: the peak is without the optimizer's state")
    if capacity is not None and found.bytes > capacity:
        raise DeviceOutOfMemory(
            f"out of memory on the emulated device: {found.bytes / MIB:.2f} MiB after {planned} steps, of which each "
            f"leaves {found.growth / MIB:.4g} MiB behind; it has {capacity / MIB:.2f} MiB"
        )
    evaluation = None if found.evaluation is None else found.evaluation / MIB
    return Seen(found.peak, found.bytes / MIB, found.step, plan.differ, found.growth / MIB, evaluation, notes)


def settled_scaler(workload: Workload) -> torch.amp.GradScaler | None:
    """A gradient scaler that starts low, so that the first updates take effect: what is not skipped is looked at."""
    return None if workload.scaler is None else torch.amp.GradScaler(workload.device.type, init_scale=1.0)


# -- clocks: CUDA events, or a monotonic clock -----------------------------------------------------------------------

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


# -- which steps a look at the memory runs ----------------------------------------------------------------------------
# The same for the ledger's pass and for a prediction. Batches of different shapes: the first step makes the optimizer's
# state, then come the largest batches of those that will run. What is alive after a step is the same after every step
# of a usual model; where it is not, more steps tell what is made once from what every step leaves behind.

#: Beyond the planned steps, batches that are looked at for larger ones, and the seconds that this may take.
LOOK_AHEAD, LOOK_AHEAD_S = 32, 0.3
#: The first step creates the optimizer's state; the second is what every later one looks like.
STEPS = 2
#: Where memory grows: steps that are run to see how, at least and at most.
LEAST_MORE, MOST_MORE = 2, 8

_drawn: WeakKeyDictionary[Any, dict[Any, Shapes]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Plan:
    steps: list[int]  # whose batches are run, in this order
    evaluation: list[int]  # held-out batches
    planned: int  # optimizer steps that will be run
    differ: bool = False  # the batches have different shapes
    larger_later: int | None = None  # a step beyond the planned ones whose batch is larger than all of them


@dataclass
class Found:
    """Sizes are bytes."""

    peak: Peak  # the highest after the first step, or of evaluation
    bytes: int  # of that peak, in the last of the planned steps
    first: int  # peak of the first step
    step: int | None  # whose batch the peak is of; None: evaluation's, or all are alike
    training: int
    growth: int = 0  # by step
    evaluation: int | None = None

    def caveats(self, plan: Plan) -> list[str]:
        """What one has to know of the peak, a line each."""
        lines = []
        if plan.differ and self.step is not None:
            lines.append(
                f"the batches differ in shape: the peak is that of step {self.step} (counted from 0), the largest of "
                f"the {plan.planned} that run"
            )
        if plan.larger_later is not None:
            lines.append(
                f"the batch of step {plan.larger_later} (counted from 0) is larger than those of the {plan.planned} "
                f"steps that run here and will need more; raise measure.steps to have it counted"
            )
        if self.growth:
            lines.append(
                f"every step leaves {self.growth / MIB:.4g} MiB behind: the peak is that after {plan.planned} steps "
                f"and goes on growing"
            )
        if self.evaluation is not None and self.evaluation > self.training:
            lines.append(
                f"the peak is in evaluation: it takes {self.evaluation / MIB:.1f} MiB, training "
                f"{self.training / MIB:.1f} MiB"
            )
        return lines


def plan_of(workload: Workload, planned: int, eval_batches: int) -> Plan:
    """What to run for `planned` optimizer steps. Draws all their batches once for each source, but for one that says
    `same_shapes`. Raises BadInput where the source gives another number of samples than it is asked for."""
    if getattr(workload.data, "same_shapes", False):
        return Plan(list(range(STEPS)), list(range(min(1, eval_batches))), planned)
    size = workload.conf.global_batch_size
    try:
        known = _drawn.setdefault(workload.data, {})
    except TypeError:  # neither hashable nor to be referred to weakly
        known = {}

    def shapes(key: tuple[str, int, int], draw: Callable[[], Any]) -> Shapes:
        if key not in known:
            known[key] = shapes_of(draw())
        return known[key]

    train = [shapes(("train", i, size), partial(workload.train_batch, i)) for i in range(max(planned, STEPS))]
    held_out = [shapes(("eval", i, size), partial(workload.eval_batch, i, size)) for i in range(eval_batches)]
    differ = len(set(train[:planned])) > 1
    steps = [0, *largest_of(train[:planned])] if differ else list(range(STEPS))
    started, later = time.monotonic(), None
    for i in range(planned, planned + LOOK_AHEAD):
        if later is not None or time.monotonic() - started > LOOK_AHEAD_S:
            break
        ahead = shapes(("train", i, size), partial(workload.train_batch, i))
        if not any(at_least(other, ahead) for other in {train[step] for step in steps}):
            later = i
    return Plan(steps, largest_of(held_out), planned, differ, later)


def run_plan(
    plan: Plan,
    ledger: Ledger,
    step: Callable[[int], object],
    evaluate: Callable[[int], bool],
    at_best: Callable[[], None] = lambda: None,
) -> Found:
    """Run the steps of a plan under a ledger that is entered.

    evaluate: says whether it could. at_best: is called after a step that had the highest peak so far.
    """
    alive: list[int] = []
    found: Found | None = None
    first = growth = 0

    def run(index: int) -> None:
        nonlocal found, first
        ledger.reset_peak()
        step(index)
        alive.append(ledger.log.in_use)
        high = ledger.log.peak
        if len(alive) == 1:
            first = high
        if (len(alive) > 1 or len(plan.steps) == 1) and (found is None or high > found.bytes):
            found = Found(ledger.peak(), high, first, index if plan.differ else None, high)
            at_best()

    for index in plan.steps:
        run(index)
    if alive[-1] > alive[0]:
        growth = _growth(alive, lambda: run(plan.steps[-1]), lambda: ledger.log.in_use, plan.planned)
    assert found is not None, "a plan has steps"
    found.growth = growth
    for index in plan.evaluation:
        ledger.reset_peak()
        if not evaluate(index):
            continue
        high = ledger.log.peak
        found.evaluation = max(found.evaluation or 0, high)
        if high > found.bytes:
            training, found.peak, found.bytes, found.step = found.peak, ledger.peak(), high, None
            found.peak.phase_peaks_mib |= training.phase_peaks_mib
            found.peak.at_phase_peak_mib |= training.at_phase_peak_mib
    beyond = growth * (plan.planned - len(alive))
    found.bytes += beyond
    found.training += beyond
    if found.evaluation is not None:
        found.evaluation += beyond
    return found


def _growth(alive: list[int], again: Callable[[], None], in_use: Callable[[], int], planned: int) -> int:
    """Bytes that each step leaves behind. `again` runs one more and appends what is alive after it to `alive`."""
    gc.collect()  # what only awaits its collection is no growth
    start, more = in_use(), max(LEAST_MORE, min(planned - len(alive), MOST_MORE))
    for done in range(1, more + 1):
        again()
        if done >= LEAST_MORE and alive[-1] <= alive[-1 - LEAST_MORE]:
            return 0  # made once, or as many as the model keeps
    gc.collect()
    if in_use() <= start:
        return 0
    span = min(more - 1, 4)
    return max(0, (alive[-1] - alive[-1 - span]) // span)
