"""Run a workload under a strategy and measure it: times, peaks, losses and bytes moved.

On CUDA the peaks are the allocator's own statistics. On a CPU they are the ledger's, from a separate untimed pass on
the emulated device; the ledger is off while steps are timed.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from sweep.clock import clock_for
from sweep.memory.ledger import Ledger
from sweep.outcomes import NotFinite, TimedOut
from sweep.results import MIB, Evidence, Measurement, Peak, Phase
from sweep.schema import Config, MeasureConf
from sweep.step import Phases, run_step, split
from sweep.strategy import applied
from sweep.workload import DataSource, Workload, build_workload, to_device

#: A GPU measurement that is shorter than this is `smoke`: it may be warm-up, clocks or luck.
MIN_WARMUP_STEPS, MIN_TIMED_STEPS, MIN_REPEATS = 2, 10, 2

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done


def no_progress(done: int, total: int, what: str) -> None:
    pass


def measure(
    config: Config,
    device: torch.device,
    data: DataSource,
    *,
    capacity_mib: float | None = None,
    progress: Progress = no_progress,
) -> Measurement:
    """Measure `config.strategy` on `config.workload`. Raises what goes wrong; `sweep.trial` makes it an outcome.

    capacity_mib: on a CPU, the emulated device's memory; beyond it the ledger raises DeviceOutOfMemory.
    """
    deadline = time.monotonic() + config.measure.timeout_s
    total = steps_of(config, device)
    peak: Peak | None = None
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, what)
        if time.monotonic() > deadline:
            raise TimedOut(f"measure.timeout_s={config.measure.timeout_s:g}: not done after {done} of {total} steps")

    if config.measure.ledger and device.type == "cpu":
        peak = ledger_pass(config, device, data, capacity_mib, advance)
    run = _timed_run(config, device, data, advance)
    if config.measure.ledger and device.type == "cuda":
        peak = ledger_pass(config, device, data, None, advance)
    return _summary(config, device, run, peak)


def steps_of(config: Config, device: torch.device) -> int:
    """Optimizer steps that `measure` runs."""
    m = config.measure
    return m.warmup_steps + m.steps * m.repeats + (LEDGER_STEPS if m.ledger else 0)


#: The first step creates the optimizer's state; the second is what every later one looks like.
LEDGER_STEPS = 2


def ledger_pass(
    config: Config,
    device: torch.device,
    data: DataSource,
    capacity_mib: float | None,
    advance: Callable[[str], None] = lambda what: None,
) -> Peak:
    """Peak of the second step as the ledger sees it, with what was alive there. Nothing is timed."""
    phases = Phases()
    capacity = None if capacity_mib is None else int(capacity_mib * MIB)
    workload = build_workload(config.workload, device, data)
    torch.manual_seed(config.workload.seed + 1)
    batches = [workload.train_batch(step) for step in range(LEDGER_STEPS)]  # host memory: the ledger must not see it
    ledger = Ledger(capacity_bytes=capacity, device_type=device.type)
    with ExitStack() as stack:
        strategy = stack.enter_context(
            applied(config.strategy, workload.model, workload.blocks, config.workload.global_batch_size, phases, device)
        )
        stack.enter_context(ledger)
        stack.enter_context(phases.listening(ledger))
        ledger.track(workload.model, workload.optimizer)
        for batch in batches:
            ledger.reset_peak()
            run_step(
                workload,
                batch,
                phases,
                micro_batch_size=strategy.micro_batch_size,
                around_forward=strategy.around_forward,
            )
            advance("memory ledger")
        strategy.require_moved()
        return ledger.peak()


@dataclass
class _Run:
    """Raw readings of the timed run."""

    step_ms: list[float] = field(default_factory=list)
    phases_ms: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    eval_loss_before: float | None = None
    eval_loss: float | None = None
    peak_allocated: int = 0  # bytes, CUDA
    peak_reserved: int = 0
    to_host_bytes: int = 0  # of all timed steps
    from_host_bytes: int = 0
    tokens_per_sample: int | None = None


def _timed_run(config: Config, device: torch.device, data: DataSource, advance: Callable[[str], None]) -> _Run:
    m, run, phases = config.measure, _Run(), Phases()
    workload = build_workload(config.workload, device, data)
    torch.manual_seed(config.workload.seed + 1)
    clock = clock_for(device)
    with ExitStack() as stack:
        strategy = stack.enter_context(
            applied(config.strategy, workload.model, workload.blocks, config.workload.global_batch_size, phases, device)
        )
        stack.enter_context(phases.listening(clock))
        run.eval_loss_before = evaluate(workload, m, strategy.micro_batch_size)
        step = 0

        def one_step() -> torch.Tensor:
            nonlocal step
            with phases(Phase.data):
                batch = workload.train_batch(step)
            step += 1
            return run_step(
                workload,
                batch,
                phases,
                micro_batch_size=strategy.micro_batch_size,
                around_forward=strategy.around_forward,
            ).loss

        for _ in range(m.warmup_steps):
            run.losses.append(_finite(one_step().item(), step))
            advance("warm-up")
        strategy.moved.reset()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(m.repeats):
            losses = []
            for _ in range(m.steps):
                clock.start()
                losses.append(one_step())
                clock.stop()
                advance("timed steps")
            for step_ms, by_phase in clock.read():
                run.step_ms.append(step_ms)
                run.phases_ms.append(by_phase)
            run.losses += [_finite(loss.item(), step) for loss in losses]
        if device.type == "cuda":
            run.peak_allocated = torch.cuda.max_memory_allocated(device)
            run.peak_reserved = torch.cuda.max_memory_reserved(device)
        strategy.require_moved()
        run.to_host_bytes, run.from_host_bytes = strategy.moved.to_host_bytes, strategy.moved.from_host_bytes
        run.eval_loss = evaluate(workload, m, strategy.micro_batch_size)
        run.tokens_per_sample = config.workload.seq_len
    return run


def evaluate(workload: Workload, conf: MeasureConf, micro_batch_size: int) -> float | None:
    """Held-out loss: mean over the targets of `eval_batches` global batches, in micro-batches. None: none asked for."""
    if not conf.eval_batches:
        return None
    workload.model.eval()
    total, count = 0.0, 0
    try:
        with torch.no_grad():
            for index in range(conf.eval_batches):
                for part in split(workload.eval_batch(index, workload.conf.global_batch_size), micro_batch_size):
                    count += workload.loss.count(part)
                    with workload.autocast():
                        total += workload.loss(workload.model, to_device(part, workload.device)).item()
    finally:
        workload.model.train()
    return _finite(total / max(count, 1), None)


def _finite(loss: float, step: int | None) -> float:
    if not math.isfinite(loss):
        where = "on held-out data" if step is None else f"by step {step}"
        raise NotFinite(f"the loss is {loss} {where}; lower workload.optimizer.lr or set workload.grad_clip_norm")
    return loss


def _summary(config: Config, device: torch.device, run: _Run, peak: Peak | None) -> Measurement:
    m, steps = config.measure, len(run.step_ms)
    step_ms = statistics.median(run.step_ms)
    low, high = quartiles(run.step_ms)
    samples_per_s = config.workload.global_batch_size / step_ms * 1000
    on_cuda = device.type == "cuda"
    names = sorted({name for phases in run.phases_ms for name in phases})
    return Measurement(
        evidence=evidence_of(device, m).value,
        steps=m.steps,
        repeats=m.repeats,
        step_ms=step_ms,
        step_ms_low=low,
        step_ms_high=high,
        samples_per_s=samples_per_s,
        tokens_per_s=None if run.tokens_per_sample is None else samples_per_s * run.tokens_per_sample,
        peak_allocated_mib=run.peak_allocated / MIB if on_cuda else (peak.mib if peak is not None else math.nan),
        peak_reserved_mib=run.peak_reserved / MIB if on_cuda else None,
        peak=peak,
        phases_ms={n: statistics.median(phases.get(n, 0.0) for phases in run.phases_ms) for n in names},
        train_loss=run.losses,
        eval_loss_before=run.eval_loss_before,
        eval_loss=run.eval_loss,
        to_host_mib=run.to_host_bytes / MIB / steps,
        from_host_mib=run.from_host_bytes / MIB / steps,
        step_times_ms=copy.copy(run.step_ms),
    )


def evidence_of(device: torch.device, m: MeasureConf) -> Evidence:
    if device.type != "cuda":
        return Evidence.cpu
    enough = m.warmup_steps >= MIN_WARMUP_STEPS and m.steps * m.repeats >= MIN_TIMED_STEPS and m.repeats >= MIN_REPEATS
    return Evidence.measured if enough else Evidence.smoke


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
