"""Accept, tune or reject: each trial against the budget and the baseline, then the one verdict of a comparison.

Pure functions of stored results: a report that is made again, or under another budget, decides as the sweep did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sweep.certainty import difference, disturbances, drift_of
from sweep.checks import (
    STRENGTH,
    Facts,
    Found,
    check_equal,
    check_evidence,
    check_losses,
    check_memory,
    check_quality,
    check_repeats,
    check_saving,
    check_throughput,
    deciding_peak_mib,
    saved_words,
    verified_words,
)
from sweep.conclusion import explain_conclusion, noise_words
from sweep.knobs import Knobs, change_rank
from sweep.reasons import NEVER, ONLY_EVIDENCE, REASONS, Case, next_step, outcome_reason
from sweep.results import Comparison, Decision, Evidence, Outcome, TrialResult, Verdict
from sweep.schema import BudgetConf, MinEvidence
from sweep.words import EVIDENCE_SHORT, OUTCOME_WORDS, mib, ms, percent, ratio


def decide(
    candidate: TrialResult, baseline: TrialResult | None, budget: BudgetConf, capacity_mib: float | None
) -> Decision:
    """Judge one trial.

    `baseline` may be the candidate itself, may have failed, or may be missing: relative floors then do not apply, and
    `Decision.against` says so. `capacity_mib` is the device's memory in MiB and the cap where the budget names none.
    """
    cap, cap_source = memory_cap(budget, capacity_mib)
    reference = None if candidate.is_baseline else baseline
    facts = Facts.of(candidate, reference)
    decision = Decision(
        verdict=Verdict.accept.value,
        against=_against(candidate, baseline),
        peak_mib=facts.peak_mib,
        saved_mib=facts.saved_mib,
        throughput_ratio=facts.throughput_ratio,
        eval_loss_ratio=facts.eval_loss_ratio,
        cap_mib=cap,
        step=facts.step,
    )
    if facts.own is not None:
        decision.disturbed = disturbances(facts.own, facts.base)
        decision.quality = facts.quality
    found = Found()
    if candidate.outcome != Outcome.ok.value:
        found.add(outcome_reason(candidate), _outcome_words(candidate))
    else:
        check_equal(candidate, found)
        check_losses(candidate, facts, found)
        check_memory(candidate, facts, cap, cap_source, found)
        check_throughput(candidate, facts, budget, found)
        check_quality(candidate, facts, budget, found)
        check_saving(candidate, facts, budget, found)
        check_evidence(candidate, budget, found)
        check_repeats(candidate, facts, found)
    decision.reasons = [code for code in REASONS if code in found.words]
    case = Case(candidate, cap, facts.inside_noise(budget))
    if not found.blocking:
        decision.why = _accepted_words(candidate, facts, cap, found)
        if decision.disturbed:
            decision.next_action = str(REASONS["disturbed"].next_step(case))
        return decision
    step, own = next_step(found.blocking, case)
    decision.verdict = (Verdict.tune if own else Verdict.reject).value
    decision.why = "; ".join(found.words[code] for code in decision.reasons)
    decision.next_action = str(step)
    return decision


def memory_cap(budget: BudgetConf, capacity_mib: float | None) -> tuple[float | None, str]:
    """The cap on the peak in MiB and the key it comes from: the budget's, else the device's capacity, else none."""
    if budget.memory_mib is not None:
        return budget.memory_mib, "budget.memory_mib"
    return (capacity_mib, "device.capacity_mib") if capacity_mib is not None else (None, "")


def _against(candidate: TrialResult, baseline: TrialResult | None) -> str:
    return "the budget alone: this is the baseline" if candidate.is_baseline else against_words(baseline)


def against_words(baseline: TrialResult | None) -> str:
    """What trials are compared with."""
    if baseline is None:
        return "absolute floors and each other: there is no baseline here"
    if baseline.outcome != Outcome.ok.value:
        return f"absolute floors and each other: the baseline {OUTCOME_WORDS.get(baseline.outcome, baseline.outcome)}"
    if baseline.measurement is not None:
        return f"the baseline ({mib(deciding_peak_mib(baseline))}, {ms(baseline.measurement.step_ms)} per step)"
    return f"the baseline ({mib(deciding_peak_mib(baseline))}, predicted)"


def _outcome_words(candidate: TrialResult) -> str:
    code = outcome_reason(candidate)
    words = REASONS[code].meaning
    v = candidate.verification
    detail = (v.reason if v is not None and not v.passed else "") or candidate.error
    return f"{words}: {detail}" if detail else words


def _accepted_words(candidate: TrialResult, facts: Facts, cap: float | None, found: Found) -> str:
    peak = mib(facts.peak_mib) if facts.peak_mib is not None else "a peak that is not known"
    words = [f"{peak} of {mib(cap)} allowed" if cap is not None else f"{peak}, no cap known"]
    if facts.saved_mib is not None and facts.peak_mib is not None:
        base = facts.saved_mib + facts.peak_mib
        share = f" ({percent(facts.saved_mib / base)})" if facts.saved_mib > 0 else ""
        words.append(f"{saved_words(facts.saved_mib)}{share}")
    if facts.throughput_ratio is not None:
        words.append(f"{ratio(facts.throughput_ratio)} the baseline's throughput{noise_words(facts.step)}")
    words += [w for w in (verified_words(candidate.verification), *found.words.values()) if w]
    return f"{EVIDENCE_SHORT.get(candidate.evidence, candidate.evidence)}: {'; '.join(words)}"


def conclude(results: list[TrialResult], budget: BudgetConf, capacity_mib: float | None) -> Comparison:
    """Judge every trial of one comparison and name the preferred one: the fastest that is accepted.

    Where times cannot be told apart, and where nothing was timed, it is the one that changes least. The baseline is a
    candidate too: keeping it is an answer. Raises ValueError unless `results` are of one `fixed_id` (see `compare`).
    """
    if len({r.fixed_id for r in results}) != 1:
        raise ValueError("a comparison takes the trials of one fixed_id, at least one")
    base_index = _baseline_index(results)
    baseline = None if base_index is None else results[base_index]
    decisions = [decide(r, baseline, budget, capacity_mib) for r in results]
    accepted = [i for i, d in enumerate(decisions) if d.verdict == Verdict.accept.value]
    preferred = preferred_of(results, accepted)
    cap, cap_source = memory_cap(budget, capacity_mib)
    first = results[0]
    comparison = Comparison(
        fixed_id=first.fixed_id,
        workload=first.workload,
        device=first.device,
        mode=first.mode,
        evidence=_evidence(results),
        verdict=_verdict(decisions),
        preferred=None if preferred is None else results[preferred].name,
        why="",
        against=against_words(baseline),
        next_action="",
        preferred_index=preferred,
        baseline=None if baseline is None else baseline.name,
        baseline_index=base_index,
        feasible=any(_feasible(r, d) for r, d in zip(results, decisions)),
        cap_mib=cap,
        cap_source=cap_source,
        decisions=decisions,
        drift=drift_of(baseline.measurement) if baseline is not None and baseline.measurement is not None else None,
    )
    cheapest = _cheapest_saving(results, decisions, baseline)
    comparison.cheapest_saving = None if cheapest is None else results[cheapest].name
    explain_conclusion(comparison, results, cheapest)
    return comparison


@dataclass(frozen=True)
class Group:
    """The trials of one comparison, the baseline first, and what they are judged by."""

    results: list[TrialResult]
    budget: BudgetConf
    capacity_mib: float | None  # of the device; None: not known
    under: str = ""  # the settings in which its budget differs from others of the same trials, as typed

    def conclude(self) -> Comparison:
        return conclude(self.results, self.budget, self.capacity_mib)


def grouped(
    results: list[TrialResult],
    budget: BudgetConf | None = None,
    capacity_mib: float | None = None,
    changes: Mapping[str, float | None] | None = None,
) -> list[Group]:
    """What is judged together: the trials of each comparison, under each of the budgets that they were started with.

    A baseline belongs to every budget of its comparison. budget, capacity_mib: to judge all by; None: each comparison
    by its own. changes: settings of the budget that are other than they were.
    """
    found = []
    for trials in by_comparison(results):
        whole = sorted(trials, key=lambda r: not r.is_baseline)  # stable: the others stay in order
        capacity = next((c for r in whole if (c := _capacity_of(r)) is not None), None)
        own: list[tuple[BudgetConf, list[TrialResult]]] = []
        for result in sorted(trials, key=lambda r: r.is_baseline):  # budgets in the order of the candidates
            for one in _budgets_of(result, budget, changes or {}):
                alike = next((group for other, group in own if other == one), None)
                if alike is None:
                    own.append((one, alike := []))
                alike.append(result)
        for one, members in own:
            ids = set(map(id, members))
            together = [r for r in whole if r.is_baseline or id(r) in ids]
            under = _difference(one, [other for other, _ in own])
            found.append(Group(together, one, capacity if capacity_mib is None else capacity_mib, under))
    return found


def by_comparison(results: list[TrialResult]) -> list[list[TrialResult]]:
    """The trials of each `fixed_id` on the same data, in the order in which they first occur."""
    groups: dict[tuple[str, str], list[TrialResult]] = {}
    versions: dict[str, str] = {}
    for result in results:
        if result.data_version:
            versions.setdefault(result.fixed_id, result.data_version)
    for result in results:  # one that went wrong early does not know its data
        version = result.data_version or versions.get(result.fixed_id, "")
        groups.setdefault((result.fixed_id, version), []).append(result)
    return list(groups.values())


def _capacity_of(result: TrialResult) -> float | None:
    """The device's memory in MiB as the trial found it, or as it was configured."""
    if result.capacity_mib is not None:
        return result.capacity_mib
    configured = (result.config.get("device") or {}).get("capacity_mib")
    return None if configured is None else float(configured)


