"""What limits a whole comparison: which trials stop at the same peak, why none goes lower, and what each pays."""

from __future__ import annotations

from dataclasses import dataclass

from sweep.attribution_peak import (
    NAMES,
    NEAR,
    Account,
    account_of,
    optimizer_temporaries,
    parts_of,
    shares,
)
from sweep.attribution_time import FORWARD_BACKWARD, inside_noise, micro_steps, time_change
from sweep.attribution_words import (
    alike,
    in_optimizer,
    moment,
    moment_of,
    same_moment,
    signed,
    temporaries_of_optimizer,
    together,
)
from sweep.checks import STRENGTH
from sweep.findings import WhatIf
from sweep.results import Category, Evidence, Outcome, Peak, TrialResult
from sweep.words import EVIDENCE_SHORT, mib, ms, percent

ACTIVATIONS = NAMES[Category.activation.value]
#: Activations below this share of a peak are none: what is left there is not theirs to lower.
NO_ACTIVATIONS = 0.02
#: A list of temporaries within this share of the parameters' size is called one list of them.
ONE_LIST = 0.1


@dataclass
class _Trial:
    result: TrialResult
    account: Account

    @property
    def peak(self) -> Peak:
        return self.account.peak

    @property
    def total(self) -> float:
        return self.account.total_mib


def explain_comparison(results: list[TrialResult], preferred_index: int | None) -> list[str]:
    """Sentences over the trials of one comparison, most important first; [] where nothing is known of their peaks.

    preferred_index: the trial whose limits come first; None: the baseline's order.
    """
    known = [_Trial(r, a) for r in results if r.outcome in _HAVE_A_PEAK and (a := account_of(r)) is not None]
    # Only like is compared with like: where some trials were measured, those only predicted say nothing of them.
    if any(t.result.measurement is not None for t in known):
        known = [t for t in known if t.result.measurement is not None]
    baseline = next((t for t in known if t.result.is_baseline), None)
    if not known:
        return []
    preferred = None if preferred_index is None else results[preferred_index]
    words = [_of_baseline(baseline)] if baseline is not None else []
    for group in _groups(known, preferred):
        words += _of_group(group, baseline, known)
    words += _of_times(results)
    return words


_HAVE_A_PEAK = (Outcome.ok.value, Outcome.over_budget.value)


def _of_baseline(baseline: _Trial) -> str:
    where = EVIDENCE_SHORT.get(baseline.result.evidence, baseline.result.evidence)
    return (
        f"The peak of {baseline.result.name}, {mib(baseline.total)} ({where}), lies in {moment(baseline.peak)}: "
        f"{shares(baseline.peak)}."
    )


def _groups(known: list[_Trial], preferred: TrialResult | None) -> list[list[_Trial]]:
    """Trials whose peaks are equal within NEAR and lie in the same moment; the preferred one's first, then by size.

    A trial that stands alone is no group, unless its peak is the optimizer's.
    """
    groups: list[list[_Trial]] = []
    for trial in sorted(known, key=lambda t: t.total):
        fits = (g for g in groups if same_moment(g[0].peak, trial.peak) and trial.total <= (1 + NEAR) * g[0].total)
        group = next(fits, None)
        if group is None:
            groups.append([trial])
        else:
            group.append(trial)
    groups = [[t for t in known if t in group] for group in groups]  # in the order of the comparison
    kept = [g for g in groups if len(g) > 1 or in_optimizer(g[0].peak)]
    return sorted(kept, key=lambda g: (all(t.result is not preferred for t in g), min(t.total for t in g)))


def _of_group(group: list[_Trial], baseline: _Trial | None, known: list[_Trial]) -> list[str]:
    if baseline is not None and baseline in group:
        others = [t for t in group if t is not baseline]
        if in_optimizer(baseline.peak):
            return _in_optimizer(group, baseline, known)
        return [_as_baseline(others)] if others else []
    return _in_optimizer(group, baseline, known) if in_optimizer(group[0].peak) else [_elsewhere(group)]


def _as_baseline(others: list[_Trial]) -> str:
    names, plural = together([t.result.name for t in others]), len(others) > 1
    undivided = [t for t in others if t.result.strategy == "micro_batch" and micro_steps(t.result) == 1]
    why = " (the micro-batch is the whole global batch)" if undivided and len(undivided) == len(others) else ""
    return f"{names} {'change' if plural else 'changes'} nothing at the peak: as high and in the same moment{why}."


def _elsewhere(group: list[_Trial]) -> str:
    """Trials that stop together in forward or backward."""
    peak = min(group, key=lambda t: t.total).peak
    where = moment_of(peak.phase, peak.operator, alike(peak.module))
    return f"{_stop(group)}: the peak of {_both(group)} lies in {where}; left there are {shares(peak)}."


