"""Why peaks and step times differ: each change taken apart, and what limits the trials of a comparison together."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from statistics import fmean

from sweep.config.strategy_names import accumulation_steps, batch_of, strategy_of
from sweep.decide.statistics import good_runs
from sweep.decide.verdict import STRENGTH
from sweep.format import known
from sweep.results import (
    Category,
    Change,
    Comparison,
    Decision,
    Evidence,
    Explanation,
    Finding,
    Measurement,
    Moment,
    Outcome,
    Part,
    Peak,
    Phase,
    Trace,
    TrialResult,
    WhatIf,
    part_of,
)

#: A residual up to this share of the total (or of the largest part) counts as closed.
CLOSES = 0.05
#: Two peaks closer than this are one height.
NEAR = 0.01
#: Activations below this share of a peak are none: what is left there is not theirs to lower.
NO_ACTIVATIONS = 0.02
#: Copies between host and device of which less than this share ran beside kernels are called not hidden.
HIDDEN = 0.5
#: A recomputation is about a forward; from here on it is called more than that.
LONG_RECOMPUTATION = 1.5
#: Standard error of a median over sqrt(n), in interquartile distances, for values that scatter normally:
#: sqrt(pi/2) * sigma / sqrt(n), and the quartiles of a normal distribution are 1.349 sigma apart.
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349
ACTIVATION, OPTIMIZER_TEMPORARY = Category.activation.value, part_of(Category.temporary.value, Phase.optimizer.value)


@dataclass
class Account:
    """The peak of a trial: the number that decides, and what the ledger says was alive there."""

    trial: str
    evidence: str
    mib: float
    peak: Peak
    total_by: str  # see Explanation.total_by

    @property
    def moment(self) -> Moment:
        return Moment(self.peak.phase, self.peak.operator, self.peak.module)


@dataclass
class Shared:
    """Trials whose peaks are equal and lie in the same moment, so that the same thing limits them."""

    trials: list[str]
    evidence: str  # the weakest of theirs
    mib: float  # the middle of their peaks
    lowest: Account
    with_baseline: bool  # the baseline is one of them
    lowered_activations: bool = False  # against the baseline's
    floor: bool = False  # no activation strategy goes below
    change: WhatIf | None = None  # of the workload: what would lead lowest from here
    change_for: str = ""  # the trial that it was predicted for


@dataclass
class Causes:
    """What is known of why the trials of a comparison differ. `trials` runs parallel to its results."""

    baseline: Account | None = None
    shared: list[Shared] = field(default_factory=list)  # the preferred trial's first, then by size
    trials: list[Explanation | None] = field(default_factory=list)  # None: the baseline, or nothing to compare with


def explain(results: list[TrialResult], comparison: Comparison) -> Causes:
    """Why each trial differs from the baseline, and what several have in common."""
    base, preferred = comparison.baseline_index, comparison.preferred_index
    found = Causes()
    for result, decision in zip(results, comparison.decisions):
        pair = None
        if base is not None and not result.is_baseline:
            pair = explain_pair(results[base], result, decision)
        found.trials.append(pair if pair is not None and (pair.peak or pair.time) is not None else None)
    accounts = {
        i: account
        for i, r in enumerate(results)
        if r.outcome in (Outcome.ok.value, Outcome.over_budget.value) and (account := account_of(r)) is not None
    }
    # Only like is compared with like: where some trials were measured, those only predicted say nothing of them.
    if any(results[i].measurement is not None for i in accounts):
        accounts = {i: a for i, a in accounts.items() if results[i].measurement is not None}
    first = next((i for i in accounts if results[i].is_baseline), None)
    found.baseline = None if first is None else accounts[first]
    found.shared = [_shared(group, accounts, first, results) for group in _groups(accounts, preferred)]
    return found


def change(unit: str, before: float, after: float, parts: list[Part], noise: float = 0.0) -> Change:
    """The change from `before` to `after` with its parts, largest first, and the residual that they leave.

    noise: what the two values may be off by chance, in `unit`. A residual inside of it is no open question.
    """
    total = after - before
    residual = total - sum(part.value for part in parts)
    size = max([abs(total), *(abs(part.value) for part in parts)])
    if abs(residual) <= 1e-6 * max(abs(before), abs(after)):  # sums of floats do not cancel exactly
        residual = 0.0
    closes = abs(residual) <= max(CLOSES * size, noise)
    ordered = sorted((p for p in parts if p.value or p.before), key=lambda p: -abs(p.value))
    return Change(unit, before, after, total, ordered, residual, closes)


# ---- peaks


def account_of(result: TrialResult) -> Account | None:
    """What is known of a trial's peak, the measured before the predicted; None where nothing is."""
    m, p = result.measurement, result.prediction
    if m is not None:
        peak, total, by = m.peak, m.peak_allocated_mib, "ledger" if m.evidence == Evidence.cpu.value else "allocator"
    elif p is not None:
        peak, total = p.peak, p.allocated_mib
        if peak is None and p.at_peak_mib:
            peak = Peak(sum(p.at_peak_mib.values()), p.peak_phase, p.peak_operator, "", dict(p.at_peak_mib))
        by = "ledger" if peak is not None and abs(total - peak.mib) < 1e-9 * max(1.0, peak.mib) else "replay"
    else:
        return None
    if peak is None or not peak.at_peak_mib:
        return None
    return Account(result.name, result.evidence, total, peak, by)


