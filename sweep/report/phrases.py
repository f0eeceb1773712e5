"""The sentences: codes, numbers and ids of results and decisions in words, for every place that shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sweep.config.schema import Granularity, Placement, StrategyConf
from sweep.config.strategy_names import accumulation_steps, micro_batch_size
from sweep.decide.budgets import LOSS, LOSS_RATIO, MEMORY, SAMPLES, THROUGHPUT_RATIO, Answer, Axis, Sensitivity, Span
from sweep.decide.causes import OPTIMIZER_TEMPORARY, Causes, Shared, alike, in_optimizer, parts_of
from sweep.format import (
    EVIDENCE_SHORT,
    EVIDENCE_WORDS,
    OUTCOME_WORDS,
    count,
    error,
    loss,
    mib,
    ms,
    number,
    percent,
    ratio,
    signed_loss,
)
from sweep.results import (
    CONFIDENCE,
    Advice,
    Category,
    Change,
    Comparison,
    Decision,
    Drift,
    Evidence,
    Finding,
    Moment,
    Outcome,
    Peak,
    Phase,
    Quality,
    TrialResult,
    Verdict,
    Verification,
    WhatIf,
)

#: Parts below this share of the largest one are not worth a sentence.
WORTH_SAYING = 0.02

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
#: Of a step's time (see sweep.decide.causes).
TIME_WORDS = {
    "recompute": "recomputation",
    "transfer": "transfer that was not hidden",
    "micro_steps": "more micro-steps",
    "passes": "forward and backward otherwise",
    "launches": "waiting for launches",
    "data": "waiting for data",
    "outside": "outside of all phases",
}
#: A phase within a sentence, where its name alone is not one.
PHASE_WORDS = {
    "": "no phase",
    Phase.data.value: "the data phase",
    Phase.optimizer.value: "the optimizer's step",
    Phase.recompute.value: "recomputation",
    Phase.transfer.value: "a transfer",
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


# -- one trial -------------------------------------------------------------------------------------------------------

#: What a reason means.
MEANINGS = {
    "not_equivalent": "it does not compute what the baseline computes",
    "not_finite": "its loss is not finite",
    "bad_setting": "this setting does not apply here",
    "crashed": "its process died",
    "failed": "it ended with an error",
    "nothing_offloaded": "offload was asked for and moved nothing",
    "nothing_recomputed": "recomputation was asked for and nothing was computed again",
    "out_of_memory": "it ran out of device memory",
    "out_of_host_memory": "it ran out of host memory",
    "over_budget": "it was predicted not to fit and was not run",
    "timed_out": "it took longer than allowed",
    "not_predictable": "its peak cannot be predicted",
    "memory_unknown": "its peak is not known",
    "throughput_unknown": "its throughput is not known, so the floor cannot be checked",
    "quality_unknown": "its held-out loss is not known, so the gate cannot be checked",
}


def why(result: TrialResult, decision: Decision) -> str:
    """What stands for or against a trial, with the numbers and what they rest on."""
    against = [reason(finding, result, decision) for finding in decision.findings]
    if decision.verdict != Verdict.accept.value:
        return "; ".join(against)
    peak = mib(decision.peak_mib) if decision.peak_mib is not None else "a peak that is not known"
    words = [f"{peak} of {mib(decision.cap_mib)} allowed" if decision.cap_mib is not None else f"{peak}, no cap known"]
    if decision.saved_mib is not None:
        words.append(_saves(decision.saved_mib) + _share(decision))
    if decision.throughput_ratio is not None:
        words.append(_throughput(decision))
    words += [verified(result.verification), *against]
    return f"{_how(result.evidence)}: {'; '.join(w for w in words if w)}"


def reason(finding: Finding, result: TrialResult, decision: Decision) -> str:
    """One thing that was found against a trial."""
    code, n, names = finding.code, finding.numbers, finding.names
    m, p, v = result.measurement, result.prediction, result.verification
    if result.outcome != Outcome.ok.value:
        detail = (v.reason if v is not None and not v.passed else "") or result.error
        return MEANINGS[code] + (f": {detail}" if detail else "")
    if code == "not_equivalent" and v is not None:
        if "step" in n:
            return (
                f"equal to the last bit over {count(v.steps, 'step')}, but its loss {n['step']:g} is {n['loss']:.8g} "
                f"where the baseline's is {n['expected_loss']:.8g}: something that forward moves shows later"
            )
        errors = f"relative error {error(v.max_rel_err)}, allowed {error(v.tolerance)}"
        return f"{MEANINGS[code]}: {v.reason or errors}"
    if code == "not_verified":
        if v is None:
            off = (result.config.get("measure") or {}).get("verify") is False
            return "not verified as equal to the baseline" + (" (measure.verify=false)" if off else "")
        what = "it cannot be" if v.status == "not_comparable" else "too little of it was"
        return f"{what} compared with the baseline: {v.reason or 'no reason is known'}"
    if code == "over_memory" and "cap_mib" in n:
        over = n["peak_mib"] - n["cap_mib"]
        what = "peak" if m is not None else "predicted peak"
        return f"{what} {mib(n['peak_mib'])}, {mib(over)} over the cap of {mib(n['cap_mib'])} ({names['cap']})"
    if code == "over_memory":
        short = f", short by {mib(-n['headroom_mib'])}" if "headroom_mib" in n else ""
        return f"predicted to reserve {mib(n['reserved_mib'])}, which does not fit {names['device']}{short}"
    if code == "uncertain" and p is not None:
        return f"less sure, {percent(n['left_ratio'])} are left: {'; '.join(p.unsure)}"
    if code == "below_throughput" and "floor_ratio" in n:
        return f"{ratio(n['ratio'])} the baseline's throughput is under the floor of {ratio(n['floor_ratio'])}"
    if code == "below_throughput":
        return f"{number(n['samples_per_s'])} samples/s are under the floor of {number(n['floor_per_s'])}"
    if code == "quality_lost" and "gate_ratio" in n:
        gate = f"{ratio(n['ratio'])} the baseline's, above the gate of {ratio(n['gate_ratio'])}"
        return f"held-out loss {loss(n['loss'])} is {gate}"
    if code == "quality_lost":
        return f"held-out loss {loss(n['loss'])} is above the gate of {loss(n['gate_loss'])}"
    if code == "saving_too_small":
        if result.is_baseline:
            return f"the baseline saves nothing, and {mib(n['least_mib'])} were asked for"
        least = f", less than the {mib(n['least_mib'])} that count" if "least_mib" in n else " and is not faster"
        return _saves(n["saved_mib"]) + least
    if code == "repeat_failed" and m is not None:
        wrong = [run for run in m.runs if run.error]
        first = f"repeat {wrong[0].index + 1}: {wrong[0].error}"
        return f"not all of its repeats came to their end: {len(wrong)} of {len(m.runs)} went wrong ({first})"
    if code == "evidence_too_short":
        steps = f"{count(m.repeats, 'repeat')} of {count(m.steps, 'step')} " if m is not None else ""
        return f"{steps}on a GPU are too short to conclude"
    if code == "evidence_too_weak":
        return f"{_how(result.evidence)} only, and the evidence asked for is {names['evidence']}"
    if code == "disturbed":
        return f"timing unreliable: {disturbances(decision.disturbed)}"
    return MEANINGS[code]


def disturbances(found: list[Finding]) -> str:
    """The first thing that disturbed a trial's times, and how many more did."""
    return disturbed(found[0]) + (f" and {count(len(found) - 1, 'more finding')}" if len(found) > 1 else "")


