"""What the tests of recording share: a result with every field filled, ways to read a run, and a real MLflow server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_up
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from sweep.results import Category, Decision, Peak, Phase, TrialResult, Verification
from sweep.tracking import Store, TrialRun, start_trial, store_location

ROOT = Path(__file__).resolve().parent.parent
SERVER_START_LIMIT_S = 120.0
DATA = {"_target_": "sweep.workload.data.StandardLibrary", "fraction": 0.5}


def planned(**changes: Any) -> TrialResult:
    """A trial before it starts."""
    config = made_up.config("checkpoint", checkpoint__every_k=2)
    config["workload"] |= {"data": DATA, "grad_clip_norm": None, "optimizer": {"kwargs": {"betas": [0.9, 0.95]}}}
    values: dict[str, Any] = {
        "name": "checkpoint every_k=2",
        "outcome": "failed",
        "config": config,
        "parameters": None,
        "blocks": None,
        "mlflow_run_id": None,
        "data_version": "0123456789abcdef" * 4,
    }
    return made_up.trial("checkpoint", **(values | changes))


def finished(steps: int = 30, **changes: Any) -> TrialResult:
    """A trial that went well, every field filled."""
    at_peak = {category.value: 10.0 + i for i, category in enumerate(Category)}
    by_phase = {phase.value: 50.0 + i for i, phase in enumerate(Phase)}
    peak = Peak(100.0, "backward", "aten.mm", "layers.1", at_peak, [], by_phase, host_peak_mib=7.0)
    measure = {
        "peak": peak,
        "eval_loss": 5.2,
        "to_host_mib": 5.0,
        "from_host_mib": 6.0,
        "train_loss": [5.5 - 0.01 * i for i in range(steps)],
        "step_times_ms": [50.0 + 0.1 * i for i in range(15)],
    }
    values: dict[str, Any] = {
        "outcome": "ok",
        "parameters": 1_200_000,
        "prediction": made_up.prediction(101.0, peak=peak, error_ratio=0.01),
        "verification": Verification(True, 1e-4, 3e-6, 1e-6, 2e-6, 3e-6, "head.weight", 2e-6, 0.0, True),
        "measurement": made_up.measurement(100.0, 50.0, **measure),
        "environment": {"cuda": "none", "gpu": "none"},
        "wall_s": 12.5,
    }
    return planned(**(values | changes))


def accepted() -> Decision:
    return Decision("accept", peak_mib=100.0, saved_mib=40.0, throughput_ratio=0.8, eval_loss_ratio=1.001)


def fresh(empty_database: Path, root: Path) -> Store:
    """A store of its own from a copy of a database: making one takes seconds, copying it nothing."""
    store = store_location(None, root)
    assert store.file is not None
    store.file.parent.mkdir(parents=True)
    shutil.copy(empty_database, store.file)
    return store


def start(store: Store, parent: str | None = None, **changes: Any) -> TrialRun:
    return start_trial(store, parent, planned(**changes), system_metrics=False)


def logged(store: Store, *files: Path, parent: str | None = None, **changes: Any) -> Run:
    """The run of a trial, finished and logged, as MLflow has it."""
    with start(store, parent, **{k: v for k, v in changes.items() if k in ("name", "config", "command")}) as run:
        run.log(finished(**changes), files)
    return read(store, run.run_id)


def read(store: Store, run_id: str | None) -> Run:
    assert run_id is not None
    return MlflowClient(store.uri).get_run(run_id)


def artifacts(store: Store, run_id: str | None, folder: str = "") -> list[str]:
    assert run_id is not None
    return sorted(item.path for item in MlflowClient(store.uri).list_artifacts(run_id, folder))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """A real `mlflow server` on 127.0.0.1 with its own database and artifacts; ready when `wait_for` has seen it."""
    uri = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", uri.rpartition(":")[2]]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder)
    try:
        yield uri
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(uri: str, folder: Path) -> str:
    end = time.monotonic() + SERVER_START_LIMIT_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{uri}/health", timeout=2).close()
            return uri
        time.sleep(0.2)
    raise RuntimeError(f"the MLflow server did not start: {(folder / 'server.log').read_text()[-2000:]}")


