"""The README names every module, and every command that it shows exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = sorted(p.relative_to(ROOT) for p in (ROOT / "sweep").rglob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_the_tree_names_every_file_of_the_package(path: Path) -> None:
    tree = README[README.index("## The repository") :]
    assert re.search(rf"^\s+{re.escape(path.name)} ", tree, re.MULTILINE), f"README's tree lacks {path}"


@pytest.mark.parametrize("group", ["workload", "strategy", "device", "measure", "budget"])
def test_options_that_the_readme_names_exist(group: str) -> None:
    options = {p.stem for p in (ROOT / "conf" / group).glob("*.yaml")}
    named = set(re.findall(rf"(?<![\w.]){group}=(\w+)", README)) - {"mine", "glob"}
    assert named <= options
