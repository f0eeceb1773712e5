"""Why a peak changed: by what was alive there, and by the moment that it moved to."""

from __future__ import annotations

from dataclasses import dataclass

from sweep.attribution_words import change, in_optimizer, listed, moment, residual_share, same_moment, verb
from sweep.findings import Change, Part
from sweep.results import Category, Evidence, Peak, Phase, TrialResult
from sweep.words import EVIDENCE_SHORT, mib, percent

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
