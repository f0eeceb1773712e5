"""The tables of the terminal report, in columns that fit 80 to 120 characters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from sweep.report_data import Section
from sweep.report_rows import Predicted, Row
from sweep.report_times import speed, spread
from sweep.report_words import memory_shares, operator_words
from sweep.results import Outcome, Verdict
from sweep.words import NOT_KNOWN, error, loss, number, percent

#: From this width on there is room for whole headers and every column.
WIDE, WIDE_PREDICTED = 100, 110
BAR = 24
#: What all columns take beside the name and the step time, and, of predictions, beside name and where the peak is.
_MEASURED_WIDTH, _PREDICTED_WIDTH = 63, 76

VERDICT_STYLES = {Verdict.accept.value: "green", Verdict.tune.value: "yellow", Verdict.reject.value: "red"}

#: Makes text printable: the identity, or what the terminal's encoding has instead.
Plain = Callable[[str], str]


@dataclass(frozen=True)
class _Column:
    header: str
    cell: Callable[[Row], str]
    right: bool = True
    style: Callable[[Row], str] = lambda row: ""


def trials_table(section: Section, width: int, plain: Plain) -> Table:
    """All trials of a comparison, measured or predicted, the preferred one marked."""
    wide = width >= (WIDE_PREDICTED if section.predicts else WIDE)
    reserved = width >= WIDE + 10 and any(row.reserved_mib is not None for row in section.rows)
    if section.predicts:
        room = width - _PREDICTED_WIDTH - len("backward") if wide else 22
    else:
        steps = max(len(spread(row)) for row in section.rows)
        room = width - _MEASURED_WIDTH - max(steps, 6) - 10 * reserved if wide else 22
    names = min(room, max(len(row.name) for row in section.rows) + 2)
    if section.predicts:
        columns = _predicted_columns(wide, width - names - _PREDICTED_WIDTH)
    else:
        columns = _measured_columns(wide, reserved)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, int(wide), 0, 0), pad_edge=False, show_edge=False)
    table.add_column("strategy", overflow="fold", width=names)
    for column in columns:
        table.add_column(column.header, justify="right" if column.right else "left", no_wrap=True, vertical="bottom")
    preferred = section.preferred
    for row in section.rows:
        name = f"{row.name} *" if row is preferred else row.name
        cells = [Text(plain(column.cell(row)), style=column.style(row)) for column in columns]
        table.add_row(Text(plain(name)), *cells, style="bold" if row is preferred else "")
    return table


def _verdict_column() -> _Column:
    return _Column("verdict", lambda r: r.verdict, right=False, style=lambda r: VERDICT_STYLES.get(r.verdict, ""))


def _outcome_style(row: Row) -> str:
    return "" if row.outcome == Outcome.ok.value else "red"


def _measured_columns(wide: bool, reserved: bool) -> list[_Column]:
    columns = [
        _Column("outcome", lambda r: r.outcome, right=False, style=_outcome_style),
        _Column("peak\nMiB", lambda r: number(r.peak_mib)),
        _Column("saved\nMiB", lambda r: number(r.saved_mib)),
        _Column("step\nms", spread),
        _Column("speed", speed),
        _Column("eval\nloss", lambda r: loss(r.eval_loss_mean)),
        _Column("grad\nerr", lambda r: error(r.grad_rel_err)),
        _verdict_column(),
    ]
    if reserved:
        columns.insert(2, _Column("reserved\nMiB", lambda r: number(r.reserved_mib)))
    if not wide:
        # What did not run has no step time, so its outcome stands there.
        step = _Column(
            "step\nms", lambda r: spread(r, short=True) if r.step_ms is not None else r.outcome, style=_outcome_style
        )
        columns = [*columns[1:3], step, *columns[4:]]
    return columns


def _predicted_columns(wide: bool, room: int) -> list[_Column]:
    def of(show: Callable[[Predicted], str]) -> Callable[[Row], str]:
        return lambda row: show(row.predicted) if row.predicted is not None else NOT_KNOWN

    return [
        _Column("allocated\nMiB" if wide else "alloc.\nMiB", of(lambda p: number(p.allocated_mib))),
        _Column("reserved\nMiB" if wide else "reserv.\nMiB", of(lambda p: number(p.reserved_mib))),
        _Column("headroom\nMiB" if wide else "room\nMiB", of(_headroom), style=_fits_style),
        _Column("peak in", lambda r: _peak_at(r, room if wide else 9), right=False),
        _Column("would\nmove MiB" if wide else "moves\nMiB", of(lambda p: number(p.to_host_mib + p.from_host_mib))),
        _Column("transfer\nms" if wide else "moves\nms", of(lambda p: number(p.transfer_round_trip_ms))),
        _Column("re-\ncompute" if wide else "again", of(lambda p: percent(p.recompute_flops_ratio))),
        _verdict_column(),
    ]


def _headroom(p: Predicted) -> str:
    if p.headroom_mib is None:
        return "fits" if p.fits else "no"
    return f"{'+' if p.headroom_mib >= 0 else ''}{number(p.headroom_mib)}{'?' if p.unsure else ''}"


def _fits_style(row: Row) -> str:
    return "red" if row.predicted is not None and not row.predicted.fits else ""


def _peak_at(row: Row, most: int) -> str:
    p = row.predicted
    if p is None:
        return row.outcome
    whole = f"{p.peak_phase} {operator_words(p.peak_operator)}".strip()
    return p.peak_phase if most < len(p.peak_phase) + 6 else whole[:most].strip()


def memory_table(row: Row, other: Row | None, plain: Plain) -> Table:
    """What is alive at the peak of `row` by category, with `other`'s (the preferred trial's) beside it."""
    beside = {name: value for name, value, _ in memory_shares(other)} if other is not None else {}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(beside), header_style="dim")
    table.add_column("  category", no_wrap=True)
    for header in ("MiB", "share", *(["preferred"] if beside else [])):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, value, share in memory_shares(row):
        cells = [f"  {name}", number(value), percent(share)] + ([number(beside.get(name, 0.0))] if beside else [])
        table.add_row(*(Text(c) for c in cells), Text(plain("█" * max(1, round(BAR * share)))))
    return table
