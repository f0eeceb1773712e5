"""Reports from stored results: report.json, report.md, report.html and the plots of a sweep; no torch, no MLflow.

python -m sweep.report <sweep folder>                         # the same report again from the result.json files
python -m sweep.report <sweep folder> --memory-mib 8000,12000   # the same results under other budgets
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from sweep.errors import EXIT_BAD_INPUT, EXIT_OK, BadInput
from sweep.report.blocks import Block, Commands, Heading, Text
from sweep.report.budgets import Asked, add_options, asked_in, option, survey, survey_blocks
from sweep.report.content import page, screen, where_to_look
from sweep.report.data import STATE, Judged, Report, build, judge, shown_path, state_of
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


def write_report(judged: list[Judged], folder: Path, *, command: str = "", most: int | None = None) -> Report:
    """Write report.json, report.md, report.html and the plots of what was concluded into `folder`.

    command: what repeats the sweep. most: trials shown beside the baselines. Raises ValueError without any result.
    """
    report = build(judged, folder, command, most=most)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(report.data(), report.json_path)  # what was measured is worth more than its pictures
    report.plots = _drawn(lambda plots: plots.draw(report)) or []
    write_json(report.data(), report.json_path)
    report.markdown_path.write_text(markdown(report), encoding="utf-8")
    from sweep.report.html import html  # only now: jinja2 is not needed to print

    report.html_path.write_text(html(report), encoding="utf-8")
    return report


def _drawn(draw: Callable[[Any], T]) -> T | None:
    """What cannot be drawn is a warning."""
    try:
        from sweep.report import plots  # only now: matplotlib takes a second to import

        return draw(plots)
    except Exception as error:
        warnings.warn(f"the plots were not drawn: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
        return None


def _whole(report: Report) -> list[Block]:
    return [block for section in report.sections for block in page(section)] + where_to_look(report)


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sweep.report",
        description="Make a sweep's report again from its stored results, or ask about other budgets.",
    )
    parser.add_argument("folder", type=Path, help="the sweep's output folder, such as multirun/<date>/<time>")
    add_options(parser)
    given = parser.parse_args(arguments)
    try:
        asked, results = asked_in(given), read_sweep(given.folder)
    except BadInput as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    command, most = _as_before(given.folder, results)
    if asked:
        _answer(results, given.folder, asked, command, most)
    else:
        print_report(write_report(judge(results), given.folder, command=command, most=most))
    return EXIT_OK


def _as_before(folder: Path, results: list[TrialResult]) -> tuple[str, int | None]:
    """The command that repeats the sweep, and how many trials its report shows (a search's `search.report_best`)."""
    try:
        command = json.loads((folder / "report.json").read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, TypeError, KeyError):  # a broken older report is no obstacle
        command = ""
    search = results[0].config.get("search") or {}
    most = search.get("report_best") if state_of(folder).get("study") or search.get("name") else None
    return str(command or ""), most


def _answer(results: list[TrialResult], folder: Path, asked: Asked, command: str, most: int | None) -> None:
    """Print and write what other budgets give; with one value for each setting the report under that budget as well.

    The sweep's own report is not touched.
    """
    console = report_console()
    options = " ".join(f"{option(key)} {','.join(map(_typed, values))}" for key, values in asked.items())
    if all(len(values) == 1 for values in asked.values()):
        report = build(judge(results, changes={k: v[0] for k, v in asked.items()}), folder, command, most=most)
        report.options = options
        words = ", ".join(f"budget.{key}={_typed(values[0])}" for key, values in asked.items())
        for section in report.sections:
            note = f"Under another budget than the sweep's own: {words}. Nothing was run for it."
            section.notes = [note, *section.notes]
        print_report(report, console)
    surveys = survey(judge(results), asked)
    again = f"python -m sweep.report {shlex.quote(shown_path(folder))} {options}"
    pictures = _drawn(lambda plots: plots.draw_surveys(surveys, folder)) or []
    files = [folder / "sensitivity.json", folder / "sensitivity.md", *pictures]
    plots = [path.name for path in pictures]
    comparisons = [found.data() for found in surveys]
    write_json({"schema_version": 2, "command": again, "asked": asked, "plots": plots, "comparisons": comparisons}, files[0])
    blocks = [block for found in surveys for block in survey_blocks(found)]
    shown = "\n\n".join(f"![regions by the trial to take]({path.name})" for path in pictures)
    text = render([*blocks, Heading("Which command repeats it?"), Commands([("again", again)])])
    files[1].write_text(f"{text}\n{shown}\n", encoding="utf-8")
    names = ", ".join(path.name for path in files)
    print_blocks([*blocks, Text(""), Commands([("files", f"{shown_path(folder)}/: {names}")])], console)


def _typed(value: float | None) -> str:
    return "none" if value is None else f"{value:.12g}"


if __name__ == "__main__":
    sys.exit(main())
