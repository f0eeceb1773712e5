"""Runs in a real SQLite store and in a real MLflow server, read back through MLflow's own client."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tracking_parts as parts
import yaml
from mlflow.tracking import MlflowClient
from tracking_parts import artifacts, logged, read, start

from sweep.environment import git_state, own_process
from sweep.results import Comparison, Decision, Outcome, read_trial
from sweep.tracking import (
    Store,
    close_sweep,
    initialise,
    open_sweep,
    reconcile,
    record,
    record_again,
    start_trial,
    store_location,
    update_decision,
)
from sweep.tracking.runs import process_tags
from sweep.tracking.system import SystemSampler
from sweep.tracking.values import knobs_of, params_of

NOTE = "mlflow.note.content"


def fetched(store: Store, run_id: str | None, path: str, to: Path) -> Path:
    assert run_id is not None
    to.mkdir()
    return Path(MlflowClient(store.uri).download_artifacts(run_id, path, str(to)))


# What is recorded


def test_a_sweep_and_its_trials(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, folder, extra = tmp_path / "elsewhere", tmp_path / "profile", tmp_path / "memory.html"
    elsewhere.mkdir()
    folder.mkdir()
    extra.write_text("<p>memory</p>")
    (folder / "trace.json").write_text("{}")
    result, decisions = parts.finished(), [Decision("accept"), Decision("reject"), Decision("accept", peak_mib=70.0)]
    comparison = Comparison("f1", "w", "cpu", "measure", "cpu", "accept", "offload", 2, decisions=decisions)

    sweep = open_sweep(store, "gpt_tiny on cpu", tags={"workload": "gpt_tiny"}, params={"budget": {"memory_mib": 500}})
    monkeypatch.chdir(elsewhere)  # as hydra.job.chdir does between the trials
    with start(store, sweep) as run:
        assert read(store, run.run_id).info.status == "RUNNING"
        assert read(store, run.run_id).data.params["strategy.checkpoint.every_k"] == "2"
        run.log(result, [extra, folder, tmp_path / "absent.png"])
    close_sweep(store, sweep, report_markdown="# Best: checkpoint", files=[extra], comparisons=[comparison])
    assert list(elsewhere.iterdir()) == []

    child, parent = read(store, run.run_id), read(store, sweep)
    assert (child.info.run_name, parent.info.run_name) == ("checkpoint every_k=2", "gpt_tiny on cpu")
    assert (child.info.status, parent.info.status) == ("FINISHED", "FINISHED")
    assert child.data.tags["mlflow.parentRunId"] == sweep
    assert child.data.tags["sweep"] == parent.data.tags["sweep"]
    assert child.data.params == params_of(result.config) | knobs_of(result)
    assert child.data.metrics["memory/at_peak/activation_mib"] == 14.0
    assert child.data.metrics["predicted/error_ratio"] == 0.01
    history = MlflowClient(store.uri).get_metric_history(child.info.run_id, "quality/train_loss")
    assert sorted((m.step, m.value) for m in history) == [(i, 5.5 - 0.01 * i) for i in range(30)]
    expected = {"outcome": "ok", "evidence": "cpu", "strategy": "checkpoint", "is_baseline": "false", "kind": "trial"}
    assert {name: child.data.tags[name] for name in expected} == expected
    assert "ok (cpu)" in child.data.tags[NOTE]

    assert artifacts(store, run.run_id) == ["config.yaml", "environment", "memory.html", "profile", "result.json"]
    assert artifacts(store, run.run_id, "profile") == ["profile/trace.json"]
    assert read_trial(fetched(store, run.run_id, "result.json", tmp_path / "a")) == result
    assert result.mlflow_run_id == run.run_id
    assert yaml.safe_load(fetched(store, run.run_id, "config.yaml", tmp_path / "b").read_text()) == result.config
    environment = fetched(store, run.run_id, "environment", tmp_path / "c")
    assert "mlflow==" in (environment / "packages.txt").read_text()
    assert '"cuda": "none"' in (environment / "environment.json").read_text()

    assert (parent.data.params, parent.data.tags[NOTE]) == ({"budget.memory_mib": "500"}, "# Best: checkpoint")
    assert parent.data.metrics == {"sweep/trials": 3.0, "sweep/accepted": 2.0, "sweep/peak_mib": 70.0}
    expected = {"verdict": "accept", "preferred": "offload", "kind": "sweep", "workload": "gpt_tiny"}
    assert {name: parent.data.tags[name] for name in expected} == expected
    assert artifacts(store, sweep) == ["environment", "memory.html"]


def test_results_without_numbers(local: Store) -> None:
    with start(local) as run:
        run.log(parts.planned(outcome="oom_device", error="wants 12 MiB more than there are"))
    found = read(local, run.run_id)
    assert (found.info.status, found.data.tags["outcome"]) == ("FAILED", "oom_device")
    assert "12 MiB" in found.data.tags["error"]
    assert found.data.metrics == {"trial/wall_s": 0.0}

    result = parts.finished(outcome="nan")
    assert result.measurement is not None
    result.measurement.eval_loss = float("nan")
    result.measurement.train_loss = [5.0, float("inf"), float("nan")]
    with start(local) as run:
        run.log(result)
    found = read(local, run.run_id)
    assert (found.info.status, found.data.tags["outcome"]) == ("FAILED", "nan")
    assert "quality/eval_loss" not in found.data.metrics
    assert found.data.metrics["quality/train_loss"] == 5.0
    assert "result.json" in artifacts(local, run.run_id)


def test_odd_names_and_long_values(served: Store, tmp_path: Path) -> None:
    wide = {str(i): i for i in range(250)}
    config = {"+odd@[key=": "value", "empty": "", "long": "x" * 20_000, "k" * 400: 1, "wide": wide, "mode": "measure"}
    changes: dict[str, Any] = {"config": config, "command": "c" * 20_000, "name": "trial " + "n" * 300}
    sweep = open_sweep(served, "n" * 300, description="d" * 20_000)
    found = logged(served, parent=sweep, **changes, error="e" * 20_000, steps=1500)
    close_sweep(served, sweep, report_markdown="| a | b |\n" * 2000)
    assert found.info.status == "FINISHED"
    assert len(found.data.params) == 255
    assert (found.data.params["_odd__key_"], found.data.params["empty"]) == ("value", "''")
    assert len(found.data.params["long"]) == 6000
    assert len(found.data.tags["command"]) == len(found.data.tags["error"]) == 8000
    assert len(MlflowClient(served.uri).get_metric_history(found.info.run_id, "quality/train_loss")) == 1500
    assert yaml.safe_load(fetched(served, found.info.run_id, "config.yaml", tmp_path / "c").read_text()) == config
    assert len(read(served, sweep).data.tags[NOTE]) <= 8000


def test_a_config_that_differs_from_the_planned_one_and_a_missing_file_keep_the_run(
    local: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = parts.planned().config
    changed["strategy"]["checkpoint"]["every_k"] = 4
    with start(local) as run:
        run.log(parts.finished(config={**changed, "added": 1}), [tmp_path / "absent.png"])
    found = read(local, run.run_id)
    assert (found.data.params["strategy.checkpoint.every_k"], found.data.params["added"]) == ("2", "1")
    assert found.data.metrics["time/step_ms"] == 50.0
    assert "absent.png is missing" in caplog.text


def test_verdicts_come_after_the_end(local: Store, tmp_path: Path) -> None:
    result = parts.finished()
    with start(local) as run:
        run.log(result)
    before = read(local, run.run_id)
    assert "verdict" not in before.data.tags
    assert "memory/saved_mib" not in before.data.metrics
    plot = tmp_path / "why.txt"
    plot.write_text("because")
    result.decision = parts.accepted()
    update_decision(local, run.run_id, result, [plot], {"why": "it is smaller", "next_action": "use it"})
    after = read(local, run.run_id)
    assert (after.info.status, after.info.end_time) == ("FINISHED", before.info.end_time)
    assert (after.data.tags["verdict"], after.data.tags["reasons"]) == ("accept", "")
    assert (after.data.metrics["memory/saved_mib"], after.data.metrics["throughput/ratio"]) == (40.0, 0.8)
    assert "**accept**. it is smaller\n\nNext: use it" in after.data.tags[NOTE]
    assert after.data.tags["next_action"] == "use it"
    assert read_trial(fetched(local, run.run_id, "result.json", tmp_path / "judged")) == result
    assert "why.txt" in artifacts(local, run.run_id)
    update_decision(local, None, result)  # a trial that was not recorded


def test_a_sweep_can_fail_and_be_gone_on_with(local: Store) -> None:
    first = open_sweep(local, "search", params={"n_trials": 6})
    close_sweep(local, first, "KILLED")
    assert read(local, first).info.status == "KILLED"
    again = open_sweep(local, "search", params={"n_trials": 9}, resume=first)
    assert (again, read(local, again).info.status) == (first, "RUNNING")
    close_sweep(local, again)
    assert read(local, again).info.status == "FINISHED"
    new = open_sweep(local, "search", resume="0" * 32)
    assert new != first
    close_sweep(local, new)


def test_a_trial_that_was_measured_and_not_recorded_whole_is_recorded_again(local: Store, tmp_path: Path) -> None:
    folder = str(tmp_path / "it's")
    with pytest.raises(KeyboardInterrupt), start(local, folder=folder) as run:
        raise KeyboardInterrupt
    result = parts.finished(folder=folder)
    record_again(local, None, result)
    assert read(local, run.run_id).info.lifecycle_stage == "deleted"  # the half of it
    found = read(local, result.mlflow_run_id)
    assert (found.info.status, found.data.tags["outcome"]) == ("FINISHED", "ok")
    again = parts.finished(folder=folder)
    record_again(local, None, again)  # known by now: nothing is written
    assert again.mlflow_run_id == result.mlflow_run_id


def test_a_run_of_another_kind(local: Store, tmp_path: Path) -> None:
    file = tmp_path / "diagnosis.json"
    file.write_text("{}")
    tags = {"kind": "diagnosis", "error": "", "device": "cpu"}
    run_id = record(local, "diagnosis", tags, {"peak_mib": 3.0}, {"a": {"b": 1}}, "# Found", [file])
    found = read(local, run_id)
    assert (found.info.status, found.data.metrics, found.data.params) == ("FINISHED", {"peak_mib": 3.0}, {"a.b": "1"})
    assert (found.data.tags[NOTE], found.data.tags["kind"]) == ("# Found", "diagnosis")
    assert artifacts(local, run_id) == ["config.yaml", "diagnosis.json", "environment"]
    failed = record(local, "diagnosis", {"error": "no model"}, {}, {}, "", [])
    assert read(local, failed).info.status == "FAILED"


# How a run ends


def test_status_follows_the_outcome(local: Store) -> None:
    for outcome in (Outcome.ok, Outcome.over_budget, Outcome.invalid, Outcome.timeout):
        expected = "FINISHED" if outcome in (Outcome.ok, Outcome.over_budget) else "FAILED"
        assert logged(local, outcome=outcome.value).info.status == expected


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("a bad\nshape"), "FAILED", "ValueError: a bad"),
        (SystemExit(0), "FAILED", "SystemExit: 0"),
        (KeyboardInterrupt(), "KILLED", "interrupted"),
        (MemoryError(), "FAILED", "MemoryError"),
        (GeneratorExit(), "FAILED", "GeneratorExit"),
    ],
    ids=repr,
)
def test_an_exception_ends_the_run(error: BaseException, status: str, said: str, local: Store) -> None:
    for whole in (False, True):
        with pytest.raises(type(error)), start(local) as run:
            if whole:
                run.log(parts.finished())
            raise error
        found = read(local, run.run_id)
        assert (found.info.status, found.data.tags["error"]) == (status, said)
        assert found.data.tags["outcome"] == ("ok" if whole else "failed")
        assert found.info.end_time is not None


def test_an_interrupt_while_recording_and_a_trial_that_logs_nothing(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with start(local) as run:
        pass
    found = read(local, run.run_id)
    assert (found.info.status, found.data.tags["error"]) == ("FAILED", "the trial ended without a result")

    monkeypatch.setattr("sweep.tracking.runs.write_artifacts", interrupt)
    with pytest.raises(KeyboardInterrupt), start(local) as run:
        run.log(parts.finished())
    found = read(local, run.run_id)
    assert (found.info.status, found.data.tags["outcome"]) == ("KILLED", "failed")
    assert found.data.tags["error"] == "interrupted"


# Processes that die

SCRIPT = """
import os, sys, time
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
    env = {**os.environ, "PYTHONPATH": path, "MLFLOW_RUN_ID": "1" * 32}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=env)