def disturbed(finding: Finding) -> str:
    """`repeat 2: other processes used 1.6 cores`; what an earlier version said in words is shown as it is."""
    n, words = finding.numbers, finding.code
    if finding.code == "cpu_others":
        of = f" of {n['of_cores']:g}" if "of_cores" in n else ""
        words = f"other processes used {n['cores']:.1f}{of} cores"
    elif finding.code == "gpu_processes":
        memory = f" ({mib(n['other_mib'])})" if "other_mib" in n else ""
        words = f"{count(int(n['processes']), 'other process', 'other processes')} on the GPU{memory}"
    elif finding.code == "gpu_memory":
        words = f"others held about {mib(n['other_mib'])} of the GPU's memory"
    elif finding.code == "gpu_throttled":
        words = f"the GPU's clock was held down: {finding.names['throttled']}"
    elif finding.code == "gpu_clock":
        words = f"the GPU's clock was down to {n['clock_mhz']:.0f} MHz, from {n['highest_mhz']:.0f}"
    return f"repeat {n['repeat']:g}: {words}" if "repeat" in n else words


def verified(v: Verification | None) -> str:
    """`gradients equal in 100 % of the parameters over 2 steps`; "" where the share is not known."""
    if v is None or not v.passed or v.compared_share is None:
        return ""
    return f"gradients equal in {percent(v.compared_share)} of the parameters over {count(v.steps, 'step')}"


def quality_why(q: Quality) -> str:
    """How far a held-out loss is from the baseline's, and how sure that is."""
    seeds, change = count(q.seeds, "seed"), signed_loss(q.difference)
    if q.verdict == "unknown":
        return f"{change} with one seed, which cannot tell it from chance; measure.seeds=3 would"
    if q.difference_low is None or q.difference_high is None or not (q.difference_low or q.difference_high):
        return f"held-out loss equal to the last bit ({seeds})"
    low, high = signed_loss(q.difference_low), signed_loss(q.difference_high)
    over = f"{change} ({percent(CONFIDENCE)} interval {low} to {high}, {seeds})"
    return f"{over}, within the noise; up to {high} is not ruled out" if q.verdict == "equal" else over


def _how(evidence: str) -> str:
    return EVIDENCE_SHORT.get(evidence, evidence)


def _saves(saved_mib: float) -> str:
    if saved_mib == 0:
        return "saves nothing"
    return f"saves {mib(saved_mib)}" if saved_mib > 0 else f"takes {mib(-saved_mib)} more"


