"""The sentences: codes, numbers and ids of results and decisions in words, for every place that shows them."""

from __future__ import annotations

from collections.abc import Sequence

from sweep.format import mib, ms, percent
from sweep.results import Category, Comparison, Decision, Finding, Phase, TrialResult, WhatIf

CATEGORY_WORDS = {
    Category.activation.value: "activations",
    Category.temporary.value: "temporaries",
    Category.gradient.value: "gradients",
    Category.optimizer_state.value: "optimizer state",
    Category.parameter.value: "parameters",
    Category.buffer.value: "buffers",
    Category.input.value: "inputs",
}

#: Of an account that tells temporaries apart, what lasts first (see sweep.results.part_of).
PART_WORDS = {
    Category.parameter.value: "parameters",
    Category.buffer.value: "buffers",
    Category.optimizer_state.value: "optimizer state",
    Category.gradient.value: "gradients",
    Category.input.value: "inputs",
    Category.activation.value: "activations",
    "recomputed": "recomputed activations",
    "brought_back": "tensors brought back",
    Category.temporary.value: "temporaries",
    "optimizer_temporary": "optimizer temporaries",
}


def operator_words(operator: str) -> str:
    """`aten.mm.default` as `mm`."""
    return operator.removeprefix("aten.").removesuffix(".default")


def sentence(words: str, first: bool = True) -> str:
    """With a full stop and, where it comes first, a capital letter."""
    whole = words.strip()
    if not whole:
        return ""
    return (capital(whole) if first else whole) + ("" if whole.endswith((".", "!", "?")) else ".")


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


# -- changes of the workload -----------------------------------------------------------------------------------------

#: What it does, and what it pays with.
CHANGES = {
    "fused": (
        "the fused optimizer updates in one kernel, without temporaries as large as the parameters",
        "nothing in time or memory; it rounds differently, so compare the losses",
    ),
    "expandable_segments": (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment lets the allocator grow its segments "
        "instead of leaving holes; it lowers what is reserved, not what is allocated",
        "nothing in what is computed; drivers on Linux only",
    ),
    "sdpa": (
        "scaled_dot_product_attention does not store the probabilities where there is a kernel for it",
        "nothing in time; it rounds differently",
    ),
    "autocast": (
        "forward and loss under autocast: activations in 16 bits, parameters and their updates stay in 32",
        "coarser activations and gradients, so compare the losses",
    ),
    "sgd": (
        "SGD keeps no moments of the parameters",
        "another course of training: many models need Adam's, and the learning rate changes",
    ),
    "no_momentum": (
        "SGD without momentum keeps no state",
        "another course of training: the learning rate has to be found anew",
    ),
    "half_parameters": (
        "parameters, gradients and optimizer state in 16 bits, too",
        "updates that are rounded to 8 bits of mantissa, small ones to nothing: the losses may suffer",
    ),
    "fewer_samples": (
        "half of the samples an update",
        "noisier gradients, more updates and another learning rate; strategy=micro_batch computes as few at once and "
        "keeps the update",
    ),
    "shorter_samples": (
        "sequences of half as many tokens",
        "half of the context and of the tokens an update: another task",
    ),
}


def change_words(w: WhatIf, phase: str) -> str:
    """What a change does and pays with. phase: where the peak lies without it."""
    if w.change not in CHANGES:
        return ""
    what, price = CHANGES[w.change]
    effect = ""
    if w.peak_phase != phase and w.phase_saved_mib - w.saved_mib >= 0.01 * (w.allocated_mib + w.saved_mib):
        # Otherwise the saving looks smaller than the change is, and why it is so small stays hidden.
        where = "the optimizer's step" if phase == Phase.optimizer.value else phase
        effect = f"; it takes {mib(w.phase_saved_mib)} off {where}, after which the peak lies in {w.peak_phase}"
    return f"{what}{effect}; pays with {price}"


# -- a diagnosis -----------------------------------------------------------------------------------------------------

