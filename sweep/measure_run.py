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
from sweep.outcomes import NotFinite
from sweep.results import MIB, Phase
from sweep.schema import Config, MeasureConf
from sweep.step import Phases, run_step, split
from sweep.strategy import applied
from sweep.workload import DataSource, Workload, build_workload, to_device


def rounds_of(conf: MeasureConf) -> int:
    """Whole runs of each trial: one per repeat, and at least one per seed."""
    return max(conf.repeats, conf.seeds)


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
    torch.manual_seed(config.workload.seed + 1)
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
            return run_step(
                workload,
                batch,
                phases,
                micro_batch_size=strategy.micro_batch_size,
                around_forward=strategy.around_forward,
            ).loss

        for _ in range(m.warmup_steps):
            run.train_loss.append(_finite(one_step().item(), step))
            advance("warm-up")
        strategy.moved.reset()
        watch = Watch(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
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
        if device.type == "cuda":
            run.peak_allocated_mib = torch.cuda.max_memory_allocated(device) / MIB
            run.peak_reserved_mib = torch.cuda.max_memory_reserved(device) / MIB
        strategy.require_effect()
        run.step_times_ms = [step_ms for step_ms, _ in times]
        run.phases_ms = _medians([by_phase for _, by_phase in times])
        run.phase_times_ms = {name: [by_phase.get(name, 0.0) for _, by_phase in times] for name in run.phases_ms}
        run.to_host_mib = strategy.moved.to_host_bytes / MIB / len(times)
        run.from_host_mib = strategy.moved.from_host_bytes / MIB / len(times)
        run.eval_loss = evaluate(workload, m, strategy.micro_batch_size)
    return run


def _medians(by_step: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for phases in by_step for name in phases})
    return {name: statistics.median(phases.get(name, 0.0) for phases in by_step) for name in names}


def evaluate(workload: Workload, conf: MeasureConf, micro_batch_size: int) -> float | None:
    """Held-out loss: mean over the targets of `eval_batches` global batches, in micro-batches. None: none asked for."""
    if not conf.eval_batches:
        return None
    total, count = 0.0, 0
    with workload.evaluating(), torch.no_grad():
        for index in range(conf.eval_batches):
            for part in split(workload.eval_batch(index, workload.conf.global_batch_size), micro_batch_size):
                count += workload.loss.count(part)
                with workload.autocast():
                    total += workload.loss(workload.model, to_device(part, workload.device)).item()
    return _finite(total / max(count, 1), None)


def _finite(loss: float, step: int | None) -> float:
    if not math.isfinite(loss):
        where = "on held-out data" if step is None else f"by step {step}"
        raise NotFinite(f"the loss is {loss} {where}; lower workload.optimizer.lr or set workload.grad_clip_norm")
    return loss
