"""A command in mode=diagnose: one diagnosis per job, its files and its MLflow run; printed when all are made."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from sweep import tracking
from sweep.config.schema import Config, plain
from sweep.diagnose.advice import OTHER, Diagnosis, Facts, Row, changes_beside, fit, fits, of
from sweep.diagnose.predict import Progress, diagnose
from sweep.environment import program
from sweep.format import NOT_KNOWN, mib, number, percent
from sweep.report import data
from sweep.report.blocks import USEFUL, Block, Column, Commands, Heading, Points, Table, Text
from sweep.report.content import memory_table, moment_words
from sweep.report.markdown import render
from sweep.report.phrases import (
    DIAGNOSED,
    PART_WORDS,
    TO_TRY,
    change_words,
    diagnosed,
    sentence,
)
from sweep.report.terminal import print_blocks
from sweep.results import Decision, Finding, TrialResult, read_all, read_as, write_json
from sweep.tracking.store import Store

JSON, MARKDOWN = "diagnosis.json", "diagnosis.md"
#: On the command line they choose what a diagnosis chooses itself.
CHOSEN = ("mode=", "strategy", "compare=")


def command_of(found: Diagnosis, row: Row) -> str:
    """The command line of a row, of words that compose."""
    # A word that the row sets again would be refused as given twice; a key that was added is left out to remove it.
    again = {_key(word) for word in row.overrides}
    added = {_key(word) for word in found.overrides if word.startswith("+")}
    kept = [w for w in found.overrides if not w.lstrip("+~").startswith(CHOSEN) and _key(w) not in again]
    new = [w for w in row.overrides if not (w.startswith("~") and _key(w) in added)]
    return shlex.join([*program(), *kept, *new])


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _row(found: Diagnosis, facts: Facts) -> data.Row:
    """The baseline as reports show a trial, for the parts that they share."""
    about = {"name": "baseline", "strategy": "baseline", "workload": found.workload, "device": found.device}
    same = {"outcome": "ok", "evidence": found.evidence, "is_baseline": True, "fixed_id": "", "mode": "predict"}
    result = TrialResult(**about, **same, prediction=facts.baseline)  # type: ignore[arg-type]
    return data.Row(result, Decision(verdict="", peak_mib=facts.peak_mib))


# -- what is shown ---------------------------------------------------------------------------------------------------


def content(found: Diagnosis) -> list[Block]:
    """The whole of a diagnosis: answer, what is alive, the floor, each direction, the order in which to try."""
    blocks: list[Block] = [
        Heading(f"{found.workload} on {found.device}: diagnosis of the baseline", 1),
        Text(DIAGNOSED, quiet=True),
    ]
    facts = found.facts
    if facts is None or found.because is None:
        blocks.append(Text(found.error, "Not known: the baseline cannot be predicted."))
    else:
        blocks += [
            *_answer(found, facts),
            *_memory(found, facts),
            *_directions(facts),
            *_order(found),
            *_changes(found, facts),
        ]
    shown = f"{data.shown_path(Path(found.folder))}/: {JSON}, {MARKDOWN}"
    return [*blocks, Heading("Where to look"), Commands([("files", shown), ("again", found.command)])]


def _answer(found: Diagnosis, facts: Facts) -> list[Block]:
    assert found.because is not None
    said = [*fit(facts), *([] if found.feasible else [Finding("nothing_fits")])]
    blocks: list[Block] = [Text("", sentence(diagnosed(found.because))), *(Text(sentence(diagnosed(f))) for f in said)]
    if found.first is not None:
        title, when, *_ = TO_TRY[found.first.row]
        blocks += [Text(f"{title} ({when})", "Try first:"), *_commands(found, found.first)]
    notes = [] if facts.here else [Finding("not_here", names={"device": found.device})]
    notes += [] if facts.blocks else [Finding("no_blocks")]
    notes += [Finding("less_sure", names={"caveat": caveat}) for caveat in facts.baseline.caveats]
    return [*blocks, *(Text(sentence(diagnosed(note)), quiet=True) for note in notes)]


def _memory(found: Diagnosis, facts: Facts) -> list[Block]:
    peak = facts.baseline.peak
    assert peak is not None, "a prediction always has one"
    stays = [f"{PART_WORDS[part]} {mib(size)}" for part, size in facts.floor.items() if size >= 0.005]
    return [
        Heading(f"What filled the memory? {mib(facts.peak_mib)} at the baseline's peak, in {moment_words(peak)}"),
        *memory_table(_row(found, facts)),
        Heading(f"The floor that no activation strategy can go below: {mib(facts.floor_mib)}"),
        Text(sentence(diagnosed(Finding("floor", names={"parts": ", ".join(stays)})))),
    ]  # fmt: skip


def _directions(facts: Facts) -> list[Block]:
    b, floor = facts.baseline, facts.floor_mib
    rows = [("baseline", b.allocated_mib, b.reserved_mib, _room(facts.room_mib, b.fits), b.peak_phase, "")]
    for s in facts.known:
        paid = diagnosed(of(facts, "pays", s))
        rows.append((s.name, s.allocated_mib, s.reserved_mib, _room(s.room_mib, s.fits), s.peak_phase, paid))
    rows.append(("the floor", floor, floor, _room(facts.floor_room_mib, True), "optimizer", ""))
    saved = [facts.peak_mib - row[1] for row in rows]
    columns = [
        Column("direction", [row[0] for row in rows], words=True),
        Column("allocated MiB", [number(row[1]) for row in rows]),
        Column("reserved MiB", [number(row[2]) for row in rows], rank=USEFUL),
        Column("saved MiB", [number(size) for size in saved]),
        Column("share", [percent(size / facts.peak_mib) for size in saved]),
        Column("room MiB", [row[3] for row in rows]),
        Column("peak in", [row[4] for row in rows], words=True, rank=USEFUL),
        Column("pays with", [row[5] for row in rows], words=True),
    ]
    shown = {"reserved MiB": facts.limits.reserves, "room MiB": facts.limits.known}
    refused: dict[str, list[str]] = {}
    for s in facts.extremes:
        if s.refused is not None:
            refused.setdefault(diagnosed(s.refused), []).append(s.name)
    free = Finding("host_free", {"free_mib": facts.host_free_mib}) if facts.host_free_mib else Finding("host_unknown")
    return [
        Heading("The most that each direction could save (each predicted at its extreme)"),
        Table([column for column in columns if shown.get(column.header, True)]),
        *([Text(sentence(diagnosed(free)), quiet=True)] if any(s.moved_mib for s in facts.known) else []),
        Points([(f"{', '.join(names)}:", why) for why, names in refused.items()], "Not for this workload"),
    ]


def _room(room_mib: float | None, fits: bool) -> str:
    if room_mib is None or room_mib < 0:
        return NOT_KNOWN if room_mib is None else number(room_mib)
    return f"+{number(room_mib)}" if fits else "in pieces"


def _order(found: Diagnosis) -> list[Block]:
    blocks: list[Block] = [Heading("The order in which to try")]
    for place, row in enumerate([row for row in found.order if row.applies], start=1):
        title, when, watch, not_conclude = TO_TRY[row.row]
        blocks += [Text(f"({when}): {diagnosed(*row.because)}", f"{place}. {title}"), *_commands(found, row)]
        blocks.append(Points([("watch", watch), ("do not conclude", not_conclude)]))
    refused = [(f"{TO_TRY[row.row][0]}:", diagnosed(*row.because)) for row in found.order if not row.applies]
    return [*blocks, Heading("Ruled out"), Points(refused)]


def _commands(found: Diagnosis, row: Row) -> list[Block]:
    return [Commands([("type", command_of(found, row))])] if row.overrides else []


def _changes(found: Diagnosis, facts: Facts) -> list[Block]:
    """What else would lower the peak, where the strategies are not the whole answer."""
    if found.answer == "yes" and not any(row.row == OTHER and row.applies for row in found.order):
        return []
    changes, beside = changes_beside(facts)
    phase, of_it = (facts.baseline.peak_phase, "") if beside is None else (beside.peak_phase, f" of {beside.name}")
    fit = ["" if not facts.limits.known else "yes" if fits(facts, w) else "no" for w in changes]
    sizes = [map(number, (w.allocated_mib, w.saved_mib, w.reserved_saved_mib)) for w in changes]
    rows = [[w.override, *row, fits] for w, row, fits in zip(changes, sizes, fit)]
    return [
        Heading(f"What else would lower the peak{of_it} (changes of the workload, so no strategies)"),
        Table.of(["with", "allocated MiB", "less MiB", "reserves less MiB", "fits"], rows, words=(0, 4)),
        Points([(f"{w.override}:", change_words(w, phase)) for w in changes]),
    ]


# -- what is kept ----------------------------------------------------------------------------------------------------


def run_diagnosis(
    config: Config, folder: Path, overrides: Sequence[str], store: Store | None, progress: Progress
) -> Diagnosis:
    """Diagnose a job's workload, write both files into its folder, and record it. Raises BadInput."""
    found = diagnose(config, overrides, progress=progress)
    found.folder = str(folder)
    markdown = render(content(found))
    write_json(found, folder / JSON)
    (folder / MARKDOWN).write_text(markdown, encoding="utf-8")
    if store is not None:
        name, files = f"diagnosis of {found.workload} on {found.device}", [folder / JSON, folder / MARKDOWN]
        said, tags = plain(config), {"kind": "diagnosis", "mode": "diagnose", "evidence": found.evidence}
        tags |= {"workload": found.workload, "device": found.device, "command": found.command, "error": found.error}
        tags |= {"answer": found.answer, "feasible": str(found.feasible).lower()}
        tags["try_first"] = found.first.row if found.first is not None else ""
        metrics = {f"diagnosis/{key}": value for key, value in sizes_of(found).items() if value is not None}
        found.mlflow_run_id = tracking.record(store, name, tags, metrics, said, markdown, files)
        write_json(found, folder / JSON)
    return found


