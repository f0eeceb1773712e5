"""What all runs in MLflow share: writing to them, whose they are, and how they end."""

from __future__ import annotations

import atexit
import contextlib
import getpass
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from sweep.config.schema import plain
from sweep.environment import environment, git_state, has_ended, own_process, packages
from sweep.interrupts import whole
from sweep.results import Outcome, TrialResult, write_json
from sweep.tracking import values
from sweep.tracking.store import Store, client, experiment_id
from sweep.tracking.values import MetricValue, cut_tags

log = logging.getLogger("sweep.tracking")
#: The most that MLflow gives of a search at once.
MOST_RUNS = 50_000
#: A run's tag: the process that has to end it, for a later command to tell whether anybody still works on it.
PROCESS = "process"
Status = Literal["FINISHED", "FAILED", "KILLED"]


@contextlib.contextmanager
def best_effort(what: str) -> Iterator[None]:
    """A store that fails in mid-sweep costs a line, never a measurement."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        log.warning("not recorded in MLflow: %s (%s)", what, values.one_line(error))
        log.debug("MLflow's error", exc_info=True)


def write(
    store: Store,
    run_id: str,
    metrics: Iterable[MetricValue] = (),
    params: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
) -> None:
    """One round trip where MLflow's limits allow it; its client splits what is too long."""
    from mlflow.entities import Metric, Param, RunTag

    now_ms = int(time.time() * 1000)
    client(store.uri).log_batch(
        run_id,
        metrics=[Metric(name, value, now_ms, step) for name, value, step in metrics],
        params=[Param(name, value) for name, value in (params or {}).items()],
        tags=[RunTag(name, value) for name, value in cut_tags(tags or {}).items()],
    )


def write_result_tags(store: Store, run_id: str, result: TrialResult, metrics: Iterable[MetricValue]) -> None:
    """Tags of a result with metrics. An empty `error` is written only where it clears one: the page shows it."""
    tags = values.result_tags_of(result)
    if not tags["error"] and "error" not in client(store.uri).get_run(run_id).data.tags:
        del tags["error"]
    write(store, run_id, metrics, tags=tags)


def write_artifacts(
    store: Store,
    run_id: str,
    known: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    result: TrialResult | None = None,
) -> None:
    """The environment, and the whole config and result: parameters and metrics are cut, these are not.

    known: what only the trial's process can say, such as torch's CUDA version and the GPU's name.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json({**environment(), **(known or {})}, folder / "environment" / "environment.json")
        (folder / "environment" / "packages.txt").write_text("\n".join(packages()) + "\n", encoding="utf-8")
        if config is not None:
            plainest = json.loads(json.dumps(plain(config), default=str))
            text = yaml.safe_dump(plainest, sort_keys=False, allow_unicode=True)
            (folder / "config.yaml").write_text(text, encoding="utf-8")
        if result is not None:
            write_json(result, folder / "result.json")
        client(store.uri).log_artifacts(run_id, name)


def write_files(store: Store, run_id: str, files: Sequence[Path]) -> None:
    """Files and whole folders as artifacts. A missing one costs a warning."""
    for path in files:
        if path.exists():
            client(store.uri).log_artifact(run_id, str(path))
        else:
            log.warning("not recorded in MLflow: %s is missing", path)


def write_result(store: Store, run_id: str, result: TrialResult) -> None:
    """result.json among the artifacts, in place of an earlier one."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(result, Path(folder) / "result.json")
        client(store.uri).log_artifacts(run_id, folder)


#: Runs that this process has to end, should nobody else: a SystemExit outside of `with`, an error in a callback.
_open: dict[str, tuple[int, Store]] = {}


def create(store: Store, name: str, tags: dict[str, str]) -> str:
    """A new run, RUNNING. Returns its id."""
    tags = cut_tags(process_tags(store) | tags)
    return opened(store, client(store.uri).create_run(experiment_id(store), tags=tags, run_name=name).info.run_id)


def process_tags(store: Store) -> dict[str, str]:
    """Tags of every run: who made it, from which commit, in which process."""
    tags = {"mlflow.source.name": "train.py", "mlflow.source.type": "LOCAL", PROCESS: own_process()}
    with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    commit, dirty = git_state(store.root)
    if commit:
        tags |= {"git_commit": commit, "git_dirty": str(dirty).lower(), "mlflow.source.git.commit": commit}
    return tags


def opened(store: Store, run_id: str) -> str:
    """Note that this process has to end the run."""
    _open[run_id] = (os.getpid(), store)
    return run_id


def end(store: Store, run_id: str, status: Status) -> None:
    """Give the run its last status."""
    _open.pop(run_id, None)
    with best_effort(f"the end of run {run_id}"):
        client(store.uri).set_terminated(run_id, status)


@atexit.register
def _end_what_is_open() -> None:
    for run_id, (pid, store) in list(_open.items()):
        if pid == os.getpid():  # not in a fork
            with best_effort(f"the end of run {run_id}"):
                write(store, run_id, tags={"error": "the program ended before this run did"})
            end(store, run_id, "KILLED")


@whole()
def reconcile(store: Store) -> int:
    """End runs that a killed process left RUNNING; returns how many.

    Only runs of this experiment whose process ran on this host and is gone. A trial that had been recorded whole
    keeps its outcome; any other is KILLED with outcome `crashed`. Runs of living processes and of other hosts are
    left alone; should one be ended wrongly, its own end corrects it.
    """
    ended = 0
    with best_effort("what a killed command left running"):
        running = "attributes.status = 'RUNNING'"
        for run in client(store.uri).search_runs([experiment_id(store)], running, max_results=MOST_RUNS):
            process, outcome = run.data.tags.get(PROCESS, ""), run.data.tags.get("outcome")
            if not has_ended(process):
                continue
            if not outcome:
                tags = {"outcome": Outcome.crashed.value, "error": f"its process {process} was killed"}
                write(store, run.info.run_id, tags=tags)
            client(store.uri).set_terminated(run.info.run_id, values.end_status(outcome) if outcome else "KILLED")
            ended += 1
    return ended


@whole()
def update_measurement(store: Store, run_id: str | None, result: TrialResult, before: TrialResult) -> None:
    """Log what the repeats changed, and replace result.json. The run's state is left as it is.

    before: the result as it was logged, after its first repeat. Single values are logged at step 0 again, where MLflow
    takes the later one; curves go on where they ended.
    """
    if run_id is None:
        return
    with best_effort(f"the repeats of {result.name}"):
        logged = set(values.metrics_of(before))
        new = [value for value in values.metrics_of(result) if value not in logged]
        write_result_tags(store, run_id, result, [*new, *values.repeat_metrics_of(result.measurement)])
    with best_effort(f"the result of {result.name}"):
        write_result(store, run_id, result)
