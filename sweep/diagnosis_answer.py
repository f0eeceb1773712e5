"""Is the activation really what fills the memory, and does it fit? Decided and worded from the facts alone."""

from __future__ import annotations

from sweep.diagnosis import COUNTS, LASTING, Facts, Limits, lies_in_activations, spent_mib
from sweep.results import Category, Peak, Phase
from sweep.words import mib, percent

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