def _budgets_of(
    result: TrialResult, budget: BudgetConf | None, changes: Mapping[str, float | None]
) -> list[BudgetConf]:
    started = result.budgets or [result.config.get("budget") or {}]
    stored = started if budget is None else [vars(budget)]
    found: list[BudgetConf] = []
    for one in (budget_of({**values, **changes}) for values in stored):
        if one not in found:
            found.append(one)
    return found


def budget_of(data: Mapping[str, Any]) -> BudgetConf:
    """The budget from the plain form in which configs and reports store it. Keys of a newer version are ignored."""
    values = {f.name: data[f.name] for f in fields(BudgetConf) if f.name in data}
    least = values.get("min_evidence") or MinEvidence.auto
    values["min_evidence"] = least if isinstance(least, MinEvidence) else MinEvidence[least]
    return BudgetConf(**values)


def _difference(one: BudgetConf, budgets: list[BudgetConf]) -> str:
    """`budget.memory_mib=80`: the settings that are not equal in all `budgets`, as `one` has them."""
    said = []
    for key, value in vars(one).items():
        if any(vars(other)[key] != value for other in budgets):
            shown = f"{value:g}" if isinstance(value, float) else getattr(value, "name", value)
            said.append(f"budget.{key}={'null' if value is None else shown}")
    return " ".join(said)


