"""What a report is made of: the trials, what was decided of each and why they differ; and what report.json holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweep.config.schema import BudgetConf, plain
from sweep.decide.budgets import Sensitivity
from sweep.decide.causes import Causes, explain
from sweep.decide.statistics import curves
from sweep.decide.verdict import Group, grouped
from sweep.format import count, known
from sweep.report import phrases
from sweep.results import (
    Comparison,
    Decision,
    Evidence,
    Explanation,
    Measurement,
    Peak,
    Prediction,
    TrialResult,
    Verdict,
    to_dict,
)

SCHEMA_VERSION = 1
#: Written by the session into the sweep's folder.
STATE = ".session.json"
#: Trials that are shown beside the baselines, where nobody asks for another number; report.json has all.
MOST_SHOWN = 50

#: The trials of one comparison, the baseline first, and what was concluded of them.
Judged = tuple[Group, Comparison]


def judge(
    results: list[TrialResult],
    budget: BudgetConf | None = None,
    capacity_mib: float | None = None,
    changes: Mapping[str, float | None] | None = None,
) -> list[Judged]:
    """Conclude each comparison; arguments as for `sweep.decide.verdict.grouped`."""
    return [(group, group.conclude()) for group in grouped(results, budget, capacity_mib, changes)]


def title_of(group: Group, c: Comparison) -> str:
    return f"{c.workload} on {c.device}" + (f", {group.under}" if group.under else "")


@dataclass
class Row:
    """A trial and what was decided of it. None: not known."""

    result: TrialResult
    decision: Decision
    explanation: Explanation | None = None  # why peak and step time differ from the baseline's

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def is_baseline(self) -> bool:
        return self.result.is_baseline

    @property
    def measured(self) -> Measurement | None:
        return self.result.measurement

    @property
    def predicted(self) -> Prediction | None:
        return self.result.prediction

    @property
    def peak(self) -> Peak | None:
        """What is alive at the peak: as run, else as predicted."""
        m, p = self.measured, self.predicted
        return m.peak if m is not None and m.peak is not None else p.peak if p is not None else None

    @property
    def peak_was_seen(self) -> bool:
        return self.measured is not None and self.measured.peak is not None

    @property
    def peak_mib(self) -> float | None:
        """The peak that decides."""
        return self.decision.peak_mib

    @property
    def step_ms(self) -> float | None:
        return self.measured.step_ms if self.measured is not None else None

    @property
    def interval_ms(self) -> tuple[float, float] | None:
        """Bootstrap interval of the median step time."""
        m = self.measured
        low, high = (known(m.step_ms_ci_low), known(m.step_ms_ci_high)) if m is not None else (None, None)
        return None if low is None or high is None else (low, high)

    @property
    def half_spread_ms(self) -> float | None:
        """Half the distance between the quartiles of the step times."""
        m = self.measured
        return None if m is None else (m.step_ms_high - m.step_ms_low) / 2

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss, mean over the seeds."""
        return curves(self.measured).held_out_mean if self.measured is not None else None

    @property
    def moved_mib(self) -> float | None:
        """To the host and back in one optimizer step."""
        return self.measured.to_host_mib + self.measured.from_host_mib if self.measured is not None else None

    @property
    def host_peak_mib(self) -> float | None:
        """Highest sum of host copies, by the ledger."""
        return self.measured.peak.host_peak_mib if self.measured is not None and self.measured.peak else None

    @property
    def saved_ratio(self) -> float | None:
        """The saving as a share of the baseline's peak."""
        d = self.decision
        if d.saved_mib is None or d.peak_mib is None or d.saved_mib + d.peak_mib <= 0:
            return None
        return d.saved_mib / (d.saved_mib + d.peak_mib)

    @property
    def error_ratio(self) -> float | None:
        """Predicted over measured peak, less one."""
        m, p = self.measured, self.predicted
        if p is None or m is None or not known(m.peak_allocated_mib):
            return None
        stored = known(p.error_ratio)
        return p.allocated_mib / m.peak_allocated_mib - 1 if stored is None else stored

    def data(self) -> dict[str, Any]:
        """One candidate with the keys of report.json."""
        r, m, v, p = self.result, self.measured, self.result.verification, self.predicted
        found = _picked(r, "name strategy outcome evidence is_baseline error command folder mlflow_run_id")
        found |= _picked(r, "prediction_error trace verification") | to_dict(self.decision)
        found |= {"why": phrases.why(r, self.decision), "next_action": phrases.advice(self.decision.advice)}
        found |= _picked(m, "step_ms step_ms_low step_ms_high step_ms_ci_low step_ms_ci_high samples_per_s")
        found |= _picked(m, "tokens_per_s to_host_mib from_host_mib phases_ms eval_loss")
        found |= {
            "reserved_mib": m.peak_reserved_mib if m is not None else None,
            "train_loss": m.train_loss[-1] if m is not None and m.train_loss else None,
            "eval_loss_mean": self.eval_loss,
            "grad_rel_err": v.grad_rel_err if v is not None else None,
            "peak": self.peak if self.peak_was_seen else None,
            "at_peak_mib": self.peak.at_peak_mib if self.peak is not None else {},
            "explanation": self.explanation,
            "predicted": None,
        }
        if p is not None:
            of_peak = {
                "evidence": Evidence.predicted.value,
                "peak_phase": p.peak.phase if p.peak else p.peak_phase,
                "peak_operator": p.peak.operator if p.peak else p.peak_operator,
                "at_peak_mib": p.peak.at_peak_mib if p.peak else p.at_peak_mib,
                "error_ratio": self.error_ratio,
            }
            found["predicted"] = {**{k: x for k, x in to_dict(p).items() if k != "peak"}, **of_peak}
        return found


