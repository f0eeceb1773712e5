"""A command in mode=diagnose: one diagnosis per job, its files and its MLflow run; printed when all are made."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from sweep.config.schema import Config, plain
from sweep.diagnose.advice import MOSTLY, OTHER, changes_beside, fits, floor_lines, pays_with
from sweep.diagnose.facts import Advice, Diagnosis, Facts, Setting
from sweep.diagnose.predict import Progress, diagnose
from sweep.format import NOT_KNOWN, known, mib, number, percent
from sweep.interrupts import whole
from sweep.report import phrases
from sweep.report.content import Block, Commands, Grid, Points, Text
from sweep.report.data import Row, shown_path
from sweep.report.markdown import block_markdown, escape
from sweep.report.notes import largest_line, memory_shares
from sweep.report.phrases import CATEGORY_WORDS, operator_words
from sweep.report.terminal import Printer, memory_table, report_console
from sweep.results import Category, Decision, Evidence, Outcome, TrialResult, WhatIf, read_all, read_as, write_json
from sweep.tracking.runs import (
    best_effort,
    end,
    opened,
    process_tags,
    save_config,
    save_environment,
    write,
    write_files,
)
from sweep.tracking.store import Store, client, experiment_id
from sweep.tracking.values import MetricValue, cut_markdown, cut_tags, params_of

EVIDENCE = (
    "[predicted] Nothing was run. Sizes are those of the real step on tensors without memory; FLOPs, copies and times "
    "are theoretical. None of it is a gain."
)
#: Changes of the workload that are printed; the files have all.
CHANGES_SHOWN = 4


def title(found: Diagnosis) -> str:
    return f"{found.workload} on {found.device}: diagnosis of the baseline"


def baseline_row(found: Diagnosis) -> Row:
    """The baseline as reports show a trial, for the parts that they share."""
    assert found.facts is not None
    result = TrialResult(
        name="baseline",
        strategy="baseline",
        workload=found.workload,
        device=found.device,
        outcome=Outcome.ok.value,
        evidence=Evidence.predicted.value,
        is_baseline=True,
        fixed_id="",
        mode="predict",
        prediction=found.facts.baseline,
    )
    return Row.of(result, Decision(verdict=""))


def alive_title(facts: Facts) -> str:
    """`What is alive at the peak: in backward, at mm of blocks.3.mlp`."""
    peak = facts.baseline.peak
    assert peak is not None
    operator = f", at {operator_words(peak.operator)}" if peak.operator else ""
    module = f" of {peak.module}" if operator and peak.module else ""
    return f"What is alive at the baseline's peak of {mib(facts.peak_mib)}: in {peak.phase}{operator}{module}"


def floor_title(facts: Facts) -> str:
    return f"The floor that no activation strategy can go below: {mib(facts.floor.mib)}"


def floor_parts(facts: Facts) -> str:
    """`parameters 237.4 MiB, gradients ..., temporaries that stay 253.7 MiB: the highest point of ...`."""
    named = {**CATEGORY_WORDS, "temporary": "temporaries that stay"}
    parts = [f"{named.get(c, c)} {mib(size)}" for c, size in facts.floor.by_category_mib.items() if size >= 0.005]
    at = f", at {operator_words(facts.floor.operator)}" if facts.floor.operator else ""
    return f"{', '.join(parts)}: {facts.floor.how}{at}."


def reserves_more(facts: Facts) -> bool:
    """Whether reserved sizes say anything beside the allocated ones."""
    known = [s for s in facts.extremes if not s.why_not]
    return any(round(s.reserved_mib, 1) != round(s.allocated_mib, 1) for s in known)


def direction_cells(facts: Facts, s: Setting) -> list[str]:
    """Name, allocated, reserved, saved, share, room, where the peak lies, and what it pays with."""
    room = NOT_KNOWN if s.room_mib is None else f"{'+' if s.room_mib >= 0 else ''}{number(s.room_mib)}"
    if s.room_mib is not None and s.room_mib >= 0 and not s.fits:
        room = "in pieces"
    share = percent(s.saved_mib / facts.peak_mib)
    sizes = [number(s.allocated_mib), number(s.reserved_mib), number(s.saved_mib), share]
    return [s.name, *sizes, room, s.peak_phase, pays_with(s)]


def direction_notes(facts: Facts) -> list[str]:
    """How the table of directions is to be read, and which do not apply."""
    reading = ["saved: of the allocated peak"]
    if facts.limits.known:
        reading.append("room: under the tighter limit")
    known = [s for s in facts.extremes if not s.why_not]
    lines = []
    if any(s.moved_mib for s in known):
        link = " (at the link's nominal bandwidth)" if facts.baseline.transfer_one_way_ms is not None else ""
        reading.append(f"moves: to the host and back, per step{link}")
        if facts.host_free_mib is None:
            lines.append(f"Free host memory: not known, since this machine has no {facts.device}.")
        else:
            lines.append(f"Free host memory here: {mib(facts.host_free_mib)}.")
    refused: dict[str, list[str]] = {}
    for s in facts.extremes:
        if s.why_not:
            refused.setdefault(s.why_not, []).append(s.name)
    lines += [f"Not for this workload: {', '.join(names)}: {why}." for why, names in refused.items()]
    return [f"{'; '.join(reading)}.", *lines]


def command_of(found: Diagnosis, advice: Advice) -> str:
    """The command line of a row; "" where there is nothing to type."""
    if not advice.words or found.facts is None:
        return ""
    # A word that the row sets again would be refused as given twice.
    again = {_key(w) for w in advice.words}
    kept = [w for w in found.facts.words if _key(w) not in again]
    return shlex.join(["python", "train.py", *kept, *advice.words])


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def change_title(facts: Facts) -> str:
    _, setting = changes_beside(facts)
    beside = f" of {setting.name}" if setting is not None else ""
    return f"What else would lower the peak{beside} (each changes the workload, so it is no strategy)"


def change_lines(found: Diagnosis, most: int | None = CHANGES_SHOWN) -> list[tuple[str, str]]:
    """Override and what it does, where the strategies are not the whole answer."""
    facts = found.facts
    if facts is None or not changes_matter(found):
        return []
    changes, _ = changes_beside(facts)
    return [(w.override, change_words(facts, w)) for w in changes[:most]]


def changes_matter(found: Diagnosis) -> bool:
    other = any(a.row == OTHER and a.applies for a in found.order)
    return other or found.answer not in ("yes", "not known")


def change_words(facts: Facts, w: WhatIf) -> str:
    if w.saved_mib < w.reserved_saved_mib * (1 - MOSTLY):
        saves = f"reserves {mib(w.reserved_mib)}, {mib(w.reserved_saved_mib)} less"
    else:
        saves = f"{mib(w.allocated_mib)}, {mib(w.saved_mib)} less"
    fit = "" if not facts.limits.known else " (fits)" if fits(facts, w) else " (does not fit)"
    beside = changes_beside(facts)[1]
    phase = facts.baseline.peak_phase if beside is None else beside.peak_phase
    return f"{saves}{fit}; {phrases.change_words(w, phase)}"


def not_applying(found: Diagnosis) -> list[Advice]:
    return [a for a in found.order if not a.applies]


def files_line(folder: Path, shown: str) -> str:
    return f"{shown}/: {', '.join(sorted(p.name for p in folder.glob('diagnosis.*')))}"


_HEADER = ["direction", "allocated MiB", "reserved MiB", "saved MiB", "share", "room MiB", "peak in", "pays with"]


def markdown(found: Diagnosis) -> str:
    """The whole diagnosis, as the terminal has it, with every change of the workload that was predicted."""
    parts = [f"## {escape(title(found))}", _block(Text(EVIDENCE)), f"**{escape(found.sentence)}**"]
    parts += [_block(Text(line)) for line in ([found.error] if found.error else found.fit)]
    facts = found.facts
    if facts is not None:
        parts += [
            part
            for heading, blocks in _sections(found, facts)
            for part in (f"### {escape(heading)}", *map(_block, blocks))
        ]
    parts += ["### Which command repeats it?", _block(Commands([("again", found.command)]))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> str:
    return block_markdown(block)


def _sections(found: Diagnosis, facts: Facts) -> list[tuple[str, list[Block]]]:
    row = baseline_row(found)
    shares = [[name, number(size), percent(share)] for name, size, share in memory_shares(row)]
    sections: list[tuple[str, list[Block]]] = [
        ("The order in which to try", _order(found)),
        (alive_title(facts), [Grid(["category", "MiB", "share"], shares), Text(f"largest: {largest_line(row)}")]),
        (floor_title(facts), [Points([("", line) for line in [floor_parts(facts), *floor_lines(facts)]])]),
        (
            "The most that each direction could save (each predicted at its extreme)",
            [
                Grid(
                    _HEADER,
                    [direction_cells(facts, s) for s in facts.extremes if not s.why_not],
                    frozenset(("peak in", "pays with")),
                ),
                *(Text(line) for line in direction_notes(facts)),
            ],
        ),
    ]
    changes = change_lines(found, most=None)
    if changes:
        sections.append((change_title(facts), [Points([(f"{override}:", words) for override, words in changes])]))
    return sections


def _order(found: Diagnosis) -> list[Block]:
    blocks: list[Block] = []
    for place, advice in enumerate([a for a in found.order if a.applies], start=1):
        blocks.append(Text(f"({advice.when}): {advice.why}", lead=f"{place}. {advice.title}"))
        command = command_of(found, advice)
        if command:
            blocks.append(Commands([("type", command)]))
        blocks.append(Points([("watch:", advice.watch), ("do not conclude:", advice.not_conclude)]))
    refused = [(f"{a.title}:", a.why) for a in not_applying(found)]
    notes: list[Block] = [Text(note) for note in found.notes]
    return [*blocks, Points(refused, title="Not here"), *notes]


#: From this width on every column has room.
WIDE = 110
ANSWER_STYLES = {"yes": "green", "no": "red", "in part": "yellow", "not known": "red"}
_HEADERS = ["\ndirection", "alloc.\nMiB", "reserv.\nMiB", "saved\nMiB", "", "room\nMiB", "\npeak in", "\npays with"]
_WORDS = {0, 6, 7}  # columns that are not numbers


def print_diagnosis(found: Diagnosis, console: Console | None = None) -> None:
    """The whole of a diagnosis: answer, what is alive, the floor, each direction, the order in which to try."""
    out = Printer(console if console is not None else report_console())
    out.heading(title(found))
    out.line(EVIDENCE)
    out.line()
    _print_answer(found, out)
    facts = found.facts
    if facts is not None:
        _print_memory(found, facts, out)
        _print_directions(facts, out)
        _print_order(found, out)
    out.heading("Where to look")
    out.line(
        RichText.assemble(("files: ", "dim"), files_line(Path(found.folder), shown_path(Path(found.folder)))), 2, False
    )
    out.line(RichText.assemble(("again: ", "dim"), found.command), 2, False)


def _print_answer(found: Diagnosis, out: Printer) -> None:
    out.line(RichText(found.sentence, style=f"bold {ANSWER_STYLES[found.answer]}"))
    for line in [found.error] if found.error else found.fit:
        out.line(line)
    if found.facts is None:
        return
    if not found.feasible:
        out.line(RichText("No strategy here brings it under the cap, nor all of them together.", style="bold red"))
    first = found.first
    if first is not None:
        command = command_of(found, first)
        out.line(RichText.assemble(("Try first: ", "bold"), f"{first.title} ({first.when})"))
        if command:
            out.line(command, indent=2, wrap=False)
    for note in found.notes:
        out.line(RichText(note, style="dim"))


def _print_memory(found: Diagnosis, facts: Facts, out: Printer) -> None:
    out.heading(alive_title(facts))
    row = baseline_row(found)
    out.table(memory_table(row, None, out.plain))
    largest = largest_line(row)
    if largest:
        out.line(f"largest: {largest}", indent=2)
    out.heading(floor_title(facts))
    for line in [floor_parts(facts), *floor_lines(facts)]:
        out.line(line, indent=2)


def _print_directions(facts: Facts, out: Printer) -> None:
    out.heading("The most that each direction could save (each predicted at its extreme)")
    wide = out.width >= WIDE
    left_out = set() if reserves_more(facts) and wide else {2}
    left_out |= set() if wide else {6}
    left_out |= set() if facts.limits.known else {5}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i, header in enumerate(_HEADERS):
        if i in left_out:
            continue
        justify: Literal["left", "right"] = "left" if i in _WORDS else "right"
        long = i in (0, 7)  # may take more than one line
        table.add_column(header, justify=justify, no_wrap=not long, min_width=22 if i == 0 else None)
    for setting in facts.extremes:
        if not setting.why_not:
            cells = direction_cells(facts, setting)
            table.add_row(*(RichText(out.plain(c)) for i, c in enumerate(cells) if i not in left_out))
    out.table(table)
    for line in direction_notes(facts):
        out.line(RichText(line, style="dim"))


def _print_order(found: Diagnosis, out: Printer) -> None:
    out.heading("The order in which to try")
    for place, advice in enumerate([a for a in found.order if a.applies], start=1):
        _print_advice(found, place, advice, out)
    refused = not_applying(found)
    if refused:
        out.heading("Not here")
    for advice in refused:
        out.line(RichText.assemble((advice.title, "bold"), f": {advice.why}"), indent=2)
    changes = change_lines(found)
    if changes:
        assert found.facts is not None
        out.heading(change_title(found.facts))
        for override, words in changes:
            out.line(RichText.assemble((override, "bold"), f": {words}"), indent=2)


def _print_advice(found: Diagnosis, place: int, advice: Advice, out: Printer) -> None:
    out.line(RichText.assemble((f"{place}. {advice.title} ", "bold"), f"({advice.when}): {advice.why}"), indent=2)
    command = command_of(found, advice)
    if command:
        out.line(command, indent=5, wrap=False)
    out.line(RichText.assemble(("watch ", "dim"), advice.watch), indent=5)
    out.line(RichText.assemble(("do not conclude ", "dim"), advice.not_conclude), indent=5)


@whole()
def record_diagnosis(
    store: Store, found: Diagnosis, config: dict[str, Any], markdown: str, files: Sequence[Path]
) -> str | None:
    """Record a diagnosis that was made: parameters are the whole config, files its artifacts. Returns the run's id.

    None where the store failed, which costs a warning; the diagnosis lies in its folder all the same.
    """
    run_id: str | None = None
    name = f"diagnosis of {found.workload} on {found.device}"
    with best_effort(name):
        tags = cut_tags({**process_tags(store), **tags_of(found), "mlflow.note.content": cut_markdown(markdown)})
        run_id = client(store.uri).create_run(experiment_id(store), tags=tags, run_name=name).info.run_id
        opened(store, run_id)
        write(store, run_id, metrics=metrics_of(found), params=params_of(config))
    if run_id is None:
        return None
    with best_effort(f"the artifacts of {name}"), tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder), config)
        save_environment(Path(folder), {})
        client(store.uri).log_artifacts(run_id, folder)
        write_files(store, run_id, files)
    end(store, run_id, "FAILED" if found.error else "FINISHED")
    return run_id


def tags_of(found: Diagnosis) -> dict[str, str]:
    tags = {
        "kind": "diagnosis",
        "mode": "diagnose",
        "workload": found.workload,
        "device": found.device,
        "evidence": found.evidence,
        "answer": found.answer,
        "feasible": str(found.feasible).lower(),
        "try_first": found.first.row if found.first is not None else "",
        "command": found.command,
        "error": found.error,
    }
    return {name: value for name, value in tags.items() if value}


def metrics_of(found: Diagnosis) -> list[MetricValue]:
    """Sizes in MiB and shares, all predicted, grouped under diagnosis/."""
    facts = found.facts
    if facts is None:
        return []
    peak = facts.baseline.peak
    activation = peak.at_peak_mib.get(Category.activation.value, 0.0) / peak.mib if peak is not None else None
    values: dict[str, float | None] = {
        "peak_mib": facts.baseline.allocated_mib,
        "reserved_mib": facts.baseline.reserved_mib,
        "room_mib": facts.room_mib,
        "activation_ratio": activation,
        "floor_mib": facts.floor.mib,
        "floor_room_mib": facts.floor.room_mib,
        "lowest_mib": facts.lowest.allocated_mib if facts.lowest is not None else None,
        "seconds": found.seconds,
    }
    values |= {f"floor/{category}_mib": size for category, size in facts.floor.by_category_mib.items()}
    for s in facts.extremes:
        if not s.why_not:
            group = s.direction.replace("+", "_and_")
            values |= {f"saved/{group}_mib": s.saved_mib, f"lowest/{group}_mib": s.allocated_mib}
    return [
        (f"diagnosis/{name}", value, 0)
        for name, value in values.items()
        if known(value) is not None and value is not None
    ]


JSON, MARKDOWN = "diagnosis.json", "diagnosis.md"


def run_diagnosis(
    config: Config, folder: Path, words: Sequence[str], store: Store | None, progress: Progress
) -> Diagnosis:
    """Diagnose a job's workload, write both files into its folder, and record it. Raises BadInput."""
    found = diagnose(config, words, progress=progress)
    found.command = shlex.join(["python", "train.py", *words])
    found.folder = str(folder)
    text = markdown(found)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(found, folder / JSON)
    (folder / MARKDOWN).write_text(text, encoding="utf-8")
    if store is not None:
        found.mlflow_run_id = record_diagnosis(store, found, plain(config), text, [folder / JSON, folder / MARKDOWN])
        write_json(found, folder / JSON)
    return found


def diagnoses_in(folder: Path, since: str) -> list[Diagnosis]:
    """Those that were made below a folder since a time (ISO 8601), in the order of their jobs."""
    found = []
    stored = read_all(partial(read_as, Diagnosis), folder, JSON)
    for path, diagnosis in sorted(stored, key=lambda each: each[0].stat().st_mtime_ns):
        # The artifacts of its run are a copy, and may lie below the same folder.
        if diagnosis.started_at >= since and Path(diagnosis.folder).resolve() == path.parent.resolve():
            found.append(diagnosis)
    return found


def print_all(found: list[Diagnosis], console: Console) -> bool:
    """Print them one after the other. Returns whether something fits in any of them."""
    for diagnosis in found:
        print_diagnosis(diagnosis, console)
    return any(d.feasible for d in found)
