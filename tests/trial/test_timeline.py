"""The memory over a step: every event counts, no peak is lost by leaving points out, and all of it is drawn."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

import sweep.trial.profile as module
from sweep.memory.ledger import NO_NODE, Ledger
from sweep.report.plots import draw_timeline, over_a_step
from sweep.results import MIB, Band, Category
from sweep.trial.profile import Recorder, timeline


def recorded() -> tuple[Ledger, Recorder]:
    """Two parameters of 1 MiB before the step; in it activations of 3 and 2 MiB, a temporary of 4, and their ends."""
    ledger = Ledger()
    log, recorder = ledger.log, Recorder(ledger)

    def add(mib: int, category: Category, phase: str) -> int:
        return log.add(mib * MIB, category, phase, "aten.mm", "head", NO_NODE)

    def within(phase: str) -> None:
        recorder.enter_phase(phase)
        log.switch_phase(phase)

    add(1, Category.parameter, "")
    add(1, Category.parameter, "")
    ledger.reset_peak()
    recorder.begin()
    within("forward")
    first, second = add(3, Category.activation, "forward"), add(2, Category.activation, "forward")
    recorder.leave_phase("forward")
    within("backward")
    log.end(second)
    within("recompute")
    again = add(4, Category.temporary, "recompute")
    recorder.leave_phase("recompute")
    log.end(first)
    log.end(again)
    recorder.leave_phase("backward")
    return ledger, recorder


def test_the_levels_after_each_event_by_part_and_the_phases_as_pieces_of_the_axis() -> None:
    found = timeline(*recorded(), "cpu")
    assert found.events == 6 and found.positions == list(range(7))
    assert found.mib == {
        "parameter": [2.0] * 7,
        "activation": [0.0, 3.0, 5.0, 3.0, 3.0, 0.0, 0.0],
        "recomputed": [0.0, 0.0, 0.0, 0.0, 4.0, 4.0, 0.0],
    }
    assert found.peak_position == 4 and found.peak.mib == 9.0 and found.peak.phase == "recompute"
    assert found.phases == [
        Band("forward", 0, 2),
        Band("backward", 2, 3),
        Band("recompute", 3, 4),
        Band("backward", 4, 6),
    ]


def test_what_came_before_the_step_is_where_it_starts() -> None:
    ledger, recorder = recorded()
    recorder.begin()
    ledger.reset_peak()
    found = timeline(ledger, recorder, "cpu")
    assert found.events == 0 and found.mib == {"parameter": [2.0]} and found.peak.mib == 2.0


def test_a_large_step_is_kept_small_and_loses_neither_its_peak_nor_its_end() -> None:
    ledger = Ledger()
    recorder = Recorder(ledger)
    recorder.begin()
    for i in range(30_000):
        recorder.enter_phase("forward")
        size = 9 if i == 12_345 else 1 + i % 7
        ledger.log.end(ledger.log.add(size * MIB, Category.temporary, "forward", "aten.mm", "", NO_NODE))
        recorder.leave_phase("forward")
    found = timeline(ledger, recorder, "cpu")
    assert found.events == 60_000 and len(found.positions) <= module.MOST_POINTS + 2
    assert {0, found.peak_position, 60_000} <= set(found.positions) and found.positions == sorted(set(found.positions))
    assert max(found.mib["temporary"]) == 9.0 == found.peak.mib and min(found.mib["temporary"]) == 0.0
    assert found.phases == [Band("forward", 0, 60_000)], "pieces of one phase that follow each other are one"


def test_the_picture_shows_parts_phases_and_the_peak(tmp_path: Path) -> None:
    found = timeline(*recorded(), "cpu")
    draw_timeline(found, "gpt_tiny, checkpoint", tmp_path / "memory.png")
    with Image.open(tmp_path / "memory.png") as image:
        assert image.size[0] > 800 and len(image.convert("RGB").getcolors(1_000_000)) > 20
    figure = over_a_step(found, "gpt_tiny, checkpoint")
    [text] = [t.get_text() for axes in figure.axes for t in axes.texts]
    assert text.startswith("peak 9.0 MiB: ") and "mm of head" in text
    labels = {t.get_text() for legend in figure.legends for t in legend.get_texts()}
    assert labels == {"parameters", "activations", "recomputed activations", "forward", "backward", "recompute"}
