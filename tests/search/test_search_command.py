"""`search=budget` and its kin as a person types them: whole commands, real stores, a small workload."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from mlflow import MlflowClient

import train as program
from sweep.cli import guarded
from sweep.config.addresses import without_hydra
from sweep.config.check import typed
from sweep.search.study import Sampler

ROOT = Path(__file__).resolve().parents[2]
#: Tiny: these tests are about the whole, not about the numbers. Twelve points: two sizes, six kinds, no offload.
SMALL = [
    "measure=quick",
    "measure.verify=false",
    "workload.model.layers=2",
    "workload.model.d_model=32",
    "workload.model.d_ff=64",
    "workload.seq_len=16",
    "workload.data.max_mib=1",
    "workload.global_batch_size=4",
    "tracking.system_metrics=false",
]
SPACE = ["search.space.micro_batch_sizes=[2,4]", "search.space.placements=[none]", "search.space.every_k=[2,1]"]
BUDGET = ["search=budget", "budget.memory_mib=0.8", *SPACE]


def stores(folder: Path) -> list[str]:
    return [f"hydra.sweeper.storage=sqlite:///{folder}/optuna.db", f"tracking.uri=sqlite:///{folder}/mlflow.db"]


def train(folder: Path, *arguments: str, check: int = 0) -> str:
    """Run one command in this process, as if the program lay in `folder`. Returns what it printed."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HYDRA_FULL_ERROR", raising=False)
        patch.setattr("sweep.environment.CHECKOUT", folder)
        patch.setattr("sweep.report.plots.draw", lambda report: [])
        patch.setattr(sys, "argv", ["train.py", *arguments, *SMALL, *stores(folder)])
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code: Any = guarded(program.main)
            except SystemExit as ended:
                code = ended.code
    assert code == check, said.getvalue()
    return said.getvalue()


def results(folder: Path) -> dict[str, Any]:
    """Of the one search below a folder."""
    (path,) = folder.glob("multirun/*/optimization_results.yaml")
    return yaml.safe_load(path.read_text())


def report(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("multirun/*/report.json")
    return yaml.safe_load(path.read_text())


def runs(folder: Path, filter_string: str) -> list[Any]:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()], filter_string))


@pytest.mark.parametrize("search", ["budget", "pareto"])
def test_every_search_composes_with_every_sampler(search: str) -> None:
    for sampler in [p.stem for p in (ROOT / "conf" / "search" / "sampler").glob("*.yaml")]:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            composed = compose("config", [f"search={search}", f"search/sampler={sampler}"], return_hydra_config=True)
        made = Sampler(composed.hydra.sweeper.sampler, 0, 0, len(composed.hydra.sweeper.objectives))
        assert made.name.lower().startswith(sampler.replace("_", ""))
        assert typed(without_hydra(composed)).search.name == search


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole search under a cap that the baseline does not fit, without -m."""
    folder = tmp_path_factory.mktemp("searched")
    return folder, train(folder, *BUDGET, "search.n_trials=4", "search.plan_points=2")


def test_a_search_refuses_what_cannot_fit_and_measures_the_rest(searched: tuple[Path, str]) -> None:
    folder, output = searched
    found, said = results(folder), report(folder)
    assert found["counts"]["launched"] == 4
    assert found["counts"]["feasible"] == 4, "every run fits: none of them was out of memory"
    assert found["trials"][0]["constraints"]["memory"] > 0
    refused = [t for t in found["trials"] if t["outcome"] == "over_budget"]
    assert refused[0] == found["trials"][0], "the baseline"
    for trial in refused:
        assert "values" not in trial, "an estimate is no result"
        kept = yaml.safe_load((Path(trial["folder"]) / "result.json").read_text())
        assert (kept["outcome"], kept["evidence"], kept["measurement"]) == ("over_budget", "predicted", None)
        assert trial["mlflow_run_id"] in {r.info.run_id for r in runs(folder, "tags.outcome = 'over_budget'")}
    best = found["best_trial"]
    assert best["info"]["measured_mib"] <= 0.8
    assert best["info"]["measured_mib"] == pytest.approx(best["info"]["predicted_mib"])
    assert said["baseline"]["outcome"] == "over_budget"
    assert said["verdict"] == "accept"
    (preferred,) = [c for c in said["candidates"] if c["name"] == said["preferred"]]
    assert preferred["mlflow_run_id"] == best["mlflow_run_id"], "the best is the verdict's"
    for words in ("plan after", "[predicted]", "Verdict: accept"):
        assert words in output
    (parent,) = runs(folder, "tags.kind = 'sweep'")
    names = {a.path for a in MlflowClient(f"sqlite:///{folder}/mlflow.db").list_artifacts(parent.info.run_id)}
    assert {"optimization_results.yaml", "search_history.png", "report.json"} <= names


@pytest.mark.slow
def test_the_same_command_goes_on_and_ends_when_all_is_known(searched: tuple[Path, str]) -> None:
    """More trials of the same study: the first command's trials are in the report, and under the same parent run."""
    folder, _ = searched
    before = {t["number"]: t for t in results(folder)["trials"]}
    output = train(folder, *BUDGET, "search.n_trials=50")
    found = results(folder)
    assert "exhausted" in found["ended_because"]
    after = {t["number"]: t for t in found["trials"]}
    assert {n: after[n] for n in before} == before
    assert "planning" not in output, "a study is planned once"
    measured = [t for t in found["trials"] if t.get("values") and "same_as" not in t]
    assert len({t["info"]["computation"] for t in measured}) == len(measured), "no computation is measured twice"
    names = {c["mlflow_run_id"] for c in report(folder)["candidates"]}
    assert {t["mlflow_run_id"] for t in measured} <= names
    assert len({r.data.tags["mlflow.parentRunId"] for r in runs(folder, "tags.kind = 'trial'")}) == 1


