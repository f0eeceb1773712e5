"""The content of a report, built once as blocks: what a screen has room for, and a page that answers a reader's
questions who was not there."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sweep.config.strategy_names import batch_of, strategy_of
from sweep.decide.causes import parts_of
from sweep.decide.reasons import LASTING
from sweep.decide.verdict import UNDECIDED
from sweep.environment import home
from sweep.format import (
    EVIDENCE_SHORT,
    NOT_KNOWN,
    OUTCOME_WORDS,
    count,
    error,
    loss,
    mib,
    ms,
    number,
    percent,
    ratio,
    signed_loss,
)
from sweep.report import phrases
from sweep.report.blocks import DETAIL, USEFUL, Block, Code, Column, Commands, Heading, Picture, Points, Table, Text
from sweep.report.data import Report, Row, Section, ranked, shown_path, state_of
from sweep.report.phrases import CATEGORY_WORDS, PART_WORDS, capital, change_words, operator_words, sentence
from sweep.report.use_it import applied, uses
from sweep.results import (
    CONFIDENCE,
    RANGES,
    Category,
    Change,
    Drift,
    Evidence,
    Holder,
    Outcome,
    Peak,
    Prediction,
    Quality,
    TrialResult,
    Verification,
)

#: Sentences that a reader takes in.
MOST_LINES = 6
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
        *(Text(line, quiet=True) for line in table_notes(section, with_quality=False)),
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
        *_use_it_shortly(section),
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
        *use_it(section),
        Points([("", line) for line in table_notes(section)], "How to read the tables", DETAIL),
    ]


def _to_use(section: Section) -> TrialResult | None:
    """The trial whose strategy is of use: the preferred one; where that is the baseline, the one for less memory."""
    c, preferred = section.comparison, section.preferred
    index = c.cheapest_index if preferred is not None and preferred.is_baseline else c.preferred_index
    return None if index is None else section.results[index]


def use_it(section: Section) -> list[Block]:
    """The lines for one's own training, by framework."""
    result = _to_use(section)
    found = [] if result is None else uses(result)
    if result is None or not found:
        return []
    when = " (should memory get short; now nothing needs to change)" if result is not section.preferred_result else ""
    blocks: list[Block] = [Heading("Use it"), Text(f"{result.name} in your own training{when}:")]
    for use in found:
        if not use.code:
            blocks.append(Text(f"has no equivalent there: {use.note}.", f"{use.where}:", USEFUL))
            continue
        blocks.append(Code(use.code, use.where, use.language, USEFUL))
        blocks += [Text(sentence(use.note, first=False), rank=USEFUL, quiet=True)] if use.note else []
    return blocks


def _use_it_shortly(section: Section) -> list[Block]:
    result = _to_use(section)
    if result is None or not uses(result):
        return []
    lines = [("in your own loop", f"with {applied(result)} as strategy: ...")]
    if result.folder:
        lines.append(("or", f'sweep.apply(model, "{shown_path(Path(result.folder))}/result.json")'))
    elsewhere = "Lines for transformers, Lightning, Accelerate, torchtitan, torchtune and torch alone: see report.md."
    return [Heading("Use it"), Commands(lines), Text(elsewhere)]


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
    store = uri or f"sqlite:///{home() / 'mlruns' / 'mlflow.db'}"
    return [("mlflow", f"mlflow ui --backend-store-uri {shlex.quote(store)}"), *there]



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


#: Half the distance between the quartiles over the median: from here on a step time is called noisy.
NOISY = 0.25
#: A prediction that is further off than this is worth a line of its own.
WELL_PREDICTED = 0.01
#: Held outputs are told from this share of the peak on.
WORTH_A_LINE = 0.01


def says(section: Section, words: str) -> str:
    """A sentence with a capital letter, unless it begins with the name of a trial."""
    return sentence(words, first=not any(words.startswith(row.name) for row in section.rows))


