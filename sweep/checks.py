"""What a trial is judged by: its numbers beside the baseline's, and each check against the budget.

A check adds a reason code with its numbers in words; `sweep.decide` makes the verdict from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sweep.certainty import difference, disturbances, drift_of, repeats_words
from sweep.findings import Difference, Drift, Quality
from sweep.quality import curves, quality_of
from sweep.reasons import REASONS
from sweep.results import Evidence, Measurement, Outcome, TrialResult, Verification
from sweep.schema import BudgetConf, MinEvidence
from sweep.words import EVIDENCE_SHORT, count, error, known, loss, mib, number, percent, ratio

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
