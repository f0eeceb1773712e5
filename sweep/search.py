"""A search: ask Optuna for a candidate, ask the preflight whether it is worth a run, run it, tell what came out.

Knows nothing of what is searched. Whoever runs the jobs (Hydra's launcher, or a table of known results) is a `Runner`.
"""

from __future__ import annotations

import gc
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import optuna
from omegaconf import DictConfig
from optuna.trial import FrozenTrial, TrialState

from sweep.errors import BadInput
from sweep.search_answer import (
    DETAIL_CHARACTERS,
    FAILED,
    OK,
    OOM_CONSTRAINT,
    Answer,
    NoAnswer,
    read_answer,
    read_exception,
    read_preflight,
)
from sweep.search_record import (
    ANSWERED_BY,
    BY_MEMORY,
    BY_PREFLIGHT,
    ESTIMATED,
    JOB,
    PLACEHOLDER,
    VALUE_IS,
    Record,
    best_first,
    record,
    records,
    summary,
    write_summary,
)
from sweep.search_report import Progress
from sweep.search_sampler import Sampler
from sweep.search_space import Point, Space
from sweep.search_study import close_stale, owner

DEFAULT_TRIALS = 20
#: Above this number of points a space is not enumerated: no exhaustion is noticed, and no grid is walked.
MOST_POINTS = 20_000
#: After so many known points in a row an unknown one is taken instead.
REPEATS_IN_A_ROW = 10


@dataclass
class Job:
    """One candidate: what a preflight judges and what a runner launches."""

    number: int  # of the Optuna trial; also names the folder
    point: Point
    overrides: list[str]
    config: DictConfig  # composed, without Hydra's own part
    folder: Path | None = None
    estimate: Answer | None = None  # what the preflight said


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


