"""One command: its trials, the baseline before all others, their records, and the report at the end.

Lives in the process that was started; a launcher's other processes attach to it through the sweep's folder.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

from sweep import tracking
from sweep.config.check import typed
from sweep.config.schema import Config, Mode, StrategyConf, TrackingConf, plain
from sweep.config.strategy_names import (
    fixed_id,
    is_baseline,
    name_strategy,
    strategy_id,
    trial_name,
    without_search,
)
from sweep.decide.verdict import grouped
from sweep.diagnose import diagnoses_in, print_all, run_diagnosis
from sweep.diagnose.advice import Diagnosis
from sweep.environment import home, program
from sweep.errors import EXIT_NOTHING_FEASIBLE, EXIT_OK, BadInput, DoesNotFit, one_line
from sweep.interrupts import whole
from sweep.memory.device import resolve_device
from sweep.progress import Display
from sweep.repeats import in_own_process, repeat_in_turn
from sweep.report import STATE, Judged, judge, phrases, print_report, report_console, single_line, write_report
from sweep.report import describe as describe_report
from sweep.results import Comparison, Evidence, Outcome, Prediction, Trace, TrialResult, read_trials, write_json
from sweep.trial.check import check_trial
from sweep.trial.process import run_isolated, run_isolated_trace
from sweep.trial.trial import describe, run_trace, run_trial, save


@dataclass
class State:
    """What other processes of the same sweep have to know, and later commands that go on with the same study."""

    started_at: str
    parent_run_id: str | None
    command: str
    study: str = ""  # name of the search's study
    storage: str | None = None  # where the study is kept, as hydra.sweeper.storage says it
    page: str = ""  # where MLflow shows the sweep (see tracking.sweep_page)

    def write(self, folder: Path) -> None:
        write_json(self, folder / STATE)


def read_state(folder: Path) -> State | None:
    """What the folder's command left; None where there is none, or where it cannot be read."""
    try:
        return State(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def now() -> str:
    """ISO 8601, UTC, as the results write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


#: Beside result.json, in the trial's folder.
FOLDER = "explain"


def trace_chosen(results: list[TrialResult], display: Display) -> Iterator[TrialResult]:
    """Trace what `chosen` names in each comparison whose config asks for it. Yields each trial with its trace set.

    results: all of a command's trials, whose comparisons are concluded here, before the report does.

    The caller saves them as they come: an interruption leaves those that came to their end.
    """
    asking = [r for r in results if r.config.get("explain") and r.mode == Mode.measure.value]
    if not asking:
        return
    picked = [r for group in grouped(asking) for r in chosen(group.conclude(), group.results)]
    wanted = [r for i, r in enumerate(picked) if not any(r is earlier for earlier in picked[:i])]
    if not wanted:
        return
    display.repeats(len(wanted), "traces")
    names = " and ".join(r.name for r in wanted)
    display.console.print(f"Tracing a few steps of {names}", markup=False, highlight=False)
    for result in wanted:
        with display.trial(f"{result.name}, a few steps under the profiler", "building the workload"):
            try:
                result.trace = _trace(typed(result.config), result, display)
            except Exception as error:
                words = f"Warning: {result.name} could not be traced: {one_line(error)}"
                display.console.print(words, markup=False, highlight=False)
                continue
        for what, why in result.trace.failed.items():
            words = f"Warning: {what} of {result.name} is not whole: {why}"
            display.console.print(words, markup=False, highlight=False)
        yield result


def files_of(result: TrialResult) -> list[Path]:
    """The files of a trial's trace; [] where it has none."""
    return [] if result.trace is None else [Path(result.folder) / name for name in result.trace.files]


def chosen(comparison: Comparison, results: list[TrialResult]) -> list[TrialResult]:
    """The baseline and the preferred trial; where that is the baseline, the one to take with less memory.

    results: those that the comparison was made from. Only trials that ran to their end.
    """
    baseline = None if comparison.baseline_index is None else results[comparison.baseline_index]
    preferred = None if comparison.preferred_index is None else results[comparison.preferred_index]
    if preferred is None or preferred is baseline:
        index = comparison.nearest_index if preferred is None else comparison.cheapest_index
        preferred = None if index is None else results[index]
    picked = [r for r in (baseline, preferred) if r is not None]
    return [r for r in picked if r.outcome == Outcome.ok.value and r.measurement is not None]


def _trace(config: Config, result: TrialResult, display: Display) -> Trace:
    run = run_isolated_trace if in_own_process(config) else run_trace
    trace = run(config, result.name, Path(result.folder) / FOLDER, progress=display.step)
    trace.files = [f"{FOLDER}/{name}" for name in trace.files]
    return trace


#: What verification of trials in their own processes has in common, while a command runs.
VERIFIED = ".verified"
#: Reason code of a trial that cannot be run as it was set.
BAD_SETTING = "bad_setting"
SECRET = (
    "The secret in tracking.uri is stored and shown as ***. To keep it out of the shell's history, too, set "
    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN) in its place, or tracking.uri='${oc.env:NAME}'"
)


