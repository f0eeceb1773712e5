"""The order in which to try: which direction applies to these facts and why, what to type, watch and not conclude.

Decided by memory alone, since nothing was run: whether there is compute, link or host memory to spare is told by FLOPs,
bytes and bandwidths, and is theoretical.
"""

from __future__ import annotations

from sweep.diagnosis import (
    CHECKPOINT,
    COUNTS,
    HYBRID,
    MICRO,
    OFFLOAD,
    SELECTIVE,
    TOGETHER,
    Advice,
    Facts,
    Setting,
)
from sweep.diagnosis_answer import answer, feasible
from sweep.diagnosis_words import (
    KEEP,
    ONE_AT_A_TIME,
    OTHER,
    advice,
    cost,
    moves,
    none_fits,
    not_now,
    recomputes,
    saves,
    short,
    takes,
    transfer_share,
    unavailable,
)
from sweep.findings import WhatIf
from sweep.results import Phase
from sweep.words import count, mib, percent, ratio

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
