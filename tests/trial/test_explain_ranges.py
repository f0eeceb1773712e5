"""What the ranges of a trace are called, and that they are opened and closed with the phases, errors included."""

from __future__ import annotations

import pytest
from torch.profiler import profile

from sweep.results import RANGES, Phase
from sweep.trial.profile import Ranges, range_of
from sweep.workload.step import FROM_HOST, TO_HOST, Phases


def test_every_phase_has_a_named_range_and_a_transfer_two() -> None:
    names = {range_of(p.value, "") for p in Phase if p not in (Phase.transfer, Phase.evaluation)}  # no part of a step
    names |= {range_of("transfer", TO_HOST), range_of("transfer", FROM_HOST)}
    assert names | {"other"} == set(RANGES)


def test_ranges_follow_the_phases_also_out_of_an_error() -> None:
    phases = Phases()
    ranges = Ranges(phases)
    with profile() as profiler, phases.listening(ranges):
        with pytest.raises(ZeroDivisionError), phases(Phase.forward), phases(Phase.transfer, TO_HOST):
            raise ZeroDivisionError
        with phases(Phase.backward), phases(Phase.transfer, FROM_HOST):
            pass
    assert phases.stack == [] == phases.details
    counts = {e.key: e.count for e in profiler.key_averages()}
    assert {name: counts[name] for name in ("forward", "copy to host", "backward", "copy from host")} == {
        "forward": 1, "copy to host": 1, "backward": 1, "copy from host": 1,
    }  # fmt: skip
