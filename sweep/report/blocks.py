"""What is shown, as blocks: built once by content.py and its like, rendered by terminal.py, markdown.py and html.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: How soon a block or a column is left out where there is little room: never, before the essential, first.
ALWAYS: int = 0
USEFUL: int = 1
DETAIL: int = 2


@dataclass
class Heading:
    """Begins a part; shown only where something follows it. level: 1 a comparison, 2 a question, 3 inside of one."""

    text: str
    level: int = 2
    rank: int = ALWAYS


@dataclass
class Text:
    """A paragraph; `lead` is shown in bold before it."""

    text: str
    lead: str = ""
    rank: int = ALWAYS
    quiet: bool = False  # how to read something, less prominent


@dataclass
class Points:
    """A list; each item with what is shown in bold before it, "" for nothing."""

    items: list[tuple[str, str]]
    title: str = ""
    rank: int = ALWAYS
    per_trial: bool = False  # may be shortened, most important first


@dataclass
class Column:
    """`cells` are text already. words: left-aligned and wrapped; a number is neither."""

    header: str
    cells: list[str]
    words: bool = False
    rank: int = ALWAYS
    shares: Sequence[float | None] = ()  # a bar for each cell, from 0 to 1
    mark: float | None = None  # where a limit lies across the bars


@dataclass
class Table:
    """importance: of each row; the smallest are kept where not all fit. strong: the place of one that stands out."""

    columns: list[Column]
    title: str = ""
    rank: int = ALWAYS
    importance: list[int] = field(default_factory=list)
    strong: int | None = None

    @classmethod
    def of(cls, header: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[int] = (0,)) -> Table:
        """words: places of the columns that hold words."""
        return cls([Column(h, [row[i] for row in rows], i in words) for i, h in enumerate(header)])

    def rows(self, most: int | None = None) -> list[int]:
        """Places of the rows that are shown where there is room for `most`."""
        count = len(self.columns[0].cells) if self.columns else 0
        if most is None or not self.importance:
            return list(range(count))
        return sorted(sorted(range(count), key=lambda i: self.importance[i])[:most])


@dataclass
class Commands:
    """What to type or open: label and line, never wrapped."""

    lines: list[tuple[str, str]]
    rank: int = ALWAYS


@dataclass
class Code:
    """Lines to be copied as they are."""

    text: str
    title: str = ""
    language: str = "python"
    rank: int = ALWAYS


@dataclass
class Picture:
    """Where a picture belongs; shown only where a file of this name was drawn, or where `path` is one."""

    name: str  # without its suffix
    caption: str
    path: Path | None = None  # of one that lies elsewhere
    rank: int = ALWAYS


Block = Heading | Text | Points | Table | Commands | Code | Picture


def without_empty(blocks: Sequence[Block]) -> list[Block]:
    """Without empty lists and tables, and without headings that nothing of their own follows."""
    kept: list[Block] = []
    for block in reversed(blocks):
        empty = (isinstance(block, Points) and not block.items) or (isinstance(block, Table) and not block.rows())
        if isinstance(block, Heading):
            empty = not kept or (isinstance(kept[-1], Heading) and kept[-1].level <= block.level)
        if not empty:
            kept.append(block)
    return kept[::-1]
