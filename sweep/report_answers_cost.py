"""What each trial cost: time with its interval, quality, host memory and bytes moved."""

from __future__ import annotations

from sweep.report_blocks import Answer, Block, Grid, Picture, Points, Text
from sweep.report_data import Section
from sweep.report_quality import quality_cell
from sweep.report_rows import Row
from sweep.report_times import change_cell, spread, time_words
from sweep.words import EVIDENCE_SHORT, NOT_KNOWN, count, error, loss, mib, ms, number, percent


def cost(section: Section) -> Answer:
    blocks: list[Block]
    if section.predicts:
        blocks = [Text(_predicted_words(section)), _predicted_grid(section)]
        return Answer("What did it cost?", blocks)
    row = section.preferred or _cheapest(section)
    if row is None or row.step_ms is None:
        words = "Not known: no trial was timed (0 of " + count(len(section.rows), "trial") + ")."
        return Answer("What did it cost?", [Text(words)])
    blocks = [Points(_points(section, row), title=_title(section, row)), _measured_grid(section)]
    blocks += [
        Picture("pareto", "Peak memory against throughput"),
        Picture("loss", "Training loss against the baseline's, and held-out loss"),
    ]
    return Answer("What did it cost?", blocks)


def _cheapest(section: Section) -> Row | None:
    """Where nothing is preferred: the fastest that was timed."""
    timed = [r for r in section.rows if r.step_ms is not None and not r.is_baseline]
    return min(timed, key=lambda r: r.step_ms or 0.0, default=None)


def _title(section: Section, row: Row) -> str:
    kind = "the preferred trial" if row is section.preferred else "not accepted; the fastest that was timed"
    return f"{row.name} ({kind}, {EVIDENCE_SHORT.get(row.evidence, row.evidence)})"


def _points(section: Section, row: Row) -> list[tuple[str, str]]:
    points = [("Time:", time_words(section, row)), ("Quality:", quality_words(section, row))]
    moved = (row.to_host_mib or 0.0) + (row.from_host_mib or 0.0)
    points.append(("Host memory:", host_words(row)))
    words = (
        "0 MiB per step"
        if not moved
        else (
            f"{mib(row.to_host_mib)} to the host and {mib(row.from_host_mib)} back per step, "
            f"{mib(1000 * moved / row.step_ms)} per second"
            if row.step_ms
            else mib(moved)
        )
    )
    points.append(("Moved:", f"{words}."))
    return points


def quality_words(section: Section, row: Row) -> str:
    if row.eval_loss_mean is None and row.quality is None:
        return "held-out loss was not evaluated (measure.eval_batches=0)."
    if row.is_baseline or row.quality is None:
        return f"held-out loss {loss(row.eval_loss_mean)}."
    q = row.quality
    verdict = {"equal": "equal to the baseline's", "unknown": "not known"}.get(
        q.verdict, f"{q.verdict} than the baseline's"
    )
    return f"held-out loss {loss(q.loss)}, {verdict}: {q.why}."


def host_words(row: Row) -> str:
    if row.host_peak_mib is None:
        return "not known: the ledger saw no step."
    return f"{mib(row.host_peak_mib)} of copies at most (the ledger's)."


def _measured_grid(section: Section) -> Grid:
    has_quality = any(r.quality is not None and not r.is_baseline for r in section.rows)
    header = ["strategy", "step ms", "against the baseline", "samples/s", "held-out loss"]
    header += ["quality"] if has_quality else []
    header += ["host MiB", "moved MiB per step", "grad err", "evidence"]
    rows = []
    for r in section.rows:
        moved = None if r.to_host_mib is None or r.from_host_mib is None else r.to_host_mib + r.from_host_mib
        cells = [r.name, spread(r), change_cell(r), number(r.samples_per_s), loss(r.eval_loss_mean)]
        cells += [quality_cell(r)] if has_quality else []
        rows.append([*cells, number(r.host_peak_mib), number(moved), error(r.grad_rel_err), r.evidence])
    grid = Grid(
        header, rows, frozenset(["quality", "evidence"]), list(range(len(rows))), section.comparison.preferred_index
    )
    return grid


def _predicted_words(section: Section) -> str:
    row = section.preferred
    words = "Time, quality and host memory are not known: nothing was run. Theoretical, from what a step would do: "
    of = next((r for r in [row, *section.candidates] if r is not None and r.predicted is not None), None)
    if of is None or of.predicted is None:
        return "Nothing is known of it: 0 trials were run or predicted."
    p = of.predicted
    transfer = f" ({ms(p.transfer_round_trip_ms)} at the link's bandwidth)" if p.transfer_round_trip_ms else ""
    moved = mib(p.to_host_mib + p.from_host_mib)
    return (
        f"{words}{of.name} would recompute {percent(p.recompute_flops_ratio)} of a step's FLOPs "
        f"and move {moved} per step{transfer}."
    )


def _predicted_grid(section: Section) -> Grid:
    header = ["strategy", "recompute (theoretical)", "would move MiB", "transfer ms (theoretical)"]
    rows = []
    for r in section.rows:
        p = r.predicted
        cells = [NOT_KNOWN] * 3
        if p is not None:
            moved = number(p.to_host_mib + p.from_host_mib)
            cells = [percent(p.recompute_flops_ratio), moved, number(p.transfer_round_trip_ms)]
        rows.append([r.name, *cells])
    return Grid(header, rows, trials=list(range(len(rows))), strong=section.comparison.preferred_index)
