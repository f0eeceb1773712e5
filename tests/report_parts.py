"""What the tests of reports share: a report of made-up results, and what each renderer makes of it."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from sweep.config.schema import BudgetConf
from sweep.report import judge, print_report, write_report
from sweep.report.blocks import Block
from sweep.report.data import Report, Section, build
from sweep.report.terminal import print_blocks
from sweep.results import TrialResult

COMMAND = "python train.py -m 'strategy=glob(*)'"


def built(
    results: list[TrialResult], budget: BudgetConf | None = None, capacity: float | None = None, folder: Path = Path()
) -> Report:
    return build(judge(results, budget or BudgetConf(), capacity), folder, COMMAND)


def section(results: list[TrialResult], budget: BudgetConf | None = None, capacity: float | None = None) -> Section:
    return built(results, budget, capacity).sections[0]


def written(
    results: list[TrialResult], folder: Path, budget: BudgetConf | None = None, capacity: float | None = None
) -> Report:
    return write_report(judge(results, budget or BudgetConf(), capacity), folder, command=COMMAND)


def printed(report: Report, width: int = 120, terminal: bool = False) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, force_terminal=terminal))
    return out.getvalue()


def printed_blocks(blocks: list[Block], width: int = 120, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    print_blocks(blocks, Console(file=out, width=width))
    out.flush()
    return "\n".join(line.rstrip() for line in raw.getvalue().decode(encoding).splitlines())
