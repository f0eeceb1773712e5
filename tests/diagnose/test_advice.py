"""What a diagnosis decides: answer, limits and every row of the order, from made-up facts."""

from __future__ import annotations

from typing import Any

import pytest
from made_up import peak, prediction

from sweep.diagnose.advice import (
    ALL,
    CHECKPOINT,
    HYBRID,
    MICRO,
    MICRO_CHECKPOINT,
    OFFLOAD,
    SELECTIVE,
    Diagnosis,
    Facts,
    Limits,
    Row,
    Setting,
    answer,
    feasible,
    fit,
    of,
    order,
)
from sweep.report.phrases import TO_TRY, diagnosed
from sweep.results import Finding, Peak, WhatIf, from_dict, to_dict

PEAK = 1000.0
#: Of each direction's extreme.
PEAKS = {MICRO: 300.0, SELECTIVE: 700.0, CHECKPOINT: 400.0, OFFLOAD: 350.0, HYBRID: 320.0, MICRO_CHECKPOINT: 250.0,
         ALL: 240.0}  # fmt: skip
WORDS = {
    MICRO: ["strategy=micro_batch", "strategy.micro_batch_size=1"],
    SELECTIVE: ["strategy=checkpoint_selective"],
    CHECKPOINT: ["strategy=checkpoint"],
    OFFLOAD: ["strategy=offload"],
    HYBRID: ["strategy=hybrid"],
    MICRO_CHECKPOINT: ["strategy=checkpoint", "strategy.micro_batch_size=1"],
    ALL: ["strategy=hybrid", "strategy.micro_batch_size=1"],
}
FUSED = WhatIf("workload.optimizer.implementation=fused", 850.0, 850.0, 150.0, "backward", "aten.mm", "fused")
SGD = WhatIf("workload.optimizer.name=sgd", 500.0, 500.0, 500.0, "backward", "aten.mm", "sgd")


def floor(mib: float = 200.0) -> dict[str, float]:
    return {"parameter": 0.25 * mib, "gradient": 0.25 * mib, "optimizer_state": 0.5 * mib}


def setting(direction: str, mib: float, limits: Limits, **changes: Any) -> Setting:
    room = limits.room_mib(mib, mib)
    values: dict[str, Any] = {
        "name": direction,
        "allocated_mib": mib,
        "reserved_mib": mib,
        "saved_mib": PEAK - mib,
        "peak_phase": "backward",
        "fits": room is None or room >= 0,
        "room_mib": room,
    }
    if direction in (CHECKPOINT, HYBRID, MICRO_CHECKPOINT, ALL):
        values["recompute_flops_ratio"] = 0.25
    if direction in (OFFLOAD, HYBRID, ALL):
        values |= {"moved_mib": 1200.0, "host_mib": 600.0, "transfer_ms": 40.0}
    if direction in (MICRO, MICRO_CHECKPOINT, ALL):
        values |= {"micro_batch_size": 1, "accumulation_steps": 8}
    return Setting(direction, WORDS[direction], **(values | changes))


def facts(
    cap: float | None = None,
    *,
    peaks: dict[str, float] | None = None,
    refused: dict[str, str] | None = None,
    mild: dict[str, float] | None = None,
    at: Peak | None = None,
    **changes: Any,
) -> Facts:
    """A baseline of 1000 MiB, four fifths of it activations; cap: the device's. peaks: the extremes', in MiB."""
    limits = changes.pop("limits", Limits(device_mib=cap))
    shares = {"parameter": 50.0, "optimizer_state": 100.0, "activation": 800.0, "temporary": 50.0}
    at = at or peak(PEAK, "backward", **shares)
    fits = cap is None or cap >= PEAK
    baseline = prediction(PEAK, fits, cap, peak=at, reserved_mib=PEAK)
    extremes = [setting(d, mib, limits) for d, mib in (PEAKS | (peaks or {})).items() if d not in (refused or {})]
    extremes += [Setting(d, WORDS[d], d, Finding("error", names={"error": why})) for d, why in (refused or {}).items()]
    values: dict[str, Any] = {
        "global_batch_size": 8,
        "blocks": 4,
        "compute_ms": 100.0,
        "mildest": [setting(d, mib, limits, name=f"mild {d}") for d, mib in (mild or {}).items()],
        "floor": floor(),
    }
    return Facts(baseline, limits, extremes=extremes, **(values | changes))