def _share(decision: Decision) -> str:
    saved, peak = decision.saved_mib, decision.peak_mib
    return f" ({percent(saved / (saved + peak))})" if saved and peak and saved > 0 else ""


def _throughput(decision: Decision) -> str:
    none = " (no difference in time beyond the noise)" if decision.step is not None and decision.step.none else ""
    return f"{ratio(decision.throughput_ratio)} the baseline's throughput{none}"


# -- what to do next -------------------------------------------------------------------------------------------------

_GENERATORS = "torch's, Python's or numpy's global generator, which are set again for each run"
_NO_REPEAT = "the baseline does not repeat itself, not the strategy's fault: find what differs between two runs"
#: By code; numbers and names of the advice stand in braces.
ADVICE = {
    "use": "use {trial} instead",
    "nothing_fits": "parameters, gradients and optimizer state alone take {lasting_mib}, more than the cap: no "
    "strategy here fits; take a smaller model, parameters in bf16, or a larger device",
    "half_batch": "half of the batch at once",
    "recompute": "recompute activations instead of keeping them",
    "recompute_more_blocks": "recompute one block in {k} instead of one in {now}",
    "recompute_fewer_blocks": "recompute one block in {k} instead of one in {now}",
    "recompute_whole_blocks": "recompute whole blocks, matmul and attention too",
    "recompute_too": "this strategy has no smaller size; recompute activations as well",
    "recompute_instead": "recompute instead of moving",
    "segment_size": "about the square root of {blocks} blocks keeps least",
    "offload_all": "move everything that is saved, not only a part",
    "keep_none": "keep no block's tensors on the device",
    "keep_more": "keep the tensors of the last {keep} blocks on the device, not of {now}",
    "inputs_only": "move the inputs of blocks only",
    "small_tensors": "tensors under {now_kib} KiB stay on the device now",
    "nothing_to_move": "this model leaves nothing that could be moved",
    "fewer_samples": "{samples} instead of {now} samples at once",
    "more_samples": "{samples} instead of {now} samples at once",
    "fewer_copies": "fewer samples at once leave fewer host copies",
    "both": "recompute, and move what that leaves",
    "used_up": "every setting here is at its end: take a smaller model, shorter samples, parameters in bf16, or a "
    "larger device",
    "free_host": "nothing is offloaded here: free host memory, or take a smaller data set or model",
    "selective": "keep what matmul and attention gave, recompute the rest",
    "pin_memory": "page-locked host memory is copied while the device computes",
    "no_faster": "this strategy has no faster setting: take another one, or lower the floor",
    "noise": "the floor is missed by less than the spread of the step times",
    "baseline_too_slow": "the baseline itself is too slow for this floor: lower it, or take a faster device",
    "too_large_and_too_slow": "too much memory and too slow at once: what helps one hurts the other here; take another "
    "strategy, or a wider budget",
    "batch_statistics": "{where} computes over all samples of a batch, which checkpointing leaves together; a "
    "GroupNorm in the place of a BatchNorm would not",
    "loss_is_no_mean_over_samples": "a loss without `count` is taken for a mean over samples: give it `count(batch)`, "
    "what it divides by, or use sweep.workload.loss.CrossEntropy",
    "state": "forward changes {where} and runs more than once here: change it outside of forward",
    "random": f"draw what {{where}} draws from {_GENERATORS}",
    "baseline_does_not_repeat": _NO_REPEAT,
    "hooks": "ours keeps strides, aliases and parameters as they are",
    "cause_unknown": "what makes it differ is not known: begin at {where}{in_folder}",
    "another_seed": "keep the baseline; if this strategy was verified as equal, see whether it is chance with another "
    "seed",
    "smaller_lr": "a smaller learning rate, for the baseline as well",
    "name_blocks": "name the modules that forward calls with workload.blocks",
    "as_said": "do what its error says",
    "read_error": "read its error and details{in_folder}, and run it alone with HYDRA_FULL_ERROR=1",
    "baseline_saves_nothing": "the baseline cannot save anything against itself",
    "more_time": "twice the {timeout_s} s allowed",
    "longer": "long enough to conclude",
    "to_its_end": "run it to its end: {ended} of {repeats} repeats came to theirs",
    "repeat_again": "measure it again: the repeats that came to their end count, the others leave a doubt",
    "quieter": "on a quiet machine; with more repeats single ones weigh less",
    "run_it": "run it",
    "run_uncertain": "run it: what is left is too little for what the prediction does not count",
    "run_beside": "run it beside the baseline",
    "on_gpu": "the same command on a machine with a GPU",
    "memory_pass": "without the memory pass the peak is not known",
    "evaluate": "the held-out loss was not computed",
    "verify": "compare with the baseline before measuring",
    "verify_longer": "after more steps more of the parameters have gradients",
    "verify_baseline_does_not_repeat": _NO_REPEAT,
    "verify_random": f"it can be compared where all random numbers come from {_GENERATORS}",
    "verify_does_not_fit": "verify a smaller model of the same kind, or on a device with more memory",
}


