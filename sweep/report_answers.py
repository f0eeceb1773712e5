"""The questions of a reader who was not there, answered from the stored results of one comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sweep.knobs import Knobs
from sweep.report_answers_cost import cost
from sweep.report_answers_hold import hold
from sweep.report_answers_why import why
from sweep.report_blocks import DETAIL, USEFUL, Answer, Block, Grid, Picture, Points, Text
from sweep.report_data import Section
from sweep.report_rows import Row
from sweep.report_words import (
    largest_line,
    lasting_mib,
    memory_row,
    memory_shares,
    next_lines,
    operator_words,
    premise_lines,
    reasons_words,
    says,
    sentence,
    verdict_line,
)
from sweep.results import Category, Evidence, Outcome
from sweep.words import EVIDENCE_SHORT, NOT_KNOWN, OUTCOME_WORDS, count, mib, number, percent

#: From here on a table is long enough to be shown on demand.
MANY = 12


def lead(section: Section) -> list[Block]:
    """What a reader takes away who reads no further."""
    c = section.comparison
    return [
        Text(says(section, c.why), f"Verdict: {verdict_line(section)}."),
        Text(sentence(c.next_action, first=False), "Next:"),
        *(Text(note) for note in section.notes),
    ]


def answers(section: Section) -> list[Answer]:
    """In the order in which they are asked."""
    return [
        pressure(section),
        changed(section),
        saved(section),
        cost(section),
        why(section),
        hold(section),
        what_next(section),
    ]


def pressure(section: Section) -> Answer:
    """Memory at the baseline's peak against the cap, and what fills it."""
    blocks: list[Block] = [Text(_pressure_words(section))]
    row = memory_row(section)
    if row is None:
        return Answer("What was the pressure?", [*blocks, Text("What filled the memory is not known: no peak is.")])
    total = sum(row.at_peak_mib.values())
    activations, lasting = row.at_peak_mib.get(Category.activation.value, 0.0), lasting_mib(row)
    blocks.append(
        Text(
            f"Of it {mib(activations)} ({percent(activations / total)}) are activations, which is what the strategies "
            f"here lower; {mib(lasting)} ({percent(lasting / total)}) are parameters, gradients and optimizer state, "
            f"which none of them does. {_source(row)}"
        )
    )
    other = section.preferred if section.preferred is not row else None
    beside = {name: value for name, value, _ in memory_shares(other)} if other is not None else {}
    header = [f"at the peak of {row.name}", "MiB", "share"] + (["MiB at the preferred's peak"] if beside else [])
    rows = [
        [name, number(value), percent(share)] + ([number(beside.get(name, 0.0))] if beside else [])
        for name, value, share in memory_shares(row)
    ]
    blocks.append(Grid(header, rows, rank=USEFUL))
    largest = largest_line(row)
    if largest:
        blocks.append(Text(f"{largest}.", "Largest:", rank=USEFUL))
    return Answer("What was the pressure?", [*blocks, Picture("at_peak", "What is alive at the peak of each trial")])


def _pressure_words(section: Section) -> str:
    """The baseline's peak against the cap."""
    c, row = section.comparison, section.baseline
    cap = f"the cap of {mib(c.cap_mib)} ({c.cap_source})" if c.cap_mib is not None else ""
    if row is None:
        return f"There is no baseline here, so the pressure is not known{f'; allowed is {cap}' if cap else ''}."
    peak, how = row.peak_mib, EVIDENCE_SHORT.get(row.evidence, row.evidence)
    words = ""
    if row.outcome != Outcome.ok.value:
        words = f"The baseline {OUTCOME_WORDS.get(row.outcome, row.outcome)}. "
        if row.predicted is not None:
            peak, how = row.predicted.allocated_mib, EVIDENCE_SHORT[Evidence.predicted.value]
    if peak is None:
        return f"{words}Its peak is not known{f'; allowed is {cap}' if cap else ''}."
    where = _where(row)
    words += f"The baseline's peak is {mib(peak)} ({how}){f', in {where}' if where else ''}"
    if c.cap_mib is None:
        return f"{words}. No memory cap is set (budget.memory_mib) and the device's capacity is not known."
    over = peak - c.cap_mib
    against = f"{mib(over)} over" if over > 0 else f"{mib(-over)} below"
    return f"{words}: {percent(peak / c.cap_mib)} of {cap}, {against} it."


