"""The report as one HTML file that needs nothing beside it: the markdown's answers, a summary on top, pictures inside.

Nothing is loaded from elsewhere and nothing is run: the page has no script, and its content security policy forbids
both. All words go through markdown with HTML switched off, or through `html.escape`.
"""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from sweep.report_answers import answers, lead
from sweep.report_blocks import Answer, Block, Commands, Grid, Picture, Points
from sweep.report_data import Report, Section
from sweep.report_html_style import STYLE
from sweep.report_html_summary import summary
from sweep.report_markdown import against_line, block_markdown
from sweep.report_words import table_notes, where_to_look

#: From this many rows on a table is folded, with its first lines to be asked for.
LONG_TABLE = 12

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

#: Raw HTML stays text; a link to a script is none.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def html(report: Report) -> str:
    """The whole page. The pictures that `report.plots` names are read and embedded; one that is gone is left out."""
    pictures = {path.stem: path for path in report.plots}
    many = len(report.sections) > 1
    title = " and ".join(dict.fromkeys(section.title for section in report.sections))
    parts = [_section(s, i if many else None, pictures) for i, s in enumerate(report.sections)]
    commands = "".join(
        f"<dt>{escape(label)}</dt><dd><code>{escape(line)}</code></dd>" for label, line in where_to_look(report)
    )
    rest = "".join(_figure(path, name) for name, path in pictures.items())
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}: memory and time</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{''.join(parts)}"
        f"{f'<section><h3>More pictures</h3>{rest}</section>' if rest else ''}"
        f"<section><h3>Which command repeats it?</h3><dl>{commands}</dl></section>\n</main></body></html>\n"
    )


def _section(section: Section, index: int | None, pictures: dict[str, Path]) -> str:
    """One comparison. The pictures that it has a place for are taken out of `pictures`."""
    suffix = "" if index is None else f"_{index + 1}_"
    parts = [f"<h1>{escape(section.title)}</h1>", summary(section), *map(_block, lead(section))]
    parts.append(f'<p class="quiet">{escape(against_line(section))}</p>')
    parts += [_answer(answer, suffix, pictures) for answer in answers(section)]
    notes = _render(block_markdown(Points([("", line) for line in table_notes(section)])))
    parts.append(f"<details><summary>How to read the tables</summary>{notes}</details>")
    return f"<article>{''.join(parts)}</article>\n"


def _answer(answer: Answer, suffix: str, pictures: dict[str, Path]) -> str:
    parts = [f"<h3>{escape(answer.question)}</h3>"]
    for block in answer.blocks:
        if not isinstance(block, Picture):
            parts.append(_block(block))
            continue
        if block.path is not None:
            parts.append(_figure(block.path, block.caption))
            continue
        name = next((n for n in pictures if n == block.name or (suffix and n.startswith(block.name + suffix))), None)
        if name is not None:
            parts.append(_figure(pictures.pop(name), block.caption))
    return f"<section>{''.join(parts)}</section>"


def _block(block: Block) -> str:
    if isinstance(block, Grid):
        return _grid(block)
    if isinstance(block, Commands):
        return _render(block_markdown(block))
    rendered = _render(block_markdown(block))
    long = isinstance(block, Points) and block.per_trial and len(block.items) > LONG_TABLE
    return _folded(block.title if isinstance(block, Points) else "", rendered) if long else rendered


def _grid(grid: Grid) -> str:
    """A table that scrolls by itself where it is too wide, and is folded where it is long."""
    title = f'<p class="title">{escape(grid.title)}</p>' if grid.title else ""
    table = _render(block_markdown(Grid(**{**vars(grid), "title": ""})))
    if grid.folded or len(grid.rows) > LONG_TABLE:
        label = grid.title or f"All {len(grid.rows)} trials"
        return _folded(label, f'<div class="wide">{table}</div>')
    return f'{title}<div class="wide">{table}</div>'


def _folded(label: str, inner: str) -> str:
    return f"<details><summary>{escape(label or 'More')}</summary>{inner}</details>"


def _figure(path: Path, caption: str) -> str:
    try:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError:
        return ""
    words = escape(caption)
    return f'<figure><img alt="{words}" src="data:image/png;base64,{data}"><figcaption>{words}</figcaption></figure>'


def _render(markdown: str) -> str:
    return str(_MARKDOWN.render(markdown))
