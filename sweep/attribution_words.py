"""The words of an explanation: parts, moments and lists of names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sweep.findings import Change, Part
from sweep.results import Evidence, Peak, Phase
from sweep.words import mib, ms, percent

#: A residual up to this share of the total (or of the largest part) counts as closed.
CLOSES = 0.05
#: Parts below this share of the largest one are not worth a sentence.
WORTH_SAYING = 0.02


def change(unit: str, before: float, after: float, parts: list[Part], noise: float = 0.0) -> Change:
    """The change from `before` to `after` with its parts, largest first, and the residual that they leave.

    noise: what the two values may be off by chance, in `unit`. A residual inside of it is no open question.
    """
    total = after - before
    residual = total - sum(part.value for part in parts)
    size = max([abs(total), *(abs(part.value) for part in parts)])
    rounding = 1e-6 * max(abs(before), abs(after))  # sums of floats do not cancel exactly
    if abs(residual) <= rounding:
        residual = 0.0
    closes = abs(residual) <= max(CLOSES * size, noise)
    ordered = sorted((p for p in parts if p.value or p.words), key=lambda p: -abs(p.value))
    return Change(unit, before, after, total, ordered, residual, closes)


#: A phase within a sentence, where its name alone is not one.
PHASES = {
    "": "no phase",
    Phase.data.value: "the data phase",
    Phase.optimizer.value: "the optimizer's step",
    Phase.recompute.value: "recomputation",
    Phase.transfer.value: "a transfer",
}


def moment(peak: Peak, *, module: bool = True) -> str:
    """Where a peak lies: `backward (mm of head)`."""
    return moment_of(peak.phase, peak.operator, peak.module if module else "")


def moment_of(phase: str, operator: str, module: str = "") -> str:
    words = PHASES.get(phase, phase)
    if operator:
        words += f" ({short(operator)}{f' of {module}' if module else ''})"
    return words


def short(operator: str) -> str:
    """`aten.mm.default` as `mm`."""
    return operator.removeprefix("aten.").removesuffix(".default")


def same_moment(a: Peak, b: Peak) -> bool:
    """Whether two peaks lie at the same place of a step; like blocks (blocks.6, blocks.7) are one place."""
    return (a.phase, a.operator, alike(a.module)) == (b.phase, b.operator, alike(b.module))


def alike(module: str) -> str:
    """A module's name without its numbers: blocks.7.mlp as blocks.*.mlp."""
    return re.sub(r"\d+", "*", module)


def temporaries_of_optimizer(peak: Peak) -> str:
    """`the optimizer's foreach temporaries (aten._foreach_sqrt)`."""
    kind = "foreach temporaries" if "_foreach_" in peak.operator else "temporaries"
    return f"the optimizer's {kind}" + (f" ({peak.operator})" if peak.operator else "")


def together(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def in_unit(value: float, unit: str) -> str:
    return mib(value) if unit == "MiB" else ms(value)


def listed(found: Change) -> str:
    """`activations -205.9 MiB, recomputed activations +30.2 MiB`: the parts that are worth saying, largest first."""
    parts = [p for p in found.parts if abs(p.value) > small(found)]
    return ", ".join(f"{p.name} {signed(p.value, found.unit)}" for p in parts)


def signed(value: float, unit: str) -> str:
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{in_unit(abs(value), unit)}"


def small(found: Change) -> float:
    """The size below which a part of this change is not worth a sentence."""
    return WORTH_SAYING * max([abs(found.total), *(abs(p.value) for p in found.parts)])


def residual_share(found: Change) -> str:
    """`12.0 MiB (3 % of the change)`."""
    share = f" ({percent(abs(found.residual / found.total))} of the change)" if found.total else ""
    return f"{in_unit(abs(found.residual), found.unit)}{share}"


def verb(stem: str, evidence: str) -> str:
    """`lowers`, or where nothing was run `is predicted to lower`."""
    return f"is predicted to {stem}" if evidence == Evidence.predicted.value else f"{stem}s"


def in_optimizer(peak: Peak) -> bool:
    return peak.phase == Phase.optimizer.value
