"""Other budgets in a terminal: where the choice changes in words, then a table per range and per pair of settings."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sweep.report_sensitivity import Survey
from sweep.report_sensitivity_tables import Grid, basis_lines, change_lines, heading, pair_grid, range_grid
from sweep.report_tables import VERDICT_STYLES

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


def _parts(grid: Grid, width: int) -> list[Grid]:
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
        parts.append(Grid(grid.title, [grid.header[c] for c in columns], rows, verdicts, left))
    return parts


def _table(grid: Grid, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i, name in enumerate(grid.header):
        words = i in grid.left
        # A long name is folded, a number never.
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold", vertical="top")
    for row, verdicts in zip(grid.rows, grid.verdicts):
        cells = [Text(_printable(cell, console), style=VERDICT_STYLES.get(v, "")) for cell, v in zip(row, verdicts)]
        table.add_row(*cells)
    return table