def rows(f: Facts) -> dict[str, Row]:
    found = order(f)
    assert {a.row for a in found} == set(TO_TRY) and len(found) == len(TO_TRY)
    applying = [a.applies for a in found]
    assert applying == sorted(applying, reverse=True), "what applies comes first"
    assert all(diagnosed(*a.because) and (a.applies or not a.overrides) for a in found)
    return {a.row: a for a in found}


def applying(f: Facts) -> list[str]:
    return [a.row for a in order(f) if a.applies]


def codes(row: Row) -> list[str]:
    return [f.code for f in row.because]


# -- the answer and the limits ---------------------------------------------------------------------------------------

OPTIMIZER = peak(PEAK, "optimizer", parameter=200.0, gradient=200.0, optimizer_state=400.0, temporary=200.0)
LASTING = peak(PEAK, parameter=300.0, optimizer_state=500.0, activation=150.0, temporary=50.0)


@pytest.mark.parametrize(("changes", "kind", "words"), [
    ({}, "yes", "Yes: activations are 80 % of the baseline's peak of 1000 MiB"),
    (
        {"at": peak(PEAK, parameter=100.0, activation=500.0, temporary=400.0)},
        "yes", "Yes: activations are 50 % of the baseline's peak of 1000 MiB, and the temporaries beside them 40 %",
    ),
    (
        {"at": OPTIMIZER, "floor": floor(1000.0)},
        "no", "made of parameters, gradients, optimizer state and temporaries",
    ),
    (
        {"at": LASTING},
        "no", "80 % of the baseline's peak of 1000 MiB is parameters and optimizer state; activations are 15 %",
    ),
    ({"floor": floor(950.0)}, "in part", "none can save more than 50.0 MiB (5 %)"),
    (
        {"at": peak(PEAK, parameter=300.0, optimizer_state=300.0, activation=350.0, temporary=50.0),
         "floor": floor(300.0)},
        "in part", "activations are 35 % of the baseline's peak of 1000 MiB; 60 % is parameters and optimizer state",
    ),
])  # fmt: skip
def test_whether_it_is_the_activations(changes: dict[str, Any], kind: str, words: str) -> None:
    found, because = answer(facts(**changes))
    assert found == kind and words in diagnosed(because)


def test_without_a_cap_a_budget_is_asked_for() -> None:
    f = facts()
    assert f.fits is None and f.room_mib is None and feasible(f)
    [found] = fit(f)
    assert (found.code, found.numbers) == ("no_limit", {"try": 500})


def test_a_budget_caps_what_is_allocated_and_a_device_what_is_reserved() -> None:
    limits = Limits(budget_mib=1200.0, device_mib=900.0, capacity_mib=1000.0, context_mib=100.0)
    assert limits.room_mib(1000.0, 950.0) == -50.0
    assert limits.room_mib(1250.0, 850.0) == -50.0
    assert limits.room_mib(1000.0, 850.0) == 50.0
    assert Limits().room_mib(1.0, 1.0) is None
    [found] = fit(facts(limits=limits))
    assert found.code == "does_not_fit" and diagnosed(found) == (
        "It does not fit: 100.0 MiB short under the tighter of budget.memory_mib=1200 and the device's 900.0 MiB (its "
        "capacity less 100.0 MiB of context)"
    )


def test_how_sure_it_is_that_it_fits() -> None:
    assert [f.code for f in fit(facts(1020.0))] == ["does_fit", "close"]
    assert [f.code for f in fit(facts(1100.0))] == ["does_fit"]
    # A CPU has no allocator between what is allocated and the device.
    assert [f.code for f in fit(facts(limits=Limits(device_mib=1020.0, reserves=False)))] == ["does_fit"]
    f = facts(1100.0)
    f.baseline.fits = False
    assert f.fits is False and [found.code for found in fit(f)] == ["does_not_fit", "yet_in_pieces"]
    assert codes(rows(f)["keep"]) == ["in_pieces"]


