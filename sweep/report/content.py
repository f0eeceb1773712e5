"""The content of a report, built once as blocks: what a screen has room for, and a page that answers a reader's
questions who was not there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from sweep.config.strategy_names import batch_of, strategy_of
from sweep.decide.causes import parts_of
from sweep.decide.reasons import LASTING
from sweep.format import EVIDENCE_SHORT, NOT_KNOWN, OUTCOME_WORDS, count, error, loss, mib, ms, number, percent
from sweep.report import phrases
from sweep.report.blocks import DETAIL, USEFUL, Block, Column, Commands, Heading, Picture, Points, Table, Text
from sweep.report.data import Report, Row, Section, ranked, shown_path, state_of
from sweep.report.notes import (
    against_line,
    change_cell,
    disturbed_words,
    drift_words,
    equality_words,
    evidence_line,
    evidence_of,
    largest_line,
    next_lines,
    noise_words,
    prediction_lines,
    premise_lines,
    quality_cell,
    quality_lines,
    quality_words,
    repeats_words,
    says,
    seeds_words,
    speed,
    spread,
    table_notes,
    time_words,
    verdict_line,
)
from sweep.report.phrases import PART_WORDS, change_words, operator_words, sentence
from sweep.results import RANGES, Category, Change, Evidence, Outcome, Peak, Prediction

#: Sentences that a reader takes in, and trials whose words are not read one by one any more.
MOST_LINES, MOST_TRIALS = 6, 12
#: Parts below this share of the largest value are added up as "smaller parts".
SMALL = 0.01


def screen(section: Section) -> list[Block]:
    """What a terminal has room for: all trials, what fills the memory, the verdict, and what to do next."""
    c, shown = section.comparison, "prediction" if section.predicts else "trial"
    quality = quality_lines(section)
    findings = finding_lines(section)[: 1 if section.predicts else 2]
    survival = [("Other budgets:", sentence(line)) for line in phrases.survival(section.sensitivity)[:1]]
    return [
        Heading(f"{section.title}: {count(len(section.rows), shown)}", 1),
        Text(against_line(section)),
        *(Text(note) for note in section.notes),
        overview(section),
        *(Text(line, quiet=True) for line in table_notes(section)),
        *(Text(line) for line in premise_lines(section)),
        *([Text(f"{'; '.join(quality)}.", "Held-out loss against the baseline's:")] if quality else []),
        *memory(memory_row(section), section.preferred),
        Heading("Prediction against measurement (peak allocated)"),
        Points([("", line) for line in prediction_lines(section)]),
        Heading(f"Verdict: {verdict_line(section)}"),
        Text(says(section, phrases.conclusion(c, section.results))),
        Points(
            [
                *(("Why:", says(section, words)) for words in because(section)),
                *(("Finding:", f"{name}: {sentence(line, first=False)}") for name, line in findings),
                *survival,
                ("Next:", sentence(phrases.next_action(c, section.results), first=False)),
            ]
        ),
        _blocked(section),
    ]


def page(section: Section) -> list[Block]:
    """The whole: what a reader takes away who reads no further, then the answers to the questions as they are asked."""
    c = section.comparison
    return [
        Heading(section.title, 1),
        Text(says(section, phrases.conclusion(c, section.results)), f"Verdict: {verdict_line(section)}."),
        Text(sentence(phrases.next_action(c, section.results), first=False), "Next:"),
        *(Text(note) for note in section.notes),
        Text(against_line(section), quiet=True),
        overview(section),
        Heading("What filled the memory?"),
        *pressure(section),
        Heading("What was changed?"),
        *changed(section),
        Heading("What did it save?"),
        *saved(section),
        Heading("What did it cost?"),
        *cost(section),
        Heading("Why?"),
        *why(section),
        Heading("Does it hold?"),
        *hold(section),
        Heading("What next?"),
        Text(says(section, phrases.next_action(c, section.results))),
        _blocked(section),
        *_what_if(section),
        Points([("", line) for line in table_notes(section)], "How to read the tables", DETAIL),
    ]


def where_to_look(report: Report, title: str = "Where to look") -> list[Block]:
    """Files, MLflow, and the commands that repeat a trial, the sweep and this report."""
    folder = shown_path(report.folder)
    label = "the report under the sweep's own budget" if report.options else "files"
    lines = [(label, f"{folder}/: {', '.join(path.name for path in report.files)}"), *_in_mlflow(report)]
    for section in report.sections:
        row = section.preferred or section.baseline or section.rows[0]
        lines += [(f"{row.name} again", row.result.command)] if row.result.command else []
    lines += [("the sweep again", report.command)] if report.command else []
    again = f"python -m sweep.report {shlex.quote(folder)} {report.options}".rstrip()
    return [Heading(title), Commands([*lines, ("this report again", again)])]


def _in_mlflow(report: Report) -> list[tuple[str, str]]:
    """What to type or open to see the runs; nothing where tracking is off."""
    if report.tracking.get("enabled") is False:
        return []
    page = str(state_of(report.folder).get("page") or "")
    # A password in the address is not for reports.
    uri = re.sub(r"(://[^:@/\s]*):[^@/\s]*@", r"\1:***@", str(report.tracking.get("uri") or ""))
    if page and not page.startswith("#"):
        return [("mlflow", f"open {page}")]
    if uri.startswith(("http://", "https://")):
        return [("mlflow", f"open {uri}")]
    there = [("this sweep there", f"http://127.0.0.1:5000/{page}")] if page else []
    return [("mlflow", f"mlflow ui --backend-store-uri {shlex.quote(uri or 'sqlite:///mlruns/mlflow.db')}"), *there]



# -- tables of trials -------------------------------------------------------------------------------------------------


def _trials(section: Section, columns: Sequence[Column], rank: int = 0) -> Table:
    """A row for each trial; columns in which nothing is known are left out."""
    kept = [c for c in columns if c.words or any(cell != NOT_KNOWN for cell in c.cells)]
    place = {id(section.results[i]): n for n, i in enumerate(ranked(section.results, section.comparison))}
    strong = next((i for i, r in enumerate(section.rows) if r is section.preferred), None)
    return Table(kept, "", rank, [place[id(r.result)] for r in section.rows], strong)


def _bars(values: Sequence[float | None], limit: float | None = None) -> tuple[list[float | None], float | None]:
    """Shares of the largest value, and where a limit lies among them where it is near enough to be shown."""
    most = max((v for v in values if v is not None), default=0.0)
    reach = max(most, limit) if limit is not None and limit <= 2.5 * most else most
    shares = [None if v is None or reach <= 0 else v / reach for v in values]
    return shares, limit / reach if limit is not None and 0 < limit <= reach else None


def overview(section: Section) -> Table:
    """Peak and speed of every trial, and what was decided."""
    rows = section.rows

    def column(header: str, show: Callable[[Row], str], rank: int = 0, words: bool = False) -> Column:
        return Column(header, [show(r) for r in rows], words, rank)

    def predicted(header: str, show: Callable[[Prediction], str], rank: int = 0) -> Column:
        return column(header, lambda r: show(r.predicted) if r.predicted is not None else NOT_KNOWN, rank)

    name, verdict = column("strategy", lambda r: r.name, words=True), column("verdict", lambda r: r.decision.verdict)
    verdict.words = True
    if section.predicts:
        peak = predicted("allocated MiB", lambda p: number(p.allocated_mib))
        peak.shares, peak.mark = _bars([r.peak_mib for r in rows], section.comparison.cap_mib)
        columns = [
            name,
            peak,
            predicted("reserved MiB", lambda p: number(p.reserved_mib)),
            predicted("headroom MiB", _headroom),
            column("peak in", lambda r: r.peak.phase if r.peak else r.result.outcome, words=True),
            predicted("would move MiB", lambda p: number(p.to_host_mib + p.from_host_mib)),
            predicted("transfer ms", lambda p: number(p.transfer_round_trip_ms), USEFUL),
            predicted("recompute", lambda p: percent(p.recompute_flops_ratio)),
        ]
        return _trials(section, [*columns, verdict])
    peak = column("peak MiB", lambda r: number(r.peak_mib))
    peak.shares, peak.mark = _bars([r.peak_mib for r in rows], section.comparison.cap_mib)
    fast = column("speed", lambda r: speed(r) if r.step_ms is not None else NOT_KNOWN)
    if all(cell == NOT_KNOWN for cell in fast.cells):  # no baseline ran
        fast = column("samples/s", lambda r: number(r.measured.samples_per_s if r.measured else None))
    fast.shares = _bars([r.measured.samples_per_s if r.measured else None for r in rows])[0]
    columns = [
        name,
        peak,
        column("reserved MiB", lambda r: number(r.measured.peak_reserved_mib) if r.measured else NOT_KNOWN, DETAIL),
        column("saved MiB", lambda r: number(r.decision.saved_mib)),
        column("step ms", lambda r: spread(r) if r.step_ms is not None else r.result.outcome),
        fast,
        column("eval loss", lambda r: loss(r.eval_loss), USEFUL),
        column("grad err", lambda r: error(v.grad_rel_err) if (v := r.result.verification) else NOT_KNOWN, USEFUL),
    ]
    return _trials(section, [*columns, verdict])


def _headroom(p: Prediction) -> str:
    if p.headroom_mib is None:
        return "fits" if p.fits else "no"
    return f"{'+' if p.headroom_mib >= 0 else ''}{number(p.headroom_mib)}{'?' if p.unsure else ''}"


# -- what filled the memory? ------------------------------------------------------------------------------------------


def memory_row(section: Section) -> Row | None:
    """The row whose peak is explained: the baseline, or where its peak is not known the first that has one."""
    base = section.baseline
    return next((r for r in [*([base] if base else []), *section.rows] if r.peak is not None), None)


def memory_parts(peak: Peak) -> list[tuple[str, float, float]]:
    """Part in words, MiB and share of the peak, largest first."""
    found = {PART_WORDS.get(part, part): size for part, size in parts_of(peak).items() if size > 0}
    total = sum(found.values())
    return [(part, size, size / total) for part, size in sorted(found.items(), key=lambda item: -item[1])]


def moment_words(peak: Peak) -> str:
    """`backward at mm of blocks.7.mlp.down`"""
    operator = f" at {operator_words(peak.operator)}" if peak.operator else ""
    return f"{peak.phase}{operator}{f' of {peak.module}' if operator and peak.module else ''}"


def memory(row: Row | None, other: Row | None) -> list[Block]:
    """What is alive at the peak of `row`, with `other`'s (the preferred trial's) beside it."""
    if row is None or row.peak is None:
        return []
    peak, how = row.peak, "predicted" if not row.peak_was_seen else "the ledger's account"
    kind = "" if row.peak_was_seen and row.result.evidence == Evidence.cpu.value else f" ({how})"
    total = peak.mib if row.peak_was_seen or row.predicted is None else row.predicted.allocated_mib
    return [
        Heading(f"What fills the memory at the peak of {row.name}: {mib(total)}{kind}, in {moment_words(peak)}", 3),
        *memory_table(row, other),
    ]


def memory_table(row: Row, other: Row | None = None) -> list[Block]:
    assert row.peak is not None
    parts = memory_parts(row.peak)
    columns = [
        Column("part", [name for name, _, _ in parts], words=True),
        Column("MiB", [number(size) for _, size, _ in parts]),
    ]
    if other is not None and other is not row and other.peak is not None:
        beside = {name: size for name, size, _ in memory_parts(other.peak)}
        columns.append(Column("at the preferred's", [number(beside.get(name, 0.0)) for name, _, _ in parts]))
    columns.append(Column("share", [percent(s) for _, _, s in parts], shares=[s for _, _, s in parts]))
    largest = largest_line(row.peak)
    return [Table(columns, rank=USEFUL), *([Text(f"{largest}.", "Largest:", USEFUL)] if largest else [])]


def pressure(section: Section) -> list[Block]:
    """Memory at the baseline's peak against the cap, and what fills it."""
    blocks: list[Block] = [Text(_pressure_words(section))]
    row = memory_row(section)
    if row is None or row.peak is None:
        return [*blocks, Text("What filled the memory is not known: no peak is.")]
    at_peak = row.peak.at_peak_mib
    total, activations = sum(at_peak.values()), at_peak.get(Category.activation.value, 0.0)
    lasting = sum(at_peak.get(c.value, 0.0) for c in LASTING)
    source = "These shares are predicted." if not row.peak_was_seen else "The shares are the ledger's account."
    if row.peak_was_seen and row.result.evidence == Evidence.cpu.value:
        source = ""
    words = (
        f"Of it {mib(activations)} ({percent(activations / total)}) are activations, which is what the strategies here "
        f"lower; {mib(lasting)} ({percent(lasting / total)}) are parameters, gradients and optimizer state, which none "
        f"of them does. {source}"
    )
    picture = Picture("at_peak", "What is alive at the peak of each trial")
    return [*blocks, Text(words), *memory_table(row, section.preferred), picture]


