"""Run a workload under a strategy and measure it: times, peaks, losses and bytes moved.

On CUDA the peaks are the allocator's own statistics. On a CPU they are the ledger's, from a separate untimed pass on
the emulated device; the ledger is off while steps are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from sweep.findings import Run
from sweep.measure_run import round_config, rounds_of, timed_run
from sweep.measure_summary import summary
from sweep.memory.ledger import Ledger
from sweep.outcomes import TimedOut
from sweep.results import MIB, Measurement, Peak
from sweep.schema import Config
from sweep.step import Phases, run_step
from sweep.strategy import applied
from sweep.workload import DataSource, build_data, build_workload

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

#: The first step creates the optimizer's state; the second is what every later one looks like.
LEDGER_STEPS = 2


def no_progress(done: int, total: int, what: str) -> None:
    pass


def measure(
    config: Config,
    device: torch.device,
    data: DataSource,
    *,
    capacity_mib: float | None = None,
    progress: Progress = no_progress,
    first_round: bool = False,
) -> Measurement:
    """Measure `config.strategy` on `config.workload`. Raises what goes wrong; `sweep.trial` makes it an outcome.

    capacity_mib: on a CPU, the emulated device's memory; beyond it the ledger raises DeviceOutOfMemory.
    first_round: make the first repeat only, since whoever asks makes the others, in turn over several trials. Else all
    are made at once: `measure.repeats` windows of one run, or, with `measure.seeds` above 1, whole runs.
    """
    peak: Peak | None = None
    advance = Steps(config, steps_of(config, first_round=first_round), progress)
    if config.measure.ledger and device.type == "cpu":
        peak = ledger_pass(config, device, data, capacity_mib, advance)
    runs = [repeat(config, device, data, 0, advance)] if first_round else _all_at_once(config, device, data, advance)
    if config.measure.ledger and device.type == "cuda":
        peak = ledger_pass(config, device, data, None, advance)
    return summary(config, runs, peak)


def repeat(
    config: Config, device: torch.device, data: DataSource | None, index: int, advance: Callable[[str], None]
) -> Run:
    """Round `index` of a trial: a whole run of its own. data: where it is of this round's seed. Raises as `measure`."""
    own = round_config(config, index)
    if data is None or own.workload.data != config.workload.data:
        data = build_data(own.workload)
    return timed_run(own, device, data, advance, index=index)


def _all_at_once(config: Config, device: torch.device, data: DataSource, advance: Callable[[str], None]) -> list[Run]:
    if config.measure.seeds > 1:
        return [repeat(config, device, data, index, advance) for index in range(rounds_of(config.measure))]
    return [timed_run(config, device, data, advance, windows=config.measure.repeats)]


def steps_of(config: Config, *, first_round: bool = False) -> int:
    """Optimizer steps that `measure` runs."""
    m = config.measure
    ledger = LEDGER_STEPS if m.ledger else 0
    if first_round or m.seeds > 1:
        return ledger + (m.warmup_steps + m.steps) * (1 if first_round else rounds_of(m))
    return ledger + m.warmup_steps + m.steps * m.repeats


class Steps:
    """Counts steps for whoever watches, and ends what takes longer than `measure.timeout_s`."""

    def __init__(self, config: Config, total: int, progress: Progress) -> None:
        self.total, self.done, self.progress = total, 0, progress
        self.timeout_s = config.measure.timeout_s
        self.deadline = time.monotonic() + self.timeout_s

    def __call__(self, what: str) -> None:
        self.done += 1
        self.progress(self.done, self.total, what)
        if time.monotonic() > self.deadline:
            limit = f"measure.timeout_s={self.timeout_s:g}"
            raise TimedOut(f"{limit}: not done after {self.done} of {self.total} steps")


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
            applied(
                config.strategy, workload.model, workload.blocks, config.workload.global_batch_size, phases, device,
                workload.loss_state,
            )
        )
        stack.enter_context(ledger)
        stack.enter_context(phases.listening(ledger))
        ledger.track(workload.model, workload.optimizer, workload.loss_state)
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
        strategy.require_effect()
        return ledger.peak()
