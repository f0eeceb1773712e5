"""Other budgets in markdown: sensitivity.md."""

from __future__ import annotations

from pathlib import Path

from sweep.report_markdown import escape
from sweep.report_sensitivity import Survey
from sweep.report_sensitivity_tables import Grid, basis_lines, change_lines, heading, pair_grid, range_grid


def markdown(surveys: list[Survey], command: str, pictures: list[Path]) -> str:
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


def table(grid: Grid) -> str:
    lines = [grid.header, ["---" if i in grid.left else "---:" for i in range(len(grid.header))], *grid.rows]
    return "\n".join(
        f"| {' | '.join(line if number == 1 else [escape(cell) for cell in line])} |"
        for number, line in enumerate(lines)
    )
