"""The commands, links and pictures that the README and docs/ show are real: commands compose, files exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from sweep.config.check import typed

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Words that a person puts in: what stands for them here.
PLACES = {"<date>": "2026-01-31", "<time>": "12-00-00", "<sweep>": "2026-01-31/12-00-00"}


def commands(program: str) -> list[tuple[str, str]]:
    """(page, command) of every line that begins with `program`, indented or in a fenced block."""
    found = []
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.strip().startswith(program) and (line.startswith("    ") or line == line.strip()):
                found.append((page.name, line.strip()))
    return found


def words_of(command: str) -> list[str]:
    for place, word in PLACES.items():
        command = command.replace(place, word)
    return shlex.split(command, comments=True)


@pytest.fixture
def hydra() -> Iterator[None]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


@pytest.mark.parametrize(
    ("page", "command"), [c for c in commands("python train.py") if "--help" not in c[1] and "--config-dir" not in c[1]]
)
@pytest.mark.usefixtures("hydra")
def test_every_training_command_composes(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"oc\.env:(\w+)", command):
        monkeypatch.setenv(name, "sqlite:///mlflow.db")
    words = [w for w in words_of(command)[2:] if w not in ("-m", "--multirun")]
    loader = GlobalHydra.instance().hydra.config_loader  # type: ignore[union-attr]
    overrides = [w for w in words if not w.startswith("...")]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(overrides)
    for job in BasicSweeper.split_arguments(parsed, None)[0]:
        typed(compose("config", list(job)))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_and_picture_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s#]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target} is not there"
