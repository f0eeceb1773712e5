"""A few timed micro-steps, forward and backward of one micro-batch: the measured pieces of a plan.

python -m sweep.probe <folder>     # reads request.json, writes probe.json; on CUDA, in a process of its own
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sweep.interrupts import end_with_parent
from sweep.isolate import run_child
from sweep.measure import no_progress
from sweep.outcomes import one_line
from sweep.results import from_dict, to_dict, write_json
from sweep.schema import Config, StrategyConf, plain, typed
from sweep.step import Phases, accumulate_gradients, split, update
from sweep.strategy import applied
from sweep.trial import limit_memory, torch_device
from sweep.workload import Workload, build_workload

#: Each micro-step is repeated until it was timed this often, and for this long or this often at most.
LEAST_REPEATS, LEAST_S, MOST_REPEATS = 3, 0.2, 20
ANSWER = "probe.json"


@dataclass
class Probed:
    """Milliseconds, the least of several. None where a micro-step went wrong."""

    micro_step_ms: list[float | None] = field(default_factory=list)  # one per strategy, in order
    update_ms: float = 0.0  # clipping, optimizer and scheduler, once per step
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0  # what probing took


def probe(config: Config, strategies: list[StrategyConf], folder: Path) -> Probed:
    """Time one micro-step of each strategy, on CUDA in a process of its own. `strategies` name their micro-batch size.

    folder: where a process of its own gets its request and leaves its answer.
    """
    if config.device.type == "cuda":
        return probe_isolated(config, strategies, folder)
    return probe_here(config, strategies)


def probe_isolated(config: Config, strategies: list[StrategyConf], folder: Path) -> Probed:
    """In a process of its own. Raises RuntimeError where that gave no answer."""
    request, own = {"config": plain(config), "strategies": [plain(s) for s in strategies]}, folder / "probe"
    failed = run_child(request, own, ANSWER, config.measure.timeout_s, no_progress, "sweep.probe")
    if failed is not None:
        raise RuntimeError(f"{failed[1]}, see {own / 'stderr.log'}")
    return from_dict(Probed, json.loads((own / ANSWER).read_text(encoding="utf-8")))


def probe_here(config: Config, strategies: list[StrategyConf]) -> Probed:
    """The same in this process."""
    started = time.perf_counter()
    device = torch_device(config.device)
    if device.type == "cuda":
        limit_memory(config, device)
    workload, probed = build_workload(config.workload, device), Probed()
    for strategy in strategies:
        try:
            probed.micro_step_ms.append(_micro_step_ms(workload, strategy))
        except Exception as error:  # a candidate of this kind will say so itself, should it be run
            probed.micro_step_ms.append(None)
            probed.errors.append(one_line(error))
    if any(t is not None for t in probed.micro_step_ms):
        update(workload)  # creates the optimizer's state
        probed.update_ms = _timed(lambda: update(workload), device)
    workload.optimizer.zero_grad(set_to_none=True)
    probed.seconds = time.perf_counter() - started
    return probed


def _micro_step_ms(workload: Workload, strategy: StrategyConf) -> float:
    phases, size = Phases(), strategy.micro_batch_size
    with applied(
        strategy, workload.model, workload.blocks, workload.conf.global_batch_size, phases, workload.device,
        workload.loss_state,
    ) as force:
        parts = [next(iter(split(workload.train_batch(0), size)))]
        targets = workload.loss.count(parts[0])

        def micro_step() -> None:
            accumulate_gradients(workload, parts, targets, phases, force.around_forward)

        workload.optimizer.zero_grad(set_to_none=True)
        micro_step()  # warm-up; from the second one on there are gradients to add to, as in a real window
        return _timed(micro_step, workload.device)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    while len(times) < LEAST_REPEATS or (sum(times) < LEAST_S * 1000 and len(times) < MOST_REPEATS):
        _wait(device)
        begun = time.perf_counter()
        run()
        _wait(device)
        times.append((time.perf_counter() - begun) * 1000)
    return min(times)  # whatever disturbs a micro-step makes it longer


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(folder: Path) -> int:
    end_with_parent()
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    config = typed(request["config"])
    strategies = [typed({**request["config"], "strategy": s}).strategy for s in request["strategies"]]
    write_json(to_dict(probe_here(config, strategies)), folder / ANSWER)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
