"""Accept, tune or reject: each trial against the budget and the baseline, then the one verdict of a comparison.

Pure functions of stored results: a report that is made again, or under another budget, decides as the sweep did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sweep.config.schema import BudgetConf, MinEvidence
from sweep.config.strategy_names import batch_of, change_rank, changed, micro_batch_size, strategy_of
from sweep.decide.reasons import MEMORY, ONLY_EVIDENCE, REASONS, SPEED, Case
from sweep.decide.statistics import curves, difference, disturbances, drift_of, quality_of, same_time
from sweep.format import known
from sweep.results import (
    Advice,
    Comparison,
    Decision,
    Difference,
    Drift,
    Evidence,
    Finding,
    Measurement,
    Outcome,
    Quality,
    TrialResult,
    Verdict,
    from_dict,
)

#: Of the cap: where less is left, what a prediction does not count may decide.
UNSURE = 0.05
#: Evidence, weakest first.
STRENGTH = {e.value: i for i, e in enumerate(Evidence)}
#: What a verification says that is neither yes nor no.
UNDECIDED = ("not_verified", "not_comparable")


@dataclass
class Facts:
    """What is known of a trial before any budget."""

    result: TrialResult
    peak_mib: float | None = None  # that decides
    saved_mib: float | None = None
    throughput_ratio: float | None = None
    eval_loss: float | None = None  # held-out, mean over the seeds
    eval_loss_ratio: float | None = None  # over the seeds that both were evaluated with
    quality: Quality | None = None
    base: Measurement | None = None
    step: Difference | None = None  # step time over the baseline's
    drift: Drift | None = None
    has_reference: bool = False  # there is a baseline that ended well
    disturbed: list[Finding] = field(default_factory=list)
    _alike: dict[int, bool] = field(default_factory=dict)

    @property
    def own(self) -> Measurement | None:
        return self.result.measurement

    @cached_property
    def order(self) -> tuple[float, int, float]:
        """Of trials that cannot be told apart in time the smaller peak comes first, then the smaller change."""
        peak, m = self.peak_mib, self.own
        return math.inf if peak is None else peak, change_rank(self.result), math.inf if m is None else m.step_ms

    @classmethod
    def of(cls, candidate: TrialResult, baseline: TrialResult | None) -> Facts:
        """baseline: what the trial is compared with; itself, or None, where that is nothing."""
        facts, own = cls(candidate, deciding_peak_mib(candidate)), candidate.measurement
        facts.eval_loss = None if own is None else curves(own).held_out_mean
        predicted = (Outcome.ok.value, Outcome.over_budget.value)
        if not candidate.is_baseline and baseline is not None and baseline.outcome in predicted:
            facts._compare(baseline)
        if own is not None:
            facts.disturbed = disturbances(own, facts.base)
        return facts

    def _compare(self, baseline: TrialResult) -> None:
        own, base, base_peak = self.own, baseline.measurement, deciding_peak_mib(baseline)
        self.has_reference = baseline.outcome == Outcome.ok.value
        # Only like is compared with like: a measured peak less a predicted one is no saving.
        if (own is None) == (base is None) and self.peak_mib is not None and base_peak is not None:
            self.saved_mib = base_peak - self.peak_mib
        self.base = base
        if own is None or base is None:
            return
        self.drift = drift_of(base)
        self.step = difference(own, base, self.drift)
        if base.samples_per_s > 0:
            self.throughput_ratio = own.samples_per_s / base.samples_per_s
        self.quality = quality = quality_of(own, base)
        if quality is not None and quality.loss > quality.difference:
            self.eval_loss_ratio = quality.loss / (quality.loss - quality.difference)

    def same_time(self, other: Facts) -> bool:
        """Whether the step times of two that were timed cannot be told apart."""
        if self is other or self.own is None or other.own is None:
            return self is other
        if id(other) not in self._alike:
            self._alike[id(other)] = same_time(self.own, other.own, self.drift or other.drift)
        return self._alike[id(other)]

    @property
    def surest_samples_per_s(self) -> float | None:
        """What the throughput may be for all that its step times are sure to."""
        if (own := self.own) is None:
            return None
        shortest = known(own.step_ms_ci_low) or own.step_ms_low
        return own.samples_per_s * own.step_ms / shortest if shortest > 0 else None

    @property
    def surest_ratio(self) -> float | None:
        """What the throughput over the baseline's may be for all that step times and drift are sure to."""
        if self.step is None or self.step.low <= 0:
            return None
        drift = 0.0 if self.drift is None or self.drift.difference.none else abs(self.drift.difference.ratio - 1)
        return max(1 / self.step.low, (1 + drift) / self.step.ratio)

    def inside_noise(self, budget: BudgetConf) -> bool:
        """Whether the throughput floors are missed by less than what the step times are sure to."""
        fastest, ratio = self.surest_samples_per_s, self.surest_ratio
        if fastest is None:
            return False
        least, least_ratio = budget.min_samples_per_s, budget.min_throughput_ratio
        if least is not None and fastest < least:
            return False
        return least_ratio is None or ratio is None or ratio >= least_ratio

    @property
    def sure_from_mib(self) -> float | None:
        """The least cap under which enough is left for what a prediction does not count; None: it counts all."""
        p = self.result.prediction
        if self.own is not None or p is None or not p.unsure or self.peak_mib is None:
            return None
        return self.peak_mib / (1 - UNSURE)


