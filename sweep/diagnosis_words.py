"""The words of a diagnosis: what each row is for, to watch and not to conclude, and the numbers of a setting."""

from __future__ import annotations

from dataclasses import dataclass

from sweep.diagnosis import CHECKPOINT, COUNTS, HYBRID, MICRO, OFFLOAD, SELECTIVE, Advice, Facts, Setting
from sweep.results import Phase
from sweep.words import mib, ms, percent

KEEP, ONE_AT_A_TIME, OTHER = "keep", "one_at_a_time", "other"


@dataclass(frozen=True)
class _Row:
    title: str
    when: str
    watch: str
    not_conclude: str


ROWS: dict[str, _Row] = {
    KEEP: _Row(
        "keep the baseline",
        "it fits already",
        "the room that is left: evaluation, longer batches and other processes take from it too",
        "that a strategy would be slower or faster than this: only measuring tells",
    ),
    ONE_AT_A_TIME: _Row(
        "change one thing at a time",
        "a strict gate on throughput or quality",
        "the interval of the difference against the baseline, over repeats in turn",
        "anything from a difference inside the noise, or from two changes made at once",
    ),
    MICRO: _Row(
        "micro-batches",
        "one micro-computation is too large",
        "throughput: small kernels leave a GPU idle, so take the largest micro-batch that fits",
        "that a smaller global batch would do the same: this keeps the update, that one changes it",
    ),
    CHECKPOINT: _Row(
        "checkpointing",
        "a little short, and compute to spare",
        "step time, and where the peak lies afterwards: once it left the blocks, recomputing more saves nothing",
        "that a share of FLOPs is the same share of time; only measuring tells",
    ),
    OFFLOAD: _Row(
        "offload",
        "far short, with host memory and link to spare",
        "copies that are not hidden behind computing, and free host memory (pinned memory cannot be swapped)",
        "from bandwidth that copies are free, or from a run on a CPU how fast a GPU's link is",
    ),
    HYBRID: _Row(
        "several together",
        "none alone is enough",
        "all costs at once: computing again, more micro-steps and waiting for copies add up",
        "that the lowest peak is the best choice: the fastest that fits is",
    ),
    OTHER: _Row(
        "change the workload",
        "the peak is not from activations",
        "the loss curve: this is another workload, so compare it with its own baseline",
        "that a strategy gained this, or that activations matter before this peak is gone",
    ),
}


def advice(
    row: str,
    applies: bool,
    why: str,
    words: list[str] | None = None,
    setting: Setting | None = None,
    cost: float | None = None,
) -> Advice:
    """A row with its words. What does not apply has nothing to type."""
    r = ROWS[row]
    return Advice(
        row=row,
        title=r.title,
        when=r.when,
        applies=applies,
        why=why,
        words=list(words or []) if applies else [],
        setting=setting if applies else None,
        watch=r.watch,
        not_conclude=r.not_conclude,
        cost=cost,
    )


# -- numbers in words ------------------------------------------------------------------------------------------------


def unavailable(facts: Facts, direction: str) -> str:
    return next((s.why_not for s in facts.extremes if s.direction == direction), "it was not predicted")


def not_now(facts: Facts, most: Setting) -> str:
    """Why a direction whose extreme is `most` does not help here; empty where it does."""
    least = max(COUNTS * facts.peak_mib, facts.gates.min_saving_mib or 0.0)
    if most.saved_mib < least:
        where = "in the optimizer's step" if most.peak_phase == Phase.optimizer.value else f"in {most.peak_phase}"
        low = f"saves only {saves(facts, most)}" if most.saved_mib > 0 else "saves nothing"
        return f"{most.name} {low}: the peak of {mib(most.allocated_mib)} then lies {where}"
    if facts.fits:
        return f"not needed; should memory get short, {most.name} saves {saves(facts, most)}"
    if facts.fits is False and not most.fits:
        return f"not enough alone: {most.name} takes {mib(most.allocated_mib)} {lacks(most)}"
    return ""


def none_fits(facts: Facts, lowest: Setting) -> str:
    return f"even {lowest.name} takes {mib(lowest.allocated_mib)} {lacks(lowest)}"


def lacks(s: Setting) -> str:
    if s.room_mib is not None and s.room_mib < 0:
        reserved = f"and reserves {mib(s.reserved_mib)}, " if s.reserved_mib != s.allocated_mib else ""
        return f"{reserved or 'and is '}still {mib(-s.room_mib)} short"
    return "and does not fit: free memory is in pieces that are too small"


def short(facts: Facts) -> str:
    room = facts.room_mib
    return f"{mib(-room)} short" if room is not None and room < 0 else "short of unbroken memory"


def saves(facts: Facts, s: Setting) -> str:
    return f"{mib(s.saved_mib)} ({percent(s.saved_mib / facts.peak_mib)})"


def takes(s: Setting) -> str:
    reserved = f" allocated, {mib(s.reserved_mib)} reserved" if s.reserved_mib != s.allocated_mib else ""
    room = "" if s.room_mib is None else f", {mib(s.room_mib)} to spare"
    return f"{mib(s.allocated_mib)}{reserved}{room}"


def recomputes(s: Setting) -> str:
    if not s.recompute_flops_ratio:
        return "with elementwise operators computed again"
    return f"with {percent(s.recompute_flops_ratio)} more FLOPs"


def moves(facts: Facts, s: Setting) -> str:
    moved = f"{mib(s.moved_mib)} a step"
    if s.transfer_ms is None:
        return f"{moved} (the link's bandwidth is not known)"
    took = f"{moved} ({ms(s.transfer_ms)} at the link's bandwidth"
    if facts.compute_ms is None:
        return f"{took})"
    rate = f"{ms(facts.compute_ms)} of computing at the card's peak rate"
    hidden = "could hide" if s.transfer_ms <= facts.compute_ms else "may not hide whole"
    return f"{took}, which {hidden} behind {rate}; both theoretical)"


def transfer_share(facts: Facts, s: Setting) -> float | None:
    if not s.moved_mib:
        return 0.0
    if s.transfer_ms is None or not facts.compute_ms:
        return None
    return s.transfer_ms / facts.compute_ms


def cost(facts: Facts, s: Setting) -> float | None:
    share = transfer_share(facts, s)
    return None if share is None else s.recompute_flops_ratio + share


def pays_with(s: Setting) -> str:
    """What a setting costs, in a few words for a table."""
    costs = []
    if s.accumulation_steps > 1:
        costs.append(f"{s.accumulation_steps} micro-steps")
    if s.recompute_flops_ratio:
        costs.append(f"{percent(s.recompute_flops_ratio)} more FLOPs")
    elif s.direction == SELECTIVE:
        costs.append("elementwise operators again")
    if s.moved_mib:
        took = "" if s.transfer_ms is None else f" ({ms(s.transfer_ms)})"
        costs.append(f"moves {mib(s.moved_mib)}{took}, {mib(s.host_mib)} on the host")
    return ", ".join(costs) or "nothing"