def _where(row: Row) -> str:
    if row.peak is not None and row.outcome == Outcome.ok.value:
        phase, operator, module = row.peak.phase, row.peak.operator, row.peak.module
    elif row.predicted is not None:
        phase, operator, module = row.predicted.peak_phase, row.predicted.peak_operator, ""
    else:
        return ""
    return phase + (f" at {operator_words(operator)}" if operator else "") + (f" of {module}" if module else "")


def _source(row: Row) -> str:
    if row.peak is None:
        return "These shares are predicted."
    return "The shares are the ledger's account." if row.evidence != Evidence.cpu.value else ""


def changed(section: Section) -> Answer:
    """What is equal for all trials, and what each changes."""
    rows = [[row.name, strategy_words(Knobs.of(result))] for row, result in zip(section.rows, section.results)]
    grid = Grid(["strategy", "what it does"], rows, frozenset(["what it does"]), list(range(len(rows))))
    grid.strong, grid.rank, grid.folded = section.comparison.preferred_index, USEFUL, len(rows) > MANY
    return Answer("What was changed?", [Text(f"Only the strategy. {fixed_words(section)}"), grid])


def fixed_words(section: Section) -> str:
    """What all trials of a comparison have in common."""
    first, c = section.results[0], section.comparison
    workload = first.config.get("workload") or {}
    optimizer = workload.get("optimizer") or {}
    parts = [c.workload]
    if first.parameters is not None:
        blocks = f" in {count(first.blocks, 'block')}" if first.blocks else ""
        parts[0] += f" with {parameters_words(first.parameters)} parameters{blocks}"
    if workload.get("global_batch_size") is not None:
        parts.append(f"{count(int(workload['global_batch_size']), 'sample')} per optimizer step")
    if workload.get("seq_len") is not None:
        parts.append(f"sequences of {workload['seq_len']}")
    if workload.get("dtype") is not None:
        parts.append(str(workload["dtype"]))
    if optimizer.get("name") or optimizer.get("lr") is not None:
        rate = f" with learning rate {optimizer['lr']:g}" if isinstance(optimizer.get("lr"), (int, float)) else ""
        parts.append(f"{optimizer.get('name') or 'optimizer'}{rate}")
    if workload.get("seed") is not None:
        parts.append(f"seed {workload['seed']}")
    if first.data_version:
        parts.append(f"data {first.data_version[:12]}")
    return f"Equal for all trials on {c.device}: {', '.join(parts)}."


def parameters_words(parameters: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)


def strategy_words(knobs: Knobs) -> str:
    """What a strategy does, with its numbers."""
    parts = []
    whole = knobs.global_batch_size
    if knobs.splits:
        of = f" of {whole}" if whole is not None else ""
        pieces = (
            f", {count(math.ceil(whole / knobs.micro_batch_size), 'piece')}" if whole and knobs.micro_batch_size else ""
        )
        parts.append(f"computes {knobs.micro_batch_size}{of} samples at once{pieces}")
    if knobs.checkpoints:
        which = {
            "blocks": "every block" if knobs.every_k == 1 else f"one block in {knobs.every_k}",
            "segments": f"segments of {count(knobs.segment_size, 'block')}",
            "selective": "every block but for matmul and attention results"
            if knobs.every_k == 1
            else f"one block in {knobs.every_k} but for matmul and attention results",
            "parts": "parts of each block",
        }.get(knobs.granularity, knobs.granularity)
        parts.append(f"recomputes {which} in backward")
    if knobs.offloads:
        what = {"all": "what is saved", "inputs": "the inputs of blocks", "blocks": "what chosen blocks save"}
        least = f" of {knobs.min_tensor_kib:g} KiB and more" if knobs.min_tensor_kib > 0 else ""
        but = f", but for the last {count(knobs.keep_last, 'block')}" if knobs.keep_last > 0 else ""
        pinned = "" if knobs.pin_memory else ", pageable"
        parts.append(f"moves {what.get(knobs.placement, knobs.placement)}{least} to host memory{pinned}{but}")
    if not parts:
        at_once = f": {count(whole, 'sample')} at once" if whole is not None else ""
        return f"nothing{at_once}, all activations kept on the device"
    return "; ".join(parts)


