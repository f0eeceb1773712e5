"""Recording in MLflow: one parent run per sweep, one child run per trial.

    store = store_location(config.tracking.uri, root)
    initialise(store)                                    # once, in the parent, before anything is launched
    reconcile(store)                                     # ends what a killed command left running
    sweep = open_sweep(store, "gpt_tiny on cpu")
    with start_trial(store, sweep, planned) as run:      # MLflow's system metrics are sampled inside
        run.log(measure(...), [folder / "memory.html"])
    update_decision(store, run.run_id, result)           # candidates are judged when all are known
    close_sweep(store, sweep, report_markdown=report)

Runs are addressed by id, never through MLflow's active run, so threads and processes do not get in each other's way.
A run ends FINISHED for a trial that said what it should, FAILED for one that went wrong (the tags say how), KILLED for
one that was interrupted. Once a sweep is under way, a store that fails costs a warning and never a measurement. Only
this room imports MLflow, inside functions. Words that describe a run are handed in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sweep.interrupts import whole
from sweep.results import Comparison, Outcome, TrialResult
from sweep.tracking import runs, values
from sweep.tracking.runs import Status, best_effort, reconcile
from sweep.tracking.store import Store, as_bad_input, client, experiment_id, initialise, store_location
from sweep.tracking.views import save_views, sweep_page

if TYPE_CHECKING:
    from sweep.tracking.system import SystemSampler

__all__ = [
    "Status", "Store", "TrialRun", "close_sweep", "initialise", "open_sweep", "reconcile", "record", "record_again",
    "start_trial", "store_location", "sweep_page", "update_decision",
]  # fmt: skip

#: A tag of a sweep and of its trials: what the sweep is called, unlike its run's name never twice.
SWEEP = "sweep"


@whole()
def open_sweep(
    store: Store,
    name: str,
    *,
    tags: dict[str, str] | None = None,
    description: str = "",
    params: dict[str, Any] | None = None,
    resume: str | None = None,
) -> str:
    """Start the parent run of a sweep and return its id.

    params: flattened and logged as a trial's config is. resume: the id of an earlier run of the same sweep, which is
    gone on with where it still exists. Raises BadInput("tracking.uri") where the store refuses: nothing has run yet.
    MLflow's page gets a view of the sweep (see sweep.tracking.views).
    """
    all_tags = {**(tags or {}), **values.note_tags(description), "kind": "sweep"}
    label = f"{name}, {datetime.now():%Y-%m-%d %H:%M:%S}"
    with as_bad_input(store):
        if resume is not None and _resumed(store, resume):
            run_id, label = runs.opened(store, resume), _label_of(store, resume) or label
            runs.write(store, run_id, tags={**runs.process_tags(store), **all_tags, "error": ""})
        else:
            run_id = runs.create(store, name, {**all_tags, SWEEP: label})
            runs.write(store, run_id, params=values.params_of(params or {}))
        runs.write_artifacts(store, run_id)
    save_views(store, run_id, label, all_tags.get("mode", ""))
    return run_id


def _resumed(store: Store, run_id: str) -> bool:
    """Whether the run is still there, in this experiment; it is RUNNING then."""
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):
        run = client(store.uri).get_run(run_id)
        if run.info.lifecycle_stage == "active" and run.info.experiment_id == experiment_id(store):
            client(store.uri).update_run(run_id, status="RUNNING")
            return True
    return False


@functools.lru_cache(maxsize=8)
def _label_of(store: Store, run_id: str) -> str:
    """What a sweep is called; asked once per process."""
    return str(client(store.uri).get_run(run_id).data.tags.get(SWEEP, ""))


@whole()
def close_sweep(
    store: Store,
    run_id: str | None,
    status: Status = "FINISHED",
    *,
    report_markdown: str = "",
    files: Sequence[Path] = (),
    comparisons: Sequence[Comparison] = (),
) -> None:
    """End the parent run: the report is its description, files are its artifacts, comparisons give it a verdict."""
    if run_id is None:
        return
    # Each part by itself: what cannot be uploaded must not take the verdict along.
    with best_effort(f"the files of sweep {run_id}"):
        runs.write_files(store, run_id, files)
    with best_effort(f"the end of sweep {run_id}"):
        tags = {**values.sweep_tags_of(comparisons), **values.note_tags(report_markdown)}
        runs.write(store, run_id, metrics=values.sweep_metrics_of(comparisons), tags=tags)
    runs.end(store, run_id, status)


@whole()
def record(
    store: Store,
    name: str,
    tags: dict[str, str],
    metrics: dict[str, float],
    config: dict[str, Any],
    markdown: str,
    files: Sequence[Path],
) -> str | None:
    """Record what was made already as a run of its own: `markdown` describes it. Returns the run's id.

    None where the store failed, which costs a warning.
    """
    run_id: str | None = None
    with best_effort(name):
        run_id = runs.create(store, name, {**values.note_tags(markdown), **{k: v for k, v in tags.items() if v}})
        runs.write(store, run_id, [(key, value, 0) for key, value in metrics.items()], values.params_of(config))
    if run_id is not None:
        with best_effort(f"the artifacts of {name}"):
            runs.write_artifacts(store, run_id, config=config)
            runs.write_files(store, run_id, files)
        runs.end(store, run_id, "FAILED" if tags.get("error") else "FINISHED")
    return run_id


class TrialRun:
    """The run of a trial that is about to be measured (or predicted), for a `with` statement around the trial.

    planned: the result so far: names, config, command; its outcome is not read. The run is RUNNING until the block is
    left. `run_id` is None where the store failed.
    """

    def __init__(
        self, store: Store, parent_run_id: str | None, planned: TrialResult, *, system_metrics: bool = True
    ) -> None:
        self.run_id: str | None = None
        self._store, self._parent_run_id, self._planned = store, parent_run_id, planned
        self._params: dict[str, str] = {}
        self._outcome: str | None = None
        self._ended = False
        self._system_metrics = system_metrics
        self._sampler: SystemSampler | None = None

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException as error:  # a `with` statement ends only what it has entered
            self.__exit__(type(error), error, None)
            raise
        return self

    @whole()
    def _begin(self) -> None:
        store, parent, planned = self._store, self._parent_run_id, self._planned
        with best_effort(f"trial {planned.name}"):
            tags = values.plan_tags_of(planned) | {"kind": "trial", "mlflow.runColor": values.color_of(planned)}
            if parent is not None:
                tags |= {"mlflow.parentRunId": parent, SWEEP: _label_of(store, parent)}
            self.run_id = runs.create(store, planned.name, tags)
            self._log_params(planned)
        if self.run_id is not None and self._system_metrics:
            with suppress(Exception):  # a machine that MLflow cannot read
                from sweep.tracking.system import SystemSampler

                self._sampler = SystemSampler(store.uri, self.run_id)
                self._sampler.start()

    @whole()
    def log(self, result: TrialResult, files: Sequence[Path] = ()) -> None:
        """Log the whole result. The run ends with the `with` block, in the state that the outcome asks for.

        files: further artifacts; folders are taken whole, missing ones are left out. Sets `result.mlflow_run_id`.
        """
        if self._sampler is not None:
            self._sampler.finish()
        if self.run_id is None:
            return
        result.mlflow_run_id = self.run_id
        # Each part by itself: full disks and refused uploads take the artifacts, and must not take the numbers along.
        with best_effort(f"the artifacts of {result.name}"):
            runs.write_artifacts(self._store, self.run_id, result.environment, result.config, result)
            runs.write_files(self._store, self.run_id, files)
        with best_effort(f"trial {result.name}"):
            self._log_params(result)
            # The outcome comes last: a run that has one was recorded whole (see `reconcile`).
            runs.write_result_tags(self._store, self.run_id, result, values.metrics_of(result))
        self._outcome = result.outcome  # last: an interrupt in between leaves a trial without one

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(error)
        except KeyboardInterrupt as interrupt:
            self._end(interrupt)  # where it came before the end had begun
            raise

    @whole()
    def _end(self, error: BaseException | None) -> None:
        if self._sampler is not None:
            self._sampler.finish()
        if self.run_id is None or self._ended:
            return
        self._ended = True
        status, wrong = _ending(self._outcome, error)
        if wrong:
            tags = {"error": wrong} | ({} if self._outcome else {"outcome": Outcome.failed.value})
            with best_effort(f"the end of run {self.run_id}"):
                runs.write(self._store, self.run_id, tags=tags)
        runs.end(self._store, self.run_id, status)

    def _log_params(self, result: TrialResult) -> None:
        """Log parameters that are not there yet: MLflow refuses to change one, and with it the whole batch."""
        wanted = values.params_of(result.config) | values.knobs_of(result)
        new = {name: value for name, value in wanted.items() if name not in self._params}
        if new and self.run_id is not None:
            runs.write(self._store, self.run_id, params=new)
            self._params |= new


start_trial = TrialRun


@whole()
def record_again(store: Store, parent_run_id: str | None, result: TrialResult) -> None:
    """Record a trial that was measured, and whose command was killed before all of it was recorded.

    The half of it that there is, found by its folder, is deleted. Sets `result.mlflow_run_id`.
    """
    with best_effort(f"trial {result.name}"):
        quote = '"' if "'" in result.folder else "'"
        same = f"tags.kind = 'trial' and tags.folder = {quote}{result.folder}{quote}"
        for run in client(store.uri).search_runs([experiment_id(store)], same):
            if run.data.tags.get("outcome") == result.outcome and run.info.status != "RUNNING":
                result.mlflow_run_id = run.info.run_id
                return
            client(store.uri).delete_run(run.info.run_id)
    with start_trial(store, parent_run_id, result, system_metrics=False) as again:
        again.log(result)


def _ending(outcome: str | None, error: BaseException | None) -> tuple[Status, str]:
    """How a trial's run ends, and what to say where the trial itself could not."""
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", "interrupted"
    if error is not None:
        said, kind = str(error).strip() and values.one_line(error), type(error).__name__
        return "FAILED", f"{kind}: {said}" if said else kind
    if outcome is None:
        return "FAILED", "the trial ended without a result"
    return values.end_status(outcome), ""


@whole()
def update_decision(
    store: Store,
    run_id: str | None,
    result: TrialResult,
    files: Sequence[Path] = (),
    said: Mapping[str, str] | None = None,
) -> None:
    """Set what is known only after the trial has ended: verdict, reasons, and what compares it with the others.

    Replaces result.json by the judged one, adds `files`, and leaves the run's state as it is. said: the decision in
    words, for the run's tags and its description.
    """
    if run_id is None:
        return
    with best_effort(f"the decision on {result.name}"):
        runs.write_result(store, run_id, result)
        runs.write_files(store, run_id, files)
        tags = values.decision_tags_of(result, said)
        runs.write(store, run_id, values.decision_metrics_of(result), tags=tags)
