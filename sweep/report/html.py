"""Blocks as one HTML file that needs nothing beside it, by report.html.j2 and report.css, with the pictures inside.

Nothing is loaded from elsewhere and nothing is run: the page has no script, and its content security policy forbids
both. jinja2 escapes every word.
"""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from sweep.report.blocks import Block, Heading, Picture, without_empty
from sweep.report.content import page, where_to_look
from sweep.report.data import Report

FOLDER = Path(__file__).parent
#: From this many rows or items on what is about trials is folded, with its title to be asked for.
LONG = 12


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.globals.update(long=LONG, picture=_embedded)
    return environment.get_template("report.html.j2")


def html(report: Report) -> str:
    """The whole page. The pictures that `report.plots` names are read and embedded; one that is gone is left out."""
    pictures = {path.stem: path for path in report.plots}
    many = len(report.sections) > 1
    articles = []
    for i, section in enumerate(report.sections, 1):
        blocks = [_placed(block, pictures, f"_{i}_" if many else "") for block in page(section)]
        shown = without_empty([b for b in blocks if b is not None])
        # What stands before the first question is the card on top.
        first = next(n for n, b in enumerate(shown) if isinstance(b, Heading) and b.level > 1)
        articles.append({"verdict": section.comparison.verdict, "card": shown[1:first], "rest": shown[first:]})
        articles[-1]["title"] = section.title
    rest: list[Block] = [Picture(name, name, path) for name, path in pictures.items()]
    more = without_empty([Heading("More pictures"), *rest, *where_to_look(report, "Which command repeats it?")])
    style = (FOLDER / "report.css").read_text(encoding="utf-8")
    return _template().render(articles=articles, more=more, style=style)


def _placed(block: Block, pictures: dict[str, Path], suffix: str) -> Block | None:
    """A block as it is; a picture with its file, which is taken out of `pictures`, and None without one."""
    if not isinstance(block, Picture) or block.path is not None:
        return block
    found = next((n for n in pictures if n == block.name or (suffix and n.startswith(block.name + suffix))), None)
    return None if found is None else Picture(block.name, block.caption, pictures.pop(found))


def _embedded(path: Path) -> str:
    """The address of a picture's own bytes; "" where it is gone."""
    try:
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
    except OSError:
        return ""