def strategy_words(s: StrategyConf, global_batch_size: int) -> str:
    """What a strategy does, with its numbers."""
    c, o, told = s.checkpoint, s.offload, []
    micro, blocks = micro_batch_size(s, global_batch_size), "every block" if s.checkpoint.every_k == 1 else ""
    if micro < global_batch_size:
        pieces = count(accumulation_steps(s, global_batch_size), "piece")
        told.append(f"computes {micro} of {global_batch_size} samples at once, {pieces}")
    if c.granularity is not Granularity.none:
        blocks = blocks or f"one block in {c.every_k}"
        which = {
            Granularity.blocks: blocks,
            Granularity.segments: f"segments of {count(c.segment_size, 'block')}",
            Granularity.selective: f"{blocks} but for matmul and attention results",
            Granularity.parts: "parts of each block",
        }[c.granularity]
        told.append(f"recomputes {which} in backward")
    if o.placement is not Placement.none:
        whose = {Placement.inputs: "the inputs of blocks", Placement.blocks: "saved tensors of chosen blocks"}
        least = f" of at least {o.min_tensor_kib:g} KiB" if o.min_tensor_kib > 0 else ""
        kept = "the last block" if o.keep_last == 1 else f"the last {o.keep_last} blocks"
        told.append(
            f"offloads {whose.get(o.placement, 'saved tensors')}{least}{'' if o.pin_memory else ', pageable'}"
            + (f", except those of {kept}" if o.keep_last > 0 else "")
        )
    whole = f"nothing: {count(global_batch_size, 'sample')} at once, all activations kept on the device"
    return "; ".join(told) or whole


def advice(a: Advice | None) -> str:
    """What to do, with the words to type: `try strategy.micro_batch_size=4 (4 instead of 8 samples at once)`."""
    if a is None:
        return ""
    shown = {key: mib(v) if key.endswith("_mib") else f"{v:g}" for key, v in a.numbers.items()}
    folder = a.names.get("folder", "")
    in_folder = f" in {folder}/result.json" if folder else ""
    names = {"where": a.names.get("where") or "a part of it", "in_folder": in_folder}
    template = ADVICE[a.code] if a.code != "optimizer" else _optimizer(a)
    words = template.format_map({**a.names, **shown, **names})
    ran = f"; run here already as {a.ran_as}" if a.ran_as else ""
    return (f"try {' '.join(a.overrides)} ({words})" if a.overrides else words) + ran


def _optimizer(a: Advice) -> str:
    temporaries = ", {temporary_mib} of it temporaries" if "temporary_mib" in a.numbers else ""
    words = f"the peak is in the optimizer's step{temporaries}, which no activation strategy lowers; "
    if not a.overrides:
        return words + "take a smaller model, or an optimizer that keeps less"
    return words + CHANGES[a.names["change"]][0] + "; this is another workload, so compare with its own baseline"


def next_action(comparison: Comparison, results: list[TrialResult]) -> str:
    """What to do after a comparison."""
    c, index, nearest = comparison, comparison.preferred_index, comparison.nearest_index
    if index is None:
        return f"{results[nearest].name}: {advice(c.decisions[nearest].advice)}" if nearest is not None else ""
    if not results[index].is_baseline:
        return f"use {results[index].name}{_CONFIRM.get(c.evidence, '')}"
    if c.cheapest_index is not None:
        saving = _saving(results[c.cheapest_index], c.decisions[c.cheapest_index])
        return f"keep the baseline; if memory gets short, {saving}"
    if len(results) > 1:
        return "keep the baseline; none of the trials saves memory"
    return "keep the baseline; -m 'strategy=glob(*)' shows what each strategy would save"


_CONFIRM = {
    Evidence.predicted.value: "; nothing was run yet: run it with mode=measure",
    Evidence.cpu.value: "; this says nothing about a GPU: repeat the sweep on the one that you train on",
}


def _saving(result: TrialResult, decision: Decision) -> str:
    """`micro_batch saves 120 MiB (38 %) at 0.80x the throughput`."""
    saved = f"{mib(decision.saved_mib)}{_share(decision)}"
    if decision.throughput_ratio is None:
        return f"{result.name} changes least and is predicted to save {saved}; what it costs in time is not known"
    if decision.step is not None and (decision.step.ratio <= 1 or decision.step.none):
        return f"{result.name} saves {saved} without a loss of time beyond the noise"
    return f"{result.name} saves {saved} at {ratio(decision.throughput_ratio)} the throughput"


# -- a comparison ----------------------------------------------------------------------------------------------------


def against(comparison: Comparison, results: list[TrialResult]) -> str:
    """What the trials are compared with."""
    if comparison.baseline_index is None:
        return "absolute floors and each other: there is no baseline here"
    baseline = results[comparison.baseline_index]
    if baseline.outcome != Outcome.ok.value:
        ended = OUTCOME_WORDS.get(baseline.outcome, baseline.outcome)
        return f"absolute floors and each other: the baseline {ended}"
    peak, m = mib(comparison.decisions[comparison.baseline_index].peak_mib), baseline.measurement
    return f"the baseline ({peak}, {f'{ms(m.step_ms)} per step' if m is not None else 'predicted'})"


