"""Reports from stored results: report.json, report.md, report.html and the plots of a sweep; no torch, no MLflow."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from sweep.errors import BadInput
from sweep.report.blocks import Block
from sweep.report.content import page, screen, where_to_look
from sweep.report.data import STATE, Judged, Report, build, judge
from sweep.report.markdown import describe as describe_blocks
from sweep.report.markdown import render
from sweep.report.terminal import print_blocks, report_console, single_line
from sweep.results import TrialResult, read_trials, write_json

__all__ = [
    "STATE",
    "Judged",
    "Report",
    "describe",
    "judge",
    "markdown",
    "print_report",
    "read_sweep",
    "report_console",
    "single_line",
    "write_report",
]
T = TypeVar("T")
REPEAT = "Which command repeats it?"


def write_report(judged: list[Judged], folder: Path, *, command: str = "", most: int | None = None) -> Report:
    """Write report.json, report.md, report.html and the plots of what was concluded into `folder`.

    command: what repeats the sweep. most: trials shown beside the baselines. Raises ValueError without any result.
    """
    report = build(judged, folder, command, most=most)
    folder.mkdir(parents=True, exist_ok=True)
    data = report.data()
    write_json(data, report.json_path)  # what was measured is worth more than its pictures
    report.plots = drawn(lambda plots: plots.draw(report)) or []
    write_json(data | {"plots": [path.name for path in report.plots]}, report.json_path)
    report.markdown_path.write_text(markdown(report), encoding="utf-8")
    from sweep.report.html import html  # only now: jinja2 is not needed to print

    report.html_path.write_text(html(report), encoding="utf-8")
    return report


def drawn(draw: Callable[[Any], T]) -> T | None:
    """What cannot be drawn is a warning."""
    try:
        from sweep.report import plots  # only now: matplotlib takes a second to import

        return draw(plots)
    except Exception as error:
        warnings.warn(f"the plots were not drawn: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
        return None


def _whole(report: Report) -> list[Block]:
    return [block for section in report.sections for block in page(section)] + where_to_look(report, REPEAT)


def markdown(report: Report) -> str:
    return render(_whole(report))


def describe(report: Report) -> str:
    """The report as the description of an MLflow run, which has a limit."""
    return describe_blocks(_whole(report))


def print_report(report: Report, console: Console | None = None) -> None:
    """Table, what fills the memory, verdict, next actions and where to look, for each comparison."""
    blocks = [block for section in report.sections for block in screen(section)]
    print_blocks([*blocks, *where_to_look(report)], console if console is not None else report_console())


def read_sweep(folder: Path) -> list[TrialResult]:
    """The trials below `folder` in the order in which they ran. Raises BadInput where there is none to read."""
    if not folder.is_dir():
        raise BadInput(
            "folder", folder, "is no folder", "give the output folder of a sweep, such as multirun/<date>/<time>"
        )
    results: dict[str, tuple[tuple[Any, ...], TrialResult]] = {}
    for path, result in sorted(read_trials(folder), key=lambda found: _natural(found[0])):
        # A baseline that was measured early, for a candidate, lies in the folder of its own job as well.
        same = result.key or str(path)
        results.setdefault(same, ((result.started_at, _natural(path)), result))[1].join(result)
    if not results:
        raise BadInput("folder", folder, "holds no result.json of a trial", "give the output folder of a sweep")
    return [result for _, result in sorted(results.values(), key=lambda item: item[0])]


def _natural(path: Path) -> tuple[tuple[int, str], ...]:
    """Sorts 10 behind 9."""
    return tuple((int(part or 0), text) for part, text in re.findall(r"(\d+)|(\D+)", str(path)))