def test_the_floor_under_the_cap_and_the_lowest_of_those_that_are_alike() -> None:
    f = facts(150.0)
    assert (f.floor_mib, f.floor_room_mib) == (200.0, -50.0) and not feasible(f)
    for mib, direction in ((249.9, MICRO_CHECKPOINT), (200.0, ALL)):
        lowest = facts(peaks={ALL: mib}).lowest
        assert lowest is not None and lowest.direction == direction


# -- the order -------------------------------------------------------------------------------------------------------


def test_what_fits_is_kept() -> None:
    f = facts(1100.0)
    assert applying(f) == ["keep"]
    found = rows(f)
    assert found["keep"].overrides == ["strategy=baseline"] and found["keep"].because[0].numbers["room_mib"] == 100.0
    for row, saves in ((MICRO, "700.0 MiB (70 %)"), (CHECKPOINT, "600.0 MiB (60 %)"), (HYBRID, "760.0 MiB (76 %)")):
        assert codes(found[row]) == ["not_needed"] and saves in diagnosed(*found[row].because)


@pytest.mark.parametrize(("row", "cap", "changes", "why"), [
    (MICRO, 600.0, {"refused": {MICRO: "one sample already"}}, "one sample already"),
    (MICRO, 600.0, {"peaks": {MICRO: 995.0}},
     "saves only 5.0 MiB (0 %): the peak of 995.0 MiB then lies in backward"),
    (MICRO, 600.0, {"peaks": {MICRO: 700.0}},
     "not enough alone: micro_batch takes 700.0 MiB and is still 100.0 MiB short"),
    (MICRO, 600.0, {"gates": {"min_saving_mib": 800.0}}, "saves only 700.0 MiB (70 %)"),
    (CHECKPOINT, 600.0, {"refused": {CHECKPOINT: "no blocks", SELECTIVE: "no blocks"}}, "no blocks"),
    (CHECKPOINT, 600.0, {"peaks": {CHECKPOINT: 690.0}}, "not enough alone: checkpoint takes 690.0 MiB"),
    (CHECKPOINT, 600.0, {"peaks": {CHECKPOINT: 1000.0, SELECTIVE: 1000.0}}, "saves nothing"),
    (CHECKPOINT, 600.0, {"gates": {"min_throughput_ratio": 0.85}}, "leaves 0.80x of the throughput, less than"),
    (OFFLOAD, 600.0, {"refused": {OFFLOAD: "not one byte"}}, "not one byte"),
    (OFFLOAD, 600.0, {"peaks": {OFFLOAD: 700.0}}, "not enough alone"),
    (OFFLOAD, 600.0, {"host_free_mib": 500.0}, "needs 600.0 MiB of host memory, and 500.0 MiB are free here"),
    (HYBRID, 600.0, {"mild": {MICRO: 500.0}}, "one alone is enough: mild micro_batch"),
    (HYBRID, 100.0, {}, f"even {ALL} takes 240.0 MiB and is still 140.0 MiB short"),
    (HYBRID, 330.0, {"refused": dict.fromkeys((HYBRID, MICRO_CHECKPOINT, ALL), "no blocks")}, "no blocks"),
    (HYBRID, None, {"peaks": {HYBRID: 350.0, MICRO_CHECKPOINT: 300.0, ALL: 300.0}}, "no more than micro_batch alone"),
])  # fmt: skip
def test_a_row_that_is_ruled_out_says_why(row: str, cap: float | None, changes: dict[str, Any], why: str) -> None:
    found = rows(facts(cap, **changes))[row]
    assert not found.applies and why in diagnosed(*found.because)