def deciding_peak_mib(result: TrialResult) -> float | None:
    """MiB: the measured peak, or the predicted one where nothing was run; None where a run died before it was known."""
    if result.measurement is not None:
        return known(result.measurement.peak_allocated_mib)
    if result.prediction is not None and result.evidence == Evidence.predicted.value:
        return known(result.prediction.allocated_mib)
    return None


def memory_cap(budget: BudgetConf, capacity_mib: float | None) -> tuple[float | None, str]:
    """The cap on the peak in MiB and the key it comes from: the budget's, else the device's capacity, else none."""
    if budget.memory_mib is not None:
        return budget.memory_mib, "budget.memory_mib"
    return (capacity_mib, "device.capacity_mib") if capacity_mib is not None else (None, "")


# ---- one trial


@dataclass
class _Against:
    """What was found against a trial, by code, and the codes that stand against acceptance."""

    found: dict[str, Finding] = field(default_factory=dict)
    blocking: set[str] = field(default_factory=set)

    def add(self, code: str, blocks: bool = True, names: dict[str, str] | None = None, **numbers: float | None) -> None:
        self.found.setdefault(code, Finding(code, {k: v for k, v in numbers.items() if v is not None}, names or {}))
        if blocks:
            self.blocking.add(code)


def decide(facts: Facts, budget: BudgetConf, capacity_mib: float | None) -> Decision:
    """Judge one trial. capacity_mib: the device's memory, which is the cap where the budget names none."""
    result, (cap, source), against = facts.result, memory_cap(budget, capacity_mib), _Against()
    if result.outcome != Outcome.ok.value:
        against.add(outcome_reason(result))
    else:
        _check_equal(facts, against)
        _check_memory(facts, cap, source, against)
        _check_throughput(facts, budget, against)
        _check_quality(facts, budget, against)
        _check_saving(facts, budget, against)
        _check_evidence(facts, budget, against)
        if facts.own is not None and any(run.error for run in facts.own.runs):
            against.add("repeat_failed")
        if facts.disturbed:
            against.add("disturbed", blocks=False)
    reasons = [code for code in REASONS if code in against.found]
    case = Case(result, cap, facts.inside_noise(budget))
    verdict, advice = Verdict.accept, REASONS["disturbed"](case) if facts.disturbed else None
    if against.blocking:
        advice = _advice([code for code in reasons if code in against.blocking], case)
        verdict = Verdict.tune if advice.own else Verdict.reject
    return Decision(
        verdict=verdict.value, reasons=reasons, findings=[against.found[code] for code in reasons], advice=advice,
        peak_mib=facts.peak_mib, saved_mib=facts.saved_mib, throughput_ratio=facts.throughput_ratio,
        eval_loss_ratio=facts.eval_loss_ratio, cap_mib=cap, step=facts.step, quality=facts.quality,
        disturbed=facts.disturbed,
    )  # fmt: skip


def _advice(codes: list[str], case: Case) -> Advice:
    """What to do about `codes` (not empty, in their order)."""
    found = [REASONS[code](case) for code in codes]
    if MEMORY & set(codes) and SPEED & set(codes) and all(advice.own for advice in found):
        return Advice("too_large_and_too_slow", own=False)
    # What cannot be done within this strategy decides, whatever else could be.
    return next((advice for advice in found if not advice.own), found[0])


