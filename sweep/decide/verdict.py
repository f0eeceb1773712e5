"""Accept, tune or reject: each trial against the budget and the baseline, then the one verdict of a comparison.

Pure functions of stored results: a report that is made again, or under another budget, decides as the sweep did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sweep.config.schema import BudgetConf, MinEvidence
from sweep.config.strategy_names import Knobs, change_rank, strategy_of, with_overrides
from sweep.decide.reasons import NEVER, ONLY_EVIDENCE, REASONS, Case, next_step, outcome_reason
from sweep.decide.statistics import curves, difference, disturbances, drift_of, drift_words, quality_of, repeats_words
from sweep.format import (
    EVIDENCE_SHORT,
    EVIDENCE_WORDS,
    OUTCOME_WORDS,
    count,
    error,
    known,
    loss,
    mib,
    ms,
    number,
    percent,
    ratio,
)
from sweep.results import (
    Comparison,
    Decision,
    Difference,
    Drift,
    Evidence,
    Measurement,
    Outcome,
    Quality,
    TrialResult,
    Verdict,
    Verification,
)

#: Of the cap: where less is left, what a prediction does not count may decide.
UNSURE = 0.05
#: What a verification says that is neither yes nor no.
UNDECIDED = {
    "not_verified": "too little of it was compared with the baseline",
    "not_comparable": "it cannot be compared with the baseline",
}

#: Evidence, weakest first.
STRENGTH = {e.value: i for i, e in enumerate(Evidence)}


@dataclass
class Found:
    """What was found against a trial: words by code, and the codes that stand against acceptance."""

    words: dict[str, str] = field(default_factory=dict)
    blocking: list[str] = field(default_factory=list)

    def add(self, code: str, words: str, blocks: bool = True) -> None:
        self.words.setdefault(code, words)
        if blocks and code not in self.blocking:
            self.blocking.append(code)


@dataclass
class Facts:
    peak_mib: float | None = None
    saved_mib: float | None = None
    throughput_ratio: float | None = None
    eval_loss: float | None = None  # held-out, mean over the seeds
    eval_loss_ratio: float | None = None  # over the seeds that both were evaluated with
    quality: Quality | None = None
    own: Measurement | None = None
    base: Measurement | None = None
    step: Difference | None = None  # step time over the baseline's
    drift: Drift | None = None
    has_reference: bool = False  # there is a baseline that ended well

    @classmethod
    def of(cls, candidate: TrialResult, baseline: TrialResult | None) -> Facts:
        facts = cls(peak_mib=deciding_peak_mib(candidate), own=candidate.measurement)
        facts.eval_loss = None if facts.own is None else curves(facts.own).held_out_mean
        if baseline is None or baseline.outcome not in (Outcome.ok.value, Outcome.over_budget.value):
            return facts
        facts.has_reference = baseline.outcome == Outcome.ok.value
        base_peak = deciding_peak_mib(baseline)
        # Only like is compared with like: a measured peak less a predicted one is no saving.
        alike = (candidate.measurement is None) == (baseline.measurement is None)
        if alike and facts.peak_mib is not None and base_peak is not None:
            facts.saved_mib = base_peak - facts.peak_mib
        facts.base = base = baseline.measurement
        if facts.own is not None and base is not None:
            facts.drift = drift_of(base)
            facts.step = difference(facts.own, base, facts.drift)
            if base.samples_per_s > 0:
                facts.throughput_ratio = facts.own.samples_per_s / base.samples_per_s
            facts.quality = quality = quality_of(facts.own, base)
            if quality is not None and quality.loss > quality.difference:
                facts.eval_loss_ratio = quality.loss / (quality.loss - quality.difference)
        return facts

    def inside_noise(self, budget: BudgetConf) -> bool:
        """Whether the throughput floors are missed by less than what the step times are sure to."""
        own, step = self.own, self.step
        if own is None:
            return False
        shortest = known(own.step_ms_ci_low) or own.step_ms_low
        if shortest <= 0:
            return False
        least, least_ratio = budget.min_samples_per_s, budget.min_throughput_ratio
        if least is not None and own.samples_per_s * own.step_ms / shortest < least:
            return False
        if least_ratio is not None and step is not None and step.low > 0:
            drifted = self.drift is not None and not self.drift.difference.none
            drift = abs(self.drift.difference.ratio - 1) if self.drift is not None and drifted else 0.0
            return max(1 / step.low, (1 + drift) / step.ratio) >= least_ratio
        return True


def deciding_peak_mib(result: TrialResult) -> float | None:
    """MiB: the measured peak, or the predicted one where nothing was run; None where a run died before it was known."""
    if result.measurement is not None:
        return known(result.measurement.peak_allocated_mib)
    if result.prediction is not None and result.evidence == Evidence.predicted.value:
        return known(result.prediction.allocated_mib)
    return None


def check_equal(candidate: TrialResult, found: Found) -> None:
    v = candidate.verification
    if candidate.is_baseline or candidate.mode == "predict":
        return
    if v is None:
        switched_off = (candidate.config.get("measure") or {}).get("verify") is False
        words = "not verified as equal to the baseline" + (" (measure.verify=false)" if switched_off else "")
        found.add("not_verified", words, blocks=not switched_off)
    elif v.status in UNDECIDED:
        found.add("not_verified", f"{UNDECIDED[v.status]}: {v.reason or 'no reason is known'}")
    elif not v.passed:
        found.add("not_equivalent", f"{REASONS['not_equivalent'].meaning}: {v.reason or _error_words(candidate)}")


def check_losses(candidate: TrialResult, facts: Facts, found: Found) -> None:
    """A strategy that was verified to the last bit and then trains to other losses was not verified for long enough.

    On a CPU alone, whose sums repeat; and where the baseline's own repeats do.
    """
    v, own, base = candidate.verification, facts.own, facts.base
    if v is None or not v.bit_equal or own is None or base is None or candidate.evidence != Evidence.cpu.value:
        return
    expected: dict[int, list[list[float]]] = {}
    for run in base.runs:
        if not run.error:
            expected.setdefault(run.seed, []).append([*run.train_loss, *filter(None, [run.eval_loss])])
    for run in own.runs:
        known_ones = [] if run.error else expected.get(run.seed, [])
        losses = [*run.train_loss, *filter(None, [run.eval_loss])]
        alike = [e for e in known_ones if len(e) == len(losses)]
        if alike and all(e == alike[0] for e in alike) and losses != alike[0]:
            step = next(i for i, (a, b) in enumerate(zip(losses, alike[0])) if a != b)
            found.add(
                "not_equivalent",
                f"equal to the last bit over {count(v.steps, 'step')}, but its loss {step + 1} is {losses[step]:.8g} "
                f"where the baseline's is {alike[0][step]:.8g}: something that forward moves shows later",
            )
            return


def _error_words(candidate: TrialResult) -> str:
    v = candidate.verification
    return "" if v is None else f"relative error {error(v.max_rel_err)}, allowed {error(v.tolerance)}"


def verified_words(v: Verification | None) -> str:
    """`gradients equal in 100 % of the parameters over 2 steps`; "" where the share is not known."""
    if v is None or not v.passed or v.compared_share is None:
        return ""
    return f"gradients equal in {percent(v.compared_share)} of the parameters over {count(v.steps, 'step')}"


def check_memory(candidate: TrialResult, facts: Facts, cap: float | None, source: str, found: Found) -> None:
    peak, prediction = facts.peak_mib, candidate.prediction
    if peak is None:
        if cap is not None:
            found.add("memory_unknown", "its peak is not known")
        return
    if cap is not None and peak > cap:
        what = "peak" if candidate.measurement is not None else "predicted peak"
        found.add("over_memory", f"{what} {mib(peak)}, {mib(peak - cap)} over the cap of {mib(cap)} ({source})")
    elif candidate.measurement is None and prediction is not None and not prediction.fits:
        short = "" if prediction.headroom_mib is None else f", short by {mib(-prediction.headroom_mib)}"
        words = f"predicted to reserve {mib(prediction.reserved_mib)}, which does not fit {prediction.device}{short}"
        found.add("over_memory", words)
    elif candidate.measurement is None and prediction is not None and prediction.unsure:
        left = [(cap - peak) / cap] if cap else []
        if prediction.headroom_mib is not None and prediction.capacity_mib:
            left.append(prediction.headroom_mib / prediction.capacity_mib)
        if left:
            words = f"less sure, {percent(min(left))} are left: {'; '.join(prediction.unsure)}"
            found.add("uncertain", words, blocks=min(left) < UNSURE)


def check_throughput(candidate: TrialResult, facts: Facts, budget: BudgetConf, found: Found) -> None:
    least, least_ratio, m = budget.min_samples_per_s, budget.min_throughput_ratio, candidate.measurement
    relative = least_ratio is not None and least_ratio > 0 and facts.has_reference
    if m is None:
        if least is not None or relative:
            found.add("throughput_unknown", REASONS["throughput_unknown"].meaning)
        return
    if least is not None and m.samples_per_s < least:
        found.add("below_throughput", f"{number(m.samples_per_s)} samples/s are under the floor of {number(least)}")
    if relative and least_ratio is not None:
        if facts.throughput_ratio is None:
            found.add("throughput_unknown", REASONS["throughput_unknown"].meaning)
        elif facts.throughput_ratio < least_ratio:
            own = ratio(facts.throughput_ratio)
            words = f"{own} the baseline's throughput is under the floor of {ratio(least_ratio)}"
            found.add("below_throughput", words)


def check_quality(candidate: TrialResult, facts: Facts, budget: BudgetConf, found: Found) -> None:
    own = facts.eval_loss
    most, most_ratio = budget.max_eval_loss, budget.max_eval_loss_ratio
    relative = most_ratio is not None and facts.has_reference
    if own is None:
        if most is not None or relative:
            found.add("quality_unknown", REASONS["quality_unknown"].meaning)
        return
    if most is not None and own > most:
        found.add("quality_lost", f"held-out loss {loss(own)} is above the gate of {loss(most)}")
    if relative and most_ratio is not None:
        if facts.eval_loss_ratio is None:
            found.add("quality_unknown", REASONS["quality_unknown"].meaning)
        elif facts.eval_loss_ratio > most_ratio:
            against = f"{ratio(facts.eval_loss_ratio)} the baseline's, above the gate of {ratio(most_ratio)}"
            found.add("quality_lost", f"held-out loss {loss(own)} is {against}")


def check_saving(candidate: TrialResult, facts: Facts, budget: BudgetConf, found: Found) -> None:
    least, saved = budget.min_saving_mib, facts.saved_mib
    if candidate.is_baseline:
        if least is not None and least > 0:
            found.add("saving_too_small", f"the baseline saves nothing, and {mib(least)} were asked for")
        return
    if saved is None:
        return
    if least is not None and saved < least:
        found.add("saving_too_small", f"{saved_words(saved)}, less than the {mib(least)} that count")
    # By default any saving counts, but a strategy that saves nothing must at least be faster.
    faster = facts.step is not None and facts.step.ratio < 1 and not facts.step.none
    if least is None and saved <= 0 and not faster:
        found.add("saving_too_small", f"{saved_words(saved)} and is not faster")


def saved_words(saved_mib: float) -> str:
    if saved_mib == 0:
        return "saves nothing"
    return f"saves {mib(saved_mib)}" if saved_mib > 0 else f"takes {mib(-saved_mib)} more"


def check_evidence(candidate: TrialResult, budget: BudgetConf, found: Found) -> None:
    least = budget.min_evidence.value
    if budget.min_evidence is MinEvidence.auto:
        on_cpu = candidate.evidence == Evidence.cpu.value
        least = "predicted" if candidate.mode == "predict" else "cpu" if on_cpu else "measured"
    if candidate.evidence == Evidence.smoke.value:
        m = candidate.measurement
        steps = f"{count(m.repeats, 'repeat')} of {count(m.steps, 'step')} " if m is not None else ""
        found.add("evidence_too_short", f"{steps}on a GPU are too short to conclude".lstrip())
    elif STRENGTH.get(candidate.evidence, 0) < STRENGTH[least]:
        words = EVIDENCE_SHORT.get(candidate.evidence, candidate.evidence)
        found.add("evidence_too_weak", f"{words} only, and the evidence asked for is {least}")


def check_repeats(candidate: TrialResult, facts: Facts, found: Found) -> None:
    """What the single repeats say of the whole: one that went wrong counts against it, a disturbed one is marked."""
    if candidate.measurement is None:
        return
    wrong = repeats_words(candidate.measurement)
    if wrong:
        found.add("repeat_failed", f"{REASONS['repeat_failed'].meaning}: {wrong}")
    disturbed = disturbances(candidate.measurement, facts.base)
    if disturbed:
        more = f" and {count(len(disturbed) - 1, 'more finding')}" if len(disturbed) > 1 else ""
        found.add("disturbed", f"its times may not be its own: {disturbed[0]}{more}", blocks=False)


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


def explain_conclusion(comparison: Comparison, results: list[TrialResult], cheapest: int | None) -> None:
    """Fill in `why` and `next_action` of the comparison, and what the other trials make of each trial's next action.

    cheapest: index of the trial that saves most per time lost, None where none saves.
    """
    for result, decision in zip(results, comparison.decisions):
        _name_what_was_run(result, decision, results, comparison.decisions)
    index = comparison.preferred_index
    if index is None:
        _nothing_accepted(comparison, results)
    elif results[index].is_baseline:
        _keep_the_baseline(comparison, results, index, cheapest)
    else:
        _take(comparison, results, index)
        if comparison.baseline_index is not None:
            baseline = comparison.decisions[comparison.baseline_index]
            if baseline.verdict != Verdict.accept.value:
                baseline.next_action = f"use {results[index].name} instead"
    certainty = [drift_words(comparison.drift), _disturbed_words(comparison, results)]
    if index is not None and "uncertain" in comparison.decisions[index].reasons:
        certainty.append("whether it fits is less sure by what the prediction does not count")
    comparison.why = "; ".join(w for w in (comparison.why, *certainty) if w)


def noise_words(step: Difference | None) -> str:
    """Behind a ratio of times: whether it is one."""
    return " (no difference in time beyond the noise)" if step is not None and step.none else ""


def _disturbed_words(comparison: Comparison, results: list[TrialResult]) -> str:
    disturbed = [r.name for r, d in zip(results, comparison.decisions) if d.disturbed]
    if not disturbed:
        return ""
    whose = "all trials" if len(disturbed) == len(results) > 1 else ", ".join(disturbed)
    return f"the times of {whose} were disturbed, so measure again on a quiet machine before relying on them"


def _name_what_was_run(
    result: TrialResult, decision: Decision, results: list[TrialResult], decisions: list[Decision]
) -> None:
    """A next action that was already run beside it is no advice without what came of it."""
    wanted = with_overrides(result, decision.next_action)
    if wanted is None:
        return
    for other, its in zip(results, decisions):
        if other is not result and strategy_of(other) == wanted:
            reasons = f", {', '.join(its.reasons)}" if its.reasons else ""
            decision.next_action += f"; run here already as {other.name}: {its.verdict}{reasons}"
            return


def _keep_the_baseline(comparison: Comparison, results: list[TrialResult], index: int, cheapest: int | None) -> None:
    decision = comparison.decisions[index]
    if comparison.cap_mib is None:
        fit = f"no memory cap is set (budget.memory_mib) and the baseline takes {mib(decision.peak_mib)}"
    else:
        spare = f", {mib(comparison.cap_mib - decision.peak_mib)} to spare" if decision.peak_mib is not None else ""
        fit = f"the baseline takes {mib(decision.peak_mib)} of the {mib(comparison.cap_mib)} allowed{spare}"
    rivals = [r for r in results if not r.is_baseline]
    timed = rivals and results[index].measurement is not None
    rank = f"; it {_rank_words(comparison, results, index)}" if timed else ""
    comparison.why = f"nothing needs to change under this budget: {fit}{rank} ({_where(comparison)})"
    if cheapest is not None:
        saving = _saving(results[cheapest], comparison.decisions[cheapest])
        comparison.next_action = f"keep the baseline; if memory gets short, {saving}"
    elif rivals:
        comparison.next_action = "keep the baseline; none of the trials saves memory"
    else:
        comparison.next_action = "keep the baseline; -m 'strategy=glob(*)' shows what each strategy would save"


def _saving(result: TrialResult, decision: Decision) -> str:
    """`micro_batch saves most per time lost: 120 MiB (38 %) at 0.80x the throughput`."""
    saved = f"{mib(decision.saved_mib)}{_share(decision)}"
    if decision.throughput_ratio is None:
        return f"{result.name} changes least and is predicted to save {saved}; what it costs in time is not known"
    if decision.step is not None and (decision.step.ratio <= 1 or decision.step.none):
        return f"{result.name} saves {saved} without a loss of time beyond the noise"
    return f"{result.name} saves most per time lost: {saved} at {ratio(decision.throughput_ratio)} the throughput"


def _take(comparison: Comparison, results: list[TrialResult], index: int) -> None:
    result, decision, m = results[index], comparison.decisions[index], results[index].measurement
    accepted = sum(d.verdict == Verdict.accept.value for d in comparison.decisions)
    words = [_why_not_the_baseline(comparison)]
    if m is None:
        among = count(accepted, "trial")
        words.append(f"{result.name} changes least among {among} predicted to fit; times are not known")
    else:
        among = f"{count(accepted, 'trial')} accepted, {ms(m.step_ms)} per step"
        words.append(f"{result.name} {_rank_words(comparison, results, index)} ({among})")
    numbers = [mib(decision.peak_mib) if decision.peak_mib is not None else "its peak is not known"]
    if comparison.cap_mib is not None:
        numbers[0] += f" of {mib(comparison.cap_mib)} allowed"
    if decision.saved_mib is not None and decision.saved_mib > 0:
        numbers.append(f"saves {mib(decision.saved_mib)}{_share(decision)}")
    if decision.throughput_ratio is not None:
        numbers.append(f"{ratio(decision.throughput_ratio)} the baseline's throughput{noise_words(decision.step)}")
    words.append(", ".join(numbers))
    words.append(verified_words(result.verification))
    if "not_verified" in decision.reasons:
        words.append("it was not verified as equal to the baseline")
    comparison.why = f"{'; '.join(w for w in words if w)} ({_where(comparison)})"
    comparison.next_action = f"use {result.name}{_confirm(comparison)}"


def _why_not_the_baseline(comparison: Comparison) -> str:
    i = comparison.baseline_index
    if i is None:
        return "there is no baseline here"
    decision = comparison.decisions[i]
    return "" if decision.verdict == Verdict.accept.value else f"the baseline is no option: {decision.why}"


def _rank_words(comparison: Comparison, results: list[TrialResult], index: int) -> str:
    own = results[index].measurement
    assert own is not None
    faster = [
        r.name
        for r, d in zip(results, comparison.decisions)
        if d.verdict == Verdict.accept.value and r.measurement is not None and r.measurement.step_ms < own.step_ms
    ]
    if not faster:
        return "is the fastest accepted"
    return f"changes least among those that cannot be told apart in time (faster by the median: {', '.join(faster)})"


def _nothing_accepted(comparison: Comparison, results: list[TrialResult]) -> None:
    """No trial is accepted: say what is nearest to it."""
    decisions = comparison.decisions
    nearest = min(range(len(results)), key=lambda i: _distance(results[i], decisions[i]))
    result, decision = results[nearest], decisions[nearest]
    what = "no trial is accepted yet" if comparison.verdict == Verdict.tune.value else "no trial is accepted"
    comparison.why = f"{what}; nearest is {result.name}: {decision.why} ({_where(comparison)})"
    comparison.next_action = f"{result.name}: {decision.next_action}"


def _distance(result: TrialResult, decision: Decision) -> tuple[float, ...]:
    """How far from acceptance: tunable first, then the fewest and lightest misses of the budget, then the smallest."""
    last = list(REASONS)
    worst = min((last.index(code) for code in decision.reasons if code in REASONS), default=len(last))
    misses = len(set(decision.reasons) - ONLY_EVIDENCE)
    over = max(0.0, (decision.peak_mib or 0.0) - (decision.cap_mib or float("inf")))
    step = result.measurement.step_ms if result.measurement is not None else float("inf")
    return float(decision.verdict != Verdict.tune.value), misses, -worst, over, step


def _share(decision: Decision) -> str:
    if decision.saved_mib is None or decision.peak_mib is None or decision.saved_mib + decision.peak_mib <= 0:
        return ""
    return f" ({percent(decision.saved_mib / (decision.saved_mib + decision.peak_mib))})"


def _confirm(comparison: Comparison) -> str:
    if comparison.evidence == Evidence.predicted.value:
        return "; nothing was run yet: run it with mode=measure"
    if comparison.evidence == Evidence.cpu.value:
        return "; this says nothing about a GPU: repeat the sweep on the one that you train on"
    return ""


def _where(comparison: Comparison) -> str:
    return EVIDENCE_WORDS.get(comparison.evidence, comparison.evidence)
