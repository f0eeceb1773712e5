"""explain=true: who is traced, what is left of it, and that a trace that fails loses nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import sweep_of_six, trial
from rich.console import Console
from small_workloads import TOKENS, config

import sweep.session as module
from sweep.config.schema import BudgetConf, Config
from sweep.decide.verdict import conclude
from sweep.progress import Display
from sweep.results import Trace, TrialResult, read_trial
from sweep.session import FOLDER, chosen, files_of, trace_chosen
from sweep.trial.process import run_isolated_trace
from sweep.trial.profile import STEPS
from sweep.trial.trial import run_trial, save

ROOT = Path(__file__).resolve().parent.parent
FILES = {"trace.json.gz", "memory_timeline.png", "memory_timeline.json"}


def names(results: list[TrialResult], budget: BudgetConf | None = None) -> list[str]:
    return [r.name for r in chosen(conclude(results, budget or BudgetConf(), None), results)]


def test_the_baseline_and_the_preferred_trial_are_traced() -> None:
    assert names(sweep_of_six(), BudgetConf(memory_mib=150.0)) == ["baseline", "micro_batch"]


def test_where_the_baseline_is_preferred_the_cheapest_saving_is_traced_beside_it() -> None:
    results = sweep_of_six()
    comparison = conclude(results, BudgetConf(), None)
    assert comparison.preferred == "baseline" and comparison.cheapest_saving is not None
    assert names(results) == ["baseline", comparison.cheapest_saving]


def test_a_baseline_alone_is_traced_alone_and_a_preferred_trial_without_one() -> None:
    assert names([trial("baseline", 300.0)]) == ["baseline"]
    results = [trial("baseline", outcome="oom_device"), trial("checkpoint", 100.0)]
    assert names(results, BudgetConf(memory_mib=200.0)) == ["checkpoint"]
    assert names([trial("baseline", outcome="oom_device")]) == []


def ran(tmp_path: Path, *strategies: str, explain: bool = True) -> list[TrialResult]:
    results = []
    for strategy in strategies:
        c = config("gpt", strategy, explain=explain, measure={"steps": 1, "repeats": 1, "verify": False})
        results.append(run_trial(c, strategy))
        save(results[-1], tmp_path / strategy)
    return results


def display() -> tuple[Display, io.StringIO]:
    said = io.StringIO()
    return Display(None, Console(file=said, width=200)), said


def test_traces_lie_in_the_trials_folders_and_are_yielded_as_they_come(tmp_path: Path) -> None:
    results = ran(tmp_path, "baseline", "checkpoint")
    shown, said = display()
    traced = list(trace_chosen(results, shown))
    assert [r.name for r in traced] == ["baseline", "checkpoint"]
    for result in traced:
        assert result.trace is not None and result.trace.steps == STEPS
        assert {p.name for p in files_of(result)} == FILES
        assert all(p.is_file() and p.parent == tmp_path / result.name / FOLDER for p in files_of(result))
    assert "Tracing a few steps of baseline and checkpoint" in said.getvalue()


def test_without_explain_and_without_a_run_nothing_is_traced(tmp_path: Path) -> None:
    shown, said = display()
    assert list(trace_chosen(ran(tmp_path, "baseline", explain=False), shown)) == []
    predicted = trial("baseline", 300.0, mode="predict", evidence="predicted")
    predicted.config["explain"] = True
    assert list(trace_chosen([predicted], shown)) == []
    assert said.getvalue() == "" and files_of(predicted) == []


def test_a_trace_that_fails_is_a_warning_and_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.run_trace

    def failing(config: Config, name: str, folder: Path, **more: object) -> Trace:
        if name == "baseline":
            raise RuntimeError("the profiler is in use")
        return original(config, name, folder, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "run_trace", failing)
    results = ran(tmp_path, "baseline", "checkpoint")
    shown, said = display()
    assert [r.name for r in trace_chosen(results, shown)] == ["checkpoint"]
    assert results[0].trace is None
    assert "Warning: baseline could not be traced: RuntimeError: the profiler is in use" in said.getvalue()


def test_an_isolated_trace_is_made_in_a_fresh_process_with_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    c = config("gpt", "hybrid")
    found = run_isolated_trace(c, "hybrid", tmp_path, progress=lambda *report: seen.append(report))
    assert found.steps == STEPS and {"recompute", "copy to host", "copy from host"} <= set(found.ranges_ms)
    assert set(found.files) == FILES and all((tmp_path / name).is_file() for name in FILES)
    assert seen and seen[-1][0] == seen[-1][1]


def test_an_isolated_trace_that_dies_says_how(tmp_path: Path) -> None:
    c = config({"model": {"_target_": "small_models.Ending", "how": "exit"}, "data": TOKENS}, "baseline")
    with pytest.raises(RuntimeError, match="ended with exit code 7"):
        run_isolated_trace(c, "baseline", tmp_path)


SMALL = [
    "measure=quick", "workload.model.layers=3", "workload.seq_len=32", "workload.data.max_mib=1",
    "strategy.offload.min_tensor_kib=1", "tracking.system_metrics=false",
]  # fmt: skip


def train(tmp_path: Path, *arguments: str) -> str:
    store = [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"hydra.sweep.dir={tmp_path}/sweep"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments, *SMALL, *store],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_sweep_with_explain_keeps_traces_in_folders_and_in_mlflow(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    out = train(tmp_path, "-m", "strategy=baseline,hybrid", "explain=true", "budget.memory_mib=25")
    assert "Tracing a few steps of baseline and hybrid" in out
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    for path in (tmp_path / "sweep").glob("*/result.json"):
        result = read_trial(path)
        assert result.trace is not None and not result.trace.failed
        assert all((path.parent / name).is_file() for name in result.trace.files)
        assert result.decision is not None and result.mlflow_run_id is not None
        assert {a.path for a in client.list_artifacts(result.mlflow_run_id)} >= FILES
    report = json.loads((tmp_path / "sweep" / "report.json").read_text())
    assert report["verdict"]


@pytest.mark.slow
def test_a_search_and_a_prediction_take_explain_too(tmp_path: Path) -> None:
    storage = f"hydra.sweeper.storage=sqlite:///{tmp_path}/optuna.db"  # a second run of this test is not gone on with
    out = train(tmp_path, "search=budget", "search.n_trials=3", "explain=true", "budget.memory_mib=25", storage)
    assert "Tracing a few steps of" in out
    assert any(read_trial(p).trace is not None for p in (tmp_path / "sweep").glob("**/result.json"))
    out = train(tmp_path, "-m", "strategy=baseline,checkpoint", "mode=predict", "explain=true")
    assert "Tracing" not in out and "Warning" not in out
