"""Other budgets in budgets_markdown: sensitivity.md."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweep.format import mib
from sweep.report import blocks
from sweep.report.budgets import BudgetGrid, Survey, basis_lines, change_lines, heading, pair_grid, range_grid
from sweep.report.content import ALWAYS, DETAIL, USEFUL, Block, Commands, Grid, Points, Text, answers, lead
from sweep.report.data import Report, Section
from sweep.report.notes import evidence_line, table_notes, where_to_look
from sweep.report.phrases import sentence

#: MLflow cuts tags, and a description is one, at 8000 characters.
DESCRIPTION_LIMIT = 7900


@dataclass(frozen=True)
class Form:
    """How much of a report is written."""

    rank: int = DETAIL  # blocks up to this rank
    max_rows: int | None = None  # trials per table and list, the preferred and the baseline always among them
    longest: int | None = None  # characters of a text; an error can be long

    def cut(self, text: str) -> str:
        if self.longest is None or len(text) <= self.longest:
            return text
        return text[: self.longest - 4].rstrip() + " ..."


#: From the whole to what still says the verdict and why.
FORMS = (
    Form(),
    Form(max_rows=20),
    Form(USEFUL),
    Form(USEFUL, 20),
    Form(USEFUL, 10),
    Form(USEFUL, 5, 600),
    Form(ALWAYS, 5, 600),
    Form(ALWAYS, 2, 300),
)


def markdown(report: Report, form: Form = FORMS[0]) -> str:
    """The whole report, or as much as `form` says."""
    return "\n\n".join(_parts(report, form)) + "\n"


def describe(report: Report, limit: int = DESCRIPTION_LIMIT) -> str:
    """The report in at most `limit` characters: the longest form that fits, and in the end as many whole blocks."""
    whole = markdown(report)
    if len(whole) <= limit:
        return whole
    mark = "(shortened; the whole is in report.md)"
    room = limit - len(mark) - 3
    for form in FORMS[1:]:
        parts = _parts(report, form)
        if sum(len(part) + 2 for part in parts) <= room:
            return "\n\n".join([*parts, mark]) + "\n"
    kept: list[str] = []
    for part in _parts(report, FORMS[-1]):
        if len(part) + 2 > room:
            break
        kept.append(part)
        room -= len(part) + 2
    return "\n\n".join([*kept, mark]) + "\n"


def _parts(report: Report, form: Form) -> list[str]:
    """Blocks of markdown: a heading with what follows it, a table, a list or a paragraph each."""
    parts = [part for section in report.sections for part in section_parts(section, form)]
    return [*parts, f"### Which command repeats it?\n\n{block_markdown(Commands(where_to_look(report)))}"]


def section_parts(section: Section, form: Form = FORMS[0]) -> list[str]:
    """One comparison, from its verdict to what to do next."""
    shown = shown_rows(section, form.max_rows)
    parts = [f"## {escape(section.title)}"]
    parts += [block_markdown(block, shown, form) for block in lead(section)]
    parts.append(escape(against_line(section), begins_line=True))
    for answer in answers(section):
        blocks = [b for b in answer.blocks if b.rank <= form.rank]
        texts = [text for b in blocks if (text := block_markdown(b, shown, form))]
        if texts:
            parts += [f"### {escape(answer.question)}\n\n{texts[0]}", *texts[1:]]
    left_out = len(section.rows) - len(shown)
    if left_out:
        parts.append(f"{left_out} more trials are in `report.json`.")
    if form.rank >= DETAIL:
        parts.append(
            block_markdown(Points([("", line) for line in table_notes(section)], title="How to read the tables"))
        )
    return parts


def against_line(section: Section) -> str:
    c = section.comparison
    cap = f" Cap: {mib(c.cap_mib)} ({c.cap_source})." if c.cap_mib is not None else ""
    return f"{evidence_line(section)} {sentence(f'Against {c.against}')}{cap}"


def shown_rows(section: Section, most: int | None) -> list[int]:
    """The trials that are shown where there is room for `most`, in their order."""
    rows, c = section.rows, section.comparison
    if most is None or len(rows) <= most:
        return list(range(len(rows)))
    # Accepted before tunable before rejected, and the fast first.
    order = {"accept": 0, "tune": 1, "reject": 2}

    def rank(i: int) -> tuple[bool, int, float]:
        return i not in (c.baseline_index, c.preferred_index), order.get(rows[i].verdict, 3), rows[i].step_ms or 1e300

    return sorted(sorted(range(len(rows)), key=rank)[:most])


def block_markdown(block: Block, shown: Collection[int] | None = None, form: Form = FORMS[0]) -> str:
    """A block in markdown, "" for what markdown has no place for. shown: the trials that tables list; None: all."""
    if isinstance(block, Text):
        return _bold(block.lead) + escape(form.cut(block.text), begins_line=not block.lead)
    if isinstance(block, Points):
        items = block.items[: form.max_rows] if block.per_trial else block.items
        lines = [f"- {_bold(bold)}{escape(form.cut(text), begins_line=not bold)}" for bold, text in items]
        title = [f"{_bold(block.title).strip()}\n"] if block.title else []
        return "\n".join([*title, *lines]) if lines else ""
    if isinstance(block, Commands):
        return "\n".join(f"- {escape(label)}: {code(line)}" for label, line in block.lines)
    return _table(block, shown, form) if isinstance(block, Grid) else ""


def _table(grid: Grid, shown: Collection[int] | None, form: Form) -> str:
    marks = ["---", *("---" if name in grid.left else "---:" for name in grid.header[1:])]
    lines = [[escape(name) for name in grid.header], marks]
    about: Sequence[int | None] = grid.trials or [None] * len(grid.rows)
    for trial, row in zip(about, grid.rows):
        if trial is None or shown is None or trial in shown:
            first = escape(form.cut(row[0]))
            is_strong = trial is not None and trial == grid.strong
            lines.append([f"**{first}**" if is_strong else first, *(escape(form.cut(cell)) for cell in row[1:])])
    title = f"{_bold(grid.title).strip()}\n\n" if grid.title else ""
    return title + "\n".join(f"| {' | '.join(line)} |" for line in lines)


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


def budgets_markdown(surveys: list[Survey], command: str, pictures: list[Path]) -> str:
    """All comparisons: what the answers rest on, where the choice changes, and a table per range and pair."""
    parts = []
    for found in surveys:
        parts += [f"## {escape(heading(found))}", escape(" ".join(basis_lines(found)))]
        parts += ["### Where the choice changes", "\n".join(f"- {escape(line)}" for line in change_lines(found))]
        grids = [range_grid(found, r) for r in found.ranges] + [pair_grid(found, p) for p in found.pairs]
        for grid in grids:
            parts += [f"### {escape(grid.title)}", table(grid)]
            if grid.notes:
                parts.append("\n".join(f"- {escape(note)}" for note in grid.notes))
    parts += [f"![regions by the trial to take]({path.name})" for path in pictures]
    parts.append(f"*: the sweep's own budget. Again: `{command}`".replace("*", "\\*", 1))
    return "\n\n".join(parts) + "\n"


def table(grid: BudgetGrid) -> str:
    lines = [grid.header, ["---" if i in grid.left else "---:" for i in range(len(grid.header))], *grid.rows]
    return "\n".join(
        f"| {' | '.join(line if number == 1 else [escape(cell) for cell in line])} |"
        for number, line in enumerate(lines)
    )


# -- blocks -----------------------------------------------------------------------------------------------------------


def render(shown: Sequence[blocks.Block], form: Form = FORMS[0]) -> str:
    """Blocks as markdown, or as much of them as `form` says."""
    return "\n\n".join(pieces(shown, form)) + "\n"


def pieces(shown: Sequence[blocks.Block], form: Form = FORMS[0]) -> list[str]:
    """What may be shown without what follows: a heading with what it begins, a table, a list or a paragraph each."""
    found: list[str] = []
    headings: list[str] = []
    for block in blocks.without_empty([b for b in shown if b.rank <= form.rank and not isinstance(b, blocks.Picture)]):
        if isinstance(block, blocks.Heading):
            headings.append(f"{'#' * (block.level + 1)} {escape(block.text)}")
        elif text := _of_block(block, form):
            found.append("\n\n".join([*headings, text]))
            headings = []
    return found


def _of_block(block: blocks.Block, form: Form) -> str:
    if isinstance(block, blocks.Text):
        return _bold(block.lead) + escape(form.cut(block.text), begins_line=not block.lead)
    if isinstance(block, blocks.Points):
        items = block.items[: form.max_rows] if block.per_trial else block.items
        lines = [f"- {_bold(bold)}{escape(form.cut(text), begins_line=not bold)}" for bold, text in items]
        return "\n".join([*([f"{_bold(block.title).strip()}\n"] if block.title else []), *lines])
    if isinstance(block, blocks.Commands):
        return "\n".join(f"- {escape(label)}: {code(line)}" for label, line in block.lines)
    if isinstance(block, blocks.Table):
        columns = [c for c in block.columns if c.rank <= form.rank]
        table = [[escape(c.header) for c in columns], ["---" if c.words else "---:" for c in columns]]
        for i in block.rows(form.max_rows):
            cells = [escape(form.cut(c.cells[i])) for c in columns]
            table.append([f"**{cells[0]}**", *cells[1:]] if i == block.strong else cells)
        title = f"{_bold(block.title).strip()}\n\n" if block.title else ""
        return title + "\n".join(f"| {' | '.join(line)} |" for line in table)
    return ""
