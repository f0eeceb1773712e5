"""Each mistake on the command line: one line with key, value, what is wrong and what to do; exit code 2."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import train
from sweep.cli import guarded
from sweep.results import read_trials

ROOT = Path(__file__).resolve().parents[2]

SEARCH = ["search=budget", "hydra.sweeper.storage=null"]
BUDGET = ["hydra/sweeper=budget", "hydra.sweeper.storage=null"]
BLOCKLESS = ["workload=convnet_digits", "workload.model._target_=small_models.Blockless"]
#: Arguments, how the line begins, and a word that it must contain (what to do, or what would have been right).
CASES: list[tuple[list[str], str, str]] = [
    (["strategy=nope"], "strategy=nope", "checkpoint_selective"),
    (["workload=nope"], "workload=nope", "gpt_tiny"),
    (["-m", "strategy=nope"], "strategy=nope", "checkpoint_selective"),
    (["strategy.micro_batchsize=4"], "strategy.micro_batchsize=4", "strategy.micro_batch_size"),
    (["nonsense=1"], "nonsense=1", "no such key"),
    (["+strategy.extra=1"], "strategy.extra=1", "no such key"),
    (["++extra=1"], "extra=1", "no such key"),
    (["strategy.micro_batch_size=four"], "strategy.micro_batch_size=four", "Integer"),
    (["strategy.checkpoint.granularity=blokcs"], "strategy.checkpoint.granularity=blokcs", "blocks"),
    (["workload.dtype=fp8"], "workload.dtype=fp8", "amp_bf16"),
    (["mode=guess"], "mode=guess", "predict"),
    (["mode=diagnose", "strategy=checkpoint"], "strategy=checkpoint", "looks at the baseline"),
    (["-m", "mode=diagnose", "strategy=glob(*)"], "strategy=checkpoint", "looks at the baseline"),
    (["mode=diagnose", "strategy.micro_batch_size=4"], "strategy=baseline, changed", "leave it out"),
    (["mode=diagnose", "explain=true"], "explain=True", "nothing that could be traced"),
    (["mode=diagnose", "search=budget"], "search=budget", "leave one of the two out"),
    (["mode=diagnose", "hydra/sweeper=budget", "strategy.micro_batch_size=choice(1,2)"], "mode=diagnose", "measures"),
    (["strategy=glob(*"], "command line=strategy=glob(*", "quote"),
    (["strategy.micro_batch_size=0"], "strategy.micro_batch_size=0", "1 or more"),
    (["strategy.micro_batch_size=17"], "strategy.micro_batch_size=17", "global batch of 16"),
    (["-m", "strategy=micro_batch", "strategy.micro_batch_size=4,17"], "strategy.micro_batch_size=17", "1 to 16"),
    (["strategy=checkpoint", "strategy.checkpoint.every_k=9"], "strategy.checkpoint.every_k=9", "only 8 blocks"),
    (
        ["strategy=checkpoint", "strategy.checkpoint.granularity=segments", "strategy.checkpoint.segment_size=9"],
        "strategy.checkpoint.segment_size=9",
        "only 8 blocks",
    ),
    (
        ["strategy.checkpoint.granularity=parts", "strategy.checkpoint.parts=[nothing]"],
        "strategy.checkpoint.parts=nothing",
        "attn",
    ),
    (["workload.blocks='layers.*'"], "workload.blocks=layers.*", "blocks.*"),
    (["strategy=offload", "strategy.offload.keep_last=8"], "strategy.offload.keep_last=8", "0 to 7"),
    (
        ["strategy=offload", "strategy.offload.placement=blocks", "strategy.offload.blocks='7'"],
        "strategy.offload.blocks=7",
        "nothing to offload",
    ),
    (
        ["strategy=offload", "strategy.offload.placement=blocks", "strategy.offload.blocks='0,8'"],
        "strategy.offload.blocks=0,8",
        "blocks 0 to 7",
    ),
    (["workload=text", "workload.data.path=/no/such/text"], "workload.data.path=/no/such/text", "does not exist"),
    (["device=h100_80gb"], "device=h100_80gb", "mode=predict"),
    (["device.type=cuda"], "device.type=cuda", "no CUDA device"),
    (["budget.memory_mib=-1"], "budget.memory_mib=-1", "positive"),
    (["workload.model._target_=no.such.Model"], "workload.model._target_=no.such.Model", "import path"),
    (["workload.model.heads=3"], "workload.model", "heads"),
    (["workload=hf_causal_lm"], "workload.model.config=null", "model_type"),
    (["workload.model={width: 64}"], "workload.model={width: 64}", "+workload.model"),
    (["-m", "strategy=glob(zzz*)"], "strategy=glob(zzz*)", "checkpoint_selective"),
    (["-m", "strategy=baseline,glob(zzz*)"], "strategy=baseline,glob(zzz*)", "checkpoint_selective"),
    (["-m", "strategy=micro_batch,glob(b*)"], "strategy=micro_batch,glob(b*)", "give it alone"),
    (["-m", "strategy=baseline", "workload.seed=range(3,3)"], "workload.seed=range(3,3)", "leaves its stop out"),
    (["-m", "workload.seed=range(5,2),range(1,3)"], "workload.seed=range(5,2),range(1,3)", "beyond the start"),
    (["-m", "+hydra.sweeper.params={strategy: '1,2'}"], "hydra.sweeper.params={strategy: '1,2'}", "see --help"),
    ([*BUDGET, "strategy=glob(zzz*)"], "strategy=glob(zzz*)", "checkpoint_selective"),
    ([*BUDGET, "strategy=micro_batch", "workload.seed=range(3,3)"], "workload.seed=range(3,3)", "leaves its stop out"),
    ([*BUDGET, "strategy.micro_batch_size=choice(32,64)"], "strategy.micro_batch_size=32", "1 to 16"),
    ([*SEARCH, "hydra.sweeper.constraints=[nosuch]"], "hydra.sweeper.constraints=nosuch", "memory or eval_loss"),
    ([*SEARCH, "hydra.sweeper.objectives=[nosuch]"], "hydra.sweeper.objectives=nosuch", "samples_per_s"),
    ([*SEARCH, "search.space.first_blocks=[99]"], "search.space.first_blocks=99", "1 to 7"),
    ([*SEARCH, "search.space.parts=[nosuch]"], "search.space.parts=nosuch", "attn"),
    ([*BLOCKLESS, "strategy=checkpoint"], "strategy.checkpoint.granularity=blocks", "workload.blocks"),
    (["-m", *BLOCKLESS, "strategy=checkpoint,hybrid"], "strategy.checkpoint.granularity=blocks", "workload.blocks"),
    ([*SEARCH, *BLOCKLESS, "search.space.first_blocks=[1]"], "search.space.first_blocks=[1]", "no repeated blocks"),
    (["strategy=null"], "strategy=null", "choose one"),
    (["measure.timeout_s=inf"], "measure.timeout_s=inf", "positive"),
    (["workload.seed=1180591620717411303424"], "workload.seed=1180591620717411303424", "smaller"),
    (["mode=predict", "device=h100_80gb", "device.compute_capability=x"], "device.compute_capability=x", "8.9"),
    (["mode=predict", "device=l4", "device.cublas_workspace_mib=-1"], "device.cublas_workspace_mib=-1", "give 0"),
    (["mode=predict", "device=h100_80gb", "device.peak_tflops.bf16=-1"], "device.peak_tflops.bf16=-1", "positive"),
    (["-m", "strategy.name=x/../../escaped"], "strategy.name='x/../../escaped'", "path separators"),
    (["strategy.name='a\\b'"], "strategy.name=", "path separators"),
    (["workload.name=.."], "workload.name='..'", "path separators"),
    (["tracking.uri=ftp://example.invalid"], "tracking.uri=ftp://example.invalid", "sqlite"),
]


def run(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> list[str]:
    """The error lines of one command in this process; it must exit with 2."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    where = [f"hydra.run.dir={folder}/run", f"hydra.sweep.dir={folder}/sweep"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, *where])
    capfd.readouterr()
    assert guarded(train.main) == 2
    return [line for line in capfd.readouterr().err.splitlines() if line.strip()]


