"""What limits a whole comparison: which trials stop at the same peak, why none goes lower, and what each pays."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sweep.config.strategy_names import Knobs
from sweep.decide.statistics import difference, drift_of, good_runs
from sweep.decide.verdict import STRENGTH
from sweep.format import EVIDENCE_SHORT, count, known, mib, ms, percent, ratio
from sweep.results import (
    Category,
    Change,
    Evidence,
    Explanation,
    Measurement,
    Outcome,
    Part,
    Peak,
    Phase,
    Trace,
    TrialResult,
    WhatIf,
)

#: A residual up to this share of the total (or of the largest part) counts as closed.
CLOSES = 0.05
#: Parts below this share of the largest one are not worth a sentence.
WORTH_SAYING = 0.02


def change(unit: str, before: float, after: float, parts: list[Part], noise: float = 0.0) -> Change:
    """The change from `before` to `after` with its parts, largest first, and the residual that they leave.

    noise: what the two values may be off by chance, in `unit`. A residual inside of it is no open question.
    """
    total = after - before
    residual = total - sum(part.value for part in parts)
    size = max([abs(total), *(abs(part.value) for part in parts)])
    rounding = 1e-6 * max(abs(before), abs(after))  # sums of floats do not cancel exactly
    if abs(residual) <= rounding:
        residual = 0.0
    closes = abs(residual) <= max(CLOSES * size, noise)
    ordered = sorted((p for p in parts if p.value or p.words), key=lambda p: -abs(p.value))
    return Change(unit, before, after, total, ordered, residual, closes)


#: A phase within a sentence, where its name alone is not one.
PHASES = {
    "": "no phase",
    Phase.data.value: "the data phase",
    Phase.optimizer.value: "the optimizer's step",
    Phase.recompute.value: "recomputation",
    Phase.transfer.value: "a transfer",
}


def moment(peak: Peak, *, module: bool = True) -> str:
    """Where a peak lies: `backward (mm of head)`."""
    return moment_of(peak.phase, peak.operator, peak.module if module else "")


def moment_of(phase: str, operator: str, module: str = "") -> str:
    words = PHASES.get(phase, phase)
    if operator:
        words += f" ({short(operator)}{f' of {module}' if module else ''})"
    return words


def short(operator: str) -> str:
    """`aten.mm.default` as `mm`."""
    return operator.removeprefix("aten.").removesuffix(".default")


def same_moment(a: Peak, b: Peak) -> bool:
    """Whether two peaks lie at the same place of a step; like blocks (blocks.6, blocks.7) are one place."""
    return (a.phase, a.operator, alike(a.module)) == (b.phase, b.operator, alike(b.module))


def alike(module: str) -> str:
    """A module's name without its numbers: blocks.7.mlp as blocks.*.mlp."""
    return re.sub(r"\d+", "*", module)


def temporaries_of_optimizer(peak: Peak) -> str:
    """`the optimizer's foreach temporaries (aten._foreach_sqrt)`."""
    kind = "foreach temporaries" if "_foreach_" in peak.operator else "temporaries"
    return f"the optimizer's {kind}" + (f" ({peak.operator})" if peak.operator else "")


