"""`mode=diagnose` as a person types it: a real process, its text, files, runs and exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["workload.model.layers=3", "workload.seq_len=64", "workload.data.max_mib=1"]


def train(folder: Path, *arguments: str, check: int = 0) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    where = [f"hydra.run.dir={folder}/run", f"hydra.sweep.dir={folder}/sweep"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments, f"tracking.uri=sqlite:///{folder}/mlflow.db", *where],
        cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == check, done.stdout + done.stderr
    return done.stdout


def runs(folder: Path) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def test_one_workload_and_the_command_that_it_gives(tmp_path: Path) -> None:
    said = train(tmp_path, "mode=diagnose", *SMALL)
    assert "Yes: activations are" in said and "[predicted]" in said
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"diagnosis.json", "diagnosis.md"} <= files
    assert not {"result.json", "report.json", "baseline"} & files, "no trial is run and nothing is compared"
    found = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert found["overrides"][:2] == ["mode=diagnose", "workload.model.layers=3"]
    [run] = runs(tmp_path)
    assert run.info.status == "FINISHED" and run.info.run_id == found["mlflow_run_id"]
    assert run.data.tags["kind"] == "diagnosis"
    # What it says to type first can be typed, and takes what was predicted.
    command = next(line.strip() for line in said.splitlines() if line.strip().startswith("type: python "))
    words = [w for w in shlex.split(command)[3:] if not w.startswith("tracking.uri=")]
    again = train(tmp_path, *words, "mode=predict", "compare=false")
    first = next(a for a in found["order"] if a["applies"])
    assert f"{first['setting']['allocated_mib']:.1f} MiB" in again


@pytest.mark.slow
def test_several_workloads_and_nothing_that_fits(tmp_path: Path) -> None:
    said = train(
        tmp_path,
        "-m",
        "mode=diagnose",
        "workload=gpt_tiny,vit_digits",
        "device=rtx_4090",
        "budget.memory_mib=5",
        check=3,
    )
    assert said.count("diagnosis of the baseline") == 2
    assert said.index("gpt_tiny on rtx_4090") < said.index("vit_digits on rtx_4090")
    assert said.count("No strategy here brings it under the cap") == 2
    assert {run.data.tags["workload"] for run in runs(tmp_path)} == {"gpt_tiny", "vit_digits"}
    assert {run.data.tags["feasible"] for run in runs(tmp_path)} == {"false"}


@pytest.mark.slow
def test_the_published_comparison_is_explained(tmp_path: Path) -> None:
    """After checkpointing the peak lies in the optimizer's foreach temporaries: one list as long as the parameters."""
    pytest.importorskip("transformers")
    said = train(
        tmp_path,
        "mode=diagnose",
        "workload=qwen2_5_0_5b",
        "device=rtx_5070_ti_laptop",
        "device.cublas_workspace_mib=8.125",  # as with the torch of that publication
        "budget.memory_mib=9000",
        check=3,
    )
    assert "In part: activations are 33 %" in said and "No strategy here brings it under the cap" in said
    facts = json.loads((tmp_path / "run" / "diagnosis.json").read_text())["facts"]
    extremes = [s for s in facts["extremes"] if s["refused"] is None]
    assert {s["peak_phase"] for s in extremes} == {"optimizer"}
    assert all(abs(s["allocated_mib"] - 9450) < 20 for s in extremes)
    fused = next(w for w in facts["what_if_lowest"] if w["override"].endswith("=fused"))
    assert abs(fused["phase_saved_mib"] - 1885) < 2, "494,032,768 parameters of four bytes"
    # Then the two gradients of the tied embedding are what is left at the top.
    assert fused["peak_phase"] == "backward" and 600 < fused["saved_mib"] < 900