def _pressure_words(section: Section) -> str:
    """The baseline's peak against the cap."""
    c, row = section.comparison, section.baseline
    cap = f"the cap of {mib(c.cap_mib)} ({c.cap_source})" if c.cap_mib is not None else ""
    allowed = f"; allowed is {cap}" if cap else ""
    if row is None:
        return f"There is no baseline here, so its peak is not known{allowed}."
    peak, how, words = row.peak_mib, row.result.evidence, ""
    if row.result.outcome != Outcome.ok.value:
        words = f"The baseline {OUTCOME_WORDS.get(row.result.outcome, row.result.outcome)}. "
        if row.predicted is not None:
            peak, how = row.predicted.allocated_mib, Evidence.predicted.value
    if peak is None:
        return f"{words}Its peak is not known{allowed}."
    where = f", in {moment_words(row.peak)}" if row.peak is not None else ""
    words += f"The baseline's peak is {mib(peak)} ({EVIDENCE_SHORT.get(how, how)}){where}"
    if c.cap_mib is None:
        return f"{words}. No memory cap is set (budget.memory_mib) and the device's capacity is not known."
    over = peak - c.cap_mib
    return f"{words}: {percent(peak / c.cap_mib)} of {cap}, {mib(abs(over))} {'over' if over > 0 else 'below'} it."


