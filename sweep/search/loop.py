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
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from sweep.environment import own_process
from sweep.errors import BadInput
from sweep.interrupts import whole
from sweep.search.candidate import (
    FAILED,
    OK,
    OOM_CONSTRAINT,
    Answer,
    Job,
    NoAnswer,
    Runner,
    read_answer,
    read_exception,
    read_preflight,
)
from sweep.search.space import Point, Space, bare
from sweep.search.study import (
    ANSWERED_BY,
    BY_MEMORY,
    BY_PREFLIGHT,
    ESTIMATED,
    JOB,
    PLACEHOLDER,
    RESULTS_FILE,
    VALUE_IS,
    Record,
    Sampler,
    best_first,
    close,
    counts,
    draw_study,
    least_violating,
    record,
    records,
    stale,
    write_summary,
)

DEFAULT_TRIALS = 20
DETAIL_CHARACTERS = 4000
RUNNING = "still running"
#: Above this number of points a space is not enumerated: no exhaustion is noticed, and no grid is walked.
MOST_POINTS = 20_000
#: After so many candidates in a row that were known already the search takes an unknown point by itself.
REPEATS_IN_A_ROW = 10


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


def quiet_optuna() -> None:
    """Leave the talking to us: no line per trial, and no warning that a sampler is experimental."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class Limits:
    """Counts what has ended since this run began."""

    def __init__(self, settings: Settings, *, exhaustive: bool) -> None:
        self.settings = settings
        #: Jobs to launch over all runs of the study; None: as many as there are points.
        self.n_trials = settings.n_trials if settings.n_trials is not None or exhaustive else DEFAULT_TRIALS
        self.skipped_in_a_row = self.repeats_in_a_row = self.failures = 0
        self.batch_failure_rate = 0.0
        self._last_failure = ""
        self._started = time.monotonic()

    def count(self, r: Record) -> None:
        self.skipped_in_a_row = 0 if r.launched else self.skipped_in_a_row + 1
        self.repeats_in_a_row = self.repeats_in_a_row + 1 if r.answered_by == BY_MEMORY else 0
        if r.state == "FAIL" and r.launched:
            self.failures += 1
            self._last_failure = r.reason

    def why_end(self, launched: int) -> str | None:
        """Why the search is over, or None."""
        s = self.settings
        if self.n_trials is not None and launched >= self.n_trials:
            return f"{self.n_trials} trials were run"
        if s.timeout_s is not None and time.monotonic() - self._started >= s.timeout_s:
            return f"the time of {s.timeout_s:g} s is over"
        if self._exceeded():
            return "too many jobs failed"
        if self.skipped_in_a_row >= s.max_skipped:
            return f"the last {s.max_skipped} candidates needed no run"
        return None

    def _exceeded(self) -> tuple[str, float] | None:
        """The limit on failures that is exceeded."""
        for key, found in (("max_failures", self.failures), ("max_failure_rate", self.batch_failure_rate)):
            most = getattr(self.settings, key)
            if most is not None and found > most:
                return key, most
        return None

    def check_failures(self) -> None:
        """Raise BadInput if more jobs failed than allowed."""
        if exceeded := self._exceeded():
            wrong = f"{self.failures} jobs failed, the last with {self._last_failure}"
            raise BadInput(f"hydra.sweeper.{exceeded[0]}", exceeded[1], wrong, "mend the job, or raise the limit")


class Progress:
    """Lines for a terminal or a log. `say` prints one."""

    def __init__(self, settings: Settings, limit: int | None, say: Callable[[str], None]) -> None:
        self.directions, self.objectives, self.limit, self.say = settings.directions, settings.objectives, limit, say

    def ended(self, r: Record, found: Sequence[Record]) -> None:
        if r.answered_by == BY_MEMORY:
            return  # nothing new is known
        best, launched = best_first(found, self.directions), counts(found)["launched"]
        leading = "no feasible trial yet"
        if len(self.directions) > 1 and best:
            leading = f"front: {len(best)} trials"
        elif best:
            extreme = "highest" if self.directions[0] == "maximize" else "lowest"
            leading = f"{extreme} {self._numbers(best[0].values)} (trial {best[0].number})"
        of = launched if self.limit is None else f"{launched}/{self.limit}"
        said = (f"[{of}] trial {r.number}: {self.result(r)}", _words(r), leading)
        self.say(" | ".join(x for x in said if x))

    def result(self, r: Record) -> str:
        """The outcome with its numbers, an estimate named as one."""
        shown = r.outcome
        if r.values is not None:
            shown += " " + self._numbers(r.values)
        elif r.estimated_values is not None:
            why = "no result" if r.launched else "not run"
            shown += f" ({why}; estimated {self._numbers(r.estimated_values)})"
        over = [f"{k} by {v:.6g}" for k, v in r.constraints.items() if v > 0]
        if over:
            shown += f", over {' and '.join(over)}"
        return f"{shown} ({r.reason})" if r.state == "FAIL" and r.reason else shown

    def _numbers(self, values: Sequence[float] | None) -> str:
        return " ".join(f"{n}={v:.6g}" for n, v in zip(self.objectives, values or ()))

    def end(self, found: Sequence[Record], best: Sequence[Record], why: str) -> None:
        n = counts(found)
        tail = ", ".join(f"{n[k]} {w}" for k, w in _SAID.items() if n[k])
        self.say(f"the search ended: {why} ({tail})" if tail else f"the search ended: {why}")
        if best and len(self.directions) == 1:
            self.say(f"best: {self._line(best[0])}")
        elif best:
            self.say("\n  ".join([f"Pareto front of {len(best)} trials:", *map(self._line, best)]))
        else:
            self.say("no feasible trial")
            if nearest := least_violating(found):
                self.say(f"least violating: {self._line(nearest)}")

    def _line(self, r: Record) -> str:
        return " | ".join(x for x in (f"trial {r.number}: {self.result(r)}", _words(r), r.folder) if x)


_SAID = {
    "launched": "run in all",
    "infeasible": "of them infeasible",
    "failed": "failed",
    "not_run": "were refused before a run",
    "answered_from_memory": "were known already",
}


def _words(r: Record) -> str:
    """The words of a job that were searched; the fixed ones are the same for all."""
    searched = set(map(bare, r.params))
    return " ".join(o for o in r.overrides if bare(o.partition("=")[0]) in searched)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the local variables that an exception's traceback holds, and those of its causes."""
    while error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@dataclass(eq=False)