#: The reason that an error stands for, by its class, where the result has no code of its own.
_BY_ERROR = {
    "NothingOffloaded": "nothing_offloaded",
    "NothingRecomputed": "nothing_recomputed",
    "NotOnDevice": "bad_setting",
    "CannotPredict": "not_predictable",
    "NotEquivalent": "not_equivalent",
    "BadInput": "bad_setting",
}
_BY_OUTCOME = {
    Outcome.over_budget.value: "over_budget",
    Outcome.oom_device.value: "out_of_memory",
    Outcome.oom_host.value: "out_of_host_memory",
    Outcome.nan.value: "not_finite",
    Outcome.timeout.value: "timed_out",
    Outcome.crashed.value: "crashed",
}


def outcome_reason(result: TrialResult) -> str:
    """The code of an outcome other than ok. What the trial itself gave as its reason comes first."""
    if result.reason in REASONS:
        return result.reason
    invalid = result.outcome == Outcome.invalid.value
    by_error = _BY_ERROR.get(result.error.partition(":")[0])
    if by_error is not None and (invalid or result.outcome == Outcome.failed.value):
        return by_error
    if invalid:
        return "not_predictable" if result.mode == "predict" else "not_equivalent"
    return _BY_OUTCOME.get(result.outcome, "failed")


def _check_equal(facts: Facts, against: _Against) -> None:
    candidate, v = facts.result, facts.result.verification
    if candidate.is_baseline or candidate.mode == "predict":
        return
    if v is None:
        against.add("not_verified", (candidate.config.get("measure") or {}).get("verify") is not False)
    elif v.status in UNDECIDED:
        against.add("not_verified")
    elif not v.passed:
        against.add("not_equivalent")
    # On a CPU alone, whose sums repeat; and where the baseline's own repeats do.
    elif v.bit_equal and facts.own is not None and facts.base is not None and candidate.evidence == Evidence.cpu.value:
        _check_losses(facts.own, facts.base, against)


def _check_losses(own: Measurement, base: Measurement, against: _Against) -> None:
    """What was verified to the last bit and then trains to other losses was not verified for long enough."""
    expected: dict[int, list[list[float]]] = {}
    for run in base.runs:
        if not run.error:
            expected.setdefault(run.seed, []).append([*run.train_loss, *filter(None, [run.eval_loss])])
    for run in own.runs:
        losses = [*run.train_loss, *filter(None, [run.eval_loss])]
        alike = [] if run.error else [e for e in expected.get(run.seed, []) if len(e) == len(losses)]
        if alike and all(e == alike[0] for e in alike) and losses != alike[0]:
            step = next(i for i, (a, b) in enumerate(zip(losses, alike[0])) if a != b)
            against.add("not_equivalent", step=step + 1.0, loss=losses[step], expected_loss=alike[0][step])
            return


def _check_memory(facts: Facts, cap: float | None, source: str, against: _Against) -> None:
    peak, p = facts.peak_mib, facts.result.prediction if facts.own is None else None
    if peak is None:
        if cap is not None:
            against.add("memory_unknown")
    elif cap is not None and peak > cap:
        against.add("over_memory", names={"cap": source}, peak_mib=peak, cap_mib=cap)
    elif p is not None and not p.fits:
        against.add("over_memory", names={"device": p.device}, reserved_mib=p.reserved_mib, headroom_mib=p.headroom_mib)
    elif p is not None and p.unsure:
        left = [(cap - peak) / cap] if cap else []
        headroom = None
        if p.headroom_mib is not None and p.capacity_mib:
            left.append(headroom := p.headroom_mib / p.capacity_mib)
        if left:
            sure_from = facts.sure_from_mib
            little = cap is not None and sure_from is not None and cap < sure_from
            blocks = little or (headroom is not None and headroom < UNSURE)
            against.add("uncertain", blocks, left_ratio=min(left))


def _check_throughput(facts: Facts, budget: BudgetConf, against: _Against) -> None:
    least, least_ratio, m = budget.min_samples_per_s, budget.min_throughput_ratio, facts.own
    relative = least_ratio is not None and least_ratio > 0 and facts.has_reference
    if (m is None and (least is not None or relative)) or (relative and facts.throughput_ratio is None):
        against.add("throughput_unknown")
    if m is not None and least is not None and m.samples_per_s < least:
        against.add("below_throughput", samples_per_s=m.samples_per_s, floor_per_s=least)
    own_ratio = facts.throughput_ratio
    if relative and least_ratio is not None and own_ratio is not None and own_ratio < least_ratio:
        against.add("below_throughput", ratio=own_ratio, floor_ratio=least_ratio)


