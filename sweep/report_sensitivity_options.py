"""The budgets that a person asks about: values and ranges on the command line."""

from __future__ import annotations

import argparse
import math
from decimal import Decimal, InvalidOperation

from sweep.errors import BadInput
from sweep.sensitivity_ranges import AXES, MEMORY, Axis

#: More values than this are more than a table can show.
MOST_VALUES = 60

_HELP = {
    "memory_mib": ("MIB", "memory caps in MiB; none: the device's own memory"),
    "min_throughput_ratio": ("RATIO", "throughput floors as a ratio to the baseline's"),
    "min_samples_per_s": ("RATE", "throughput floors in samples per second"),
    "max_eval_loss_ratio": ("RATIO", "quality gates as a ratio to the baseline's held-out loss"),
    "max_eval_loss": ("LOSS", "quality gates on the held-out loss"),
}

#: The values asked about, by the budget's field, the strictest memory cap and the loosest floor first; None: unset.
Asked = dict[str, list[float | None]]


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "other budgets",
        "Judge the stored results under other budgets; nothing is run. Each takes values (0.7,0.8), a range "
        "(START:STOP:STEP, both ends included) or none. One value each: the whole report under that budget.",
    )
    for key, (metavar, words) in _HELP.items():
        group.add_argument(option(key), metavar=metavar, help=words)


def option(key: str) -> str:
    """`memory_mib` as `--memory-mib`."""
    return "--" + key.replace("_", "-")


def asked_in(arguments: argparse.Namespace) -> Asked:
    """What was asked about. Raises BadInput for what is no value or no range."""
    given = {key: text for key in AXES if (text := getattr(arguments, key)) is not None}
    return {key: parse_values(AXES[key], text) for key, text in given.items()}


def parse_values(axis: Axis, text: str) -> list[float | None]:
    """`8000,12000:16000:2000,none` as numbers, each once, in rising order; none stands where it is loosest."""
    found: set[float | None] = set()
    for part in text.split(","):
        found |= _part(axis, part.strip())
        if len(found) > MOST_VALUES:
            raise BadInput(option(axis.key), text, f"more than {MOST_VALUES} values", "take a larger step")
    return sorted(found, key=lambda v: axis.loosest if v is None else v)


def _part(axis: Axis, text: str) -> set[float | None]:
    key = option(axis.key)
    if text.lower() in ("none", "null"):
        return {None}
    if ":" not in text:
        return {float(_number(axis, text))}
    ends = text.split(":")
    if len(ends) != 3:
        raise BadInput(key, text, "is no range", f"write START:STOP:STEP, such as {_example(axis)}")
    start, stop, step = _number(axis, ends[0]), _number(axis, ends[1]), _decimal(axis, ends[2])
    if step <= 0 or stop < start:
        wrong = "has a step that is not above zero" if step <= 0 else "ends before it starts"
        raise BadInput(key, text, wrong, f"write START:STOP:STEP, such as {_example(axis)}")
    steps = int((stop - start) / step)
    if steps >= MOST_VALUES:
        raise BadInput(key, text, f"more than {MOST_VALUES} values", "take a larger step")
    return {float(start + i * step) for i in range(steps + 1)}


def _number(axis: Axis, text: str) -> Decimal:
    value = _decimal(axis, text)
    if value < 0 or (value == 0 and axis is MEMORY):
        raise BadInput(option(axis.key), text, "is not above zero", "give a positive number, or none for no limit")
    return value


def _decimal(axis: Axis, text: str) -> Decimal:
    """Decimal, so that 0.7:0.9:0.1 ends at 0.9 and 0.8 is 0.8."""
    key = option(axis.key)
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise BadInput(key, text or "''", "is no number", f"give numbers, such as {_example(axis)}, or none") from None
    if not value.is_finite() or not math.isfinite(float(value)):
        raise BadInput(key, text, "is not finite", "give a number, or none for no limit")
    return value


def _example(axis: Axis) -> str:
    return {"memory_mib": "8000:16000:2000", "min_throughput_ratio": "0.7:0.9:0.1"}.get(axis.key, "1.0:1.2:0.1")
