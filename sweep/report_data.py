"""What a report holds: one row per trial, one section per comparison, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.attribution import explain_comparison, explain_pair
from sweep.decide import conclude, grouped
from sweep.findings import Explanation
from sweep.report_best import best_of
from sweep.report_notes import best_note
from sweep.report_rows import Row
from sweep.results import Comparison, TrialResult, to_dict
from sweep.schema import BudgetConf, plain
from sweep.sensitivity import survival_of
from sweep.sensitivity_ranges import Sensitivity

SCHEMA_VERSION = 1


@dataclass
class Section:
    """One comparison. `rows`, `results` and `comparison.decisions` run parallel, the baseline first."""

    comparison: Comparison
    rows: list[Row]
    results: list[TrialResult]
    budget: BudgetConf
    under: str = ""  # what its budget has that others of the same trials have not
    why: list[str] = field(default_factory=list)  # what the trials have in common and where they differ, in sentences
    survival: list[str] = field(default_factory=list)  # whether the choice would survive other budgets
    sensitivity: Sensitivity | None = None  # of all trials, those that are not shown included
    notes: list[str] = field(default_factory=list)  # what is left out, and what is not as it seems; whole sentences

    @property
    def baseline(self) -> Row | None:
        index = self.comparison.baseline_index
        return None if index is None else self.rows[index]

    @property
    def preferred(self) -> Row | None:
        index = self.comparison.preferred_index
        return None if index is None else self.rows[index]

    @property
    def candidates(self) -> list[Row]:
        return [r for r in self.rows if r is not self.baseline]

    @property
    def predicts(self) -> bool:
        return self.comparison.mode == "predict"

    @property
    def title(self) -> str:
        return f"{self.comparison.workload} on {self.comparison.device}" + (f", {self.under}" if self.under else "")

    def data(self) -> dict[str, Any]:
        """The section with the keys of report.json."""
        c, first = self.comparison, self.results[0]
        return {
            "workload": c.workload,
            "device": c.device,
            "mode": c.mode,
            "evidence": c.evidence,
            "verdict": c.verdict,
            "preferred": c.preferred,
            "why": c.why,
            "next_action": c.next_action,
            "against": c.against,
            "cheapest_saving": c.cheapest_saving,
            "feasible": c.feasible,
            "cap_mib": c.cap_mib,
            "cap_source": c.cap_source,
            "budget": plain(self.budget),
            "capacity_mib": None if self.sensitivity is None else self.sensitivity.capacity_mib,
            "baseline": None if self.baseline is None else _row_data(self.baseline),
            "candidates": [_row_data(r) for r in self.candidates],
            "explanation": list(self.why),
            "survival": list(self.survival),
            "notes": list(self.notes),
            "drift": to_dict(c.drift),
            "fixed_id": c.fixed_id,
            "data_version": first.data_version,
            "parameters": first.parameters,
            "block_patterns": first.block_patterns,
            "block_share": first.block_share,
            "environment": first.environment,
        }


def _row_data(row: Row) -> dict[str, Any]:
    return {**to_dict(row), "at_peak_mib": row.at_peak_mib}


@dataclass
class Report:
    """Everything that is shown at the end of a sweep, and where it lies."""

    sections: list[Section]
    folder: Path
    command: str = ""  # repeats the sweep
    tracking: dict[str, Any] = field(default_factory=dict)  # the tracking group of the config
    plots: list[Path] = field(default_factory=list)
    options: str = ""  # of `python -m sweep.report`, where another budget than the sweep's is judged by

    @property
    def json_path(self) -> Path:
        return self.folder / "report.json"

    @property
    def markdown_path(self) -> Path:
        return self.folder / "report.md"

    @property
    def html_path(self) -> Path:
        return self.folder / "report.html"

    @property
    def files(self) -> list[Path]:
        """What a report leaves, most readable first."""
        return [self.html_path, self.markdown_path, self.json_path, *self.plots]

    @property
    def feasible(self) -> bool:
        """Whether some trial of some comparison is within the whole budget."""
        return any(s.comparison.feasible for s in self.sections)

    def data(self) -> dict[str, Any]:
        """report.json: the first comparison at the top, all of them under `comparisons` where there are several."""
        found: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **self.sections[0].data()}
        found["command"] = self.command
        found["plots"] = [p.name for p in self.plots]
        if len(self.sections) > 1:
            found["comparisons"] = [s.data() for s in self.sections]
        return to_dict(found)


def build(
    results: list[TrialResult],
    budget: BudgetConf | None,
    capacity_mib: float | None,
    folder: Path,
    command: str = "",
    *,
    most: int | None = None,
    changes: Mapping[str, float | None] | None = None,
) -> Report:
    """Judge all trials and arrange them. Raises ValueError without any result.

    budget, capacity_mib, changes: as for `sweep.decide.grouped`. most: trials shown beside the baselines (see
    `best_of`); None: all.
    """
    if not results:
        raise ValueError("a report needs at least one trial")
    sections = []
    for judged in grouped(results, budget, capacity_mib, changes):
        whole, comparison = judged.results, judged.conclude()
        group = whole
        if most is not None and len(group := best_of(whole, comparison, most)) < len(whole):
            comparison = conclude(group, judged.budget, judged.capacity_mib)
        why = _explanations(group, comparison)
        rows = [Row.of(r, d, e) for r, d, e in zip(group, comparison.decisions, why)]
        section = Section(comparison, rows, group, judged.budget, judged.under)
        section.why = explain_comparison(group, comparison.preferred_index)
        section.sensitivity = Sensitivity(whole, judged.budget, judged.capacity_mib)
        section.survival = survival_of(section.sensitivity)
        section.notes = [note for note in (best_note(len(group), len(whole)),) if note]
        sections.append(section)
    tracking = results[0].config.get("tracking") or {}
    return Report(sections, folder, command, tracking)


def _explanations(results: list[TrialResult], comparison: Comparison) -> list[Explanation | None]:
    """Why each trial differs from the baseline; None for the baseline, and for what has no peak and no time."""
    index = comparison.baseline_index
    if index is None:
        return [None] * len(results)
    found = [None if r.is_baseline else explain_pair(results[index], r) for r in results]
    return [e if e is not None and (e.peak is not None or e.time is not None) else None for e in found]