def test_one_micro_computation_too_large() -> None:
    blocks = {CHECKPOINT: "no blocks", SELECTIVE: "no blocks"}
    f = facts(600.0, mild={MICRO: 550.0}, refused=blocks, peaks={OFFLOAD: 990.0})
    f.mildest[0].micro_batch_size = 4
    found = rows(f)[MICRO]
    assert found.setting is f.mildest[0] and applying(f) == [MICRO]
    assert diagnosed(*found.because) == (
        "8 samples at once take 1000 MiB, one at a time takes 300.0 MiB; 4 at once is the most that is predicted to "
        "fit: 550.0 MiB, 50.0 MiB to spare"
    )


def test_a_little_short_and_compute_to_spare() -> None:
    f = facts(900.0, mild={CHECKPOINT: 890.0}, refused={MICRO: "one sample"}, peaks={OFFLOAD: 995.0})
    f.mildest[0].recompute_flops_ratio = 0.06
    found = rows(f)[CHECKPOINT]
    assert found.applies and found.setting is f.mildest[0]
    assert diagnosed(*found.because) == (
        "it is 100.0 MiB short; checkpointing can save 600.0 MiB; mild checkpoint changes least of what fits: 890.0 "
        "MiB, 10.0 MiB to spare, with 6 % more FLOPs"
    )
    # A throughput floor takes the cheaper form where it fits.
    found = rows(facts(750.0, gates={"min_throughput_ratio": 0.85}))[CHECKPOINT]
    assert found.applies and found.overrides == WORDS[SELECTIVE]


def test_far_short_with_host_memory_and_link_to_spare() -> None:
    one = {MICRO: "one sample"}
    f = facts(360.0, refused=one, host_free_mib=5000.0, mild={OFFLOAD: 355.0})
    found = rows(f)[OFFLOAD]
    assert found.applies and found.overrides == WORDS[OFFLOAD] and found.cost == pytest.approx(0.4)
    assert codes(found) == ["short", "moves", "takes"] and applying(f)[0] == OFFLOAD
    assert "40.0 ms at the link's bandwidth, which could hide behind 100.0 ms" in diagnosed(*found.because)
    slow = rows(facts(360.0, refused=one, compute_ms=20.0))[OFFLOAD]
    assert "may not hide whole behind 20.0 ms" in diagnosed(*slow.because)
    f = facts(600.0, mild={MICRO: 500.0, CHECKPOINT: 400.0})
    assert codes(rows(f)[OFFLOAD])[-2:] == ["fits_without_moving"] * 2
    assert applying(f) == [MICRO, CHECKPOINT, OFFLOAD]
    f = facts(360.0, refused=one)
    for s in f.extremes:
        s.transfer_ms = None
    found = rows(f)[OFFLOAD]
    assert "the link's bandwidth is not known" in diagnosed(*found.because) and found.cost is None


def test_none_alone_enough() -> None:
    f = facts(330.0, refused=dict.fromkeys((MICRO, MICRO_CHECKPOINT, ALL), "one sample"))
    assert applying(f) == [HYBRID]
    found = rows(f)[HYBRID]
    assert found.overrides == WORDS[HYBRID] and codes(found) == ["enough_together"]
    # Of several together the cheapest that fits.
    for cap, direction in ((280.0, MICRO_CHECKPOINT), (245.0, ALL)):
        assert applying(facts(cap)) == [HYBRID] and rows(facts(cap))[HYBRID].overrides == WORDS[direction]
    f = facts(245.0, host_free_mib=100.0)
    assert not rows(f)[HYBRID].applies and not feasible(f)


@pytest.mark.parametrize(("gate", "asked", "code"), [
    ("min_throughput_ratio", 0.95, "little_throughput"),
    ("min_samples_per_s", 100.0, "only_measured"),
    ("max_eval_loss_ratio", 1.01, "within_seeds"),
    ("max_eval_loss", 3.2, "only_measured"),
])  # fmt: skip
def test_a_strict_gate_wants_one_change_at_a_time(gate: str, asked: float, code: str) -> None:
    f = facts(600.0, gates={gate: asked}, mild={MICRO: 500.0})
    found = rows(f)["one_at_a_time"]
    assert applying(f)[0] == "one_at_a_time" and codes(found) == [code]
    assert found.overrides[:2] == WORDS[MICRO] and "measure.repeats=5" in found.overrides
    assert ("measure.seeds=5" in found.overrides) == ("loss" in gate)
    f = facts(1100.0, gates={gate: asked})
    assert applying(f) == ["keep", "one_at_a_time"]
    assert rows(f)["one_at_a_time"].overrides[0] == "strategy=baseline"


