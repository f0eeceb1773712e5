"""The report as one HTML file that needs nothing beside it: the markdown's answers, a summary on top, pictures inside.

Nothing is loaded from elsewhere and nothing is run: the page has no script, and its content security policy forbids
both. All words go through markdown with HTML switched off, or through `html.escape`.
"""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from sweep.format import EVIDENCE_SHORT, EVIDENCE_WORDS, NOT_KNOWN, loss, mib, ms, percent, signed_loss
from sweep.report.content import Answer, Block, Commands, Grid, Picture, Points, answers, lead
from sweep.report.data import Report, Row, Section
from sweep.report.markdown import against_line, block_markdown
from sweep.report.notes import change_cell, interval_words, table_notes, verdict_line, where_to_look
from sweep.results import Evidence

STYLE = """
:root { --text: #1d2125; --quiet: #5b6570; --page: #ffffff; --card: #f4f6f8; --line: #d5dbe1; --bar: #8fa3b5;
  --accept: #1a7f4b; --tune: #9a6700; --reject: #b3261e; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --quiet: #a0abb6; --page: #14181c; --card: #1f252b;
  --line: #38424c; --bar: #64798c; --accept: #4cc38a; --tune: #e0b252; --reject: #f2837b; --link: #7db8f0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 1.2rem 0 .6rem; overflow-wrap: anywhere; }
h3 { font-size: 1.15rem; margin: 2rem 0 .4rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p, li, dd { overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
.quiet, figcaption, dt { color: var(--quiet); font-size: .9rem; }
.title { font-weight: 600; margin: 1rem 0 .2rem; }
code { background: var(--card); padding: .1em .3em; border-radius: 4px; font-size: .88em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem .8rem; }
dd { margin: 0; }
.summary { background: var(--card); border-left: 6px solid var(--line); border-radius: 6px; padding: .8rem 1rem; }
.summary.accept { border-color: var(--accept); } .summary.tune { border-color: var(--tune); }
.summary.reject { border-color: var(--reject); }
.verdict { margin: 0 0 .7rem; font-size: 1.1rem; overflow-wrap: anywhere; }
.badge { text-transform: uppercase; font-size: .75rem; font-weight: 700; letter-spacing: .05em; padding: .2em .6em;
  border-radius: 1em; border: 1.5px solid currentColor; }
.accept .badge { color: var(--accept); } .tune .badge { color: var(--tune); } .reject .badge { color: var(--reject); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }
.tile { display: flex; flex-direction: column; overflow-wrap: anywhere; }
.tile .label { font-size: .85rem; color: var(--quiet); } .tile .value { font-size: 1.5rem; font-weight: 650; }
.bars { margin-top: 1rem; }
.row { display: grid; grid-template-columns: minmax(6rem, 14rem) 1fr minmax(8.5rem, max-content); gap: .6rem;
  align-items: center; padding: .15rem 0; font-size: .9rem; }
.name { overflow-wrap: anywhere; } .number { font-variant-numeric: tabular-nums; }
.number em { color: var(--quiet); font-style: normal; }
.track { position: relative; height: 1rem; background: var(--page); border: 1px solid var(--line); border-radius: 3px; }
.track b { display: block; height: 100%; background: var(--bar); border-radius: 2px; }
.track b.preferred { background: var(--accept); } .track b.reject { opacity: .55; } .track b.tune { opacity: .75; }
.track i { position: absolute; top: -3px; bottom: -3px; width: 0; border-left: 2px dashed var(--reject); }
.wide { overflow-x: auto; margin: .4rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; color: var(--quiet); }
td[style*="right"] { white-space: nowrap; } td:not([style]) { min-width: 7rem; }
td:first-child { min-width: 11rem; max-width: 22rem; overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--link); }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; display: block; }
@media (max-width: 34rem) {
  body { font-size: 15px; }
  .row { grid-template-columns: 1fr max-content; } .row .track { grid-column: 1 / -1; grid-row: 2; }
  dl { display: block; } dd { margin: 0 0 .6rem; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); } .tile .value { font-size: 1.25rem; }
  td:first-child { min-width: 7rem; } th, td { padding: .3rem .4rem; }
}
@media print {
  :root { --text: #000; --quiet: #444; --page: #fff; --card: #fff; --line: #bbb; --bar: #999; --accept: #1a7f4b;
    --tune: #9a6700; --reject: #b3261e; --link: #000; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; }
  .summary, .track, .track b { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  figure, tr, .tile { break-inside: avoid; } h1, h3, .title { break-after: avoid; }
  .wide { overflow: visible; } table { font-size: 7.5pt; } th, td { padding: .15rem .35rem; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""


#: Bars beyond these are left to the table.
MOST_BARS = 12

QUALITY = {"equal": "equal within the noise", "unknown": "not known: 1 seed"}


def summary(section: Section) -> str:
    """Verdict, tiles and bars. Everything that comes from a user is escaped."""
    c = section.comparison
    evidence = EVIDENCE_WORDS.get(c.evidence, c.evidence)
    return (
        f'<div class="summary {escape(c.verdict)}">'
        f'<p class="verdict"><span class="badge">{escape(c.verdict)}</span> '
        f"<strong>{escape(verdict_line(section).removeprefix(c.verdict).strip() or 'no trial')}</strong>"
        f' <span class="quiet">{escape(evidence)}</span></p>'
        f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles(section))}</div>'
        f"{_bars(section)}</div>"
    )


def tiles(section: Section) -> list[tuple[str, str, str]]:
    """Label, number and what stands below it: peak, saving, time and quality of the preferred trial."""
    row = section.preferred or section.baseline or section.rows[0]
    cap = section.comparison.cap_mib
    peak = row.peak_mib
    below = "no cap is set" if cap is None else f"of {mib(cap)} allowed"
    if cap is not None and peak is not None:
        below += f" ({percent(peak / cap)})"
    found = [(f"peak of {row.name}", mib(peak), f"{below}, {_how(row)}")]
    if row.is_baseline:
        saving = [r for r in section.candidates if (r.saved_mib or 0.0) > 0]
        most = max(saving, key=lambda r: r.saved_mib or 0.0, default=None)
        if most is not None:
            found.append(
                ("could be saved", mib(most.saved_mib), f"{percent(most.saved_ratio)}, by {most.name}, {_how(most)}")
            )
    elif row.saved_mib is not None:
        found.append(("saved", mib(row.saved_mib), f"{percent(row.saved_ratio)} of the baseline's peak, {_how(row)}"))
    if row.step_ms is not None:
        found.append(("step", ms(row.step_ms), _step_words(row)))
    if row.eval_loss_mean is not None:
        found.append(("held-out loss", loss(row.eval_loss_mean), _quality_words(row)))
    return found


def _how(row: Row) -> str:
    how = Evidence.predicted.value if row.step_ms is None and row.predicted is not None else row.evidence
    return EVIDENCE_SHORT.get(how, how)


def _step_words(row: Row) -> str:
    parts = [f"95 % interval {interval_words(row)}" if interval_words(row) else "no interval"]
    if not row.is_baseline and change_cell(row) != NOT_KNOWN:
        parts.append(f"{change_cell(row)} against the baseline")
    return f"{'; '.join(parts)}, {_how(row)}"


def _quality_words(row: Row) -> str:
    q = row.quality
    if row.is_baseline or q is None:
        return "after the last step"
    return f"{QUALITY.get(q.verdict, q.verdict)}, {signed_loss(q.difference)} against the baseline"


def _tile(label: str, value: str, below: str) -> str:
    return (
        f'<div class="tile"><span class="label">{escape(label)}</span>'
        f'<span class="value">{escape(value)}</span><span class="quiet">{escape(below)}</span></div>'
    )


def _bars(section: Section) -> str:
    """Each trial's peak as a bar, and the cap as a line across all of them; the preferred and the baseline always."""
    c = section.comparison
    shown = [(i, r, mib_of) for i, r in enumerate(section.rows) if (mib_of := _peak(r)) is not None]
    first = (c.preferred_index, c.baseline_index)
    kept = sorted(sorted(shown, key=lambda item: (item[0] not in first, item[2]))[:MOST_BARS], key=lambda item: item[0])
    if not kept:
        return ""
    reach = max(value for _, _, value in kept)
    cap = c.cap_mib if c.cap_mib is not None and c.cap_mib <= 2.5 * reach else None
    reach = max(reach, cap or 0.0) * 1.02
    rows = "".join(_bar(section, row, value, reach, cap) for _, row, value in kept)
    told = f"; the line is the cap of {mib(cap)}" if cap is not None else ""
    left_out = len(section.rows) - len(kept)
    more = f"; {left_out} more in the tables" if left_out else ""
    return f'<div class="bars">{rows}<p class="quiet">Peak device memory{escape(told)}{escape(more)}.</p></div>'


def _peak(row: Row) -> float | None:
    if row.peak_mib is not None:
        return row.peak_mib
    return row.predicted.allocated_mib if row.predicted is not None else None


def _bar(section: Section, row: Row, value: float, reach: float, cap: float | None) -> str:
    kind = "preferred" if row is section.preferred else "baseline" if row.is_baseline else row.verdict
    line = f'<i style="left:{100 * cap / reach:.2f}%"></i>' if cap is not None else ""
    predicted = " predicted" if row.peak_mib is None else ""
    name = escape(row.name) + (" *" if row is section.preferred else "")
    return (
        f'<div class="row"><span class="name">{name}</span><span class="track">'
        f'<b class="{escape(kind)}" style="width:{100 * value / reach:.2f}%"></b>{line}</span>'
        f'<span class="number">{escape(mib(value))}{predicted} <em>{escape(row.verdict)}</em></span></div>'
    )


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
