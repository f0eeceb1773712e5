"""The change of a step's time: each part from its phase, the residual shown, noise said first, every finding."""

from __future__ import annotations

from typing import Any

import pytest

from sweep.decide.causes import Typical, explain_pair, micro_steps, noise_ms, time_change
from sweep.results import Change, Decision, Difference, Explanation, Run, Trace, TrialResult
from tests.made_up import prediction, trial

PHASES = {"data": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 8.0}


def timed(strategy: str, phases: dict[str, float], outside: float | None = 1.0, **changes: Any) -> TrialResult:
    """A trial whose step takes its phases and what lies outside of them, to the last ms unless `step_ms` is given."""
    step_ms = changes.pop("step_ms", sum(phases.values()) + (outside or 0.0))
    measure = {"phases_ms": phases, "outside_ms": outside, **changes.pop("measure", {})}
    return trial(strategy, 100.0, step_ms, measure=measure, **changes)


def explained(candidate: TrialResult, baseline: TrialResult | None = None) -> Explanation:
    return explain_pair(baseline or timed("baseline", PHASES), candidate)


def time_of(candidate: TrialResult, baseline: TrialResult | None = None) -> Change:
    found = explained(candidate, baseline).time
    assert found is not None
    return found


def by_name(found: Change) -> dict[str, float]:
    return {part.name: round(part.value, 6) for part in found.parts}


@pytest.mark.parametrize(
    ("strategy", "phases", "outside", "parts"),
    [
        ("checkpoint", PHASES | {"recompute": 28.0}, 1.0, {"recomputation": 28.0}),
        ("offload", PHASES | {"transfer": 40.0}, 1.0, {"transfer that was not hidden": 40.0}),
        ("checkpoint", PHASES | {"forward": 33.0, "backward": 66.0}, 1.0, {"forward and backward otherwise": 9.0}),
        ("checkpoint", PHASES | {"data": 7.0}, 1.0, {"waiting for data": 6.0}),
        ("checkpoint", PHASES | {"optimizer": 12.0}, 1.0, {"optimizer": 4.0}),
        ("checkpoint", PHASES, 6.0, {"outside of all phases": 5.0}),
        ("micro_batch", PHASES | {"data": 3.0, "forward": 35.0, "backward": 69.0}, 1.0, {"more micro-steps": 16.0}),
        (
            "hybrid",
            PHASES | {"recompute": 28.0, "transfer": 5.0, "backward": 63.0},
            2.0,
            {
                "recomputation": 28.0,
                "transfer that was not hidden": 5.0,
                "forward and backward otherwise": 3.0,
                "outside of all phases": 1.0,
            },
        ),
    ],
)
def test_each_part_comes_from_its_phase_and_the_sum_closes(
    strategy: str, phases: dict[str, float], outside: float, parts: dict[str, float]
) -> None:
    found = time_of(timed(strategy, phases, outside))
    assert {name: value for name, value in by_name(found).items() if value} == parts
    assert found.total == pytest.approx(sum(parts.values()))
    assert found.residual == 0 and found.closes


def test_each_part_says_what_it_rests_on() -> None:
    part = time_of(timed("checkpoint", PHASES | {"recompute": 28.0})).parts[0]
    assert part.words == "median time in phase recompute: 0 ms before, 28.0 ms after"
    more = time_of(timed("micro_batch", PHASES | {"backward": 90.0})).parts[0]
    assert more.words.startswith("4 micro-steps instead of 1; median time in phases forward, backward, data: 91.0 ms")


def test_parts_are_means_over_the_middle_half_of_the_steps_and_add_up_where_medians_do_not() -> None:
    """Forward is long where backward is short: the medians of the two together are far from the median of the steps."""

    def run(slow: float) -> Run:
        forward, backward = [30.0, 40.0, 50.0, 31.0, 300.0], [b + slow for b in (70.0, 50.0, 41.0, 60.0, 900.0)]
        steps = [f + b + 1.0 for f, b in zip(forward, backward)]
        return Run(0, 0, "", steps, {"forward": 40.0, "backward": 60.0},
                   phase_times_ms={"forward": forward, "backward": backward})  # fmt: skip

    trials = []
    for name, slow in (("baseline", 0.0), ("checkpoint", 10.0)):
        times = run(slow).step_times_ms
        trials.append(timed(name, PHASES, step_ms=sorted(times)[2], measure={"runs": [run(slow)]}))
    measured = trials[0].measurement
    assert measured is not None
    typical = Typical.of(measured)
    # 91, 92, 92, 101 and 1201 ms: the middle are the 92, 92 and 101 ms.
    assert typical.phases_ms == pytest.approx({"forward": (31 + 50 + 30) / 3, "backward": (60 + 41 + 70) / 3})
    assert typical.outside_ms == pytest.approx(1.0)
    found = time_of(trials[1], trials[0])
    assert found.total == pytest.approx(found.residual + sum(part.value for part in found.parts))
    assert found.total == found.parts[0].value == 10.0 and found.residual == 0
    assert found.parts[0].words.startswith("mean time over the middle half of the steps in phases forward, backward")


