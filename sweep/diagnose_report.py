"""What a printed diagnosis is made of, whatever prints it: titles, rows and lines. Short ones first."""

from __future__ import annotations

import shlex
from pathlib import Path

from sweep.diagnosis import Advice, Diagnosis, Facts, Setting
from sweep.diagnosis_answer import MOSTLY
from sweep.diagnosis_order import changes_beside, fits
from sweep.diagnosis_words import OTHER, pays_with
from sweep.findings import WhatIf
from sweep.report_rows import Row
from sweep.report_words import CATEGORY_WORDS, operator_words
from sweep.results import Decision, Evidence, Outcome, TrialResult
from sweep.words import NOT_KNOWN, mib, number, percent

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
    return f"{saves}{fit}; {w.words}"


def not_applying(found: Diagnosis) -> list[Advice]:
    return [a for a in found.order if not a.applies]


def files_line(folder: Path, shown: str) -> str:
    return f"{shown}/: {', '.join(sorted(p.name for p in folder.glob('diagnosis.*')))}"