def conclusion(comparison: Comparison, results: list[TrialResult]) -> str:
    """Why a comparison has its verdict."""
    c, index = comparison, comparison.preferred_index
    if index is None:
        words = _nothing_accepted(c, results)
    elif results[index].is_baseline:
        words = _keep_the_baseline(c, results, index)
    else:
        words = _take(c, results, index)
    found = [f"{words} ({EVIDENCE_WORDS.get(c.evidence, c.evidence)})", drift_found(c.drift)]
    names = [r.name for r, d in zip(results, c.decisions) if d.disturbed]
    if names:
        whose = "all trials" if len(names) == len(results) > 1 else ", ".join(names)
        found.append(f"the times of {whose} were disturbed, so measure again on a quiet machine before relying on them")
    if index is not None and "uncertain" in c.decisions[index].reasons:
        found.append("whether it fits is less sure by what the prediction does not count")
    return "; ".join(w for w in found if w)


def _keep_the_baseline(c: Comparison, results: list[TrialResult], index: int) -> str:
    peak = c.decisions[index].peak_mib
    if c.cap_mib is None:
        fit = f"no memory cap is set (budget.memory_mib) and the baseline takes {mib(peak)}"
    else:
        spare = f", {mib(c.cap_mib - peak)} to spare" if peak is not None else ""
        fit = f"the baseline takes {mib(peak)} of the {mib(c.cap_mib)} allowed{spare}"
    timed = len(results) > 1 and results[index].measurement is not None
    return f"nothing needs to change under this budget: {fit}" + (f"; it {_rank(c, results, index)}" if timed else "")


def _take(c: Comparison, results: list[TrialResult], index: int) -> str:
    result, decision, m = results[index], c.decisions[index], results[index].measurement
    accepted, base = sum(d.verdict == Verdict.accept.value for d in c.decisions), c.baseline_index
    words = ["there is no baseline here" if base is None else ""]
    if base is not None and c.decisions[base].verdict != Verdict.accept.value:
        words = [f"the baseline is no option: {why(results[base], c.decisions[base])}"]
    if m is None:
        among = count(accepted, "trial")
        words.append(f"{result.name} changes least among {among} predicted to fit; times are not known")
    else:
        among = f"{count(accepted, 'trial')} accepted, {ms(m.step_ms)} per step"
        words.append(f"{result.name} {_rank(c, results, index)} ({among})")
    peak = mib(decision.peak_mib) if decision.peak_mib is not None else "its peak is not known"
    numbers = [peak + (f" of {mib(c.cap_mib)} allowed" if c.cap_mib is not None else "")]
    if decision.saved_mib is not None and decision.saved_mib > 0:
        numbers.append(_saves(decision.saved_mib) + _share(decision))
    if decision.throughput_ratio is not None:
        numbers.append(_throughput(decision))
    words += [", ".join(numbers), verified(result.verification)]
    words.append("it was not verified as equal to the baseline" if "not_verified" in decision.reasons else "")
    return "; ".join(w for w in words if w)


def _rank(c: Comparison, results: list[TrialResult], index: int) -> str:
    own = results[index].measurement
    accepted = [r for r, d in zip(results, c.decisions) if d.verdict == Verdict.accept.value]
    faster = [
        r.name for r in accepted if own is not None and r.measurement and r.measurement.step_ms < own.step_ms
    ]
    if not faster:
        return "is the fastest accepted"
    least = "cannot be" if results[index].is_baseline else "takes least memory of those that cannot be"
    return f"{least} told apart in time from the fastest (faster by the median: {', '.join(faster)})"


def _nothing_accepted(c: Comparison, results: list[TrialResult]) -> str:
    what = "no trial is accepted" + (" yet" if c.verdict == Verdict.tune.value else "")
    if c.nearest_index is None:
        return what
    nearest = results[c.nearest_index]
    return f"{what}; nearest is {nearest.name}: {why(nearest, c.decisions[c.nearest_index])}"


def drift_found(drift: Drift | None) -> str:
    """What was found of a drift: "" where none was looked for or none was found."""
    if drift is None or drift.difference.none:
        return ""
    way = "slower" if drift.difference.ratio > 1 else "faster"
    over = f"over {number(drift.minutes)} minutes" if drift.minutes >= 0.1 else "meanwhile"
    change = percent(abs(drift.difference.ratio - 1))
    return (
        f"the machine drifted: the baseline at the end was {change} {way} than at the start, {over}; differences in "
        "time below that are called none"
    )


def said(result: TrialResult, decision: Decision, comparison: Comparison, results: list[TrialResult]) -> dict[str, str]:
    """A decision in words, by the names that MLflow's tags have."""
    return {
        "why": why(result, decision),
        "next_action": advice(decision.advice),
        "against": "the budget alone: this is the baseline" if result.is_baseline else against(comparison, results),
        "disturbed": "; ".join(map(disturbed, decision.disturbed)),
        "preferred": "yes" if decision is _preferred(comparison) else "",
    }


