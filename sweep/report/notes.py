"""The lines around the tables of a report: how to read the numbers, and where to look next."""

from __future__ import annotations

import math
import re
import shlex

from sweep.decide.reasons import LASTING
from sweep.format import NOT_KNOWN, count, error, mib, ms, number, percent, ratio, signed_loss
from sweep.report.data import Report, Row, Section, page_in_mlflow, shown_path
from sweep.report.phrases import CATEGORY_WORDS, capital, operator_words, sentence
from sweep.results import CONFIDENCE, Evidence, Holder, Quality


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


#: Half the distance between the quartiles over the median: from here on a step time is called noisy.
NOISY = 0.25
#: What a difference inside of the noise is called.
NONE = "none"


def spread(row: Row, short: bool = False) -> str:
    """`310 (305-316)` with the interval of the median where it is known, else `118.2 ±2.4` with the quartiles.

    short: `310 ±6`, half of the interval.
    """
    if row.step_ms is None:
        return number(None)
    if row.step_ms_ci_low is not None and row.step_ms_ci_high is not None:
        width = row.step_ms_ci_high - row.step_ms_ci_low
        n = _decimals(width, row.step_ms)
        if short:
            return f"{row.step_ms:.{n}f} ±{width / 2:.{n}f}"
        return f"{row.step_ms:.{n}f} ({row.step_ms_ci_low:.{n}f}-{row.step_ms_ci_high:.{n}f})"
    half = row.step_half_spread_ms
    shown = number(row.step_ms)
    digits = len(shown.partition(".")[2])
    return shown if half is None else f"{shown} ±{half:.{digits}f}"


def _decimals(width: float, size: float) -> int:
    """Decimals that an interval of this width leaves worth showing: one digit of the width, and three of the value."""
    if width <= 0 or size <= 0:
        return len(number(size).partition(".")[2])
    return max(0, min(-math.floor(math.log10(width)), 2 - math.floor(math.log10(size)) + 1, 3))


def interval_words(row: Row) -> str:
    """`305.1 to 316.0 ms`, "" where there is none."""
    if row.step_ms_ci_low is None or row.step_ms_ci_high is None:
        return ""
    n = _decimals((row.step_ms_ci_high - row.step_ms_ci_low) / 10, row.step_ms or 0.0)
    return f"{row.step_ms_ci_low:.{n}f} to {row.step_ms_ci_high:.{n}f} ms"


def speed(row: Row) -> str:
    """Throughput over the baseline's, or that there is no difference beyond the noise."""
    return NONE if row.step is not None and row.step.none else ratio(row.throughput_ratio)


def change_cell(row: Row) -> str:
    """The step time against the baseline's: `+65 % (+58 to +71)`, `none (-1 to +3)`."""
    d = row.step
    if row.is_baseline:
        return NOT_KNOWN
    if d is None:
        return NOT_KNOWN if not row.throughput_ratio else percent(1 / row.throughput_ratio - 1, sign=True)
    low, high = (percent(x - 1, _percent_digits(d.high - d.low), sign=True).removesuffix(" %") for x in (d.low, d.high))
    what = NONE if d.none else percent(d.ratio - 1, _percent_digits(d.high - d.low), sign=True)
    return f"{what} ({low} to {high}{' %' if d.none else ''})"


def _percent_digits(width: float) -> int:
    return 1 if width < 0.02 else 0


def time_words(section: Section, row: Row) -> str:
    """The step time with its interval and its change against the baseline's."""
    words = f"{ms(row.step_ms)} per step"
    if interval_words(row):
        words += f" (95 % interval {interval_words(row)})"
    elif row.step_half_spread_ms is not None:
        words += f" (± {ms(row.step_half_spread_ms)}, half the distance between the quartiles)"
    words += f", {number(row.samples_per_s)} samples/s"
    base = section.baseline
    if row.is_baseline or base is None or base.step_ms is None:
        return f"{words}."
    d, against = row.step, f"against the baseline's {ms(base.step_ms)}"
    if d is None:
        if row.throughput_ratio is None:
            return f"{words}."
        change = percent(1 / row.throughput_ratio - 1, 1, sign=True)
        return f"{words}; {change} {against}, and whether that is noise is not known."
    interval = f"95 % interval {percent(d.low - 1, 1, sign=True)} to {percent(d.high - 1, 1, sign=True)}"
    if d.none:
        return f"{words}; {none_words(section)} {against} ({percent(d.ratio - 1, 1, sign=True)}, {interval})."
    return f"{words}; {percent(d.ratio - 1, 1, sign=True)} {against} ({interval})."


