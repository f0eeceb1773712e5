"""The program from a wheel, in a folder and an environment of its own; and the commands that it prints, typed again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import sweep.environment
from sweep.cli import flags_first
from sweep.environment import CHECKOUT, program

ROOT = Path(__file__).resolve().parent.parent
MODEL = '''
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

class Data:
    version = "v1"

    def describe(self):
        return {"source": "random"}

    def train_batch(self, step, size):
        g = torch.Generator().manual_seed(step)
        return {"inputs": torch.randn(size, 32, generator=g), "targets": torch.randint(10, (size,), generator=g)}

    def eval_batch(self, index, size):
        return self.train_batch(10**6 + index, size)
'''
WORKLOAD = """
name: mine
model: {_target_: mine.Model, width: 32}
data: {_target_: mine.Data}
global_batch_size: 256
"""
SCRIPT = """
import sys, torch, torch.nn.functional as F, mine, sweep
torch.manual_seed(0)
model, batch = mine.Model(), mine.Data().train_batch(0, 256)
mean = lambda part: F.cross_entropy(model(part["inputs"]), part["targets"])
mean(batch).backward()
expected = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
with sweep.apply(model, sys.argv[1]) as strategy:
    for part, weight in sweep.micro_batches(batch, strategy.micro_batch_size):
        (mean(part) * weight).backward()
    strategy.check()
assert all(torch.allclose(p.grad, e, atol=1e-6) for p, e in zip(model.parameters(), expected))
print(strategy.conf.name, strategy.blocks)
"""


@pytest.mark.slow
def test_a_wheel_in_a_fresh_folder_compares_predicts_searches_and_its_commands_can_be_typed(tmp_path: Path) -> None:
    source, environment = tmp_path / "source", {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    source.mkdir()  # a copy, since building leaves files behind
    for name in ("sweep", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    subprocess.run(wheel, check=True, capture_output=True, env=environment)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *tmp_path.glob("*.whl")]
    subprocess.run(install, check=True, capture_output=True, env=environment)
    # What the wheel needs is taken from here: torch alone would be gigabytes. The package itself comes from the wheel.
    folder = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (folder / "others.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")) + "\n")
    here = tmp_path / "mine"
    (here / "workload").mkdir(parents=True)
    (here / "mine.py").write_text(MODEL)
    (here / "workload" / "mine.yaml").write_text(WORKLOAD)
    environment["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"

    def run(command: str) -> str:
        options = {"cwd": here, "env": environment, "capture_output": True, "text": True, "check": False}
        done = subprocess.run(command, shell=True, **options)  # type: ignore[call-overload]
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    words = "workload=mine measure=quick measure.drift=false tracking.system_metrics=false"
    shown = run(f"memory-sweep -m strategy=micro_batch,checkpoint --config-dir . {words}")
    assert sorted(p.name for p in here.iterdir() if p.name != "__pycache__") == [
        "mine.py", "mlruns", "multirun", "workload",
    ]  # fmt: skip
    again = re.findall(r"again: (.+)", shown)
    assert len(again) == 3 and all("--config-dir ." in c or "sweep.report" in c for c in again)
    for command in again:
        run(command)
    assert run("memory-sweep --version").strip() and "strategy" in run("memory-sweep --help")
    assert "fits" in run(f"memory-sweep --config-dir . mode=predict strategy=checkpoint device=h100_80gb {words}")
    found = run(f"memory-sweep --config-dir . search=budget search.n_trials=3 budget.memory_mib=1.0 {words}")
    assert "Verdict: accept" in found
    preferred = re.search(r'sweep\.apply\(model, "(\S+)"\)', found)
    assert preferred is not None
    (here / "train.py").write_text(SCRIPT)
    assert run(f"python train.py {preferred.group(1)}")
    assert not list(folder.glob("**/mlruns"))


def test_flags_may_stand_anywhere() -> None:
    given = ["memory-sweep", "-m", "a=1,2", "--config-dir", ".", "b=3", "--config-name=own", "-cp", "conf", "c=4"]
    assert flags_first(given) == [
        "memory-sweep", "-m", "--config-dir", ".", "--config-name=own", "-cp", "conf", "a=1,2", "b=3", "c=4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "path", "expected"),
    [
        (["train.py", "strategy=offload"], "", ["python", "train.py"]),
        (["train.py", "strategy=offload"], "mine", ["python", "train.py"]),  # nothing is imported from there
        (["train.py", "-m", "--config-dir", "conf", "a=1"], "mine",
         ["PYTHONPATH=mine", "python", "train.py", "--config-dir", "conf"]),
        (["train.py", "--config-dir=conf"], "", ["python", "train.py", "--config-dir=conf"]),
        (["train.py", "workload=custom", "workload.model._target_=mine.Model"], "mine",
         ["PYTHONPATH=mine", "python", "train.py"]),
        (["/usr/bin/memory-sweep", "-cd", ".", "a=1"], "", ["memory-sweep", "-cd", "."]),
        (["other/train.py"], "", ["python", "other/train.py"]),
    ],
)  # fmt: skip
def test_a_printed_command_begins_as_the_one_that_was_typed(
    argv: list[str], path: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CHECKOUT == ROOT and sweep.environment.home() == ROOT
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), path])))
    assert program() == expected