def _preferred(c: Comparison) -> Decision | None:
    return None if c.preferred_index is None else c.decisions[c.preferred_index]


# -- causes ----------------------------------------------------------------------------------------------------------


def part(code: str) -> str:
    """The label of a part of a peak or of a step."""
    return PART_WORDS.get(code) or TIME_WORDS.get(code, code)


def moment(m: Moment | None) -> str:
    """Where a peak lies: `backward (mm of head)`."""
    if m is None:
        return "not known"
    inside = f" of {m.module}" if m.module else ""
    return PHASE_WORDS.get(m.phase, m.phase) + (f" ({operator_words(m.operator)}{inside})" if m.operator else "")


def signed(value: float, unit: str) -> str:
    shown = mib(abs(value)) if unit == "MiB" else ms(abs(value))
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{shown}"


def parts(change: Change, most: int | None = None) -> str:
    """`activations -205.9 MiB, recomputed activations +30.2 MiB`: what is worth saying, largest first."""
    least = WORTH_SAYING * max([abs(change.total), *(abs(p.value) for p in change.parts)])
    told = [f"{part(p.name)} {signed(p.value, change.unit)}" for p in change.parts if abs(p.value) > least]
    return ", ".join(told[:most])


def note(n: Finding) -> str:
    """What else a step's time is made of, as a sentence."""
    v = n.numbers
    if n.code == "copies":
        hidden = percent(v["hidden_ratio"]) if v["hidden_ratio"] else "none"
        return f"Copies between host and device take {ms(v['copy_ms'])} a step, {hidden} of it beside kernels (trace)."
    if n.code == "copies_on_cpu":
        return "Copies run on this CPU itself, so none of their time can be hidden here."
    if n.code == "operators":
        micro = f"{count(int(v['micro_steps']), 'micro-step')}; " if v["micro_steps"] > 1 else ""
        return f"The host calls {v['operators']:g} operators a step instead of {v['before']:g} ({micro}trace)."
    costs = [f"{percent(v['recompute_ratio'])} of a step's FLOPs are computed again"] if v["recompute_ratio"] else []
    if v["moved_mib"]:
        at_link = f" ({ms(v['transfer_ms'])} at the link's bandwidth)" if v["transfer_ms"] else ""
        costs.append(f"{mib(v['moved_mib'])} are moved a step{at_link}")
    costs += [f"a step is computed in {v['micro_steps']:g} micro-steps"] if v["micro_steps"] > 1 else []
    start = "What it costs in time is not known, since nothing was run"
    return f"{start}; theoretically {', and '.join(costs)}." if costs else f"{start}."


def finding(f: Finding) -> str:
    """What does not add up or surprises."""
    units = {"mib": mib, "ms": ms, "ratio": percent}
    shown = {key: units[key.rpartition("_")[2]](value) for key, value in f.numbers.items()}
    if f.code == "long_recomputation":
        shown["times"] = ratio(f.numbers["recompute_ms"] / f.numbers["forward_ms"])
    why_not = {"no_ledger": "measure.ledger=false", "not_recorded": "it was not recorded"}
    return SURPRISES[f.code].format_map({**f.names, **shown, "why": why_not.get(f.names.get("why", ""), "")})


SURPRISES = {
    "no_account": "what was alive at the peak of {trial} is not known: {why}",
    "not_alike": "one of the two was measured and the other only predicted: their peaks are not compared",
    "predicted_elsewhere": "its peak was predicted in {predicted} and found in {found}",
    "peak_not_closed": "{residual_mib} of the change of the peak ({total_mib}) are in no category",
    "optimizer_peak_now": "of {gone_mib} activations that are gone from the peak only {saved_mib} are saved: the peak "
    "is now in the optimizer, which no activation strategy changes",
    "time_not_closed": "{residual_ms} of the change of the step time ({total_ms}) belong to no phase: look at the "
    "spread of the steps, and repeat on a quiet machine",
    "long_recomputation": "recomputation takes {recompute_ms}, {times} a forward ({forward_ms}): about 1x is expected",
    "faster_with_more": "a step is shorter than the baseline's although more is done in it: caches, clocks or drift",
    "copies_not_hidden": "only {hidden_ratio} of the copies' time is hidden behind kernels",
    "disturbed": "its times were disturbed",
}


def causes(c: Causes) -> list[str]:
    """Sentences over the trials of one comparison, most important first; [] where nothing is known of them."""
    words = []
    if c.baseline is not None:
        b, where = c.baseline, moment(c.baseline.moment)
        words.append(f"The peak of {b.trial}, {mib(b.mib)} ({_how(b.evidence)}), lies in {where}: {shares(b.peak)}.")
    for group in c.shared:
        words += _shared(group)
    return words + _times(c)