@pytest.mark.parametrize(("arguments", "begins", "contains"), CASES, ids=[" ".join(c[0]) for c in CASES])
def test_one_line_and_exit_code_2(
    arguments: list[str], begins: str, contains: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    if "cuda" in arguments[0]:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lines = run(arguments, tmp_path, monkeypatch, capfd)
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"error: {begins}"), lines[0]
    assert contains in lines[0]
    assert "; " in lines[0], "says what to do"
    assert not list(tmp_path.rglob("result.json")), "nothing ran"


# What is wrong with one trial is no fault of the others


def outcomes(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0
) -> dict[str, tuple[str, str]]:
    """Outcome and error by strategy, of one command in this process."""
    monkeypatch.setattr("sweep.report.plots.draw", lambda report: [])
    where = [f"hydra.sweep.dir={folder}/sweep", "tracking.enabled=false"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, *where])
    assert guarded(train.main) == code
    found = [trial for _, trial in read_trials(folder)]
    return {trial.name: (trial.outcome, trial.error) for trial in found}


TINY = ["workload.model.layers=3", "workload.model.d_model=32", "workload.seq_len=16", "workload.data.max_mib=1",
        "measure=quick", "measure.steps=1", "measure.repeats=1"]  # fmt: skip


def test_a_strategy_that_does_not_fit_the_model_is_an_invalid_trial_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(["-m", *BLOCKLESS, "strategy=glob(*)", "mode=predict"], tmp_path, monkeypatch)
    assert {name for name, (outcome, _) in found.items() if outcome == "ok"} == {"baseline", "micro_batch"}
    for name, (outcome, error) in found.items():
        if outcome != "ok":
            assert outcome == "invalid", name
            assert error.startswith("strategy."), error
            assert "workload.blocks" in error
    report = json.loads((tmp_path / "sweep" / "report.json").read_text())
    assert {c["reasons"][0] for c in report["candidates"] if c["outcome"] == "invalid"} == {"bad_setting"}