DIAGNOSED = (
    "[predicted] Predicted, not measured: sizes are those of the real step on tensors without memory; FLOPs, copies "
    "and times are theoretical."
)
#: A row of the order in which to try: its title, what it is for, what to watch, and what not to conclude.
TO_TRY = {
    "keep": (
        "keep the baseline",
        "it fits already",
        "the room that is left: evaluation, longer batches and other processes take from it too",
        "that a strategy would be slower or faster than this: only measuring tells",
    ),
    "one_at_a_time": (
        "change one thing at a time",
        "a strict gate on throughput or quality",
        "the interval of the difference against the baseline, over repeats in turn",
        "anything from a difference inside the noise, or from two changes made at once",
    ),
    "micro_batch": (
        "micro-batches",
        "one micro-computation is too large",
        "throughput: small kernels leave a GPU idle, so take the largest micro-batch that fits",
        "that a smaller global batch would do the same: this keeps the update, that one changes it",
    ),
    "checkpoint": (
        "checkpointing",
        "a little short, and compute to spare",
        "step time, and where the peak lies afterwards: once it left the blocks, recomputing more saves nothing",
        "that a share of FLOPs is the same share of time; only measuring tells",
    ),
    "offload": (
        "offload",
        "far short, with host memory and link to spare",
        "copies that are not hidden behind computing, and free host memory (pinned memory cannot be swapped)",
        "from bandwidth that copies are free, or from a run on a CPU how fast a GPU's link is",
    ),
    "hybrid": (
        "several together",
        "none alone is enough",
        "all costs at once: computing again, more micro-steps and waiting for copies add up",
        "that the lowest peak is the best choice: the fastest that fits is",
    ),
    "other": (
        "change the workload",
        "the peak is not from activations",
        "the loss curve: this is another workload, so compare it with its own baseline",
        "that a strategy gained this, or that activations matter before this peak is gone",
    ),
}
#: By code; the names in braces are those of `_worded`.
FINDINGS = {
    # whether the activations are what fills the memory
    "activations": "Yes: {shares}",
    "peak_in_optimizer": "No: the baseline's peak of {peak_mib} lies in the optimizer's step, when no activation is "
    "alive; it is made of {lasting_and_temporaries}",
    "peak_in_lasting": "No: {lasting_ratio} of the baseline's peak of {peak_mib} is {lasting}; activations are "
    "{activation_ratio}",
    "lasting_too": "In part: {shares}; {lasting_ratio} is {lasting}",
    "floor_nearly_as_high": "In part: {shares}. But the optimizer's step takes {floor_mib} whatever the strategy, so "
    "none can save more than {most_mib} ({most_ratio})",
    # a peak against the limits
    "no_limit": "No cap is known: neither budget.memory_mib nor the device's capacity is set. Add one, such as "
    "budget.memory_mib={try}, and this says what fits",
    "does_fit": "It fits: {room} under {limits}",
    "does_not_fit": "It does not fit: {room} under {limits}",
    "yet_in_pieces": "Yet its allocations do not fit: free memory is in pieces that are too small",
    "close": "That is close: predicted reserved sizes have been off by up to {off_ratio} against published "
    "measurements (README), so try it before you rely on it",
    "nothing_fits": "No strategy here brings it under the cap, nor all of them together",
    "not_here": "This machine has no {device}: type the commands where it is, or add mode=predict to them",
    "no_blocks": "No repeated blocks were found in the model; name them with workload.blocks='layers.*'",
    "less_sure": "Less sure: {caveat}",
    "floor": "{parts}: what is there at the highest point of the optimizer's step",
    "host_free": "free host memory here: {free_mib}",
    "host_unknown": "free host memory: not known, since this machine has no such device",
    # why a row applies or does not
    "fits": "it fits with {room_mib} to spare, so nothing has to be paid for memory",
    "no_cap": "no cap is known",
    "short": "it is {room}",
    "in_pieces": "it is short of unbroken memory",
    "error": "{error}",
    "one_sample": "the global batch is one sample already",
    "nothing_to_move": "offload would move nothing, with no saved tensor of {asked} KiB or more",
    "saves_nothing": "{setting} saves nothing: the peak of {allocated_mib} then lies {where}",
    "saves_little": "{setting} saves only {saves}: the peak of {allocated_mib} then lies {where}",
    "not_needed": "not needed; should memory get short, {setting} saves {saves}",
    "not_enough": "not enough alone: {setting} takes {allocated_mib} {lacks}",
    "none_fits": "even {setting} takes {allocated_mib} {lacks}",
    "one_at_a_time": "{samples} samples at once take {peak_mib}, one at a time takes {allocated_mib}",
    "at_once": "{micro_batch_size} at once take {allocated_mib}",
    "most_at_once": "{micro_batch_size} at once is the most that is predicted to fit: {takes}",
    "recomputes": "{setting} saves {saves}, with {again}",
    "can_save": "checkpointing can save {saved_mib}",
    "least_change": "{setting} changes least of what fits: {takes}, with {again}",
    "too_slow": "{setting} fits, but where FLOPs bind, recomputing {recompute_flops_ratio} of them leaves {left}x of "
    "the throughput, less than budget.min_throughput_ratio={asked} (theoretical)",
    "host_too_small": "it needs {host_mib} of host memory, and {free_mib} are free here",
    "moves": "{setting} saves {saves} and moves {moves}",
    "takes": "{setting} takes {takes}",
    "fits_without_moving": "not far short, since {setting} fits without moving anything",
    "no_more_than_alone": "it saves no more than {setting} alone: {saves}",
    "goes_lowest": "{setting} goes lowest: it saves {saves}, with {again}",
    "one_is_enough": "one alone is enough: {setting}",
    "enough_together": "nothing that applies is enough alone; {setting} is: {takes}, with {pays}",
    "little_throughput": "budget.{key}={asked} leaves {left_ratio} of the throughput to pay with",
    "within_seeds": "budget.{key}={asked} is no more than seeds may differ by",
    "only_measured": "budget.{key}={asked} can be told only by measuring",
    "gates_leave_room": "the gates leave room",
    "no_gate": "no gate on throughput or quality is set",
    "fits_as_it_is": "it fits as it is",
    "strategies_lower_it": "the activations are what fills the memory, and the strategies lower them",
    "peak_beside": "with {setting} the peak of {allocated_mib} lies {where}",
    "baseline_in_optimizer": "the baseline's peak lies in the optimizer's step",
    "baseline_in_lasting": "the baseline's peak lies in what lasts all through a step",
    "activations_in_part": "the activations are only a part",
    "none_applies": "no strategy applies",
    "smaller_or_larger": "take a smaller model or a larger device",
    "change": "{override} saves {saved_mib}",
    "change_fits": "{override} saves {saved_mib}, and that fits",
    "change_not_enough": "{override} saves {saved_mib}, and that does not fit yet",
    "pays": "{pays}",
}
#: Temporaries that are worth a word beside the activations, and what lasts: as shares of a peak.
_MANY, _SOME = 0.1, 0.01