def together(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def in_unit(value: float, unit: str) -> str:
    return mib(value) if unit == "MiB" else ms(value)


def listed(found: Change) -> str:
    """`activations -205.9 MiB, recomputed activations +30.2 MiB`: the parts that are worth saying, largest first."""
    parts = [p for p in found.parts if abs(p.value) > small(found)]
    return ", ".join(f"{p.name} {signed(p.value, found.unit)}" for p in parts)


def signed(value: float, unit: str) -> str:
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{in_unit(abs(value), unit)}"


def small(found: Change) -> float:
    """The size below which a part of this change is not worth a sentence."""
    return WORTH_SAYING * max([abs(found.total), *(abs(p.value) for p in found.parts)])


def residual_share(found: Change) -> str:
    """`12.0 MiB (3 % of the change)`."""
    share = f" ({percent(abs(found.residual / found.total))} of the change)" if found.total else ""
    return f"{in_unit(abs(found.residual), found.unit)}{share}"


def verb(stem: str, evidence: str) -> str:
    """`lowers`, or where nothing was run `is predicted to lower`."""
    return f"is predicted to {stem}" if evidence == Evidence.predicted.value else f"{stem}s"


def in_optimizer(peak: Peak) -> bool:
    return peak.phase == Phase.optimizer.value


__all__ = ["explain_comparison", "explain_pair"]

NOT_KNOWN = "not known"


def explain_pair(baseline: TrialResult, candidate: TrialResult) -> Explanation:
    """Why `candidate`'s peak (MiB) and step time (ms) differ from `baseline`'s, measured or predicted alike.

    `peak` is None where the ledger saw one of the two not, or where one is measured and the other predicted; `time`
    where one of them was not timed. `findings` says so then.
    """
    weakest = min((baseline, candidate), key=lambda r: STRENGTH.get(r.evidence, 0))
    before, after = account_of(baseline), account_of(candidate)
    found = Explanation(
        baseline=baseline.name,
        candidate=candidate.name,
        evidence=weakest.evidence,
        moment_before=NOT_KNOWN if before is None else moment(before.peak),
        moment_after=NOT_KNOWN if after is None else moment(after.peak),
    )
    alike = (baseline.measurement is None) == (candidate.measurement is None)
    if before is None or after is None:
        of = " and ".join(r.name for r, a in ((baseline, before), (candidate, after)) if a is None)
        found.findings.append(
            f"what was alive at the peak of {of} is not known: {_why_no_account(baseline, candidate)}"
        )
    elif not alike:
        found.findings.append("one of the two was measured and the other only predicted: their peaks are not compared")
    else:
        found.peak = peak_change(before, after)
        found.words += peak_words(candidate.name, found.evidence, before, after, found.peak)
        found.findings += peak_findings(before, after, found.peak) + _prediction_findings(candidate)
    found.time = time_change(baseline, candidate)
    if found.time is not None:
        found.words += time_words(baseline, candidate, found.time)
        found.findings += time_findings(baseline, candidate, found.time)
    else:
        found.words += predicted_words(candidate)
    return found


def _why_no_account(*results: TrialResult) -> str:
    if all(r.measurement is None and r.prediction is None for r in results):
        return "neither was measured or predicted"
    if any(r.config.get("measure", {}).get("ledger") is False and r.measurement is not None for r in results):
        return "measure.ledger=false"
    return "it was not recorded"


def _prediction_findings(result: TrialResult) -> list[str]:
    """Where the ledger found the peak of a measured trial at another place than its prediction did."""
    m, p = result.measurement, result.prediction
    if m is None or m.peak is None or p is None or p.peak is None or m.peak.phase == p.peak.phase:
        return []
    return [f"the peak of {result.name} was predicted in {moment(p.peak)} and found in {moment(m.peak)}"]


NAMES = {
    Category.activation.value: "activations",
    Category.gradient.value: "gradients",
    Category.optimizer_state.value: "optimizer state",
    Category.parameter.value: "parameters",
    Category.buffer.value: "buffers",
    Category.input.value: "inputs",
}
TEMPORARIES = "temporaries"
OPTIMIZER_TEMPORARIES = "optimizer temporaries"
#: Temporaries that are known by the phase they came in.
BY_PHASE = {
    Phase.recompute.value: "recomputed activations",
    Phase.transfer.value: "tensors brought back",
    Phase.optimizer.value: OPTIMIZER_TEMPORARIES,
}
#: Two peaks closer than this are one height.
NEAR = 0.01


@dataclass
class Account:
    """The peak of a trial: the number that decides, and what the ledger says was alive there."""

    total_mib: float
    peak: Peak
    source: str  # whose number the total is, in words

    @property
    def by_allocator(self) -> bool:
        """Whether the total is the allocator's and only its parts are the ledger's."""
        return self.source != LEDGER


LEDGER = "the ledger's"


def account_of(result: TrialResult) -> Account | None:
    """What is known of a trial's peak, the measured before the predicted; None where nothing is."""
    m, p = result.measurement, result.prediction
    if m is not None:
        if m.peak is None or not m.peak.at_peak_mib:
            return None
        source = LEDGER if m.evidence == Evidence.cpu.value else "CUDA's allocator's"
        return Account(m.peak_allocated_mib, m.peak, source)
    if p is None:
        return None
    peak = p.peak
    if peak is None and p.at_peak_mib:
        peak = Peak(sum(p.at_peak_mib.values()), p.peak_phase, p.peak_operator, "", dict(p.at_peak_mib))
    if peak is None or not peak.at_peak_mib:
        return None
    exact = abs(p.allocated_mib - peak.mib) < 1e-9 * max(1.0, peak.mib)
    return Account(p.allocated_mib, peak, LEDGER if exact else "the replayed allocator's")


def parts_of(peak: Peak) -> dict[str, float]:
    """What was alive at a peak, by the name of its part, in MiB. Sums to what the ledger saw.

    Temporaries are told apart by the phase that made them; where that was not recorded, those of a peak in the
    optimizer are all taken to be the optimizer's.
    """
    found: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        found[name] = found.get(name, 0.0) + value

    for category, value in peak.at_peak_mib.items():
        if category != Category.temporary.value:
            add(NAMES.get(category, category), value)
        elif peak.temporary_mib:
            for phase, of_phase in peak.temporary_mib.items():
                add(BY_PHASE.get(phase, TEMPORARIES), of_phase)
            # Whatever the phases leave, so that the sum stays what it was.
            rest = value - sum(peak.temporary_mib.values())
            if abs(rest) > 1e-9 * max(1.0, value):
                add(TEMPORARIES, rest)
        else:
            add(OPTIMIZER_TEMPORARIES if in_optimizer(peak) else TEMPORARIES, value)
    return found


def shares(peak: Peak, most: int = 3) -> str:
    """`39 % optimizer state, 33 % activations`: what fills a peak, largest first."""
    found = parts_of(peak)
    total = sum(found.values()) or 1.0
    ordered = sorted(found.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{percent(value / total)} {name}" for name, value in ordered if value > 0)


def peak_change(before: Account, after: Account) -> Change:
    """The change of the peak by what was alive there.

    The total is the allocator's where there is one and the parts are the ledger's, so that a residual is what the
    allocator rounds up, leaves unsplit or holds beside the tensors; on a CPU the sum is exact.
    """
    old, new = parts_of(before.peak), parts_of(after.peak)
    parts = []
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name, 0.0), new.get(name, 0.0)
        if now != was:
            parts.append(Part(name, now - was, f"{mib(was)} at the old peak, {mib(now)} at the new one"))
    return change("MiB", before.total_mib, after.total_mib, parts)


def peak_words(name: str, evidence: str, before: Account, after: Account, found: Change) -> list[str]:
    """Whole sentences, most important first."""
    predicted = evidence == Evidence.predicted.value  # the verb says it then
    where = "" if predicted else f" ({EVIDENCE_SHORT.get(evidence, evidence)})"
    was, now = mib(found.before), mib(found.after)
    unchanged = abs(found.total) <= 1e-3 * max(found.before, 1e-9)
    if unchanged:
        words = [f"{name} {verb('leave', evidence)} the peak where it is, at {now}{where}."]
    else:
        share = percent(abs(found.total) / found.before) if found.before else "all"
        stem = "lower" if found.total < 0 else "raise"
        by = mib(abs(found.total))
        words = [f"{name} {verb(stem, evidence)} the peak by {by} ({share}), from {was} to {now}{where}."]
    words.append(_moved(before.peak, after.peak))
    if listed(found) and not unchanged:
        words.append(f"By what is alive there: {listed(found)}.")
    elif listed(found) and not same_moment(before.peak, after.peak):
        words.append(f"As high as before, but of other things: {listed(found)}.")
    if after.by_allocator and found.residual:
        words.append(
            f"{residual_share(found)} are in no part: the total is {after.source}, which rounds up and keeps blocks "
            "whole; the parts are the ledger's."
        )
    return words


def _moved(before: Peak, after: Peak) -> str:
    if same_moment(before, after):
        return f"The peak stays in {moment(after)}."
    words = f"The peak moved from {moment(before)} to {moment(after)}"
    there = before.phase_peaks_mib.get(after.phase)
    if after.phase != before.phase and there is not None and abs(there - after.mib) <= NEAR * after.mib:
        return f"{words}; the baseline takes as much there ({mib(there)}), below its own peak until now."
    return f"{words}."


def peak_findings(before: Account, after: Account, found: Change) -> list[str]:
    """What does not add up or surprises."""
    words = []
    if not found.closes:
        words.append(
            f"{mib(abs(found.residual))} of the change of the peak ({mib(found.total)}) are in no category: the parts "
            f"are the ledger's ({mib(before.peak.mib)} and {mib(after.peak.mib)}), the total is {after.source}"
        )
    gone = next((p.value for p in found.parts if p.name == NAMES[Category.activation.value]), 0.0)
    if gone < 0 and in_optimizer(after.peak) and not in_optimizer(before.peak) and -found.total < -gone / 2:
        words.append(
            f"of {mib(-gone)} activations that are gone from the peak only {mib(max(0.0, -found.total))} are saved: "
            "the peak is now in the optimizer, which no activation strategy changes"
        )
    return words


def optimizer_temporaries(peak: Peak) -> float:
    """MiB of temporaries that the optimizer's step holds at this peak."""
    return parts_of(peak).get(OPTIMIZER_TEMPORARIES, 0.0)


RECOMPUTATION = "recomputation"
TRANSFER = "transfer that was not hidden"
MORE_MICRO_STEPS = "more micro-steps"
FORWARD_BACKWARD = "forward and backward otherwise"
LAUNCHES = "waiting for launches"
DATA = "waiting for data"
OPTIMIZER = "optimizer"
OUTSIDE = "outside of all phases"

#: Standard error of a median over sqrt(n), in interquartile distances, for values that scatter normally:
#: sqrt(pi/2) * sigma / sqrt(n), and the quartiles of a normal distribution are 1.349 sigma apart.
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349
#: Copies between host and device of which less than this share ran beside kernels are called not hidden.
HIDDEN = 0.5
#: A recomputation is about a forward; from here on it is called more than that.
LONG_RECOMPUTATION = 1.5


def time_change(baseline: TrialResult, candidate: TrialResult) -> Change | None:
    """The change of the median step time by phase; None where one of the two was not timed.

    A phase's time is its own, without the phases inside of it. The total is that of the medians, which are what is
    compared everywhere else; the parts are those of the typical step (see `Typical`), and the residual is what the
    two differ by.
    """
    if baseline.measurement is None or candidate.measurement is None:
        return None
    old, new = Typical.of(baseline.measurement), Typical.of(candidate.measurement)
    if not old.phases_ms or not new.phases_ms:
        return None
    noise = noise_ms(baseline.measurement, candidate.measurement)
    parts = _by_phase(baseline, candidate, old, new)
    return change("ms", baseline.measurement.step_ms, candidate.measurement.step_ms, parts, noise)


@dataclass
class Typical:
    """The phases of a trial's typical step.

    The mean over the middle half of all timed steps, by their length: it is as little moved by outliers as the median
    is, and unlike medians of phases, means of the same steps add up. Where the phases of each step were not kept, the
    medians of the phases.
    """

    phases_ms: dict[str, float]
    outside_ms: float | None  # None: not known
    how: str  # in words

    @classmethod
    def of(cls, m: Measurement) -> Typical:
        runs = good_runs(m)
        if not runs or any(not run.phase_times_ms for run in runs):
            return cls(m.phases_ms, m.outside_ms, "median time")
        steps = [
            (step_ms, {phase: times[i] for phase, times in run.phase_times_ms.items()})
            for run in runs
            for i, step_ms in enumerate(run.step_times_ms)
        ]
        cut = len(steps) // 4
        middle = sorted(steps, key=lambda step: step[0])[cut : len(steps) - cut]
        names = dict.fromkeys(name for _, phases in middle for name in phases)
        phases_ms = {name: fmean(phases.get(name, 0.0) for _, phases in middle) for name in names}
        outside = fmean(step_ms - sum(phases.values()) for step_ms, phases in middle)
        return cls(phases_ms, outside, "mean time over the middle half of the steps")


def _by_phase(baseline: TrialResult, candidate: TrialResult, old: Typical, new: Typical) -> list[Part]:
    both = {**old.phases_ms, **new.phases_ms}
    delta = {phase: new.phases_ms.get(phase, 0.0) - old.phases_ms.get(phase, 0.0) for phase in both}

    def took(*phases: str) -> str:
        was = sum(old.phases_ms.get(p, 0.0) for p in phases)
        now = sum(new.phases_ms.get(p, 0.0) for p in phases)
        word = "phase" if len(phases) == 1 else "phases"
        return f"{new.how} in {word} {', '.join(phases)}: {ms(was)} before, {ms(now)} after"

    parts = []
    for phase, name in ((Phase.recompute.value, RECOMPUTATION), (Phase.transfer.value, TRANSFER)):
        if phase in delta:
            parts.append(Part(name, delta.pop(phase), took(phase)))

    passes = [p for p in (Phase.forward.value, Phase.backward.value) if p in delta]
    data = Phase.data.value
    steps_before, steps_after = micro_steps(baseline), micro_steps(candidate)
    if steps_before is not None and steps_after is not None and steps_after > steps_before:
        phases = [*passes, *([data] if data in delta else [])]
        words = f"{count(steps_after, 'micro-step')} instead of {steps_before}; {took(*phases)}"
        parts.append(Part(MORE_MICRO_STEPS, sum(delta.pop(p) for p in phases), words))
    elif passes:
        waited = _launches(baseline.trace, candidate.trace, old, new)
        if waited is not None:
            parts.append(waited)
        own = sum(delta.pop(p) for p in passes) - (waited.value if waited is not None else 0.0)
        parts.append(Part(FORWARD_BACKWARD, own, took(*passes)))
    for phase, value in delta.items():
        name = {data: DATA, Phase.optimizer.value: OPTIMIZER}.get(phase, phase)
        parts.append(Part(name, value, took(phase)))
    if old.outside_ms is not None and new.outside_ms is not None:
        words = f"{new.how} outside of all phases: {ms(old.outside_ms)} before, {ms(new.outside_ms)} after"
        parts.append(Part(OUTSIDE, new.outside_ms - old.outside_ms, words))
    return parts


def _launches(before: Trace | None, after: Trace | None, old: Typical, new: Typical) -> Part | None:
    """Time in forward and backward when the device ran no kernel of theirs; None without traces of a GPU.

    The profiler slows the host down and not the kernels, so the kernels' time is taken from the trace and the phases'
    from the timed steps.
    """
    if before is None or after is None or not before.device_ms or not after.device_ms:
        return None

    def idle(trace: Trace, step: Typical) -> float:
        passes = (Phase.forward.value, Phase.backward.value)
        return sum(max(0.0, step.phases_ms.get(p, 0.0) - trace.device_ms.get(p, 0.0)) for p in passes)

    was, now = idle(before, old), idle(after, new)
    words = f"time in forward and backward without kernels of theirs, by the traces: {ms(was)} before, {ms(now)} after"
    return Part(LAUNCHES, now - was, words)


def micro_steps(result: TrialResult) -> int | None:
    """Micro-batches per optimizer step; None where the config does not tell."""
    knobs = Knobs.of(result)
    if not knobs.global_batch_size:
        return None
    return math.ceil(knobs.global_batch_size / (knobs.micro_batch_size or knobs.global_batch_size))


def noise_ms(old: Measurement, new: Measurement) -> float:
    """What the difference of two medians may be off by chance (95 %), in ms."""
    return math.hypot(_half_interval(old), _half_interval(new))


def _half_interval(m: Measurement) -> float:
    low, high = known(m.step_ms_ci_low), known(m.step_ms_ci_high)
    if low is not None and high is not None:
        return (high - low) / 2
    steps = max(1, len(m.step_times_ms) or m.steps * m.repeats)
    return 1.96 * MEDIAN_ERROR * (m.step_ms_high - m.step_ms_low) / math.sqrt(steps)


def inside_noise(baseline: TrialResult, candidate: TrialResult) -> bool:
    """Whether the two step times cannot be told apart."""
    found = candidate.decision.step if candidate.decision is not None else None
    if found is not None:
        return found.none
    old, new = baseline.measurement, candidate.measurement
    return old is not None and new is not None and difference(new, old, drift_of(old)).none


def time_words(baseline: TrialResult, candidate: TrialResult, found: Change) -> list[str]:
    """Whole sentences, most important first."""
    where = EVIDENCE_SHORT.get(candidate.evidence, candidate.evidence)
    quiet = inside_noise(baseline, candidate)
    words = []
    if quiet:
        words.append(
            f"The step times cannot be told apart: {ms(found.after)} and {ms(found.before)}, a difference inside the "
            f"noise ({where}); its parts below are no causes."
        )
    else:
        longer = "longer" if found.total > 0 else "shorter"
        factor = f", {ratio(found.after / found.before)}" if found.before else ""
        words.append(
            f"A step takes {ms(abs(found.total))} {longer}: {ms(found.after)} instead of {ms(found.before)}{factor} "
            f"({where})."
        )
    if listed(found):
        words.append(f"By part: {listed(found)}.")
    if abs(found.residual) > small(found):
        words.append(f"{residual_share(found)} belong to no part: the total is that of medians, which do not add up.")
    return [*words, *_trace_words(baseline, candidate)]


def _trace_words(baseline: TrialResult, candidate: TrialResult) -> list[str]:
    after, before, words = candidate.trace, baseline.trace, []
    if after is None:
        return []
    if after.copy_ms:
        hidden = (
            f", {percent(after.copy_hidden_ms / after.copy_ms)} of it beside kernels" if after.copy_hidden_ms else ""
        )
        hidden = hidden or ", none of it beside kernels"
        words.append(f"Copies between host and device take {ms(after.copy_ms)} a step{hidden} (trace).")
    elif after.evidence == Evidence.cpu.value:
        copies = sum(after.ranges_ms.get(r, 0.0) for r in ("copy to host", "copy from host"))
        if copies > 0:
            words.append("Copies run on this CPU itself, so none of their time can be hidden here.")
    if before is not None and before.operators and after.operators > 1.05 * before.operators:
        micro = f"{count(after.micro_steps, 'micro-step')}; " if after.micro_steps > 1 else ""
        words.append(f"The host calls {after.operators} operators a step instead of {before.operators} ({micro}trace).")
    return words


def predicted_words(candidate: TrialResult) -> list[str]:
    """What can be said of the time of a trial that was not run: shares and bounds, no times."""
    p = candidate.prediction
    if candidate.measurement is not None or p is None:
        return []
    known_of_it = []
    if p.recompute_flops_ratio > 0:
        known_of_it.append(f"{percent(p.recompute_flops_ratio)} of a step's FLOPs are computed again")
    if p.to_host_mib + p.from_host_mib > 0:
        at_link = (
            "" if p.transfer_round_trip_ms is None else f" ({ms(p.transfer_round_trip_ms)} at the link's bandwidth)"
        )
        known_of_it.append(f"{mib(p.to_host_mib + p.from_host_mib)} are moved a step{at_link}")
    steps = micro_steps(candidate)
    if steps is not None and steps > 1:
        known_of_it.append(f"a step is computed in {steps} micro-steps")
    start = "What it costs in time is not known, since nothing was run"
    return [f"{start}; theoretically {', and '.join(known_of_it)}." if known_of_it else f"{start}."]


def time_findings(baseline: TrialResult, candidate: TrialResult, found: Change) -> list[str]:
    """What does not add up or surprises."""
    words, new = [], candidate.measurement
    assert new is not None
    quiet = inside_noise(baseline, candidate)
    if not found.closes and not quiet:
        words.append(
            f"{ms(abs(found.residual))} of the change of the step time ({ms(found.total)}) belong to no phase: more "
            "than medians usually are off; look at the spread of the steps, and repeat on a quiet machine"
        )
    phases = new.phases_ms
    recompute, forward = phases.get(Phase.recompute.value, 0.0), phases.get(Phase.forward.value, 0.0)
    if recompute > LONG_RECOMPUTATION * forward > 0:
        times = ratio(recompute / forward)
        words.append(f"recomputation takes {ms(recompute)}, {times} a forward ({ms(forward)}): about one was expected")
    works_more = recompute > 0 or phases.get(Phase.transfer.value, 0.0) > 0
    if found.total < 0 and not quiet and works_more:
        words.append("a step is shorter than the baseline's although more is done in it: caches, clocks or drift")
    trace = candidate.trace
    if trace is not None and trace.copy_ms and (trace.copy_hidden_ms or 0.0) < HIDDEN * trace.copy_ms:
        share = percent((trace.copy_hidden_ms or 0.0) / trace.copy_ms)
        words.append(f"only {share} of the copies' time is hidden behind kernels")
    for result in (baseline, candidate):
        disturbed = result.decision.disturbed if result.decision is not None else []
        if disturbed:
            more = f" (and {len(disturbed) - 1} more)" if len(disturbed) > 1 else ""
            words.append(f"the times of {result.name} may not be its own: {disturbed[0]}{more}")
    return words


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