def none_words(section: Section) -> str:
    """What a difference that is called none is not beyond: the noise, and the machine's drift where there was one."""
    drift = section.comparison.drift
    return "no difference beyond the noise" + (" and the drift" if drift and not drift.difference.none else "")


def noisy_words(section: Section) -> str:
    """Whose steps vary so much that differences may be chance; "" where none do."""
    noisy = [r.name for r in section.rows if r.step_ms and (r.step_half_spread_ms or 0.0) > NOISY * r.step_ms]
    if not noisy:
        return ""
    return (
        f"Noisy: the steps of {', '.join(noisy)} vary by more than a quarter, so differences in speed may be "
        "chance; measure again on a quiet machine, or with more measure.steps."
    )


#: A prediction that is further off than this is worth a line of its own.
WELL_PREDICTED = 0.01

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
    """How the columns of the terminal's table are to be read."""
    if section.predicts:
        return [
            "allocated, reserved: peaks. headroom: capacity less reserved and context" + _unsure(section),
            "would move: to the host and back, per step. transfer: its theoretical time at the link's bandwidth.",
            "recompute: FLOPs computed again, over those of a step that recomputes nothing.",
        ]
    step = _step_note(section)
    none = f"; none: {none_words(section)}" if any(r.step and r.step.none for r in section.rows) else ""
    lines = [f"step: {step}; speed: against the baseline{none}."] if step else []
    noisy = noisy_words(section)
    return lines + ([noisy] if noisy else []) + _error_notes(section)


def premise_lines(section: Section) -> list[str]:
    """What the peaks of a table rest on: what is not counted, whose peak it is, and what lies in the blocks."""
    found: dict[str, dict[str, list[str]]] = {}
    known = sum(r.predicted is not None or r.step_ms is not None for r in section.rows)
    of = "" if section.predicts else ", of the predictions"
    for row in section.rows:
        # A measured row's own come first; what is the same of its prediction is said once.
        own = [what for what, _ in row.premises]
        predicted = row.predicted.caveats if row.predicted is not None else []
        for what, value in [*row.premises, *((f"{c}{of}", "") for c in predicted if c not in own)]:
            found.setdefault(what, {}).setdefault(value, []).append(row.name)
    lines = []
    for what, values in found.items():
        everywhere = len(values) == 1 and len(next(iter(values.values()))) >= known
        told = [
            " ".join(w for w in (value, "" if everywhere else f"({', '.join(names)})") if w)
            for value, names in values.items()
        ]
        # Without a number there is nothing to say but whose it is.
        lines.append(capital(f"{what}{': ' if any(values) else ' ' if told[0] else ''}{'; '.join(told)}") + ".")
    return lines + blocks_line(section)


def blocks_line(section: Section) -> list[str]:
    """Which modules were taken as blocks, and what share of the baseline's activations lies in them."""
    first = next((r for r in section.results if r.block_patterns), None)
    if first is None:
        return []
    line = f"Blocks: {', '.join(first.block_patterns)}"
    if first.block_share is None:
        return [f"{line}."]
    line += f", with {percent(first.block_share)} of the baseline's activations."
    if first.block_share >= 0.5:
        return [line]
    return [f"WARNING: {line} What works on blocks leaves the larger part alone: name others with workload.blocks."]


def table_notes(section: Section) -> list[str]:
    """The same for the tables of the whole report."""
    if section.predicts:
        return [
            "peak, reserved: of allocated and of reserved bytes. headroom: capacity less reserved and context"
            + _unsure(section),
            "recompute: FLOPs computed again, over those of a step that recomputes nothing.",
            "would move: to the host and back, per step. transfer: its theoretical time at the link's bandwidth.",
        ]
    step = _step_note(section)
    lines = [
        "peak: the highest point of allocated device memory. saved: against the baseline's, in MiB and as its share.",
    ]
    if step:
        lines.append(
            f"step: {step}. against the baseline: change of the step time (with its 95 % interval); none: "
            f"{none_words(section)}."
        )
    if any(r.quality is not None for r in section.candidates):
        lines.append(
            "quality: held-out loss less the baseline's over the same seeds (95 % interval of the mean). It speaks of "
            "these steps and held-out batches, not of a whole training run; equal is not the same: differences "
            "inside of the interval are not ruled out."
        )
    return lines + _error_notes(section)


