"""What a job or a preflight says of one candidate, in whichever form it says it.

A plain number or a sequence of numbers is the objective or the objectives. Anything with more to say is a mapping or an
object with some of: `value` | `values`, `constraints` (name -> violation, feasible when <= 0), `outcome`, `reason`,
`mlflow_run_id`, `info` (plain data that is kept with the trial).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from sweep.search.space import Point


@dataclass
class Job:
    """One candidate: what a preflight judges and what a runner launches."""

    number: int  # of the Optuna trial; also names the folder
    point: Point
    overrides: list[str]
    config: DictConfig  # composed, without Hydra's own part
    folder: Path | None = None
    estimate: Answer | None = None  # what the preflight said
    session: Any = None  # the project's own, where it is the app that is searched


class Runner(Protocol):
    """Composes and launches jobs."""

    def compose(self, number: int, overrides: list[str]) -> tuple[DictConfig, Path | None]:
        """The config and the folder that the job would have. Raises what composing raises."""

    def launch(self, jobs: Sequence[Job]) -> list[tuple[Any, Path | None]]:
        """Run the jobs; for each what it returned, or its exception, and its folder."""


@dataclass
class Settings:
    """How long to search and what to make of failures. See the plugin's config for the meaning of each."""

    directions: list[str] = field(default_factory=lambda: ["minimize"])
    objectives: list[str] = field(default_factory=list)  # names; empty: value, or value_0, value_1, ...
    constraints: list[str] = field(default_factory=list)  # names that every trial must have
    n_trials: int | None = None
    timeout_s: float | None = None
    n_jobs: int = 1
    max_failures: int | None = 10
    max_failure_rate: float | None = None
    max_skipped: int = 200
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.objectives:
            several = len(self.directions) > 1
            self.objectives = [f"value_{i}" for i in range(len(self.directions))] if several else ["value"]


OK, INFEASIBLE, OVER_BUDGET, OUT_OF_MEMORY, FAILED = "ok", "infeasible", "over_budget", "oom_device", "failed"
#: Name of the constraint that an out-of-memory error violates where the job has not named its constraints.
OOM_CONSTRAINT = "out_of_memory"
#: Violations are kept finite, since samplers add them up.
LARGEST = 1e30
REASON_CHARACTERS = 500
DETAIL_CHARACTERS = 4000

_FIELDS = ("value", "values", "constraints", "outcome")
_OOM_TYPES = ("OutOfMemoryError", "DeviceOutOfMemory", "MemoryError")
_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")


class NoAnswer(Exception):
    """What was returned cannot be told to a sampler; the message says why."""


@dataclass
class Answer:
    """One candidate, measured or estimated. `values` is None where it failed, or ran out of memory before any."""

    outcome: str = OK
    values: list[float] | None = None
    constraints: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    details: str = ""  # a traceback
    mlflow_run_id: str | None = None
    folder: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    estimated: bool = False  # the values were not measured
    run: bool = True  # preflight only: whether to launch the job
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
    """The answer in what a job returned; `names` are the objectives'. Raises NoAnswer with the reason."""
    if returned is None:
        raise NoAnswer("the job returned None, not an objective")
    if isinstance(returned, Answer):
        return returned
    number = _number(returned)
    if number is not None:
        return Answer(values=_values([number], names))
    get = _getter(returned)
    if get is None:
        return Answer(values=_values(returned, names))
    answer = Answer(
        outcome=str(getattr(get("outcome"), "value", get("outcome")) or OK),
        constraints=_constraints(get("constraints")),
        reason=str(get("reason") or get("error") or "")[:REASON_CHARACTERS],
        mlflow_run_id=_text(get("mlflow_run_id")),
        folder=_text(get("folder")),
        info=dict(get("info") or {}),
    )
    told = get("values") if get("values") is not None else get("value")
    return _complete(answer, told, names)


def _complete(answer: Answer, told: Any, names: Sequence[str]) -> Answer:
    """Add the objectives, which a trial that violates a constraint may lack."""
    if answer.outcome.startswith("oom") and answer.violation <= 0:
        answer.constraints = {**answer.constraints, OOM_CONSTRAINT: 1.0}
    if told is not None:
        try:
            answer.values = _values(told if _number(told) is None else [told], names)
        except NoAnswer:
            if answer.violation <= 0:
                raise
    elif answer.violation <= 0 and answer.outcome == OK:
        raise NoAnswer(f"the job returned no {' and no '.join(names)}")
    if answer.outcome == OK and answer.violation > 0:
        answer.outcome = INFEASIBLE
    elif answer.outcome not in (OK, INFEASIBLE) and answer.violation <= 0:
        # The job itself says that it went wrong: its number, if any, is no measurement.
        answer.values, answer.reason = None, answer.reason or answer.outcome
    return answer


