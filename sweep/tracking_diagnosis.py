"""A diagnosis in MLflow: one run of kind `diagnosis`, its description the markdown. Nothing was run, and it says so."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweep.diagnosis import Diagnosis
from sweep.interrupts import whole
from sweep.results import Category
from sweep.tracking_runs import (
    best_effort,
    end,
    opened,
    process_tags,
    save_config,
    save_environment,
    write,
    write_files,
)
from sweep.tracking_store import Store, client, experiment_id
from sweep.tracking_values import MetricValue, cut_markdown, cut_tags, params_of
from sweep.words import known


@whole()
def record_diagnosis(
    store: Store, found: Diagnosis, config: dict[str, Any], markdown: str, files: Sequence[Path]
) -> str | None:
    """Record a diagnosis that was made: parameters are the whole config, files its artifacts. Returns the run's id.

    None where the store failed, which costs a warning; the diagnosis lies in its folder all the same.
    """
    run_id: str | None = None
    name = f"diagnosis of {found.workload} on {found.device}"
    with best_effort(name):
        tags = cut_tags({**process_tags(store), **tags_of(found), "mlflow.note.content": cut_markdown(markdown)})
        run_id = client(store.uri).create_run(experiment_id(store), tags=tags, run_name=name).info.run_id
        opened(store, run_id)
        write(store, run_id, metrics=metrics_of(found), params=params_of(config))
    if run_id is None:
        return None
    with best_effort(f"the artifacts of {name}"), tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder), config)
        save_environment(Path(folder), {})
        client(store.uri).log_artifacts(run_id, folder)
        write_files(store, run_id, files)
    end(store, run_id, "FAILED" if found.error else "FINISHED")
    return run_id


def tags_of(found: Diagnosis) -> dict[str, str]:
    tags = {
        "kind": "diagnosis",
        "mode": "diagnose",
        "workload": found.workload,
        "device": found.device,
        "evidence": found.evidence,
        "answer": found.answer,
        "feasible": str(found.feasible).lower(),
        "try_first": found.first.row if found.first is not None else "",
        "command": found.command,
        "error": found.error,
    }
    return {name: value for name, value in tags.items() if value}


def metrics_of(found: Diagnosis) -> list[MetricValue]:
    """Sizes in MiB and shares, all predicted, grouped under diagnosis/."""
    facts = found.facts
    if facts is None:
        return []
    peak = facts.baseline.peak
    activation = peak.at_peak_mib.get(Category.activation.value, 0.0) / peak.mib if peak is not None else None
    values: dict[str, float | None] = {
        "peak_mib": facts.baseline.allocated_mib,
        "reserved_mib": facts.baseline.reserved_mib,
        "room_mib": facts.room_mib,
        "activation_ratio": activation,
        "floor_mib": facts.floor.mib,
        "floor_room_mib": facts.floor.room_mib,
        "lowest_mib": facts.lowest.allocated_mib if facts.lowest is not None else None,
        "seconds": found.seconds,
    }
    values |= {f"floor/{category}_mib": size for category, size in facts.floor.by_category_mib.items()}
    for s in facts.extremes:
        if not s.why_not:
            group = s.direction.replace("+", "_and_")
            values |= {f"saved/{group}_mib": s.saved_mib, f"lowest/{group}_mib": s.allocated_mib}
    return [
        (f"diagnosis/{name}", value, 0)
        for name, value in values.items()
        if known(value) is not None and value is not None
    ]
