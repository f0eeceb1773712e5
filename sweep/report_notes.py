"""What a reader has to know of a report before its numbers: what is left out, and where it lies."""

from __future__ import annotations

from pathlib import Path


def best_note(shown: int, of: int) -> str:
    """That not all trials of a search are in its tables; "" where they are."""
    if shown >= of:
        return ""
    return f"Shown: the best {shown} of {of} trials. How the choice changes under other budgets is told of all of them."


def shown_path(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
