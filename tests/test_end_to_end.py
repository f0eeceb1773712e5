"""The README's commands as a person types them: real processes, a real MLflow store, read by MLflow's client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: A short measurement of a small model: these tests are about the whole, not about the numbers.
SMALL = [
    "measure=quick",
    "workload.model.layers=3",
    "workload.model.d_model=64",
    "workload.seq_len=32",
    "workload.data.max_mib=1",
    "strategy.offload.min_tensor_kib=1",
    "tracking.system_metrics=false",
]
STRATEGIES = {"baseline", "micro_batch", "checkpoint", "checkpoint_selective", "offload", "hybrid"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program, so that the default store and folders are real and nobody else's."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("sweep", "conf", "hydra_plugins"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    (folder / "mlruns").mkdir()
    return folder


def train(
    project: Path, *arguments: str, cwd: Path | None = None, check: int | None = 0
) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(project / "train.py"), *arguments],
        cwd=cwd or project, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def client(project: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{project}/mlruns/mlflow.db")


def runs(project: Path, filter_string: str = "") -> list[Any]:
    c = client(project)
    experiments = [e.experiment_id for e in c.search_experiments()]
    return list(c.search_runs(experiments, filter_string, max_results=1000))


@pytest.fixture(scope="module")
def sweep(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """`strategy=glob(*)`, started from another working directory."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    folder = elsewhere / "sweep"
    done = train(project, "-m", "strategy=glob(*)", f"hydra.sweep.dir={folder}", *SMALL, cwd=elsewhere)
    assert not (elsewhere / "mlruns").exists()
    return folder, done.stdout


def test_glob_compares_every_strategy_with_the_baseline(sweep: tuple[Path, str]) -> None:
    folder, output = sweep
    report = json.loads((folder / "report.json").read_text())
    assert report["baseline"]["strategy"] == "baseline"
    assert {c["strategy"] for c in report["candidates"]} == STRATEGIES - {"baseline"}
    assert report["evidence"] == "cpu"
    for candidate in report["candidates"]:
        assert candidate["outcome"] == "ok", candidate
        assert candidate["peak_mib"] > 0
        assert candidate["saved_mib"] == pytest.approx(report["baseline"]["peak_mib"] - candidate["peak_mib"])
        assert candidate["saved_mib"] > 0
        assert candidate["grad_rel_err"] <= 1e-4
        assert candidate["step_ms"] > 0
        assert candidate["eval_loss"] > 0
        assert candidate["verdict"] in ("accept", "tune", "reject")
        assert candidate["predicted"]["error_ratio"] == pytest.approx(0, abs=1e-9)
    for name in ("strategy", "peak", "saved", "verdict", "What fills the memory", "Verdict:", "this CPU"):
        assert name in output
    assert "\x1b[" not in output, "no colours where the output is no terminal"
    for name in ("report.md", "pareto.png"):
        assert (folder / name).stat().st_size > 0


def test_each_trial_leaves_a_result_and_a_run(project: Path, sweep: tuple[Path, str]) -> None:
    folder, _ = sweep
    c = client(project)
    parents = runs(project, "tags.kind = 'sweep'")
    assert len(parents) == 1
    parent = parents[0]
    assert parent.info.status == "FINISHED"
    assert "Verdict" in parent.data.tags["mlflow.note.content"]
    assert {a.path for a in c.list_artifacts(parent.info.run_id)} >= {"report.json", "report.md", "pareto.png"}
    children = runs(project, f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    assert {r.data.tags["strategy"] for r in children} == STRATEGIES
    results = {r["mlflow_run_id"]: r for r in map(_json, folder.glob("*/result.json"))}
    for run in children:
        result = results[run.info.run_id]
        metrics = run.data.metrics
        assert run.info.status == "FINISHED"
        # MLflow gets three decimals.
        assert metrics["memory/peak_allocated_mib"] == round(result["measurement"]["peak_allocated_mib"], 3)
        assert metrics["time/step_ms"] == round(result["measurement"]["step_ms"], 3)
        assert metrics["time/backward_ms"] > 0
        assert metrics["throughput/tokens_per_s"] > 0
        assert metrics["quality/eval_loss"] > 0
        assert metrics["memory/at_peak/parameter_mib"] > 0
        assert run.data.tags["outcome"] == "ok"
        assert run.data.tags["evidence"] == "cpu"
        assert run.data.tags["verdict"] == result["decision"]["verdict"]
        assert run.data.params["workload.global_batch_size"] == "16"
        assert {a.path for a in c.list_artifacts(run.info.run_id)} >= {"result.json"}
        assert len(c.get_metric_history(run.info.run_id, "quality/train_loss")) == 3
    offload = next(r for r in children if r.data.tags["strategy"] == "offload")
    assert offload.data.metrics["transfer/to_host_mib"] > 0
    checkpoint = next(r for r in children if r.data.tags["strategy"] == "checkpoint")
    assert checkpoint.data.metrics["verify/grad_rel_err"] == 0


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_the_report_can_be_made_again_without_torch(project: Path, sweep: tuple[Path, str]) -> None:
    folder, output = sweep
    before = _json(folder / "report.json")
    stop = "import sys; sys.modules['torch'] = None"
    code = f"{stop}; from sweep.report.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=project, capture_output=True, text=True, check=True
    )
    assert _json(folder / "report.json") == before
    table = output[output.index("gpt_tiny on cpu") : output.index("Use it")]
    assert table in done.stdout