def diagnosed(*findings: Finding) -> str:
    """What a diagnosis found, in one line without a full stop."""
    return "; ".join(FINDINGS[f.code].format_map(_worded(f)) for f in findings)


def _worded(f: Finding) -> dict[str, str]:
    """The numbers of a finding with their units, its names, and what both say together."""
    n, said = f.numbers, dict(f.names)
    for key, value in n.items():
        unit = {"mib": mib, "ratio": percent, "ms": ms}.get(key.rpartition("_")[2])
        said[key] = unit(value) if unit is not None else f"{value:.2f}" if key == "left" else f"{value:g}"
    share = {c: n.get(f"{c}_ratio", 0.0) for c in CATEGORY_WORDS}
    lasting = [c for c in ("parameter", "gradient", "optimizer_state", "temporary") if share[c] >= _SOME]
    said["lasting_and_temporaries"] = together([CATEGORY_WORDS[c] for c in lasting])
    said["lasting"] = together([CATEGORY_WORDS[c] for c in lasting if c != "temporary"])
    said.setdefault("activation_ratio", percent(0.0))
    said["shares"] = f"activations are {said['activation_ratio']} of the baseline's peak of {said.get('peak_mib')}"
    if share["temporary"] >= _MANY:
        said["shares"] += f", and the temporaries beside them {said['temporary_ratio']}"
    room = n.get("room_mib")
    said["room"] = "" if room is None else f"{mib(abs(room))} {'to spare' if room >= 0 else 'short'}"
    context = f" (its capacity less {said['context_mib']} of context)" if "context_mib" in n else ""
    limits = [f"budget.memory_mib={said['budget']}"] if "budget" in n else []
    limits += [f"the device's {said['device_mib']}{context}"] if "device_mib" in n else []
    said["limits"] = f"the tighter of {' and '.join(limits)}" if len(limits) > 1 else "".join(limits)
    said["where"] = "in the optimizer's step" if f.names.get("phase") == "optimizer" else f"in {f.names.get('phase')}"
    if "allocated_mib" in n:
        said |= _of_a_setting(f, said)
    return said


