"""The sentences: codes, numbers and ids of results and decisions in words, for every place that shows them."""

from __future__ import annotations

from sweep.format import mib
from sweep.results import Category, Comparison, Decision, Phase, TrialResult, WhatIf

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
