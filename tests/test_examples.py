"""The scripts in examples/ run as they are, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAYS = {"own_loop.py": "Verdict: accept", "predict_a_card.py": "does not fit", "trainer.py": "[predicted]"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    assert not list(tmp_path.iterdir())
