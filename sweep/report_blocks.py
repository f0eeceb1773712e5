"""What a report is made of before it is markdown or HTML: questions, and answers of text, points, tables and pictures.

All text in here is plain, as it was written: whoever renders it escapes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

#: How soon a block is left out where there is little room: never, before the essential, first.
ALWAYS, USEFUL, DETAIL = 0, 1, 2


@dataclass
class Text:
    """A paragraph; `lead` is shown in bold before it."""

    text: str
    lead: str = ""
    rank: int = ALWAYS


@dataclass
class Points:
    """A list; each item with what is shown in bold before it, "" for nothing."""

    items: list[tuple[str, str]]
    rank: int = ALWAYS
    title: str = ""
    per_trial: bool = False  # may be shortened, most important first


@dataclass
class Grid:
    """A table. `trials` are the section's rows that its own are about, parallel to `rows`; empty for other tables."""

    header: list[str]
    rows: list[list[str]]
    left: frozenset[str] = frozenset()  # headers of the columns that hold words; the first always does
    trials: list[int] = field(default_factory=list)
    strong: int | None = None  # the trial whose row is emphasised
    rank: int = ALWAYS
    title: str = ""
    folded: bool = False  # shown on demand where that is possible


@dataclass
class Commands:
    """What to type or open: label and line."""

    lines: list[tuple[str, str]]
    rank: int = ALWAYS


@dataclass
class Picture:
    """Where a picture belongs; shown only where a file of this name was drawn, or where `path` is one."""

    name: str  # without its suffix
    caption: str
    path: Path | None = None  # of one that lies elsewhere
    rank: int = ALWAYS


Block = Text | Points | Grid | Commands | Picture


@dataclass
class Answer:
    """One question of a reader who was not there, and what is known of it."""

    question: str
    blocks: list[Block]
