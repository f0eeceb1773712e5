"""A command in mode=diagnose: one diagnosis per job, its files and its MLflow run; printed when all are made."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from sweep.diagnose import diagnose
from sweep.diagnose_markdown import markdown
from sweep.diagnose_settings import Progress
from sweep.diagnose_terminal import print_diagnosis
from sweep.diagnosis import Diagnosis
from sweep.results import read_all, read_as, write_json
from sweep.schema import Config, plain
from sweep.tracking_diagnosis import record_diagnosis
from sweep.tracking_store import Store

JSON, MARKDOWN = "diagnosis.json", "diagnosis.md"


def run_diagnosis(
    config: Config, folder: Path, words: Sequence[str], store: Store | None, progress: Progress
) -> Diagnosis:
    """Diagnose a job's workload, write both files into its folder, and record it. Raises BadInput."""
    found = diagnose(config, words, progress=progress)
    found.command = shlex.join(["python", "train.py", *words])
    found.folder = str(folder)
    text = markdown(found)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(found, folder / JSON)
    (folder / MARKDOWN).write_text(text, encoding="utf-8")
    if store is not None:
        found.mlflow_run_id = record_diagnosis(store, found, plain(config), text, [folder / JSON, folder / MARKDOWN])
        write_json(found, folder / JSON)
    return found


def diagnoses_in(folder: Path, since: str) -> list[Diagnosis]:
    """Those that were made below a folder since a time (ISO 8601), in the order of their jobs."""
    found = []
    stored = read_all(partial(read_as, Diagnosis), folder, JSON)
    for path, diagnosis in sorted(stored, key=lambda each: each[0].stat().st_mtime_ns):
        # The artifacts of its run are a copy, and may lie below the same folder.
        if diagnosis.started_at >= since and Path(diagnosis.folder).resolve() == path.parent.resolve():
            found.append(diagnosis)
    return found


def print_all(found: list[Diagnosis], console: Console) -> bool:
    """Print them one after the other. Returns whether something fits in any of them."""
    for diagnosis in found:
        print_diagnosis(diagnosis, console)
    return any(d.feasible for d in found)