def parts_of(peak: Peak) -> dict[str, float]:
    """What was alive at a peak, in MiB by part (see `part_of`). Sums to what the ledger saw.

    Temporaries are told apart by the phase that made them; where that was not recorded, those of a peak in the
    optimizer are all taken to be the optimizer's.
    """
    found: dict[str, float] = {}
    for category, value in peak.at_peak_mib.items():
        by_phase = dict(peak.temporary_mib) if category == Category.temporary.value else {}
        rest = value - sum(by_phase.values())
        if not by_phase and peak.phase == Phase.optimizer.value:
            by_phase = {peak.phase: value}
        elif not by_phase or abs(rest) > 1e-9 * max(1.0, value):
            by_phase[""] = by_phase.get("", 0.0) + rest
        for phase, of_phase in by_phase.items():
            part = part_of(category, phase)
            found[part] = found.get(part, 0.0) + of_phase
    return found


def peak_change(before: Account, after: Account) -> Change:
    """The change of the peak by what was alive there.

    The total is the allocator's where there is one and the parts are the ledger's, so that a residual is what the
    allocator rounds up, leaves unsplit or holds beside the tensors; on a CPU the sum is exact.
    """
    old, new = parts_of(before.peak), parts_of(after.peak)
    both = [(name, old.get(name, 0.0), new.get(name, 0.0)) for name in dict.fromkeys([*old, *new])]
    return change("MiB", before.mib, after.mib, [Part(n, now - was, was, now) for n, was, now in both if now != was])


def same_moment(a: Peak, b: Peak) -> bool:
    """Whether two peaks lie at the same place of a step; like blocks (blocks.6, blocks.7) are one place."""
    return (a.phase, a.operator, alike(a.module)) == (b.phase, b.operator, alike(b.module))


def alike(module: str) -> str:
    """A module's name without its numbers: blocks.7.mlp as blocks.*.mlp."""
    return re.sub(r"\d+", "*", module)


def in_optimizer(peak: Peak) -> bool:
    return peak.phase == Phase.optimizer.value


# ---- two trials


