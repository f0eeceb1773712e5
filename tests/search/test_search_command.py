"""`search=budget` and its kin as a person types them: real processes, real stores, a small workload."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

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


@pytest.mark.parametrize("sampler", [p.stem for p in (ROOT / "conf" / "search" / "sampler").glob("*.yaml")])
@pytest.mark.parametrize("search", ["budget", "pareto"])
def test_every_search_composes_with_every_sampler(search: str, sampler: str) -> None:
    from hydra import compose, initialize_config_dir

    from sweep.config.check import typed
    from sweep.search.hydra import without_hydra
    from sweep.search.study import Sampler

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("config", [f"search={search}", f"search/sampler={sampler}"], return_hydra_config=True)
    made = Sampler(composed.hydra.sweeper.sampler, 0, 0, len(composed.hydra.sweeper.objectives))
    assert made.name.lower().startswith(sampler.replace("_", ""))
    assert typed(without_hydra(composed)).search.name == search


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program, so that its default stores and folders are real and nobody else's."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("sweep", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    (folder / "mlruns").mkdir()
    return folder


def command(project: Path, *arguments: str) -> dict[str, Any]:
    return {
        "args": [sys.executable, str(project / "train.py"), *arguments, *SMALL],
        "cwd": project,
        "env": {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def train(project: Path, *arguments: str, check: int = 0) -> str:
    done = subprocess.run(**command(project, *arguments), timeout=300, check=False)
    assert done.returncode == check, done.stdout + done.stderr
    return done.stdout + done.stderr


def results(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "optimization_results.yaml").read_text())


def report(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "report.json").read_text())


def runs(project: Path, filter_string: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project}/mlruns/mlflow.db")
    found = [e.experiment_id for e in client.search_experiments()]
    return list(client.search_runs(found, filter_string, max_results=1000))


def folder_of(project: Path, output: str) -> Path:
    name = next(line.split("study ")[1].split(":")[0].strip() for line in output.splitlines() if "study " in line)
    return project / "multirun" / name


@pytest.fixture(scope="module")
def searched(project: Path) -> tuple[Path, str]:
    """A whole search under a cap that the baseline does not fit, without -m."""
    output = train(
        project, "search=budget", "budget.memory_mib=0.8", "search.n_trials=4", "search.plan_points=2", *SPACE
    )
    return folder_of(project, output), output


def test_a_search_refuses_what_cannot_fit_and_measures_the_rest(searched: tuple[Path, str]) -> None:
    folder, output = searched
    found = results(folder)
    assert found["counts"]["launched"] == 4
    assert found["counts"]["feasible"] == 4, "every run fits: none of them was out of memory"
    baseline = found["trials"][0]
    assert baseline["outcome"] == "over_budget"
    assert baseline["constraints"]["memory"] > 0
    assert "values" not in baseline, "an estimate is no result"
    best = found["best_trial"]
    assert best["info"]["measured_mib"] <= 0.8
    assert best["info"]["measured_mib"] == pytest.approx(best["info"]["predicted_mib"])
    assert "plan after" in output
    assert "[predicted]" in output
    assert "Traceback" not in output


def test_the_end_of_a_search_is_a_report_with_plots(project: Path, searched: tuple[Path, str]) -> None:
    folder, output = searched
    said = report(folder)
    assert said["baseline"]["outcome"] == "over_budget"
    assert said["verdict"] == "accept"
    assert "Verdict: accept" in output
    for name in ("search_history.png", "report.md"):
        assert (folder / name).stat().st_size > 0
    from mlflow import MlflowClient

    parents = runs(project, "tags.kind = 'sweep'")
    client = MlflowClient(f"sqlite:///{project}/mlruns/mlflow.db")
    names = {a.path for a in client.list_artifacts(parents[-1].info.run_id)}
    assert {"optimization_results.yaml", "search_history.png", "report.json"} <= names


def test_a_refused_candidate_is_a_run_and_a_result(project: Path, searched: tuple[Path, str]) -> None:
    folder, _ = searched
    refused = [t for t in results(folder)["trials"] if t["outcome"] == "over_budget"]
    for trial in refused:
        kept = yaml.safe_load((Path(trial["folder"]) / "result.json").read_text())
        assert kept["outcome"] == "over_budget"
        assert kept["evidence"] == "predicted"
        assert kept["measurement"] is None
        (run,) = [r for r in runs(project, "") if r.info.run_id == trial["mlflow_run_id"]]
        assert run.data.tags["outcome"] == "over_budget"


def test_the_same_command_goes_on_and_ends_when_all_is_known(project: Path, searched: tuple[Path, str]) -> None:
    """More trials of the same study: the first command's trials are in the report, and under the same parent run."""
    folder, _ = searched
    before = {t["number"]: t for t in results(folder)["trials"]}
    output = train(project, "search=budget", "budget.memory_mib=0.8", "search.n_trials=50", *SPACE)
    assert folder_of(project, output) == folder
    found = results(folder)
    assert "exhausted" in found["ended_because"]
    after = {t["number"]: t for t in found["trials"]}
    assert {n: after[n] for n in before} == before
    assert "planning" not in output, "a study is planned once"
    measured = [t for t in found["trials"] if t.get("values") and "same_as" not in t]
    assert len({t["info"]["computation"] for t in measured}) == len(measured), "no computation is measured twice"
    names = {c["mlflow_run_id"] for c in report(folder)["candidates"]}
    assert {t["mlflow_run_id"] for t in measured} <= names
    assert len({r.data.tags["mlflow.parentRunId"] for r in runs(project, "tags.kind = 'trial'")}) == 1