def shares(peak: Peak, most: int = 3) -> str:
    """`39 % optimizer state, 33 % activations`: what fills a peak, largest first."""
    found = parts_of(peak)
    total = sum(found.values()) or 1.0
    ordered = sorted(found.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{percent(value / total)} {part(name)}" for name, value in ordered if value > 0)


def _shared(group: Shared) -> list[str]:
    """What limits trials that stop at one peak, and what would lower it."""
    names, several, peak = together(group.trials), len(group.trials) > 1, group.lowest.peak
    stop = f"{names} {'all stop near' if several else 'stops at'} {mib(group.mib)} ({_how(group.evidence)})"
    if not in_optimizer(peak):
        if group.with_baseline:
            return [f"{names} have one peak, as high and in the same moment as the baseline's."]
        where = moment(Moment(peak.phase, peak.operator, alike(peak.module)))
        return [f"{stop}: the peak lies in {where}; left there are {shares(peak)}."]
    temporary = parts_of(peak).get(OPTIMIZER_TEMPORARY, 0.0)
    where = moment(group.lowest.moment) + (f", {mib(temporary)} of it temporaries" if temporary else "")
    how = "no longer in the activations" if group.lowered_activations else "not in the activations"
    words = [f"{stop}: the peak lies in {where}, {'already for the baseline' if group.with_baseline else how}."]
    if group.floor:
        words.append("No activation strategy goes below this: no activations are left in the optimizer's step.")
    if group.change is not None:
        w, to = group.change, f"by {mib(group.change.saved_mib)}, to {mib(group.change.allocated_mib)}"
        words.append(f"{w.override} is predicted to lower the peak of {group.change_for} {to}.")
    return words


def _times(c: Causes) -> list[str]:
    """What each measured trial pays per step, and for what most."""
    timed = [(e, e.time) for e in c.trials if e is not None and e.time is not None]
    told = []
    for e, change in timed:
        if e.quiet:
            told.append(f"{e.candidate} nothing beyond the noise")
            continue
        share = f" ({percent(change.total / change.before, sign=True)})" if change.before else ""
        largest = max((p for p in change.parts if p.value * change.total > 0), key=lambda p: abs(p.value), default=None)
        most = f", {ms(largest.value)} of it {part(largest.name)}" if largest and largest.name != "passes" else ""
        told.append(f"{e.candidate} {signed(change.total, change.unit)}{share}{most}")
    if not told:
        return []
    before, how = ms(timed[0][1].before), _how(timed[0][0].evidence)
    return [f"Step time against the baseline's {before} ({how}): {'; '.join(told)}."]


# -- other budgets ---------------------------------------------------------------------------------------------------

UNITS = {
    MEMORY.key: " MiB",
    THROUGHPUT_RATIO.key: "x",
    SAMPLES.key: " samples/s",
    LOSS_RATIO.key: "x",
    LOSS.key: "",
}


def survival(asked: Sensitivity) -> list[str]:
    """How far the budget can move before the choice changes: a sentence for each setting, and what is not known."""
    told = [words_of(asked, axis, asked.spans(axis)) for axis in asked.axes]
    return [f"{head}: {words}" for head, words in told] + caveats(asked)


def words_of(asked: Sensitivity, axis: Axis, spans: list[Span]) -> tuple[str, str]:
    """`Memory cap (now 70.0 MiB)`, and `checkpoint stays the choice from 62.3 up to 87.3 MiB; below that, ...`."""
    head = f"{axis.label.capitalize()} ({now_words(asked, axis)})"
    value, present = asked.cap_mib({}) if axis is MEMORY else getattr(asked.budget, axis.key), Answer.of(asked.present)
    at = axis.loosest if value is None else value
    outer = len(spans) - 1 if axis.rising else 0
    here = next((i for i, span in enumerate(spans) if span.holds(at, axis)), outer)
    if value is None and spans[outer].answer.preferred_index != present.preferred_index:
        # Some trial has no number that a cap or a gate could be held against.
        return head, f"{choice(present)} while there is none; with any, {chain_words(axis, spans, from_loosest=True)}"
    if all(s.answer.preferred is None for s in spans):
        return head, f"{choice(present)}, whatever it is"
    ordered = spans[::-1] if axis.rising else spans  # the loosest first
    span, here = spans[here], len(spans) - 1 - here if axis.rising else here
    below, edge = ("below", span.low) if axis.rising else ("above", span.high)
    said = [choice(span.answer)]
    if span.answer.preferred is not None:
        open_above = axis.rising and span.high == math.inf and span.low > 0
        how = f"down to {shown(axis, span.low)}" if open_above else range_words(axis, span)
        said = [f"{span.answer.preferred} stays the choice {how}{_OF.get(axis.key, '') if how.endswith('x') else ''}"]
    if here > 0:
        limit, more = (span.high, "more") if axis.rising else (span.low, "less")
        said.append(f"with {shown(axis, limit)} or {more}, {choice(ordered[here - 1].answer)}")
    if here + 1 < len(ordered):
        says_edge = span.answer.preferred is not None and (not axis.rising or span.high == math.inf)
        stricter = ordered[here + 1].answer
        said.append(f"{below} {'that' if says_edge else shown(axis, edge)}, {choice(stricter)}")
        accepting = [s for s in ordered if s.answer.preferred is not None]
        if ordered[-1].answer.preferred is None and stricter.preferred is not None:
            last = accepting[-1].low if axis.rising else accepting[-1].high
            said.append(f"{below} {shown(axis, last)} nothing is accepted")
    return head, "; ".join(said)


_OF = {THROUGHPUT_RATIO.key: " the baseline's throughput", LOSS_RATIO.key: " the baseline's held-out loss"}


def now_words(asked: Sensitivity, axis: Axis) -> str:
    """`now 70.0 MiB`, or that there is none."""
    value = getattr(asked.budget, axis.key)
    if value is not None:
        return f"now {plain_value(axis, value)}{UNITS[axis.key]}"
    if axis is MEMORY and asked.capacity_mib is not None:
        return f"now the device's {mib(asked.capacity_mib)}"
    return "none is set"


def chain_words(axis: Axis, spans: list[Span], from_loosest: bool = False) -> str:
    """Every choice along one setting, strictest first unless told otherwise."""
    ordered = spans if axis.rising != from_loosest else spans[::-1]
    return "; ".join(f"{choice(span.answer)} {range_words(axis, span)}" for span in ordered)


def range_words(axis: Axis, span: Span) -> str:
    """`from 62.3 up to 87.3 MiB`. Ends that still hold are rounded so that the number shown does hold."""
    has_low, has_high = span.low > 0, span.high < math.inf
    if not has_low and not has_high:
        return "at any value"
    if axis.rising:
        if not has_high:
            return f"from {shown(axis, span.low)} on"
        top = shown(axis, span.high)
        return f"from {_bound(axis, span.low)} up to {top}" if has_low else f"below {top}"
    if not has_high:
        return f"above {shown(axis, span.low)}"
    above = f"above {_bound(axis, span.low)} and " if has_low else ""
    return f"{above}up to {shown(axis, span.high)}"


def choice(answer: Answer) -> str:
    return answer.preferred if answer.preferred is not None else f"nothing is accepted ({answer.verdict})"


def caveats(asked: Sensitivity) -> list[str]:
    """What the limits rest on, and what they cannot know."""
    lines = []
    for elsewhere in (False, True):
        found = [n.from_mib for n in asked.never_run if n.needs_other_device == elsewhere]
        if not found:
            continue
        least = shown(MEMORY, min(found))
        if elsewhere:
            do = f"{count(len(found), 'candidate does', 'candidates do')} not fit this one"
            lines.append(f"Not known for a larger device: {do}; from {least} on one of them may be faster")
        else:
            were = f"{count(len(found), 'candidate was', 'candidates were')} predicted not to fit and never run"
            lines.append(f"Not known from a cap of {least} on: {were}, and one of them may be faster")
    too_large = sum(r.mode == "predict" and r.outcome == Outcome.over_budget.value for r in asked.results)
    if too_large:
        do = count(too_large, "trial does", "trials do")
        lines.append(f"{do} not fit this device, whatever the cap: predict for a larger one with device=...")
    if any(n.index == asked.present.baseline_index for n in asked.never_run):
        lines.append("The baseline has no measurement, so floors and gates relative to it do not apply")
    index = asked.present.preferred_index
    decision = None if index is None else asked.present.decisions[index]
    step, own = (None, None) if decision is None else (decision.step, decision.throughput_ratio)
    if step is not None and own is not None and step.low > 0:
        slow, fast = 1 / step.high, 1 / step.low
        lines.append(
            f"The throughput of {asked.present.preferred} is {ratio(own)} the baseline's by the "
            f"median, and between {ratio(slow)} and {ratio(fast)} for all that is sure: a floor between these may fall "
            "either way"
        )
    ran = sum(r.measurement is not None for r in asked.results)
    if ran:
        lines.append(f"These limits are numbers of the {count(ran, 'trial')} that ran ({_how(asked.present.evidence)})")
    else:
        lines.append("Peaks are predicted and nothing was run, so there is no throughput and no loss to hold against")
    return lines


def shown(axis: Axis, value: float) -> str:
    return f"{_bound(axis, value)}{UNITS[axis.key]}"


def plain_value(axis: Axis, value: float) -> str:
    """A value as it was set."""
    return f"{value:.1f}" if axis is MEMORY and 1 <= value < 1000 else f"{value:g}"


def _bound(axis: Axis, value: float) -> str:
    """An end of a span: rounded to the side that admits the trial it comes from."""
    digits = 3 if axis is THROUGHPUT_RATIO else 4
    if axis in (MEMORY, SAMPLES):
        digits = 0 if value >= 1000 else 1 if value >= (1 if axis is MEMORY else 10) else 3
    scaled = round(value * 10**digits, 6)  # 62.3 is not exactly 623 tenths
    text = f"{(math.ceil(scaled) if axis.rising else math.floor(scaled)) / 10**digits:.{digits}f}"
    while axis in (THROUGHPUT_RATIO, LOSS_RATIO) and text.endswith("0") and text[-3] != ".":
        text = text[:-1]  # 0.90, 1.00, but 0.902
    return text
