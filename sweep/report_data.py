"""What a report holds: one row per trial, one section per comparison, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.decide import by_comparison, conclude
from sweep.results import Comparison, Decision, Evidence, Holder, Peak, Prediction, TrialResult, to_dict
from sweep.schema import BudgetConf, MinEvidence, plain
from sweep.words import known

SCHEMA_VERSION = 1


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
    samples_per_s: float | None
    tokens_per_s: float | None
    throughput_ratio: float | None  # to the baseline
    train_loss: float | None  # of the last step
    eval_loss: float | None  # held-out, after the last step
    eval_loss_ratio: float | None
    grad_rel_err: float | None  # largest relative error of a parameter's gradient against the baseline's
    verified: bool | None
    tolerance: float | None  # largest relative error allowed
    verified_how: str  # "" or what the check left out, such as "dropout off"
    phases_ms: dict[str, float]
    to_host_mib: float | None  # moved in one optimizer step
    from_host_mib: float | None
    peak: Peak | None  # what was alive at the measured peak
    verdict: str
    reasons: list[str]
    why: str
    next_action: str
    error: str
    command: str
    folder: str
    mlflow_run_id: str | None
    predicted: Predicted | None

    @classmethod
    def of(cls, result: TrialResult, decision: Decision) -> Row:
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
            samples_per_s=m.samples_per_s if m else None,
            tokens_per_s=m.tokens_per_s if m else None,
            throughput_ratio=decision.throughput_ratio,
            train_loss=known(m.train_loss[-1]) if m and m.train_loss else None,
            eval_loss=known(m.eval_loss) if m else None,
            eval_loss_ratio=decision.eval_loss_ratio,
            grad_rel_err=known(v.grad_rel_err) if v else None,
            verified=v.passed if v else None,
            tolerance=v.tolerance if v else None,
            verified_how=_verified_how(result),
            phases_ms=dict(m.phases_ms) if m else {},
            to_host_mib=m.to_host_mib if m else None,
            from_host_mib=m.from_host_mib if m else None,
            peak=m.peak if m else None,
            verdict=decision.verdict,
            reasons=list(decision.reasons),
            why=decision.why,
            next_action=decision.next_action,
            error=result.error,
            command=result.command,
            folder=result.folder,
            mlflow_run_id=result.mlflow_run_id,
            predicted=Predicted.of(p, measured_peak) if p is not None else None,
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


def _verified_how(result: TrialResult) -> str:
    v = result.verification
    if v is None:
        return ""
    left_out = [f"dropout {v.dropout}"] if v.dropout != "on" else []
    return ", ".join(left_out + ([v.scope] if v.scope != "full" else []))


@dataclass
class Section:
    """One comparison. `rows`, `results` and `comparison.decisions` run parallel, the baseline first."""

    comparison: Comparison
    rows: list[Row]
    results: list[TrialResult]

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
        return f"{self.comparison.workload} on {self.comparison.device}"

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
            "baseline": None if self.baseline is None else _row_data(self.baseline),
            "candidates": [_row_data(r) for r in self.candidates],
            "fixed_id": c.fixed_id,
            "data_version": first.data_version,
            "parameters": first.parameters,
            "environment": first.environment,
        }


def _row_data(row: Row) -> dict[str, Any]:
    return {**to_dict(row), "at_peak_mib": row.at_peak_mib}


@dataclass
class Report:
    """Everything that is shown at the end of a sweep, and where it lies."""

    sections: list[Section]
    folder: Path
    budget: BudgetConf
    capacity_mib: float | None
    command: str = ""  # repeats the sweep
    tracking: dict[str, Any] = field(default_factory=dict)  # the tracking group of the config
    plots: list[Path] = field(default_factory=list)

    @property
    def json_path(self) -> Path:
        return self.folder / "report.json"

    @property
    def markdown_path(self) -> Path:
        return self.folder / "report.md"

    @property
    def feasible(self) -> bool:
        """Whether some trial of some comparison is within the whole budget."""
        return any(s.comparison.feasible for s in self.sections)

    def data(self) -> dict[str, Any]:
        """report.json: the first comparison at the top, all of them under `comparisons` where there are several."""
        found: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **self.sections[0].data()}
        found["budget"] = plain(self.budget)
        found["capacity_mib"] = self.capacity_mib
        found["command"] = self.command
        found["plots"] = [p.name for p in self.plots]
        if len(self.sections) > 1:
            found["comparisons"] = [s.data() for s in self.sections]
        return to_dict(found)


def build(
    results: list[TrialResult], budget: BudgetConf, capacity_mib: float | None, folder: Path, command: str = ""
) -> Report:
    """Judge all trials and arrange them. Raises ValueError without any result."""
    if not results:
        raise ValueError("a report needs at least one trial")
    sections = []
    for trials in by_comparison(results):
        group = sorted(trials, key=lambda r: not r.is_baseline)  # stable: the others stay in order
        comparison = conclude(group, budget, capacity_mib)
        rows = [Row.of(r, d) for r, d in zip(group, comparison.decisions)]
        sections.append(Section(comparison, rows, group))
    tracking = results[0].config.get("tracking") or {}
    return Report(sections, folder, budget, capacity_mib, command, tracking)


def budget_of(data: dict[str, Any]) -> BudgetConf:
    """The budget from the plain form in which configs and reports store it. Keys of a newer version are ignored."""
    fields = {f.name for f in dataclasses.fields(BudgetConf)}
    values = {k: v for k, v in data.items() if k in fields}
    values["min_evidence"] = MinEvidence[values.get("min_evidence") or "auto"]
    return BudgetConf(**values)