def _check_quality(facts: Facts, budget: BudgetConf, against: _Against) -> None:
    own, ratio = facts.eval_loss, facts.eval_loss_ratio
    most, most_ratio = budget.max_eval_loss, budget.max_eval_loss_ratio
    relative = most_ratio is not None and facts.has_reference
    if (own is None and (most is not None or relative)) or (relative and ratio is None):
        against.add("quality_unknown")
    if own is not None and most is not None and own > most:
        against.add("quality_lost", loss=own, gate_loss=most)
    if own is not None and relative and most_ratio is not None and ratio is not None and ratio > most_ratio:
        against.add("quality_lost", loss=own, ratio=ratio, gate_ratio=most_ratio)


def _check_saving(facts: Facts, budget: BudgetConf, against: _Against) -> None:
    least, saved = budget.min_saving_mib, facts.saved_mib
    if facts.result.is_baseline:
        saved = 0.0 if least is not None and least > 0 else None
    if saved is None:
        return
    # By default any saving counts, but a strategy that saves nothing must at least be faster.
    faster = facts.step is not None and facts.step.ratio < 1 and not facts.step.none
    if saved < least if least is not None else saved <= 0 and not faster:
        against.add("saving_too_small", saved_mib=saved, least_mib=least)


def _check_evidence(facts: Facts, budget: BudgetConf, against: _Against) -> None:
    evidence, least = facts.result.evidence, budget.min_evidence.value
    if budget.min_evidence is MinEvidence.auto:
        least = "cpu" if evidence == Evidence.cpu.value else "measured"
        least = "predicted" if facts.result.mode == "predict" else least
    if evidence == Evidence.smoke.value:
        against.add("evidence_too_short")
    elif STRENGTH.get(evidence, 0) < STRENGTH[least]:
        against.add("evidence_too_weak", names={"evidence": least})


# ---- all trials of a comparison


def conclude(results: list[TrialResult], budget: BudgetConf, capacity_mib: float | None) -> Comparison:
    """Judge every trial of one comparison and name the one to take (see `preferred_of`).

    The baseline is a candidate too: keeping it is an answer. Raises ValueError unless `results` are of one `fixed_id`.
    """
    base_index = baseline_index(results)
    baseline = None if base_index is None else results[base_index]
    facts = [Facts.of(r, baseline) for r in results]
    decisions, preferred = judge(facts, budget, capacity_mib)
    cap, cap_source = memory_cap(budget, capacity_mib)
    first = results[0]
    comparison = Comparison(
        fixed_id=first.fixed_id, workload=first.workload, device=first.device, mode=first.mode,
        evidence=_evidence(results), verdict=verdict_of(decisions),
        preferred=None if preferred is None else results[preferred].name, preferred_index=preferred,
        baseline=None if baseline is None else baseline.name, baseline_index=base_index,
        cap_mib=cap, cap_source=cap_source, decisions=decisions,
    )  # fmt: skip
    within = (r.outcome == Outcome.ok.value and set(d.reasons) <= ONLY_EVIDENCE for r, d in zip(results, decisions))
    comparison.feasible = any(within)
    if baseline is not None and baseline.measurement is not None:
        comparison.drift = drift_of(baseline.measurement)
    if preferred is None:
        comparison.nearest_index = min(range(len(results)), key=lambda i: _distance(results[i], decisions[i]))
    if preferred is not None and preferred == base_index and (peak := facts[preferred].peak_mib) is not None:
        # The advice for less memory is what would be concluded with less memory.
        cheapest = judge(facts, replace(budget, memory_mib=math.nextafter(peak, 0.0)), capacity_mib)[1]
        comparison.cheapest_index = cheapest
        comparison.cheapest_saving = None if cheapest is None else results[cheapest].name
    _advise(comparison, results)
    return comparison


def judge(
    facts: list[Facts], budget: BudgetConf, capacity_mib: float | None
) -> tuple[list[Decision], int | None]:
    """The decision on every trial, and the index of the one to take."""
    if len({f.result.fixed_id for f in facts}) != 1:
        raise ValueError("a comparison takes the trials of one fixed_id, at least one")
    decisions = [decide(f, budget, capacity_mib) for f in facts]
    accepted = [i for i, d in enumerate(decisions) if d.verdict == Verdict.accept.value]
    return decisions, preferred_of(facts, accepted)


def preferred_of(facts: list[Facts], accepted: list[int]) -> int | None:
    """Index of the one to take among the `accepted` indices; None of none.

    The baseline, where no other is faster beyond the noise. Else, of those that cannot be told apart in time from the
    fastest, the smallest peak, then the smallest change; and where others are faster than this by the median and no
    larger, the smallest of them: none that is accepted is both faster and smaller than the one to take. Where nothing
    was timed, the smallest change.
    """
    return choice_of(facts, accepted)[0] if accepted else None


