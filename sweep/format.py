"""Numbers and evidence in words: the one place that rounds, names units and says what a number rests on."""

from __future__ import annotations

import math

from sweep.results import Evidence, Outcome

NOT_KNOWN = "-"

#: What a number of this evidence may be called. A CPU's or a predicted number is never worded as a GPU's.
EVIDENCE_WORDS = {
    Evidence.predicted.value: "predicted, nothing was run",
    Evidence.cpu.value: "emulated on this CPU: memory counts every tensor, times are this CPU's",
    Evidence.smoke.value: "run on a GPU, too short to conclude",
    Evidence.measured.value: "measured on this GPU",
}

#: The same beside a single number.
EVIDENCE_SHORT = {
    Evidence.predicted.value: "predicted",
    Evidence.cpu.value: "on this CPU",
    Evidence.smoke.value: "too short to conclude",
    Evidence.measured.value: "on this GPU",
}

OUTCOME_WORDS = {
    Outcome.ok.value: "ran",
    Outcome.over_budget.value: "was predicted not to fit and was not run",
    Outcome.oom_device.value: "ran out of device memory",
    Outcome.oom_host.value: "ran out of host memory",
    Outcome.nan.value: "gave a loss that is not finite",
    Outcome.timeout.value: "took too long",
    Outcome.crashed.value: "crashed",
    Outcome.invalid.value: "was not valid",
    Outcome.failed.value: "failed",
}


def known(value: float | None) -> float | None:
    """The value, or None where it is NaN or infinite: those carry no information and have no JSON."""
    return value if value is not None and math.isfinite(value) else None


def number(value: float | None) -> str:
    """Without an exponent, and without more digits than matter: 9783, 312.4, 4.1, 0.35, 0."""
    if known(value) is None or value is None:
        return NOT_KNOWN
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 or size == 0 else f"{value:.1f}" if size >= 1 else f"{value:.2f}"


def mib(value: float | None) -> str:
    return f"{number(value)} MiB"


def ms(value: float | None) -> str:
    return f"{number(value)} ms"


def ratio(value: float | None) -> str:
    return NOT_KNOWN if known(value) is None else f"{value:.2f}x"


def percent(value: float | None, digits: int = 0, sign: bool = False) -> str:
    """A ratio as a percentage: 0.35 becomes `35 %`."""
    if known(value) is None or value is None:
        return NOT_KNOWN
    return f"{100 * value:{'+' if sign else ''}.{digits}f} %"


def loss(value: float | None) -> str:
    if known(value) is None or value is None:
        return NOT_KNOWN
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def signed_loss(value: float | None) -> str:
    """A difference of losses, with its sign and two digits that count: +0.0041, -0.32, -3.1e-7, 0."""
    if known(value) is None or value is None:
        return NOT_KNOWN
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:+.1e}".replace("e-0", "e-")
    return f"{value:+.{max(0, 1 - math.floor(math.log10(abs(value))))}f}"


def error(value: float | None) -> str:
    """A relative error. An exact zero is said as such: it means bit-equal."""
    if known(value) is None or value is None:
        return NOT_KNOWN
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
