"""`python -m sweep.report <folder> --memory-mib ...`: stored results under other budgets, printed and written."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from sweep.report_data import build
from sweep.report_notes import shown_path
from sweep.report_sensitivity import survey, write_survey
from sweep.report_sensitivity_options import Asked, option
from sweep.report_sensitivity_terminal import print_survey
from sweep.report_terminal import print_report
from sweep.results import TrialResult


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
    touched. command, most: as for `sweep.report_data.build`.
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
