"""Blocks in a terminal, from 80 columns on; and a trial in one line."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from sweep.format import EVIDENCE_SHORT, error, known, loss, mib, ms, number, ratio
from sweep.report.blocks import (
    DETAIL,
    USEFUL,
    Block,
    Code,
    Column,
    Commands,
    Heading,
    Points,
    Table,
    Text,
    without_empty,
)
from sweep.results import Outcome, TrialResult, Verdict

WIDTH_WITHOUT_TERMINAL = 120
#: Characters of a whole bar, of the longest word that a column is made wide enough for, and between two columns.
BAR, MOST_WORD, GAP = 24, 24, 2
#: Of a cell that says exactly this.
STYLES = {
    Verdict.accept.value: "green",
    Verdict.tune.value: "yellow",
    Verdict.reject.value: "red",
    **{o.value: "red" for o in Outcome if o is not Outcome.ok},
}


def report_console(file: TextIO | None = None) -> Console:
    """A console that writes plain text of 120 columns where the output is no terminal."""
    stream = file if file is not None else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def print_blocks(shown: Sequence[Block], console: Console) -> None:
    """Fits the console from 80 columns on; only commands are longer."""
    out, before = Printer(console), None
    for block in without_empty(shown):
        if isinstance(block, Heading):
            out.line()
            out.line(RichText(block.text, style="bold"))
        elif isinstance(block, Text):
            lead = (f"{block.lead} ", "bold") if block.lead else ""
            out.line(RichText.assemble(lead, block.text, style="dim" if block.quiet else ""))
        elif isinstance(block, Points):
            if block.title:
                out.line()
                out.line(RichText(block.title, style="bold"))
            for bold, words in block.items:
                out.line(RichText.assemble((f"{bold} ", "bold") if bold else "", words), indent=2)
        elif isinstance(block, Commands):
            for label, line in block.lines:
                # Not wrapped: a command is there to be copied.
                out.line(RichText.assemble((f"{label}: ", "dim"), line), indent=2, wrap=False)
        elif isinstance(block, Code):
            out.line()
            out.line(RichText(block.title, style="bold"))
            for line in block.text.splitlines():
                out.line(RichText(line), indent=2, wrap=False)
        elif isinstance(block, Table):
            if not isinstance(before, Heading):
                out.line()
            out.table(block)
        before = block


class Printer:
    """Prints Text only, so that brackets in names are never taken for markup, and nothing the encoding lacks."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._unicode = console.encoding.lower().replace("-", "").startswith("utf")

    def line(self, shown: RichText | None = None, indent: int = 0, wrap: bool = True) -> None:
        if shown is None or not shown.plain:
            self.console.print()
            return
        shown.plain = self._plain(shown.plain)
        # Not by Padding, which fills lines with spaces up to the width.
        lines = shown.wrap(self.console, self.console.width - indent) if wrap else [shown]
        for each in lines:
            each.rstrip()
            self.console.print(RichText(" " * indent) + each, soft_wrap=True, highlight=False)

    def table(self, block: Table) -> None:
        """Less columns where it is too wide; in parts, each with the first column, where it still is."""
        if block.title:
            self.line(RichText(block.title, style="bold"))
        for columns in _fitting(block.columns, self.console.width):
            self.console.print(self._table(block, columns), highlight=False)
        if block.strong is not None:
            self.line(RichText("*: preferred.", style="dim"))

    def _table(self, block: Table, columns: list[Column]) -> RichTable:
        table = RichTable(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
        for column in columns:
            header = column.header if column.words else "\n".join(textwrap.wrap(column.header, _least(column)))
            justify = {"justify": "left"} if column.words else {"justify": "right"}
            table.add_column(self._plain(header), **justify, no_wrap=not column.words, overflow="fold")  # type: ignore[arg-type]
        bars = columns[-1].shares if len(columns) <= 4 else ()
        if bars:
            table.add_column("")
        for i in block.rows():
            strong = i == block.strong
            texts = [self._plain(c.cells[i]) for c in columns]
            cells = [RichText(text, style=STYLES.get(text, "")) for text in texts]
            if strong:
                cells[0].append(" *")
            if bars:
                cells.append(RichText(self._plain("█" * max(1, round(BAR * (bars[i] or 0.0))))))
            table.add_row(*cells, style="bold" if strong else "")
        return table

    def _plain(self, text: str) -> str:
        if self._unicode:
            return text
        return text.replace("±", "+-").replace("█", "#").encode("ascii", "replace").decode("ascii")


def _fitting(columns: list[Column], width: int) -> list[list[Column]]:
    kept = list(columns)
    for rank in (DETAIL, USEFUL):
        if sum(_least(c) + GAP for c in kept) > width:
            kept = [c for c in kept if c.rank < rank]
    parts: list[list[Column]] = [[]]
    for column in kept[1:]:
        if parts[-1] and sum(_least(c) + GAP for c in [kept[0], *parts[-1], column]) > width:
            parts.append([])
        parts[-1].append(column)
    return [[kept[0], *part] for part in parts]


def _least(column: Column) -> int:
    """Characters that a column needs: its longest number, or of words the longest."""
    texts = [word for cell in column.cells for word in cell.split()] if column.words else column.cells
    longest = max(map(len, texts), default=0)
    return max(min(longest, MOST_WORD) if column.words else longest, *map(len, column.header.split() or [""]))


def single_line(result: TrialResult) -> str:
    """A trial in one line, for printing as soon as it has ended. With its decision's numbers where it has one."""
    parts = [result.name]
    m, p, d, v = result.measurement, result.prediction, result.decision, result.verification
    if result.outcome != Outcome.ok.value:
        said = (v.reason if v is not None and not v.passed else "") or result.error
        if not said and p is not None:
            said = f"predicted {mib(p.allocated_mib)} allocated, {mib(p.reserved_mib)} reserved"
        parts.append(f"{result.outcome}{': ' + said if said else ''}")
    elif m is not None:
        saved = f" (saves {mib(d.saved_mib)})" if d is not None and d.saved_mib else ""
        peak = f"{mib(m.peak_allocated_mib)}{saved}" if known(m.peak_allocated_mib) is not None else "peak not known"
        speed = f", {ratio(d.throughput_ratio)}" if d is not None and d.throughput_ratio is not None else ""
        parts += [peak, f"{ms(m.step_ms)}/step{speed}", f"{number(m.samples_per_s)} samples/s"]
        parts += [f"eval loss {loss(m.eval_loss)}"] if known(m.eval_loss) is not None else []
        parts += [f"grad err {error(v.grad_rel_err)}"] if v is not None else []
    elif p is not None:
        room = "" if p.headroom_mib is None else f" by {mib(abs(p.headroom_mib))}"
        short = "short" if p.headroom_mib is not None and p.headroom_mib < 0 else "does not fit"
        fits = ("should fit" if p.unsure else "fits") if p.fits else short
        parts += [f"allocated {mib(p.allocated_mib)}", f"reserved {mib(p.reserved_mib)}", f"{fits}{room}"]
        parts += [f"peak in {p.peak_phase} {p.peak_operator}".rstrip()] if p.peak_phase else []
    parts += [d.verdict] if d is not None else []
    return f"{' | '.join(parts)} [{EVIDENCE_SHORT.get(result.evidence, result.evidence)}]"
