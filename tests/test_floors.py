"""Who may import whom: a module imports only from its own floor or a lower one, and each big library has one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: The lowest floor first. A name with a dot at the end stands for a package, one with a star for files that begin so.
FLOORS: list[tuple[str, ...]] = [
    # F0: plain data and decisions
    (
        *("errors", "results", "findings", "schema*", "decide", "checks", "conclusion", "knobs", "next_step"),
        *("interrupts", "addresses"),
        *("reasons", "words", "certainty", "quality", "attribution*", "sensitivity*", "diagnosis*"),
    ),
    # F1: workload, step and memory with torch; recording and reporting without
    ("workload.", "step", "memory.", "outcomes", "environment", "clock", "tracking*", "report*", "progress", "search*"),
    ("conditions", "strategy."),  # F2
    ("predict*", "verify*", "measure*", "explain*", "what_if"),  # F3
    ("trial", "isolate"),  # F4
    ("candidates", "trial_names", "forecast", "probe", "plan", "diagnose*"),  # F5: what fits, what to try
    ("session*", "rounds", "tracing", "hooks", "cli", "callbacks"),  # F6: the command
]
WITHOUT_TORCH = (*FLOORS[0], "tracking*", "report*", "progress", "search*", "cli")
HOMES = {"mlflow": ("tracking*",), "optuna": ("search*",), "matplotlib": ("report*", "search*", "explain*")}


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted((ROOT / "sweep").rglob("*.py")):
        relative = path.relative_to(ROOT / "sweep").with_suffix("")
        name = ".".join(relative.parts)
        if name != "__init__":
            found.append((name.removesuffix(".__init__") + ("." if name.endswith(".__init__") else ""), path))
    return found


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    for pattern in patterns:
        if pattern.endswith("."):
            if name == pattern or name.startswith(pattern):
                return True
        elif pattern.endswith("*"):
            if name.startswith(pattern[:-1]) and "." not in name:
                return True
        elif name == pattern:
            return True
    return False


def floor_of(name: str) -> int:
    for floor, patterns in enumerate(FLOORS):
        if matches(name, patterns):
            return floor
    raise AssertionError(f"sweep/{name}: give it a floor in tests/test_floors.py")


def imports(path: Path) -> set[str]:
    """Every imported module, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "sweep" else {node.module}
            )
    return found


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_only_from_its_own_floor_or_lower(name: str, path: Path) -> None:
    own = floor_of(name)
    known = {n for n, _ in modules()}
    for imported in imports(path):
        if imported.startswith("sweep."):
            target = imported.removeprefix("sweep.")
            target = f"{target}." if f"{target}." in known else target
            if target == "__version__":
                continue
            assert floor_of(target) <= own, f"sweep/{name} imports {imported} from a higher floor"


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_each_library_has_its_home(name: str, path: Path) -> None:
    tops = {imported.split(".")[0] for imported in imports(path)}
    if matches(name, WITHOUT_TORCH):
        assert "torch" not in tops
    for library, homes in HOMES.items():
        assert library not in tops or matches(name, homes), f"sweep/{name} imports {library}"


def test_reporting_and_help_load_no_torch_and_no_mlflow() -> None:
    """What is imported in the end counts, not only what each file names."""
    code = (
        "import sys, sweep.report, sweep.decide, sweep.cli, sweep.tracking, sweep.callbacks\n"
        "bad = [m for m in ('torch', 'mlflow', 'optuna') if m in sys.modules]\n"
        "sys.exit(f'loaded: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
