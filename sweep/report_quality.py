"""Quality in words and cells: held-out loss against the baseline's over the seeds, and what that means."""

from __future__ import annotations

from sweep.findings import CONFIDENCE, Quality
from sweep.report_data import Section
from sweep.report_rows import Row
from sweep.words import NOT_KNOWN, count, percent, signed_loss


def quality_cell(row: Row) -> str:
    """`equal`, `worse +0.04 (+0.02 to +0.06)`, `not known +0.04 (1 seed)`."""
    q = row.quality
    if q is None or row.is_baseline:
        return NOT_KNOWN
    if q.verdict == "unknown":
        return f"not known, {signed_loss(q.difference)} (1 seed)"
    if q.difference == 0:
        return "equal, 0"
    return f"{q.verdict}, {signed_loss(q.difference)}{_interval(q)}"


def _interval(q: Quality) -> str:
    if q.difference_low is None or q.difference_high is None:
        return ""
    return f" ({signed_loss(q.difference_low)} to {signed_loss(q.difference_high)})"


def quality_lines(section: Section) -> list[str]:
    """Which candidates' held-out losses are equal, better, worse, or not known."""
    by_verdict: dict[str, list[Row]] = {}
    for row in section.candidates:
        if row.quality is not None:
            by_verdict.setdefault(row.quality.verdict, []).append(row)
    lines = []
    for verdict, words in (("worse", "worse"), ("better", "better"), ("equal", "equal within the noise")):
        rows = by_verdict.get(verdict, [])
        if verdict == "equal":
            exact = [r for r in rows if r.quality is not None and r.quality.difference == 0]
            rows = [r for r in rows if r not in exact]
            if exact:
                lines.append(f"equal to the last bit: {_names(exact)}")
        if rows:
            told = [f"{r.name} {signed_loss(r.quality.difference)}{_interval(r.quality)}" for r in rows if r.quality]
            lines.append(f"{words}: {', '.join(told)}")
    unknown = by_verdict.get("unknown", [])
    if unknown:
        told = [f"{r.name} {signed_loss(r.quality.difference)}" for r in unknown if r.quality]
        lines.append(f"not known with 1 seed (measure.seeds=3 would tell): {', '.join(told)}")
    return lines


def seeds_words(section: Section) -> str:
    """How many seeds stand behind the losses, and what their intervals do not say."""
    compared = [r.quality for r in section.candidates if r.quality is not None]
    if not compared:
        return "no held-out loss was compared."
    seeds = max(q.seeds for q in compared)
    if seeds == 1:
        return (
            "1 seed, so losses that are not equal to the last bit cannot be told from chance; "
            "measure.seeds=3 repeats with others."
        )
    by_chance = (1 - CONFIDENCE) * len(compared)
    outside = [q.curve_outside_ratio for q in compared if q.curve_outside_ratio is not None]
    band = (
        f" At most {percent(max(outside))} of the steps of a mean training curve lie outside of the baseline's band."
        if outside
        else ""
    )
    return (
        f"{count(seeds, 'seed')}, compared in pairs.{band} Each interval stands for itself: among "
        f"{count(len(compared), 'comparison')} about {by_chance:.2g} would be called different by chance alone."
    )


def _names(rows: list[Row]) -> str:
    return ", ".join(r.name for r in rows)