def test_a_killed_process_leaves_no_run_running(fresh: Store) -> None:
    process = script(
        fresh,
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
    mine, other, reborn = (start(fresh).__enter__() for _ in range(3))
    client, (host, number, _) = MlflowClient(fresh.uri), own_process().rsplit(":", 2)
    assert other.run_id is not None
    assert reborn.run_id is not None
    client.set_tag(other.run_id, "process", "another-host:1:2.0")
    foreign = client.create_run(initialise(fresh)).info.run_id  # not made by us

    assert reconcile(fresh) == 0  # all are alive, or not ours to judge
    process.send_signal(signal.SIGKILL)
    process.wait()
    client.set_tag(reborn.run_id, "process", f"{host}:{number}:{time.time() - 1e6:.2f}")  # its number is another's now
    assert read(fresh, half).info.status == "RUNNING"
    assert reconcile(fresh) == 4
    assert reconcile(fresh) == 0

    found = read(fresh, half)
    assert (found.info.status, found.data.tags["outcome"]) == ("KILLED", "crashed")
    assert str(process.pid) in found.data.tags["error"]
    assert (read(fresh, sweep).info.status, read(fresh, reborn.run_id).info.status) == ("KILLED", "KILLED")
    found = read(fresh, whole)
    assert (found.info.status, found.data.tags["outcome"]) == ("FINISHED", "ok")
    assert [read(fresh, run_id).info.status for run_id in (mine.run_id, other.run_id, foreign)] == ["RUNNING"] * 3
    reborn.log(parts.finished())  # ended wrongly: its own end corrects that
    for run in (mine, other, reborn):
        run.__exit__(None, None, None)
    found = read(fresh, reborn.run_id)
    assert (found.info.status, found.data.tags["outcome"], found.data.tags["error"]) == ("FINISHED", "ok", "")


def test_an_exit_outside_of_any_block_and_nothing_printed(fresh: Store) -> None:
    process = script(
        fresh,
        """
        with start_trial(store, sweep, parts.planned()) as run:
            run.log(parts.finished())
        loose = start_trial(store, sweep, parts.planned(name="loose")).__enter__()
        (store.root / "ids").write_text(f"{sweep} {run.run_id} {loose.run_id}")
        assert "MLFLOW_RUN_ID" not in os.environ
        sys.exit(3)
        """,
    )
    printed = process.communicate(timeout=120)
    assert (process.returncode, printed) == (3, ("", ""))
    sweep, run, loose = (fresh.root / "ids").read_text().split()
    assert [read(fresh, run_id).info.status for run_id in (sweep, run, loose)] == ["KILLED", "FINISHED", "KILLED"]
    assert "ended before" in read(fresh, sweep).data.tags["error"]


def test_a_server_with_a_user_name_in_its_address_and_nothing_printed(
    served: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = store_location(served.uri.replace("//", "//me:secret@"), tmp_path, "served")
    assert initialise(store) == initialise(served)
    assert "secret" not in store.shown
    sweep = open_sweep(store, "quiet")
    logged(store, parent=sweep)
    close_sweep(store, sweep)
    assert capfd.readouterr() == ("", "")


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
    assert (run.run_id, result.mlflow_run_id) == (None, None)
    (warning,) = caplog.records
    assert "not recorded in MLflow: trial checkpoint every_k=2" in warning.getMessage()
    assert len(warning.getMessage().splitlines()) == 1


def test_a_part_that_is_refused_costs_a_warning_and_takes_nothing_along(
    fresh: Store, caplog: pytest.LogCaptureFixture
) -> None:
    assert fresh.file is not None
    place = fresh.file.parent / "artifacts"
    place.write_text("a file where the folder should be")
    found = logged(fresh)
    assert (found.data.tags["outcome"], found.data.metrics["time/step_ms"]) == ("ok", 50.0)
    assert "the artifacts of checkpoint" in caplog.text
    place.unlink()
    with start(fresh) as run:
        with sqlite3.connect(fresh.file) as connection:
            connection.execute("DROP TABLE metrics")
        run.log(parts.finished())
    assert "not recorded in MLflow: trial" in caplog.text
    assert artifacts(fresh, run.run_id)  # what could be kept was


# System metrics, commit


def test_system_metrics_are_sampled_while_the_trial_runs(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
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
        time.sleep(1.5)
        assert "system/cpu_utilization_percentage" not in read(local, run.run_id).data.metrics  # not while it is timed
        run.log(parts.finished())
    metrics = read(local, run.run_id).data.metrics
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= set(metrics)
    assert metrics["system/gpu_0_memory_usage_megabytes"] == 4000.0
    assert metrics["system/gpu_0_power_usage_watts"] == 150.0
    history = MlflowClient(local.uri).get_metric_history(run.run_id or "", "system/cpu_utilization_percentage")
    assert sorted(m.step for m in history) == [0, 1]


def test_a_short_trial_has_one_sample_and_none_where_switched_off(local: Store) -> None:
    with pytest.raises(ValueError), start_trial(local, None, parts.planned()) as run:
        raise ValueError
    assert "system/system_memory_usage_percentage" in read(local, run.run_id).data.metrics
    assert "SystemMetricsMonitor" not in [thread.name for thread in threading.enumerate()]
    assert not [name for name in logged(local).data.metrics if name.startswith("system/")]


def test_a_sampler_that_cannot_write_stays_quiet(local: Store, caplog: pytest.LogCaptureFixture) -> None:
    sampler = SystemSampler(local.uri, "0" * 32, interval_s=0.05)
    sampler.samples_before_logging = 2
    sampler.start()
    time.sleep(0.2)
    sampler.finish()
    assert [warning for warning in caplog.records if warning.levelno >= logging.WARNING] == []


def test_the_commit_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*words: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(repository), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def state(folder: Path = repository) -> tuple[str, bool]:
        git_state.cache_clear()
        return git_state(folder)

    git("init", "-q")
    assert state() == ("", False)  # no commit yet
    (repository / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (repository / "untracked").write_text("")
    assert state() == (commit, False)
    (repository / "file").write_text("2")
    assert state() == (commit, True)
    tags = process_tags(store_location(None, repository))
    assert (tags["git_commit"], tags["git_dirty"], tags["mlflow.source.git.commit"]) == (commit, "true", commit)
    assert state(tmp_path) == ("", False)
    assert "git_commit" not in process_tags(store_location(None, tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state(parts.ROOT) == ("", False)