def _unsure(section: Section) -> str:
    unsure = any(r.predicted is not None and r.predicted.unsure for r in section.rows)
    return " (?: less what is not counted)." if unsure else "."


def _step_note(section: Section) -> str:
    ran = [r.measurement for r in section.results if r.measurement is not None]
    if not ran:
        return ""
    # The baseline has one repeat more, for the drift.
    over = f"median over {count(min(m.repeats for m in ran), 'repeat')} of {count(ran[0].steps, 'step')}"
    if any(r.step_ms_ci_low is not None for r in section.rows):
        return f"{over} (its 95 % interval)"
    return f"{over}, ± half the distance between its quartiles"


def _error_notes(section: Section) -> list[str]:
    verified = [r for r in section.rows if r.verified is not None]
    lines = []
    if verified:
        allowed = max((r.tolerance for r in verified if r.tolerance is not None), default=None)
        lines.append(
            "grad err: largest relative error of a parameter's gradient against the baseline's "
            f"(allowed {error(allowed)}; 0: no difference)."
        )
    compared: dict[str, list[str]] = {}
    for row in verified:
        if row.verified_how:
            compared.setdefault(row.verified_how, []).append(row.name)
    return lines + [f"Compared: {words}: {', '.join(names)}." for words, names in compared.items()]


def lasting_mib(row: Row) -> float:
    """Parameters, buffers, gradients and optimizer state at the peak, in MiB: what no strategy here lowers."""
    return sum(row.at_peak_mib.get(c.value, 0.0) for c in LASTING)


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
    """Measured against predicted peaks: in one line where they agree, and one for each trial where they do not."""
    if section.predicts:
        return []
    pairs = [(r, r.predicted) for r in section.rows if r.predicted is not None]
    measured = [(r, p) for r, p in pairs if r.peak_mib is not None and r.step_ms is not None]
    close = [(r, p) for r, p in measured if p.error_ratio is not None and abs(p.error_ratio) <= WELL_PREDICTED]
    lines = []
    if close:
        worst = max(1e-4, *(abs(p.error_ratio or 0.0) for _, p in close), 0.0)
        lines.append(f"within {percent(worst, 2)} of the measured peak for {count(len(close), 'trial')}")
    for row, p in measured:
        if (row, p) not in close:
            off = percent(p.error_ratio, 2, sign=True)
            lines.append(f"{row.name}: predicted {mib(p.allocated_mib)}, measured {mib(row.peak_mib)} ({off})")
    for row, p in pairs:
        if (row, p) not in measured:
            fits = "fits" if p.fits else "does not fit"
            lines.append(f"{row.name}: predicted {mib(p.allocated_mib)} ({fits}), not measured ({row.outcome})")
    errors: dict[str, list[str]] = {}
    for row in section.rows:
        if row.prediction_error:
            errors.setdefault(row.prediction_error, []).append(row.name)
    return lines + [f"{', '.join(names)}: not predicted: {error}" for error, names in errors.items()]


def prediction_summary(section: Section) -> str:
    """How far predictions can be trusted here."""
    if section.predicts:
        return "nothing was measured here to hold them against (0 trials)"
    lines = prediction_lines(section)
    return "; ".join(lines) if lines else "0 trials have one"


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


def reasons_words(row: Row) -> str:
    return f" ({', '.join(row.reasons)})" if row.reasons else ""


def says(section: Section, words: str) -> str:
    """A sentence with a capital letter, unless it begins with the name of a trial."""
    return sentence(words, first=not any(words.startswith(row.name) for row in section.rows))


def where_to_look(report: Report) -> list[tuple[str, str]]:
    """Label and line: files, MLflow, and the command that repeats one trial."""
    folder = shown_path(report.folder)
    names = [path.name for path in report.files]
    label = "the report under the sweep's own budget" if report.options else "files"
    lines = [(label, f"{folder}/: {', '.join(names)}")]
    mlflow = mlflow_line(report)
    if mlflow:
        lines.append(("mlflow", mlflow))
        page = page_in_mlflow(report.folder)
        if page.startswith("#"):
            lines.append(("this sweep there", f"http://127.0.0.1:5000/{page}"))
        elif page:
            lines[-1] = ("mlflow", f"open {page}")
    for section in report.sections:
        row = section.preferred or section.baseline or section.rows[0]
        if row.command:
            lines.append((f"{row.name} again", row.command))
    if report.command:
        lines.append(("the sweep again", report.command))
    lines.append(("this report again", f"python -m sweep.report {shlex.quote(folder)} {report.options}".rstrip()))
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
