"""Who may import whom: a room imports rooms on lower floors only, and each big library has one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Rooms by floor, the lowest first: folders of sweep/, or the files that stand directly in it.
FLOORS = [
    ["errors", "interrupts", "results", "environment", "progress"],
    ["config", "format"],
    ["memory", "decide"],
    ["workload", "tracking", "report"],
    ["strategy"],
    ["trial"],
    ["diagnose", "repeats", "api"],
    ["session"],
    ["search"],
    ["cli"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_TORCH = {*FLOORS[0], "config", "format", "decide", "tracking", "report", "cli"}
HOMES = {"mlflow": "tracking", "optuna": "search", "matplotlib": "report"}


def modules() -> dict[str, Path]:
    """By dotted name below sweep: a room's own file `__init__` has the name of the room."""
    found = {}
    for path in sorted((ROOT / "sweep").rglob("*.py")):
        parts = path.relative_to(ROOT / "sweep").with_suffix("").parts
        if name := ".".join(part for part in parts if part != "__init__"):
            found[name] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Every imported module, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            inner = {f"{node.module}.{alias.name}".removeprefix("sweep.") for alias in node.names}
            found |= {f"sweep.{name}" for name in inner & set(MODULES)} or {node.module}
    return found


def own(path: Path) -> set[str]:
    return {name.removeprefix("sweep.") for name in imports(path) if name.startswith("sweep.")} & set(MODULES)


def room(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("name", MODULES)
def test_a_room_imports_rooms_on_lower_floors(name: str) -> None:
    for target in own(MODULES[name]):
        here, there = room(name), room(target)
        if here == there or FLOOR[here] == FLOOR[there] == 0:
            continue
        assert FLOOR[there] < FLOOR[here], f"sweep.{name} imports sweep.{target}, which is not on a lower floor"


def test_no_circle_of_imports() -> None:
    graph = {name: own(path) - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("name", MODULES)
def test_each_library_has_its_home(name: str) -> None:
    tops = {imported.split(".")[0] for imported in imports(MODULES[name])}
    if room(name) in WITHOUT_TORCH:
        assert "torch" not in tops
    for library, home in HOMES.items():
        assert library not in tops or room(name) == home


def test_the_house_stays_small() -> None:
    for folder in [ROOT / "sweep", *(p for p in (ROOT / "sweep").iterdir() if p.is_dir())]:
        assert len(list(folder.glob("*.py"))) <= 14, folder


def test_reporting_and_help_load_no_torch_and_no_mlflow() -> None:
    """What is imported in the end counts, not only what each file names."""
    code = (
        "import sys, sweep.report, sweep.decide, sweep.cli, sweep.tracking\n"
        "bad = [m for m in ('torch', 'mlflow', 'optuna') if m in sys.modules]\n"
        "sys.exit(f'loaded: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
