"""What a reader has to know of a report before its numbers: what is left out, and whose budget it judges by."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from sweep.report_sensitivity_options import option
from sweep.results import TrialResult
from sweep.schema import BudgetConf, plain
from sweep.sensitivity_ranges import AXES


def best_note(shown: int, of: int) -> str:
    """That not all trials of a search are in its tables; "" where they are."""
    if shown >= of:
        return ""
    return f"Shown: the best {shown} of {of} trials. How the choice changes under other budgets is told of all of them."


def budget_note(results: list[TrialResult], budget: BudgetConf, folder: Path) -> str:
    """That the trials were started under different budgets; "" where they were not.

    A comparison has one verdict, and so one budget: trials of a multirun over `budget.*` differ in nothing else.
    """
    own = plain(budget)
    started: dict[str, list[Any]] = {}
    for result in results:
        for key, value in (result.config.get("budget") or {}).items():
            if value not in started.setdefault(key, []):
                started[key].append(value)
    different = {key: values for key, values in started.items() if len(values) > 1}
    if not different:
        return ""
    were = "; ".join(f"budget.{key}={','.join(map(_typed, values))}" for key, values in different.items())
    judged = ", ".join(f"budget.{key}={_typed(own.get(key))}" for key in different)
    words = f"The trials were started under different budgets ({were}); all are judged by {judged}."
    asked = [f"{option(key)} {','.join(map(_typed, values))}" for key, values in different.items() if key in AXES]
    if asked:
        command = f"python -m sweep.report {shlex.quote(shown_path(folder))} {' '.join(asked)}"
        words += f" Under each of them, without a run: {command}"
    return words


def shown_path(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _typed(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
