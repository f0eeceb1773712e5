"""What the tests of recording share: a result with every field filled, and a real MLflow server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweep.results import (
    Category,
    Decision,
    Holder,
    Measurement,
    Peak,
    Phase,
    Prediction,
    TrialResult,
    Verification,
)

ROOT = Path(__file__).resolve().parent.parent
SERVER_START_LIMIT_S = 120.0


def config() -> dict[str, Any]:
    return {
        "workload": {
            "name": "gpt_tiny",
            "data": {"_target_": "sweep.workload.data.StandardLibrary", "fraction": 0.5},
            "optimizer": {"name": "adamw", "lr": 3e-4, "kwargs": {"betas": [0.9, 0.95]}},
            "grad_clip_norm": None,
        },
        "strategy": {"name": "checkpoint", "checkpoint": {"granularity": "blocks", "every_k": 2, "parts": []}},
        "measure": {"verify": True, "steps": 5},
    }


def peak(mib: float = 100.0) -> Peak:
    return Peak(
        mib,
        phase="backward",
        operator="aten.mm",
        module="layers.1",
        at_peak_mib={c.value: 10.0 + i for i, c in enumerate(Category)},
        largest=[Holder("layers.1", "activation", 30.0, 4)],
        phase_peaks_mib={p.value: 50.0 + i for i, p in enumerate(Phase)},
        host_peak_mib=7.0,
    )


def planned(**changes: Any) -> TrialResult:
    """A trial before it starts."""
    values: dict[str, Any] = {
        "name": "checkpoint every_k=2",
        "strategy": "checkpoint",
        "workload": "gpt_tiny",
        "device": "cpu",
        "outcome": "failed",
        "evidence": "cpu",
        "is_baseline": False,
        "fixed_id": "f" * 16,
        "strategy_id": "a" * 16,
        "config": config(),
        "overrides": ["strategy=checkpoint", "strategy.checkpoint.every_k=2"],
        "command": "python train.py strategy=checkpoint strategy.checkpoint.every_k=2",
        "data_version": "0123456789abcdef" * 4,
        "data": {"name": "standard-library", "files": 700, "bytes": 12_000_000},
    }
    return TrialResult(**(values | changes))


def finished(steps: int = 30, **changes: Any) -> TrialResult:
    """A trial that went well, every field filled."""
    values: dict[str, Any] = {
        "outcome": "ok",
        "parameters": 1_200_000,
        "blocks": 4,
        "prediction": Prediction(
            "cpu", 101.0, 120.0, True, 880.0, 1000.0, 0.0, 19.0, peak(101.0), to_host_mib=3.0, error_ratio=0.01
        ),
        "verification": Verification(True, 1e-4, 3e-6, 1e-6, 2e-6, 3e-6, "head.weight", 2e-6, 0.0, True),
        "measurement": Measurement(
            "cpu",
            steps=5,
            repeats=3,
            step_ms=50.0,
            step_ms_low=49.0,
            step_ms_high=52.0,
            samples_per_s=320.0,
            tokens_per_s=40960.0,
            peak_allocated_mib=100.0,
            peak_reserved_mib=None,
            peak=peak(),
            phases_ms={"data": 1.0, "forward": 20.0, "backward": 25.0, "optimizer": 4.0},
            train_loss=[5.5 - 0.01 * i for i in range(steps)],
            eval_loss_before=5.6,
            eval_loss=5.2,
            to_host_mib=5.0,
            from_host_mib=6.0,
            step_times_ms=[50.0 + 0.1 * i for i in range(15)],
        ),
        "environment": {"cuda": "none", "gpu": "none"},
        "wall_s": 12.5,
    }
    return planned(**(values | changes))


def accepted() -> Decision:
    return Decision(
        "accept",
        [],
        "use it",
        "the baseline on this CPU",
        peak_mib=100.0,
        saved_mib=40.0,
        throughput_ratio=0.8,
        eval_loss_ratio=1.001,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """A real `mlflow server` on 127.0.0.1 with its own database and artifacts."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder)
    try:
        uri = f"http://127.0.0.1:{port}"
        _wait_for(f"{uri}/health", process, folder / "server.log")
        yield uri
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SERVER_START_LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(address, timeout=2).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"the MLflow server did not start: {log.read_text()[-2000:]}")
