"""The order in which to try: which direction applies to these facts and why, what to type, watch and not conclude.

Decided by memory alone, since nothing was run: whether there is compute, link or host memory to spare is told by FLOPs,
bytes and bandwidths, and is theoretical.
"""

from __future__ import annotations

from dataclasses import dataclass

from sweep.diagnose.facts import (
    CHECKPOINT,
    COUNTS,
    HYBRID,
    LASTING,
    MICRO,
    OFFLOAD,
    SELECTIVE,
    TOGETHER,
    Advice,
    Facts,
    Limits,
    Setting,
)
from sweep.format import count, mib, ms, percent, ratio
from sweep.results import Category, Peak, Phase, WhatIf, lies_in_activations, spent_mib

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


#: From this share of the peak on, activations and temporaries are called what fills the memory, if as much of it lies
#: above the floor.
MOSTLY = 0.5
#: A share of temporaries that is worth a word.
WORTH_A_WORD = 0.1
#: Largest error of a predicted reserved size so far, rounded (benchmarks/results/published.md).
CLOSE = 0.05


def answer(facts: Facts) -> tuple[str, str]:
    """`yes`, `no` or `in part`, and the sentence that a person reads first."""
    peak = facts.baseline.peak
    assert peak is not None, "a prediction always has one"
    if not lies_in_activations(peak):
        return "no", _no(peak, facts.peak_mib)
    above = 1 - facts.floor.mib / facts.peak_mib
    lasting = sum(peak.at_peak_mib.get(c.value, 0.0) for c in LASTING)
    shares = (
        f"activations are {percent(_share(peak, Category.activation))} of the baseline's peak of {mib(facts.peak_mib)}"
    )
    temporary = _share(peak, Category.temporary)
    if temporary >= WORTH_A_WORD:
        shares += f", and the temporaries beside them {percent(temporary)}"
    if spent_mib(peak) >= MOSTLY * peak.mib and above >= MOSTLY:
        return "yes", f"Yes: {shares}."
    if spent_mib(peak) / peak.mib <= above:
        return "in part", f"In part: {shares}; {percent(lasting / peak.mib)} is {_lasting_words(peak)}."
    most = max(0.0, facts.peak_mib - facts.floor.mib)
    return "in part", (
        f"In part: {shares}. But the optimizer's step takes {mib(facts.floor.mib)} whatever the strategy, so none can "
        f"save more than {mib(most)} ({percent(most / facts.peak_mib)})."
    )


def _no(peak: Peak, mib_in_all: float) -> str:
    if peak.phase == Phase.optimizer.value:
        return (
            f"No: the baseline's peak of {mib(mib_in_all)} lies in the optimizer's step, when no activation is alive; "
            f"it is made of {_lasting_words(peak, Category.temporary)}."
        )
    lasting = _lasting_words(peak)
    share = sum(peak.at_peak_mib.get(c.value, 0.0) for c in LASTING) / peak.mib
    activation = percent(_share(peak, Category.activation))
    return (
        f"No: {percent(share)} of the baseline's peak of {mib(mib_in_all)} is {lasting}; activations are {activation}."
    )


def _share(peak: Peak, category: Category) -> float:
    return peak.at_peak_mib.get(category.value, 0.0) / peak.mib


def _lasting_words(peak: Peak, *more: Category) -> str:
    """`parameters, gradients and optimizer state`: those that are there."""
    words = {Category.parameter: "parameters", Category.gradient: "gradients"}
    words |= {Category.optimizer_state: "optimizer state", Category.temporary: "temporaries"}
    there = [w for c, w in words.items() if (c in LASTING or c in more) and _share(peak, c) >= COUNTS]
    return " and ".join([", ".join(there[:-1]), there[-1]] if len(there) > 1 else there)


# -- against the limits ----------------------------------------------------------------------------------------------


def fit_lines(facts: Facts) -> list[str]:
    """Whether the baseline fits, limit by limit, or what to say so that it can be told."""
    b, limits = facts.baseline, facts.limits
    if not limits.known:
        return [
            "No cap is known: neither budget.memory_mib nor the device's capacity is set. Add one, such as "
            f"budget.memory_mib={_round(b.allocated_mib / 2)}, and this says what fits."
        ]
    lines = limit_lines(limits, b.allocated_mib, b.reserved_mib)
    if facts.room_mib is not None and facts.room_mib >= 0 and not b.fits:
        lines.append("Yet its allocations do not fit: free memory is in pieces that are too small.")
    if (
        limits.reserves
        and limits.device_mib is not None
        and abs(limits.device_mib - b.reserved_mib) < CLOSE * limits.device_mib
    ):
        lines.append(
            f"That is close: predicted reserved sizes have been off by up to {percent(CLOSE)} against published "
            "measurements (README), so try it before you rely on it."
        )
    first = f"{'It fits' if facts.fits else 'It does not fit'}: {lines[0]}"
    return [first, *(line[:1].upper() + line[1:] for line in lines[1:])]