def test_a_run_with_an_error_does_not_count_for_the_typical_step() -> None:
    good = Run(0, 0, "", [10.0, 10.0], phase_times_ms={"forward": [9.0, 9.0]})
    bad = Run(1, 0, "", [99.0], phase_times_ms={"forward": [98.0]}, error="crashed")
    found = timed("checkpoint", PHASES, measure={"runs": [good, bad]}).measurement
    assert found is not None and Typical.of(found).phases_ms == {"forward": 9.0}


def test_micro_steps_are_counted_from_the_config_with_the_last_one_shorter() -> None:
    assert micro_steps(trial("micro_batch", 1.0, knobs={"micro_batch_size": 5})) == 4
    assert micro_steps(trial("checkpoint", 1.0)) == 1
    unknown = trial("micro_batch", 1.0)
    unknown.config = {}
    assert micro_steps(unknown) is None


def test_medians_that_do_not_add_up_leave_a_residual_that_is_shown() -> None:
    found = explained(timed("checkpoint", PHASES | {"recompute": 28.0}, step_ms=129.2))
    assert found.time is not None
    assert found.time.residual == pytest.approx(1.2) and found.time.closes
    assert any("1.2 ms (4 % of the change) belong to no part" in words for words in found.words)


def test_a_residual_over_five_percent_is_a_finding_unless_it_is_inside_the_noise() -> None:
    candidate = timed("checkpoint", PHASES | {"recompute": 28.0}, step_ms=134.0)
    quiet = {"step_ms_ci_low": 133.9, "step_ms_ci_high": 134.1}
    baseline = timed("baseline", PHASES, measure={"step_ms_ci_low": 99.9, "step_ms_ci_high": 100.1})
    for key, value in quiet.items():
        setattr(candidate.measurement, key, value)
    found = explained(candidate, baseline)
    assert found.time is not None and not found.time.closes
    assert any(words.startswith("6.0 ms of the change of the step time (34.0 ms) belong to no phase")
               for words in found.findings)  # fmt: skip
    assert candidate.measurement is not None
    candidate.measurement.step_ms_ci_low, candidate.measurement.step_ms_ci_high = 127.0, 141.0
    found = explained(candidate, baseline)
    assert found.time is not None and found.time.closes and not found.findings


def test_without_a_measured_time_outside_of_the_phases_it_is_part_of_the_residual() -> None:
    baseline = timed("baseline", PHASES, None, step_ms=100.0)
    found = time_of(timed("checkpoint", PHASES | {"recompute": 28.0}, None, step_ms=133.0), baseline)
    assert "outside of all phases" not in by_name(found)
    assert found.residual == pytest.approx(5.0)


def test_noise_is_that_of_both_medians() -> None:
    a, b = timed("baseline", PHASES).measurement, timed("checkpoint", PHASES).measurement
    assert a is not None and b is not None
    a.step_ms_ci_low, a.step_ms_ci_high, b.step_ms_ci_low, b.step_ms_ci_high = 97.0, 103.0, 96.0, 104.0
    assert noise_ms(a, b) == 5.0
    a.step_ms_ci_low = b.step_ms_ci_low = None
    # 1.96 standard errors of the median of 15 steps, from quartiles that are 4 ms apart, twice.
    assert noise_ms(a, b) == pytest.approx(1.96 * 2**0.5 * 0.929 * 4 / 15**0.5, rel=1e-3)


def test_a_difference_inside_the_noise_is_said_first_and_its_parts_are_no_causes() -> None:
    candidate = timed("checkpoint", PHASES | {"recompute": 2.0})
    candidate.decision = Decision("accept", step=Difference(1.02, 0.97, 1.06, none=True))
    first = next(words for words in explained(candidate).words if "step" in words and "peak" not in words)
    assert first.startswith("The step times cannot be told apart: 102.0 ms and 100.0 ms, a difference inside the noise")
    assert "no causes" in first