# -- what was changed, what did it save? ------------------------------------------------------------------------------


def changed(section: Section) -> list[Block]:
    """What is equal for all trials, and what each changes."""
    names = Column("strategy", [r.name for r in section.rows], words=True)
    told = [phrases.strategy_words(strategy_of(r.result), batch_of(r.result)) for r in section.rows]
    does = Column("what it does", told, words=True)
    return [Text(f"Only the strategy. {fixed_words(section)}"), _trials(section, [names, does], USEFUL)]


def fixed_words(section: Section) -> str:
    """What all trials of a comparison have in common."""
    first, c = section.results[0], section.comparison
    workload = first.config.get("workload") or {}
    optimizer, rate = workload.get("optimizer") or {}, (workload.get("optimizer") or {}).get("lr")
    parts = [c.workload]
    if first.parameters is not None:
        blocks = f" in {count(first.blocks, 'block')}" if first.blocks else ""
        parts[0] += f" with {_parameters(first.parameters)} parameters{blocks}"
    known = {
        "global_batch_size": "{} samples per optimizer step",
        "seq_len": "sequences of {}",
        "dtype": "{}",
        "seed": "seed {}",
    }
    parts += [words.format(workload[key]) for key, words in known.items() if workload.get(key) is not None]
    if optimizer.get("name") or rate is not None:
        at = f" with learning rate {rate:g}" if isinstance(rate, (int, float)) else ""
        parts.append(f"{optimizer.get('name') or 'optimizer'}{at}")
    parts += [f"data {first.data_version[:12]}"] if first.data_version else []
    return f"Equal for all trials on {c.device}: {', '.join(parts)}."


