"""The README's tree names every room, and the options that it shows exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = sorted(p.name for p in (ROOT / "sweep").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists())


@pytest.mark.parametrize("room", [r for r in ROOMS if r != "__init__.py"])
def test_the_tree_names_every_room(room: str) -> None:
    tree = README[README.index("## The repository") :]
    assert re.search(rf"^\s+{re.escape(room)}/? ", tree, re.MULTILINE), f"README's tree lacks {room}"


@pytest.mark.parametrize("group", ["workload", "strategy", "device", "measure", "budget"])
def test_options_that_the_readme_names_exist(group: str) -> None:
    options = {p.stem for p in (ROOT / "conf" / group).glob("*.yaml")}
    named = set(re.findall(rf"(?<![\w.]){group}=(\w+)", README)) - {"mine", "glob"}
    assert named <= options