def explain_pair(baseline: TrialResult, candidate: TrialResult, decision: Decision | None = None) -> Explanation:
    """Why `candidate`'s peak (MiB) and step time (ms) differ from `baseline`'s, measured or predicted alike.

    `peak` is None where the ledger saw one of the two not, or where one is measured and the other predicted; `time`
    where one of them was not timed. `findings` says so then. decision: on the candidate.
    """
    weakest = min((baseline, candidate), key=lambda r: STRENGTH.get(r.evidence, 0))
    found = Explanation(baseline.name, candidate.name, weakest.evidence)
    before, after = account_of(baseline), account_of(candidate)
    found.before, found.after = (None if a is None else a.moment for a in (before, after))
    if before is None or after is None:
        missing = [r for r, a in ((baseline, before), (candidate, after)) if a is None]
        why = "no_ledger" if any(_without_ledger(r) for r in missing) else "not_recorded"
        found.findings += [Finding("no_account", names={"trial": r.name, "why": why}) for r in missing]
    elif (baseline.measurement is None) != (candidate.measurement is None):
        found.findings.append(Finding("not_alike"))
    else:
        found.peak, found.total_by = peak_change(before, after), after.total_by
        found.findings += _peak_findings(before, after, found.peak)
    found.findings += _predicted_elsewhere(candidate)
    found.time = time_change(baseline, candidate)
    found.quiet = decision is not None and decision.step is not None and decision.step.none
    found.notes = _predicted_cost(candidate) if found.time is None else _trace_notes(baseline.trace, candidate.trace)
    if found.time is not None:
        found.findings += _time_findings(candidate, found.time, found.quiet)
    if decision is not None:
        found.findings += [Finding("disturbed", names={"trial": candidate.name})] if decision.disturbed else []
    return found


def _without_ledger(result: TrialResult) -> bool:
    return result.measurement is not None and (result.config.get("measure") or {}).get("ledger") is False


def _predicted_elsewhere(result: TrialResult) -> list[Finding]:
    """Where the ledger found the peak of a measured trial at another place than its prediction did."""
    m, p = result.measurement, result.prediction
    if m is None or m.peak is None or p is None or p.peak is None or m.peak.phase == p.peak.phase:
        return []
    return [Finding("predicted_elsewhere", names={"predicted": p.peak.phase, "found": m.peak.phase})]


def _peak_findings(before: Account, after: Account, found: Change) -> list[Finding]:
    findings = []
    if not found.closes:
        numbers = {"residual_mib": abs(found.residual), "total_mib": found.total}
        findings.append(Finding("peak_not_closed", numbers))
    gone = -next((p.value for p in found.parts if p.name == ACTIVATION), 0.0)
    if gone > 0 and in_optimizer(after.peak) and not in_optimizer(before.peak) and -found.total < gone / 2:
        findings.append(Finding("optimizer_peak_now", {"gone_mib": gone, "saved_mib": max(0.0, -found.total)}))
    return findings


# ---- times: the parts are recompute, transfer, micro_steps, passes, launches, data, optimizer and outside


def time_change(baseline: TrialResult, candidate: TrialResult) -> Change | None:
    """The change of the median step time by phase; None where one of the two was not timed.

    A phase's time is its own, without the phases inside of it. The total is that of the medians, which are what is
    compared everywhere else; the parts are those of the typical step (see `Typical`), and the residual is what the
    two differ by.
    """
    before, after = baseline.measurement, candidate.measurement
    if before is None or after is None:
        return None
    old, new = Typical.of(before), Typical.of(after)
    if not old.phases_ms or not new.phases_ms:
        return None
    parts = _by_phase(baseline, candidate, old, new)
    return change("ms", before.step_ms, after.step_ms, parts, noise_ms(before, after))


@dataclass
class Typical:
    """The phases of a trial's typical step.

    The mean over the middle half of all timed steps, by their length: it is as little moved by outliers as the median
    is, and unlike medians of phases, means of the same steps add up. Where the phases of each step were not kept, the
    medians of the phases.
    """

    phases_ms: dict[str, float]
    outside_ms: float | None  # None: not known

    @classmethod
    def of(cls, m: Measurement) -> Typical:
        runs = good_runs(m)
        if not runs or any(not run.phase_times_ms for run in runs):
            return cls(m.phases_ms, m.outside_ms)
        steps = [
            (step_ms, {phase: times[i] for phase, times in run.phase_times_ms.items()})
            for run in runs
            for i, step_ms in enumerate(run.step_times_ms)
        ]
        cut = len(steps) // 4
        middle = sorted(steps, key=lambda step: step[0])[cut : len(steps) - cut]
        names = dict.fromkeys(name for _, phases in middle for name in phases)
        phases_ms = {name: fmean(phases.get(name, 0.0) for _, phases in middle) for name in names}
        return cls(phases_ms, fmean(step_ms - sum(phases.values()) for step_ms, phases in middle))


