"""Each mistake on the command line: one line with key, value, what is wrong and what to do; exit code 2."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import train
from sweep.cli import guarded

ROOT = Path(__file__).resolve().parent.parent

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
