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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sweep.config.schema import BudgetConf
from sweep.errors import EXIT_BAD_INPUT, EXIT_OK, BadInput
from sweep.report.budgets import Asked, add_options, asked_in, option, survey, write_survey
from sweep.report.data import Report, Row, Section, build, shown_at_most, shown_path
from sweep.report.html import html
from sweep.report.markdown import describe, markdown
from sweep.report.terminal import print_report, print_survey, report_console, single_line
from sweep.results import TrialResult, read_trials, write_json

__all__ = [
    "Report",
    "Row",
    "Section",
    "describe",
    "markdown",
    "print_report",
    "read_sweep",
    "render",
    "report_console",
    "single_line",
    "write_report",
]


def write_report(
    results: list[TrialResult],
    budget: BudgetConf | None,
    capacity_mib: float | None,
    folder: Path,
    *,
    command: str = "",
    most: int | None = None,
) -> Report:
    """Judge the trials and write report.json, report.md, report.html and the plots into `folder`.

    budget, capacity_mib (the device's memory): to judge all by; None: each comparison by its own. command: what repeats
    the sweep. most: trials shown beside the baselines, None: all. Raises ValueError without any result. A plot that
    cannot be drawn is a warning: what was measured is worth more than its picture.
    """
    report = build(results, budget, capacity_mib, folder, command, most=most)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(report.data(), report.json_path)
    try:
        from sweep.report.plots import draw  # only now: matplotlib takes a second to import

        report.plots = draw(report)
    except Exception as error:
        warnings.warn(f"the plots were not drawn: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
    write_json(report.data(), report.json_path)
    report.markdown_path.write_text(markdown(report), encoding="utf-8")
    report.html_path.write_text(html(report), encoding="utf-8")
    return report


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


@dataclass
class Stored:
    """A sweep as it lies in its folder."""

    results: list[TrialResult]
    command: str  # repeats the sweep
    most: int | None  # trials shown beside the baselines; None: all

    @classmethod
    def read(cls, folder: Path) -> Stored:
        """Raises BadInput where there is nothing to read."""
        results = read_sweep(folder)
        stored: Any = None
        path = folder / "report.json"
        if path.is_file():
            with suppress(OSError, ValueError):  # a report is made from results; a broken older one is no obstacle
                stored = json.loads(path.read_text(encoding="utf-8"))
        command = stored.get("command") if isinstance(stored, dict) else None
        return cls(
            results=results,
            command=str(command or ""),
            most=shown_at_most(folder, results),
        )


def render(folder: Path) -> Report:
    """The report of a sweep again, from its stored results and under the budgets that they had."""
    s = Stored.read(folder)
    return write_report(s.results, None, None, folder, command=s.command, most=s.most)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sweep.report",
        description="Make a sweep's report again from its stored results, or ask about other budgets.",
    )
    parser.add_argument("folder", type=Path, help="the sweep's output folder, such as multirun/<date>/<time>")
    add_options(parser)
    given = parser.parse_args(arguments)
    try:
        asked = asked_in(given)
        if asked:
            s = Stored.read(given.folder)
            answer(s.results, given.folder, asked, report_console(), command=s.command, most=s.most)
        else:
            print_report(render(given.folder))
    except BadInput as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())


def answer(
    results: list[TrialResult],
    folder: Path,
    asked: Asked,
    console: Console,
    *,
    command: str = "",
    most: int | None = None,
) -> list[Path]:
    """Judge `results` under the budgets asked about; print it, and write sensitivity.* into `folder`; returns these.

    With one value for each setting the whole report under that budget is printed as well. The sweep's own report is not
    touched. command, most: as for `sweep.report.data.build`.
    """
    options = options_words(asked)
    if all(len(values) == 1 for values in asked.values()):
        other = {key: values[0] for key, values in asked.items()}
        report = build(results, None, None, folder, command, most=most, changes=other)
        report.options = options
        words = ", ".join(f"budget.{key}={_typed(values[0])}" for key, values in asked.items())
        for section in report.sections:
            section.notes = [
                f"Under another budget than the sweep's own: {words}. Nothing was run for it.",
                *section.notes,
            ]
        print_report(report, console)
    surveys = survey(results, None, None, asked)
    again = f"python -m sweep.report {shlex.quote(shown_path(folder))} {options}"
    files = write_survey(surveys, folder, asked, again)
    print_survey(surveys, files, console)
    return files


def options_words(asked: Asked) -> str:
    """The options as typed."""
    return " ".join(f"{option(key)} {','.join(map(_typed, values))}" for key, values in asked.items())


def _typed(value: float | None) -> str:
    return "none" if value is None else f"{value:.12g}"