@pytest.mark.slow
def test_a_list_without_the_baseline_runs_it_first(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    train(project, "-m", "strategy=micro_batch", "strategy.micro_batch_size=4,8", f"hydra.sweep.dir={folder}", *SMALL)
    report = _json(folder / "report.json")
    assert report["baseline"]["strategy"] == "baseline"
    assert [c["name"].split(" ")[:2] for c in report["candidates"]] == [
        ["micro_batch", "micro_batch_size=4"],
        ["micro_batch", "micro_batch_size=8"],
    ]
    first = min(map(_json, folder.glob("*/result.json")), key=lambda r: r["started_at"])
    assert first["is_baseline"]


@pytest.mark.slow
def test_one_trial_is_compared_with_its_baseline(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = train(
        project, "strategy=checkpoint", "strategy.checkpoint.every_k=2", "workload=vit_digits", "measure=quick",
        "workload.model.d_model=32", "workload.model.layers=4", "workload.global_batch_size=16",
        f"hydra.run.dir={folder}",
    )  # fmt: skip
    assert _json(folder / "result.json")["strategy"] == "checkpoint"
    assert _json(folder / "baseline" / "result.json")["is_baseline"]
    assert _json(folder / "report.json")["candidates"][0]["saved_mib"] > 0
    assert "checkpoint every_k=2" in done.stdout


@pytest.mark.slow
def test_micro_batches_with_batchnorm_are_invalid_and_the_sweep_goes_on(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    done = train(
        project, "-m", "strategy=micro_batch,checkpoint", "workload=convnet_digits", "measure=quick",
        f"hydra.sweep.dir={folder}",
    )  # fmt: skip
    report = _json(folder / "report.json")
    by_name = {c["strategy"]: c for c in report["candidates"]}
    assert by_name["micro_batch"]["outcome"] == "invalid"
    assert "not_equivalent" in by_name["micro_batch"]["reasons"]
    assert by_name["micro_batch"]["verdict"] == "reject"
    assert by_name["checkpoint"]["outcome"] == "ok"
    verification = _json(folder / "0_micro_batch" / "result.json")["verification"]
    assert (verification["cause"], verification["where"]) == ("batch_statistics", "stem.1")
    assert "stem.1" in done.stdout


@pytest.mark.slow
def test_an_emulated_device_that_is_too_small_for_the_baseline(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    common = ["device.capacity_mib=14", f"hydra.sweep.dir={folder}", *SMALL]
    train(project, "-m", "strategy=checkpoint", *common)
    report = _json(folder / "report.json")
    assert report["baseline"]["outcome"] == "oom_device"
    assert report["candidates"][0]["outcome"] == "ok"
    assert report["candidates"][0]["peak_mib"] <= 14
    assert "absolute floors" in report["against"]


@pytest.mark.slow
def test_nothing_fits_is_exit_code_3(project: Path, tmp_path: Path) -> None:
    done = train(
        project, "-m", "strategy=checkpoint", "device.capacity_mib=1", f"hydra.sweep.dir={tmp_path}", *SMALL, check=3
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert _json(tmp_path / "report.json")["verdict"] != "accept"


def test_a_killed_command_leaves_no_run_running_once_the_next_has_run(project: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    slow = ["measure.steps=500", f"hydra.sweep.dir={tmp_path / 'a'}", *SMALL[1:]]
    child = subprocess.Popen(
        [sys.executable, "train.py", "-m", "strategy=glob(*)", *slow],
        cwd=project, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(600):
            if len(runs(project, "attributes.status = 'RUNNING'")) >= 2:
                break
            time.sleep(0.1)
        else:
            raise AssertionError("the sweep never started a trial")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    train(project, f"hydra.run.dir={tmp_path / 'b'}", *SMALL)
    assert runs(project, "attributes.status = 'RUNNING'") == []


def test_an_interrupted_sweep_keeps_what_it_has(project: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    arguments = ["measure.repeats=60", f"hydra.sweep.dir={tmp_path}", *SMALL]
    child = subprocess.Popen(
        [sys.executable, "train.py", "-m", "strategy=glob(*)", *arguments],
        cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(600):
        if list(tmp_path.glob("1_*/result.json")) or child.poll() is not None:
            break
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130, output + errors
    assert "Traceback" not in errors
    assert _json(tmp_path / "report.json")["baseline"]["outcome"] == "ok"
    assert runs(project, "attributes.status = 'RUNNING'") == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_a_command_that_ends_amid_its_repeats_keeps_those_that_were_made(
    project: Path, tmp_path: Path, how: signal.Signals
) -> None:
    env = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    arguments = ["strategy=baseline,micro_batch", "measure.repeats=500", f"hydra.sweep.dir={tmp_path}", *SMALL]
    child = subprocess.Popen(
        [sys.executable, "train.py", "-m", *arguments],
        cwd=project, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    baseline = tmp_path / "0_baseline" / "result.json"
    try:
        for _ in range(900):
            if baseline.exists() and len((_json(baseline)["measurement"] or {"runs": []})["runs"]) > 3:
                break
            assert child.poll() is None
            time.sleep(0.1)
        child.send_signal(how)
        child.wait(timeout=60)
    finally:
        child.kill()  # whatever went wrong, it does not go on beside the other tests
        child.wait()
    if how is signal.SIGINT:
        assert child.returncode == 130
        assert runs(project, "attributes.status = 'RUNNING'") == []
    else:
        assert not (tmp_path / "report.json").exists()
        subprocess.run([sys.executable, "-m", "sweep.report", str(tmp_path)], cwd=project, env=env, check=True)
    report = _json(tmp_path / "report.json")
    assert (report["baseline"]["outcome"], report["candidates"][0]["outcome"]) == ("ok", "ok")
    for path in tmp_path.glob("*/result.json"):
        m = _json(path)["measurement"]
        assert len(m["runs"]) == m["repeats"] > 2
        assert len(m["step_times_ms"]) == m["repeats"] * m["steps"]


def test_a_trial_in_its_own_process(project: Path, tmp_path: Path) -> None:
    train(project, "strategy=checkpoint", "measure.isolate=always", f"hydra.run.dir={tmp_path}", *SMALL)
    assert _json(tmp_path / "result.json")["outcome"] == "ok"


@pytest.mark.slow
def test_a_users_own_model(project: Path, tmp_path: Path) -> None:
    """The README's example: a module, a loss and batches of one's own, with no file of the project changed."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),"
        " nn.Linear(4 * width, width)) for _ in range(4))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = x + layer(x)\n"
        "        return {'y': x}\n"
        "def loss(model, batch):\n"
        "    return (model(batch['inputs'])['y'] - batch['targets']).square().mean()\n"
        "class Data:\n"
        "    version = 'v1'\n"
        "    def describe(self):\n"
        "        return {'source': 'noise'}\n"
        "    def train_batch(self, step, size):\n"
        "        g = torch.Generator().manual_seed(step)\n"
        "        x = torch.randn(size, 64, generator=g)\n"
        "        return {'inputs': x, 'targets': -x}\n"
        "    eval_batch = train_batch\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    arguments = [
        "workload=custom", "workload.model._target_=mine.Model", "+workload.model.width=64",
        "workload.data._target_=mine.Data",
        "workload.loss._target_=mine.loss", "strategy=checkpoint,micro_batch", "measure=quick",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(project / "train.py"), "-m", *arguments, f"hydra.sweep.dir={tmp_path / 'out'}"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [c["outcome"] for c in _json(tmp_path / "out" / "report.json")["candidates"]] == ["ok", "ok"]