def test_a_wide_gate_does_not() -> None:
    wide = {"min_throughput_ratio": 0.7, "max_eval_loss_ratio": 1.05}
    assert codes(rows(facts(600.0, gates=wide))["one_at_a_time"]) == ["gates_leave_room"]
    assert codes(rows(facts(600.0))["one_at_a_time"]) == ["no_gate"]


def optimizer_bound(cap: float | None) -> Facts:
    peaks = dict.fromkeys(PEAKS, 1000.0)
    return facts(cap, at=OPTIMIZER, peaks=peaks, floor=floor(1000.0), what_if=[SGD, FUSED])


def test_a_peak_that_is_not_from_activations_wants_another_change() -> None:
    f = optimizer_bound(900.0)
    assert applying(f) == ["other"] and not feasible(f)
    found = rows(f)["other"]
    assert found.overrides == ["mode=diagnose", FUSED.override], "the one that costs nothing comes before the larger"
    assert codes(found) == ["baseline_in_optimizer", "change_fits"]
    # A fused optimizer is not enough here.
    assert rows(optimizer_bound(600.0))["other"].overrides == ["mode=diagnose", SGD.override]
    assert applying(optimizer_bound(None)) == ["other"]
    assert applying(optimizer_bound(1100.0)) == ["keep"]


def test_where_the_strategies_stop_the_change_is_one_beside_them() -> None:
    f = facts(950.0, peaks=dict.fromkeys(PEAKS, 940.0), floor=floor(930.0), what_if_lowest=[FUSED])
    for s in f.extremes:
        s.peak_phase = "optimizer"
    assert answer(f)[0] == "in part"
    found = rows(f)["other"]
    assert applying(f)[-1] == "other"
    assert "with micro_batch the peak of 940.0 MiB lies in the optimizer's step" in diagnosed(*found.because)


def test_nothing_fits_and_nothing_is_known_that_helps() -> None:
    f = facts(100.0)
    assert applying(f) == ["other"] and not feasible(f)
    assert codes(rows(f)["other"]) == ["none_fits", "smaller_or_larger"]
    assert not rows(facts(600.0))["other"].applies


def test_without_a_cap_the_order_is_by_saving_per_cost() -> None:
    f = facts(mild={MICRO: 500.0})
    f.mildest[0].micro_batch_size = 2
    assert applying(f) == [MICRO, CHECKPOINT, OFFLOAD, HYBRID]
    assert "2 at once take 500.0 MiB" in diagnosed(*rows(f)[MICRO].because)
    # Copies that hide cost less than a quarter of the FLOPs again.
    assert applying(facts(compute_ms=1000.0)) == [MICRO, OFFLOAD, CHECKPOINT, HYBRID]
    assert applying(facts(compute_ms=None)) == [MICRO, CHECKPOINT, OFFLOAD, HYBRID]


def test_what_a_setting_pays_with() -> None:
    f = facts()
    paid = {s.direction: diagnosed(of(f, "pays", s)) for s in f.extremes}
    assert paid[MICRO] == "8 micro-steps"
    assert paid[SELECTIVE] == "elementwise operators again"
    assert paid[CHECKPOINT] == "25 % more FLOPs"
    assert paid[ALL] == "8 micro-steps, 25 % more FLOPs, moves 1200 MiB (40.0 ms), 600.0 MiB on the host"


def test_a_diagnosis_goes_to_json_and_back() -> None:
    f = facts(600.0, mild={MICRO: 500.0}, what_if=[FUSED], gates={"min_throughput_ratio": 0.9})
    kind, because = answer(f)
    found = Diagnosis(kind, because, f, order(f), feasible(f))
    again = from_dict(Diagnosis, to_dict(found))
    assert again == found
    assert again.facts is not None and again.facts.fits is False
    assert again.first is not None and again.first.row == "one_at_a_time"
