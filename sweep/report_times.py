"""Step times in cells and words: with their interval, and against the baseline's."""

from __future__ import annotations

import math

from sweep.report_data import Section
from sweep.report_rows import Row
from sweep.words import NOT_KNOWN, ms, number, percent, ratio

#: Half the distance between the quartiles over the median: from here on a step time is called noisy.
NOISY = 0.25
#: What a difference inside of the noise is called.
NONE = "none"


def spread(row: Row, short: bool = False) -> str:
    """`310 (305-316)` with the interval of the median where it is known, else `118.2 ±2.4` with the quartiles.

    short: `310 ±6`, half of the interval.
    """
    if row.step_ms is None:
        return number(None)
    if row.step_ms_ci_low is not None and row.step_ms_ci_high is not None:
        width = row.step_ms_ci_high - row.step_ms_ci_low
        n = _decimals(width, row.step_ms)
        if short:
            return f"{row.step_ms:.{n}f} ±{width / 2:.{n}f}"
        return f"{row.step_ms:.{n}f} ({row.step_ms_ci_low:.{n}f}-{row.step_ms_ci_high:.{n}f})"
    half = row.step_half_spread_ms
    shown = number(row.step_ms)
    digits = len(shown.partition(".")[2])
    return shown if half is None else f"{shown} ±{half:.{digits}f}"


def _decimals(width: float, size: float) -> int:
    """Decimals that an interval of this width leaves worth showing: one digit of the width, and three of the value."""
    if width <= 0 or size <= 0:
        return len(number(size).partition(".")[2])
    return max(0, min(-math.floor(math.log10(width)), 2 - math.floor(math.log10(size)) + 1, 3))


def interval_words(row: Row) -> str:
    """`305.1 to 316.0 ms`, "" where there is none."""
    if row.step_ms_ci_low is None or row.step_ms_ci_high is None:
        return ""
    n = _decimals((row.step_ms_ci_high - row.step_ms_ci_low) / 10, row.step_ms or 0.0)
    return f"{row.step_ms_ci_low:.{n}f} to {row.step_ms_ci_high:.{n}f} ms"


def speed(row: Row) -> str:
    """Throughput over the baseline's, or that there is no difference beyond the noise."""
    return NONE if row.step is not None and row.step.none else ratio(row.throughput_ratio)


def change_cell(row: Row) -> str:
    """The step time against the baseline's: `+65 % (+58 to +71)`, `none (-1 to +3)`."""
    d = row.step
    if row.is_baseline:
        return NOT_KNOWN
    if d is None:
        return NOT_KNOWN if not row.throughput_ratio else percent(1 / row.throughput_ratio - 1, sign=True)
    low, high = (percent(x - 1, _percent_digits(d.high - d.low), sign=True).removesuffix(" %") for x in (d.low, d.high))
    what = NONE if d.none else percent(d.ratio - 1, _percent_digits(d.high - d.low), sign=True)
    return f"{what} ({low} to {high}{' %' if d.none else ''})"


def _percent_digits(width: float) -> int:
    return 1 if width < 0.02 else 0


def time_words(section: Section, row: Row) -> str:
    """The step time with its interval and its change against the baseline's."""
    words = f"{ms(row.step_ms)} per step"
    if interval_words(row):
        words += f" (95 % interval {interval_words(row)})"
    elif row.step_half_spread_ms is not None:
        words += f" (± {ms(row.step_half_spread_ms)}, half the distance between the quartiles)"
    words += f", {number(row.samples_per_s)} samples/s"
    base = section.baseline
    if row.is_baseline or base is None or base.step_ms is None:
        return f"{words}."
    d, against = row.step, f"against the baseline's {ms(base.step_ms)}"
    if d is None:
        if row.throughput_ratio is None:
            return f"{words}."
        change = percent(1 / row.throughput_ratio - 1, 1, sign=True)
        return f"{words}; {change} {against}, and whether that is noise is not known."
    interval = f"95 % interval {percent(d.low - 1, 1, sign=True)} to {percent(d.high - 1, 1, sign=True)}"
    if d.none:
        return f"{words}; {none_words(section)} {against} ({percent(d.ratio - 1, 1, sign=True)}, {interval})."
    return f"{words}; {percent(d.ratio - 1, 1, sign=True)} {against} ({interval})."


def none_words(section: Section) -> str:
    """What a difference that is called none is not beyond: the noise, and the machine's drift where there was one."""
    drift = section.comparison.drift
    return "no difference beyond the noise" + (" and the drift" if drift and not drift.difference.none else "")


def noisy_words(section: Section) -> str:
    """Whose steps vary so much that differences may be chance; "" where none do."""
    noisy = [r.name for r in section.rows if r.step_ms and (r.step_half_spread_ms or 0.0) > NOISY * r.step_ms]
    if not noisy:
        return ""
    return (
        f"Noisy: the steps of {', '.join(noisy)} vary by more than a quarter, so differences in speed may be "
        "chance; measure again on a quiet machine, or with more measure.steps."
    )
