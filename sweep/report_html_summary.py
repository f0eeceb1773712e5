"""The top of the HTML report: the verdict, the few numbers that matter, and every peak as a bar against the cap."""

from __future__ import annotations

from html import escape

from sweep.report_data import Section
from sweep.report_rows import Row
from sweep.report_times import change_cell, interval_words
from sweep.report_words import verdict_line
from sweep.results import Evidence
from sweep.words import EVIDENCE_SHORT, EVIDENCE_WORDS, NOT_KNOWN, loss, mib, ms, percent, signed_loss

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
