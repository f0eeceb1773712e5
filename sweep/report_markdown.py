"""The report in markdown: report.md, and the description of the sweep's MLflow run.

GitHub's tables and no pictures, since a run's description cannot show files that lie beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sweep.report_data import Report, Row, Section
from sweep.report_words import (
    evidence_line,
    largest_line,
    memory_row,
    memory_shares,
    memory_title,
    next_lines,
    prediction_lines,
    reading_lines,
    spread,
    verdict_line,
    where_to_look,
)
from sweep.words import NOT_KNOWN, error, loss, mib, number, percent, ratio

#: MLflow cuts tags, and a description is one, at 8000 characters.
DESCRIPTION_LIMIT = 7900

_Cell = Callable[[Row], str]

_MEASURED: list[tuple[str, _Cell]] = [
    ("outcome", lambda r: r.outcome),
    ("peak MiB", lambda r: number(r.peak_mib)),
    ("saved MiB", lambda r: number(r.saved_mib)),
    ("step ms", spread),
    ("speed", lambda r: ratio(r.throughput_ratio)),
    ("samples/s", lambda r: number(r.samples_per_s)),
    ("moved MiB", lambda r: _moved(r.to_host_mib, r.from_host_mib)),
    ("eval loss", lambda r: loss(r.eval_loss)),
    ("grad err", lambda r: error(r.grad_rel_err)),
    ("evidence", lambda r: r.evidence),
]

_PREDICTED: list[tuple[str, _Cell]] = [
    ("allocated MiB", lambda r: number(r.predicted.allocated_mib) if r.predicted else NOT_KNOWN),
    ("reserved MiB", lambda r: number(r.predicted.reserved_mib) if r.predicted else NOT_KNOWN),
    ("fits", lambda r: _fits(r)),
    ("headroom MiB", lambda r: number(r.predicted.headroom_mib) if r.predicted else NOT_KNOWN),
    ("peak in", lambda r: f"{r.predicted.peak_phase} {_code(r.predicted.peak_operator)}" if r.predicted else r.outcome),
    (
        "would move MiB",
        lambda r: _moved(r.predicted.to_host_mib, r.predicted.from_host_mib) if r.predicted else NOT_KNOWN,
    ),
    ("transfer ms (theoretical)", lambda r: number(r.predicted.transfer_round_trip_ms) if r.predicted else NOT_KNOWN),
    ("recompute (theoretical)", lambda r: percent(r.predicted.recompute_flops_ratio) if r.predicted else NOT_KNOWN),
]


def markdown(report: Report, max_rows: int | None = None) -> str:
    """The whole report. max_rows: trials shown per table, the preferred and the baseline always among them."""
    parts = [_section(section, max_rows) for section in report.sections]
    look = "\n".join(f"- {label}: `{line}`" for label, line in where_to_look(report))
    return "\n\n".join([*parts, f"### Where to look\n\n{look}"]) + "\n"


def describe(report: Report, limit: int = DESCRIPTION_LIMIT) -> str:
    """The report in at most `limit` characters: with fewer trials, and in the end cut, where it would be longer."""
    text = markdown(report)
    for rows in (50, 20, 10, 5, 2):
        if len(text) <= limit:
            return text
        text = markdown(report, rows)
    mark = "\n\n(cut; the whole is in report.md)\n"
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def _section(section: Section, max_rows: int | None) -> str:
    c = section.comparison
    rows, left_out = _shown_rows(section, max_rows)
    cap = f" Cap: {mib(c.cap_mib)} (`{c.cap_source}`)." if c.cap_mib is not None else ""
    parts = [
        f"## {_escape(section.title)}",
        f"**Verdict: {_escape(verdict_line(section))}.** {_escape(_capital(c.why))}.",
        f"**Next:** {_escape(c.next_action)}.",
        f"{evidence_line(section)} Against {_escape(c.against)}.{cap}",
        _table(section, rows),
    ]
    if left_out:
        parts.append(f"{left_out} more trials are in `report.json`.")
    parts.append("\n".join(f"- {_escape(line)}" for line in reading_lines(section)))
    parts += _memory(section)
    predictions = [line for line in prediction_lines(section) if line.split(":")[0] in {r.name for r in rows}]
    if predictions:
        lines = "\n".join(f"- {_escape(line)}" for line in predictions)
        parts.append(f"### Prediction against measurement (peak allocated)\n\n{lines}")
    blocked = [(row, words) for row, words in next_lines(section) if row in rows]
    if blocked:
        lines = "\n".join(f"- **{_escape(r.name)}** {r.verdict}{_reasons(r)}: {_escape(words)}" for r, words in blocked)
        parts.append(f"### Not accepted\n\n{lines}")
    return "\n\n".join(p for p in parts if p)


def _shown_rows(section: Section, max_rows: int | None) -> tuple[list[Row], int]:
    rows = section.rows
    if max_rows is None or len(rows) <= max_rows:
        return rows, 0
    always = [r for r in (section.baseline, section.preferred) if r is not None]
    # Accepted before tunable before rejected, and the fast first.
    order = {"accept": 0, "tune": 1, "reject": 2}
    ranked = sorted(rows, key=lambda r: (r not in always, order.get(r.verdict, 3), r.step_ms or float("inf")))
    kept = ranked[:max_rows]
    return [r for r in rows if r in kept], len(rows) - len(kept)


def _table(section: Section, rows: Sequence[Row]) -> str:
    columns = _PREDICTED if section.predicts else _MEASURED
    if not section.predicts and any(row.reserved_mib is not None for row in rows):
        columns = [*columns[:2], ("reserved MiB", lambda r: number(r.reserved_mib)), *columns[2:]]
    head = ["strategy", *(name for name, _ in columns), "verdict"]
    align = [
        "---",
        *("---" if name in ("outcome", "evidence", "fits", "peak in") else "---:" for name, _ in columns),
        "---",
    ]
    lines = [head, align]
    for row in rows:
        name = f"**{_escape(row.name)}**" if row is section.preferred else _escape(row.name)
        lines.append([name, *(_escape(cell(row)) for _, cell in columns), f"{row.verdict}{_reasons(row)}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _memory(section: Section) -> list[str]:
    row = memory_row(section)
    if row is None:
        return []
    lines = ["| category | MiB | share |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {number(value)} | {percent(share)} |" for name, value, share in memory_shares(row)]
    parts = [f"### {_escape(memory_title(row))}", "\n".join(lines)]
    largest = largest_line(row)
    return parts + ([f"Largest: {_escape(largest)}."] if largest else [])


def _fits(row: Row) -> str:
    return NOT_KNOWN if row.predicted is None else "yes" if row.predicted.fits else "no"


def _moved(to_host_mib: float | None, from_host_mib: float | None) -> str:
    if to_host_mib is None or from_host_mib is None:
        return NOT_KNOWN
    total = to_host_mib + from_host_mib
    return number(total) if total else "0"


def _reasons(row: Row) -> str:
    return f" ({', '.join(row.reasons)})" if row.reasons else ""


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _escape(text: str) -> str:
    """Names and errors as text: no table cell ends early, and nothing becomes emphasis or HTML."""
    one_line = " ".join(text.split())
    # An underscore inside of a word is no emphasis.
    return re.sub(r"[\\|*<\[`]|(?<!\w)_|_(?!\w)", lambda found: "\\" + found.group(), one_line)