def _of_a_setting(f: Finding, said: dict[str, str]) -> dict[str, str]:
    n, room = f.numbers, f.numbers.get("room_mib")
    more = n["reserved_mib"] != n["allocated_mib"]
    spare = "" if room is None else f", {said['room']}"
    lacks = "and does not fit: free memory is in pieces that are too small"
    if room is not None and room < 0:
        lacks = f"and {'reserves ' + said['reserved_mib'] + ',' if more else 'is'} still {said['room']}"
    again = (
        f"{said['recompute_flops_ratio']} more FLOPs" if n["recompute_flops_ratio"] else "elementwise operators again"
    )
    steps = f"{n['accumulation_steps']:g} micro-steps" if n["accumulation_steps"] > 1 else ""
    recomputed = again if n["recompute_flops_ratio"] or f.names.get("direction") == "checkpoint_selective" else ""
    took = f" ({said['transfer_ms']})" if "transfer_ms" in n else ""
    moved = f"moves {said['moved_mib']}{took}, {said['host_mib']} on the host" if n["moved_mib"] else ""
    moves = f"{said['moved_mib']} a step (the link's bandwidth is not known)"
    if "transfer_ms" in n:
        moves = f"{said['moved_mib']} a step ({said['transfer_ms']} at the link's bandwidth)"
        if "compute_ms" in n:
            hidden = "could hide" if n["transfer_ms"] <= n["compute_ms"] else "may not hide whole"
            moves = (
                f"{moves[:-1]}, which {hidden} behind {said['compute_ms']} of computing at the card's peak rate; both "
                "theoretical)"
            )
    return {
        "takes": f"{said['allocated_mib']}{' allocated, ' + said['reserved_mib'] + ' reserved' if more else ''}{spare}",
        "lacks": lacks,
        "saves": f"{said['saved_mib']} ({said['saved_ratio']})",
        "again": again,
        "moves": moves,
        "pays": ", ".join(words for words in (steps, recomputed, moved) if words) or "nothing",
    }


def together(words: Sequence[str]) -> str:
    """`parameters, gradients and optimizer state`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# -- decisions -------------------------------------------------------------------------------------------------------


def why(result: TrialResult, decision: Decision) -> str:
    """What stands for or against a trial."""
    return decision.why


def next_action(decision: Decision | Comparison) -> str:
    """What to do next, with the words to type."""
    return decision.next_action


def conclusion(comparison: Comparison, results: list[TrialResult]) -> str:
    """Why a comparison has its verdict."""
    return comparison.why


def against(comparison: Comparison, results: list[TrialResult]) -> str:
    """What the trials of a comparison are compared with."""
    return comparison.against


def said(result: TrialResult, decision: Decision, comparison: Comparison, results: list[TrialResult]) -> dict[str, str]:
    """A decision in words, by the names that MLflow's tags have."""
    return {
        "why": why(result, decision),
        "next_action": next_action(decision),
        "against": decision.against,
        "disturbed": "; ".join(decision.disturbed),
    }
