"""What the pictures of a report have in common: colours, names and where the cap is drawn."""

from __future__ import annotations

from sweep.report_data import Section
from sweep.report_rows import Row
from sweep.results import Category
from sweep.words import count

#: Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
LINES = ("-", "--", "-.", ":")
CATEGORY_COLOURS = {
    Category.parameter.value: "#0072B2",
    Category.buffer.value: "#999999",
    Category.gradient.value: "#56B4E9",
    Category.optimizer_state.value: "#009E73",
    Category.input.value: "#F0E442",
    Category.activation.value: "#D55E00",
    Category.temporary.value: "#CC79A7",
}
#: A cap or a predicted peak beyond this many times the largest measured one would squeeze the points together.
FAR = 2.5


def colour(section: Section, row: Row) -> str:
    """A trial's colour, the same in every picture."""
    return COLOURS[_index(section, row) % len(COLOURS)]


def line_style(section: Section, row: Row) -> str:
    """A trial's kind of line: neighbours differ, and so do those of one colour."""
    index = _index(section, row)
    return LINES[(index + index // len(COLOURS)) % len(LINES)]


def _index(section: Section, row: Row) -> int:
    return next(i for i, other in enumerate(section.rows) if other is row)


def short(name: str, most: int = 34) -> str:
    """A name that fits beside a point: of a long one both ends, since like names differ in theirs."""
    if len(name) > most:
        end = (most - 1) * 2 // 3
        name = f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"
    return name.replace("$", r"\$")  # a dollar sign would begin a formula


def note(left_out: int) -> str:
    """How many trials a picture has no room for."""
    return f"; {count(left_out, 'more trial')} not shown" if left_out > 0 else ""