class Search:
    """One run of a study. Raises BadInput for a sampler or a queue that does not suit the space."""

    study: optuna.Study
    space: Space
    sampler: Sampler
    settings: Settings
    runner: Runner
    _: KW_ONLY
    folder: Path | None = None
    fixed: str = ""  # digest of what is not searched
    enqueue: Iterable[Mapping[str, Any]] = ()  # points to try first, in a person's values
    #: What `read_preflight` reads. Its method `learn`, if any, gets each ended trial, those of earlier runs first.
    preflight: Callable[[Job], Any] | None = None
    plan: Callable[[Search], Iterable[Mapping[str, Any]]] | None = None  # more such points
    read: Callable[[Job, Any], Any] | None = None  # makes what `read_answer` reads of what a job returned
    recover: Callable[[Job], Any] | None = None  # what a job whose command was killed would have returned, or None
    verdict: Callable[[Search], Record | None] | None = None  # the best trial; None: the one that leads
    say: Callable[[str], None] = print
    session: Any = None

    def __post_init__(self) -> None:
        self.queue: list[Point] = [self.space.label(p) for p in self.enqueue]
        self.points = self.space.points(MOST_POINTS)
        if self.sampler.exhaustive and self.points is None:
            wrong, todo = "the space is not finite", "use choices and ranges, or tpe"
            raise BadInput("hydra.sweeper.sampler", self.sampler.name, wrong, todo)
        self.study.sampler = self.sampler.optuna
        self.limits = Limits(self.settings, exhaustive=self.sampler.exhaustive)
        self.progress = Progress(self.settings, self.limits.n_trials, self.say)
        self.records: dict[int, Record] = {}
        self.ended_because = RUNNING
        self._known: dict[tuple[str, ...], Record] = {}  # measured, refused, or failed in this run
        self._open: dict[int, optuna.Trial] = {}
        self._running: set[tuple[str, ...]] = set()  # the points of the batch that is being filled or run
        self._unknown = self._in_order()
        self._judged_after = -1  # jobs launched when the refused points were last reconsidered

    def run(self) -> list[Record]:
        """Search until one of the limits. Returns all trials of the study; whatever happens, they are kept and written.

        Raises BadInput where more jobs failed than allowed. An interruption ends the open trials first.
        """
        self._take_up()
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
            with whole():
                for trial in self._open.values():
                    trial.set_user_attr("reason", self.ended_because)
                    self._remember(record(self.study.tell(trial, state=TrialState.FAIL)))
                self._open.clear()
                self._write()
        self.limits.check_failures()
        return list(self.records.values())

    def best(self) -> list[Record]:
        """The feasible trials, best first, the one that the verdict prefers before all; of several objectives, the
        Pareto front.
        """
        found = best_first(list(self.records.values()), self.settings.directions)
        preferred = self.verdict(self) if self.verdict is not None and len(self.settings.directions) == 1 else None
        return found if preferred is None else [preferred, *(r for r in found if r is not preferred)]

    def files(self) -> list[Path]:
        """What a search leaves beside a report: its result, and its pictures, drawn now."""
        if self.folder is None:
            return []
        result = self.folder / RESULTS_FILE
        return [*([result] if result.is_file() else []), *draw_study(self.study, self.folder)]

    # --- what earlier commands left -------------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Learn what the study knows. A trial of a killed command is ended, by its job's result where it left one."""
        left = [(trial, self._recovered(trial)) for trial in stale(self.study)]
        lost = [trial for trial, found in left if found is None]
        close(self.study, lost)
        if lost:
            numbers = ", ".join(str(t.number) for t in lost)
            self.progress.say(f"closed what a killed command left running: trial {numbers}")
        for r in records(self.study):
            self._remember(r)
        n, name = sum(r.launched for r in self.records.values()), self.study.study_name
        self.progress.say(f"going on with the study {name}: {n} trials are known" if self.records else f"study {name}")
        for trial, found in left:
            if found is not None:
                self.progress.say(f"trial {trial.number} had been run when its command was killed: its result is taken")
                self._tell(optuna.Trial(self.study, trial._trial_id), *found, None)

    def _recovered(self, trial: FrozenTrial) -> tuple[Job, Answer] | None:
        asked = trial.user_attrs.get(JOB, {})
        if self.recover is None or asked.get("fixed") != self.fixed or "folder" not in asked:
            return None
        job = self._job(trial.number, trial.params, asked["overrides"])
        try:
            job.config, _ = self.runner.compose(trial.number, job.overrides)
            job.folder = Path(asked["folder"])
            said = self.recover(job)
        except Exception as error:
            self.progress.say(f"trial {trial.number}: its result cannot be taken ({type(error).__name__}: {error})")
            return None
        return None if said is None else (job, self._read(job, said))

    # --- one step -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Fill a batch with candidates that need a run, run them, and tell what came out."""
        batch: list[tuple[optuna.Trial, Job]] = []
        twins: list[tuple[optuna.Trial, Job]] = []  # same point as one of the batch
        left = self.settings.n_jobs if self.limits.n_trials is None else self.limits.n_trials - self.launched
        while len(batch) < min(self.settings.n_jobs, left):
            if self.sampler.exhaustive and self._unknown.keys() <= self._running:
                break
            trial = self._ask()
            job = self._job(trial.number, trial.params, self.space.overrides(trial.params))
            identity = self.space.identity(job.point)
            if identity in self._running:
                twins.append((trial, job))
            elif self._needs_run(trial, job):
                batch.append((trial, job))
                self._running.add(identity)
            if self._why_end() is not None or len(twins) >= REPEATS_IN_A_ROW:
                break
        if batch:
            self._launch(batch)
        self._running.clear()
        for trial, job in twins:
            self._answer_from_memory(trial, job, self._known[self.space.identity(job.point)])

    def _job(self, number: int, point: Point, overrides: list[str]) -> Job:
        return Job(number, point, overrides, self.settings.objectives, self.session)

    @whole()
    def _ask(self) -> optuna.Trial:
        """A new candidate: the next of the queue, of the walk, or the sampler's."""
        point = self._next_point()
        if point is not None:
            self.study.enqueue_trial(point)
        try:
            trial = self.study.ask(self.space.distributions)
            self._open[trial.number] = trial
            self.space.suggest_rest(trial)
        except BadInput:
            raise
        except Exception as error:
            key, value = "hydra.sweeper.sampler", self.sampler.name
            if self.space.extend is not None:
                key, value = "hydra.sweeper.custom_search_space", self.space.extend_name
            raise BadInput(key, value, f"no candidate can be asked for ({error})", "correct it") from error
        return trial

    def _next_point(self) -> Point | None:
        while self.queue:
            point = self.queue.pop(0)
            # Only whole points can be looked up; the rest of a partial one is the sampler's choice.
            if not set(self.space.parameters) <= set(point) or self.space.identity(point) not in self._known:
                return point
        few_left = len(self._unknown) <= len(self._running) + 1
        if self.sampler.exhaustive or few_left or self.limits.repeats_in_a_row >= REPEATS_IN_A_ROW:
            return next((p for i, p in self._unknown.items() if i not in self._running), None)
        return None

    def _needs_run(self, trial: optuna.Trial, job: Job) -> bool:
        """Whether a job must be launched: not where the memory or the preflight answers, or composing fails."""
        known = self._known.get(self.space.identity(job.point))
        if known is not None and (known.answered_by != BY_PREFLIGHT or self.preflight is None):
            self._answer_from_memory(trial, job, known)
            return False
        wrong = None
        try:
            job.config, job.folder = self.runner.compose(trial.number, job.overrides)
        except Exception as error:
            wrong = read_exception(error)
        with whole():
            asked = {"owner": own_process(), "overrides": job.overrides, "fixed": self.fixed}
            trial.set_user_attr(JOB, asked if job.folder is None else asked | {"folder": str(job.folder)})
            if wrong is not None:
                self._tell(trial, job, wrong, BY_PREFLIGHT)
                return False
        job.estimate = self._judge(job)
        if job.estimate is None:
            return True
        twin = None if job.estimate.same_as is None else self.records.get(job.estimate.same_as)
        if twin is not None and twin.ended and twin.launched:
            self._answer_from_memory(trial, job, twin)
        elif job.estimate.run:
            return True
        elif known is not None:
            self._answer_from_memory(trial, job, known)
        else:
            self._tell(trial, job, job.estimate, BY_PREFLIGHT)
        return False

    def _judge(self, job: Job) -> Answer | None:
        """What the preflight says of a job; None where there is none, or where it fails."""
        if self.preflight is None:
            return None
        try:
            return read_preflight(self.preflight(job), self.settings.objectives)
        except BadInput as error:
            return Answer("invalid", reason=str(error), run=False, estimated=True)
        except NoAnswer as error:
            raise BadInput("hydra.sweeper.preflight", self.preflight, str(error), "correct what it returns") from error
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.progress.say(f"trial {job.number}: the preflight failed, so it is run ({why})")
            return None

    @whole()
    def _answer_from_memory(self, trial: optuna.Trial, job: Job, known: Record) -> None:
        trial.set_user_attr("same_as", known.number if known.same_as is None else known.same_as)
        same = ("outcome", "constraints", "reason", "mlflow_run_id", "folder")
        values = known.values or known.estimated_values
        answer = Answer(**{k: getattr(known, k) for k in same}, values=values, estimated=known.values is None)
        self._tell(trial, job, answer, BY_MEMORY)

    def _launch(self, batch: list[tuple[optuna.Trial, Job]]) -> None:
        returned = self.runner.launch([job for _, job in batch])
        raised = any(isinstance(said, BaseException) for said, _ in returned)
        failed = 0
        for (trial, job), (said, folder) in zip(batch, returned):
            answer = self._read(job, said)
            answer.folder = answer.folder or (str(folder) if folder is not None else None)
            failed += answer.failed
            self._tell(trial, job, answer, None)
        self.limits.batch_failure_rate = failed / len(batch)
        if raised:
            # Exceptions keep their frames alive, and those whatever was large in them.
            del returned, said
            gc.collect()

    def _read(self, job: Job, said: Any) -> Answer:
        """The answer in what a job returned or raised. Never raises for what a job did; such a trial has failed."""
        try:
            if not isinstance(said, BaseException):
                return read_answer(self.read(job, said) if self.read is not None else said, self.settings.objectives)
            answer = read_exception(said, next(iter(self.settings.constraints), OOM_CONSTRAINT))
            answer.details = "".join(traceback.format_exception(said))[-DETAIL_CHARACTERS:]
            _forget_frames(said)
            return answer
        except NoAnswer as error:
            return Answer(FAILED, reason=str(error))

    # --- telling --------------------------------------------------------------------------------------------------

    @whole()
    def _tell(self, trial: optuna.Trial, job: Job, answer: Answer, answered_by: str | None) -> None:
        """End a trial. One that violates a constraint is complete, never failed, so that samplers learn from it."""
        attrs = {
            "outcome": answer.outcome if answer.outcome != OK else FAILED if answer.failed else None,
            "reason": answer.reason,
            "folder": answer.folder if answer.folder != str(job.folder) else None,
            "mlflow_run_id": answer.mlflow_run_id,
            "info": answer.info,
            "details": answer.details,
            ANSWERED_BY: answered_by,
        }
        values = answer.values
        if not answer.failed:
            attrs[VALUE_IS] = ESTIMATED if answer.estimated else None
            if values is None:
                values, attrs[VALUE_IS] = self._stand_in(job.estimate)
            for name, violated in sorted(self._constraints(answer, job.estimate).items()):
                trial.set_constraint(name, violated)  # in one order, since the Gaussian process goes by position
        for key, value in attrs.items():
            if value not in (None, "", {}):  # each costs a commit, so what goes without saying is not said
                trial.set_user_attr(key, value)
        ended = self.study.tell(trial, values, state=TrialState.FAIL if values is None else TrialState.COMPLETE)
        self._open.pop(trial.number, None)
        r = record(ended)
        self.limits.count(r)
        self._remember(r, this_run=True)
        self.progress.ended(r, list(self.records.values()))
        if r.launched:
            self._write()

    def _constraints(self, answer: Answer, estimate: Answer | None) -> dict[str, float]:
        """The trial's violations, filled up to the names that the study's other trials have.

        A trial without a value for a constraint counts as feasible in it, and the Gaussian process refuses trials with
        different numbers of them.
        """
        names = {n for r in self.records.values() for n in r.constraints} | set(self.settings.constraints)
        if self.sampler.name == "GPSampler" and not self.settings.constraints:
            names.add(OOM_CONSTRAINT)
        expected = {}
        if answer.values is None and estimate is not None:
            expected = {name: max(value, 0.0) for name, value in estimate.constraints.items()}
        return dict.fromkeys(names, 0.0) | expected | dict(answer.constraints)

    def _stand_in(self, estimate: Answer | None) -> tuple[Sequence[float], str]:
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

    @whole()
    def _write(self) -> None:
        if self.folder is not None:
            found = list(self.records.values())
            best = self.best() if self.ended_because != RUNNING else best_first(found, self.settings.directions)
            write_summary(self.folder, self.study, found, best, self.sampler.name, self.ended_because)

    # --- what is known --------------------------------------------------------------------------------------------

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
            known = self._known.setdefault(identity, r)
            if known.answered_by == BY_PREFLIGHT and r.launched:
                self._known[identity] = r
            self._unknown.pop(identity, None)

    @property
    def launched(self) -> int:
        return sum(r.launched and r.ended for r in self.records.values())

    def _why_end(self) -> str | None:
        if self.points is not None and not self._unknown and not self._reconsider():
            return f"the space is exhausted: all of its {len(self.points)} points are known"
        return self.limits.why_end(self.launched)

    def _reconsider(self) -> bool:
        """Whether the preflight, having learned from what was measured, now lets a point run that it had refused."""
        if not hasattr(self.preflight, "learn") or self._judged_after == self.launched:
            return False
        self._judged_after = self.launched
        for identity, r in self._known.items():
            if r.answered_by != BY_PREFLIGHT:
                continue
            job = self._job(r.number, r.params, r.overrides)
            try:
                job.config, _ = self.runner.compose(r.number, r.overrides)
            except Exception:
                continue  # it could not be composed when it was asked, either
            judged = self._judge(job)
            if judged is not None and judged.run:
                self._unknown[identity] = r.params
        return bool(self._unknown)

    def _in_order(self) -> dict[tuple[str, ...], Point]:
        """The points that are not known, in the order in which an exhaustive search takes them."""
        points = list(self.points or ())
        shuffled = any(p.shuffled for p in self.space.parameters.values())
        if not self.sampler.ordered or shuffled:
            random.Random(self.sampler.seed).shuffle(points)
        return {self.space.identity(p): p for p in points}
