"""A command in mode=diagnose: one diagnosis per job, its files and its MLflow run; printed when all are made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sweep.diagnose import diagnose
from sweep.diagnose_markdown import markdown
from sweep.diagnose_settings import Progress
from sweep.diagnose_terminal import print_diagnosis
from sweep.diagnosis import Diagnosis
from sweep.results import from_dict, write_json
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
    for path in sorted(folder.glob(f"**/{JSON}"), key=lambda path: path.stat().st_mtime_ns):
        diagnosis = from_dict(Diagnosis, json.loads(path.read_text(encoding="utf-8")))
        # The artifacts of its run are a copy, and may lie below the same folder.
        if diagnosis.started_at >= since and Path(diagnosis.folder).resolve() == path.parent.resolve():
            found.append(diagnosis)
    return found


def print_all(found: list[Diagnosis], console: Console) -> bool:
    """Print them one after the other. Returns whether something fits in any of them."""
    for diagnosis in found:
        print_diagnosis(diagnosis, console)
    return any(d.feasible for d in found)
