"""What limits a whole comparison is said from the numbers alone, and only where they bear it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sweep.decide.causes import explain_comparison
from sweep.results import Peak, TrialResult, WhatIf
from tests.made_up import prediction, sweep_of_six, trial

LASTING = {"parameter": 1000.0, "optimizer_state": 2000.0}
#: The optimizer's step takes 5000 MiB in every trial: a list of temporaries as large as the parameters.
PHASE_PEAKS = {"forward": 4000.0, "optimizer": 5000.0}
BASELINE = Peak(
    6000.0,
    "backward",
    "aten._log_softmax_backward_data",
    "",
    {**LASTING, "activation": 2900.0, "temporary": 100.0},
    phase_peaks_mib={**PHASE_PEAKS, "backward": 6000.0},
    temporary_mib={"backward": 100.0},
)
STOPPED = Peak(
    5000.0,
    "optimizer",
    "aten._foreach_sqrt",
    "",
    {**LASTING, "gradient": 1000.0, "temporary": 1000.0},
    phase_peaks_mib={**PHASE_PEAKS, "backward": 4200.0},
    temporary_mib={"optimizer": 1000.0},
)


def predicted(strategy: str, peak: Peak, allocated: float | None = None, **changes: Any) -> TrialResult:
    found = prediction(allocated or peak.mib, peak=peak, **changes)
    return trial(strategy, peak.mib, evidence="predicted", mode="predict", prediction=found)


def fused(allocated: float, saved: float, off_phase: float) -> WhatIf:
    return WhatIf(
        "workload.optimizer.implementation=fused", allocated, allocated, saved, "backward", "aten.add",
        phase_saved_mib=off_phase,
    )  # fmt: skip


def comparison() -> list[TrialResult]:
    what_if = [fused(4300.0, 700.0, 1000.0)]
    return [
        predicted("baseline", BASELINE),
        predicted("checkpoint", STOPPED, 5003.0, what_if=what_if),
        predicted("offload", STOPPED, 5010.0, what_if=[fused(4310.0, 700.0, 1000.0)]),
        predicted("hybrid", STOPPED, 5004.0),
    ]


def test_trials_that_stop_in_the_optimizer_are_named_together_with_the_floor_and_what_would_lower_it() -> None:
    assert explain_comparison(comparison(), 0) == [
        "The peak of baseline, 6000 MiB (predicted), lies in backward (_log_softmax_backward_data): 48 % activations, "
        "33 % optimizer state, 17 % parameters.",
        "checkpoint, offload and hybrid all stop near 5004 MiB (predicted): with each of them the peak lies in the "
        "optimizer's foreach temporaries (aten._foreach_sqrt), 1000 MiB, no longer in the activations.",
        "No activation strategy goes below this: no activations are left at that moment, and the 2000 MiB optimizer "
        "state, 1000 MiB parameters, 1000 MiB optimizer temporaries and 1000 MiB gradients are there in the "
        "optimizer's step of every trial.",
        "A fused optimizer (workload.optimizer.implementation=fused) is predicted to lower the optimizer's step by "
        "1000 MiB, about one list of the parameters' size (1000 MiB); the peak of checkpoint then falls by 700.0 MiB "
        "to 4300 MiB and lies in backward (add).",
    ]


def test_a_change_that_no_other_moment_limits_lowers_the_peak_itself() -> None:
    results = comparison()[:2]
    assert results[1].prediction is not None
    results[1].prediction.what_if = [fused(4010.0, 993.0, 1000.0)]
    assert explain_comparison(results, None)[-1] == (
        "A fused optimizer (workload.optimizer.implementation=fused) is predicted to lower the peak of checkpoint by "
        "993.0 MiB, about one list of the parameters' size (1000 MiB), to 4010 MiB."
    )


def test_a_saving_of_another_size_is_not_called_a_list_of_the_parameters() -> None:
    results = comparison()[:2]
    assert results[1].prediction is not None
    results[1].prediction.what_if = [fused(4600.0, 400.0, 400.0)]
    last = explain_comparison(results, None)[-1]
    assert "by 400.0 MiB (the parameters take 1000 MiB), to 4600 MiB" in last and "about one list" not in last


def test_another_change_than_a_fused_optimizer_is_named_by_what_to_type() -> None:
    results = comparison()[:2]
    assert results[1].prediction is not None
    change = replace(fused(3000.0, 2003.0, 2003.0), override="workload.dtype=bf16")
    results[1].prediction.what_if = [change]
    last = explain_comparison(results, None)[-1]
    assert last.startswith("Beside the strategies, workload.dtype=bf16 is predicted to lower the peak of checkpoint by")


def test_one_trial_alone_in_the_optimizer_is_said_too() -> None:
    words = explain_comparison(comparison()[:2], 0)
    assert words[1].startswith("checkpoint stops at 5003 MiB (predicted): with it the peak lies in the optimizer's")


def test_no_floor_is_claimed_where_activations_are_left_or_a_trial_takes_less_there() -> None:
    left = replace(STOPPED, at_peak_mib={**STOPPED.at_peak_mib, "activation": 200.0, "temporary": 800.0})
    results = [predicted("baseline", BASELINE), predicted("checkpoint", left), predicted("hybrid", left)]
    assert not any("No activation strategy" in words for words in explain_comparison(results, 0))
    less = replace(BASELINE, phase_peaks_mib={"optimizer": 4000.0, "backward": 6000.0})
    results = [predicted("baseline", less), *comparison()[1:]]
    assert not any("No activation strategy" in words for words in explain_comparison(results, 0))


def test_a_loop_over_the_parameters_has_no_foreach_temporaries() -> None:
    small = replace(STOPPED, operator="aten.sqrt")
    words = explain_comparison([predicted("baseline", BASELINE), predicted("checkpoint", small)], 0)[1]
    assert "the optimizer's temporaries (aten.sqrt), 1000 MiB" in words


def test_a_baseline_that_is_in_the_optimizer_already_is_said_so() -> None:
    results = [predicted("baseline", STOPPED), predicted("checkpoint", STOPPED), predicted("offload", STOPPED)]
    words = explain_comparison(results, 0)
    assert words[1].startswith(
        "baseline, checkpoint and offload all stop near 5000 MiB (predicted): already the baseline's peak"
    )


def test_nothing_of_the_optimizer_is_said_where_no_peak_lies_in_it() -> None:
    words = " ".join(explain_comparison(sweep_of_six(), 0))
    assert "optimizer's" not in words and "No activation strategy" not in words and "fused" not in words


def test_trials_that_stop_together_elsewhere_say_what_is_left() -> None:
    block = Peak(4100.0, "backward", "aten.mm", "blocks.6.mlp", {**LASTING, "gradient": 100.0, "temporary": 1000.0},
                 temporary_mib={"recompute": 900.0, "backward": 100.0})  # fmt: skip
    other = replace(block, module="blocks.7.mlp", mib=4120.0)
    results = [predicted("baseline", BASELINE), predicted("checkpoint", block), predicted("hybrid", other)]
    assert explain_comparison(results, 0)[1] == (
        "checkpoint and hybrid both stop near 4120 MiB (predicted): the peak of both lies in backward (mm of "
        "blocks.*.mlp); left there are 49 % optimizer state, 24 % parameters, 22 % recomputed activations."
    )


@pytest.mark.parametrize(("other", "together"), [(4140.0, True), (4142.0, False)])
def test_peaks_within_one_percent_are_one_height(other: float, together: bool) -> None:
    peak = Peak(4100.0, "backward", "aten.mm", "blocks.6", {**LASTING, "temporary": 1100.0})
    results = [
        predicted("baseline", BASELINE),
        predicted("checkpoint", peak),
        predicted("hybrid", peak, other),
    ]
    assert any("both stop" in words for words in explain_comparison(results, 0)) is together


def test_a_micro_batch_of_the_whole_batch_changes_nothing() -> None:
    same = predicted("micro_batch", BASELINE)
    same.config["strategy"]["micro_batch_size"] = 16
    assert explain_comparison([predicted("baseline", BASELINE), same], 0)[-1] == (
        "micro_batch changes nothing at the peak: as high and in the same moment (the micro-batch is the whole global "
        "batch)."
    )


def test_the_preferred_trials_limit_comes_first() -> None:
    block = Peak(4100.0, "backward", "aten.mm", "blocks.6", {**LASTING, "temporary": 1100.0})
    results = [*comparison(), predicted("a", block), predicted("b", block)]
    assert explain_comparison(results, None)[1].startswith("a and b both stop")
    assert explain_comparison(results, 3)[1].startswith("checkpoint, offload and hybrid all stop")


def test_what_each_trial_pays_is_said_with_its_largest_part() -> None:
    results = sweep_of_six()
    by_name = {r.name: r.measurement for r in results}
    checkpoint, offload = by_name["checkpoint"], by_name["offload"]
    assert checkpoint is not None and offload is not None
    checkpoint.phases_ms = {"data": 1.2, "forward": 39.0, "backward": 71.0, "optimizer": 7.1, "recompute": 34.0}
    offload.phases_ms = {"data": 1.2, "forward": 39.0, "backward": 71.0, "optimizer": 7.1, "transfer": 53.6}
    last = explain_comparison(results, 0)[-1]
    assert last.startswith("Step time against the baseline's 118.2 ms (on this CPU): ")
    assert "checkpoint +34.1 ms (+29 %), 34.0 ms of it recomputation" in last
    assert "offload +53.7 ms (+45 %), 53.6 ms of it transfer that was not hidden" in last


def test_a_time_inside_the_noise_is_nothing() -> None:
    results = [trial("baseline", 300.0, 100.0), trial("checkpoint", 100.0, 100.5)]
    assert explain_comparison(results, 0)[-1].endswith("checkpoint nothing beyond the noise.")


def test_trials_without_a_known_peak_say_nothing() -> None:
    assert explain_comparison([trial("baseline", outcome="oom_device")], None) == []
    assert explain_comparison([], None) == []


def test_a_trial_that_was_only_predicted_says_nothing_beside_measured_ones() -> None:
    results = [trial("baseline", 312.4, 118.2), replace(predicted("checkpoint", STOPPED), outcome="over_budget")]
    assert not any("checkpoint" in words for words in explain_comparison(results, 0))