KILLED_AMID_RECORDING = """
import os, runpy, signal, sys
import sweep.tracking
log = sweep.tracking.TrialRun.log
def amid(run, result, *args, **kwargs):
    if not result.is_baseline:
        os.kill(os.getpid(), signal.SIGKILL)
    log(run, result, *args, **kwargs)
sweep.tracking.TrialRun.log = amid
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_killed_search_goes_on_and_takes_what_was_measured(tmp_path: Path) -> None:
    where = f"hydra.sweep.dir={tmp_path}/multirun/s"
    arguments = ["search=budget", "search.n_trials=3", "search.plan_points=0", *SPACE, where]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AMID_RECORDING, *arguments, *SMALL, *stores(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = {p: yaml.safe_load(p.read_text()) for p in tmp_path.glob("multirun/s/*/result.json")}
    (path,) = [p for p, result in kept.items() if result["mlflow_run_id"] is None]
    output = train(tmp_path, *arguments)
    assert "going on with the study" in output
    assert "its result is taken" in output
    found = results(tmp_path)
    assert (found["counts"]["launched"], found["counts"]["failed"]) == (3, 0)
    rows = {row["mlflow_run_id"] for row in [report(tmp_path)["baseline"], *report(tmp_path)["candidates"]]}
    for each, then in kept.items():
        now = yaml.safe_load(each.read_text())
        assert now["measurement"] == then["measurement"], "what was measured is not overwritten"
        assert now["mlflow_run_id"] in rows
    now = yaml.safe_load(path.read_text())
    (taken,) = [t for t in found["trials"] if t.get("folder") == str(path.parent)]
    assert taken["values"] == [now["measurement"]["samples_per_s"]]
    assert "computation" in taken["info"]
    (run,) = runs(tmp_path, f"tags.folder = '{path.parent}'")
    assert (run.info.status, run.data.tags["outcome"], run.info.run_id) == ("FINISHED", "ok", now["mlflow_run_id"])
    assert run.data.metrics["throughput/samples_per_s"] == pytest.approx(taken["values"][0], rel=1e-3)
    assert runs(tmp_path, "attributes.status = 'RUNNING'") == []


@pytest.mark.slow
def test_nothing_feasible_is_exit_code_3(tmp_path: Path) -> None:
    words = ["search=budget", "budget.memory_mib=0.05", "search.n_trials=3", *SPACE, "tracking.enabled=false"]
    output = train(tmp_path, *words, check=3)
    assert "no feasible trial" in output
    assert "least violating" in output
    assert "Traceback" not in output
    assert "the preflight failed" not in output
    assert " MiB | " not in output, "what is predicted not to fit is never run, without a piece to estimate from too"


@pytest.mark.slow
def test_pareto_returns_the_front(tmp_path: Path) -> None:
    words = ["search=pareto", "search/sampler=nsgaii", "search.n_trials=5", "search.plan_points=2", *SPACE]
    train(tmp_path, *words, "tracking.enabled=false")
    found = results(tmp_path)
    assert found["directions"] == ["minimize", "maximize"]
    assert found["sampler"] == "NSGAIISampler"
    front = [s["values"] for s in found["solutions"]]
    assert front
    assert not any(a[0] <= b[0] and a[1] >= b[1] and a != b for a in front for b in front)


@pytest.mark.slow
def test_a_space_of_ones_own_and_a_baseline_that_cannot_fit(tmp_path: Path) -> None:
    words = ["-m", "strategy=checkpoint", "strategy.micro_batch_size=choice(1,2)", "hydra/sweeper=budget"]
    train(tmp_path, *words, "hydra/sweeper/sampler=gp", "budget.memory_mib=0.8", "tracking.enabled=false")
    found = results(tmp_path)
    assert found["counts"]["launched"] == 2
    assert {t["params"]["strategy.micro_batch_size"] for t in found["trials"]} == {1, 2}
    assert report(tmp_path)["baseline"]["outcome"] == "over_budget"
    assert list(tmp_path.glob("multirun/*/baseline/result.json"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["search=budgets"], "search=budgets: there is no such option"),
        (["search=budget", "search.n_trials=0"], "search.n_trials=0: is below 1"),
        (["search=budget", "search.space.micro_batch_sizes=[64]"], "search.space.micro_batch_sizes=64: is larger"),
        (["search=budget", "search/sampler=annealing"], "search/sampler=annealing: there is no such option"),
        (["search=budget", "mode=predict"], "mode=predict: a search measures"),
        (["search=budget", "search.trials=3"], "search.trials"),
    ],
)
def test_mistakes_get_one_line_before_anything_runs(tmp_path: Path, words: list[str], says: str) -> None:
    output = train(tmp_path, *words, check=2)
    assert says in output
    assert len(output.strip().splitlines()) == 1
