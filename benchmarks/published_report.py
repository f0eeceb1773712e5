"""Errors of predictions against published numbers, per point and in summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sweep.results import Prediction

#: Median and worst relative error that the predictor is held to, for points of confidence high.
GOALS = {"allocated": (0.0005, 0.01), "reserved": (0.003, 0.03)}


@dataclass
class Row:
    """One published point beside its prediction. Sizes in MiB, errors relative to the published number."""

    id: str
    family: str
    title: str
    confidence: str
    published_allocated_mib: float | None
    predicted_allocated_mib: float
    published_reserved_mib: float | None
    predicted_reserved_mib: float
    context_mib: float
    fits: bool
    peak_phase: str
    peak_operator: str
    seconds: float

    @classmethod
    def of(cls, point: dict[str, Any], family: str, p: Prediction) -> Row:
        title = f"{point['model']}, b{point['batch']} s{point['seq_or_image']}, {_short(point)}"
        return cls(
            point["id"], family, title, point["confidence"], point["allocated_mib"], p.allocated_mib,
            point["reserved_mib"], p.reserved_mib, p.context_mib, p.fits, p.peak_phase, p.peak_operator, p.seconds,
        )  # fmt: skip

    @property
    def allocated_error(self) -> float | None:
        return _error(self.predicted_allocated_mib, self.published_allocated_mib)

    @property
    def reserved_error(self) -> float | None:
        return _error(self.predicted_reserved_mib, self.published_reserved_mib)

    @property
    def lets_oom_through(self) -> bool:
        """A budget of what was predicted is less than what the run reserved (the context is in both)."""
        return self.published_reserved_mib is not None and self.predicted_reserved_mib < self.published_reserved_mib

    @property
    def surely_oom(self) -> bool:
        """Not even what the run had allocated would fit into a budget of what was predicted."""
        least = self.published_allocated_mib
        return least is not None and self.predicted_reserved_mib < least

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "allocated_error": self.allocated_error, "reserved_error": self.reserved_error}

    def line(self) -> str:
        return (
            f"{self.id} {self.title:70.70s} "
            f"allocated {_pair(self.predicted_allocated_mib, self.published_allocated_mib)}  "
            f"reserved {_pair(self.predicted_reserved_mib, self.published_reserved_mib)}  {self.seconds:.1f} s"
        )


def _short(point: dict[str, Any]) -> str:
    amp = "amp" if point["amp"] not in (None, "none") else point["dtype"].split()[0]
    optimizer = point["optimizer"]
    which = "none" if optimizer.startswith("none") else "course AdamW" if "cs336_basics" in optimizer else "Adam(W)"
    return f"{amp}, {which}, {point['strategy']}"


def _error(predicted: float, published: float | None) -> float | None:
    return None if published is None else predicted / published - 1


def _pair(predicted: float, published: float | None) -> str:
    error = _error(predicted, published)
    return f"{predicted:9.1f} ({'not published' if error is None else f'{100 * error:+.3f} %'})"


def quantile(values: list[float], share: float) -> float:
    """Linear between the two nearest; values need not be sorted."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def summary(rows: list[Row]) -> dict[str, Any]:
    """Absolute relative errors by group: all, confidence high, each family; and how often a prediction is too low."""
    groups = {"all": rows, "confidence high": [r for r in rows if r.confidence == "high"]}
    for family in sorted({r.family for r in rows}):
        groups[family] = [r for r in rows if r.family == family]
    out: dict[str, Any] = {}
    for name, members in groups.items():
        out[name] = {"points": len(members)}
        for kind in ("allocated", "reserved"):
            errors = [abs(e) for r in members if (e := getattr(r, f"{kind}_error")) is not None]
            if errors:
                numbers = {"median": quantile(errors, 0.5), "p90": quantile(errors, 0.9), "worst": max(errors)}
                out[name][kind] = {"points": len(errors), **numbers}
        out[name]["reserved_predicted_too_low"] = sum(r.lets_oom_through for r in members)
        out[name]["surely_out_of_memory"] = sum(r.surely_oom for r in members)
    return out


def render(rows: list[Row]) -> str:
    """Markdown: the summary, then every point."""
    lines = [
        "| points | n | allocated: median | p90 | worst | reserved: median | p90 | worst | too low | surely OOM |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, group in summary(rows).items():
        cells = [name, str(group["points"])]
        for kind in ("allocated", "reserved"):
            numbers = group.get(kind)
            cells += [f"{100 * numbers[k]:.3f} %" if numbers else "" for k in ("median", "p90", "worst")]
        cells += [str(group["reserved_predicted_too_low"]), str(group["surely_out_of_memory"])]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| id | setting | confidence | allocated: published | predicted | error "
        "| reserved: published | predicted | error | peak |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        cells = [r.id, r.title, r.confidence]
        for kind in ("allocated", "reserved"):
            published, error = getattr(r, f"published_{kind}_mib"), getattr(r, f"{kind}_error")
            cells += [
                "" if published is None else f"{published:.1f}",
                f"{getattr(r, f'predicted_{kind}_mib'):.1f}",
                "" if error is None else f"{100 * error:+.3f} %",
            ]
        lines.append("| " + " | ".join([*cells, f"{r.peak_phase}, {r.peak_operator}"]) + " |")
    return "\n".join(lines) + "\n"