class Session:
    """See the module's docstring."""

    def __init__(
        self, folder: Path, state: State, conf: TrackingConf, *, trials: int | None = None, owner: bool = True
    ) -> None:
        self.folder, self.state, self.conf, self.owner = folder, state, conf, owner
        self.display = Display(trials, report_console() if owner else Console(quiet=True))
        self.sweep = True  # of several trials, perhaps
        self.checked: dict[str, Any] = {}
        self.closed = False
        self.exit_code = EXIT_OK  # of the command
        self.files: list[Path] = []  # what a search has drawn: beside the report, and with it in the store
        self._baselines: dict[str, TrialResult] = {}  # ended ones, by fixed_id
        self._folders: dict[str, list[Path]] = {}  # by TrialResult.key: a baseline may lie in its own job's, too
        self._store = tracking.store_location(conf.uri, home(), conf.experiment) if conf.enabled else None

    @classmethod
    def open(
        cls,
        folder: Path,
        config: Config,
        overrides: Sequence[str],
        *,
        trials: int | None,
        sweep: bool,
        study: str = "",
        storage: str | None = None,
        checked: dict[str, Any] | None = None,
    ) -> Session:
        """Start a session: prepare the store, end what a killed command left, open the parent run.

        study: name of a search's study; a session of the same study in the same folder is gone on with.
        checked: what check_trial has built already.
        """
        command = shlex.join([*program(), *(["-m"] if sweep else []), *overrides])
        state = State(now(), None, command, study, storage)
        before = read_state(folder)
        resumed = bool(study) and before is not None and before.study == study
        if resumed and before is not None:
            state.started_at, state.parent_run_id = before.started_at, before.parent_run_id
        session = cls(folder, state, config.tracking, trials=trials)
        session.sweep, session.checked = sweep, checked or {}
        store = session._store
        if store is not None:
            tracking.initialise(store)
            if store.shown != store.uri:
                session.display.console.print(SECRET, markup=False, highlight=False)
            tracking.reconcile(store)
        if store is not None and config.mode is not Mode.diagnose:  # a diagnosis is one run by itself
            name = f"{config.workload.name} on {resolve_device(config.device).name}"
            tags = {"workload": config.workload.name, "mode": config.mode.value}
            params = {"overrides": " ".join(overrides)} if overrides else {}
            state.parent_run_id = tracking.open_sweep(
                store,
                name,
                tags=tags,
                params=params,
                description=f"Running: `{command}`",
                resume=state.parent_run_id,
            )
            if resumed:
                session._catch_up(store)
            state.page = tracking.sweep_page(store, state.parent_run_id)
        state.write(folder)
        session.display.start()
        return session

    def _catch_up(self, store: tracking.Store) -> None:
        """Record what an earlier command of the same search had measured when it was killed, and not recorded."""
        for result in self.results():
            if result.mlflow_run_id is None:
                folders = self._folders[result.key]
                result.folder = str(folders[0])
                tracking.record_again(store, self.state.parent_run_id, result)
                for folder in folders:
                    save(replace(result), folder)

    @classmethod
    def attach(cls, folder: Path, config: Config) -> Session:
        """The session of a sweep that another process has opened."""
        state = read_state(folder)
        assert state is not None, "the process that started the sweep writes it"
        return cls(folder, state, config.tracking, owner=False)

    def run(self, config: Config, folder: Path, overrides: Sequence[str]) -> TrialResult:
        """Run one trial, the baseline of its comparison before it, and record both."""
        overrides = without_search(overrides)
        config.device = resolve_device(config.device)
        name_strategy(config)
        try:
            check_trial(config, self.checked)
        except DoesNotFit as error:
            return self._invalid(config, folder, overrides, error)
        if is_baseline(config.strategy, config.workload.global_batch_size):
            with self._lock(config):
                done = self._known_baseline(config)
                if done is None:
                    return self._trial(config, trial_name(config, overrides), folder, overrides)
                return self._again(done, config, folder)  # an earlier candidate needed it
        if config.compare:
            self._ensure_baseline(config, overrides)
        begun = self._lock_file(config).exists()
        with self._lock(config):
            done = self._known(config) if begun else None
            if done is None:
                return self._trial(config, trial_name(config, overrides), folder, overrides)
            name = trial_name(config, overrides)
            same = "" if name == done.name else f", as {done.name}"
            self.display.console.print(f"{name}: computed already{same}", markup=False, highlight=False)
            return self._again(done, config, folder)

    def _again(self, done: TrialResult, config: Config, folder: Path) -> TrialResult:
        """Leave in a job's folder what has been computed already, to be judged by the job's budget, too."""
        self.display.skip()
        save(replace(done, budgets=[plain(config.budget)]), folder)
        return done

    def diagnose(self, config: Config, folder: Path, overrides: Sequence[str]) -> Diagnosis:
        """Say what fills the baseline's memory and what to try, by prediction. No trial is run."""
        with self.display.trial(config.workload.name, what="predicting"):
            return run_diagnosis(config, folder, overrides, self._store, self.display.predicting)

    def refuse(
        self, config: Config, folder: Path, overrides: Sequence[str], prediction: Prediction, reason: str
    ) -> TrialResult:
        """Record a trial that is not run, since it is predicted not to fit."""
        config.device = resolve_device(config.device)
        name_strategy(config)
        overrides = without_search(overrides)
        result = self._planned(config, trial_name(config, overrides), overrides)
        result.outcome, result.evidence = Outcome.over_budget.value, Evidence.predicted.value
        result.prediction, result.error = replace(prediction, fits=False), reason
        return self._record(result, folder)

    def _invalid(self, config: Config, folder: Path, overrides: Sequence[str], error: BadInput) -> TrialResult:
        """Record a trial that cannot be run, since its strategy does not fit the model. The others can."""
        result = self._planned(config, trial_name(config, overrides), overrides)
        result.outcome, result.reason, result.error = Outcome.invalid.value, BAD_SETTING, str(error)
        self._record(result, folder)
        self.display.skip()
        self.display.console.print(single_line(result), markup=False, highlight=False)
        return result

    def _planned(self, config: Config, name: str, overrides: Sequence[str]) -> TrialResult:
        result = describe(config, name)
        result.overrides, result.command = list(overrides), shlex.join([*program(), *overrides])
        return result

    @whole()
    def _record(self, result: TrialResult, folder: Path) -> TrialResult:
        """Leave the result.json and the MLflow run of a trial that is not run."""
        result.folder = str(folder)
        if self._store is not None:
            with tracking.start_trial(self._store, self.state.parent_run_id, result, system_metrics=False) as run:
                run.log(result)
        save(result, folder)
        return result

    def refuse_baseline(self, config: Config, prediction: Prediction, reason: str) -> TrialResult:
        """The same for the baseline of a config's comparison."""
        baseline = replace(config, strategy=StrategyConf(name="baseline"))
        return self.refuse(baseline, self._baseline_folder(config), ["strategy=baseline"], prediction, reason)

    def baseline_of(self, config: Config) -> TrialResult | None:
        """The baseline of this config's comparison, if it has ended already. `config.device` is resolved."""
        return self._known_baseline(config)

    def _ensure_baseline(self, config: Config, overrides: Sequence[str]) -> None:
        baseline = replace(config, strategy=StrategyConf(name="baseline"))
        with self._lock(baseline):
            if self._known_baseline(config) is not None:
                return
            self.display.one_more()
            others = [o for o in overrides if not o.lstrip("+~").startswith("strategy")]
            folder = self._baseline_folder(config)
            self._trial(baseline, trial_name(baseline, others), folder, [*others, "strategy=baseline"])

    def _baseline_folder(self, config: Config) -> Path:
        folder = self.folder / "baseline"
        return self.folder / f"baseline_{fixed_id(config)}" if folder.exists() else folder

    def _lock_file(self, config: Config) -> Path:
        return self.folder / f".{fixed_id(config)}_{strategy_id(config)}.lock"

    def _lock(self, config: Config) -> FileLock:
        """One process at a time computes what `config` says; the others find its result."""
        return FileLock(self._lock_file(config))

    def _known(self, config: Config) -> TrialResult | None:
        """A trial of this session that was the same computation and came to its end."""
        wanted, ended = (fixed_id(config), strategy_id(config)), (Outcome.ok.value, Outcome.over_budget.value)
        return next((r for r in self.results() if (r.fixed_id, r.strategy_id) == wanted and r.outcome in ended), None)

    def _known_baseline(self, config: Config) -> TrialResult | None:
        wanted = fixed_id(config)
        if wanted not in self._baselines:
            found = next((r for r in self.results() if r.is_baseline and r.fixed_id == wanted), None)
            if found is None:
                return None
            self._baselines[wanted] = found
        return self._baselines[wanted]

    def _trial(self, config: Config, name: str, folder: Path, overrides: Sequence[str]) -> TrialResult:
        folder.mkdir(parents=True, exist_ok=True)
        planned = self._planned(config, name, overrides)
        planned.folder = str(folder)
        with self.display.trial(name):
            if self._store is None:
                result = self._compute(config, planned, folder)
            else:
                with tracking.start_trial(
                    self._store, self.state.parent_run_id, planned, system_metrics=config.tracking.system_metrics
                ) as run:
                    result = self._compute(config, planned, folder)
                    with whole():
                        run.log(result)
                        save(result, folder)
        self.display.console.print(single_line(result), markup=False, highlight=False)
        return result

    def _compute(self, config: Config, planned: TrialResult, folder: Path) -> TrialResult:
        # A search asks for a trial's numbers before it chooses the next: it repeats at once.
        first_round = config.measure.interleave and not self.state.study
        shared = self.folder / VERIFIED
        run = partial(run_isolated, folder=folder, shared=shared) if in_own_process(config) else run_trial
        try:
            result = run(config, planned.name, progress=self.display.step, first_round=first_round)
        except BadInput as error:
            if not self.sweep or planned.is_baseline:
                raise
            result = replace(planned, outcome=Outcome.invalid.value, reason=BAD_SETTING, error=str(error))
        result.overrides, result.command = planned.overrides, planned.command
        save(result, folder)
        return result

    def results(self) -> list[TrialResult]:
        """All trials of this session so far, each once, the inserted baseline first, then in order of their start."""
        found: dict[str, TrialResult] = {}
        self._folders = {}
        for path, result in read_trials(self.folder):
            if result.started_at >= self.state.started_at:
                self._folders.setdefault(result.key, []).append(path.parent)
                earlier = found.setdefault(result.key, result)
                earlier.join(result)
                if path.parent.name.startswith("baseline"):
                    earlier.folder = result.folder
        return sorted(found.values(), key=lambda r: (not r.is_baseline, r.started_at, r.folder))

    def finish(self, status: tracking.Status = "FINISHED") -> None:
        """Repeat and judge all trials, write and print the report, and close the parent run.

        An interrupted command is finished, too: nothing more is run, and what there is is judged.
        """
        if self.closed:
            return
        results = self.results()
        if status == "FINISHED":
            # Interrupted in here, the command finishes once more, with what it has by then.
            if not self.state.study:
                repeat_in_turn(results, self.display, self._store)
            for traced in trace_chosen(results, self.display):
                self._save(traced)
        self._close(results, status)

    @whole()
    def _close(self, results: list[TrialResult], status: tracking.Status) -> None:
        self.closed = True
        shutil.rmtree(self.folder / VERIFIED, ignore_errors=True)
        self.display.stop()
        judged = judge(results) if results else []
        self._keep(judged)
        files, markdown = self._report(judged) if judged else ([], "")
        diagnoses = diagnoses_in(self.folder, self.state.started_at)
        if diagnoses and not print_all(diagnoses, self.display.console):
            self.exit_code = EXIT_NOTHING_FEASIBLE
        if self._store is not None:
            tracking.close_sweep(
                self._store,
                self.state.parent_run_id,
                status,
                report_markdown=markdown,
                files=files,
                comparisons=[comparison for _, comparison in judged],
            )

    def _report(self, judged: list[Judged]) -> tuple[list[Path], str]:
        """Everything that is made of the results together. Returns the files, and the report in markdown."""
        config = typed(judged[0][0].results[0].config)
        most = config.search.report_best if self.state.study else None
        report = write_report(judged, self.folder, command=self.state.command, most=most)
        print_report(report, self.display.console)
        if not report.feasible:
            self.exit_code = EXIT_NOTHING_FEASIBLE
        files = [*report.files, *self.files]
        return files, describe_report(report)

    def _keep(self, judged: list[Judged]) -> None:
        """Store what was decided with each trial."""
        decided: set[int] = set()  # of a trial that is judged by several budgets, the first is recorded
        for group, comparison in judged:
            for result, decision in zip(group.results, comparison.decisions):
                if id(result) in decided:
                    continue
                decided.add(id(result))
                result.decision = decision
                self._save(result)
                if self._store is not None:
                    said = phrases.said(result, decision, comparison, group.results)
                    tracking.update_decision(self._store, result.mlflow_run_id, result, files_of(result), said)

    def _save(self, result: TrialResult) -> None:
        """Into each folder that holds the trial, as `results()` found them."""
        for folder in self._folders[result.key]:
            save(replace(result), folder)