def limit_lines(limits: Limits, allocated_mib: float, reserved_mib: float | None) -> list[str]:
    """A peak beside each limit that is known. reserved_mib: None where only what is allocated is known."""
    lines = []
    if limits.budget_mib is not None:
        room = room_words(limits.budget_mib - allocated_mib)
        lines.append(f"allocated {mib(allocated_mib)} of budget.memory_mib={limits.budget_mib:g}: {room}.")
    if limits.device_mib is not None:
        took = allocated_mib if reserved_mib is None else reserved_mib
        what = f"reserved {'at least ' if reserved_mib is None else ''}" if limits.reserves else "allocated "
        less = f" ({mib(limits.capacity_mib)} less {mib(limits.context_mib)} of context)" if limits.context_mib else ""
        room = room_words(limits.device_mib - took)
        lines.append(f"{what}{mib(took)} of the device's {mib(limits.device_mib)}{less}: {room}.")
    return lines


def room_words(room_mib: float) -> str:
    return f"{mib(room_mib)} to spare" if room_mib >= 0 else f"{mib(-room_mib)} short"


def floor_lines(facts: Facts) -> list[str]:
    """The floor under the limits, and the lowest peak that any setting is predicted to reach."""
    floor, lines = facts.floor, []
    lines += [f"Under the cap: {line}" for line in limit_lines(facts.limits, floor.mib, None)]
    if floor.room_mib is not None and floor.room_mib < 0:
        lines.append(f"Even the floor does not fit, by {mib(-floor.room_mib)}: no activation strategy will do here.")
    lowest = facts.lowest
    if lowest is not None and lowest.allocated_mib < (1 - COUNTS) * facts.peak_mib:
        reserved = f" allocated, {mib(lowest.reserved_mib)} reserved" if facts.limits.reserves else ""
        lines.append(f"The lowest predicted for a strategy is {mib(lowest.allocated_mib)}{reserved} ({lowest.name}).")
    return lines


def feasible(facts: Facts) -> bool:
    """Whether anything fits: the baseline or a setting. True where no limit is known."""
    return facts.fits is not False or any(
        s.fits and facts.host_holds(s) for s in [*facts.extremes, *facts.mildest] if not s.why_not
    )


