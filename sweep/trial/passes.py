"""Which steps a look at the memory runs, and what it finds: the same for the ledger's pass and for a prediction.

Batches of different shapes: the first step makes the optimizer's state, then come the largest batches of those that
will run. What is alive after a step is the same after every step of a usual model; where it is not, more steps tell
what is made once from what every step leaves behind.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from sweep.memory.ledger import Ledger
from sweep.results import MIB, Peak
from sweep.workload import Workload
from sweep.workload.batch import Shapes, at_least, largest_of, shapes_of

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
