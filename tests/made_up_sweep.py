"""Some forty made-up trials of one workload, recorded through the project's own tracking code: a page to look at.

The numbers follow simple rules (a block's activations, its recomputation, what crosses the link), so that the charts
show what they would show of a real model. They are no measurements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import made_up

from sweep.config.schema import BudgetConf
from sweep.report import describe, judge, phrases, write_report
from sweep.results import Prediction, TrialResult
from sweep.tracking import Store, close_sweep, open_sweep, start_trial, update_decision

GLOBAL_BATCH, BLOCKS = 16, 8
LASTING_MIB, OUTSIDE_MIB, BLOCK_MIB, INPUT_MIB = 70.0, 9.3, 2.0, 0.25  # the last three per sample
CAPACITY_MIB = 480.0

#: granularity and every_k
CHECKPOINTS = (("none", 1), ("blocks", 1), ("blocks", 2), ("selective", 1))
PLACEMENTS = ("none", "inputs", "all")
MICRO_BATCHES = (None, 4, 2)


def grid() -> list[TrialResult]:
    """The baseline and every combination of the knobs."""
    knobs = itertools.product(MICRO_BATCHES, CHECKPOINTS, PLACEMENTS)
    return [_trial(micro, *checkpoint, placement) for micro, checkpoint, placement in knobs]


def record(
    store: Store,
    results: list[TrialResult],
    folder: Path | None = None,
    *,
    budget: BudgetConf,
    more: Sequence[Path] = (),
    name: str = "gpt_tiny on cpu",
) -> str:
    """As a session does it: every trial's run, the verdicts, and the report where it has a folder to go to.

    Returns the sweep's run id. more: further files of the sweep.
    """
    mode = results[0].mode
    sweep = open_sweep(
        store, name, tags={"workload": "gpt_tiny", "mode": mode}, params={"overrides": "strategy=glob(*)"}
    )
    for result in results:
        result.mlflow_run_id = None
        with start_trial(store, sweep, result, system_metrics=False) as run:
            run.log(result)
    judged = judge(results, budget, CAPACITY_MIB)
    comparisons = [comparison for _, comparison in judged]
    for group, comparison in judged:
        for result, decision in zip(group.results, comparison.decisions):
            result.decision = decision
            said = phrases.said(result, decision, comparison, group.results)
            update_decision(store, result.mlflow_run_id, result, said=said)
    description, files = f"**{phrases.conclusion(comparisons[0], judged[0][0].results)}**", list(more)
    if folder is not None:
        report = write_report(judged, folder, command="python train.py -m 'strategy=glob(*)'")
        description, files = describe(report), [*report.files, *more]
    close_sweep(store, sweep, report_markdown=description, files=files, comparisons=comparisons)
    return sweep


def _trial(micro: int | None, granularity: str, every_k: int, placement: str) -> TrialResult:
    at_once = micro or GLOBAL_BATCH
    checkpoints, offloads = granularity != "none", placement != "none"
    kind = "hybrid" if checkpoints and offloads else "offload" if offloads else "checkpoint"
    if not checkpoints and not offloads:
        kind = "micro_batch" if micro else "baseline"
    said = [f"micro_batch_size={micro}"] if micro else []
    said += [f"granularity={granularity}"] if granularity == "selective" else []
    said += [f"every_k={every_k}"] if every_k > 1 else []
    said += [f"placement={placement}"] if offloads else []
    peak, step, moved = _numbers(at_once, granularity, every_k, placement)
    values: dict[str, Any] = {
        "name": " ".join([kind, *(said if kind != "baseline" else [])]),
        "strategy_id": f"{at_once}-{granularity}-{every_k}-{placement}",
        "is_baseline": kind == "baseline",
        "knobs": {
            "micro_batch_size": micro, "checkpoint__granularity": granularity, "checkpoint__every_k": every_k,
            "offload__placement": placement,
        },
        "capacity_mib": CAPACITY_MIB,
        "prediction": _prediction(peak),
        "environment": {"torch": "made up"},
    }
    if peak > CAPACITY_MIB:
        return made_up.trial(kind, outcome="oom_device", error=f"needs {peak:.0f} MiB of {CAPACITY_MIB:.0f}", **values)
    loss = [5.6 * 0.93**i + 0.004 * ((7 * i + at_once) % 5) for i in range(17)]
    measure = {"to_host_mib": moved, "from_host_mib": moved, "train_loss": loss, "eval_loss": loss[-1] + 0.2}
    return made_up.trial(kind, peak, step, measure=measure, **values)


def _numbers(at_once: int, granularity: str, every_k: int, placement: str) -> tuple[float, float, float]:
    """Peak in MiB, step in ms, MiB to the host in a step."""
    again = 0.0 if granularity == "none" else 1 / every_k  # the share of the blocks that are computed again
    kept = 0.35 if granularity == "selective" else 0.0  # what of such a block is saved all the same
    saved = BLOCK_MIB * BLOCKS * (1 - again * (1 - kept)) + INPUT_MIB * BLOCKS * (again > 0)
    goes = {"none": 0.0, "inputs": INPUT_MIB * BLOCKS, "all": 0.85 * saved}[placement]
    working = BLOCK_MIB * (again > 0) + OUTSIDE_MIB
    peak = LASTING_MIB + at_once * (saved - min(goes, saved) + working)
    computing = 110.0 * (1 + 0.31 * again * (1 - 0.6 * kept / 0.35)) * (1 + 0.02 * (GLOBAL_BATCH / at_once - 1))
    moved = GLOBAL_BATCH * min(goes, saved)
    return peak, computing + 0.11 * moved, moved


def _prediction(peak: float) -> Prediction:
    return made_up.prediction(peak * 1.004, peak <= CAPACITY_MIB, CAPACITY_MIB, error_ratio=0.004, device="cpu")
