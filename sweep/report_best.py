"""Which trials of a search its report shows: the baselines and the best others."""

from __future__ import annotations

import json
from pathlib import Path

from sweep.results import Comparison, TrialResult

#: Reasons of a trial that ran but is outside of the budget.
LIMITS = frozenset(("over_memory", "below_throughput", "quality_lost", "not_equivalent"))

#: Written by the session into the sweep's folder.
STATE = ".session.json"


def page_in_mlflow(folder: Path) -> str:
    """Where MLflow shows the sweep: a whole address, or what follows the address of `mlflow ui`; "" if not known."""
    try:
        return str(json.loads((folder / STATE).read_text(encoding="utf-8")).get("page") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def best_of(results: list[TrialResult], comparison: Comparison, most: int) -> list[TrialResult]:
    """The baselines and the `most` best others: preferred, then within the limits, then fast, then small.

    results: those that `comparison` was made from. The order stays.
    """

    def order(i: int) -> tuple[bool, bool, bool, float, float]:
        m = results[i].measurement
        outside = bool(set(comparison.decisions[i].reasons) & LIMITS)
        speed = m.samples_per_s if m is not None else 0.0
        return i != comparison.preferred_index, m is None, outside, -speed, results[i].peak_mib or 0.0

    best = set(sorted((i for i, r in enumerate(results) if not r.is_baseline), key=order)[:most])
    return [r for i, r in enumerate(results) if r.is_baseline or i in best]


def shown_at_most(folder: Path, results: list[TrialResult]) -> int | None:
    """How many trials beside the baselines a report of this folder shows: a search's `search.report_best`, else all."""
    try:
        study = json.loads((folder / STATE).read_text(encoding="utf-8")).get("study")
    except (OSError, ValueError, AttributeError):
        study = None
    search = results[0].config.get("search") or {}
    return search.get("report_best") if study or search.get("name") else None
