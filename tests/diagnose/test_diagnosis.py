"""What a diagnosis decides: answers, floor, limits and every row of the order, from made-up facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_up import peak, prediction

from sweep.diagnose.advice import ROWS, answer, feasible, fit_lines, floor_lines, order, pays_with
from sweep.diagnose.facts import (
    ALL,
    CHECKPOINT,
    HYBRID,
    MICRO,
    MICRO_CHECKPOINT,
    OFFLOAD,
    SELECTIVE,
    Advice,
    Diagnosis,
    Facts,
    Floor,
    Gates,
    Limits,
    Setting,
)
from sweep.results import Peak, WhatIf, from_dict, lies_in_activations, to_dict

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


def floor(mib: float = 200.0) -> Floor:
    return Floor(mib, {"parameter": 0.25 * mib, "gradient": 0.25 * mib, "optimizer_state": 0.5 * mib}, how="made up")


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
    baseline = prediction(PEAK, fits, cap, peak=at, reserved_mib=PEAK, transfer_one_way_ms=20.0)
    extremes = [setting(d, mib, limits) for d, mib in (PEAKS | (peaks or {})).items() if d not in (refused or {})]
    extremes += [Setting(d, WORDS[d], d, why_not=why) for d, why in (refused or {}).items()]
    values: dict[str, Any] = {
        "global_batch_size": 8,
        "blocks": 4,
        "compute_ms": 100.0,
        "words": ["workload=gpt_tiny"],
        "mildest": [setting(d, mib, limits, name=f"mild {d}") for d, mib in (mild or {}).items()],
        "floor": floor(),
    }
    return Facts("gpt_tiny", "card", baseline, limits, extremes=extremes, **(values | changes))


def rows(f: Facts) -> dict[str, Advice]:
    found = order(f)
    assert len({a.row for a in found}) == len(ROWS) == len(found)
    applying = [a.applies for a in found]
    assert applying == sorted(applying, reverse=True), "what applies comes first"
    for advice in found:
        assert advice.why and advice.watch and advice.not_conclude
        assert advice.applies or not advice.words
    return {a.row: a for a in found}


def applying(f: Facts) -> list[str]:
    return [a.row for a in order(f) if a.applies]


# -- the answer ------------------------------------------------------------------------------------------------------


def test_yes_where_most_of_the_peak_is_activations_above_a_low_floor() -> None:
    assert answer(facts()) == ("yes", "Yes: activations are 80 % of the baseline's peak of 1000 MiB.")


def test_temporaries_beside_the_activations_are_named_where_they_are_many() -> None:
    at = peak(PEAK, parameter=100.0, activation=500.0, temporary=400.0)
    kind, sentence = answer(facts(at=at))
    assert kind == "yes"
    assert (
        sentence
        == "Yes: activations are 50 % of the baseline's peak of 1000 MiB, and the temporaries beside them 40 %."
    )


def test_no_where_the_optimizers_step_is_the_peak() -> None:
    at = peak(PEAK, "optimizer", parameter=200.0, gradient=200.0, optimizer_state=400.0, temporary=200.0)
    kind, sentence = answer(facts(at=at, floor=floor(1000.0)))
    assert kind == "no"
    assert "lies in the optimizer's step" in sentence
    assert "made of parameters, gradients, optimizer state and temporaries" in sentence


def test_no_where_what_lasts_fills_a_peak_in_backward() -> None:
    at = peak(PEAK, parameter=300.0, optimizer_state=500.0, activation=150.0, temporary=50.0)
    kind, sentence = answer(facts(at=at))
    assert kind == "no"
    assert sentence == (
        "No: 80 % of the baseline's peak of 1000 MiB is parameters and optimizer state; activations are 15 %."
    )


def test_in_part_where_the_floor_is_nearly_as_high() -> None:
    kind, sentence = answer(facts(floor=floor(950.0)))
    assert kind == "in part"
    assert "950.0 MiB whatever the strategy" in sentence
    assert "none can save more than 50.0 MiB (5 %)" in sentence


def test_in_part_where_the_activations_are_less_than_half() -> None:
    at = peak(PEAK, parameter=300.0, optimizer_state=300.0, activation=350.0, temporary=50.0)
    kind, sentence = answer(facts(at=at, floor=floor(300.0)))
    assert kind == "in part"
    assert sentence == (
        "In part: activations are 35 % of the baseline's peak of 1000 MiB; 60 % is parameters and optimizer state."
    )


def test_where_a_peak_lies() -> None:
    assert lies_in_activations(peak(300.0))
    assert not lies_in_activations(peak(300.0, "optimizer"))
    assert not lies_in_activations(peak(300.0, parameter=200.0, optimizer_state=50.0, activation=50.0))


# -- limits and floor ------------------------------------------------------------------------------------------------


def test_without_a_cap_a_budget_is_asked_for() -> None:
    f = facts()
    assert f.fits is None and f.room_mib is None and feasible(f)
    assert fit_lines(f) == [
        "No cap is known: neither budget.memory_mib nor the device's capacity is set. Add one, such as "
        "budget.memory_mib=500, and this says what fits."
    ]


def test_a_budget_caps_what_is_allocated_and_a_device_what_is_reserved() -> None:
    limits = Limits(budget_mib=1200.0, device_mib=900.0, capacity_mib=1000.0, context_mib=100.0)
    assert limits.room_mib(1000.0, 950.0) == -50.0
    assert limits.room_mib(1250.0, 850.0) == -50.0
    assert limits.room_mib(1000.0, 850.0) == 50.0
    assert Limits().room_mib(1.0, 1.0) is None
    assert fit_lines(facts(limits=limits)) == [
        "It does not fit: allocated 1000 MiB of budget.memory_mib=1200: 200.0 MiB to spare.",
        "Reserved 1000 MiB of the device's 900.0 MiB (1000 MiB less 100.0 MiB of context): 100.0 MiB short.",
    ]


def test_a_cpu_reserves_nothing() -> None:
    lines = fit_lines(facts(limits=Limits(device_mib=1020.0, reserves=False)))
    assert lines == ["It fits: allocated 1000 MiB of the device's 1020 MiB: 20.0 MiB to spare."]


def test_a_card_that_is_nearly_full_is_told_to_be_tried() -> None:
    assert "off by up to 5 %" in fit_lines(facts(1020.0))[-1]
    assert len(fit_lines(facts(1100.0))) == 1


def test_room_in_pieces_does_not_fit() -> None:
    f = facts(1100.0)
    f.baseline.fits = False
    assert f.fits is False and f.room_mib == 100.0
    assert "in pieces" in " ".join(fit_lines(f))
    assert "short of unbroken memory" in rows(f)["keep"].why


def test_a_floor_beyond_the_cap_is_said_plainly() -> None:
    limits = Limits(device_mib=150.0)
    f = facts(150.0, floor=replace(floor(), room_mib=limits.room_mib(200.0, 200.0)))
    assert "Even the floor does not fit, by 50.0 MiB: no activation strategy will do here." in floor_lines(f)
    assert not feasible(f)
    assert any("reserved at least 200.0 MiB" in line for line in floor_lines(f))


def test_the_lowest_is_the_simplest_of_those_that_are_alike() -> None:
    f = facts(peaks={ALL: 249.9})
    assert f.lowest is not None and f.lowest.direction == MICRO_CHECKPOINT
    f = facts(peaks={ALL: 200.0})
    assert f.lowest is not None and f.lowest.direction == ALL
    assert "The lowest predicted for a strategy is 200.0 MiB" in floor_lines(f)[-1]


# -- the order -------------------------------------------------------------------------------------------------------


def test_what_fits_is_kept() -> None:
    f = facts(1100.0)
    assert applying(f) == ["keep"]
    found = rows(f)
    assert found["keep"].words == ["strategy=baseline"] and "100.0 MiB to spare" in found["keep"].why
    for row, saves in ((MICRO, "700.0 MiB (70 %)"), (CHECKPOINT, "600.0 MiB (60 %)"), (HYBRID, "760.0 MiB (76 %)")):
        assert found[row].why.startswith("not needed") and saves in found[row].why


def test_one_micro_computation_too_large() -> None:
    f = facts(
        600.0, mild={MICRO: 550.0}, refused={CHECKPOINT: "no blocks", SELECTIVE: "no blocks"}, peaks={OFFLOAD: 990.0}
    )
    f.mildest[0].micro_batch_size = 4
    found = rows(f)[MICRO]
    assert found.applies and found.setting is f.mildest[0]
    assert found.why == (
        "8 samples at once take 1000 MiB, one at a time takes 300.0 MiB; 4 at once is the most that is predicted to "
        "fit: 550.0 MiB, 50.0 MiB to spare"
    )
    assert applying(f) == [MICRO]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"refused": {MICRO: "the global batch is one sample already"}}, "the global batch is one sample already"),
        ({"peaks": {MICRO: 995.0}}, "saves only 5.0 MiB (0 %): the peak of 995.0 MiB then lies in backward"),
        ({"peaks": {MICRO: 700.0}}, "not enough alone: micro_batch takes 700.0 MiB and is still 100.0 MiB short"),
        ({"gates": Gates(min_saving_mib=800.0)}, "saves only 700.0 MiB (70 %)"),
    ],
)
def test_no_micro_batches(changes: dict[str, Any], why: str) -> None:
    found = rows(facts(600.0, **changes))[MICRO]
    assert not found.applies and why in found.why


def test_a_little_short_and_compute_to_spare() -> None:
    f = facts(900.0, mild={CHECKPOINT: 890.0}, refused={MICRO: "one sample"}, peaks={OFFLOAD: 995.0})
    f.mildest[0].recompute_flops_ratio = 0.06
    found = rows(f)[CHECKPOINT]
    assert found.applies and found.setting is f.mildest[0]
    assert "it is 100.0 MiB short, and checkpointing can save 600.0 MiB" in found.why
    assert "890.0 MiB, 10.0 MiB to spare, with 6 % more FLOPs" in found.why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"refused": {CHECKPOINT: "no blocks", SELECTIVE: "no blocks"}}, "no blocks"),
        ({"peaks": {CHECKPOINT: 690.0}}, "not enough alone: checkpoint takes 690.0 MiB and is still 90.0 MiB short"),
        ({"peaks": {CHECKPOINT: 1000.0, SELECTIVE: 1000.0}}, "saves nothing"),
        ({"gates": Gates(min_throughput_ratio=0.85)}, "leaves 0.80x of the throughput, less than"),
    ],
)
def test_no_checkpointing(changes: dict[str, Any], why: str) -> None:
    found = rows(facts(600.0, **changes))[CHECKPOINT]
    assert not found.applies and why in found.why


def test_a_throughput_floor_takes_the_cheaper_form_of_checkpointing_where_it_fits() -> None:
    f = facts(750.0, gates=Gates(min_throughput_ratio=0.85))
    found = rows(f)[CHECKPOINT]
    assert found.applies and found.words == WORDS[SELECTIVE]


def test_far_short_with_host_memory_and_link_to_spare() -> None:
    f = facts(360.0, refused={MICRO: "one sample"}, host_free_mib=5000.0, mild={OFFLOAD: 355.0})
    found = rows(f)[OFFLOAD]
    assert found.applies and found.words == WORDS[OFFLOAD] and found.cost == pytest.approx(0.4)
    assert "it is 640.0 MiB short" in found.why
    assert "40.0 ms at the link's bandwidth, which could hide behind 100.0 ms of computing" in found.why
    assert applying(f)[0] == OFFLOAD
    slow = rows(facts(360.0, refused={MICRO: "one sample"}, compute_ms=20.0))[OFFLOAD]
    assert "may not hide whole behind 20.0 ms" in slow.why
    f = facts(600.0, mild={MICRO: 500.0, CHECKPOINT: 400.0})
    assert "not far short, since mild micro_batch or mild checkpoint fits without" in rows(f)[OFFLOAD].why
    assert applying(f) == [MICRO, CHECKPOINT, OFFLOAD]


def test_a_link_that_is_not_known_is_said_so() -> None:
    f = facts(360.0, refused={MICRO: "one sample"})
    for s in f.extremes:
        s.transfer_ms = None
    found = rows(f)[OFFLOAD]
    assert "the link's bandwidth is not known" in found.why and found.cost is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"refused": {OFFLOAD: "NothingOffloaded: not one byte"}}, "not one byte"),
        ({"peaks": {OFFLOAD: 700.0}}, "not enough alone"),
        ({"host_free_mib": 500.0}, "needs 600.0 MiB of host memory, and 500.0 MiB are free here"),
    ],
)
def test_no_offload(changes: dict[str, Any], why: str) -> None:
    found = rows(facts(600.0, **changes))[OFFLOAD]
    assert not found.applies and why in found.why


def test_none_alone_enough() -> None:
    f = facts(330.0, refused={MICRO: "one sample", MICRO_CHECKPOINT: "one sample", ALL: "one sample"})
    assert applying(f) == [HYBRID]
    found = rows(f)[HYBRID]
    assert found.words == WORDS[HYBRID] and "nothing that applies is enough alone" in found.why
    assert "moves 1200 MiB a step" in found.why


def test_of_several_together_the_cheapest_that_fits() -> None:
    f = facts(280.0)
    assert applying(f) == [HYBRID]
    assert rows(f)[HYBRID].words == WORDS[MICRO_CHECKPOINT]
    f = facts(245.0)
    assert rows(f)[HYBRID].words == WORDS[ALL]
    f = facts(245.0, host_free_mib=100.0)
    assert not rows(f)[HYBRID].applies and not feasible(f)


def test_no_two_where_one_is_enough_or_none_fits() -> None:
    found = rows(facts(600.0, mild={MICRO: 500.0}))[HYBRID]
    assert not found.applies and found.why == "one alone is enough: mild micro_batch"
    found = rows(facts(100.0))[HYBRID]
    assert not found.applies and found.why == f"even {ALL} takes 240.0 MiB and is still 140.0 MiB short"
    found = rows(facts(330.0, refused=dict.fromkeys((HYBRID, MICRO_CHECKPOINT, ALL), "no blocks")))[HYBRID]
    assert not found.applies and found.why == "no blocks"


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        (Gates(min_throughput_ratio=0.95), "leaves 5 % of the throughput"),
        (Gates(min_samples_per_s=100.0), "can be told only by measuring"),
        (Gates(max_eval_loss_ratio=1.01), "no more than seeds may differ by"),
        (Gates(max_eval_loss=3.2), "can be told only by measuring"),
    ],
)
def test_a_strict_gate_wants_one_change_at_a_time(gates: Gates, words: str) -> None:
    f = facts(600.0, gates=gates, mild={MICRO: 500.0})
    found = rows(f)["one_at_a_time"]
    assert applying(f)[0] == "one_at_a_time" and words in found.why
    assert found.words[:2] == WORDS[MICRO] and "measure.repeats=5" in found.words
    about_quality = gates.max_eval_loss_ratio is not None or gates.max_eval_loss is not None
    assert ("measure.seeds=5" in found.words) == about_quality
    f = facts(1100.0, gates=gates)
    assert applying(f) == ["keep", "one_at_a_time"]
    assert rows(f)["one_at_a_time"].words[0] == "strategy=baseline"


def test_a_wide_gate_does_not() -> None:
    f = facts(600.0, gates=Gates(min_throughput_ratio=0.7, max_eval_loss_ratio=1.05))
    assert not rows(f)["one_at_a_time"].applies and rows(f)["one_at_a_time"].why == "the gates leave room"
    assert rows(facts(600.0))["one_at_a_time"].why == "no gate on throughput or quality is set"


def optimizer_bound(cap: float | None) -> Facts:
    at = peak(PEAK, "optimizer", parameter=200.0, gradient=200.0, optimizer_state=400.0, temporary=200.0)
    return facts(cap, at=at, peaks=dict.fromkeys(PEAKS, 1000.0), floor=floor(1000.0), what_if=[SGD, FUSED])


def test_a_peak_that_is_not_from_activations_wants_another_change() -> None:
    f = optimizer_bound(900.0)
    assert applying(f) == ["other"]
    found = rows(f)["other"]
    assert found.words == ["mode=diagnose", FUSED.override], "the one that costs nothing comes before the larger"
    assert "the baseline's peak lies in the optimizer's step" in found.why and "and that fits" in found.why
    assert not feasible(f)
    # A fused optimizer is not enough here.
    assert rows(optimizer_bound(600.0))["other"].words == ["mode=diagnose", SGD.override]
    assert applying(optimizer_bound(None)) == ["other"]
    assert applying(optimizer_bound(1100.0)) == ["keep"]


def test_where_the_strategies_stop_the_change_is_one_beside_them() -> None:
    f = facts(950.0, peaks=dict.fromkeys(PEAKS, 940.0), floor=floor(930.0), what_if_lowest=[FUSED])
    for s in f.extremes:
        s.peak_phase = "optimizer"
    assert answer(f)[0] == "in part"
    found = rows(f)["other"]
    assert found.applies and applying(f)[-1] == "other"
    assert "with micro_batch the peak of 940.0 MiB lies in the optimizer's step" in found.why


def test_nothing_fits_and_nothing_is_known_that_helps() -> None:
    f = facts(100.0)
    assert applying(f) == ["other"] and not feasible(f)
    assert "take a smaller model or a larger device" in rows(f)["other"].why
    assert not rows(facts(600.0))["other"].applies


def test_without_a_cap_the_order_is_by_saving_per_cost() -> None:
    f = facts(mild={MICRO: 500.0})
    f.mildest[0].micro_batch_size = 2
    assert applying(f) == [MICRO, CHECKPOINT, OFFLOAD, HYBRID]
    assert "2 at once take 500.0 MiB" in rows(f)[MICRO].why
    # Copies that hide cost less than a quarter of the FLOPs again.
    assert applying(facts(compute_ms=1000.0)) == [MICRO, OFFLOAD, CHECKPOINT, HYBRID]
    assert applying(facts(compute_ms=None)) == [MICRO, CHECKPOINT, OFFLOAD, HYBRID]


def test_without_a_cap_two_are_tried_only_where_they_save_more_than_one() -> None:
    f = facts(peaks={HYBRID: 350.0, MICRO_CHECKPOINT: 300.0, ALL: 300.0})
    found = rows(f)[HYBRID]
    assert not found.applies and "saves no more than micro_batch alone" in found.why
    assert rows(facts())[HYBRID].applies


def test_what_a_setting_pays_with() -> None:
    f = facts()
    paid = {s.direction: pays_with(s) for s in f.extremes}
    assert paid[MICRO] == "8 micro-steps"
    assert paid[SELECTIVE] == "elementwise operators again"
    assert paid[CHECKPOINT] == "25 % more FLOPs"
    assert paid[OFFLOAD] == "moves 1200 MiB (40.0 ms), 600.0 MiB on the host"
    assert paid[ALL] == "8 micro-steps, 25 % more FLOPs, moves 1200 MiB (40.0 ms), 600.0 MiB on the host"


def test_a_diagnosis_goes_to_json_and_back() -> None:
    f = facts(600.0, mild={MICRO: 500.0}, what_if=[FUSED], gates=Gates(min_throughput_ratio=0.9))
    kind, sentence = answer(f)
    found = Diagnosis(kind, sentence, fit_lines(f), f, order(f), feasible(f))
    again = from_dict(Diagnosis, to_dict(found))
    assert again == found
    assert again.facts is not None and again.facts.fits is False
    assert again.first is not None and again.first.row == "one_at_a_time"