def _parameters(n: int) -> str:
    sizes = ((1e9, " billion"), (1e6, " million"), (1e3, " thousand"), (1.0, ""))
    return next((f"{n / size:.3g}{unit}" for size, unit in sizes if n >= size), "0")


def saved(section: Section) -> list[Block]:
    """What each trial saves, and where its peak lies."""
    rows = section.rows
    columns = [
        Column("strategy", [r.name for r in rows], words=True),
        Column("peak MiB", [number(r.peak_mib) for r in rows]),
        Column("saved MiB", [number(r.decision.saved_mib) for r in rows]),
        Column("saved", [percent(r.saved_ratio) for r in rows]),
        Column("peak in", [moment_words(r.peak) if r.peak else NOT_KNOWN for r in rows], words=True, rank=USEFUL),
    ]
    premises = Points([("", line) for line in premise_lines(section)])
    return [Text(_saved_words(section)), _trials(section, columns), premises]


def _saved_words(section: Section) -> str:
    """The saving of the preferred trial, or what could be saved where it is the baseline or there is none."""
    row = section.preferred
    if row is not None and not row.is_baseline:
        size = row.decision.saved_mib
        if size is None:
            return f"{row.name} takes {mib(row.peak_mib)}; what that saves is not known: there is no baseline."
        what = "saves" if size > 0 else "saves nothing: it takes more, by"
        share = f"{percent(abs(row.saved_ratio or 0.0))} of the baseline's peak"
        return f"{row.name} {what} {mib(abs(size))} ({share}), {evidence_of(row)}."
    kept = "The preferred trial is the baseline, which saves" if row is not None else "No trial is accepted: that saves"
    most = max(section.candidates, key=lambda r: r.decision.saved_mib or 0.0, default=None)
    if most is None or (most.decision.saved_mib or 0.0) <= 0:
        return f"{kept} nothing (0 MiB)."
    saves = f"{mib(most.decision.saved_mib)} ({percent(most.saved_ratio)}), {evidence_of(most)}"
    return f"{kept} nothing (0 MiB). Most could be saved by {most.name}: {saves}."


