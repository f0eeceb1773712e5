"""A diagnosis in markdown: diagnosis.md, and the description of its MLflow run."""

from __future__ import annotations

from sweep.diagnose_report import (
    EVIDENCE,
    alive_title,
    baseline_row,
    change_lines,
    change_title,
    command_of,
    direction_cells,
    direction_notes,
    floor_parts,
    floor_title,
    not_applying,
    title,
)
from sweep.diagnosis import Diagnosis, Facts
from sweep.diagnosis_answer import floor_lines
from sweep.report_blocks import Block, Commands, Grid, Points, Text
from sweep.report_markdown import block_markdown, escape
from sweep.report_words import largest_line, memory_shares
from sweep.words import number, percent

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
