"""What a study knows, as plain data: its trials, the best ones, and `optimization_results.yaml`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from sweep.interrupts import whole
from sweep.search_answer import FAILED, OK, violation

#: How a trial's values came about (user attribute VALUE_IS): nothing there means measured.
VALUE_IS, ESTIMATED, PLACEHOLDER = "value_is", "estimated", "placeholder"
#: A trial that was not launched carries why (user attribute): told by the preflight, or known from an earlier trial.
ANSWERED_BY, BY_PREFLIGHT, BY_MEMORY = "answered_by", "preflight", "memory"
#: What is known of a trial before it runs (user attribute): owner, overrides, fixed, folder.
JOB = "job"
RESULTS_FILE = "optimization_results.yaml"


@dataclass
class Record:
    """One trial of a study."""

    number: int
    state: str  # Optuna's: COMPLETE, FAIL, RUNNING
    outcome: str
    params: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    values: list[float] | None = None  # measured ones only
    estimated_values: list[float] | None = None
    constraints: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    folder: str | None = None
    mlflow_run_id: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    answered_by: str | None = None
    same_as: int | None = None  # the trial whose measurement answered this one
    fixed: str | None = None  # digest of what was not searched
    seconds: float | None = None

    @property
    def ended(self) -> bool:
        return self.state not in ("RUNNING", "WAITING")

    @property
    def launched(self) -> bool:
        """Whether its job was started, so that it counts towards the number of trials asked for."""
        return self.answered_by is None

    @property
    def violation(self) -> float:
        return violation(self.constraints)

    @property
    def feasible(self) -> bool:
        """Measured, and within all constraints. An estimate is never a result."""
        return self.state == "COMPLETE" and self.values is not None and self.violation <= 0

    @property
    def original(self) -> bool:
        return self.same_as is None


@whole()
def records(study: optuna.Study) -> list[Record]:
    """All trials that were asked, in order."""
    found = study.get_trials(deepcopy=False)
    return [record(t) for t in found if t.state is not TrialState.WAITING]


def record(trial: FrozenTrial) -> Record:
    attrs = dict(trial.user_attrs.get(JOB, {})) | trial.user_attrs
    complete = trial.state is TrialState.COMPLETE
    values, value_is = list(trial.values) if complete and trial.values else None, attrs.get(VALUE_IS)
    return Record(
        number=trial.number,
        state=trial.state.name,
        outcome=attrs.get("outcome", OK if complete else FAILED if trial.state.is_finished() else "running"),
        params=dict(trial.params),
        overrides=list(attrs.get("overrides", [])),
        values=values if value_is is None else None,
        estimated_values=values if value_is == ESTIMATED else None,
        constraints=dict(trial.constraints),
        reason=attrs.get("reason", ""),
        folder=attrs.get("folder"),
        mlflow_run_id=attrs.get("mlflow_run_id"),
        info=dict(attrs.get("info", {})),
        answered_by=attrs.get(ANSWERED_BY),
        same_as=attrs.get("same_as"),
        fixed=attrs.get("fixed"),
        seconds=trial.duration.total_seconds() if trial.duration is not None else None,
    )


def best_first(found: Sequence[Record], directions: Sequence[str]) -> list[Record]:
    """The feasible trials of one objective, best first; of several, the Pareto front in the order of the first one."""
    feasible = [r for r in found if r.feasible and r.original]
    signs = [-1.0 if d == "maximize" else 1.0 for d in directions]

    def costs(r: Record) -> list[float]:
        assert r.values is not None
        return [s * v for s, v in zip(signs, r.values)]

    if len(directions) > 1:
        feasible = [r for r in feasible if not any(_dominates(costs(o), costs(r)) for o in feasible)]
    return sorted(feasible, key=lambda r: (costs(r)[0], r.number))


def _dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b)) and any(x < y for x, y in zip(a, b))


def least_violating(found: Sequence[Record]) -> Record | None:
    """The trial closest to being feasible, measured ones before estimated ones where they are equal."""
    violating = [r for r in found if r.state == "COMPLETE" and r.violation > 0 and r.original]
    return min(violating, key=lambda r: (r.violation, r.answered_by is not None, r.number), default=None)


def counts(found: Sequence[Record]) -> dict[str, int]:
    launched = [r for r in found if r.launched]
    return {
        "launched": len(launched),
        "feasible": sum(r.feasible for r in launched),
        "infeasible": sum(r.state == "COMPLETE" and not r.feasible for r in launched),
        "failed": sum(r.state == "FAIL" for r in found if r.original),
        "not_run": sum(r.answered_by == BY_PREFLIGHT for r in found),
        "answered_from_memory": sum(r.answered_by == BY_MEMORY for r in found),
    }


def summary(study: optuna.Study, found: Sequence[Record], *, sampler: str, ended_because: str) -> dict[str, Any]:
    """The content of `optimization_results.yaml`. Its first keys are those that Hydra's own Optuna plugin writes."""
    directions = [d.name.lower() for d in study.directions]
    best = best_first(found, directions)
    said: dict[str, Any] = {"name": "optuna"}
    if len(directions) == 1:
        said["best_params"] = best[0].params if best else None
        said["best_value"] = best[0].values[0] if best and best[0].values else None
        said["best_trial"] = entry(best[0]) if best else None
    else:
        said["solutions"] = [entry(r) for r in best]
    if not best:
        nearest = least_violating(found)
        said["least_violating"] = entry(nearest) if nearest is not None else None
    return said | {
        "study": study.study_name,
        "directions": directions,
        "sampler": sampler,
        "ended_because": ended_because,
        "counts": counts(found),
        "trials": [entry(r) for r in found],
    }


def entry(r: Record) -> dict[str, Any]:
    """One trial with what is known of it; keys that have nothing to say are left out."""
    said: dict[str, Any] = {
        "number": r.number,
        "outcome": r.outcome,
        "params": r.params,
        "values": r.values,
        "estimated_values": r.estimated_values,
        "constraints": r.constraints,
        "reason": r.reason,
        "overrides": r.overrides,
        "folder": r.folder,
        "mlflow_run_id": r.mlflow_run_id,
        "same_as": r.same_as,
        "seconds": None if r.seconds is None else round(r.seconds, 3),
        "info": r.info,
    }
    return {k: v for k, v in said.items() if v not in (None, "", {}, []) or k in ("number", "outcome", "params")}


def write_summary(folder: Path, said: dict[str, Any]) -> Path:
    """Write it whole or not at all: a kill never leaves half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    partial = path.with_name(path.name + ".partial")
    plain = json.loads(json.dumps(said, default=str))  # no Python object, tuple or alias gets into the file
    partial.write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")
    partial.replace(path)
    return path


def number_text(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)