# -- what did it cost? ------------------------------------------------------------------------------------------------


def cost(section: Section) -> list[Block]:
    if section.predicts:
        words = f"are not known: nothing was run (0 of {count(len(section.rows), 'trial')})"
        theory = "Theoretical, from what a step would do:"
        table, pays = overview(section), ("strategy", "would move MiB", "transfer ms", "recompute")
        table.columns = [c for c in table.columns if c.header in pays]
        return [Text(f"Time, quality and host memory {words}. {theory}"), table]
    timed = [r for r in section.candidates if r.step_ms is not None]
    row = section.preferred or min(timed, key=lambda r: r.step_ms or 0.0, default=None)
    if row is None or row.step_ms is None:
        return [Text(f"Not known: no trial was timed (0 of {count(len(section.rows), 'trial')}).")]
    kind = "the preferred trial" if row is section.preferred else "not accepted; the fastest that was timed"
    return [
        Points(
            [("Time:", time_words(section, row)), ("Quality:", quality_words(row))],
            f"{row.name} ({kind}, {evidence_of(row)})",
        ),
        _cost_table(section),
        Picture("pareto", "Peak memory against throughput"),
        Picture("loss", "Training loss against the baseline's, and held-out loss"),
    ]


def _cost_table(section: Section) -> Table:
    rows = section.rows
    columns = [
        Column("strategy", [r.name for r in rows], words=True),
        Column("step ms", [spread(r) for r in rows]),
        Column("against the baseline", [change_cell(r) for r in rows]),
        Column("samples/s", [number(r.measured.samples_per_s) if r.measured else NOT_KNOWN for r in rows]),
        Column("held-out loss", [loss(r.eval_loss) for r in rows]),
        Column("quality", [quality_cell(r) for r in rows], words=True),
        Column("host MiB", [number(r.host_peak_mib) for r in rows], rank=USEFUL),
        Column("moved MiB per step", [number(r.moved_mib) for r in rows], rank=USEFUL),
        Column("evidence", [r.result.evidence for r in rows], words=True, rank=USEFUL),
    ]
    if all(cell == NOT_KNOWN for cell in columns[5].cells):
        del columns[5]
    return _trials(section, columns)


# -- why? -------------------------------------------------------------------------------------------------------------


