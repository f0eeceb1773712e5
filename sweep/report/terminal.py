"""The report in a terminal: a table that fits 80 to 120 columns, and what it means in words."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sweep.format import EVIDENCE_SHORT, NOT_KNOWN, count, error, known, loss, mib, ms, number, percent, ratio
from sweep.report import blocks
from sweep.report.budgets import BudgetGrid, Survey, basis_lines, change_lines, heading, pair_grid, range_grid
from sweep.report.content import because, finding_lines
from sweep.report.data import Predicted, Report, Row, Section
from sweep.report.notes import (
    evidence_line,
    largest_line,
    memory_row,
    memory_shares,
    memory_title,
    next_lines,
    prediction_lines,
    premise_lines,
    quality_lines,
    reading_lines,
    reasons_words,
    says,
    speed,
    spread,
    verdict_line,
    where_to_look,
)
from sweep.report.phrases import operator_words, sentence
from sweep.results import Outcome, TrialResult, Verdict

#: From this width on there is room for whole headers and every column.
WIDE, WIDE_PREDICTED = 100, 110
BAR = 24
#: What all columns take beside the name and the step time, and, of predictions, beside name and where the peak is.
_MEASURED_WIDTH, _PREDICTED_WIDTH = 63, 76

VERDICT_STYLES = {Verdict.accept.value: "green", Verdict.tune.value: "yellow", Verdict.reject.value: "red"}

#: Makes text printable: the identity, or what the terminal's encoding has instead.
Plain = Callable[[str], str]


@dataclass(frozen=True)
class _Column:
    header: str
    cell: Callable[[Row], str]
    right: bool = True
    style: Callable[[Row], str] = lambda row: ""


def trials_table(section: Section, width: int, plain: Plain) -> Table:
    """All trials of a comparison, measured or predicted, the preferred one marked."""
    wide = width >= (WIDE_PREDICTED if section.predicts else WIDE)
    reserved = width >= WIDE + 10 and any(row.reserved_mib is not None for row in section.rows)
    if section.predicts:
        room = width - _PREDICTED_WIDTH - len("backward") if wide else 22
    else:
        steps = max(len(spread(row)) for row in section.rows)
        room = width - _MEASURED_WIDTH - max(steps, 6) - 10 * reserved if wide else 22
    names = min(room, max(len(row.name) for row in section.rows) + 2)
    if section.predicts:
        columns = _predicted_columns(wide, width - names - _PREDICTED_WIDTH)
    else:
        columns = _measured_columns(wide, reserved)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, int(wide), 0, 0), pad_edge=False, show_edge=False)
    table.add_column("strategy", overflow="fold", width=names)
    for column in columns:
        table.add_column(column.header, justify="right" if column.right else "left", no_wrap=True, vertical="bottom")
    preferred = section.preferred
    for row in section.rows:
        name = f"{row.name} *" if row is preferred else row.name
        cells = [Text(plain(column.cell(row)), style=column.style(row)) for column in columns]
        table.add_row(Text(plain(name)), *cells, style="bold" if row is preferred else "")
    return table


def _verdict_column() -> _Column:
    return _Column("verdict", lambda r: r.verdict, right=False, style=lambda r: VERDICT_STYLES.get(r.verdict, ""))


def _outcome_style(row: Row) -> str:
    return "" if row.outcome == Outcome.ok.value else "red"


def _measured_columns(wide: bool, reserved: bool) -> list[_Column]:
    columns = [
        _Column("outcome", lambda r: r.outcome, right=False, style=_outcome_style),
        _Column("peak\nMiB", lambda r: number(r.peak_mib)),
        _Column("saved\nMiB", lambda r: number(r.saved_mib)),
        _Column("step\nms", spread),
        _Column("speed", speed),
        _Column("eval\nloss", lambda r: loss(r.eval_loss_mean)),
        _Column("grad\nerr", lambda r: error(r.grad_rel_err)),
        _verdict_column(),
    ]
    if reserved:
        columns.insert(2, _Column("reserved\nMiB", lambda r: number(r.reserved_mib)))
    if not wide:
        # What did not run has no step time, so its outcome stands there.
        step = _Column(
            "step\nms", lambda r: spread(r, short=True) if r.step_ms is not None else r.outcome, style=_outcome_style
        )
        columns = [*columns[1:3], step, *columns[4:]]
    return columns


def _predicted_columns(wide: bool, room: int) -> list[_Column]:
    def of(show: Callable[[Predicted], str]) -> Callable[[Row], str]:
        return lambda row: show(row.predicted) if row.predicted is not None else NOT_KNOWN

    return [
        _Column("allocated\nMiB" if wide else "alloc.\nMiB", of(lambda p: number(p.allocated_mib))),
        _Column("reserved\nMiB" if wide else "reserv.\nMiB", of(lambda p: number(p.reserved_mib))),
        _Column("headroom\nMiB" if wide else "room\nMiB", of(_headroom), style=_fits_style),
        _Column("peak in", lambda r: _peak_at(r, room if wide else 9), right=False),
        _Column("would\nmove MiB" if wide else "moves\nMiB", of(lambda p: number(p.to_host_mib + p.from_host_mib))),
        _Column("transfer\nms" if wide else "moves\nms", of(lambda p: number(p.transfer_round_trip_ms))),
        _Column("re-\ncompute" if wide else "again", of(lambda p: percent(p.recompute_flops_ratio))),
        _verdict_column(),
    ]


def _headroom(p: Predicted) -> str:
    if p.headroom_mib is None:
        return "fits" if p.fits else "no"
    return f"{'+' if p.headroom_mib >= 0 else ''}{number(p.headroom_mib)}{'?' if p.unsure else ''}"


def _fits_style(row: Row) -> str:
    return "red" if row.predicted is not None and not row.predicted.fits else ""


def _peak_at(row: Row, most: int) -> str:
    p = row.predicted
    if p is None:
        return row.outcome
    whole = f"{p.peak_phase} {operator_words(p.peak_operator)}".strip()
    return p.peak_phase if most < len(p.peak_phase) + 6 else whole[:most].strip()


def memory_table(row: Row, other: Row | None, plain: Plain) -> Table:
    """What is alive at the peak of `row` by category, with `other`'s (the preferred trial's) beside it."""
    beside = {name: value for name, value, _ in memory_shares(other)} if other is not None else {}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(beside), header_style="dim")
    table.add_column("  category", no_wrap=True)
    for header in ("MiB", "share", *(["preferred"] if beside else [])):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, value, share in memory_shares(row):
        cells = [f"  {name}", number(value), percent(share)] + ([number(beside.get(name, 0.0))] if beside else [])
        table.add_row(*(Text(c) for c in cells), Text(plain("█" * max(1, round(BAR * share)))))
    return table


#: Between two columns; and the longest word that a column is made wide enough for.
_GAP, _MOST = 2, 24


def print_survey(surveys: list[Survey], files: list[Path], console: Console) -> None:
    """Everything that was asked, for each comparison, and where it lies. Fits the console from 80 columns on."""
    for found in surveys:
        _line(console)
        _line(console, heading(found), "bold")
        for line in basis_lines(found):
            _line(console, line)
        _line(console)
        _line(console, "Where the choice changes", "bold")
        for line in change_lines(found):
            head, separator, rest = line.partition(": ")
            _line(console, Text.assemble((head + separator, "bold"), rest) if separator else line, indent=2)
        shown_marks = False
        for grid in [range_grid(found, r) for r in found.ranges] + [pair_grid(found, p) for p in found.pairs]:
            _line(console)
            _line(console, grid.title, "bold")
            for part in _parts(grid, console.width):
                console.print(_table(part, console), highlight=False)
            for note in grid.notes:
                _line(console, note, "dim")
            shown_marks = shown_marks or any(cell.endswith("*") for row in [grid.header, *grid.rows] for cell in row)
        if shown_marks:
            _line(console, "*: the sweep's own budget.", "dim")
    if files:
        _line(console)
        names = ", ".join(path.name for path in files)
        console.print(Text(f"Files: {files[0].parent}/: {names}"), soft_wrap=True, highlight=False)


def _line(console: Console, text: str | Text = "", style: str = "", indent: int = 0) -> None:
    shown = Text(text, style=style) if isinstance(text, str) else text
    shown.plain = _printable(shown.plain, console)
    console.print(Padding(shown, (0, 0, 0, indent), expand=False) if shown.plain else "", highlight=False)


def _printable(text: str, console: Console) -> str:
    """Names may hold what the output's encoding lacks."""
    return text.encode(console.encoding, "replace").decode(console.encoding)