def sizes_of(found: Diagnosis) -> dict[str, float | None]:
    """What is plotted and compared over diagnoses: sizes in MiB and shares, all predicted."""
    facts = found.facts
    if facts is None or found.because is None:
        return {}
    values = {
        "peak_mib": facts.peak_mib,
        "reserved_mib": facts.baseline.reserved_mib,
        "room_mib": facts.room_mib,
        "activation_ratio": found.because.numbers.get("activation_ratio"),
        "floor_mib": facts.floor_mib,
        "floor_room_mib": facts.floor_room_mib,
        "lowest_mib": facts.lowest.allocated_mib if facts.lowest is not None else None,
        "seconds": found.seconds,
    }
    values |= {f"floor/{category}_mib": size for category, size in facts.floor.items()}
    for s in facts.known:
        group = s.direction.replace("+", "_and_")
        values |= {f"saved/{group}_mib": s.saved_mib, f"lowest/{group}_mib": s.allocated_mib}
    return values


def diagnoses_in(folder: Path, since: str) -> list[Diagnosis]:
    """Those that were made below a folder since a time (ISO 8601), in the order of their jobs."""
    stored = read_all(partial(read_as, Diagnosis), folder, JSON)
    ordered = sorted(stored, key=lambda each: each[0].stat().st_mtime_ns)
    # The artifacts of its run are a copy, and may lie below the same folder.
    return [d for path, d in ordered if d.started_at >= since and Path(d.folder).resolve() == path.parent.resolve()]


def print_all(found: list[Diagnosis], console: Console) -> bool:
    """Print them one after the other. Returns whether something fits in any of them."""
    for diagnosis in found:
        print_blocks(content(diagnosis), console)
    return any(d.feasible for d in found)
