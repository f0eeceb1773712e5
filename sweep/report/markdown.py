"""Blocks as markdown: report.md, sensitivity.md, and descriptions of MLflow's runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sweep.report.blocks import (
    ALWAYS,
    DETAIL,
    USEFUL,
    Block,
    Code,
    Commands,
    Heading,
    Picture,
    Points,
    Table,
    Text,
    without_empty,
)

#: MLflow cuts tags, and a description is one, at 8000 characters.
DESCRIPTION_LIMIT = 7900


@dataclass(frozen=True)
class Form:
    """How much is written."""

    rank: int = DETAIL  # blocks and columns up to this rank
    max_rows: int | None = None  # rows of a table and items of a list that are about trials
    longest: int | None = None  # characters of a text; an error can be long

    def cut(self, text: str) -> str:
        if self.longest is None or len(text) <= self.longest:
            return text
        return text[: self.longest - 4].rstrip() + " ..."


WHOLE = Form()
#: To what still says the verdict and why.
SHORTER = (
    Form(max_rows=20),
    Form(USEFUL),
    Form(USEFUL, 20),
    Form(USEFUL, 10),
    Form(USEFUL, 5, 600),
    Form(ALWAYS, 5, 600),
    Form(ALWAYS, 2, 300),
)


def render(shown: Sequence[Block], form: Form = WHOLE) -> str:
    """Blocks as markdown, or as much of them as `form` says."""
    return "\n\n".join(_pieces(shown, form)) + "\n"


def describe(shown: Sequence[Block], limit: int = DESCRIPTION_LIMIT) -> str:
    """Blocks in at most `limit` characters: the longest form that fits, and in the end as many whole pieces."""
    whole = render(shown)
    if len(whole) <= limit:
        return whole
    mark = "(shortened; the whole is in report.md)"
    room = limit - len(mark) - 3
    for form in SHORTER:
        pieces = _pieces(shown, form)
        if sum(len(piece) + 2 for piece in pieces) <= room:
            return "\n\n".join([*pieces, mark]) + "\n"
    kept: list[str] = []
    for piece in _pieces(shown, SHORTER[-1]):
        room -= len(piece) + 2
        if room < 0:
            break
        kept.append(piece)
    return "\n\n".join([*kept, mark]) + "\n"


def _pieces(shown: Sequence[Block], form: Form) -> list[str]:
    """What may be shown without what follows: a heading with what it begins, a table, a list or a paragraph each."""
    found: list[str] = []
    headings: list[str] = []
    left_out = 0
    for block in without_empty([b for b in shown if b.rank <= form.rank and not isinstance(b, Picture)]):
        if isinstance(block, Heading):
            headings.append(f"{'#' * (block.level + 1)} {escape(block.text)}")
            continue
        if isinstance(block, Table):
            left_out = max(left_out, len(block.rows()) - len(block.rows(form.max_rows)))
        found.append("\n\n".join([*headings, _one(block, form)]))
        headings = []
    return [*found, *([f"{left_out} more trials are in `report.json`."] if left_out else [])]


def _one(block: Block, form: Form) -> str:
    if isinstance(block, Text):
        return _bold(block.lead) + escape(form.cut(block.text), begins_line=not block.lead)
    if isinstance(block, Points):
        items = block.items[: form.max_rows] if block.per_trial else block.items
        lines = [f"- {_bold(bold)}{escape(form.cut(text), begins_line=not bold)}" for bold, text in items]
        return "\n".join([*([f"{_bold(block.title).strip()}\n"] if block.title else []), *lines])
    if isinstance(block, Commands):
        return "\n".join(f"- {escape(label)}: {code(line)}" for label, line in block.lines)
    if isinstance(block, Code):
        title = f"{_bold(block.title).strip()}\n\n" if block.title else ""
        return f"{title}```{block.language}\n{block.text}\n```"
    assert isinstance(block, Table)
    columns = [c for c in block.columns if c.rank <= form.rank]
    table = [[escape(c.header) for c in columns], ["---" if c.words else "---:" for c in columns]]
    for i in block.rows(form.max_rows):
        cells = [escape(form.cut(c.cells[i])) for c in columns]
        table.append([f"**{cells[0]}**", *cells[1:]] if i == block.strong else cells)
    title = f"{_bold(block.title).strip()}\n\n" if block.title else ""
    return title + "\n".join(f"| {' | '.join(line)} |" for line in table)


def _bold(text: str) -> str:
    return f"**{escape(text)}** " if text else ""


def code(text: str) -> str:
    """A code span that may itself hold backticks."""
    one_line = " ".join(text.split())
    longest = max((len(run) for run in re.findall("`+", one_line)), default=0)
    fence, pad = "`" * (longest + 1), " " if "`" in one_line else ""
    return f"{fence}{pad}{one_line}{pad}{fence}"


def escape(text: str, begins_line: bool = False) -> str:
    """Names and errors as text: no table cell ends early, and nothing becomes emphasis, a heading, a link or HTML."""
    one_line = " ".join(text.split())
    # An underscore inside of a word is no emphasis, and an ampersand alone no entity.
    marked = re.sub(r"[\\|*<\[`~]|(?<!\w)_|_(?!\w)|&(?=[#\w]+;)", lambda found: "\\" + found.group(), one_line)
    if not begins_line:
        return marked
    # What begins a line must not begin a heading, a quotation or a list.
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", re.sub(r"^([#>+=-])", r"\\\1", marked))
