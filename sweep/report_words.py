"""The sentences that the terminal and the markdown share: how to read the numbers, and where to look next."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from sweep.report_data import Report, Row, Section
from sweep.results import Category, Evidence, Holder
from sweep.words import count, error, mib, number, percent

#: Half the distance between the quartiles over the median: from here on a step time is called noisy.
NOISY = 0.25

CATEGORY_WORDS = {
    Category.activation.value: "activations",
    Category.temporary.value: "temporaries",
    Category.gradient.value: "gradients",
    Category.optimizer_state.value: "optimizer state",
    Category.parameter.value: "parameters",
    Category.buffer.value: "buffers",
    Category.input.value: "inputs",
}


def evidence_line(section: Section) -> str:
    """What the numbers of a section are, so that none is taken for more."""
    evidence = section.comparison.evidence
    if section.predicts:
        return "Predicted: nothing was run. Times and shares of FLOPs are theoretical; none of it is a gain."
    if evidence == Evidence.cpu.value:
        return "Run on a CPU: memory is the ledger's device memory, times are this CPU's. No statement about a GPU."
    if evidence == Evidence.smoke.value:
        return "Run on a GPU, but (in part) too short to conclude: nothing too short is accepted."
    if evidence == Evidence.measured.value:
        return "Measured on a GPU. Memory is the allocator's peak of allocated bytes."
    return "No trial ran to its end."


def reading_lines(section: Section) -> list[str]:
    """How the columns of a section's table are to be read."""
    if section.predicts:
        return [
            "allocated, reserved: peaks. headroom: capacity less reserved and context.",
            "would move: to the host and back, per step. transfer: its theoretical time at the link's bandwidth.",
            "recompute: FLOPs computed again, over those of a step that recomputes nothing.",
        ]
    lines = []
    ran = next((r.measurement for r in section.results if r.measurement is not None), None)
    if ran is not None:
        over = f"{count(ran.repeats, 'repeat')} of {count(ran.steps, 'step')}"
        lines.append(
            f"step: median over {over}, ± half the distance between its quartiles; speed: against the baseline."
        )
    noisy = [r.name for r in section.rows if r.step_ms and (r.step_half_spread_ms or 0.0) > NOISY * r.step_ms]
    if noisy:
        lines.append(
            f"Noisy: the steps of {', '.join(noisy)} vary by more than a quarter, so differences in speed may be "
            "chance; measure again on a quiet machine, or with more measure.steps."
        )
    verified = [r for r in section.rows if r.verified is not None]
    if verified:
        allowed = max((r.tolerance for r in verified if r.tolerance is not None), default=None)
        lines.append(
            "grad err: largest relative error of a parameter's gradient against the baseline's "
            f"(allowed {error(allowed)}; 0: no difference)."
        )
    how: dict[str, list[str]] = {}
    for row in verified:
        if row.verified_how:
            how.setdefault(row.verified_how, []).append(row.name)
    lines += [f"Compared with {words}: {', '.join(names)}." for words, names in how.items()]
    return lines


def memory_row(section: Section) -> Row | None:
    """The row whose peak is explained: the baseline, or where its peak is not known the first that has one."""
    with_peak = [r for r in section.rows if r.at_peak_mib]
    if section.baseline is not None and section.baseline.at_peak_mib:
        return section.baseline
    return with_peak[0] if with_peak else None


def memory_title(row: Row) -> str:
    """`What fills the memory at the peak of baseline: 312.4 MiB, in backward, at aten.mm in head`."""
    if row.peak is not None and row.peak.at_peak_mib:
        phase, operator, module, total = row.peak.phase, row.peak.operator, row.peak.module, row.peak.mib
        kind = "" if row.evidence == Evidence.cpu.value else " (the ledger's account)"
    else:
        assert row.predicted is not None
        phase, operator, module = row.predicted.peak_phase, row.predicted.peak_operator, ""
        total, kind = row.predicted.allocated_mib, " (predicted)"
    where = [f"in {phase}"] if phase else []
    if operator:
        where.append(f"at {operator_words(operator)}" + (f" of {module}" if module else ""))
    return f"What fills the memory at the peak of {row.name}: {mib(total)}{kind}" + "".join(f", {w}" for w in where)


def operator_words(operator: str) -> str:
    """`aten.mm.default` as `mm`."""
    return operator.removeprefix("aten.").removesuffix(".default")


