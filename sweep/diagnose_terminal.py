"""A diagnosis in a terminal, in columns that fit 80 to 120 characters: the answer first, then what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sweep.diagnose_report import (
    EVIDENCE,
    alive_title,
    baseline_row,
    change_lines,
    change_title,
    command_of,
    direction_cells,
    direction_notes,
    files_line,
    floor_parts,
    floor_title,
    not_applying,
    reserves_more,
    title,
)
from sweep.diagnosis import Advice, Diagnosis, Facts
from sweep.diagnosis_answer import floor_lines
from sweep.report_notes import shown_path
from sweep.report_tables import memory_table
from sweep.report_terminal import Printer, report_console
from sweep.report_words import largest_line

#: From this width on every column has room.
WIDE = 110
ANSWER_STYLES = {"yes": "green", "no": "red", "in part": "yellow", "not known": "red"}
_HEADERS = ["\ndirection", "alloc.\nMiB", "reserv.\nMiB", "saved\nMiB", "", "room\nMiB", "\npeak in", "\npays with"]
_WORDS = {0, 6, 7}  # columns that are not numbers


def print_diagnosis(found: Diagnosis, console: Console | None = None) -> None:
    """The whole of a diagnosis: answer, what is alive, the floor, each direction, the order in which to try."""
    out = Printer(console if console is not None else report_console())
    out.heading(title(found))
    out.line(EVIDENCE)
    out.line()
    _print_answer(found, out)
    facts = found.facts
    if facts is not None:
        _print_memory(found, facts, out)
        _print_directions(facts, out)
        _print_order(found, out)
    out.heading("Where to look")
    out.line(
        Text.assemble(("files: ", "dim"), files_line(Path(found.folder), shown_path(Path(found.folder)))), 2, False
    )
    out.line(Text.assemble(("again: ", "dim"), found.command), 2, False)


def _print_answer(found: Diagnosis, out: Printer) -> None:
    out.line(Text(found.sentence, style=f"bold {ANSWER_STYLES[found.answer]}"))
    for line in [found.error] if found.error else found.fit:
        out.line(line)
    if found.facts is None:
        return
    if not found.feasible:
        out.line(Text("No strategy here brings it under the cap, nor all of them together.", style="bold red"))
    first = found.first
    if first is not None:
        command = command_of(found, first)
        out.line(Text.assemble(("Try first: ", "bold"), f"{first.title} ({first.when})"))
        if command:
            out.line(command, indent=2, wrap=False)
    for note in found.notes:
        out.line(Text(note, style="dim"))


def _print_memory(found: Diagnosis, facts: Facts, out: Printer) -> None:
    out.heading(alive_title(facts))
    row = baseline_row(found)
    out.table(memory_table(row, None, out.plain))
    largest = largest_line(row)
    if largest:
        out.line(f"largest: {largest}", indent=2)
    out.heading(floor_title(facts))
    for line in [floor_parts(facts), *floor_lines(facts)]:
        out.line(line, indent=2)


def _print_directions(facts: Facts, out: Printer) -> None:
    out.heading("The most that each direction could save (each predicted at its extreme)")
    wide = out.width >= WIDE
    left_out = set() if reserves_more(facts) and wide else {2}
    left_out |= set() if wide else {6}
    left_out |= set() if facts.limits.known else {5}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i, header in enumerate(_HEADERS):
        if i in left_out:
            continue
        justify: Literal["left", "right"] = "left" if i in _WORDS else "right"
        long = i in (0, 7)  # may take more than one line
        table.add_column(header, justify=justify, no_wrap=not long, min_width=22 if i == 0 else None)
    for setting in facts.extremes:
        if not setting.why_not:
            cells = direction_cells(facts, setting)
            table.add_row(*(Text(out.plain(c)) for i, c in enumerate(cells) if i not in left_out))
    out.table(table)
    for line in direction_notes(facts):
        out.line(Text(line, style="dim"))


def _print_order(found: Diagnosis, out: Printer) -> None:
    out.heading("The order in which to try")
    for place, advice in enumerate([a for a in found.order if a.applies], start=1):
        _print_advice(found, place, advice, out)
    refused = not_applying(found)
    if refused:
        out.heading("Not here")
    for advice in refused:
        out.line(Text.assemble((advice.title, "bold"), f": {advice.why}"), indent=2)
    changes = change_lines(found)
    if changes:
        assert found.facts is not None
        out.heading(change_title(found.facts))
        for override, words in changes:
            out.line(Text.assemble((override, "bold"), f": {words}"), indent=2)


def _print_advice(found: Diagnosis, place: int, advice: Advice, out: Printer) -> None:
    out.line(Text.assemble((f"{place}. {advice.title} ", "bold"), f"({advice.when}): {advice.why}"), indent=2)
    command = command_of(found, advice)
    if command:
        out.line(command, indent=5, wrap=False)
    out.line(Text.assemble(("watch ", "dim"), advice.watch), indent=5)
    out.line(Text.assemble(("do not conclude ", "dim"), advice.not_conclude), indent=5)