def _in_optimizer(group: list[_Trial], baseline: _Trial | None, known: list[_Trial]) -> list[str]:
    lowest = min(group, key=lambda t: t.total)
    peak, temporaries = lowest.peak, optimizer_temporaries(lowest.peak)
    where = f"{temporaries_of_optimizer(peak)}, {mib(temporaries)}" if temporaries else f"{moment(peak)}"
    if baseline is not None and baseline in group:
        words = [f"{_stop(group)}: already the baseline's peak lies in {where}."]
    else:
        longer = "no longer in the activations" if _lowered_activations(baseline, lowest) else "not in the activations"
        words = [f"{_stop(group)}: with {_them(group)} the peak lies in {where}, {longer}."]
    words += _floor(lowest, known)
    best = _best_what_if(group)
    if best is not None:
        words.append(_lower_by(*best, parts_of(best[0].peak).get(NAMES[Category.parameter.value], 0.0)))
    return words


def _floor(lowest: _Trial, known: list[_Trial]) -> list[str]:
    """That no activation strategy goes below: where no activations are left there, and every trial is as high there."""
    peak = lowest.peak
    parts = parts_of(peak)
    if parts.get(ACTIVATIONS, 0.0) > NO_ACTIVATIONS * peak.mib:
        return []
    heights = [t.peak.phase_peaks_mib.get(peak.phase) for t in known]
    everywhere = all(h is not None and abs(h - peak.mib) <= NEAR * peak.mib for h in heights)
    if not everywhere:
        return []
    left = sorted(((v, n) for n, v in parts.items() if v > NO_ACTIVATIONS * peak.mib), reverse=True)
    listed = together([f"{mib(v)} {n}" for v, n in left])
    return [
        "No activation strategy goes below this: no activations are left at that moment, and the "
        f"{listed} are there in the optimizer's step of every trial."
    ]


def _best_what_if(group: list[_Trial]) -> tuple[_Trial, WhatIf] | None:
    """The change that leads lowest from this peak, and the trial that it was predicted for."""
    found = [
        (t, w)
        for t in group
        for w in (t.result.prediction.what_if if t.result.prediction is not None else [])
        if w.saved_mib > 0
    ]
    return min(found, key=lambda pair: pair[1].allocated_mib, default=None)


def _lower_by(trial: _Trial, change: WhatIf, parameters: float) -> str:
    fused = change.override.endswith("implementation=fused")
    who = f"A fused optimizer ({change.override})" if fused else f"Beside the strategies, {change.override}"
    off_phase = change.phase_saved_mib or change.saved_mib
    size = ""
    if fused and parameters and abs(off_phase - parameters) <= ONE_LIST * parameters:
        size = f", about one list of the parameters' size ({mib(parameters)})"
    elif fused and parameters:
        size = f" (the parameters take {mib(parameters)})"
    start = f"{who} is predicted to lower "
    to = f"to {mib(change.allocated_mib)}"
    if off_phase - change.saved_mib <= ONE_LIST * off_phase:
        return f"{start}the peak of {trial.result.name} by {mib(change.saved_mib)}{size}, {to}."
    at = moment_of(change.peak_phase, change.peak_operator)
    return (
        f"{start}the optimizer's step by {mib(off_phase)}{size}; the peak of {trial.result.name} then falls by "
        f"{mib(change.saved_mib)} {to} and lies in {at}."
    )


def _stop(group: list[_Trial]) -> str:
    """`checkpoint, offload and hybrid all stop near 9450 MiB`."""
    totals = [t.total for t in group]
    middle = sorted(totals)[len(totals) // 2]
    names = together([t.result.name for t in group])
    how = EVIDENCE_SHORT.get(_weakest(group), "")
    if len(group) == 1:
        return f"{names} stops at {mib(middle)} ({how})"
    return f"{names} {'both' if len(group) == 2 else 'all'} stop near {mib(middle)} ({how})"


def _weakest(group: list[_Trial]) -> str:
    return min((t.result.evidence for t in group), key=lambda e: STRENGTH.get(e, 0), default=Evidence.predicted.value)


def _them(group: list[_Trial]) -> str:
    return "it" if len(group) == 1 else "each of them"


def _both(group: list[_Trial]) -> str:
    return "both" if len(group) == 2 else "all"


def _lowered_activations(baseline: _Trial | None, trial: _Trial) -> bool:
    if baseline is None:
        return False
    before, after = parts_of(baseline.peak).get(ACTIVATIONS, 0.0), parts_of(trial.peak).get(ACTIVATIONS, 0.0)
    return after < before


def _of_times(results: list[TrialResult]) -> list[str]:
    """What each measured trial pays per step, and for what most."""
    baseline = next((r for r in results if r.is_baseline and r.measurement is not None), None)
    if baseline is None:
        return []
    said = []
    for result in results:
        found = None if result.is_baseline else time_change(baseline, result)
        if found is None:
            continue
        if inside_noise(baseline, result):
            said.append(f"{result.name} nothing beyond the noise")
            continue
        share = percent(found.total / found.before, sign=True) if found.before else ""
        pays = f"{result.name} {signed(found.total, found.unit)} ({share})"
        largest = max((p for p in found.parts if p.value * found.total > 0), key=lambda p: abs(p.value), default=None)
        if largest is not None and largest.name != FORWARD_BACKWARD:
            pays += f", {ms(largest.value)} of it {largest.name}"
        said.append(pays)
    if not said or baseline.measurement is None:
        return []
    where = EVIDENCE_SHORT.get(baseline.evidence, baseline.evidence)
    step = ms(baseline.measurement.step_ms)
    return [f"Step time against the baseline's {step} ({where}): {'; '.join(said)}."]