class Search:
    """One run of a search over a study, which may hold trials of earlier runs.

    preflight: called with a Job before it is launched; see `sweep.search_answer.read_preflight` for what it may say.
        If it has a method `learn`, that gets the Record of every ended trial, those of earlier runs first.
    plan: called with this Search before the first candidate; returns points to try first, in a person's values.
    read: called with a Job and what it returned; returns what `read_answer` understands.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        sampler: Sampler,
        settings: Settings,
        runner: Runner,
        *,
        folder: Path | None = None,
        fixed: str = "",
        enqueue: Iterable[Mapping[str, Any]] = (),
        preflight: Callable[[Job], Any] | None = None,
        plan: Callable[[Search], Iterable[Mapping[str, Any]]] | None = None,
        read: Callable[[Job, Any], Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.study, self.space, self.sampler, self.settings, self.runner = study, space, sampler, settings, runner
        self.folder, self.fixed, self.preflight, self.plan, self.read = folder, fixed, preflight, plan, read
        self.queue: list[Point] = [space.label(p) for p in enqueue]
        self.points = space.points(MOST_POINTS)
        if sampler.exhaustive and self.points is None:
            raise BadInput(
                "hydra.sweeper.sampler", sampler.name, "the space is not finite", "use choices and ranges, or tpe"
            )
        self.limit = settings.n_trials
        if self.limit is None and not sampler.exhaustive:
            self.limit = DEFAULT_TRIALS
        study.sampler = sampler.optuna
        self.progress = Progress(settings.directions, settings.objectives, self.limit, say)
        self.records: dict[int, Record] = {}
        self.ended_because = ""
        self._known: dict[tuple[str, ...], Record] = {}  # measured, refused, or failed in this run
        self._open: dict[int, optuna.Trial] = {}
        self._running: set[tuple[str, ...]] = set()  # the points of the batch that is being filled or run
        self._unknown = self._in_order()
        self._skipped_in_a_row = self._repeats_in_a_row = self._failures = 0
        self._batch_failure_rate = 0.0
        self._last_failure = ""
        self._stopped_by_sampler = False
        self._started = time.monotonic()

    def run(self) -> list[Record]:
        """Search until one of the limits. Returns all trials of the study; whatever happens, they are kept and written.

        Raises BadInput where more jobs failed than allowed. An interruption ends the open trials first.
        """
        stale = close_stale(self.study)
        if stale:
            numbers = ", ".join(str(t.number) for t in stale)
            self.progress.say(f"closed what a killed command left running: trial {numbers}")
        for r in records(self.study):
            self._remember(r)
        self.progress.begin(self.study.study_name, list(self.records.values()))
        try:
            if self.plan is not None and self._why_end() is None:
                self.queue += [self.space.label(p) for p in self.plan(self)]
            while (why := self._why_end()) is None:
                self._step()
            self.ended_because = why
        except BaseException as error:
            self.ended_because = f"interrupted ({type(error).__name__})"
            raise
        finally:
            self._close_open(self.ended_because)
            self._write()
        self._raise_if_too_many_failures()
        return list(self.records.values())

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Fill a batch with candidates that need a run, run them, and tell what came out."""
        batch: list[tuple[optuna.Trial, Job]] = []
        twins: list[tuple[optuna.Trial, Job]] = []  # same point as one of the batch
        room = self.settings.n_jobs if self.limit is None else min(self.settings.n_jobs, self.limit - self.launched)
        while len(batch) < room and not (self.sampler.exhaustive and self._unknown.keys() <= self._running):
            trial = self._ask()
            job = self._compose(trial)
            if job is None:
                pass
            elif self.space.identity(job.point) in self._running:
                twins.append((trial, job))
            elif self._needs_run(trial, job):
                batch.append((trial, job))
                self._running.add(self.space.identity(job.point))
            if self._why_end() is not None or len(twins) >= REPEATS_IN_A_ROW:
                break
        if batch:
            self._launch(batch)
        self._running.clear()
        for trial, job in twins:
            if not self._answer_from_memory(trial, job):
                self._tell(trial, job, Answer(outcome=FAILED, reason="the same point failed beside it"), BY_MEMORY)

    def _ask(self) -> optuna.Trial:
        """A new candidate: the next of the queue, of the walk, or the sampler's."""
        point = self._next_point()
        if point is not None:
            self.study.enqueue_trial(point)
        before = len(self.study.get_trials(deepcopy=False))
        try:
            trial = self.study.ask(self.space.distributions)
            self._open[trial.number] = trial
            self.space.suggest_rest(trial)
        except BaseException as error:
            # Optuna leaves the trial running when a suggestion raises.
            for t in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])[-1:]:
                if t.number >= before - 1 and t.number not in self._open:
                    self._open[t.number] = optuna.Trial(self.study, t._trial_id)
            if isinstance(error, Exception) and not isinstance(error, BadInput):
                key, value = ("hydra.sweeper.sampler", self.sampler.name)
                if self.space.extend is not None:
                    key, value = "hydra.sweeper.custom_search_space", self.space.extend_name
                raise BadInput(key, value, f"no candidate can be asked for ({error})", "correct it") from error
            raise
        return trial

    def _next_point(self) -> Point | None:
        while self.queue:
            point = self.queue.pop(0)
            # Only whole points can be looked up; the rest of a partial one is the sampler's choice.
            if set(self.space.parameters) <= set(point) and self.space.identity(point) in self._known:
                continue
            return point
        if self.sampler.exhaustive or self._repeats_in_a_row >= REPEATS_IN_A_ROW:
            return next((p for i, p in self._unknown.items() if i not in self._running), None)
        return None

    def _compose(self, trial: optuna.Trial) -> Job | None:
        point = trial.params
        job = Job(trial.number, point, self.space.overrides(point), DictConfig({}))
        asked = {"owner": owner(), "overrides": job.overrides, "fixed": self.fixed}
        try:
            job.config, job.folder = self.runner.compose(trial.number, job.overrides)
        except Exception as error:
            trial.set_user_attr(JOB, asked)
            self._tell(trial, job, read_exception(error), BY_PREFLIGHT)
            return None
        trial.set_user_attr(JOB, asked | ({"folder": str(job.folder)} if job.folder is not None else {}))
        return job

    def _needs_run(self, trial: optuna.Trial, job: Job) -> bool:
        """Answer a candidate from memory or by the preflight where that is possible."""
        if self._answer_from_memory(trial, job):
            return False
        if self.preflight is None:
            return True
        try:
            answer = read_preflight(self.preflight(job), self.settings.objectives)
        except BadInput as error:
            answer = Answer(outcome="invalid", reason=str(error), run=False, estimated=True)
        except NoAnswer as error:
            raise BadInput("hydra.sweeper.preflight", self.preflight, str(error), "correct what it returns") from error
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.progress.say(f"trial {job.number}: the preflight failed, so it is run ({why})")
            return True
        job.estimate = answer
        if answer.run:
            return True
        self._tell(trial, job, answer, BY_PREFLIGHT)
        return False

    def _answer_from_memory(self, trial: optuna.Trial, job: Job) -> bool:
        known = self._known.get(self.space.identity(job.point))
        if known is None:
            return False
        answer = Answer(
            outcome=known.outcome,
            values=known.values or known.estimated_values,
            constraints=known.constraints,
            reason=known.reason,
            mlflow_run_id=known.mlflow_run_id,
            folder=known.folder,
            estimated=known.values is None,
        )
        trial.set_user_attr("same_as", known.number if known.same_as is None else known.same_as)
        self._tell(trial, job, answer, BY_MEMORY)
        return True

    def _launch(self, batch: list[tuple[optuna.Trial, Job]]) -> None:
        returned = self.runner.launch([job for _, job in batch])
        failed = 0
        for (trial, job), (said, folder) in zip(batch, returned):
            answer = self._read(job, said)
            answer.folder = answer.folder or (str(folder) if folder is not None else None)
            failed += answer.failed
            self._tell(trial, job, answer, None)
        self._batch_failure_rate = failed / len(batch)
        if any(isinstance(said, BaseException) for said, _ in returned):
            # Exceptions keep their frames alive, and those whatever was large in them.
            del returned, said
            gc.collect()

    def _read(self, job: Job, said: Any) -> Answer:
        try:
            if isinstance(said, BaseException):
                constraint = next(iter(self.settings.constraints), OOM_CONSTRAINT)
                answer = read_exception(said, constraint)
                answer.details = "".join(traceback.format_exception(said))[-DETAIL_CHARACTERS:]
                _forget_frames(said)
                return answer
            if self.read is not None:
                said = self.read(job, said)
            return read_answer(said, self.settings.objectives)
        except NoAnswer as error:
            return Answer(outcome=FAILED, reason=str(error))

    # --- telling ------------------------------------------------------------------------------------------------

    def _tell(self, trial: optuna.Trial, job: Job, answer: Answer, answered_by: str | None) -> None:
        """End a trial. One that violates a constraint is complete and infeasible, so that samplers learn from it."""
        # Each costs a commit, so what goes without saying is not said.
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
        values, constraints = answer.values, {}
        if not answer.failed:
            constraints = self._constraints(answer, job.estimate)
            value_is = ESTIMATED if answer.estimated else None
            if values is None:
                values, value_is = self._stand_in(job.estimate)
            attrs[VALUE_IS] = value_is
        for key, value in attrs.items():
            if value not in (None, "", {}):
                trial.set_user_attr(key, value)
        for name in sorted(constraints):  # in one order, since the Gaussian process goes by position
            trial.set_constraint(name, constraints[name])
        try:
            ended = self.study.tell(trial, values, state=TrialState.FAIL if values is None else TrialState.COMPLETE)
        except RuntimeError as error:
            if "Study.stop" not in str(error):
                raise
            self._stopped_by_sampler = True  # the only way in which an exhaustive sampler can say so
            ended = next(t for t in self.study.get_trials(deepcopy=False) if t.number == trial.number)
        self._open.pop(trial.number, None)
        self._ended(ended, answered_by)

    def _constraints(self, answer: Answer, estimate: Answer | None) -> dict[str, float]:
        """The trial's violations, filled up to the names that the study's other trials have.

        A trial without a value for a constraint counts as feasible in it, and the Gaussian process refuses trials with
        different numbers of them.
        """
        names = {n for r in self.records.values() for n in r.constraints} | set(self.settings.constraints)
        if self.sampler.name == "GPSampler" and not self.settings.constraints:
            names.add(OOM_CONSTRAINT)
        told = dict(answer.constraints)
        if answer.values is None and estimate is not None:
            for name, value in estimate.constraints.items():
                told.setdefault(name, max(value, 0.0))
        return dict.fromkeys(names, 0.0) | told

    def _stand_in(self, estimate: Answer | None) -> tuple[list[float], str]:
        """What to tell for an infeasible trial that has no value: the estimate, or else the worst that was measured.

        Only the Gaussian process looks at it, and it is never shown as a result.
        """
        if estimate is not None and estimate.values is not None:
            return estimate.values, ESTIMATED
        measured = [r.values for r in self.records.values() if r.values is not None]
        if not measured:
            return [0.0] * len(self.settings.directions), PLACEHOLDER
        worst = [min if d == "maximize" else max for d in self.settings.directions]
        return [pick(column) for pick, column in zip(worst, zip(*measured))], PLACEHOLDER

    def _ended(self, trial: FrozenTrial, answered_by: str | None) -> None:
        r = record(trial)
        self._skipped_in_a_row = 0 if answered_by is None else self._skipped_in_a_row + 1
        self._repeats_in_a_row = self._repeats_in_a_row + 1 if answered_by == BY_MEMORY else 0
        if r.state == "FAIL" and r.original:
            self._last_failure = r.reason
            self._failures += answered_by is None
        self._remember(r, this_run=True)
        self.progress.ended(r, list(self.records.values()))
        if answered_by is None:
            self._write()

    def _remember(self, r: Record, *, this_run: bool = False) -> None:
        self.records[r.number] = r
        learn = getattr(self.preflight, "learn", None)
        if learn is not None and r.ended:
            learn(r)
        # A failure of an earlier run may have been mended since, so such a point may be run again.
        answers = r.state == "COMPLETE" or (r.state == "FAIL" and this_run)
        if answers and r.fixed == self.fixed:
            try:
                identity = self.space.identity(r.params)
            except (KeyError, ValueError):  # asked for by something else, with other keys or values
                return
            self._known.setdefault(identity, r)
            self._unknown.pop(identity, None)

    # --- ending -------------------------------------------------------------------------------------------------

    @property
    def launched(self) -> int:
        return sum(r.launched and r.ended for r in self.records.values())

    def _why_end(self) -> str | None:
        """Why the search is over, or None."""
        s = self.settings
        if self.limit is not None and self.launched >= self.limit:
            return f"{self.limit} trials were run"
        if self.points is not None and not self._unknown:
            return f"the space is exhausted: all of its {len(self.points)} points are known"
        if self._stopped_by_sampler:
            return "the sampler has no further candidate"
        if s.timeout_s is not None and time.monotonic() - self._started >= s.timeout_s:
            return f"the time of {s.timeout_s:g} s is over"
        if self._too_many_failures():
            return "too many jobs failed"
        if self._skipped_in_a_row >= s.max_skipped:
            return f"the last {s.max_skipped} candidates needed no run"
        return None

    def _too_many_failures(self) -> str | None:
        s = self.settings
        if s.max_failures is not None and self._failures > s.max_failures:
            return "max_failures"
        if s.max_failure_rate is not None and self._batch_failure_rate > s.max_failure_rate:
            return "max_failure_rate"
        return None

    def _raise_if_too_many_failures(self) -> None:
        key = self._too_many_failures()
        if key is not None:
            raise BadInput(
                f"hydra.sweeper.{key}",
                getattr(self.settings, key),
                f"{self._failures} jobs failed, the last with {self._last_failure}",
                "mend the job, or raise the limit",
            )

    def _close_open(self, reason: str) -> None:
        for trial in list(self._open.values()):
            trial.set_user_attr("reason", reason)
            self._remember(record(self.study.tell(trial, state=TrialState.FAIL)))
        self._open.clear()

    def _write(self) -> None:
        if self.folder is not None:
            said = summary(
                self.study,
                list(self.records.values()),
                sampler=self.sampler.name,
                ended_because=self.ended_because or "still running",
            )
            write_summary(self.folder, said)

    def best(self) -> list[Record]:
        """The feasible trials, best first; of several objectives, the Pareto front."""
        return best_first(list(self.records.values()), self.settings.directions)

    def _in_order(self) -> dict[tuple[str, ...], Point]:
        """The points that are not known, in the order in which an exhaustive search takes them."""
        points = list(self.points or ())
        shuffled = any(p.shuffled for p in self.space.parameters.values())
        if not self.sampler.ordered or shuffled:
            random.Random(self.sampler.seed).shuffle(points)
        return {self.space.identity(p): p for p in points}


def _forget_frames(error: BaseException) -> None:
    """Drop the local variables that an exception's traceback holds, and those of its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if current.__traceback__ is not None:
            traceback.clear_frames(current.__traceback__)
            current.__traceback__ = None
        current = current.__cause__ or current.__context__


def quiet_optuna() -> None:
    """Leave the talking to us: no line per trial, and no warning that a sampler is experimental."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