def _picked(of: object, names: str) -> dict[str, Any]:
    return {name: getattr(of, name, None) for name in names.split()}


@dataclass
class Section:
    """One comparison. `results` and `comparison.decisions` run parallel, the baseline first; `rows` are those shown."""

    group: Group
    comparison: Comparison
    rows: list[Row]
    unseen: list[Row]  # in report.json only
    causes: Causes  # what the trials that are shown have in common and where they differ
    sensitivity: Sensitivity  # of all trials
    notes: list[str] = field(default_factory=list)  # what is left out, and what is not as it seems; whole sentences

    @property
    def results(self) -> list[TrialResult]:
        return self.group.results

    @property
    def baseline(self) -> Row | None:
        return self._row(self.comparison.baseline_index)

    @property
    def preferred(self) -> Row | None:
        return self._row(self.comparison.preferred_index)

    @property
    def preferred_result(self) -> TrialResult | None:
        index = self.comparison.preferred_index
        return None if index is None else self.results[index]

    def _row(self, index: int | None) -> Row | None:
        return None if index is None else next(r for r in self.rows if r.result is self.results[index])

    @property
    def candidates(self) -> list[Row]:
        return [r for r in self.rows if r is not self.baseline]

    @property
    def predicts(self) -> bool:
        return self.comparison.mode == "predict"

    @property
    def title(self) -> str:
        return title_of(self.group, self.comparison)

    def data(self) -> dict[str, Any]:
        """The section with the keys of report.json."""
        first = self.results[0]
        candidates = [*self.candidates, *self.unseen]
        return {
            **{k: v for k, v in to_dict(self.comparison).items() if k != "decisions" and not k.endswith("_index")},
            "budget": plain(self.group.budget),
            "capacity_mib": self.group.capacity_mib,
            "baseline": None if self.baseline is None else self.baseline.data(),
            "candidates": [r.data() for r in candidates],
            "why": phrases.conclusion(self.comparison, self.results),
            "next_action": phrases.next_action(self.comparison, self.results),
            "against": phrases.against(self.comparison, self.results),
            "explanation": phrases.causes(self.causes),
            "survival": phrases.survival(self.sensitivity),
            "notes": self.notes,
            **_picked(first, "data_version parameters block_patterns block_share environment"),
        }


@dataclass
class Report:
    """Everything that is shown at the end of a sweep, and where it lies."""

    sections: list[Section]
    folder: Path
    command: str = ""  # repeats the sweep
    tracking: dict[str, Any] = field(default_factory=dict)  # the tracking group of the config
    plots: list[Path] = field(default_factory=list)
    options: str = ""  # of `python -m sweep.report`, where another budget than the sweep's is judged by

    def __post_init__(self) -> None:
        names = ("report.json", "report.md", "report.html")
        self.json_path, self.markdown_path, self.html_path = (self.folder / name for name in names)

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
        sections = [s.data() for s in self.sections]
        found = {"schema_version": SCHEMA_VERSION, **sections[0], "command": self.command}
        found["plots"] = [p.name for p in self.plots]
        return to_dict(found | ({"comparisons": sections} if len(sections) > 1 else {}))


def build(judged: Sequence[Judged], folder: Path, command: str = "", *, most: int | None = None) -> Report:
    """Arrange what was concluded. most: trials shown beside the baselines. Raises ValueError without any result."""
    if not judged:
        raise ValueError("a report needs at least one trial")
    tracking = judged[0][0].results[0].config.get("tracking") or {}
    shown = MOST_SHOWN if most is None else most
    return Report([_section(group, c, shown) for group, c in judged], folder, command, tracking)


def _section(group: Group, c: Comparison, most: int) -> Section:
    results = group.results
    best = sorted(ranked(results, c)[: most + sum(r.is_baseline for r in results)])
    shown = [results[i] for i in best]
    place = {old: new for new, old in enumerate(best)}
    index = {k: place.get(getattr(c, k)) for k in ("baseline_index", "preferred_index")}
    causes = explain(shown, replace(c, decisions=[c.decisions[i] for i in best], **index))  # type: ignore[arg-type]
    rows = [Row(results[i], c.decisions[i], why) for i, why in zip(best, causes.trials)]
    unseen = [Row(r, d) for i, (r, d) in enumerate(zip(results, c.decisions)) if i not in place]
    section = Section(group, c, rows, unseen, causes, Sensitivity(results, group.budget, group.capacity_mib, c))
    if unseen:
        section.notes.append(
            f"Shown: the best {len(rows)} of {count(len(results), 'trial')}; all are in report.json. How the choice "
            "changes under other budgets is told of all of them."
        )
    return section


def ranked(results: Sequence[TrialResult], c: Comparison) -> list[int]:
    """Places of the trials, the most important first: baselines, the preferred, then by verdict, fast and small."""
    order = [v.value for v in Verdict]

    def rank(i: int) -> tuple[bool, bool, int, float, float]:
        m, d = results[i].measurement, c.decisions[i]
        speed = m.samples_per_s if m is not None else 0.0
        return not results[i].is_baseline, i != c.preferred_index, order.index(d.verdict), -speed, d.peak_mib or 0.0

    return sorted(range(len(results)), key=rank)


def shown_path(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def state_of(folder: Path) -> dict[str, Any]:
    """What the session left in a sweep's folder; {} where there is nothing to read."""
    try:
        stored = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
