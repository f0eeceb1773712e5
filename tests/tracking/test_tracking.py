"""Runs in a real SQLite store and in a real MLflow server, read back through MLflow's own client."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tracking_parts as parts
import yaml
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from sweep.environment import git_state, own_process
from sweep.results import Outcome, TrialResult, read_trial
from sweep.tracking import (
    Store,
    TrialRun,
    close_sweep,
    initialise,
    open_sweep,
    reconcile,
    start_trial,
    store_location,
    update_decision,
)
from sweep.tracking.runs import process_tags
from sweep.tracking.system import SystemSampler


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real MLflow database with our experiment and no run; making one takes seconds, copying it nothing."""
    store = store_location(None, tmp_path_factory.mktemp("empty"))
    initialise(store)
    assert store.file is not None
    return store.file


def fresh(empty_database: Path, root: Path) -> Store:
    store = store_location(None, root)
    assert store.file is not None
    store.file.parent.mkdir()
    shutil.copy(empty_database, store.file)
    initialise(store)
    return store


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Store:
    return fresh(empty_database, tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with parts.mlflow_server(tmp_path_factory.mktemp("server")) as uri:
        store = store_location(uri, tmp_path_factory.mktemp("project"))
        initialise(store)
        yield store


@pytest.fixture(params=["sqlite", "server"])
def store(request: pytest.FixtureRequest) -> Store:
    found = request.getfixturevalue("local" if request.param == "sqlite" else "served")
    assert isinstance(found, Store)
    return found


def start(store: Store, parent: str | None = None, **changes: Any) -> TrialRun:
    return start_trial(store, parent, parts.planned(**changes), system_metrics=False)


def read(store: Store, run_id: str | None) -> Run:
    assert run_id is not None
    return MlflowClient(store.uri).get_run(run_id)


def artifacts(store: Store, run_id: str | None, folder: str = "") -> list[str]:
    assert run_id is not None
    return sorted(item.path for item in MlflowClient(store.uri).list_artifacts(run_id, folder))


def fetched(store: Store, run_id: str | None, path: str, to: Path) -> Path:
    assert run_id is not None
    to.mkdir(exist_ok=True)
    return Path(MlflowClient(store.uri).download_artifacts(run_id, path, str(to)))


def judged(result: TrialResult) -> TrialResult:
    result.decision = parts.accepted()
    return result


# What is recorded


def test_a_sweep_and_its_trials(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    extra, folder = tmp_path / "memory.html", tmp_path / "profile"
    extra.write_text("<p>memory</p>")
    folder.mkdir()
    (folder / "trace.json").write_text("{}")
    result = parts.finished()

    sweep = open_sweep(store, "gpt_tiny on cpu", tags={"workload": "gpt_tiny"}, params={"budget": {"memory_mib": 500}})
    monkeypatch.chdir(elsewhere)  # as hydra.job.chdir does between the trials
    with start(store, sweep) as run:
        assert read(store, run.run_id).info.status == "RUNNING"
        assert read(store, run.run_id).data.params["strategy.checkpoint.every_k"] == "2"
        run.log(result, [extra, folder])
    close_sweep(
        store, sweep, report_markdown="# Best: checkpoint", files=[extra]
    )
    assert list(elsewhere.iterdir()) == []

    child, parent = read(store, run.run_id), read(store, sweep)
    assert child.info.run_name == "checkpoint every_k=2"
    assert parent.info.run_name == "gpt_tiny on cpu"
    assert (child.info.status, parent.info.status) == ("FINISHED", "FINISHED")
    assert child.info.end_time >= child.info.start_time
    assert child.data.tags["mlflow.parentRunId"] == sweep
    assert "mlflow.parentRunId" not in parent.data.tags

    assert child.data.params["workload.optimizer.kwargs.betas"] == "[0.9, 0.95]"
    assert child.data.metrics["memory/at_peak/activation_mib"] == 14.0
    assert child.data.metrics["predicted/error_ratio"] == 0.01
    history = MlflowClient(store.uri).get_metric_history(child.info.run_id, "quality/train_loss")
    assert sorted((m.step, m.value) for m in history) == [(i, 5.5 - 0.01 * i) for i in range(30)]
    expected = {"outcome": "ok", "evidence": "cpu", "strategy": "checkpoint", "is_baseline": "false", "kind": "trial"}
    assert {name: child.data.tags[name] for name in expected} == expected
    assert "ok (cpu)" in child.data.tags["mlflow.note.content"]

    (data,) = child.inputs.dataset_inputs
    assert data.dataset.name == "standard-library"
    assert result.data_version.startswith(data.dataset.digest)
    assert len(data.dataset.digest) == 36
    assert (data.tags[0].key, data.tags[0].value) == ("mlflow.data.context", "training")

    names = ["config.yaml", "environment", "memory.html", "profile", "result.json"]
    assert artifacts(store, run.run_id) == names
    assert artifacts(store, run.run_id, "profile") == ["profile/trace.json"]
    assert read_trial(fetched(store, run.run_id, "result.json", tmp_path / "a")) == result
    assert result.mlflow_run_id == run.run_id
    config = fetched(store, run.run_id, "config.yaml", tmp_path / "b").read_text()
    assert yaml.safe_load(config) == parts.config()
    environment = fetched(store, run.run_id, "environment", tmp_path / "c")
    assert "mlflow==" in (environment / "packages.txt").read_text()
    assert '"cuda": "none"' in (environment / "environment.json").read_text()

    assert parent.data.params == {"budget.memory_mib": "500"}
    assert parent.data.tags["mlflow.note.content"] == "# Best: checkpoint"
    assert parent.data.tags["kind"] == "sweep"
    assert artifacts(store, sweep) == ["environment", "memory.html"]


def test_a_result_with_nothing_but_an_error(store: Store) -> None:
    with start(store) as run:
        run.log(parts.planned(outcome="oom_device", error="wants 12 MiB more than there are", data_version=""))
    found = read(store, run.run_id)
    assert found.info.status == "FAILED"
    assert found.data.tags["outcome"] == "oom_device"
    assert "12 MiB" in found.data.tags["error"]
    assert found.data.metrics == {"trial/wall_s": 0.0}
    assert found.inputs.dataset_inputs == []


def test_numbers_that_are_none(store: Store) -> None:
    result = parts.finished(outcome="nan")
    assert result.measurement is not None
    result.measurement.eval_loss = float("nan")
    result.measurement.train_loss = [5.0, float("inf"), float("nan")]
    result.measurement.step_ms_low = float("-inf")
    with start(store) as run:
        run.log(result)
    found = read(store, run.run_id)
    assert found.info.status == "FAILED"
    assert found.data.tags["outcome"] == "nan"
    assert "quality/eval_loss" not in found.data.metrics
    assert "time/step_ms_low" not in found.data.metrics
    assert found.data.metrics["quality/train_loss"] == 5.0
    assert "result.json" in artifacts(store, run.run_id)


def test_odd_names_and_long_values(store: Store, tmp_path: Path) -> None:
    config = {
        "+odd@[key=": "value",
        "empty": "",
        "long": "x" * 20_000,
        "k" * 400: 1,
        "wide": {str(i): i for i in range(250)},
    }
    sweep = open_sweep(store, "n" * 300, description="d" * 20_000)
    changes: dict[str, Any] = {"config": config, "command": "c" * 20_000, "name": "trial " + "n" * 300}
    with start(store, sweep, **changes) as run:
        run.log(parts.finished(**changes, error="e" * 20_000, data={"name": "d" * 2000, "text": "t" * 3000}))
    close_sweep(store, sweep, report_markdown="| a | b |\n" * 2000)
    found = read(store, run.run_id)
    assert found.info.status == "FINISHED"
    assert len(found.data.params) == 254
    assert found.data.params["_odd__key_"] == "value"
    assert found.data.params["empty"] == "''"
    assert len(found.data.params["long"]) == 6000
    assert len(found.data.tags["command"]) == len(found.data.tags["error"]) == 8000
    assert found.data.metrics["time/step_ms"] == 50.0
    assert len(found.inputs.dataset_inputs[0].dataset.name) == 500
    whole = fetched(store, run.run_id, "config.yaml", tmp_path / "whole").read_text()
    assert yaml.safe_load(whole) == config
    assert len(read(store, sweep).data.tags["mlflow.note.content"]) <= 8000


def test_many_steps(local: Store) -> None:
    result = parts.finished(steps=2500)
    with start(local) as run:
        run.log(result)
    assert run.run_id is not None
    history = MlflowClient(local.uri).get_metric_history(run.run_id, "quality/train_loss")
    assert len(history) == 2500


def test_a_config_that_differs_from_the_planned_one_keeps_the_run(local: Store) -> None:
    changed = parts.config()
    changed["strategy"]["checkpoint"]["every_k"] = 4
    changed["added"] = 1
    with start(local) as run:
        run.log(parts.finished(config=changed))
    found = read(local, run.run_id)
    assert (found.data.params["strategy.checkpoint.every_k"], found.data.params["added"]) == ("2", "1")
    assert found.data.metrics["time/step_ms"] == 50.0


def test_a_missing_file_costs_a_warning(local: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start(local) as run:
        run.log(parts.finished(), [tmp_path / "absent.png"])
    assert "absent.png is missing" in caplog.text
    assert read(local, run.run_id).info.status == "FINISHED"


# How runs end


@pytest.mark.parametrize(
    "outcome", [Outcome.ok, Outcome.over_budget, Outcome.invalid, Outcome.timeout, Outcome.crashed]
)
def test_status_follows_the_outcome(outcome: Outcome, local: Store) -> None:
    with start(local) as run:
        run.log(parts.planned(outcome=outcome.value))
    expected = "FINISHED" if outcome in (Outcome.ok, Outcome.over_budget) else "FAILED"
    assert read(local, run.run_id).info.status == expected


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("a bad\nshape"), "FAILED", "ValueError: a bad"),
        (SystemExit(0), "FAILED", "SystemExit: 0"),
        (SystemExit(1), "FAILED", "SystemExit: 1"),
        (KeyboardInterrupt(), "KILLED", "interrupted"),
        (MemoryError(), "FAILED", "MemoryError"),
        (GeneratorExit(), "FAILED", "GeneratorExit"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("logged", [False, True], ids=["before", "after"])
def test_an_exception_ends_the_run(error: BaseException, status: str, said: str, logged: bool, store: Store) -> None:
    with pytest.raises(type(error)), start(store) as run:
        if logged:
            run.log(parts.finished())
        raise error
    found = read(store, run.run_id)
    assert (found.info.status, found.data.tags["error"]) == (status, said)
    assert found.data.tags["outcome"] == ("ok" if logged else "failed")
    assert found.info.end_time is not None


def test_an_interrupt_while_recording(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sweep.tracking.save_environment", interrupt)
    with pytest.raises(KeyboardInterrupt), start(local) as run:
        run.log(parts.finished())
    found = read(local, run.run_id)
    assert (found.info.status, found.data.tags["outcome"]) == ("KILLED", "failed")
    assert found.data.tags["error"] == "interrupted"


def test_a_trial_that_logs_nothing_is_not_finished(local: Store) -> None:
    with start(local) as run:
        pass
    found = read(local, run.run_id)
    assert found.info.status == "FAILED"
    assert "without a result" in found.data.tags["error"]


def test_verdicts_come_after_the_end(store: Store, tmp_path: Path) -> None:
    result = parts.finished()
    with start(store) as run:
        run.log(result)
    before = read(store, run.run_id)
    assert "verdict" not in before.data.tags
    assert "memory/saved_mib" not in before.data.metrics
    plot = tmp_path / "why.txt"
    plot.write_text("because")
    update_decision(store, run.run_id, judged(result), [plot], {"why": "it is smaller", "next_action": "use it"})
    after = read(store, run.run_id)
    assert (after.info.status, after.info.end_time) == ("FINISHED", before.info.end_time)
    assert (after.data.tags["verdict"], after.data.tags["reasons"]) == ("accept", "")
    assert after.data.metrics["memory/saved_mib"] == 40.0
    assert after.data.metrics["throughput/ratio"] == 0.8
    assert "**accept**. it is smaller\n\nNext: use it" in after.data.tags["mlflow.note.content"]
    assert after.data.tags["next_action"] == "use it"
    stored = read_trial(fetched(store, run.run_id, "result.json", tmp_path / "judged"))
    assert stored.decision is not None
    assert stored.decision.verdict == "accept"
    assert "why.txt" in artifacts(store, run.run_id)
    update_decision(store, None, result)  # a trial that was not recorded


def test_a_sweep_can_fail_and_be_gone_on_with(store: Store) -> None:
    first = open_sweep(store, "search", params={"n_trials": 6})
    close_sweep(store, first, "KILLED")
    MlflowClient(store.uri).set_tag(first, "error", "interrupted")
    assert read(store, first).info.status == "KILLED"
    again = open_sweep(store, "search", params={"n_trials": 9}, resume=first)
    found = read(store, again)
    assert again == first
    assert found.info.status == "RUNNING"
    assert found.data.tags["error"] == ""
    close_sweep(store, again)
    assert read(store, again).info.status == "FINISHED"
    new = open_sweep(store, "search", resume="0" * 32)
    assert new != first
    close_sweep(store, new)


# Processes that die

SCRIPT = """
import sys, time
from pathlib import Path
import tracking_parts as parts
from sweep.tracking import *
store = store_location({uri!r}, Path({root!r}))
initialise(store)
sweep = open_sweep(store, "sweep")
{body}
"""


def script(store: Store, body: str) -> subprocess.Popen[str]:
    code = SCRIPT.format(uri=store.uri, root=str(store.root), body=textwrap.dedent(body))
    path = os.pathsep.join([str(parts.ROOT), str(parts.ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "MLFLOW_RUN_ID": "1" * 32},
    )


def test_a_killed_process_leaves_no_run_running(tmp_path: Path, empty_database: Path) -> None:
    store = fresh(empty_database, tmp_path)
    process = script(
        store,
        """
        whole = start_trial(store, sweep, parts.planned(name="recorded whole"), system_metrics=False).__enter__()
        whole.log(parts.finished(name="recorded whole"))
        run = start_trial(store, sweep, parts.planned(name="half done")).__enter__()
        print(sweep, whole.run_id, run.run_id, flush=True)
        time.sleep(120)
        """,
    )
    assert process.stdout is not None
    sweep, whole, half = process.stdout.readline().split()
    mine = start(store, None, name="of this living process").__enter__()
    other = start(store, None, name="of another host").__enter__()
    assert mine.run_id is not None
    assert other.run_id is not None
    MlflowClient(store.uri).set_tag(other.run_id, "process", "another-host:1:2.0")
    foreign = MlflowClient(store.uri).create_run(initialise(store)).info.run_id  # not made by us

    assert reconcile(store) == 0  # all are alive, or not ours to judge
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert read(store, half).info.status == "RUNNING"
    assert reconcile(store) == 3
    assert reconcile(store) == 0

    found = read(store, half)
    assert (found.info.status, found.data.tags["outcome"]) == ("KILLED", "crashed")
    assert str(process.pid) in found.data.tags["error"]
    assert found.info.end_time is not None
    assert read(store, sweep).info.status == "KILLED"
    found = read(store, whole)
    assert (found.info.status, found.data.tags["outcome"]) == ("FINISHED", "ok")
    for run_id in (mine.run_id, other.run_id, foreign):
        assert read(store, run_id).info.status == "RUNNING"
    for run in (mine, other):
        run.__exit__(None, None, None)


def test_a_process_id_that_is_anothers_by_now(local: Store) -> None:
    with start(local) as run:
        assert run.run_id is not None
        host, number, _ = own_process().rsplit(":", 2)
        MlflowClient(local.uri).set_tag(run.run_id, "process", f"{host}:{number}:{time.time() - 1e6:.2f}")
        assert reconcile(local) == 1
        assert read(local, run.run_id).info.status == "KILLED"
        run.log(parts.finished())  # ended wrongly: its own end corrects that
    found = read(local, run.run_id)
    assert (found.info.status, found.data.tags["outcome"], found.data.tags["error"]) == ("FINISHED", "ok", "")


def test_an_exit_outside_of_any_block_and_nothing_printed(tmp_path: Path, empty_database: Path) -> None:
    store = fresh(empty_database, tmp_path)
    process = script(
        store,
        """
        with start_trial(store, sweep, parts.planned()) as run:
            run.log(parts.finished())
        loose = start_trial(store, sweep, parts.planned(name="loose")).__enter__()
        (store.root / "ids").write_text(f"{sweep} {run.run_id} {loose.run_id}")
        import os
        assert "MLFLOW_RUN_ID" not in os.environ
        sys.exit(3)
        """,
    )
    printed = process.communicate(timeout=120)
    assert (process.returncode, printed) == (3, ("", ""))
    sweep, run, loose = (tmp_path / "ids").read_text().split()
    assert [read(store, run_id).info.status for run_id in (sweep, run, loose)] == ["KILLED", "FINISHED", "KILLED"]
    assert "ended before" in read(store, sweep).data.tags["error"]


def test_nothing_is_printed_with_a_server(served: Store, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = open_sweep(served, "quiet")
    with start(served, sweep) as run:
        run.log(parts.finished())
    close_sweep(served, sweep)
    assert capfd.readouterr() == ("", "")


def test_a_server_with_a_user_name_in_its_address(served: Store, tmp_path: Path) -> None:
    store = store_location(served.uri.replace("//", "//me:secret@"), tmp_path)
    assert initialise(store) == initialise(served)
    assert "secret" not in store.shown


# A store that fails in mid-sweep


def test_a_server_that_is_gone_costs_a_warning_and_no_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store = store_location(f"http://127.0.0.1:{parts.free_port()}", tmp_path)
    result = parts.finished()
    with caplog.at_level(logging.WARNING), start_trial(store, "0" * 32, parts.planned()) as run:
        run.log(result)
    update_decision(store, run.run_id, result)
    close_sweep(store, None)
    assert run.run_id is None
    assert result.mlflow_run_id is None
    (record,) = caplog.records
    assert "not recorded in MLflow: trial checkpoint every_k=2" in record.getMessage()
    assert len(record.getMessage().splitlines()) == 1


def test_a_database_that_breaks_costs_a_warning_and_no_trial(
    tmp_path: Path, empty_database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = fresh(empty_database, tmp_path)
    sweep = open_sweep(store, "sweep")
    with start(store, sweep) as run:
        assert store.file is not None
        with sqlite3.connect(store.file) as connection:
            connection.execute("DROP TABLE metrics")
        run.log(parts.finished())
    close_sweep(store, sweep)
    assert "not recorded in MLflow: trial" in caplog.text
    assert artifacts(store, run.run_id)  # what could be kept was


def test_artifacts_that_are_refused_do_not_take_the_numbers_along(
    tmp_path: Path, empty_database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = fresh(empty_database, tmp_path)
    (tmp_path / "mlruns" / "artifacts").write_text("a file where the folder should be")
    with start(store) as run:
        run.log(parts.finished())
    found = read(store, run.run_id)
    assert found.data.tags["outcome"] == "ok"
    assert found.data.metrics["time/step_ms"] == 50.0
    assert "the artifacts of checkpoint" in caplog.text


# System metrics, commit


def test_system_metrics_are_sampled_while_the_trial_runs(store: Store) -> None:
    with start_trial(store, None, parts.planned()) as run:
        time.sleep(2.5)
        run.log(parts.finished())
    found = read(store, run.run_id)
    names = {name for name in found.data.metrics if name.startswith("system/")}
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= names
    assert run.run_id is not None
    history = MlflowClient(store.uri).get_metric_history(run.run_id, "system/cpu_utilization_percentage")
    assert 2 <= len(history) <= 4
    assert sorted(m.step for m in history) == list(range(len(history)))


def test_a_short_trial_has_one_sample_and_none_where_switched_off(local: Store) -> None:
    with start_trial(local, None, parts.planned()) as run:
        run.log(parts.finished())
    assert "system/system_memory_usage_percentage" in read(local, run.run_id).data.metrics
    with start_trial(local, None, parts.planned(), system_metrics=False) as run:
        run.log(parts.finished())
    assert not [name for name in read(local, run.run_id).data.metrics if name.startswith("system/")]


def test_sampling_stops_when_the_trial_fails(local: Store) -> None:
    with pytest.raises(ValueError), start_trial(local, None, parts.planned()) as run:
        raise ValueError
    assert read(local, run.run_id).info.status == "FAILED"
    assert "SystemMetricsMonitor" not in [thread.name for thread in threading.enumerate()]


def test_a_sampler_that_cannot_write_stays_quiet(local: Store, caplog: pytest.LogCaptureFixture) -> None:
    sampler = SystemSampler(local.uri, "0" * 32, interval_s=0.05)
    sampler.start()
    time.sleep(0.2)
    sampler.finish()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_gpu_that_is_not_here_is_sampled_by_mlflows_monitor(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up driver (pynvml): there is no GPU; MLflow's own monitor reads it."""
    import pynvml
    from mlflow.system_metrics.metrics import gpu_monitor

    made_up = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda _: type("Memory", (), {"used": 4e9, "total": 8e9}),
        "nvmlDeviceGetUtilizationRates": lambda _: type("Rates", (), {"gpu": 90}),
        "nvmlDeviceGetPowerUsage": lambda _: 150_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 200_000,
    }
    for name, value in made_up.items():
        monkeypatch.setattr(pynvml, name, value)
    assert gpu_monitor.pynvml is pynvml
    with start_trial(local, None, parts.planned()) as run:
        run.log(parts.finished())
    metrics = read(local, run.run_id).data.metrics
    assert metrics["system/gpu_0_memory_usage_megabytes"] == 4000.0
    assert metrics["system/gpu_0_power_usage_watts"] == 150.0
    assert metrics["system/gpu_0_utilization_percentage"] == 90.0


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_git_state(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q")
    assert fresh_git_state(repository) == ("", False)  # no commit yet
    (repository / "file").write_text("1")
    git(repository, "add", "file")
    git(repository, "commit", "-q", "-m", "first")
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "untracked").write_text("")
    assert fresh_git_state(repository) == (commit, False)
    (repository / "file").write_text("2")
    assert fresh_git_state(repository) == (commit, True)
    tags = process_tags(store_location(None, repository))
    assert (tags["git_commit"], tags["git_dirty"], tags["mlflow.source.git.commit"]) == (commit, "true", commit)


def test_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fresh_git_state(tmp_path) == ("", False)
    assert "git_commit" not in process_tags(store_location(None, tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fresh_git_state(parts.ROOT) == ("", False)


def fresh_git_state(folder: Path) -> tuple[str, bool]:
    git_state.cache_clear()
    return git_state(folder)
