"""The change of a peak closes, is told apart by what was alive and by the moment, and says what does not add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sweep.decide.causes import OPTIMIZER_TEMPORARIES, account_of, explain_pair, parts_of, peak_change
from sweep.results import Change, Peak, Prediction, TrialResult, from_dict, to_dict
from tests.made_up import prediction, trial

BEFORE = Peak(
    mib=300.0,
    phase="backward",
    operator="aten._log_softmax_backward_data",
    module="head",
    at_peak_mib={"parameter": 50.0, "optimizer_state": 100.0, "activation": 130.0, "temporary": 20.0},
    phase_peaks_mib={"forward": 280.0, "backward": 300.0, "optimizer": 252.0},
    temporary_mib={"backward": 20.0},
)
IN_OPTIMIZER = Peak(
    mib=252.0,
    phase="optimizer",
    operator="aten._foreach_sqrt",
    module="",
    at_peak_mib={"parameter": 50.0, "gradient": 50.0, "optimizer_state": 100.0, "temporary": 52.0},
    phase_peaks_mib={"forward": 170.0, "backward": 210.0, "optimizer": 252.0},
    temporary_mib={"optimizer": 50.0, "forward": 2.0},
)
RECOMPUTING = Peak(
    mib=190.0,
    phase="backward",
    operator="aten.mm",
    module="blocks.3.mlp",
    at_peak_mib={"parameter": 50.0, "gradient": 5.0, "optimizer_state": 100.0, "activation": 5.0, "temporary": 30.0},
    phase_peaks_mib={"forward": 170.0, "backward": 190.0, "recompute": 185.0, "optimizer": 150.0},
    temporary_mib={"recompute": 20.0, "transfer": 4.0, "backward": 6.0},
)


def measured(strategy: str, peak: Peak | None, total: float | None = None, evidence: str = "cpu") -> TrialResult:
    height = total if total is not None else peak.mib if peak is not None else 0.0
    return trial(strategy, height, evidence=evidence, measure={"peak": peak})


def predicted(strategy: str, peak: Peak, allocated_mib: float) -> TrialResult:
    found: Prediction = prediction(allocated_mib, peak=peak)
    return trial(strategy, 1.0, evidence="predicted", mode="predict", prediction=found)


def peak_of(baseline: TrialResult, candidate: TrialResult) -> Change:
    found = explain_pair(baseline, candidate).peak
    assert found is not None
    return found


def by_name(found: Change) -> dict[str, float]:
    return {part.name: part.value for part in found.parts}


def test_on_a_cpu_the_parts_sum_to_the_change_exactly() -> None:
    found = peak_of(measured("baseline", BEFORE), measured("checkpoint", RECOMPUTING))
    assert found.total == -110.0
    assert sum(part.value for part in found.parts) == found.total
    assert found.residual == 0 and found.closes


def test_parts_are_told_apart_by_what_made_the_temporaries_and_the_largest_comes_first() -> None:
    found = peak_of(measured("baseline", BEFORE), measured("checkpoint", RECOMPUTING))
    assert by_name(found) == {
        "activations": -125.0,
        "recomputed activations": 20.0,
        "temporaries": -14.0,
        "gradients": 5.0,
        "tensors brought back": 4.0,
    }
    assert [abs(p.value) for p in found.parts] == sorted((abs(p.value) for p in found.parts), reverse=True)


def test_temporaries_before_and_optimizer_temporaries_after_are_two_parts() -> None:
    found = by_name(peak_of(measured("baseline", BEFORE), measured("checkpoint", IN_OPTIMIZER)))
    assert found[OPTIMIZER_TEMPORARIES] == 50.0
    assert found["temporaries"] == -18.0


def test_an_older_result_without_the_phases_of_its_temporaries_is_split_by_the_moment() -> None:
    before, after = replace(BEFORE, temporary_mib={}), replace(IN_OPTIMIZER, temporary_mib={})
    found = by_name(peak_of(measured("baseline", before), measured("checkpoint", after)))
    assert found[OPTIMIZER_TEMPORARIES] == 52.0
    assert found["temporaries"] == -20.0


def test_phases_that_do_not_cover_all_temporaries_leave_the_rest_as_temporaries() -> None:
    assert parts_of(replace(IN_OPTIMIZER, temporary_mib={"optimizer": 50.0}))["temporaries"] == pytest.approx(2.0)


def test_where_the_peak_moved_is_said_and_that_it_was_there_before() -> None:
    found = explain_pair(measured("baseline", BEFORE), measured("checkpoint", IN_OPTIMIZER))
    assert found.moment_before == "backward (_log_softmax_backward_data of head)"
    assert found.moment_after == "the optimizer's step (_foreach_sqrt)"
    moved = found.words[1]
    assert moved.startswith("The peak moved from backward (_log_softmax_backward_data of head) to the optimizer's step")
    assert "the baseline takes as much there (252.0 MiB)" in moved


def test_a_moment_that_the_baseline_does_not_have_is_not_said_to_be_there_before() -> None:
    found = explain_pair(measured("baseline", BEFORE), measured("checkpoint", RECOMPUTING))
    assert "takes as much there" not in " ".join(found.words)


def test_like_blocks_are_one_moment() -> None:
    after = replace(RECOMPUTING, module="blocks.7.mlp")
    assert "stays in" in explain_pair(measured("baseline", RECOMPUTING), measured("hybrid", after)).words[1]


def test_on_cuda_the_total_is_the_allocators_and_the_residual_is_shown() -> None:
    baseline = measured("baseline", BEFORE, 304.0, "measured")
    candidate = measured("checkpoint", RECOMPUTING, 191.0, "measured")
    found = explain_pair(baseline, candidate)
    assert found.peak is not None
    assert found.peak.total == -113.0
    assert found.peak.residual == pytest.approx(-3.0) and found.peak.closes
    assert any("3.0 MiB (3 % of the change) are in no part" in words for words in found.words)
    assert not any("category" in words for words in found.findings)


def test_a_residual_over_five_percent_is_a_finding() -> None:
    found = explain_pair(measured("baseline", BEFORE, 330.0, "measured"), measured("offload", RECOMPUTING, None))
    assert found.peak is not None and not found.peak.closes
    assert any(words.startswith("30.0 MiB of the change of the peak") for words in found.findings)


@pytest.mark.parametrize(("more", "closes"), [(6.2, True), (6.3, False)])
def test_the_border_of_closing_is_five_percent_of_the_largest(more: float, closes: bool) -> None:
    """The largest part is 125 MiB of activations."""
    baseline = measured("baseline", BEFORE, evidence="measured")
    found = peak_of(baseline, measured("checkpoint", RECOMPUTING, RECOMPUTING.mib + more, "measured"))
    assert found.closes is closes


def test_activations_that_are_gone_and_save_little_are_a_finding() -> None:
    found = explain_pair(measured("baseline", BEFORE), measured("checkpoint", IN_OPTIMIZER)).findings
    assert found == [
        "of 130.0 MiB activations that are gone from the peak only 48.0 MiB are saved: the peak is now in the "
        "optimizer, which no activation strategy changes"
    ]


def test_a_prediction_is_explained_from_its_own_peak_and_never_worded_as_a_gain() -> None:
    found = explain_pair(predicted("baseline", BEFORE, 303.0), predicted("checkpoint", IN_OPTIMIZER, 254.0))
    assert found.evidence == "predicted"
    assert found.peak is not None and found.peak.total == -49.0
    assert found.peak.residual == pytest.approx(-1.0)
    assert (
        found.words[0] == "checkpoint is predicted to lower the peak by 49.0 MiB (16 %), from 303.0 MiB to 254.0 MiB."
    )


def test_a_prediction_that_is_the_ledgers_closes_exactly() -> None:
    found = peak_of(predicted("baseline", BEFORE, 300.0), predicted("checkpoint", RECOMPUTING, 190.0))
    assert found.residual == 0 and found.closes


def test_a_higher_and_an_unchanged_peak_are_said_as_such() -> None:
    higher = explain_pair(measured("baseline", RECOMPUTING), measured("micro_batch", BEFORE))
    assert (
        higher.words[0] == "micro_batch raises the peak by 110.0 MiB (58 %), from 190.0 MiB to 300.0 MiB (on this CPU)."
    )
    same = explain_pair(measured("baseline", BEFORE), measured("micro_batch", BEFORE))
    assert same.words[:2] == [
        "micro_batch leaves the peak where it is, at 300.0 MiB (on this CPU).",
        "The peak stays in backward (_log_softmax_backward_data of head).",
    ]


def test_an_unknown_account_says_why() -> None:
    candidate = measured("checkpoint", None, 190.0)
    candidate.config["measure"]["ledger"] = False
    found = explain_pair(measured("baseline", BEFORE), candidate)
    assert found.peak is None and found.moment_after == "not known"
    assert found.findings[0] == "what was alive at the peak of checkpoint is not known: measure.ledger=false"


def test_a_measured_and_a_predicted_peak_are_not_compared() -> None:
    found = explain_pair(measured("baseline", BEFORE), predicted("checkpoint", RECOMPUTING, 190.0))
    assert found.peak is None and found.evidence == "predicted"
    assert any("not compared" in words for words in found.findings)


def test_a_peak_found_elsewhere_than_predicted_is_a_finding() -> None:
    candidate = measured("checkpoint", RECOMPUTING)
    candidate.prediction = prediction(252.0, peak=IN_OPTIMIZER)
    found = explain_pair(measured("baseline", BEFORE), candidate).findings
    assert found == [
        "the peak of checkpoint was predicted in the optimizer's step (_foreach_sqrt) and found in backward (mm of "
        "blocks.3.mlp)"
    ]


def test_an_old_prediction_without_the_whole_peak_is_explained_from_what_it_has() -> None:
    old = prediction(300.0, peak=BEFORE)
    old.peak = None
    account = account_of(trial("baseline", 1.0, mode="predict", evidence="predicted", prediction=old))
    assert account is not None and account.peak.at_peak_mib == BEFORE.at_peak_mib
    assert peak_change(account, account).total == 0


def test_an_explanation_survives_json() -> None:
    found = explain_pair(measured("baseline", BEFORE), measured("checkpoint", RECOMPUTING))
    assert from_dict(type(found), to_dict(found)) == found