def test_a_search_answers_a_strategy_that_does_not_fit_the_model_as_infeasible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*BUDGET, *BLOCKLESS, "strategy=checkpoint,micro_batch", "measure=quick", "measure.steps=1"]
    found = outcomes(words, tmp_path, monkeypatch)
    assert found["micro_batch"][0] == "ok"
    written = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    (misfit,) = [t for t in written["trials"] if t["params"]["strategy"] == "checkpoint"]
    assert (misfit["outcome"], misfit["constraints"]["valid"]) == ("invalid", 1.0)
    assert "no repeated blocks" in misfit["reason"]


@pytest.mark.parametrize(("words", "values"), [
    (["strategy=checkpoint", "strategy.checkpoint.granularity=parts", "strategy.checkpoint.parts=choice([attn],[mlp])"],
     ["[attn]", "[mlp]"]),
    (["strategy=offload", "strategy.offload.placement=blocks", "strategy.offload.min_tensor_kib=1",
      "strategy.offload.blocks=choice('first:1','first:2')"], ["first:1", "first:2"]),
])  # fmt: skip
def test_a_search_over_values_that_need_each_other_checks_its_points(
    words: list[str], values: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes([*BUDGET, *words, *TINY], tmp_path, monkeypatch)
    assert {outcome for outcome, _ in found.values()} == {"ok"}
    written = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert sorted(next(iter(t["params"].values())) for t in written["trials"]) == values
    assert len(found) == 3


@pytest.mark.parametrize(("content", "wrong"), [(b"", "empty"), (b"abc", "too small"), (b"\x00\xff" * 4096, "text")])
def test_texts_that_cannot_be_used(
    content: bytes, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    lines = run(["workload=text", f"workload.data.path={path}"], tmp_path, monkeypatch, capfd)
    assert len(lines) == 1
    assert lines[0].startswith(f"error: workload.data.path={path}: ")


def test_a_corrupt_store_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    store = tmp_path / "mlflow.db"
    store.write_bytes(b"this is no database, and somebody may want it back" * 100)
    before = store.read_bytes()
    lines = run([f"tracking.uri=sqlite:///{store}"], tmp_path, monkeypatch, capfd)
    assert len(lines) == 1
    assert lines[0].startswith("error: tracking.uri=")
    assert store.read_bytes() == before


def test_somebody_elses_database_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    store = tmp_path / "mine.db"
    with sqlite3.connect(store) as connection:
        connection.execute("create table letters (text)")
    lines = run([f"tracking.uri=sqlite:///{store}"], tmp_path, monkeypatch, capfd)
    assert len(lines) == 1
    with sqlite3.connect(store) as connection:
        assert [r[0] for r in connection.execute("select name from sqlite_master")] == ["letters"]


def test_as_a_command_of_its_own_and_with_a_traceback_when_asked(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "strategy.micro_batch_size=0", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: strategy.micro_batch_size=0: is below 1; give 1 or more\n"
    env = {**os.environ, "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