def by_words(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by what is said of them, as what is equal is said once; "" is said of none."""
    found: dict[str, list[str]] = {}
    for words, name in pairs:
        if words:
            found.setdefault(words, []).append(name)
    return found


# -- evidence and verdict ---------------------------------------------------------------------------------------------


def evidence_line(section: Section) -> str:
    """What the numbers of a section are, so that none is taken for more."""
    if section.predicts:
        return "Predicted, not measured. Times and shares of FLOPs are theoretical."
    return {
        Evidence.cpu.value: "Emulated on a CPU: memory counts every tensor; times are this CPU's. Neither was measured "
        "on a GPU.",
        Evidence.smoke.value: "Run on a GPU, but (in part) too short to conclude: nothing too short is accepted.",
        Evidence.measured.value: "Measured on a GPU. Memory is the allocator's peak of allocated bytes.",
    }.get(section.comparison.evidence, "No trial ran to its end.")


def against_line(section: Section) -> str:
    c = section.comparison
    cap = f" Cap: {mib(c.cap_mib)} ({c.cap_source})." if c.cap_mib is not None else ""
    return f"{evidence_line(section)} {sentence(f'Against {phrases.against(c, section.results)}')}{cap}"


def verdict_line(section: Section) -> str:
    c = section.comparison
    return f"{c.verdict} {c.preferred}" if c.preferred is not None else c.verdict


def next_lines(section: Section) -> list[tuple[str, str]]:
    """For each trial that is not accepted: its name, verdict and reasons, what is against it, and what to do."""
    lines = []
    for row in section.rows:
        d = row.decision
        if d.verdict != "accept":
            reasons = f" ({', '.join(d.reasons)})" if d.reasons else ""
            then = f" Next: {sentence(phrases.advice(d.advice), first=False)}" if d.advice is not None else ""
            why = sentence(phrases.why(row.result, d), first=False)
            lines.append((f"{row.name} {d.verdict}{reasons}:", f"{why}{then}"))
    return lines


# -- times ------------------------------------------------------------------------------------------------------------


def spread(row: Row) -> str:
    """`310 (305-316)` with the interval of the median where it is known, else `118.2 ±2.4` with the quartiles."""
    step, half = row.step_ms, row.half_spread_ms
    if step is None or half is None:
        return NOT_KNOWN
    if row.interval_ms is not None:
        low, high = row.interval_ms
        n = _decimals(high - low, step)
        return f"{step:.{n}f} ({low:.{n}f}-{high:.{n}f})"
    shown = number(step)
    return f"{shown} ±{half:.{len(shown.partition('.')[2])}f}"


def _decimals(width: float, size: float) -> int:
    """Decimals that an interval of this width leaves worth showing: one digit of the width, and three of the value."""
    if width <= 0 or size <= 0:
        return len(number(size).partition(".")[2])
    return max(0, min(-math.floor(math.log10(width)), 2 - math.floor(math.log10(size)) + 1, 3))


def speed(row: Row) -> str:
    """Throughput over the baseline's, or that there is no difference beyond the noise."""
    return "none" if row.decision.step is not None and row.decision.step.none else ratio(row.decision.throughput_ratio)


def change_cell(row: Row) -> str:
    """The step time against the baseline's: `+65 % (+58 to +71)`, `none (-1 to +3 %)`."""
    d, rate = row.decision.step, row.decision.throughput_ratio
    if row.is_baseline or (d is None and not rate):
        return NOT_KNOWN
    if d is None:
        return percent(1 / (rate or 1.0) - 1, sign=True)
    digits = 1 if d.high - d.low < 0.02 else 0
    low, high = (percent(x - 1, digits, sign=True).removesuffix(" %") for x in (d.low, d.high))
    return f"none ({low} to {high} %)" if d.none else f"{percent(d.ratio - 1, digits, sign=True)} ({low} to {high})"


def time_words(section: Section, row: Row) -> str:
    """The step time with its interval and its change against the baseline's."""
    words, m, base = f"{ms(row.step_ms)} per step", row.measured, section.baseline
    if row.interval_ms is not None:
        low, high = row.interval_ms
        n = _decimals((high - low) / 10, row.step_ms or 0.0)
        words += f" (95 % interval {low:.{n}f} to {high:.{n}f} ms)"
    elif row.half_spread_ms is not None:
        words += f" (± {ms(row.half_spread_ms)}, half the distance between the quartiles)"
    words += f", {number(m.samples_per_s if m is not None else None)} samples/s"
    d, rate = row.decision.step, row.decision.throughput_ratio
    if row.is_baseline or base is None or base.step_ms is None or (d is None and rate is None):
        return f"{words}."
    against_base = f"against the baseline's {ms(base.step_ms)}"
    if d is None:
        change = percent(1 / (rate or 1.0) - 1, 1, sign=True)
        return f"{words}; {change} {against_base}, and whether that is noise is not known."
    change = percent(d.ratio - 1, 1, sign=True)
    interval = f"95 % interval {percent(d.low - 1, 1, sign=True)} to {percent(d.high - 1, 1, sign=True)}"
    if d.none:
        return f"{words}; {none_words(section)} {against_base} ({change}, {interval})."
    return f"{words}; {change} {against_base} ({interval})."


def none_words(section: Section) -> str:
    """What a difference that is called none is not beyond: the noise, and the machine's drift where there was one."""
    drift = section.comparison.drift
    return "no difference beyond the noise" + (" and the drift" if drift and not drift.difference.none else "")


def noisy_words(section: Section) -> str:
    """Whose steps vary so much that differences may be chance; "" where none do."""
    noisy = [r.name for r in section.rows if r.step_ms and (r.half_spread_ms or 0.0) > NOISY * r.step_ms]
    if not noisy:
        return ""
    return (
        f"Noisy: the steps of {', '.join(noisy)} vary by more than a quarter, so differences in speed may be chance; "
        "measure again on a quiet machine, or with more measure.steps."
    )


def noise_words(section: Section) -> str:
    timed = [r for r in section.rows if r.step_ms]
    if not timed:
        return "not known: 0 trials were timed"
    widths = [((i[1] - i[0]) / 2 / (r.step_ms or 1.0), r.name) for r in timed if (i := r.interval_ms) is not None]
    if widths:
        widest, name = max(widths)
        words = f"95 % bootstrap intervals of the median step times, the widest ± {percent(widest, 1)} ({name})"
    else:
        half = max((r.half_spread_ms or 0.0) / (r.step_ms or 1.0) for r in timed)
        words = f"half the distance between the quartiles is at most {percent(half, 1)} of the step time"
    same = [r.name for r in section.candidates if r.decision.step is not None and r.decision.step.none]
    words += f"; no difference in time beyond the noise: {', '.join(same)}" if same else ""
    noisy = noisy_words(section)
    return f"{words}. {noisy}" if noisy else words


def drift_words(drift: Drift | None) -> str:
    """What the machine itself did between the first and the last repeat of the baseline."""
    if drift is None:
        return "not known: the baseline was not repeated at the end (0 repeats; measure.drift=true repeats it)"
    d = drift.difference
    interval = f"95 % interval {percent(d.low - 1, 1, sign=True)} to {percent(d.high - 1, 1, sign=True)}"
    beyond = "none beyond the noise" if d.none else "beyond the noise, so differences of this size may be the machine's"
    return (
        f"the baseline took {ms(drift.first_ms)} per step at first and {ms(drift.last_ms)} in the end, "
        f"{number(drift.minutes)} minutes later: {percent(d.ratio - 1, 1, sign=True)} ({interval}), {beyond}"
    )


def disturbed_words(section: Section) -> str:
    """Whose times are unreliable."""
    disturbed, of = [r for r in section.rows if r.decision.disturbed], count(len(section.rows), "trial")
    if disturbed:
        told = [f"{r.name} ({phrases.disturbances(r.decision.disturbed)})" for r in disturbed]
        return f"{len(disturbed)} of {of}: {', '.join(told)}"
    runs = [run for r in section.rows if r.measured is not None for run in r.measured.runs]
    observed = sum(run.conditions is not None for run in runs)
    if not observed:
        return "not known: the machine was not observed (0 readings)"
    return f"0 of {of}, by {count(observed, 'reading')} of the machine while steps were timed"


def repeats_words(section: Section) -> str:
    """How many trials ran, how often and how."""
    of = count(len(section.results), "trial")
    measured = [r.measurement for r in section.results if r.measurement is not None]
    if not measured:
        return f"0 of {of} ran."
    # The baseline has one repeat more, for the drift.
    m = min(measured, key=lambda m: len(m.runs) or m.repeats)
    runs, how = [run for run in m.runs if not run.error], ""
    if runs:
        how = ", each in a fresh process" if all(run.fresh_process for run in runs) else ", in one process"
        how += ", in turn over the trials" if len({run.index for run in runs}) > 1 else ""
    failed = sum(bool(run.error) for other in measured for run in other.runs)
    lost = f" {count(failed, 'repeat')} did not come to an end and do not count." if failed else ""
    least = min(len(x.step_times_ms) or x.steps * x.repeats for x in measured)
    steps = f"{count(len(runs) or m.repeats, 'repeat')} of {count(m.steps, 'timed step')}{how}"
    return f"{len(measured)} of {of} ran; {steps}: at least {count(least, 'step time')} per trial.{lost}"


# -- quality and equality ---------------------------------------------------------------------------------------------


def quality_cell(row: Row) -> str:
    """`equal, 0`, `worse, +0.04 (+0.02 to +0.06)`, `not known, +0.04 (1 seed)`."""
    q = row.decision.quality
    if q is None or row.is_baseline:
        return NOT_KNOWN
    if q.verdict == "unknown":
        return f"not known, {signed_loss(q.difference)} (1 seed)"
    return "equal, 0" if q.difference == 0 else f"{q.verdict}, {signed_loss(q.difference)}{_interval(q)}"


def _interval(q: Quality) -> str:
    if q.difference_low is None or q.difference_high is None:
        return ""
    return f" ({signed_loss(q.difference_low)} to {signed_loss(q.difference_high)})"


def quality_words(row: Row) -> str:
    q = row.decision.quality
    if q is None and row.eval_loss is None:
        return "held-out loss was not evaluated (measure.eval_batches=0)."
    if row.is_baseline or q is None:
        return f"held-out loss {loss(row.eval_loss)}."
    words = {"equal": "equal to the baseline's", "unknown": "not known"}
    verdict = words.get(q.verdict, f"{q.verdict} than the baseline's")
    interval = "" if q.loss_low is None else f" (95 % interval {loss(q.loss_low)} to {loss(q.loss_high)})"
    return f"held-out loss {loss(q.loss)}{interval}, {verdict}: {phrases.quality_why(q)}."


def quality_lines(section: Section) -> list[str]:
    """Which candidates' held-out losses are worse, better, equal, or not known."""
    judged = [(r.name, q) for r in section.candidates if (q := r.decision.quality) is not None]
    exact = [name for name, q in judged if q.verdict == "equal" and q.difference == 0]
    lines = [f"equal to the last bit: {', '.join(exact)}"] if exact else []
    heads = {"worse": "worse", "better": "better", "equal": "equal within the noise"}
    for verdict, head in [*heads.items(), ("unknown", "not known with 1 seed (measure.seeds=3 would tell)")]:
        of_it = [(n, q) for n, q in judged if q.verdict == verdict and n not in exact]
        told = [f"{n} {signed_loss(q.difference)}{_interval(q)}" for n, q in of_it]
        lines += [f"{head}: {', '.join(told)}"] if told else []
    return lines


def seeds_words(section: Section) -> str:
    """How many seeds stand behind the losses, and what their intervals do not say."""
    compared = [q for r in section.candidates if (q := r.decision.quality) is not None]
    if not compared:
        return "no held-out loss was compared."
    seeds = max(q.seeds for q in compared)
    if seeds == 1:
        return (
            "1 seed, so losses that are not equal to the last bit cannot be told from chance; measure.seeds=3 repeats "
            "with others."
        )
    outside = [q.curve_outside_ratio for q in compared if q.curve_outside_ratio is not None]
    band = ""
    if outside:
        steps = f"At most {percent(max(outside))} of the steps of a mean training curve"
        band = f" {steps} lie outside of the baseline's band."
    return (
        f"{count(seeds, 'seed')}, compared in pairs.{band} Each interval stands for itself: among "
        f"{count(len(compared), 'comparison')} about {(1 - CONFIDENCE) * len(compared):.2g} would be called different "
        "by chance alone."
    )


def compared_lines(section: Section) -> list[str]:
    """`compared: gradients in 100 % of the parameters over 2 steps, random draws fixed: micro_batch, offload`"""
    pairs = [(_how(v), r.name) for r in section.rows if (v := r.result.verification) is not None]
    return [f"compared: {words}: {', '.join(names)}" for words, names in by_words(pairs).items()]


def _how(v: Verification) -> str:
    steps, said = count(v.steps, "step"), []
    if v.compared_share is not None:
        said.append(f"gradients in {percent(v.compared_share)} of the parameters over {steps}")
    said += ["quickly"] if v.mode == "quick" else []
    said += ["random draws fixed"] if v.dropout != "on" else []
    return ", ".join(said + ([v.scope] if v.scope != "full" else []))


def equality_words(section: Section) -> str:
    """Whether what was compared computes the same."""
    checked = [(r.name, v) for r in section.candidates if (v := r.result.verification) is not None]
    if not checked:
        return "0 trials were verified against the baseline"
    unknown = [name for name, v in checked if v.status in UNDECIDED]
    bad = [name for name, v in checked if not v.passed and v.status not in UNDECIDED]
    worst = max((v.grad_rel_err for _, v in checked if v.grad_rel_err is not None and v.passed), default=None)
    equal = f"{len(checked) - len(bad) - len(unknown)} of {count(len(checked), 'trial')}"
    words = [
        f"loss, gradients, buffers and updates of {equal} equal the baseline's",
        f"largest relative error of a gradient {error(worst)} (allowed {error(max(v.tolerance for _, v in checked))})",
        *compared_lines(section),
        *([f"not known: {', '.join(unknown)}"] if unknown else []),
        *([f"not equal: {', '.join(bad)}"] if bad else []),
    ]
    return "; ".join(words)


# -- memory -----------------------------------------------------------------------------------------------------------


def largest_line(peak: Peak, most: int = 5) -> str:
    """The largest single holders of memory at a peak, in one line; those of like blocks together."""
    alike: dict[tuple[str, str], list[Holder]] = {}
    for holder in peak.largest:
        alike.setdefault((re.sub(r"\d+", "*", holder.name), holder.category), []).append(holder)
    shown = []
    for (pattern, category), group in list(alike.items())[:most]:
        words, first = CATEGORY_WORDS.get(category, category), group[0]
        if len(group) == 1:
            tensors = f" in {first.count} tensors" if first.count > 1 else ""
            shown.append(f"{first.name or '(outside of any module)'} {mib(first.mib)} {words}{tensors}")
        else:
            upto = "" if len({number(h.mib) for h in group}) == 1 else "up to "
            shown.append(f"{len(group)} x {pattern}, {upto}{mib(max(h.mib for h in group))} {words} each")
    return "; ".join(shown)


def prediction_lines(section: Section) -> list[str]:
    """Measured against predicted peaks: in one line where they agree, and one for each trial where they do not."""
    if section.predicts:
        return []
    close, lines = [], []
    for row in section.rows:
        p, off = row.predicted, row.error_ratio
        if p is not None and off is None:
            fits = "fits" if p.fits else "does not fit"
            lines.append(f"{row.name}: predicted {mib(p.allocated_mib)} ({fits}), not measured ({row.result.outcome})")
        elif p is not None and off is not None and abs(off) > WELL_PREDICTED:
            sizes = f"predicted {mib(p.allocated_mib)}, measured {mib(row.peak_mib)}"
            lines.append(f"{row.name}: {sizes} ({percent(off, 2, sign=True)})")
        elif off is not None:
            close.append(abs(off))
    if close:
        trials = count(len(close), "trial")
        lines.insert(0, f"within {percent(max(1e-4, *close), 2)} of the measured peak for {trials}")
    errors = by_words((row.result.prediction_error, row.name) for row in section.rows)
    return lines + [f"{', '.join(names)}: not predicted: {words}" for words, names in errors.items()]


def premise_lines(section: Section) -> list[str]:
    """What the peaks of a table rest on: what is not counted, whose peak it is, and what lies in the blocks."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in section.rows:
        for what, value in _premises(section, row):
            found.setdefault(what, {}).setdefault(value, []).append(row.name)
    known = sum(row.predicted is not None or row.measured is not None for row in section.rows)
    lines = []
    for what, values in found.items():
        everywhere = len(values) == 1 and len(next(iter(values.values()))) >= known
        whose = {value: "" if everywhere else f"({', '.join(names)})" for value, names in values.items()}
        told = "; ".join(" ".join(filter(None, pair)) for pair in whose.items())
        # Without a number there is nothing to say but whose it is.
        lines.append(capital(f"{what}{': ' if any(values) else ' ' if told else ''}{told}") + ".")
    return lines + _blocks_line(section)


def _premises(section: Section, row: Row) -> list[tuple[str, str]]:
    """What one has to know of a peak, and the number in it, "" for none."""
    m, p = row.measured, row.predicted
    own, of_prediction = (m or p), p.caveats if p is not None else []
    lines = [(caveat, "") for caveat in own.caveats] if own is not None else []
    if m is None and p is not None and p.held_outputs_mib > WORTH_A_LINE * (row.peak_mib or 0.0):
        what = "outputs at the peak that the loop holds until the step ends (workload.hold_outputs=false lets them go)"
        lines.append((what, mib(p.held_outputs_mib)))
    of = "" if section.predicts else ", of the predictions"
    return lines + [(f"{c}{of}", "") for c in of_prediction if own is not None and c not in own.caveats]


def _blocks_line(section: Section) -> list[str]:
    """Which modules were taken as blocks, and what share of the baseline's activations lies in them."""
    first = next((r for r in section.results if r.block_patterns), None)
    if first is None:
        return []
    line, share = f"Blocks: {', '.join(first.block_patterns)}", first.block_share
    if share is None:
        return [f"{line}."]
    line += f", with {percent(share)} of the baseline's activations."
    if share >= 0.5:
        return [line]
    return [f"WARNING: {line} What works on blocks leaves the larger part alone: name others with workload.blocks."]


# -- how to read the tables -------------------------------------------------------------------------------------------


def table_notes(section: Section, with_quality: bool = True) -> list[str]:
    """What the columns mean. with_quality: the column of that name is among them."""
    if section.predicts:
        unsure = any(r.predicted is not None and r.predicted.unsure for r in section.rows)
        less = " (?: less what is not counted)" if unsure else ""
        return [
            f"allocated, reserved: peaks. headroom: capacity less reserved and context{less}.",
            "would move: to the host and back, per step. transfer: its theoretical time at the link's bandwidth.",
            "recompute: FLOPs computed again, over those of a step that recomputes nothing.",
        ]
    ran, lines = [r.measurement for r in section.results if r.measurement is not None], []
    if ran:
        # The baseline has one repeat more, for the drift.
        step = f"median over {count(min(m.repeats for m in ran), 'repeat')} of {count(ran[0].steps, 'step')}"
        interval = any(r.interval_ms for r in section.rows)
        step += " (its 95 % interval)" if interval else ", ± half the distance between its quartiles"
        none = any(r.decision.step and r.decision.step.none for r in section.rows)
        lines.append(f"step: {step}; speed: against the baseline{f'; none: {none_words(section)}' if none else ''}.")
    lines += [noisy] if (noisy := noisy_words(section)) else []
    if with_quality and any(r.decision.quality is not None for r in section.candidates):
        lines.append(
            "quality: held-out loss less the baseline's over the same seeds (95 % interval of the mean), after these "
            "steps, not a whole training run; equal: differences inside of the interval are not ruled out."
        )
    verified = [v for r in section.rows if (v := r.result.verification) is not None]
    if verified:
        lines.append(
            "grad err: largest relative error of a parameter's gradient against the baseline's (allowed "
            f"{error(max(v.tolerance for v in verified))}; 0: no difference)."
        )
    return lines + [capital(f"{line}.") for line in compared_lines(section)]


def evidence_of(row: Row) -> str:
    """`on this CPU`"""
    return EVIDENCE_SHORT.get(row.result.evidence, row.result.evidence)