def test_without_a_decision_the_steps_themselves_say_what_is_noise() -> None:
    close, far = timed("checkpoint", PHASES | {"recompute": 2.0}), timed("checkpoint", PHASES | {"recompute": 28.0})
    assert any("inside the noise" in words for words in explained(close).words)
    assert not any("inside the noise" in words for words in explained(far).words)


def test_a_longer_and_a_shorter_step_are_worded_with_their_evidence() -> None:
    longer = explained(timed("checkpoint", PHASES | {"recompute": 28.0}))
    assert "A step takes 28.0 ms longer: 128.0 ms instead of 100.0 ms, 1.28x (on this CPU)." in longer.words
    assert "By part: recomputation +28.0 ms." in longer.words
    shorter = explained(timed("checkpoint", {"data": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 8.0}))
    assert "A step takes 30.0 ms shorter: 70.0 ms instead of 100.0 ms, 0.70x (on this CPU)." in shorter.words


def traced(operators: int, **changes: Any) -> Trace:
    return Trace(**{"evidence": "smoke", "steps": 3, "step_ms": 150.0, "operators": operators, **changes})


def test_waiting_for_launches_is_what_kernels_leave_of_forward_and_backward() -> None:
    baseline = timed("baseline", PHASES, evidence="measured")
    candidate = timed("checkpoint", PHASES | {"forward": 45.0, "backward": 65.0}, evidence="measured")
    baseline.trace = traced(900, device_ms={"forward": 29.0, "backward": 59.0})
    candidate.trace = traced(900, device_ms={"forward": 31.0, "backward": 62.0})
    found = by_name(time_of(candidate, baseline))
    assert found["waiting for launches"] == (14.0 + 3.0) - (1.0 + 1.0)
    assert found["forward and backward otherwise"] == 20.0 - 15.0
    assert time_of(candidate, baseline).residual == 0


def test_a_trace_says_how_much_of_the_copies_was_hidden_and_how_much_the_host_called() -> None:
    baseline = timed("baseline", PHASES, evidence="measured", trace=traced(1000))
    candidate = timed("offload", PHASES | {"transfer": 40.0}, evidence="measured")
    candidate.trace = traced(1400, copy_ms=50.0, copy_hidden_ms=40.0)
    found = explained(candidate, baseline)
    assert "Copies between host and device take 50.0 ms a step, 80 % of it beside kernels (trace)." in found.words
    assert "The host calls 1400 operators a step instead of 1000 (trace)." in found.words
    assert not found.findings
    candidate.trace = traced(1000, copy_ms=50.0, copy_hidden_ms=5.0)
    assert explained(candidate, baseline).findings == ["only 10 % of the copies' time is hidden behind kernels"]


def test_on_a_cpu_no_copy_is_called_hidden() -> None:
    candidate = timed("offload", PHASES | {"transfer": 40.0})
    candidate.trace = traced(10, evidence="cpu", ranges_ms={"copy to host": 20.0, "copy from host": 20.0})
    assert any("none of their time can be hidden here" in words for words in explained(candidate).words)


def test_a_recomputation_far_longer_than_a_forward_is_a_finding() -> None:
    found = explained(timed("checkpoint", PHASES | {"recompute": 60.0})).findings
    assert found == ["recomputation takes 60.0 ms, 2.00x a forward (30.0 ms): about one was expected"]


def test_a_shorter_step_that_does_more_is_a_finding() -> None:
    phases = {"data": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 8.0, "recompute": 5.0}
    assert any(
        "shorter than the baseline's although" in words for words in explained(timed("checkpoint", phases)).findings
    )


def test_disturbed_times_are_a_finding() -> None:
    candidate = timed("checkpoint", PHASES | {"recompute": 28.0})
    candidate.decision = Decision("accept", disturbed=["other processes kept 2.0 cores busy"])
    words = "the times of checkpoint may not be its own: other processes kept 2.0 cores busy"
    assert words in explained(candidate).findings


def test_what_was_not_run_has_no_time_and_says_what_is_known() -> None:
    changed = prediction(80.0, recompute_flops_ratio=0.3, to_host_mib=100.0, from_host_mib=100.0)
    changed.transfer_round_trip_ms = 8.0
    candidate = trial("hybrid", 80.0, mode="predict", evidence="predicted", prediction=changed)
    baseline = trial("baseline", 100.0, mode="predict", evidence="predicted")
    assert time_change(baseline, candidate) is None
    found = explain_pair(baseline, candidate)
    assert found.time is None
    assert found.words[-1] == (
        "What it costs in time is not known, since nothing was run; theoretically 30 % of a step's FLOPs are computed "
        "again, and 200.0 MiB are moved a step (8.0 ms at the link's bandwidth)."
    )
