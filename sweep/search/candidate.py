"""One candidate as a job, and what a job or a preflight says of it: a number, a sequence of numbers, or an `Answer`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from sweep.errors import is_out_of_memory, one_line, outcome_of
from sweep.search.space import Point


@dataclass
class Job:
    """What a preflight judges and what a runner launches."""

    number: int  # of the Optuna trial; also names the folder
    point: Point
    overrides: list[str]
    objectives: Sequence[str] = ("value",)  # names, in the order of an answer's values
    session: Any = None  # the project's own, where it is the app that is searched
    config: DictConfig = field(default_factory=lambda: DictConfig({}))  # composed, without Hydra's own part
    folder: Path | None = None
    estimate: Answer | None = None  # what the preflight said


class Runner(Protocol):
    """Composes and launches jobs."""

    def compose(self, number: int, overrides: list[str]) -> tuple[DictConfig, Path | None]:
        """The config and the folder that the job would have. Raises what composing raises."""

    def launch(self, jobs: Sequence[Job]) -> list[tuple[Any, Path | None]]:
        """Run the jobs; for each what it returned, or its exception, and its folder."""


OK, INFEASIBLE, OVER_BUDGET, FAILED = "ok", "infeasible", "over_budget", "failed"
#: Name of the constraint that an out-of-memory error violates where the job has not named its constraints.
OOM_CONSTRAINT = "out_of_memory"
#: Violations are kept finite, since samplers add them up.
LARGEST = 1e30
REASON_CHARACTERS = 500


class NoAnswer(Exception):
    """What was returned cannot be told to a sampler; the message says why."""


@dataclass
class Answer:
    """One candidate, measured or estimated. `values` is None where it failed, or ran out of memory before any."""

    outcome: str = OK
    values: Sequence[float] | None = None
    constraints: Mapping[str, float] = field(default_factory=dict)  # violations; feasible when <= 0
    reason: str = ""
    details: str = ""  # a traceback
    mlflow_run_id: str | None = None
    folder: str | None = None
    info: dict[str, Any] = field(default_factory=dict)  # plain data that is kept with the trial
    estimated: bool = False  # the values were not measured
    run: bool | None = None  # preflight only: whether to launch the job; None: where nothing is violated
    same_as: int | None = None  # preflight only: number of an earlier trial whose measurement is this one's, too

    @property
    def violation(self) -> float:
        return violation(self.constraints)

    @property
    def failed(self) -> bool:
        """Nothing that a sampler could learn from: no objective, and no violation either."""
        return self.values is None and self.violation <= 0


def violation(constraints: Mapping[str, float]) -> float:
    """By how much the constraints are violated together; 0 for a feasible point."""
    return sum(v for v in constraints.values() if v > 0)


def read_answer(returned: Any, names: Sequence[str]) -> Answer:
    """The answer in what a job returned: a number, a sequence of them, or an Answer; `names` are the objectives'.

    Raises NoAnswer with the reason.
    """
    if returned is None:
        raise NoAnswer("the job returned None, not an objective")
    several = isinstance(returned, (list, tuple)) or getattr(returned, "ndim", 0) > 0
    values = list(returned) if several else [returned]
    answer = _checked(returned if isinstance(returned, Answer) else Answer(values=values), names)
    if answer.outcome.startswith("oom") and answer.violation <= 0:
        answer.constraints = {**answer.constraints, OOM_CONSTRAINT: 1.0}
    if answer.outcome == OK and answer.violation > 0:
        answer.outcome = INFEASIBLE
    elif answer.outcome == OK and answer.values is None:
        raise NoAnswer(f"the job returned no {' and no '.join(names)}")
    elif answer.outcome not in (OK, INFEASIBLE) and answer.violation <= 0:
        # The job itself says that it went wrong: its number, if any, is no measurement.
        answer.values, answer.reason = None, answer.reason or answer.outcome
    return answer


def read_preflight(returned: Any, names: Sequence[str]) -> Answer:
    """What a preflight says: None lets the job run, an Answer refuses it by `run=False` or by a violation."""
    if returned is None:
        return Answer(estimated=True, run=True)
    if not isinstance(returned, Answer):
        raise NoAnswer(f"a preflight returns None or an Answer, not {type(returned).__name__}")
    answer = replace(_checked(returned, names), estimated=True)
    if answer.run is None:
        answer.run = answer.violation <= 0
    if not answer.run:
        if answer.outcome == OK:
            answer.outcome = OVER_BUDGET if answer.violation > 0 else FAILED
        answer.reason = answer.reason or "the preflight refused it"
        if answer.violation <= 0:
            answer.values = None  # an estimate is never a result, and without a violation it would be one
    return answer


def read_exception(error: BaseException, constraint: str = OOM_CONSTRAINT) -> Answer:
    """Out of memory is a violation, which teaches a sampler; any other exception is a failure."""
    reason = one_line(error)[:REASON_CHARACTERS]
    if is_out_of_memory(error):
        return Answer(outcome_of(error).value, constraints={constraint: 1.0}, reason=reason)
    return Answer(FAILED, reason=reason)


def _checked(answer: Answer, names: Sequence[str]) -> Answer:
    """A copy with plain, finite numbers. A trial that violates a constraint may lack values."""
    found = replace(answer, reason=answer.reason[:REASON_CHARACTERS])
    found.constraints = {
        name: max(-LARGEST, min(LARGEST, _number(f"the constraint {name}", value)))
        for name, value in answer.constraints.items()
    }
    if answer.values is None:
        return found
    try:
        if len(answer.values) != len(names):
            raise NoAnswer(f"the job returned {len(answer.values)} objective(s) of {len(names)} ({', '.join(names)})")
        found.values = [_number(name, value) for name, value in zip(names, answer.values)]
    except NoAnswer:
        if found.violation <= 0:
            raise
        found.values = None
    return found


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise NoAnswer(f"{name} is {value!r:.80}, not a number") from None
    if math.isnan(number):
        raise NoAnswer(f"{name} is nan, not a number")
    return number