def memory_shares(row: Row) -> list[tuple[str, float, float]]:
    """Category in words, MiB and share of the peak, largest first."""
    at_peak = {k: v for k, v in row.at_peak_mib.items() if v > 0}
    total = sum(at_peak.values())
    ordered = sorted(at_peak.items(), key=lambda item: -item[1])
    return [(CATEGORY_WORDS.get(k, k), v, v / total) for k, v in ordered]


def largest_line(row: Row, most: int = 5) -> str:
    """The largest single holders of memory at the peak, in one line; those of like blocks together."""
    holders = row.peak.largest if row.peak is not None else row.predicted.largest if row.predicted is not None else []
    alike: dict[tuple[str, str], list[Holder]] = {}
    for holder in holders:
        alike.setdefault((re.sub(r"\d+", "*", holder.name), holder.category), []).append(holder)
    shown = []
    for (pattern, category), group in list(alike.items())[:most]:
        words = CATEGORY_WORDS.get(category, category)
        if len(group) == 1:
            tensors = f" in {group[0].count} tensors" if group[0].count > 1 else ""
            shown.append(f"{group[0].name or '(outside of any module)'} {mib(group[0].mib)} {words}{tensors}")
        else:
            sizes = {number(h.mib) for h in group}
            upto = "" if len(sizes) == 1 else "up to "
            shown.append(f"{len(group)} x {pattern}, {upto}{mib(max(h.mib for h in group))} {words} each")
    return "; ".join(shown)


def prediction_lines(section: Section) -> list[str]:
    """Each measured trial's prediction and its error."""
    pairs = [(r, r.predicted) for r in section.rows if r.predicted is not None and not section.predicts]
    lines = []
    for row, p in pairs:
        if row.peak_mib is not None and row.step_ms is not None:
            off = percent(p.error_ratio, 2, sign=True)
            lines.append(f"{row.name}: predicted {mib(p.allocated_mib)}, measured {mib(row.peak_mib)} ({off})")
        else:
            fits = "fits" if p.fits else "does not fit"
            lines.append(f"{row.name}: predicted {mib(p.allocated_mib)} ({fits}), not measured ({row.outcome})")
    return lines


def verdict_line(section: Section) -> str:
    c = section.comparison
    return f"{c.verdict} {c.preferred}" if c.preferred is not None else c.verdict


def next_lines(section: Section) -> list[tuple[Row, str]]:
    """For each trial that is not accepted: what is against it, and what to do."""
    return [
        (row, f"{row.why}. Next: {row.next_action}." if row.next_action else f"{row.why}.")
        for row in section.rows
        if row.verdict != "accept"
    ]


def spread(row: Row) -> str:
    """`118.2 ±2.4`, both rounded alike."""
    if row.step_ms is None:
        return number(None)
    half = row.step_half_spread_ms
    shown = number(row.step_ms)
    digits = len(shown.partition(".")[2])
    return shown if half is None else f"{shown} ±{half:.{digits}f}"


def where_to_look(report: Report) -> list[tuple[str, str]]:
    """Label and line: files, MLflow, and the command that repeats one trial."""
    folder = shown_path(report.folder)
    names = [report.markdown_path.name, report.json_path.name, *(p.name for p in report.plots)]
    lines = [("files", f"{folder}/: {', '.join(names)}")]
    mlflow = mlflow_line(report)
    if mlflow:
        lines.append(("mlflow", mlflow))
    for section in report.sections:
        row = section.preferred or section.baseline or section.rows[0]
        if row.command:
            lines.append((f"{row.name} again", row.command))
    if report.command:
        lines.append(("the sweep again", report.command))
    lines.append(("this report again", f"python -m sweep.report {shlex.quote(folder)}"))
    return lines


def mlflow_line(report: Report) -> str:
    """What to type or open to see the runs; empty where tracking is off."""
    if report.tracking.get("enabled") is False:
        return ""
    # A password in the address is not for reports.
    shown = re.sub(r"(://[^:@/\s]*):[^@/\s]*@", r"\1:***@", str(report.tracking.get("uri") or ""))
    if shown.startswith(("http://", "https://")):
        return f"open {shown}"
    return f"mlflow ui --backend-store-uri {shlex.quote(shown or 'sqlite:///mlruns/mlflow.db')}"


def shown_path(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
