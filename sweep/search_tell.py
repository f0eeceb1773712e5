"""What Optuna is told of a job: its objectives, its violations, and numbers to stand in for those that it lacks."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from sweep.search_answer import (
    DETAIL_CHARACTERS,
    FAILED,
    OK,
    OOM_CONSTRAINT,
    Answer,
    NoAnswer,
    read_answer,
    read_exception,
)
from sweep.search_job import Job, Settings
from sweep.search_record import ANSWERED_BY, ESTIMATED, PLACEHOLDER, VALUE_IS, Record


def read_returned(job: Job, said: Any, settings: Settings, read: Callable[[Job, Any], Any] | None) -> Answer:
    """The answer in what a job returned or raised. Never raises for what a job did; such a trial has failed."""
    try:
        if isinstance(said, BaseException):
            answer = read_exception(said, next(iter(settings.constraints), OOM_CONSTRAINT))
            answer.details = "".join(traceback.format_exception(said))[-DETAIL_CHARACTERS:]
            forget_frames(said)
            return answer
        return read_answer(read(job, said) if read is not None else said, settings.objectives)
    except NoAnswer as error:
        return Answer(outcome=FAILED, reason=str(error))


def forget_frames(error: BaseException) -> None:
    """Drop the local variables that an exception's traceback holds, and those of its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if current.__traceback__ is not None:
            traceback.clear_frames(current.__traceback__)
            current.__traceback__ = None
        current = current.__cause__ or current.__context__


@dataclass
class Told:
    """One trial's end: values are None for a failed one."""

    values: list[float] | None = None
    constraints: dict[str, float] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)


def what_to_tell(
    job: Job, answer: Answer, answered_by: str | None, known: Iterable[Record], settings: Settings, sampler: str
) -> Told:
    """A trial that violates a constraint is complete and infeasible, never failed, so that samplers learn from it."""
    outcome = FAILED if answer.failed and answer.outcome == OK else answer.outcome
    attrs = {
        "outcome": outcome if outcome != OK else None,
        "reason": answer.reason,
        "folder": answer.folder if answer.folder != str(job.folder) else None,
        "mlflow_run_id": answer.mlflow_run_id,
        "info": answer.info,
        "details": answer.details,
        ANSWERED_BY: answered_by,
    }
    told = Told(answer.values)
    if not answer.failed:
        known = list(known)
        told.constraints = _constraints(answer, job.estimate, known, settings, sampler)
        attrs[VALUE_IS] = ESTIMATED if answer.estimated else None
        if told.values is None:
            told.values, attrs[VALUE_IS] = _stand_in(job.estimate, known, settings)
    # Each costs a commit, so what goes without saying is not said.
    told.attrs = {k: v for k, v in attrs.items() if v not in (None, "", {})}
    return told


def _constraints(
    answer: Answer, estimate: Answer | None, known: Iterable[Record], settings: Settings, sampler: str
) -> dict[str, float]:
    """The trial's violations, filled up to the names that the study's other trials have.

    A trial without a value for a constraint counts as feasible in it, and the Gaussian process refuses trials with
    different numbers of them.
    """
    names = {n for r in known for n in r.constraints} | set(settings.constraints)
    if sampler == "GPSampler" and not settings.constraints:
        names.add(OOM_CONSTRAINT)
    told = dict(answer.constraints)
    if answer.values is None and estimate is not None:
        for name, value in estimate.constraints.items():
            told.setdefault(name, max(value, 0.0))
    return dict.fromkeys(names, 0.0) | told


def _stand_in(estimate: Answer | None, known: Iterable[Record], settings: Settings) -> tuple[list[float], str]:
    """What to tell for an infeasible trial that has no value: the estimate, or else the worst that was measured.

    Only the Gaussian process looks at it, and it is never shown as a result.
    """
    if estimate is not None and estimate.values is not None:
        return estimate.values, ESTIMATED
    measured = [r.values for r in known if r.values is not None]
    if not measured:
        return [0.0] * len(settings.directions), PLACEHOLDER
    worst = [min if d == "maximize" else max for d in settings.directions]
    return [pick(column) for pick, column in zip(worst, zip(*measured))], PLACEHOLDER


def tell(study: optuna.Study, trial: optuna.Trial, told: Told) -> tuple[FrozenTrial, bool]:
    """End the trial. Returns it, and whether the sampler asks to stop, which an exhaustive one does by an exception."""
    for key, value in told.attrs.items():
        trial.set_user_attr(key, value)
    for name in sorted(told.constraints):  # in one order, since the Gaussian process goes by position
        trial.set_constraint(name, told.constraints[name])
    state = TrialState.FAIL if told.values is None else TrialState.COMPLETE
    try:
        return study.tell(trial, told.values, state=state), False
    except RuntimeError as error:
        if "Study.stop" not in str(error):
            raise
        return next(t for t in study.get_trials(deepcopy=False) if t.number == trial.number), True


def quiet_optuna() -> None:
    """Leave the talking to us: no line per trial, and no warning that a sampler is experimental."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
