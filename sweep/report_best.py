"""Which trials of a search its report shows: the baselines and the best others."""

from __future__ import annotations

import json
from pathlib import Path

from sweep.results import TrialResult

#: Reasons of a trial that ran but is outside of the budget.
LIMITS = frozenset(("over_memory", "below_throughput", "quality_lost", "not_equivalent"))

#: Written by the session into the sweep's folder.
STATE = ".session.json"


def best_of(results: list[TrialResult], most: int) -> list[TrialResult]:
    """The baselines and the `most` best others: accepted before the rest, then fast, then small, in order of start.

    Goes by each trial's `decision`.
    """

    def order(r: TrialResult) -> tuple[bool, bool, float, float]:
        m = r.measurement
        within = r.decision is not None and not set(r.decision.reasons) & LIMITS
        return m is None, not within, -m.samples_per_s if m is not None else 0.0, r.peak_mib or 0.0

    best = {id(r) for r in sorted((r for r in results if not r.is_baseline), key=order)[:most]}
    return [r for r in results if r.is_baseline or id(r) in best]


def shown_at_most(folder: Path, results: list[TrialResult]) -> int | None:
    """How many trials beside the baselines a report of this folder shows: a search's `search.report_best`, else all."""
    try:
        study = json.loads((folder / STATE).read_text(encoding="utf-8")).get("study")
    except (OSError, ValueError, AttributeError):
        study = None
    search = results[0].config.get("search") or {}
    return search.get("report_best") if study or search.get("name") else None
