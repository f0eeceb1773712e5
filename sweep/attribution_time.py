"""Why a step takes longer or shorter: by the phases that were timed, and by what a trace saw of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from sweep.attribution_words import change, listed, residual_share, small
from sweep.certainty import difference, drift_of, good_runs
from sweep.findings import Change, Part, Trace
from sweep.knobs import Knobs
from sweep.results import Evidence, Measurement, Phase, TrialResult
from sweep.words import EVIDENCE_SHORT, count, known, mib, ms, percent, ratio

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