def read_preflight(returned: Any, names: Sequence[str]) -> Answer:
    """What a preflight says: None or True lets the job run, `run` (or a violation) decides otherwise.

    `same_as` names an earlier trial that is the same but for its words; its measurement answers.
    """
    if returned is None or returned is True:
        return Answer(estimated=True)
    if returned is False:
        return Answer(outcome=FAILED, reason="the preflight refused it", run=False, estimated=True)
    get = _getter(returned)
    if get is None:
        raise NoAnswer(f"a preflight returns None, a bool, a mapping or an object, not {type(returned).__name__}")
    answer = Answer(
        outcome=OK,
        constraints=_constraints(get("constraints")),
        reason=str(get("reason") or "")[:REASON_CHARACTERS],
        mlflow_run_id=_text(get("mlflow_run_id")),
        folder=_text(get("folder")),
        info=dict(get("info") or {}),
        estimated=True,
        same_as=get("same_as"),
    )
    told = get("values") if get("values") is not None else get("value")
    if told is not None:
        answer.values = _values(told if _number(told) is None else [told], names)
    run = get("run")
    answer.run = answer.violation <= 0 if run is None else bool(run)
    if not answer.run:
        answer.outcome = str(get("outcome") or (OVER_BUDGET if answer.violation > 0 else FAILED))
        answer.reason = answer.reason or "the preflight refused it"
        if answer.violation <= 0:
            answer.values = None  # an estimate is never a result, and without a violation it would be one
    return answer


def read_exception(error: BaseException, constraint: str = OOM_CONSTRAINT) -> Answer:
    """The answer in an exception: out of memory is a violation, which teaches a sampler; anything else is a failure."""
    first = (str(error).strip().splitlines() or [""])[0]
    reason = (f"{type(error).__name__}: {first}" if first else type(error).__name__)[:REASON_CHARACTERS]
    if is_out_of_memory(error):
        return Answer(outcome=OUT_OF_MEMORY, constraints={constraint: 1.0}, reason=reason)
    return Answer(outcome=FAILED, reason=reason)


def is_out_of_memory(error: BaseException) -> bool:
    """By name and message, so that no torch is needed, nor an exception of ours in somebody else's app."""
    named = any(c.__name__ in _OOM_TYPES for c in type(error).__mro__)
    return named or any(w in str(error).lower() for w in _OOM_WORDS)


def _getter(returned: Any) -> Any:
    """How to read a field of a mapping or of an object that has at least one of them; None for anything else."""
    if isinstance(returned, Mapping):
        if not any(f in returned for f in (*_FIELDS, "run")):
            raise NoAnswer(f"the returned mapping has none of {', '.join(_FIELDS)}")
        return returned.get
    fields = [f for f in (*_FIELDS, "run") if _is_field(returned, f)]
    if not fields or hasattr(returned, "__array__"):
        return None
    return lambda name: getattr(returned, name, None) if _is_field(returned, name) else None


def _is_field(thing: Any, name: str) -> bool:
    return hasattr(thing, name) and not callable(getattr(thing, name))


def _number(value: Any) -> float | None:
    if isinstance(value, (Mapping, list, tuple)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None


def _values(told: Any, names: Sequence[str]) -> list[float]:
    if isinstance(told, Mapping):
        missing = [n for n in names if n not in told]
        if missing:
            raise NoAnswer(f"the job returned no {' and no '.join(missing)}")
        told = [told[n] for n in names]
    if isinstance(told, str) or not isinstance(told, Iterable):
        raise NoAnswer(f"the job returned {told!r:.80}, not a number")
    found = [(v, _number(v)) for v in told]
    if len(found) != len(names):
        raise NoAnswer(f"the job returned {len(found)} objective(s) of {len(names)} ({', '.join(names)})")
    for name, (given, number) in zip(names, found):
        if number is None or math.isnan(number):
            raise NoAnswer(f"{name} is {'nan' if number is not None else repr(given)}, not a number")
    return [n for _, n in found if n is not None]


def _constraints(told: Any) -> dict[str, float]:
    if told is None:
        return {}
    items = told.items() if isinstance(told, Mapping) else enumerate(told)
    found: dict[str, float] = {}
    for name, value in items:
        number = _number(value)
        if number is None or math.isnan(number):
            raise NoAnswer(f"the constraint {name} is {'nan' if number is not None else repr(value)}, not a number")
        found[str(name)] = max(-LARGEST, min(LARGEST, number))
    return found


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
