"""One repeat: the workload built anew under a strategy, its warm-up, its timed steps, and its held-out loss."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime

import torch

from sweep.clock import StepTime, clock_for
from sweep.conditions import Watch
from sweep.findings import Run
from sweep.memory.passes import plan_of
from sweep.outcomes import NotFinite
from sweep.results import MIB, Phase
from sweep.schema import Config, MeasureConf
from sweep.step import Phases, held_out_loss, run_step, split
from sweep.strategy import applied
from sweep.workload import DataSource, Workload, build_workload, to_device
from sweep.workload.randomness import seed_everything


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
        strategy = stack.enter_context(
            applied(
                config.strategy, workload.model, workload.blocks, config.workload.global_batch_size, phases, device,
                workload.loss_state,
            )
        )
        stack.enter_context(phases.listening(clock))
        run.eval_loss_before = evaluate(workload, m, strategy.micro_batch_size)
        step = 0

        def one_step() -> torch.Tensor:
            nonlocal step
            with phases(Phase.data):
                batch = workload.train_batch(step)
            step += 1
            result = run_step(
                workload,
                batch,
                phases,
                micro_batch_size=strategy.micro_batch_size,
                around_forward=strategy.around_forward,
            )
            if not result.updates:
                skipped.append(step - 1)
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
        run.eval_loss = evaluate(workload, m, strategy.micro_batch_size)
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