def _parts(grid: BudgetGrid, width: int) -> list[BudgetGrid]:
    """The table in as many parts as its columns need; each begins with the first column."""
    lines = [grid.header, *grid.rows]
    least = [
        min(_MOST, max(len(word) for line in lines for word in line[i].split() or [""])) for i in range(len(lines[0]))
    ]
    room = width - max(len(line[0]) for line in lines)
    chunks: list[list[int]] = [[]]
    for i in range(1, len(grid.header)):
        if chunks[-1] and sum(least[c] + _GAP for c in [*chunks[-1], i]) > room:
            chunks.append([])
        chunks[-1].append(i)
    parts = []
    for chunk in chunks:
        columns = [0, *chunk]
        rows, verdicts = ([[row[c] for c in columns] for row in some] for some in (grid.rows, grid.verdicts))
        left = frozenset(j for j, c in enumerate(columns) if c in grid.left)
        parts.append(BudgetGrid(grid.title, [grid.header[c] for c in columns], rows, verdicts, left))
    return parts


def _table(grid: BudgetGrid, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i, name in enumerate(grid.header):
        words = i in grid.left
        # A long name is folded, a number never.
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold", vertical="top")
    for row, verdicts in zip(grid.rows, grid.verdicts):
        cells = [Text(_printable(cell, console), style=VERDICT_STYLES.get(v, "")) for cell, v in zip(row, verdicts)]
        table.add_row(*cells)
    return table


WIDTH_WITHOUT_TERMINAL = 120


def report_console(file: TextIO | None = None) -> Console:
    """A console that writes plain text of 120 columns where the output is no terminal."""
    stream = file if file is not None else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def print_report(report: Report, console: Console | None = None) -> None:
    """Table, what fills the memory, verdict, next actions and where to look, for each comparison."""
    out = Printer(console if console is not None else report_console())
    for section in report.sections:
        _print_section(section, out)
    out.heading("Where to look")
    for label, line in where_to_look(report):
        # Not wrapped: a command is there to be copied.
        out.line(Text.assemble((f"{label}: ", "dim"), line), indent=2, wrap=False)


class Printer:
    """Prints Text only, so that brackets in names are never taken for markup, and nothing the encoding lacks."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.unicode = console.encoding.lower().replace("-", "").startswith("utf")

    def line(self, text: Text | str = "", indent: int = 0, wrap: bool = True) -> None:
        shown = Text(text) if isinstance(text, str) else text
        if not self.unicode:
            shown.plain = self.plain(shown.plain)
        if not shown.plain:
            self.console.print()
        elif wrap:
            self.console.print(Padding(shown, (0, 0, 0, indent), expand=False), highlight=False)
        else:
            self.console.print(Text(" " * indent) + shown, soft_wrap=True, highlight=False)

    def heading(self, text: str) -> None:
        self.line()
        self.line(Text(text, style="bold"))

    def table(self, table: Table) -> None:
        self.console.print(table, highlight=False)

    def plain(self, text: str) -> str:
        if self.unicode:
            return text
        for character, instead in (("±", "+-"), ("█", "#")):
            text = text.replace(character, instead)
        return text.encode("ascii", "replace").decode("ascii")

    @property
    def width(self) -> int:
        return self.console.width


def _print_section(section: Section, out: Printer) -> None:
    c = section.comparison
    what = "prediction" if section.predicts else "trial"
    out.heading(f"{section.title}: {count(len(section.rows), what)}")
    out.line(evidence_line(section))
    out.line(f"Against {c.against}." + (f" Cap: {mib(c.cap_mib)} ({c.cap_source})." if c.cap_mib is not None else ""))
    for note in section.notes:
        out.line(note)
    out.line()
    out.table(trials_table(section, out.width, out.plain))
    for line in (["*: preferred."] if section.preferred is not None else []) + reading_lines(section):
        out.line(Text(line, style="dim"))
    for line in premise_lines(section):
        out.line(line)
    quality = quality_lines(section)
    if quality:
        out.line(f"Held-out loss against the baseline's: {'; '.join(quality)}.")
    _print_memory(section, out)
    predictions = prediction_lines(section)
    if predictions:
        out.heading("Prediction against measurement (peak allocated)")
        for line in predictions:
            out.line(line, indent=2)
    out.heading(f"Verdict: {verdict_line(section)}")
    out.line(says(section, c.why), indent=2)
    for label, words in _because(section):
        out.line(Text.assemble((label, "bold"), words), indent=2)
    out.line(Text.assemble(("Next: ", "bold"), sentence(c.next_action, first=False)), indent=2)
    blocked = next_lines(section)
    if blocked:
        out.heading("Not accepted")
    for row, words in blocked:
        verdict = (row.verdict, VERDICT_STYLES.get(row.verdict, ""))
        out.line(Text.assemble((row.name, "bold"), " ", verdict, f"{reasons_words(row)}: {words}"), indent=2)


def _because(section: Section) -> list[tuple[str, str]]:
    """Why, in a line or two; what surprises; and whether the choice survives another budget."""
    lines = [("Why: ", says(section, words)) for words in because(section)]
    findings = finding_lines(section)[: 1 if section.predicts else 2]
    lines += [("Finding: ", f"{name}: {sentence(line, first=False)}") for name, line in findings]
    if section.survival:
        lines.append(("Other budgets: ", sentence(section.survival[0])))
    return lines


def _print_memory(section: Section, out: Printer) -> None:
    row = memory_row(section)
    if row is None:
        return
    out.heading(memory_title(row))
    out.table(memory_table(row, section.preferred if section.preferred is not row else None, out.plain))
    largest = largest_line(row)
    if largest:
        out.line(f"largest: {largest}", indent=2)


def single_line(result: TrialResult) -> str:
    """A trial in one line, for printing as soon as it has ended. With its decision's numbers where it has one."""
    parts = [result.name]
    m, p, d = result.measurement, result.prediction, result.decision
    if result.outcome != Outcome.ok.value:
        v = result.verification
        said = (v.reason if v is not None and not v.passed else "") or result.error
        if not said and p is not None:
            said = f"predicted {mib(p.allocated_mib)} allocated, {mib(p.reserved_mib)} reserved"
        parts.append(f"{result.outcome}{': ' + said if said else ''}")
    elif m is not None:
        saved = f" (saves {mib(d.saved_mib)})" if d is not None and d.saved_mib else ""
        peak = f"{mib(m.peak_allocated_mib)}{saved}" if known(m.peak_allocated_mib) is not None else "peak not known"
        speed = f", {ratio(d.throughput_ratio)}" if d is not None and d.throughput_ratio is not None else ""
        parts += [peak, f"{ms(m.step_ms)}/step{speed}", f"{number(m.samples_per_s)} samples/s"]
        if known(m.eval_loss) is not None:
            parts.append(f"eval loss {loss(m.eval_loss)}")
        if result.verification is not None:
            parts.append(f"grad err {error(result.verification.grad_rel_err)}")
    elif p is not None:
        short = p.headroom_mib is not None and p.headroom_mib < 0
        room = "" if p.headroom_mib is None else f" by {mib(abs(p.headroom_mib))}"
        fits = ("should fit" if p.unsure else "fits") if p.fits else f"{'short' if short else 'does not fit'}"
        parts += [f"allocated {mib(p.allocated_mib)}", f"reserved {mib(p.reserved_mib)}", f"{fits}{room}"]
        if p.peak_phase:
            parts.append(f"peak in {p.peak_phase} {p.peak_operator}".rstrip())
    if d is not None:
        parts.append(d.verdict)
    return f"{' | '.join(parts)} [{EVIDENCE_SHORT.get(result.evidence, result.evidence)}]"


# -- blocks -----------------------------------------------------------------------------------------------------------

#: The longest word of a table's cell that its column is made wide enough for, and characters between two columns.
MOST_WORD, GAP = 24, 2
STYLES = VERDICT_STYLES | {o.value: "red" for o in Outcome if o is not Outcome.ok}


def print_blocks(shown: Sequence[blocks.Block], console: Console) -> None:
    """Fits the console from 80 columns on; only commands are longer."""
    out = Printer(console)
    for block in blocks.without_empty(shown):
        if isinstance(block, blocks.Heading):
            out.heading(block.text)
        elif isinstance(block, blocks.Text):
            lead = (f"{block.lead} ", "bold") if block.lead else ""
            out.line(Text.assemble(lead, block.text, style="dim" if block.quiet else ""))
        elif isinstance(block, blocks.Points):
            if block.title:
                out.line(Text(block.title, style="bold"))
            for bold, words in block.items:
                out.line(Text.assemble((f"{bold} ", "bold") if bold else "", words), indent=2)
        elif isinstance(block, blocks.Commands):
            for label, line in block.lines:
                out.line(Text.assemble((f"{label}: ", "dim"), line), indent=2, wrap=False)
        elif isinstance(block, blocks.Table):
            if block.title:
                out.line()
                out.line(Text(block.title, style="bold"))
            for columns in _fitting(block.columns, console.width):
                out.table(_rich_table(block, columns, out))
            if block.strong is not None:
                out.line(Text("*: preferred.", style="dim"))


def _fitting(columns: list[blocks.Column], width: int) -> list[list[blocks.Column]]:
    """One table, less columns where it is too wide; or several, each with the first column, where it still is."""
    kept = list(columns)
    for rank in (blocks.DETAIL, blocks.USEFUL):
        if sum(_least(c) + GAP for c in kept) > width:
            kept = [c for c in kept if c.rank < rank]
    parts: list[list[blocks.Column]] = [[]]
    for column in kept[1:]:
        if parts[-1] and sum(_least(c) + GAP for c in [kept[0], *parts[-1], column]) > width:
            parts.append([])
        parts[-1].append(column)
    return [[kept[0], *part] for part in parts]


def _least(column: blocks.Column) -> int:
    """Characters that a column needs: its longest number, or of words the longest."""
    texts = [word for cell in column.cells for word in cell.split()] if column.words else column.cells
    return max(min(max(map(len, texts), default=0), MOST_WORD), max(map(len, column.header.split()), default=0))


def _rich_table(block: blocks.Table, columns: list[blocks.Column], out: Printer) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        header = column.header if column.words else "\n".join(textwrap.wrap(column.header, _least(column)))
        table.add_column(
            out.plain(header), justify="left" if column.words else "right", no_wrap=not column.words, overflow="fold"
        )
    bars = columns[-1].shares if len(columns) <= 4 else ()
    if bars:
        table.add_column("")
    for i in block.rows():
        cells = [Text(out.plain(c.cells[i]), style=STYLES.get(c.cells[i].strip("()"), "")) for c in columns]
        if i == block.strong:
            cells[0].append(" *")
        if bars:
            cells.append(Text(out.plain("█" * max(1, round(BAR * (bars[i] or 0.0))))))
        table.add_row(*cells, style="bold" if i == block.strong else "")
    return table