def why(section: Section) -> list[Block]:
    explained = [r for r in section.candidates if r.explanation is not None]
    causes = phrases.causes(section.causes)
    if not explained and not causes:
        return [Text("Not known: there are not two trials with a peak to compare (0 explanations).")]
    lines = [("", says(section, line)) for line in causes]
    findings = [(f"{name}:", sentence(line, first=False)) for name, line in finding_lines(section)]
    return [
        Points(lines[:MOST_LINES], per_trial=True),
        Points(lines[MOST_LINES:], "And", DETAIL, per_trial=True),
        Points([("", says(section, line)) for line in _of_the_preferred(section)]),
        *_changes(section, "peak"),
        *_changes(section, "time"),
        Points(findings, "What does not add up, or surprises", USEFUL),
        *_traces(section),
    ]


def finding_lines(section: Section) -> list[tuple[str, str]]:
    """Names of trials and a finding, the preferred trial's first; one that several share is told once."""
    found: dict[str, tuple[str, list[str]]] = {}
    for row in sorted(section.candidates, key=lambda r: r is not section.preferred):
        for finding in row.explanation.findings if row.explanation is not None else []:
            if finding.code != "disturbed":  # told where it is asked what disturbed
                found.setdefault(finding.code, (phrases.finding(finding), []))[1].append(row.name)
    alike = lambda names: f" (and {', '.join(names)} alike)" if names else ""
    return [(names[0] + alike(names[1:]), line) for line, names in found.values()]


def because(section: Section) -> list[str]:
    """Why, in a line or two: what changed at the preferred trial's peak and in its step, else what the trials share."""
    lines = [] if section.predicts else _of_the_preferred(section, 3)
    # What fills the baseline's peak is shown beside this already.
    shared = phrases.causes(section.causes)[section.causes.baseline is not None :]
    return lines or shared[: 4 if section.predicts else 2]


def _of_the_preferred(section: Section, most: int | None = None) -> list[str]:
    """What changed at the preferred trial's peak and in its step against the baseline; [] where it is the baseline."""
    row = section.preferred
    if row is None or row.explanation is None:
        return []
    told, lines = row.explanation, []
    if told.peak is not None:
        before, after = phrases.moment(told.before), phrases.moment(told.after)
        where = f"from {before} to {after}" if told.before != told.after else f"in {after} as before"
        lines.append(f"peak {signed(told.peak.total)} MiB, {where}: {phrases.parts(told.peak, most) or NOT_KNOWN}")
    if told.time is not None and not (row.decision.step is not None and row.decision.step.none):
        lines.append(f"step {signed(told.time.total)} ms: {phrases.parts(told.time, most) or NOT_KNOWN}")
    return lines if most is not None else lines + [phrases.note(n) for n in told.notes]


def _changes(section: Section, which: str) -> list[Block]:
    """One table: a column per part, the residual and the total, a row per trial."""
    changes = [(r, change) for r in section.rows if (change := change_of(r, which)) is not None]
    if not changes:
        return []
    size: dict[str, float] = {}
    for _, change in changes:
        for part in change.parts:
            size[part.name] = max(size.get(part.name, 0.0), abs(part.value))
    names = [n for n in sorted(size, key=lambda n: -size[n]) if size[n] > SMALL * max(size.values())]
    rows = []
    for row, change in changes:
        parts = {part.name: part.value for part in change.parts}
        cells = [signed(parts[n]) if n in parts else "0" for n in names]
        if len(names) < len(size):
            cells.append(signed(sum(value for name, value in parts.items() if name not in names)))
        rows.append([row.name, number(change.before), *cells, signed(change.residual), number(change.after)])
    small = ["smaller parts"] if len(names) < len(size) else []
    table = Table.of(["strategy", "before", *map(phrases.part, names), *small, "not explained", "after"], rows)
    how = EVIDENCE_SHORT.get(changes[0][0].result.evidence, changes[0][0].result.evidence)
    what = "Peak" if which == "peak" else "Step time"
    table.title = f"{what} in {changes[0][1].unit}: before + parts + what is not explained = after ({how})"
    table.rank, table.importance = DETAIL, list(range(len(rows)))
    rounded = any(r.explanation.total_by != "ledger" and change.residual for r, change in changes if r.explanation)
    why = "Not explained: CUDA's allocator rounds up and keeps blocks whole; the parts are the ledger's."
    return [table, *([Text(why, rank=DETAIL)] if which == "peak" and rounded else [])]


