"""Ctrl-C and SIGTERM at the worst moments: nothing recorded is lost, no store stays locked, no process stays behind."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tracking_parts as parts
from mlflow.tracking import MlflowClient
from omegaconf.errors import ConfigAttributeError
from small_workloads import TOKENS, config
from sqlalchemy.engine.default import DefaultDialect

import sweep.session
import sweep.trial.process
import train
from sweep.cli import guarded
from sweep.interrupts import Terminated, ended_by_signals, whole
from sweep.tracking import Store, close_sweep, initialise, open_sweep, start_trial, store_location
from sweep.trial.process import run_isolated


def interrupt(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    with ended_by_signals():
        yield


def test_a_signal_waits_for_the_outermost_write() -> None:
    done = []

    @whole()
    def inner() -> None:
        interrupt()
        done.append("inner")

    with pytest.raises(KeyboardInterrupt):
        with whole():
            inner()
            interrupt(signal.SIGTERM)  # one signal ends it, and the first says how
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]
    with whole():
        done.append("nothing waits any more")


def test_a_signal_outside_of_a_write_is_raised_at_once_and_sigterm_is_told_apart() -> None:
    with whole():
        pass
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt()
    assert not isinstance(caught.value, Terminated)
    with pytest.raises(Terminated):
        interrupt(signal.SIGTERM)


def test_an_error_in_a_write_is_not_lost_behind_the_signal() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, whole():
        interrupt()
        raise ValueError("wrong")
    assert isinstance(caught.value.__context__, ValueError)


def test_another_threads_write_holds_nothing_back_and_handlers_come_back() -> None:
    inside, go = threading.Event(), threading.Event()

    def write() -> None:
        with whole():
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=write)
    thread.start()
    inside.wait(10)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    go.set()
    thread.join()
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with ended_by_signals(), whole():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


# In the middle of MLflow's statements


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = store_location(None, tmp_path_factory.mktemp("empty"))
    initialise(store)
    assert store.file is not None
    return store.file


@pytest.fixture
def store(database: Path, tmp_path: Path) -> Store:
    found = store_location(None, tmp_path)
    assert found.file is not None
    found.file.parent.mkdir()
    shutil.copy(database, found.file)
    initialise(found)
    return found


def statement(monkeypatch: pytest.MonkeyPatch, which: int, then: Callable[[], None]) -> None:
    """Call `then` inside of the which-th statement from now on that writes."""
    seen = 0
    for name in ("do_execute", "do_executemany"):
        before = getattr(DefaultDialect, name)

        def run(self: Any, cursor: Any, said: str, *rest: Any, before: Any = before) -> None:
            nonlocal seen
            before(self, cursor, said, *rest)
            seen += said.startswith(("INSERT", "UPDATE"))
            if seen == which:
                seen += 1
                then()

        monkeypatch.setattr(DefaultDialect, name, run)


@pytest.mark.parametrize("which", [1, 2, 4, 6])
def test_an_interrupt_inside_of_a_statement_leaves_no_lock_and_no_run_running(
    which: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = open_sweep(store, "interrupted")
    statement(monkeypatch, which, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        with start_trial(store, sweep, parts.planned(), system_metrics=False) as run:
            run.log(parts.finished())
        pytest.fail("the interrupt was lost")
    assert caught.value.__traceback__ is not None  # and with it whatever its frames hold
    assert store.file is not None
    connection = sqlite3.connect(store.file, timeout=0)
    connection.execute("BEGIN IMMEDIATE")
    connection.close()
    close_sweep(store, sweep, "KILLED")
    found = MlflowClient(store.uri).search_runs([initialise(store)])
    assert {run.info.status for run in found} <= {"KILLED", "FINISHED"}
    assert len(found) == 2


# A whole command


def run(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sweep.report.plots.draw", lambda report: [])
    arguments = ["-m", "strategy=baseline,micro_batch,checkpoint", "mode=predict", "workload.model.layers=2"]
    arguments += ["workload.seq_len=16", "workload.data.max_mib=1", "tracking.system_metrics=false"]
    where = [f"tracking.uri={store.uri}", f"hydra.sweep.dir={folder}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, *where, *words])
    return guarded(train.main)


def outcomes(folder: Path) -> list[str]:
    report = json.loads((folder / "report.json").read_text())
    return [c["outcome"] for c in [report["baseline"], *report["candidates"]]]


def test_a_command_that_is_terminated_reports_what_it_has_whatever_comes_on_top(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_trial, write_report = sweep.session.run_trial, sweep.session.write_report

    def trial(config: Any, name: str, **rest: Any) -> Any:
        if name.startswith("checkpoint"):
            interrupt(signal.SIGTERM)
        return run_trial(config, name, **rest)

    def report(*arguments: Any, **rest: Any) -> Any:
        interrupt(signal.SIGINT)
        interrupt(signal.SIGTERM)
        return write_report(*arguments, **rest)

    monkeypatch.setattr(sweep.session, "run_trial", trial)
    monkeypatch.setattr(sweep.session, "write_report", report)
    before = signal.getsignal(signal.SIGTERM)
    assert run(tmp_path / "out", store, monkeypatch) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert outcomes(tmp_path / "out") == ["ok", "ok"]
    found = MlflowClient(store.uri).search_runs([initialise(store)])
    assert sorted(run.info.status for run in found) == ["FINISHED", "FINISHED", "KILLED", "KILLED"]


def test_an_interrupt_whose_place_another_error_takes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(device: Any) -> Any:  # as OmegaConf does, interrupted between two statements
        with suppress(KeyboardInterrupt):
            interrupt()
        raise ConfigAttributeError("no such attribute\n    full_key: defaults")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process that has just started
    monkeypatch.setattr(sweep.session, "resolve_device", resolve)
    assert run(tmp_path / "out", store, monkeypatch) == 130
    assert "interrupted" in capsys.readouterr().err


def test_an_interrupt_while_a_finished_command_writes_its_report(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement(monkeypatch, 120, interrupt)
    write_report = sweep.session.write_report

    def report(*arguments: Any, **rest: Any) -> Any:
        interrupt()
        return write_report(*arguments, **rest)

    monkeypatch.setattr(sweep.session, "write_report", report)
    assert run(tmp_path / "out", store, monkeypatch, "strategy=baseline,micro_batch") == 130
    assert outcomes(tmp_path / "out") == ["ok", "ok"]
    found = MlflowClient(store.uri).search_runs([initialise(store)])
    assert {run.info.status for run in found} == {"FINISHED"}


# What a command has started


def test_a_trials_process_ends_with_the_command_however_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(child: subprocess.Popen[bytes], *_: Any) -> None:
        assert child.stdin is not None
        child.stdin.close()  # as the system does for a process that was killed
        child.wait(timeout=60)

    monkeypatch.setattr(sweep.trial.process, "_follow", gone)
    sleeping = config({"model": {"_target_": "small_models.Ending", "how": "sleep"}, "data": TOKENS}, "baseline")
    assert "SIGKILL" in run_isolated(sleeping, "sleeping", tmp_path).error
