"""The sentences: codes, numbers and ids of results and decisions in words, for every place that shows them."""

from __future__ import annotations

from sweep.results import Category, Comparison, Decision, TrialResult

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
