"""What a command leaves in its folder for other processes of the same sweep, and for later commands of its study."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sweep.report_best import STATE
from sweep.results import write_json


@dataclass
class State:
    """What other processes of the same sweep have to know, and later commands that go on with the same study."""

    started_at: str
    parent_run_id: str | None
    command: str
    study: str = ""  # name of the search's study
    storage: str | None = None  # where the study is kept, as hydra.sweeper.storage says it
    page: str = ""  # where MLflow shows the sweep (see tracking.sweep_page)

    def write(self, folder: Path) -> None:
        write_json(self, folder / STATE)


def read_state(folder: Path) -> State | None:
    """What the folder's command left; None where there is none, or where it cannot be read."""
    try:
        return State(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def now() -> str:
    """ISO 8601, UTC, as the results write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
