"""What a report holds: one row per trial, one section per comparison, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.config.schema import BudgetConf, plain
from sweep.decide.budgets import Sensitivity, survival_of
from sweep.decide.causes import explain_comparison, explain_pair
from sweep.decide.statistics import curves
from sweep.decide.verdict import conclude, grouped
from sweep.format import count, known, mib, percent
from sweep.results import (
    Comparison,
    Decision,
    Difference,
    Evidence,
    Explanation,
    Holder,
    Measurement,
    Peak,
    Prediction,
    Quality,
    Trace,
    TrialResult,
    Verification,
    WhatIf,
    to_dict,
)


def best_note(shown: int, of: int) -> str:
    """That not all trials of a search are in its tables; "" where they are."""
    if shown >= of:
        return ""
    return f"Shown: the best {shown} of {of} trials. How the choice changes under other budgets is told of all of them."


def shown_path(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


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


#: Held outputs are told from this share of the peak on.
WORTH_A_LINE = 0.01


@dataclass
class Predicted:
    """The part of a prediction that a report shows. Nothing was run; times are theoretical."""

    device: str
    allocated_mib: float
    reserved_mib: float
    fits: bool
    headroom_mib: float | None  # negative: short by so much
    peak_phase: str
    peak_operator: str
    at_peak_mib: dict[str, float]  # by category
    largest: list[Holder]
    to_host_mib: float
    from_host_mib: float
    transfer_one_way_ms: float | None
    transfer_round_trip_ms: float | None
    recompute_flops_ratio: float
    error_ratio: float | None  # predicted over measured allocated peak, less one; None: nothing was measured
    evidence: str = Evidence.predicted.value
    what_if: list[WhatIf] = field(default_factory=list)  # changes of the workload, which are no candidates
    caveats: list[str] = field(default_factory=list)  # what is not counted, not known or to be known
    unsure: bool = False  # some of them leave open how much it takes

    @classmethod
    def of(cls, p: Prediction, measured_mib: float | None) -> Predicted:
        error = known(p.error_ratio)
        if error is None and measured_mib:
            error = p.allocated_mib / measured_mib - 1
        return cls(
            device=p.device,
            allocated_mib=p.allocated_mib,
            reserved_mib=p.reserved_mib,
            fits=p.fits,
            headroom_mib=p.headroom_mib,
            peak_phase=p.peak_phase or (p.peak.phase if p.peak else ""),
            peak_operator=p.peak_operator or (p.peak.operator if p.peak else ""),
            at_peak_mib=p.at_peak_mib or (p.peak.at_peak_mib if p.peak else {}),
            largest=p.peak.largest if p.peak else [],
            to_host_mib=p.to_host_mib,
            from_host_mib=p.from_host_mib,
            transfer_one_way_ms=p.transfer_one_way_ms,
            transfer_round_trip_ms=p.transfer_round_trip_ms,
            recompute_flops_ratio=p.recompute_flops_ratio,
            error_ratio=error,
            what_if=list(p.what_if),
            caveats=list(p.caveats),
            unsure=bool(p.unsure),
        )


@dataclass
class Row:
    """One trial as every table shows it. Measured numbers carry `evidence`; None means not known."""

    name: str
    strategy: str
    outcome: str
    evidence: str
    is_baseline: bool
    peak_mib: float | None  # the peak that decides
    reserved_mib: float | None
    saved_mib: float | None  # against the baseline
    step_ms: float | None  # median over all timed steps
    step_ms_low: float | None  # 25th percentile
    step_ms_high: float | None  # 75th percentile
    step_ms_ci_low: float | None  # bootstrap interval of the median
    step_ms_ci_high: float | None
    step: Difference | None  # step time over the baseline's
    samples_per_s: float | None
    tokens_per_s: float | None
    throughput_ratio: float | None  # to the baseline
    train_loss: float | None  # of the last step
    eval_loss: float | None  # held-out, after the last step, of the first seed
    eval_loss_mean: float | None  # the same over all seeds
    eval_loss_ratio: float | None
    quality: Quality | None  # held-out loss against the baseline's, over the seeds
    grad_rel_err: float | None  # largest relative error of a parameter's gradient against the baseline's
    verified: bool | None
    tolerance: float | None  # largest relative error allowed
    verified_how: str  # how the check was made, and what it left out; "" where that is not known
    verified_steps: int | None
    verified_share: float | None  # of the parameters, in which gradients were evidence
    verified_status: str
    phases_ms: dict[str, float]
    to_host_mib: float | None  # moved in one optimizer step
    from_host_mib: float | None
    host_peak_mib: float | None  # highest sum of host copies, by the ledger
    peak: Peak | None  # what was alive at the measured peak
    disturbed: list[str]  # why its times may not be its own
    explanation: Explanation | None  # why peak and step time differ from the baseline's
    trace: Trace | None
    verdict: str
    reasons: list[str]
    why: str
    next_action: str
    error: str
    command: str
    folder: str
    mlflow_run_id: str | None
    predicted: Predicted | None
    prediction_error: str  # why a trial that was measured has no prediction
    premises: list[tuple[str, str]]  # what one has to know of its peak, and the number in it, if there is one

    @classmethod
    def of(cls, result: TrialResult, decision: Decision, explanation: Explanation | None = None) -> Row:
        m, v, p = result.measurement, result.verification, result.prediction
        measured_peak = known(m.peak_allocated_mib) if m is not None else None
        return cls(
            name=result.name,
            strategy=result.strategy,
            outcome=result.outcome,
            evidence=result.evidence,
            is_baseline=result.is_baseline,
            peak_mib=decision.peak_mib,
            reserved_mib=known(m.peak_reserved_mib) if m else None,
            saved_mib=decision.saved_mib,
            step_ms=m.step_ms if m else None,
            step_ms_low=m.step_ms_low if m else None,
            step_ms_high=m.step_ms_high if m else None,
            step_ms_ci_low=known(m.step_ms_ci_low) if m else None,
            step_ms_ci_high=known(m.step_ms_ci_high) if m else None,
            step=decision.step,
            samples_per_s=m.samples_per_s if m else None,
            tokens_per_s=m.tokens_per_s if m else None,
            throughput_ratio=decision.throughput_ratio,
            train_loss=known(m.train_loss[-1]) if m and m.train_loss else None,
            eval_loss=known(m.eval_loss) if m else None,
            eval_loss_mean=curves(m).held_out_mean if m else None,
            eval_loss_ratio=decision.eval_loss_ratio,
            quality=decision.quality,
            grad_rel_err=known(v.grad_rel_err) if v else None,
            verified=v.passed if v else None,
            tolerance=v.tolerance if v else None,
            verified_how=_verified_how(v),
            verified_steps=v.steps if v else None,
            verified_share=v.compared_share if v else None,
            verified_status=v.status if v else "",
            phases_ms=dict(m.phases_ms) if m else {},
            to_host_mib=m.to_host_mib if m else None,
            from_host_mib=m.from_host_mib if m else None,
            host_peak_mib=m.peak.host_peak_mib if m and m.peak else None,
            peak=m.peak if m else None,
            disturbed=list(decision.disturbed),
            explanation=explanation,
            trace=result.trace,
            verdict=decision.verdict,
            reasons=list(decision.reasons),
            why=decision.why,
            next_action=decision.next_action,
            error=result.error,
            command=result.command,
            folder=result.folder,
            mlflow_run_id=result.mlflow_run_id,
            predicted=Predicted.of(p, measured_peak) if p is not None else None,
            prediction_error=result.prediction_error,
            premises=_premises(m if m is not None else p, decision.peak_mib),
        )

    @property
    def at_peak_mib(self) -> dict[str, float]:
        """What is alive at the peak by category: as run, else as predicted."""
        if self.peak is not None and self.peak.at_peak_mib:
            return self.peak.at_peak_mib
        return self.predicted.at_peak_mib if self.predicted is not None else {}

    @property
    def step_half_spread_ms(self) -> float | None:
        """Half the distance between the quartiles of the step times."""
        if self.step_ms_low is None or self.step_ms_high is None:
            return None
        return (self.step_ms_high - self.step_ms_low) / 2

    @property
    def saved_ratio(self) -> float | None:
        """The saving as a share of the baseline's peak."""
        if self.saved_mib is None or self.peak_mib is None or self.saved_mib + self.peak_mib <= 0:
            return None
        return self.saved_mib / (self.saved_mib + self.peak_mib)


def _verified_how(v: Verification | None) -> str:
    """`gradients in 100 % of the parameters over 2 steps, random draws fixed`"""
    if v is None:
        return ""
    said = []
    if v.compared_share is not None:
        said.append(f"gradients in {percent(v.compared_share)} of the parameters over {count(v.steps, 'step')}")
    said += ["quickly"] if v.mode == "quick" else []
    said += ["random draws fixed"] if v.dropout != "on" else []
    return ", ".join(said + ([v.scope] if v.scope != "full" else []))


def _premises(source: Measurement | Prediction | None, peak_mib: float | None) -> list[tuple[str, str]]:
    """What one has to know of a peak, and the number in it; what is equal for several trials is said once."""
    if source is None:
        return []
    found = [(caveat, "") for caveat in source.caveats]
    held = source.held_outputs_mib if isinstance(source, Prediction) else 0.0
    if held >= WORTH_A_LINE * (peak_mib or 0.0) and held > 0:
        what = "outputs at the peak that the loop holds until the step ends (workload.hold_outputs=false lets them go)"
        found.append((what, mib(held)))
    return found


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

    budget, capacity_mib, changes: as for `sweep.decide.verdict.grouped`. most: trials shown beside the baselines (see
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
