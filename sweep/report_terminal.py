"""The report in a terminal: a table that fits 80 to 120 columns, and what it means in words."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sweep.report_answers_why import because, finding_lines
from sweep.report_data import Report, Section
from sweep.report_quality import quality_lines
from sweep.report_tables import VERDICT_STYLES, memory_table, trials_table
from sweep.report_words import (
    evidence_line,
    largest_line,
    memory_row,
    memory_title,
    next_lines,
    prediction_lines,
    premise_lines,
    reading_lines,
    reasons_words,
    says,
    sentence,
    verdict_line,
    where_to_look,
)
from sweep.results import Outcome, TrialResult
from sweep.words import EVIDENCE_SHORT, count, error, known, loss, mib, ms, number, ratio

WIDTH_WITHOUT_TERMINAL = 120


def report_console(file: TextIO | None = None) -> Console:
    """A console that writes plain text of 120 columns where the output is no terminal."""
    stream = file if file is not None else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def print_report(report: Report, console: Console | None = None) -> None:
    """Table, what fills the memory, verdict, next actions and where to look, for each comparison."""
    out = Printer(console if console is not None else report_console())
    for section in report.sections:
        _print_section(section, out)
    out.heading("Where to look")
    for label, line in where_to_look(report):
        # Not wrapped: a command is there to be copied.
        out.line(Text.assemble((f"{label}: ", "dim"), line), indent=2, wrap=False)


class Printer:
    """Prints Text only, so that brackets in names are never taken for markup, and nothing the encoding lacks."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.unicode = console.encoding.lower().replace("-", "").startswith("utf")

    def line(self, text: Text | str = "", indent: int = 0, wrap: bool = True) -> None:
        shown = Text(text) if isinstance(text, str) else text
        if not self.unicode:
            shown.plain = self.plain(shown.plain)
        if not shown.plain:
            self.console.print()
        elif wrap:
            self.console.print(Padding(shown, (0, 0, 0, indent), expand=False), highlight=False)
        else:
            self.console.print(Text(" " * indent) + shown, soft_wrap=True, highlight=False)

    def heading(self, text: str) -> None:
        self.line()
        self.line(Text(text, style="bold"))

    def table(self, table: Table) -> None:
        self.console.print(table, highlight=False)

    def plain(self, text: str) -> str:
        if self.unicode:
            return text
        for character, instead in (("±", "+-"), ("█", "#")):
            text = text.replace(character, instead)
        return text.encode("ascii", "replace").decode("ascii")

    @property
    def width(self) -> int:
        return self.console.width


def _print_section(section: Section, out: Printer) -> None:
    c = section.comparison
    what = "prediction" if section.predicts else "trial"
    out.heading(f"{section.title}: {count(len(section.rows), what)}")
    out.line(evidence_line(section))
    out.line(f"Against {c.against}." + (f" Cap: {mib(c.cap_mib)} ({c.cap_source})." if c.cap_mib is not None else ""))
    for note in section.notes:
        out.line(note)
    out.line()
    out.table(trials_table(section, out.width, out.plain))
    for line in (["*: preferred."] if section.preferred is not None else []) + reading_lines(section):
        out.line(Text(line, style="dim"))
    for line in premise_lines(section):
        out.line(line)
    quality = quality_lines(section)
    if quality:
        out.line(f"Held-out loss against the baseline's: {'; '.join(quality)}.")
    _print_memory(section, out)
    predictions = prediction_lines(section)
    if predictions:
        out.heading("Prediction against measurement (peak allocated)")
        for line in predictions:
            out.line(line, indent=2)
    out.heading(f"Verdict: {verdict_line(section)}")
    out.line(says(section, c.why), indent=2)
    for label, words in _because(section):
        out.line(Text.assemble((label, "bold"), words), indent=2)
    out.line(Text.assemble(("Next: ", "bold"), sentence(c.next_action, first=False)), indent=2)
    blocked = next_lines(section)
    if blocked:
        out.heading("Not accepted")
    for row, words in blocked:
        verdict = (row.verdict, VERDICT_STYLES.get(row.verdict, ""))
        out.line(Text.assemble((row.name, "bold"), " ", verdict, f"{reasons_words(row)}: {words}"), indent=2)


def _because(section: Section) -> list[tuple[str, str]]:
    """Why, in a line or two; what surprises; and whether the choice survives another budget."""
    lines = [("Why: ", says(section, words)) for words in because(section)]
    findings = finding_lines(section)[: 1 if section.predicts else 2]
    lines += [("Finding: ", f"{name}: {sentence(line, first=False)}") for name, line in findings]
    if section.survival:
        lines.append(("Other budgets: ", sentence(section.survival[0])))
    return lines


def _print_memory(section: Section, out: Printer) -> None:
    row = memory_row(section)
    if row is None:
        return
    out.heading(memory_title(row))
    out.table(memory_table(row, section.preferred if section.preferred is not row else None, out.plain))
    largest = largest_line(row)
    if largest:
        out.line(f"largest: {largest}", indent=2)


def single_line(result: TrialResult) -> str:
    """A trial in one line, for printing as soon as it has ended. With its decision's numbers where it has one."""
    parts = [result.name]
    m, p, d = result.measurement, result.prediction, result.decision
    if result.outcome != Outcome.ok.value:
        v = result.verification
        said = (v.reason if v is not None and not v.passed else "") or result.error
        if not said and p is not None:
            said = f"predicted {mib(p.allocated_mib)} allocated, {mib(p.reserved_mib)} reserved"
        parts.append(f"{result.outcome}{': ' + said if said else ''}")
    elif m is not None:
        saved = f" (saves {mib(d.saved_mib)})" if d is not None and d.saved_mib else ""
        peak = f"{mib(m.peak_allocated_mib)}{saved}" if known(m.peak_allocated_mib) is not None else "peak not known"
        speed = f", {ratio(d.throughput_ratio)}" if d is not None and d.throughput_ratio is not None else ""
        parts += [peak, f"{ms(m.step_ms)}/step{speed}", f"{number(m.samples_per_s)} samples/s"]
        if known(m.eval_loss) is not None:
            parts.append(f"eval loss {loss(m.eval_loss)}")
        if result.verification is not None:
            parts.append(f"grad err {error(result.verification.grad_rel_err)}")
    elif p is not None:
        short = p.headroom_mib is not None and p.headroom_mib < 0
        room = "" if p.headroom_mib is None else f" by {mib(abs(p.headroom_mib))}"
        fits = ("should fit" if p.unsure else "fits") if p.fits else f"{'short' if short else 'does not fit'}"
        parts += [f"allocated {mib(p.allocated_mib)}", f"reserved {mib(p.reserved_mib)}", f"{fits}{room}"]
        if p.peak_phase:
            parts.append(f"peak in {p.peak_phase} {p.peak_operator}".rstrip())
    if d is not None:
        parts.append(d.verdict)
    return f"{' | '.join(parts)} [{EVIDENCE_SHORT.get(result.evidence, result.evidence)}]"