def change_of(row: Row, which: str) -> Change | None:
    """The change of the peak or of the time of a row."""
    if row.explanation is None:
        return None
    return row.explanation.peak if which == "peak" else row.explanation.time


def signed(value: float) -> str:
    return number(value) if value <= 0 or number(value) in ("0", "0.00") else f"+{number(value)}"


#: What the files of a trace are.
_KINDS = {
    "trace.json.gz": "trace",
    "memory_timeline.png": "picture of the memory",
    "memory_timeline.json": "memory over a step",
    "memory_snapshot.pickle": "allocator's snapshot",
}


def _traces(section: Section) -> list[Block]:
    """The traces that were taken: shares of a step, and the files."""
    traced = [(r, r.result.trace) for r in section.rows if r.result.trace is not None]
    if not traced:
        return []
    names = [n for n in RANGES if any(trace.ranges_ms.get(n) for _, trace in traced)]
    rows = []
    for row, trace in traced:
        total = sum(trace.ranges_ms.values())
        shares = [percent(trace.ranges_ms.get(n, 0.0) / total) if total else NOT_KNOWN for n in names]
        rows.append([row.name, ms(trace.step_ms), *shares, number(float(trace.operators))])
    table = Table.of(["traced", "step under the profiler", *names, "operators per step"], rows)
    table.rank, table.title = DETAIL, "Shares of a step under the profiler, which slows it down"
    files = [(row.name, Path(row.result.folder) / name) for row, trace in traced for name in trace.files]
    told = [(f"{_KINDS.get(path.name, 'recorded')} of {name}", shown_path(path)) for name, path in files]
    pictures = [
        Picture(path.stem, f"Memory of {name} over one optimizer step, by what it holds", path, DETAIL)
        for name, path in files
        if path.suffix == ".png"
    ]
    return [table, *pictures, Text("Traces open at ui.perfetto.dev.", rank=DETAIL), Commands(told, DETAIL)]


# -- does it hold, what next? -----------------------------------------------------------------------------------------


def hold(section: Section) -> list[Block]:
    points = [("Evidence:", f"{evidence_line(section)} {repeats_words(section)}")]
    if not section.predicts:
        points += [
            ("Noise:", noise_words(section)),
            ("Drift:", drift_words(section.comparison.drift)),
            ("Disturbed:", disturbed_words(section)),
            ("Seeds:", seeds_words(section)),
            ("Same computation:", equality_words(section)),
        ]
    predicted = "; ".join(prediction_lines(section)) or "0 trials have one"
    if section.predicts:
        predicted = "nothing was measured here to hold them against (0 trials)"
    points.append(("Predicted peaks:", predicted))
    survival = phrases.survival(section.sensitivity)
    return [
        Points([(lead, says(section, words)) for lead, words in points]),
        Points([("", says(section, line)) for line in survival], "Under other budgets", USEFUL),
        Picture("budgets", "Which trial is preferred under which budget"),
    ]







def _blocked(section: Section) -> Points:
    return Points(next_lines(section), "Not accepted", USEFUL, per_trial=True)


def _what_if(section: Section) -> list[Block]:
    """Changes that are no strategies: another workload, so that its own baseline has to be compared with."""
    found = [(row, what) for row in section.rows if row.predicted is not None for what in row.predicted.what_if]
    rows = [
        [row.name, what.override, number(what.allocated_mib), number(what.saved_mib), what.peak_phase]
        for row, what in found
    ]
    table = Table.of(["for", "with", "predicted peak MiB", "less by MiB", "peak then in"], rows, (0, 1, 4))
    table.title = "What else would lower the peak (another workload, to be compared with its own baseline)"
    table.rank = USEFUL
    words = [(what.override, change_words(what, row.predicted.peak_phase)) for row, what in found if row.predicted]
    told = dict.fromkeys((f"{override}:", sentence(said, first=False)) for override, said in words if said)
    return [table, Points(list(told), "", DETAIL)]
