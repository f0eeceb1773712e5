"""The command line of reports.

python -m sweep.report <sweep folder>                         # the same report again from the result.json files
python -m sweep.report <sweep folder> --memory-mib 8000,12000   # the same results under other budgets
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from sweep.errors import EXIT_BAD_INPUT, EXIT_OK, BadInput
from sweep.report import drawn, judge, print_report, read_sweep, write_report
from sweep.report.blocks import Block, Commands, Heading
from sweep.report.budgets import Asked, add_options, asked_in, option, survey, survey_blocks
from sweep.report.data import build, shown_path, state_of
from sweep.report.markdown import render
from sweep.report.terminal import print_blocks, report_console
from sweep.results import TrialResult, write_json


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
    pictures = drawn(lambda plots: plots.draw_surveys(surveys, folder)) or []
    files = [folder / "sensitivity.json", folder / "sensitivity.md", *pictures]
    plots = [path.name for path in pictures]
    comparisons = [found.data() for found in surveys]
    data = {"schema_version": 2, "command": again, "asked": asked, "plots": plots, "comparisons": comparisons}
    write_json(data, files[0])
    blocks: list[Block] = [block for found in surveys for block in survey_blocks(found)]
    shown = "\n\n".join(f"![regions by the trial to take]({path.name})" for path in pictures)
    text = render([*blocks, Heading("Which command repeats it?"), Commands([("again", again)])])
    files[1].write_text(f"{text}\n{shown}\n", encoding="utf-8")
    names = ", ".join(path.name for path in files)
    print_blocks([*blocks, Heading("Where to look"), Commands([("files", f"{shown_path(folder)}/: {names}")])], console)


def _typed(value: float | None) -> str:
    return "none" if value is None else f"{value:.12g}"


if __name__ == "__main__":
    sys.exit(main())