def choice_of(facts: list[Facts], accepted: list[int]) -> tuple[int, ...]:
    """The one to take, and the others on which it rests: while they are all accepted, and no more are, it stays."""
    timed = {i: m.step_ms for i in accepted if (m := facts[i].own) is not None}
    if not timed:
        return (min(accepted, key=lambda i: _change_order(facts[i].result)),)
    fastest = min(timed, key=lambda i: timed[i])
    base = next((i for i in timed if facts[i].result.is_baseline), None)
    if base is not None and facts[base].same_time(facts[fastest]):
        return base, fastest

    order = lambda i: facts[i].order
    alike = next(i for i in sorted(timed, key=order) if facts[i].same_time(facts[fastest]))
    return min((i for i in timed if timed[i] <= timed[alike]), key=order), alike, fastest


def _change_order(result: TrialResult) -> tuple[float, ...]:
    """How much a trial changes, where no time is known: by kind, then by what it recomputes, moves and splits."""
    p = result.prediction
    recomputed, moved = (0.0, 0.0) if p is None else (p.recompute_flops_ratio, p.to_host_mib + p.from_host_mib)
    return change_rank(result), recomputed, moved, -micro_batch_size(strategy_of(result), batch_of(result))


def verdict_of(decisions: list[Decision]) -> str:
    return next(v.value for v in Verdict if v.value in {d.verdict for d in decisions})


def baseline_index(results: list[TrialResult]) -> int | None:
    """The baseline that ended well, else the first; None where there is none."""
    found = [i for i, r in enumerate(results) if r.is_baseline]
    return next((i for i in found if results[i].outcome == Outcome.ok.value), found[0] if found else None)


def _evidence(results: list[TrialResult]) -> str:
    """The weakest evidence among what ran; predicted where nothing did."""
    ran = [r.evidence for r in results if r.measurement is not None]
    if not ran:  # none came to an end, but running out of memory or to NaN is an observation, too
        ran = [r.evidence for r in results if r.mode == "measure" and r.outcome != Outcome.over_budget.value]
    return min(ran, key=lambda e: STRENGTH.get(e, 0)) if ran else Evidence.predicted.value


def _distance(result: TrialResult, decision: Decision) -> tuple[float, ...]:
    """How far from acceptance: tunable first, then the fewest and lightest misses of the budget, then the smallest."""
    order = list(REASONS)
    worst = min((order.index(code) for code in decision.reasons), default=len(order))
    misses = len(set(decision.reasons) - ONLY_EVIDENCE)
    over = max(0.0, (decision.peak_mib or 0.0) - (decision.cap_mib or math.inf))
    step = result.measurement.step_ms if result.measurement is not None else math.inf
    return float(decision.verdict != Verdict.tune.value), misses, -worst, over, step


def _advise(comparison: Comparison, results: list[TrialResult]) -> None:
    """What the other trials make of each trial's advice: what was run already, and what to use instead."""
    for result, decision in zip(results, comparison.decisions):
        if decision.advice is not None and decision.advice.overrides:
            decision.advice = replace(decision.advice, ran_as=_run_already(result, decision.advice, results))
    index, base = comparison.preferred_index, comparison.baseline_index
    if index is not None and base is not None and comparison.decisions[base].verdict != Verdict.accept.value:
        comparison.decisions[base].advice = Advice("use", names={"trial": results[index].name}, own=False)


def _run_already(result: TrialResult, advice: Advice, results: list[TrialResult]) -> str:
    """The name of the trial that did what an advice leads to; "" where none did."""
    wanted = changed(strategy_of(result), advice.overrides)
    if wanted is None:
        return ""
    others = ((r, replace(strategy_of(r), name=wanted.name)) for r in results if r is not result)
    return next((r.name for r, its in others if its == wanted), "")


# ---- which trials are compared, under which budget


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
    return from_dict(BudgetConf, {key: value for key, value in data.items() if value is not None})


def _difference(one: BudgetConf, budgets: list[BudgetConf]) -> str:
    """`budget.memory_mib=80`: the settings that are not equal in all `budgets`, as `one` has them."""
    said = []
    for key, value in vars(one).items():
        if any(vars(other)[key] != value for other in budgets):
            shown = f"{value:g}" if isinstance(value, float) else getattr(value, "name", value)
            said.append(f"budget.{key}={'null' if value is None else shown}")
    return " ".join(said)