def test_a_killed_search_goes_on_where_it_was(project: Path) -> None:
    arguments = ["search=budget", "search.n_trials=5", "search.plan_points=0", "workload.seed=7", *SPACE]
    child = subprocess.Popen(**command(project, *arguments))
    studies = project / "multirun"
    known = set(studies.iterdir()) if studies.exists() else set()
    folder = None
    try:
        for _ in range(1200):
            new = [
                f for f in (set(studies.iterdir()) - known if studies.exists() else ()) if list(f.glob("*/result.json"))
            ]
            if new and len(list(new[0].glob("*/result.json"))) >= 2:
                folder = new[0]
                break
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert folder is not None
    kept = {p: p.read_text() for p in folder.glob("*/result.json")}
    output = train(project, *arguments)
    assert "going on with the study" in output
    found = results(folder)
    assert found["counts"]["launched"] == 5
    assert report(folder)["baseline"]["outcome"] == "ok"
    for path, text in kept.items():
        now, then = yaml.safe_load(path.read_text()), yaml.safe_load(text)
        assert now["measurement"] == then["measurement"], "what was measured is not overwritten"
        rows = [report(folder)["baseline"], *report(folder)["candidates"]]
        assert now["mlflow_run_id"] in {row["mlflow_run_id"] for row in rows}
        assert then["mlflow_run_id"] in (None, now["mlflow_run_id"]), "None: killed while it was recorded"
    assert runs(project, "attributes.status = 'RUNNING'") == []


KILLED_AMID_RECORDING = """
import os, runpy, signal, sys
import sweep.tracking
log = sweep.tracking.TrialRun.log
def amid(run, result, files=()):
    if not result.is_baseline:
        os.kill(os.getpid(), signal.SIGKILL)
    log(run, result, files)
sweep.tracking.TrialRun.log = amid
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_trial_that_was_being_recorded_when_its_search_was_killed_is_taken_and_recorded(project: Path) -> None:
    arguments = ["search=budget", "search.n_trials=3", "search.plan_points=0", "workload.seed=11", *SPACE]
    asked = command(project, *arguments)
    asked["args"] = [sys.executable, "-c", KILLED_AMID_RECORDING, *asked["args"][2:]]
    killed = subprocess.run(**asked, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = folder_of(project, killed.stdout)
    (path,) = [p for p in folder.glob("*/result.json") if not yaml.safe_load(p.read_text())["is_baseline"]]
    then = yaml.safe_load(path.read_text())
    assert then["mlflow_run_id"] is None
    output = train(project, *arguments)
    assert "its result is taken" in output
    found = results(folder)
    assert (found["counts"]["launched"], found["counts"]["failed"]) == (3, 0)
    (taken,) = [t for t in found["trials"] if t.get("folder") == str(path.parent)]
    now = yaml.safe_load(path.read_text())
    assert taken["values"] == [now["measurement"]["samples_per_s"]] == [then["measurement"]["samples_per_s"]]
    assert "computation" in taken["info"]
    (run,) = runs(project, f"tags.folder = '{path.parent}'")
    assert (run.info.status, run.data.tags["outcome"], run.info.run_id) == ("FINISHED", "ok", now["mlflow_run_id"])
    assert run.data.metrics["throughput/samples_per_s"] == pytest.approx(taken["values"][0], rel=1e-3)
    assert now["mlflow_run_id"] in {row["mlflow_run_id"] for row in report(folder)["candidates"]}


@pytest.mark.slow
def test_nothing_feasible_is_exit_code_3(project: Path) -> None:
    output = train(
        project,
        "search=budget",
        "budget.memory_mib=0.05",
        "search.n_trials=3",
        *SPACE,
        "tracking.enabled=false",
        check=3,
    )
    assert "no feasible trial" in output
    assert "least violating" in output
    assert "Traceback" not in output
    assert "the preflight failed" not in output
    assert " MiB | " not in output, "what is predicted not to fit is never run, without a piece to estimate from too"


@pytest.mark.slow
def test_pareto_returns_the_front(project: Path) -> None:
    output = train(
        project, "search=pareto", "search/sampler=nsgaii", "search.n_trials=5", "search.plan_points=2", *SPACE,
        "tracking.enabled=false",
    )  # fmt: skip
    found = results(folder_of(project, output))
    assert found["directions"] == ["minimize", "maximize"]
    assert found["sampler"] == "NSGAIISampler"
    front = [s["values"] for s in found["solutions"]]
    assert front
    assert not any(a[0] <= b[0] and a[1] >= b[1] and a != b for a in front for b in front)


@pytest.mark.slow
def test_a_space_of_ones_own(project: Path) -> None:
    output = train(
        project, "-m", "strategy=checkpoint", "strategy.micro_batch_size=choice(1,2,4)", "hydra/sweeper=budget",
        "hydra/sweeper/sampler=gp", "tracking.enabled=false",
    )  # fmt: skip
    found = results(folder_of(project, output))
    assert found["counts"]["launched"] == 3
    assert {t["params"]["strategy.micro_batch_size"] for t in found["trials"]} == {1, 2, 4}
    assert report(folder_of(project, output))["baseline"]["outcome"] == "ok"


@pytest.mark.slow
def test_a_baseline_that_cannot_fit_is_not_run_for_a_space_of_ones_own_either(project: Path) -> None:
    output = train(
        project, "strategy=checkpoint", "strategy.micro_batch_size=1,2", "hydra/sweeper=budget", "budget.memory_mib=0.8"
    )
    folder = folder_of(project, output)
    assert results(folder)["counts"]["launched"] == 2
    assert report(folder)["baseline"]["outcome"] == "over_budget"
    assert (folder / "baseline" / "result.json").is_file()


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
def test_mistakes_get_one_line_before_anything_runs(project: Path, words: list[str], says: str) -> None:
    output = train(project, *words, check=2)
    assert says in output
    assert len(output.strip().splitlines()) == 1