def _baseline_index(results: list[TrialResult]) -> int | None:
    """The baseline that ended well, else the first; None where there is none."""
    found = [i for i, r in enumerate(results) if r.is_baseline]
    return next((i for i in found if results[i].outcome == Outcome.ok.value), found[0] if found else None)


def preferred_of(results: list[TrialResult], accepted: list[int]) -> int | None:
    """Index of the one to take among the `accepted` indices, by the rule that `conclude` states; None of none."""
    if not accepted:
        return None
    timed = {i: m for i in accepted if (m := results[i].measurement) is not None}
    if not timed:
        return min(accepted, key=lambda i: _change_order(results[i]))
    fastest = min(timed, key=lambda i: timed[i].step_ms)
    base_index = _baseline_index(results)
    base = None if base_index is None else results[base_index].measurement
    drift = None if base is None else drift_of(base)
    # Those that change least first, so that no more intervals are computed than it takes.
    least_first = sorted(timed, key=lambda i: (change_rank(results[i]), timed[i].step_ms))
    return next(i for i in least_first if i == fastest or difference(timed[i], timed[fastest], drift).none)


def _change_order(result: TrialResult) -> tuple[float, ...]:
    """How much a trial changes, where no time is known: by kind, then by what it recomputes, moves and splits."""
    p = result.prediction
    recomputed, moved = (0.0, 0.0) if p is None else (p.recompute_flops_ratio, p.to_host_mib + p.from_host_mib)
    return change_rank(result), recomputed, moved, -(Knobs.of(result).samples_at_once or 0)


def _verdict(decisions: list[Decision]) -> str:
    verdicts = {d.verdict for d in decisions}
    return next(v.value for v in Verdict if v.value in verdicts)


def _evidence(results: list[TrialResult]) -> str:
    """The weakest evidence among what ran; predicted where nothing did."""
    ran = [r.evidence for r in results if r.measurement is not None]
    if not ran:  # none came to an end, but running out of memory or to NaN is an observation, too
        ran = [r.evidence for r in results if r.mode == "measure" and r.outcome != Outcome.over_budget.value]
    return min(ran, key=lambda e: STRENGTH.get(e, 0)) if ran else Evidence.predicted.value


def _feasible(result: TrialResult, decision: Decision) -> bool:
    return result.outcome == Outcome.ok.value and set(decision.reasons) <= ONLY_EVIDENCE


def _cheapest_saving(results: list[TrialResult], decisions: list[Decision], baseline: TrialResult | None) -> int | None:
    """The trial with the most memory saved per time lost; a loss inside the noise is none, and then the most saved.

    Where nothing was timed: the most saved by the kind that changes least. Savings under 1 % of the peak do not count.
    """
    ranked: list[tuple[tuple[float, ...], int]] = []
    for i, (result, decision) in enumerate(zip(results, decisions)):
        saved, ruled_out = decision.saved_mib, set(decision.reasons) & NEVER
        if result is baseline or result.outcome != Outcome.ok.value or saved is None or ruled_out:
            continue
        if saved <= 0.01 * (saved + (decision.peak_mib or 0.0)):
            continue
        own, base, step = result.measurement, baseline.measurement if baseline is not None else None, decision.step
        if own is None or base is None or step is None:
            ranked.append(((-change_rank(result), saved), i))
            continue
        lost = 0.0 if step.none else max(0.0, own.step_ms - base.step_ms)
        ranked.append(((math.inf if lost == 0 else saved / lost, saved), i))
    return max(ranked)[1] if ranked else None
