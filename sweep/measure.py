"""Run a workload under a strategy and measure it: times, peaks, losses and bytes moved.

On CUDA the peaks are the allocator's own statistics. On a CPU they are the ledger's, from a separate untimed pass on
the emulated device; the ledger is off while steps are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from sweep.errors import BadInput, DeviceOutOfMemory, NothingOffloaded
from sweep.findings import Run
from sweep.measure_run import planned_steps, round_config, rounds_of, timed_run
from sweep.measure_summary import Seen, summary
from sweep.memory.ledger import Ledger
from sweep.memory.passes import STEPS, plan_of, run_plan
from sweep.outcomes import TimedOut, one_line
from sweep.results import MIB, Measurement, Peak
from sweep.schema import Config
from sweep.step import Phases, evaluate_part, run_step, split
from sweep.strategy import applied
from sweep.workload import DataSource, Workload, build_data, build_workload, compiled_module
from sweep.workload.randomness import seed_everything

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

#: Optimizer steps of the memory pass where all are alike.
LEDGER_STEPS = STEPS
#: Steps that a gradient scaler may skip, halving its scale, before the memory pass takes one as it is.
SKIPPED_AT_MOST = 8


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
    advance = Steps(config, steps_of(config, first_round=first_round), progress)
    planned = planned_steps(config, first_round=first_round)
    seen = Seen()
    if config.measure.ledger and device.type == "cpu":
        seen = _memory(config, device, data, capacity_mib, advance, planned)
    runs = [repeat(config, device, data, 0, advance)] if first_round else _all_at_once(config, device, data, advance)
    if config.measure.ledger and device.type == "cuda":
        seen = _memory(config, device, data, None, advance, planned)
    return summary(config, runs, seen)


def _memory(
    config: Config,
    device: torch.device,
    data: DataSource,
    capacity_mib: float | None,
    advance: Callable[[str], None],
    planned: int,
) -> Seen:
    """The memory pass. It explains a measurement and never costs one: where it fails, this is noted."""
    try:
        return memory_pass(config, device, data, capacity_mib, advance, planned=planned)
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
        self.done = min(self.done + 1, self.total)  # the memory pass may need more steps than is known before
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
    """The peak that `memory_pass` finds. Raises ValueError where a model cannot be looked into."""
    seen = memory_pass(config, device, data, capacity_mib, advance)
    if seen.peak is None:
        raise ValueError("; ".join(seen.caveats))
    return seen.peak


def memory_pass(
    config: Config,
    device: torch.device,
    data: DataSource,
    capacity_mib: float | None,
    advance: Callable[[str], None] = lambda what: None,
    *,
    planned: int | None = None,
) -> Seen:
    """The memory of a few steps and of evaluation as the ledger sees it: of those with the largest batches of the
    `planned` optimizer steps (None: those that the config asks for). Nothing is timed.

    Raises DeviceOutOfMemory where the emulated device is full, which the last of the planned steps may be by what each
    of them leaves behind.
    """
    phases = Phases()
    capacity = None if capacity_mib is None else int(capacity_mib * MIB)
    workload = build_workload(config.workload, device, data)
    compiled = compiled_module(workload.model)
    if compiled is not None:
        unknown = "the peak" if device.type == "cpu" else "what is alive at the peak"
        return Seen(caveats=[f"no memory pass: {compiled or 'the model'} is compiled, and {unknown} is not known"])
    workload.scaler = settled_scaler(workload)
    seed_everything(config.workload.seed + 1)
    planned = planned_steps(config) if planned is None else planned
    plan = plan_of(workload, planned, config.measure.eval_batches)
    size = config.workload.global_batch_size
    # In host memory, drawn before the ledger can see it.
    batches = {step: workload.train_batch(step) for step in set(plan.steps)}
    held_out = {index: workload.eval_batch(index, size) for index in plan.evaluation}
    ledger = Ledger(capacity_bytes=capacity, device_type=device.type)
    updates: list[int] = []
    with ExitStack() as stack:
        strategy = stack.enter_context(
            applied(
                config.strategy, workload.model, workload.blocks, size, phases, device, workload.loss_state,
            )
        )  # fmt: skip
        stack.enter_context(ledger)
        stack.enter_context(phases.listening(ledger))
        ledger.track(workload.model, workload.optimizer, workload.loss_state)

        def step(index: int) -> None:
            for _ in range(1 + (SKIPPED_AT_MOST if workload.scaler is not None else 0)):
                result = run_step(
                    workload,
                    batches[index],
                    phases,
                    micro_batch_size=strategy.micro_batch_size,
                    around_forward=strategy.around_forward,
                )
                if result.updates:
                    break
            updates.append(result.updates)
            advance("memory ledger")

        def evaluate(index: int) -> bool:
            evaluate_part(workload, next(split(held_out[index], strategy.micro_batch_size)), phases)
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