def _by_phase(baseline: TrialResult, candidate: TrialResult, old: Typical, new: Typical) -> list[Part]:
    left = dict.fromkeys([*old.phases_ms, *new.phases_ms])

    def part(name: str, *phases: str) -> Part:
        was, now = (sum(step.phases_ms.get(p, 0.0) for p in phases) for step in (old, new))
        for phase in phases:
            left.pop(phase)
        return Part(name, now - was, was, now)

    parts = [part(phase, phase) for phase in (Phase.recompute.value, Phase.transfer.value) if phase in left]
    passes = [p for p in (Phase.forward.value, Phase.backward.value) if p in left]
    if micro_steps(candidate) > micro_steps(baseline):
        parts.append(part("micro_steps", *passes, *(p for p in [Phase.data.value] if p in left)))
    elif passes:
        own, waited = part("passes", *passes), _launches(baseline.trace, candidate.trace, old, new)
        if waited is not None:
            own = Part("passes", own.value - waited.value, own.before - waited.before, own.after - waited.after)
            parts.append(waited)
        parts.append(own)
    parts += [part(phase, phase) for phase in list(left)]
    if old.outside_ms is not None and new.outside_ms is not None:
        parts.append(Part("outside", new.outside_ms - old.outside_ms, old.outside_ms, new.outside_ms))
    return parts


def _launches(before: Trace | None, after: Trace | None, old: Typical, new: Typical) -> Part | None:
    """Time in forward and backward when the device ran no kernel of theirs; None without traces of a GPU.

    The profiler slows the host down and not the kernels, so the kernels' time is taken from the trace and the phases'
    from the timed steps.
    """
    if before is None or after is None or not before.device_ms or not after.device_ms:
        return None
    was, now = (
        sum(max(0.0, step.phases_ms.get(p, 0.0) - trace.device_ms.get(p, 0.0)) for p in ("forward", "backward"))
        for trace, step in ((before, old), (after, new))
    )
    return Part("launches", now - was, was, now)


def micro_steps(result: TrialResult) -> int:
    """Micro-batches per optimizer step."""
    return accumulation_steps(strategy_of(result), batch_of(result))


def noise_ms(old: Measurement, new: Measurement) -> float:
    """What the difference of two medians may be off by chance (95 %), in ms."""
    return math.hypot(_half_interval(old), _half_interval(new))


def _half_interval(m: Measurement) -> float:
    low, high = known(m.step_ms_ci_low), known(m.step_ms_ci_high)
    if low is not None and high is not None:
        return (high - low) / 2
    steps = max(1, len(m.step_times_ms) or m.steps * m.repeats)
    return 1.96 * MEDIAN_ERROR * (m.step_ms_high - m.step_ms_low) / math.sqrt(steps)


def _trace_notes(before: Trace | None, after: Trace | None) -> list[Finding]:
    if after is None:
        return []
    notes = []
    if after.copy_ms:
        numbers = {"copy_ms": after.copy_ms, "hidden_ratio": (after.copy_hidden_ms or 0.0) / after.copy_ms}
        notes.append(Finding("copies", numbers))
    elif after.evidence == Evidence.cpu.value and {"copy to host", "copy from host"} & set(after.ranges_ms):
        notes.append(Finding("copies_on_cpu"))
    if before is not None and before.operators and after.operators > 1.05 * before.operators:
        numbers = {"operators": after.operators, "before": before.operators, "micro_steps": after.micro_steps}
        notes.append(Finding("operators", {k: float(v) for k, v in numbers.items()}))
    return notes