def _round(value: float) -> int:
    """Two digits that matter: a size to type."""
    step = 10 ** max(0, len(str(int(value))) - 2)
    return max(step, int(value) // step * step)


#: From here on a gate leaves so little that only one change at a time can be told from it.
STRICT_THROUGHPUT, STRICT_LOSS = 0.9, 1.02
#: Changes that cost nothing but rounding; tried before those that save more and cost more.
FREE = ("workload.optimizer.implementation=", "workload.attention=", "workload.model.attention=", "device.alloc_conf=")


def order(facts: Facts) -> list[Advice]:
    """Every row: those that apply first, in the order in which to try; then those that do not, with the reason."""
    kind, _ = answer(facts)
    single = [_micro_batch(facts), _checkpoint(facts), _offload(facts)]
    if facts.fits is None:
        single.sort(key=lambda a: (a.cost is None, a.cost, -(a.setting.saved_mib if a.setting else 0.0)))
    strategies = [*single, _hybrid(facts, single)]
    other = _other(facts, kind)
    first_other = kind == "no" or not feasible(facts)
    rows = [_keep(facts), _one_at_a_time(facts, strategies)]
    rows += [other, *strategies] if first_other else [*strategies, other]
    return [a for a in rows if a.applies] + [a for a in rows if not a.applies]


# -- the rows --------------------------------------------------------------------------------------------------------


def _keep(facts: Facts) -> Advice:
    if facts.fits:
        room = facts.room_mib or 0.0
        why = f"it fits with {mib(room)} to spare, so nothing has to be paid for memory"
        return advice(KEEP, True, why, ["strategy=baseline"])
    why = "no cap is known" if facts.fits is None else f"it is {short(facts)}"
    return advice(KEEP, False, why)


def _micro_batch(facts: Facts) -> Advice:
    extreme = facts.extreme(MICRO)
    if extreme is None:
        return advice(MICRO, False, unavailable(facts, MICRO))
    why_not = not_now(facts, extreme)
    if why_not:
        return advice(MICRO, False, why_not)
    b = facts.global_batch_size
    why = f"{count(b, 'sample')} at once take {mib(facts.peak_mib)}, one at a time takes {mib(extreme.allocated_mib)}"
    if facts.fits is None:
        chosen = facts.mild(MICRO) or extreme
        if chosen.micro_batch_size > 1:
            why += f", {chosen.micro_batch_size} at once take {mib(chosen.allocated_mib)}"
        return advice(MICRO, True, why, chosen.words, chosen, cost=0.0)
    chosen = facts.mild(MICRO) or extreme
    why += f"; {chosen.micro_batch_size} at once is the most that is predicted to fit"
    return advice(MICRO, True, f"{why}: {takes(chosen)}", chosen.words, chosen, cost=0.0)


def _checkpoint(facts: Facts) -> Advice:
    found = [s for s in (facts.extreme(CHECKPOINT), facts.extreme(SELECTIVE)) if s is not None]
    if not found:
        return advice(CHECKPOINT, False, unavailable(facts, CHECKPOINT))
    most = max(found, key=lambda s: (s.fits, s.saved_mib))
    why_not = not_now(facts, most)
    if why_not:
        return advice(CHECKPOINT, False, why_not)
    if facts.fits is None:
        # The cheaper form where it saves nearly as much.
        chosen = min(found, key=lambda s: (s.saved_mib < 0.9 * most.saved_mib, s.recompute_flops_ratio))
        why = f"{most.name} saves {saves(facts, most)}, {recomputes(most)}"
        return advice(CHECKPOINT, True, why, chosen.words, chosen, cost=chosen.recompute_flops_ratio)
    fitting = [s for s in (facts.mild(CHECKPOINT), *found) if s is not None and s.fits]
    fast = [s for s in fitting if _fast_enough(facts, s)]
    if not fast:
        s, floor = fitting[0], facts.gates.min_throughput_ratio
        why = (
            f"{s.name} fits, but where FLOPs bind, recomputing {percent(s.recompute_flops_ratio)} of them leaves "
            f"{ratio(_throughput(s))} of the throughput, less than budget.min_throughput_ratio={floor:g} (theoretical)"
        )
        return advice(CHECKPOINT, False, why)
    chosen = fast[0]
    why = (
        f"it is {short(facts)}, and checkpointing can save {mib(most.saved_mib)}; {chosen.name} changes least of what "
        f"fits: {takes(chosen)}, {recomputes(chosen)}"
    )
    return advice(CHECKPOINT, True, why, chosen.words, chosen, cost=chosen.recompute_flops_ratio)


def _throughput(s: Setting) -> float:
    """Of a step that only FLOPs bind, against the baseline's."""
    return 1 / (1 + s.recompute_flops_ratio)


def _fast_enough(facts: Facts, s: Setting) -> bool:
    return _throughput(s) >= (facts.gates.min_throughput_ratio or 0.0)


def _offload(facts: Facts) -> Advice:
    extreme = facts.extreme(OFFLOAD)
    if extreme is None:
        return advice(OFFLOAD, False, unavailable(facts, OFFLOAD))
    if not facts.host_holds(extreme):
        needs = f"it needs {mib(extreme.host_mib)} of host memory, and {mib(facts.host_free_mib)} are free here"
        return advice(OFFLOAD, False, needs)
    why_not = not_now(facts, extreme)
    if why_not:
        return advice(OFFLOAD, False, why_not)
    chosen = extreme if facts.fits is None else facts.mild(OFFLOAD) or extreme
    why = f"{chosen.name} saves {saves(facts, chosen)} and moves {moves(facts, chosen)}"
    if facts.fits is False:
        why = f"it is {short(facts)}; {why}; {takes(chosen)}"
        milder = [s.name for s in (facts.mild(MICRO), facts.mild(CHECKPOINT)) if s is not None]
        if milder:
            why += f"; not far short, since {' or '.join(milder)} fits without moving anything"
    return advice(OFFLOAD, True, why, chosen.words, chosen, cost=transfer_share(facts, chosen))


def _hybrid(facts: Facts, single: list[Advice]) -> Advice:
    together = [s for s in map(facts.extreme, TOGETHER) if s is not None]
    if not together:
        return advice(HYBRID, False, unavailable(facts, HYBRID))
    lowest = min(together, key=lambda s: s.allocated_mib)
    if facts.fits:
        return advice(HYBRID, False, not_now(facts, lowest))
    alone = [a.setting for a in single if a.applies and a.setting is not None]
    if facts.fits is None:
        best = max(alone, key=lambda s: s.saved_mib, default=None)
        if best is not None and lowest.saved_mib - best.saved_mib < COUNTS * facts.peak_mib:
            return advice(HYBRID, False, f"it saves no more than {best.name} alone: {saves(facts, lowest)}")
        why = f"{lowest.name} goes lowest: it saves {saves(facts, lowest)}, {recomputes(lowest)}"
        return advice(HYBRID, bool(lowest.saved_mib > 0), why, lowest.words, lowest, cost=cost(facts, lowest))
    if alone:
        return advice(HYBRID, False, f"one alone is enough: {alone[0].name}")
    fitting = [facts.mild(s.direction) or s for s in together if s.fits and facts.host_holds(s)]
    if not fitting:
        return advice(HYBRID, False, none_fits(facts, lowest))
    chosen = min(fitting, key=lambda s: (cost(facts, s) is None, cost(facts, s) or 0.0))
    why = f"nothing that applies is enough alone; {chosen.name} is: {takes(chosen)}, {recomputes(chosen)}"
    if chosen.moved_mib:
        why += f" and moves {moves(facts, chosen)}"
    return advice(HYBRID, True, why, chosen.words, chosen, cost=cost(facts, chosen))


def _one_at_a_time(facts: Facts, strategies: list[Advice]) -> Advice:
    g = facts.gates
    strict = []
    if g.min_throughput_ratio is not None and g.min_throughput_ratio >= STRICT_THROUGHPUT:
        strict.append(
            f"budget.min_throughput_ratio={g.min_throughput_ratio:g} leaves "
            f"{percent(max(0.0, 1 - g.min_throughput_ratio))} of the throughput to pay with"
        )
    if g.min_samples_per_s is not None:
        strict.append(f"budget.min_samples_per_s={g.min_samples_per_s:g} can be told only by measuring")
    if g.max_eval_loss_ratio is not None and g.max_eval_loss_ratio <= STRICT_LOSS:
        strict.append(f"budget.max_eval_loss_ratio={g.max_eval_loss_ratio:g} is no more than seeds may differ by")
    if g.max_eval_loss is not None:
        strict.append(f"budget.max_eval_loss={g.max_eval_loss:g} can be told only by measuring")
    if not strict:
        asked = g.min_throughput_ratio is not None or g.max_eval_loss_ratio is not None
        why = "the gates leave room" if asked else "no gate on throughput or quality is set"
        return advice(ONE_AT_A_TIME, False, why)
    repeats = ["measure.repeats=5", "measure.seeds=5"] if _gates_quality(facts) else ["measure.repeats=5"]
    first = next((a for a in strategies if a.applies and a.setting is not None), None)
    words = ["strategy=baseline"] if facts.fits or first is None else first.words
    return advice(ONE_AT_A_TIME, True, "; ".join(strict), [*words, *repeats])


def _gates_quality(facts: Facts) -> bool:
    return facts.gates.max_eval_loss_ratio is not None or facts.gates.max_eval_loss is not None


def _other(facts: Facts, kind: str) -> Advice:
    if facts.fits:
        return advice(OTHER, False, "it fits as it is")
    nothing_fits = not feasible(facts)
    if kind == "yes" and not nothing_fits:
        return advice(OTHER, False, "the activations are what fills the memory, and the strategies lower them")
    changes, why = _changes(facts, kind)
    if not changes:
        return advice(OTHER, True, f"{why}; take a smaller model or a larger device")
    fitting = [w for w in changes if facts.limits.known and fits(facts, w)]
    if nothing_fits:
        first = next((w for w in fitting if w.override.startswith(FREE)), (fitting or changes)[0])
    else:
        first = next((w for w in changes if w.override.startswith(FREE)), changes[0])
    why += f"; {first.override} saves {mib(first.saved_mib or first.reserved_saved_mib)}"
    if facts.limits.known:
        why += ", and that fits" if fits(facts, first) else ", and that does not fit yet"
    return advice(OTHER, True, why, ["mode=diagnose", *first.override.split()])


def changes_beside(facts: Facts) -> tuple[list[WhatIf], Setting | None]:
    """The changes that help where the strategies stop, and the setting that they were predicted beside.

    None: the baseline, where no strategy saves anything or nothing helps beside the lowest.
    """
    lowest = facts.lowest
    if lowest is None or not facts.what_if_lowest or lowest.saved_mib < COUNTS * facts.peak_mib:
        return facts.what_if, None
    return facts.what_if_lowest, lowest


def _changes(facts: Facts, kind: str) -> tuple[list[WhatIf], str]:
    """The changes to choose from, and where the peak lies that they lower."""
    changes, beside = changes_beside(facts)
    if beside is not None:
        where = "in the optimizer's step" if beside.peak_phase == Phase.optimizer.value else f"in {beside.peak_phase}"
        return changes, f"with {beside.name} the peak of {mib(beside.allocated_mib)} lies {where}"
    if kind == "no":
        in_optimizer = facts.baseline.peak_phase == Phase.optimizer.value
        where = "in the optimizer's step" if in_optimizer else "in what lasts all through a step"
        return changes, f"the baseline's peak lies {where}"
    if kind == "yes":
        return changes, none_fits(facts, facts.lowest) if facts.lowest is not None else "no strategy applies"
    return changes, "the activations are only a part"


def fits(facts: Facts, change: WhatIf) -> bool:
    """Whether a change of the workload brings the peak under every limit that is known."""
    room = facts.limits.room_mib(change.allocated_mib, change.reserved_mib)
    return change.fits and (room is None or room >= 0)