def saved(section: Section) -> Answer:
    """Peaks and savings of every trial."""
    blocks: list[Block] = [Text(_saved_words(section))]
    columns: Sequence[str] = ["strategy", "outcome", "peak MiB", "saved MiB", "saved", "peak in", "verdict"]
    rows = []
    for row in section.rows:
        share = percent(row.saved_ratio) if row.saved_ratio is not None else NOT_KNOWN
        cells = [row.name, row.outcome, number(row.peak_mib), number(row.saved_mib), share, _where(row) or NOT_KNOWN]
        rows.append([*cells, f"{row.verdict}{reasons_words(row)}"])
    grid = Grid(list(columns), rows, frozenset(["outcome", "peak in", "verdict"]), list(range(len(rows))))
    grid.strong = section.comparison.preferred_index
    if section.predicts:
        _with_column(grid, "peak MiB", "reserved MiB", [_of(r, "reserved_mib") for r in section.rows])
        _with_column(grid, "reserved MiB", "headroom MiB", [_of(r, "headroom_mib") for r in section.rows])
    elif any(r.reserved_mib is not None for r in section.rows):
        _with_column(grid, "peak MiB", "reserved MiB", [number(r.reserved_mib) for r in section.rows])
    premises = [Points([("", line) for line in lines])] if (lines := premise_lines(section)) else []
    return Answer("What did it save?", [*blocks, grid, *premises])


def _of(row: Row, name: str) -> str:
    return number(getattr(row.predicted, name)) if row.predicted is not None else NOT_KNOWN


def _with_column(grid: Grid, after: str, header: str, cells: list[str]) -> None:
    at = grid.header.index(after) + 1
    grid.header.insert(at, header)
    for row, cell in zip(grid.rows, cells):
        row.insert(at, cell)


def _saved_words(section: Section) -> str:
    """The saving of the preferred trial, or what could be saved where it is the baseline or there is none."""
    preferred = section.preferred
    how = lambda row: EVIDENCE_SHORT.get(row.evidence, row.evidence)
    if preferred is not None and not preferred.is_baseline and preferred.saved_mib is not None:
        what = "saves" if preferred.saved_mib > 0 else "saves nothing: it takes more, by"
        share = f" ({percent(abs(preferred.saved_ratio or 0.0))} of the baseline's peak)"
        return f"{preferred.name} {what} {mib(abs(preferred.saved_mib))}{share}, {how(preferred)}."
    saving = [r for r in section.candidates if r.saved_mib is not None and r.saved_mib > 0]
    if preferred is not None and preferred.is_baseline:
        words = "The preferred trial is the baseline, which saves nothing (0 MiB)."
    elif preferred is not None:
        words = f"{preferred.name} takes {mib(preferred.peak_mib)}; what that saves is not known: there is no baseline."
    else:
        words = "No trial is accepted, so nothing is saved yet (0 MiB)."
    if not saving:
        return words
    most = max(saving, key=lambda r: r.saved_mib or 0.0)
    return (
        f"{words} Most could be saved by {most.name}: {mib(most.saved_mib)} ({percent(most.saved_ratio)}), {how(most)}."
    )


def what_next(section: Section) -> Answer:
    """The next action, what stands against each trial that is not accepted, and what else would lower the peak."""
    blocks: list[Block] = [Text(says(section, section.comparison.next_action))]
    blocked = [(f"{row.name} {row.verdict}{reasons_words(row)}:", words) for row, words in next_lines(section)]
    if blocked:
        blocks.append(Points(blocked, USEFUL, "Not accepted", per_trial=True))
    return Answer("What next?", blocks + _what_if(section))


def _what_if(section: Section) -> list[Block]:
    """Changes that are no strategies: another workload, so that its own baseline has to be compared with."""
    found = [(row, what) for row in section.rows if row.predicted is not None for what in row.predicted.what_if]
    if not found:
        return []
    rows = [
        [row.name, what.override, number(what.allocated_mib), number(what.saved_mib), what.peak_phase]
        for row, what in found
    ]
    header = ["for", "with", "predicted peak MiB", "less by MiB", "peak then in"]
    title = "What else would lower the peak (another workload, to be compared with its own baseline)"
    told = dict.fromkeys((f"{what.override}:", sentence(what.words, first=False)) for _, what in found if what.words)
    blocks: list[Block] = [Grid(header, rows, frozenset(["with", "peak then in"]), rank=USEFUL, title=title)]
    return [*blocks, Points(list(told), DETAIL)] if told else blocks