def _predicted_cost(result: TrialResult) -> list[Finding]:
    """What can be said of the time of a trial that was not run: shares and bounds, no times."""
    p = result.prediction
    if result.measurement is not None or p is None:
        return []
    numbers = {
        "recompute_ratio": p.recompute_flops_ratio,
        "moved_mib": p.to_host_mib + p.from_host_mib,
        "transfer_ms": p.transfer_round_trip_ms or 0.0,
        "micro_steps": float(micro_steps(result)),
    }
    return [Finding("predicted_cost", numbers)]


def _time_findings(candidate: TrialResult, found: Change, quiet: bool) -> list[Finding]:
    findings, new, trace = [], candidate.measurement, candidate.trace
    assert new is not None
    if not found.closes and not quiet:
        findings.append(Finding("time_not_closed", {"residual_ms": abs(found.residual), "total_ms": found.total}))
    recompute, forward = (new.phases_ms.get(p, 0.0) for p in (Phase.recompute.value, Phase.forward.value))
    if recompute > LONG_RECOMPUTATION * forward > 0:
        findings.append(Finding("long_recomputation", {"recompute_ms": recompute, "forward_ms": forward}))
    if found.total < 0 and not quiet and (recompute > 0 or new.phases_ms.get(Phase.transfer.value, 0.0) > 0):
        findings.append(Finding("faster_with_more"))
    if trace is not None and trace.copy_ms and (trace.copy_hidden_ms or 0.0) < HIDDEN * trace.copy_ms:
        findings.append(Finding("copies_not_hidden", {"hidden_ratio": (trace.copy_hidden_ms or 0.0) / trace.copy_ms}))
    return findings


# ---- what limits several trials


def _groups(accounts: dict[int, Account], preferred: int | None) -> list[list[int]]:
    """Trials whose peaks are equal within NEAR and lie in the same moment; the preferred one's first, then by size.

    A trial that stands alone is no group, unless its peak is the optimizer's.
    """
    groups: list[list[int]] = []
    for i in sorted(accounts, key=lambda i: accounts[i].mib):
        own = accounts[i]
        first = ((g, accounts[g[0]]) for g in groups)
        fits = (g for g, a in first if same_moment(a.peak, own.peak) and own.mib <= (1 + NEAR) * a.mib)
        group = next(fits, None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    kept = [sorted(g) for g in groups if len(g) > 1 or in_optimizer(accounts[g[0]].peak)]
    return sorted(kept, key=lambda g: (preferred not in g, min(accounts[i].mib for i in g)))


def _shared(group: list[int], accounts: dict[int, Account], base: int | None, results: list[TrialResult]) -> Shared:
    own = [accounts[i] for i in group]
    lowest = min(own, key=lambda a: a.mib)
    found = Shared(
        trials=[a.trial for a in own],
        evidence=min((a.evidence for a in own), key=lambda e: STRENGTH.get(e, 0)),
        mib=sorted(a.mib for a in own)[len(own) // 2],
        lowest=lowest,
        with_baseline=base in group,
    )
    parts = parts_of(lowest.peak)
    if base is not None:
        found.lowered_activations = parts.get(ACTIVATION, 0.0) < parts_of(accounts[base].peak).get(ACTIVATION, 0.0)
    if in_optimizer(lowest.peak):
        # No activations are left there, and every trial is as high there.
        heights = [a.peak.phase_peaks_mib.get(lowest.peak.phase) for a in accounts.values()]
        as_high = all(h is not None and abs(h - lowest.peak.mib) <= NEAR * lowest.peak.mib for h in heights)
        found.floor = as_high and parts.get(ACTIVATION, 0.0) <= NO_ACTIVATIONS * lowest.peak.mib
        predicted = [(i, p) for i in group if (p := results[i].prediction) is not None]
        changes = [(w, results[i].name) for i, p in predicted for w in p.what_if if w.saved_mib > 0]
        if changes:
            found.change, found.change_for = min(changes, key=lambda pair: pair[0].allocated_mib)
    return found
