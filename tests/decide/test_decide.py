"""Verdicts from made-up measurements: every reason code, every path to a preferred trial."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
from typing import Any

import pytest
from made_up import measurement, peak, prediction, sweep_of_six, sweep_over_seeds, trial, verified

from sweep.config.schema import BudgetConf, MinEvidence
from sweep.decide.reasons import REASONS, Case
from sweep.decide.verdict import STRENGTH, conclude, decide, grouped, memory_cap
from sweep.results import Comparison, Conditions, Decision, Outcome, Run, TrialResult, from_dict, to_dict

BASE = trial("baseline", 300.0, 100.0)
GPU_BASE = trial("baseline", 300.0, 100.0, evidence="measured")


def judged(
    result: TrialResult, baseline: TrialResult | None = BASE, capacity: float | None = None, **budget: Any
) -> Decision:
    return decide(result, baseline, BudgetConf(**budget), capacity)


def changed(result: TrialResult, **changes: Any) -> TrialResult:
    return dataclasses.replace(result, **changes)


def by_name(comparison: Comparison, results: list[TrialResult]) -> dict[str, Decision]:
    return {r.name: d for r, d in zip(results, comparison.decisions)}


CHECKPOINT = trial("checkpoint", 150.0, 130.0)
MICRO = trial("micro_batch", 160.0, 110.0)
SHORT = trial("checkpoint", 150.0, 130.0, evidence="smoke")
PREDICTED = trial("checkpoint", 150.0, evidence="predicted", mode="predict")
PREDICTED_BASE = trial("baseline", 300.0, evidence="predicted", mode="predict")


def runs_of(*medians_ms: float, steps: int = 5, at_end: bool = False) -> list[Run]:
    """Repeats whose steps lie within 1 % of their medians. at_end: the last one is the baseline's after all others."""
    spread = [1 + 0.02 * (i / max(1, steps - 1) - 0.5) for i in range(steps)]
    found = [
        Run(i, 0, f"2025-01-01T00:{10 * i:02}:00+00:00", [middle * s for s in spread])
        for i, middle in enumerate(medians_ms)
    ]
    found[-1].at_end = at_end
    return found


def repeated(result: TrialResult, *medians_ms: float, at_end: bool = False, **of_first: Any) -> TrialResult:
    """The trial with these repeats. `of_first` changes the first."""
    runs = runs_of(*medians_ms, at_end=at_end)
    runs[0] = dataclasses.replace(runs[0], **of_first)
    assert result.measurement is not None
    step_ms = statistics.median(t for r in runs if not r.error for t in r.step_times_ms)
    changes = {"runs": runs, "step_ms": step_ms, "samples_per_s": 16000 / step_ms}
    return changed(result, measurement=dataclasses.replace(result.measurement, **changes))


QUIET = Conditions(cpu_others=0.0)
BUSY = Conditions(cpu_others=1.4, disturbed=["other processes kept 1.4 of 2 cores busy"])


def failing(error: str) -> TrialResult:
    result = repeated(trial("checkpoint", 150.0, 130.0), 130, 131, 132)
    assert result.measurement is not None
    result.measurement.runs[2] = Run(2, 0, "2025-01-01T00:20:00+00:00", error=error)
    return result


# code, trial, baseline, budget, verdict, what the next action names
TABLE: list[tuple[str, TrialResult, TrialResult | None, dict[str, Any], str, str]] = [
    ("over_memory", CHECKPOINT, BASE, {"memory_mib": 140}, "tune", "strategy.micro_batch_size=8"),
    ("over_memory", MICRO, BASE, {"memory_mib": 140}, "tune", "strategy.micro_batch_size=2"),
    ("over_memory", BASE, None, {"memory_mib": 200}, "reject", "strategy=micro_batch strategy.micro_batch_size=8"),
    ("over_memory", PREDICTED, PREDICTED_BASE, {"memory_mib": 140}, "tune", "strategy.micro_batch_size=8"),
    (
        "over_memory",
        changed(PREDICTED, prediction=prediction(150.0, fits=False, capacity_mib=500.0)),
        PREDICTED_BASE,
        {},
        "tune",
        "strategy.micro_batch_size=8",
    ),
    ("below_throughput", CHECKPOINT, BASE, {"min_throughput_ratio": 0.9}, "tune", "strategy.checkpoint.every_k=2"),
    ("below_throughput", CHECKPOINT, BASE, {"min_samples_per_s": 150}, "tune", "strategy.checkpoint.every_k=2"),
    ("below_throughput", MICRO, BASE, {"min_throughput_ratio": 0.95}, "tune", "strategy.micro_batch_size=8"),
    ("below_throughput", BASE, None, {"min_samples_per_s": 500}, "reject", "faster device"),
    (
        "quality_lost",
        trial("micro_batch", 160.0, 110.0, measure={"eval_loss": 3.6}),
        BASE,
        {"max_eval_loss_ratio": 1.05},
        "reject",
        "workload.seed=1",
    ),
    ("quality_lost", MICRO, BASE, {"max_eval_loss": 3.0}, "reject", "keep the baseline"),
    ("saving_too_small", CHECKPOINT, BASE, {"min_saving_mib": 200}, "tune", "strategy.micro_batch_size=8"),
    ("saving_too_small", trial("offload", 310.0, 140.0), BASE, {}, "tune", "strategy.offload.keep_last=0"),
    ("saving_too_small", BASE, None, {"min_saving_mib": 1}, "reject", "strategy=micro_batch"),
    ("evidence_too_short", SHORT, GPU_BASE, {}, "tune", "measure.steps=10 measure.repeats=3"),
    ("evidence_too_short", SHORT, GPU_BASE, {"min_evidence": MinEvidence.smoke}, "tune", "measure.steps"),
    (
        "evidence_too_short",
        changed(SHORT, config={**SHORT.config, "measure": {"warmup_steps": 0}}),
        GPU_BASE,
        {},
        "tune",
        "measure.warmup_steps=2",
    ),
    ("evidence_too_weak", CHECKPOINT, BASE, {"min_evidence": MinEvidence.measured}, "tune", "device=auto"),
    ("evidence_too_weak", PREDICTED, PREDICTED_BASE, {"min_evidence": MinEvidence.cpu}, "tune", "mode=measure"),
    (
        "not_equivalent",
        trial(
            "micro_batch",
            outcome="invalid",
            verification=verified(0.3, passed=False, cause="batch_statistics", where="bn1 (BatchNorm2d)"),
        ),
        BASE,
        {},
        "reject",
        "strategy=checkpoint (bn1 (BatchNorm2d) computes over all samples",
    ),
    (
        "not_equivalent",
        trial("micro_batch", outcome="invalid", reason="batch_statistics", error="NotEquivalent: norm (BatchNorm1d)"),
        BASE,
        {},
        "reject",
        "GroupNorm",
    ),
    (
        "not_equivalent",
        trial(
            "micro_batch",
            outcome="invalid",
            verification=verified(0.3, passed=False, cause="loss_is_no_mean_over_samples"),
        ),
        BASE,
        {},
        "reject",
        "give it `count(batch)`",
    ),
    (
        "not_equivalent",
        trial("checkpoint", outcome="invalid", verification=verified(0.3, passed=False, cause="state", where="memory")),
        BASE,
        {},
        "reject",
        "forward changes memory",
    ),
    (
        "not_equivalent",
        trial("checkpoint", outcome="invalid", verification=verified(0.3, passed=False, cause="random")),
        BASE,
        {},
        "reject",
        "numpy's global generator",
    ),
    (
        "not_equivalent",
        trial(
            "checkpoint", outcome="invalid", verification=verified(0.3, passed=False, cause="baseline_does_not_repeat")
        ),
        BASE,
        {},
        "reject",
        "not the strategy's fault",
    ),
    (
        "not_equivalent",
        changed(CHECKPOINT, verification=verified(0.3, passed=False)),
        BASE,
        {},
        "reject",
        "not known",
    ),
    (
        "not_equivalent",
        trial("offload", outcome="invalid", verification=verified(0.3, passed=False, grad_worst="head.weight")),
        BASE,
        {},
        "reject",
        "begin at head.weight",
    ),
    (
        "not_equivalent",
        trial("offload", outcome="invalid", knobs={"offload__implementation": "save_on_cpu"}),
        BASE,
        {},
        "tune",
        "strategy.offload.implementation=hooks",
    ),
    ("repeat_failed", failing("DeviceOutOfMemory: tried to allocate"), BASE, {}, "tune", "strategy.micro_batch_size=8"),
    ("repeat_failed", failing("TimedOut: measure.timeout_s=600: not done"), BASE, {}, "tune", "measure.timeout_s=1200"),
    ("repeat_failed", failing("the process was killed by SIGKILL"), BASE, {}, "tune", "measure it again"),
    ("disturbed", repeated(CHECKPOINT, 130, 131, 132, conditions=BUSY), BASE, {}, "accept", "measure.repeats=6"),
    ("not_verified", changed(CHECKPOINT, verification=None), BASE, {}, "tune", "measure.verify=true"),
    ("out_of_memory", trial("micro_batch", outcome="oom_device"), BASE, {}, "tune", "strategy.micro_batch_size=2"),
    ("out_of_memory", trial("baseline", outcome="oom_device"), None, {}, "reject", "strategy=micro_batch"),
    ("out_of_host_memory", trial("offload", outcome="oom_host"), BASE, {}, "tune", "strategy.offload.placement=inputs"),
    ("out_of_host_memory", trial("checkpoint", outcome="oom_host"), BASE, {}, "reject", "host memory"),
    (
        "over_budget",
        trial("micro_batch", outcome="over_budget", evidence="predicted"),
        BASE,
        {},
        "tune",
        "micro_batch_size=2",
    ),
    ("not_finite", trial("checkpoint", outcome="nan"), BASE, {}, "reject", "workload.optimizer.lr=0.0001"),
    ("timed_out", trial("offload", outcome="timeout"), BASE, {}, "tune", "measure.timeout_s=1200"),
    (
        "crashed",
        trial("offload", outcome="crashed", folder="multirun/x/4"),
        BASE,
        {},
        "reject",
        "multirun/x/4/result.json",
    ),
    ("failed", trial("offload", outcome="failed", error="RuntimeError: no"), BASE, {}, "reject", "HYDRA_FULL_ERROR=1"),
    (
        "bad_setting",
        trial(
            "checkpoint",
            outcome="invalid",
            error="BadInput: workload.blocks=x.*: matches no module; give another pattern",
        ),
        BASE,
        {},
        "reject",
        "give another pattern",
    ),
    (
        "nothing_offloaded",
        trial("offload", outcome="failed", error="NothingOffloaded: 0 bytes"),
        BASE,
        {},
        "tune",
        "min_tensor_kib=0",
    ),
    (
        "nothing_offloaded",
        trial("offload", outcome="failed", reason="nothing_offloaded"),
        BASE,
        {},
        "tune",
        "min_tensor_kib=0",
    ),
    (
        "nothing_recomputed",
        trial("checkpoint", outcome="invalid", error="NothingRecomputed: layers.0 was not called; name others"),
        BASE,
        {},
        "reject",
        "name others",
    ),
    (
        "uncertain",
        changed(PREDICTED, prediction=prediction(150.0, capacity_mib=570.0, caveats=["not counted: workspaces"])),
        PREDICTED_BASE,
        {},
        "tune",
        "mode=measure",
    ),
    (
        "not_verified",
        changed(CHECKPOINT, verification=verified(passed=False, status="not_verified", steps=3)),
        BASE,
        {},
        "tune",
        "measure.verify_steps=6",
    ),
    (
        "not_verified",
        changed(
            CHECKPOINT,
            verification=verified(passed=False, status="not_comparable", cause="baseline_does_not_repeat"),
        ),
        BASE,
        {},
        "tune",
        "the baseline does not repeat itself",
    ),
    (
        "not_predictable",
        trial("checkpoint", outcome="invalid", mode="predict", evidence="predicted", error="CannotPredict: nonzero"),
        PREDICTED_BASE,
        {},
        "tune",
        "mode=measure",
    ),
    (
        "memory_unknown",
        trial("checkpoint", 150.0, 130.0, measure={"peak_allocated_mib": float("nan")}),
        BASE,
        {"memory_mib": 200},
        "tune",
        "measure.ledger=true",
    ),
    ("throughput_unknown", PREDICTED, PREDICTED_BASE, {"min_throughput_ratio": 0.5}, "tune", "mode=measure"),
    ("throughput_unknown", PREDICTED, PREDICTED_BASE, {"min_samples_per_s": 5}, "tune", "mode=measure"),
    ("quality_unknown", PREDICTED, PREDICTED_BASE, {"max_eval_loss": 3.0}, "tune", "mode=measure"),
    (
        "quality_unknown",
        trial("checkpoint", 150.0, 130.0, measure={"eval_loss": None}),
        BASE,
        {"max_eval_loss_ratio": 1.1},
        "tune",
        "measure.eval_batches=2",
    ),
]


@pytest.mark.parametrize(
    ("code", "result", "baseline", "budget", "verdict", "action"), TABLE, ids=lambda v: v if isinstance(v, str) else ""
)
def test_each_reason_gives_its_verdict_and_names_what_to_type(
    code: str, result: TrialResult, baseline: TrialResult | None, budget: dict[str, Any], verdict: str, action: str
) -> None:
    decision = judged(result, baseline, **budget)
    assert decision.reasons == [code]
    assert decision.verdict == verdict
    assert action in decision.next_action
    assert decision.why


def test_what_a_prediction_does_not_count_makes_it_less_sure_and_is_said() -> None:
    sure = prediction(150.0, capacity_mib=16000.0)
    unsure = dataclasses.replace(sure, caveats=["not counted: workspaces"])
    decision = judged(changed(PREDICTED, prediction=unsure), PREDICTED_BASE)
    assert (decision.verdict, decision.reasons) == ("accept", ["uncertain"])
    assert "not counted: workspaces" in decision.why
    assert judged(changed(PREDICTED, prediction=sure), PREDICTED_BASE).reasons == []
    whose = dataclasses.replace(sure, caveats=["the peak is in evaluation: it takes 150.0 MiB, training 90.0 MiB"])
    assert judged(changed(PREDICTED, prediction=whose), PREDICTED_BASE).reasons == []
    near = judged(changed(PREDICTED, prediction=unsure), PREDICTED_BASE, memory_mib=151)
    assert (near.verdict, near.reasons) == ("tune", ["uncertain"])
    comparison = conclude([PREDICTED_BASE, changed(PREDICTED, prediction=unsure)], BudgetConf(memory_mib=200), None)
    assert comparison.preferred == "checkpoint"
    assert "less sure" in comparison.why


def test_a_verdict_says_in_how_much_of_the_model_gradients_were_compared() -> None:
    compared = changed(CHECKPOINT, verification=verified(status="equal", compared_share=1.0, steps=2))
    words = "gradients equal in 100 % of the parameters over 2 steps"
    assert words in judged(compared, BASE).why
    assert words in conclude([BASE, compared], BudgetConf(memory_mib=200), None).why


def test_the_table_covers_every_code() -> None:
    assert {row[0] for row in TABLE} == set(REASONS)


def test_every_outcome_but_ok_has_a_reason_of_its_own() -> None:
    codes = {o: judged(trial("offload", outcome=o.value)).reasons[0] for o in Outcome if o is not Outcome.ok}
    assert len(set(codes.values())) == len(codes)


def test_a_trial_within_the_whole_budget_is_accepted_with_its_numbers() -> None:
    decision = judged(CHECKPOINT, memory_mib=150, min_throughput_ratio=0.7, max_eval_loss_ratio=1.0, min_saving_mib=150)
    assert (decision.verdict, decision.reasons, decision.next_action) == ("accept", [], "")
    assert (decision.peak_mib, decision.saved_mib, decision.eval_loss_ratio, decision.cap_mib) == (
        150.0,
        150.0,
        1.0,
        150,
    )
    assert decision.throughput_ratio == pytest.approx(100 / 130)
    assert decision.why.startswith("on this CPU:")
    assert "GPU" not in decision.why
    assert decision.against == "the baseline (300.0 MiB, 100.0 ms per step)"


@pytest.mark.parametrize(
    ("strategy", "knobs", "blocks", "cap", "expected"),
    [
        ("micro_batch", {"micro_batch_size": 4}, 8, 140, "strategy.micro_batch_size=2"),
        ("micro_batch", {"micro_batch_size": 3}, 8, 140, "strategy.micro_batch_size=1"),
        (
            "micro_batch",
            {"micro_batch_size": 8},
            8,
            80,
            "strategy.micro_batch_size=1",
        ),  # 60 + 90/8 fit, 60 + 90/4 do not
        ("micro_batch", {"micro_batch_size": 1}, 8, 140, "strategy=checkpoint strategy.micro_batch_size=1"),
        ("checkpoint", {"checkpoint__every_k": 4}, 8, 140, "strategy.checkpoint.every_k=2"),
        ("checkpoint", {"checkpoint__every_k": 2}, 8, 140, "strategy.checkpoint.every_k=1 (recompute every block"),
        ("checkpoint", {"checkpoint__granularity": "parts"}, 8, 140, "strategy.checkpoint.granularity=blocks"),
        ("checkpoint", {"checkpoint__granularity": "segments"}, 9, 140, "strategy.checkpoint.segment_size=3"),
        ("checkpoint", {"micro_batch_size": 1}, 8, 140, "strategy=hybrid strategy.micro_batch_size=1"),
        ("checkpoint_selective", {"checkpoint__every_k": 2}, 8, 140, "strategy.checkpoint.every_k=1"),
        ("checkpoint_selective", {}, 8, 140, "strategy.checkpoint.granularity=blocks"),
        ("offload", {"offload__placement": "inputs"}, 8, 140, "strategy.offload.placement=all"),
        ("offload", {}, 8, 140, "strategy.offload.keep_last=0"),
        ("offload", {"offload__keep_last": 0}, 8, 140, "strategy.micro_batch_size=8"),
        ("offload", {"offload__keep_last": 0, "micro_batch_size": 1}, 8, 140, "strategy=hybrid"),
        ("hybrid", {"offload__keep_last": 0, "micro_batch_size": 1}, 8, 140, "a smaller model"),
        ("hybrid", {}, 8, 40, "60 MiB, more than the cap"),
    ],
)
def test_over_memory_turns_the_knobs_of_its_own_strategy_first(
    strategy: str, knobs: dict[str, Any], blocks: int, cap: float, expected: str
) -> None:
    decision = judged(trial(strategy, 150.0, 130.0, knobs=knobs, blocks=blocks), memory_mib=cap)
    assert decision.reasons == ["over_memory"]
    assert expected in decision.next_action
    own = "strategy=" not in expected and "model" not in expected and "more than" not in expected
    assert decision.verdict == ("tune" if own else "reject")


@pytest.mark.parametrize(
    ("strategy", "knobs", "evidence", "expected"),
    [
        ("micro_batch", {"micro_batch_size": 4}, "cpu", "strategy.micro_batch_size=8"),
        ("micro_batch", {"micro_batch_size": 8}, "cpu", "no faster setting"),  # 16 would be the baseline
        ("checkpoint", {"micro_batch_size": 8}, "cpu", "strategy.micro_batch_size=16"),
        ("checkpoint", {"checkpoint__every_k": 2}, "cpu", "strategy.checkpoint.every_k=4"),
        ("checkpoint", {"checkpoint__every_k": 4}, "cpu", "strategy.checkpoint.every_k=8"),  # of 8 blocks
        ("checkpoint", {"checkpoint__every_k": 8}, "cpu", "strategy.checkpoint.granularity=selective"),
        ("offload", {"offload__keep_last": 3}, "cpu", "strategy.offload.keep_last=6"),
        ("offload", {"offload__keep_last": 4}, "cpu", "strategy.offload.placement=inputs"),  # 8 would be all blocks
        ("checkpoint", {"checkpoint__granularity": "segments"}, "cpu", "strategy.checkpoint.granularity=selective"),
        ("checkpoint_selective", {"checkpoint__every_k": 8}, "cpu", "no faster setting"),
        ("offload", {"offload__pin_memory": False}, "measured", "strategy.offload.pin_memory=true"),
        ("offload", {"offload__pin_memory": False}, "cpu", "strategy.offload.keep_last=2"),
        ("offload", {"offload__keep_last": 7}, "cpu", "strategy.offload.placement=inputs"),
        ("hybrid", {}, "cpu", "strategy.offload.keep_last=2"),
    ],
)
def test_below_throughput_gives_memory_back(strategy: str, knobs: dict[str, Any], evidence: str, expected: str) -> None:
    base = trial("baseline", 300.0, 100.0, evidence=evidence)
    result = trial(strategy, 150.0, 200.0, knobs=knobs, evidence=evidence)
    decision = judged(result, base, min_throughput_ratio=0.9)
    assert decision.reasons == ["below_throughput"]
    assert expected in decision.next_action
    assert decision.verdict == ("reject" if expected == "no faster setting" else "tune")


def test_a_floor_missed_inside_the_noise_asks_for_more_steps_not_for_another_setting() -> None:
    decision = judged(trial("checkpoint", 150.0, 112.0, measure={"spread": 0.02}), min_throughput_ratio=0.9)
    assert decision.reasons == ["below_throughput"]
    assert "measure.steps=10" in decision.next_action
    assert decision.verdict == "tune"


def test_exactly_at_the_floor_or_the_gate_is_within() -> None:
    result = trial("checkpoint", 150.0, 125.0, measure={"eval_loss": 3.21 * 1.25})
    assert judged(result, min_throughput_ratio=0.8, max_eval_loss_ratio=1.25).throughput_ratio == 0.8
    assert judged(result, min_throughput_ratio=0.8, max_eval_loss_ratio=1.25).verdict == "accept"
    assert judged(result, min_samples_per_s=128.0, memory_mib=150.0, min_saving_mib=150.0).verdict == "accept"


def test_too_large_and_too_slow_at_once_has_no_knob() -> None:
    decision = judged(CHECKPOINT, memory_mib=140, min_throughput_ratio=0.9)
    assert decision.reasons == ["over_memory", "below_throughput"]
    assert decision.verdict == "reject"
    assert "at once" in decision.next_action


def test_a_reason_that_no_knob_mends_decides_over_one_that_can_be_tuned() -> None:
    result = trial("checkpoint", 150.0, 130.0, measure={"eval_loss": 9.0})
    decision = judged(result, memory_mib=140, max_eval_loss=4)
    assert decision.reasons == ["quality_lost", "over_memory"]
    assert decision.verdict == "reject"
    assert "workload.seed=1" in decision.next_action


def test_a_peak_in_the_optimizer_points_to_the_optimizer_and_not_to_activations() -> None:
    at = {"parameter": 40.0, "gradient": 40.0, "optimizer_state": 80.0, "temporary": 40.0}
    result = trial("checkpoint", 200.0, 130.0, measure={"peak": peak(200.0, "optimizer", **at)})
    decision = judged(result, memory_mib=190)
    assert decision.verdict == "reject"
    assert "workload.optimizer.implementation=fused" in decision.next_action
    result = trial("checkpoint", 162.0, 130.0, measure={"peak": peak(162.0, "optimizer", **{**at, "temporary": 2.0})})
    assert "optimizer with less state" in judged(result, memory_mib=161.99).next_action


def run_of(*losses: float) -> Run:
    return Run(index=0, seed=0, started_at="", train_loss=list(losses))


@pytest.mark.parametrize(("bit_equal", "losses", "evidence", "verdict"), [
    (True, (3.0, 2.0, 1.5), "cpu", "accept"),
    (True, (3.0, 2.0, 1.5000001), "cpu", "reject"),
    (False, (3.0, 2.0, 1.5000001), "cpu", "accept"),  # micro-batches add up in another order
    (True, (3.0, 2.0, 1.5000001), "measured", "accept"),  # a GPU's sums need not repeat
])  # fmt: skip
def test_losses_that_part_after_an_exact_verification_contradict_it(
    bit_equal: bool, losses: tuple[float, ...], evidence: str, verdict: str
) -> None:
    base = trial("baseline", 300.0, 100.0, evidence=evidence)
    other = trial("checkpoint", 150.0, 130.0, evidence=evidence)
    assert base.measurement is not None and other.measurement is not None
    base.measurement.runs, other.measurement.runs = [run_of(3.0, 2.0, 1.5)], [run_of(*losses)]
    other.verification = verified(0.0, bit_equal=bit_equal, status="equal", steps=2)
    decision = judged(other, base)
    assert decision.verdict == verdict
    assert ("not_equivalent" in decision.reasons) == (verdict == "reject")


def test_switched_off_verification_is_accepted_only_with_its_name_on_it() -> None:
    result = changed(CHECKPOINT, verification=None)
    result.config = {**result.config, "measure": {"verify": False}}
    decision = judged(result)
    assert (decision.verdict, decision.reasons) == ("accept", ["not_verified"])
    assert "not verified" in decision.why
    comparison = conclude([trial("baseline", outcome="oom_device"), result], BudgetConf(), 200.0)
    assert comparison.preferred == "checkpoint"
    assert "not verified" in comparison.why


def test_a_strategy_that_saves_nothing_must_be_faster() -> None:
    assert judged(trial("micro_batch", 300.0, 80.0)).verdict == "accept"
    assert judged(trial("micro_batch", 300.0, 99.0)).reasons == ["saving_too_small"]  # inside the noise
    assert judged(trial("micro_batch", 300.0, 80.0), min_saving_mib=0).verdict == "accept"


@pytest.mark.parametrize(
    ("evidence", "mode", "least", "verdict"),
    [
        ("cpu", "measure", MinEvidence.auto, "accept"),
        ("cpu", "measure", MinEvidence.predicted, "accept"),
        ("measured", "measure", MinEvidence.auto, "accept"),
        ("measured", "measure", MinEvidence.cpu, "accept"),
        ("predicted", "predict", MinEvidence.auto, "accept"),
        ("predicted", "predict", MinEvidence.measured, "tune"),
        ("cpu", "measure", MinEvidence.measured, "tune"),
        *((("smoke", "measure", least, "tune")) for least in MinEvidence),
    ],
)
def test_least_evidence(evidence: str, mode: str, least: MinEvidence, verdict: str) -> None:
    base = trial("baseline", 300.0, 100.0, evidence=evidence, mode=mode)
    result = trial("checkpoint", 150.0, 130.0, evidence=evidence, mode=mode)
    assert judged(result, base, min_evidence=least).verdict == verdict


def test_the_cap_is_the_budgets_else_the_devices_else_none() -> None:
    assert memory_cap(BudgetConf(memory_mib=100), 200.0) == (100, "budget.memory_mib")
    assert memory_cap(BudgetConf(), 200.0) == (200.0, "device.capacity_mib")
    assert memory_cap(BudgetConf(), None) == (None, "")
    assert judged(CHECKPOINT, capacity=149.0).reasons == ["over_memory"]
    assert "no cap known" in judged(CHECKPOINT).why


@pytest.mark.parametrize("outcome", ["oom_device", "crashed", "over_budget", "nan"])
def test_without_a_baseline_that_ran_only_absolute_floors_count(outcome: str) -> None:
    base = trial("baseline", outcome=outcome, evidence="measured")
    result = trial("checkpoint", 150.0, 130.0, evidence="measured")
    relative = judged(
        result, base, capacity=200.0, min_throughput_ratio=0.99, max_eval_loss_ratio=0.5, min_saving_mib=1e6
    )
    assert relative.verdict == "accept"
    assert (relative.saved_mib, relative.throughput_ratio) == (None, None)
    assert relative.against.startswith("absolute floors and each other: the baseline ")
    assert judged(result, base, min_samples_per_s=200).reasons == ["below_throughput"]
    assert "there is no baseline" in judged(result, None).against


def test_a_measured_peak_is_not_subtracted_from_a_predicted_one() -> None:
    base = trial("baseline", outcome="over_budget", evidence="predicted", prediction=prediction(900.0, fits=False))
    assert judged(trial("checkpoint", 150.0), base).saved_mib is None
    assert judged(PREDICTED, PREDICTED_BASE).saved_mib == 150.0


def test_what_a_dead_trial_would_have_taken_is_not_given_as_its_peak() -> None:
    dead = trial("checkpoint", outcome="oom_device", evidence="measured", prediction=prediction(500.0))
    assert judged(dead).peak_mib is None


# ---- how sure


def test_a_difference_inside_the_noise_is_called_none_everywhere() -> None:
    base, own = repeated(BASE, 99, 100, 101), repeated(trial("micro_batch", 200.0, 100.0), 102, 100, 99)
    decision = judged(own, base)
    assert decision.step is not None
    assert decision.step.none
    assert decision.step.low < 1 < decision.step.high
    assert "1.00x the baseline's throughput (no difference in time beyond the noise)" in decision.why
    comparison = conclude([base, own], BudgetConf(), None)
    assert comparison.preferred == "baseline"
    assert "without a loss of time beyond the noise" in comparison.next_action
    slower = repeated(trial("checkpoint", 150.0, 120.0), 120, 121, 119)
    decision = judged(slower, base)
    assert decision.step is not None
    assert not decision.step.none
    assert decision.step.low > 1.1
    assert "noise" not in decision.why


def test_a_drift_swallows_the_differences_below_it_and_is_told() -> None:
    base = repeated(BASE, 100, 102, 104, 107, at_end=True)
    own = repeated(trial("micro_batch", 200.0, 100.0), 97, 99, 101)
    comparison = conclude([base, own], BudgetConf(), None)
    assert comparison.drift is not None
    assert comparison.drift.difference.ratio == pytest.approx(1.07)
    assert comparison.drift.minutes == 30
    assert "the baseline at the end was 7 % slower than at the start, over 30.0 minutes" in comparison.why
    assert comparison.decisions[1].step is not None
    assert comparison.decisions[1].step.none
    assert comparison.preferred == "baseline"
    quiet = repeated(BASE, 102, 103, 104, at_end=False)  # the same times, and no repeat at the end
    comparison = conclude([quiet, own], BudgetConf(), None)
    assert comparison.drift is None
    assert "drift" not in comparison.why
    assert comparison.decisions[1].step is not None
    assert not comparison.decisions[1].step.none
    assert comparison.preferred == "micro_batch"


def test_a_floor_missed_by_less_than_the_drift_asks_for_more_steps() -> None:
    base = repeated(BASE, 100, 102, 104, 107, at_end=True)
    own = repeated(trial("micro_batch", 200.0, 100.0), 108, 109, 110)
    decision = judged(own, base, min_throughput_ratio=0.99)
    assert decision.reasons == ["below_throughput"]
    assert "missed by less than the spread" in decision.next_action
    assert "missed by" not in judged(own, base, min_throughput_ratio=1.1).next_action


def test_a_disturbed_trial_is_marked_and_still_judged() -> None:
    own = repeated(CHECKPOINT, 130, 131, 132, conditions=BUSY)
    decision = judged(own)
    assert (decision.verdict, decision.reasons) == ("accept", ["disturbed"])
    assert decision.disturbed == ["repeat 1: other processes kept 1.4 of 2 cores busy"]
    assert "its times may not be its own: repeat 1: other processes kept 1.4 of 2 cores busy" in decision.why
    comparison = conclude([repeated(BASE, 100, 101, 102, conditions=QUIET), own], BudgetConf(memory_mib=200), None)
    assert comparison.feasible
    assert "the times of checkpoint were disturbed" in comparison.why
    assert judged(repeated(CHECKPOINT, 130, 131, 132, conditions=QUIET)).disturbed == []
    # What stands against a trial stays the first thing to do.
    assert "measure.repeats" not in judged(own, memory_mib=140).next_action


def test_a_clock_far_below_the_highest_seen_marks_the_trial() -> None:
    fast, slow = Conditions(gpu_clock_mhz=1900.0), Conditions(gpu_clock_mhz=1650.0)
    base = repeated(GPU_BASE, 100, 101, 102, conditions=fast)
    own = repeated(trial("checkpoint", 150.0, 130.0, evidence="measured"), 130, 131, 132, conditions=slow)
    assert judged(own, base).disturbed == ["repeat 1: the GPU's clock was down to 1650 MHz, from 1900"]
    assert judged(base, None).disturbed == []
    near = repeated(own, 130, 131, 132, conditions=Conditions(gpu_clock_mhz=1750.0))
    assert judged(near, base).disturbed == []


def test_a_repeat_that_went_wrong_loses_nothing_and_is_not_accepted() -> None:
    decision = judged(failing("DeviceOutOfMemory: tried to allocate"))
    assert decision.verdict == "tune"
    assert "1 of 3 repeats went wrong (repeat 3: DeviceOutOfMemory: tried to allocate)" in decision.why
    assert decision.saved_mib == 150.0
    assert decision.throughput_ratio is not None
    assert conclude([BASE, failing("crashed")], BudgetConf(memory_mib=200), None).feasible


def test_too_few_steps_or_repeats_are_never_accepted_whatever_is_asked_for() -> None:
    short = repeated(SHORT, 130)
    assert short.measurement is not None
    short.measurement.repeats = 1
    for least in MinEvidence:
        decision = judged(short, GPU_BASE, min_evidence=least)
        assert decision.verdict != "accept"
        assert "evidence_too_short" in decision.reasons
    assert "run it to its end: 1 of 3 repeats came to theirs" in judged(short, GPU_BASE).next_action
    assert STRENGTH["smoke"] < STRENGTH["measured"]


def test_quality_is_told_beside_the_baselines() -> None:
    base = repeated(BASE, 100, 101, 102, eval_loss=3.2)
    own = repeated(CHECKPOINT, 130, 131, 132, eval_loss=3.2)
    quality = judged(own, base).quality
    assert quality is not None
    assert (quality.verdict, quality.difference) == ("equal", 0.0)
    assert judged(base, None).quality is None


# ---- the whole comparison


def test_with_no_budget_the_baseline_is_kept_and_the_cheapest_saving_named() -> None:
    results = sweep_of_six()
    comparison = conclude(results, BudgetConf(), None)
    assert (comparison.verdict, comparison.preferred, comparison.baseline) == ("accept", "baseline", "baseline")
    assert comparison.cheapest_saving == "micro_batch"  # 184 MiB for 13 ms; hybrid saves more, for 48 ms
    assert "nothing needs to change" in comparison.why
    assert "no memory cap is set" in comparison.why
    assert "if memory gets short, micro_batch" in comparison.next_action
    assert comparison.feasible
    assert comparison.evidence == "cpu"


def test_a_saving_inside_the_noise_is_said_to_cost_no_time() -> None:
    results = [trial("baseline", 300.0, 100.0), trial("micro_batch", 200.0, 101.0), trial("checkpoint", 150.0, 120.0)]
    comparison = conclude(results, BudgetConf(), None)
    assert comparison.cheapest_saving == "micro_batch"
    assert "micro_batch saves 100.0 MiB (33 %) without a loss of time beyond the noise" in comparison.next_action


def test_under_a_cap_the_fastest_that_fits_is_preferred_not_the_smallest() -> None:
    results = sweep_of_six("measured")
    comparison = conclude(results, BudgetConf(memory_mib=130), None)
    decisions = by_name(comparison, results)
    assert comparison.preferred == "micro_batch"
    assert comparison.preferred_index == 1
    assert decisions["hybrid"].verdict == decisions["offload"].verdict == "accept"
    assert decisions["baseline"].next_action == "use micro_batch instead"
    assert "measured on this GPU" in comparison.why
    assert "GPU" not in comparison.next_action


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"micro_batch": 131, "checkpoint": 130, "offload": 129, "hybrid": 128}, "micro_batch"),
        ({"micro_batch": 150, "checkpoint": 130, "offload": 129, "hybrid": 128}, "checkpoint"),
        ({"micro_batch": 150, "checkpoint": 150, "offload": 129, "hybrid": 128}, "offload"),
        ({"micro_batch": 150, "checkpoint": 150, "offload": 150, "hybrid": 128}, "hybrid"),
        ({"checkpoint": 130, "checkpoint_selective": 129}, "checkpoint_selective"),  # the same kind: the faster
    ],
)
def test_inside_the_noise_the_one_that_changes_less(times: dict[str, float], expected: str) -> None:
    results = [trial("baseline", 300.0, 100.0), *(trial(name, 150.0, ms) for name, ms in times.items())]
    comparison = conclude(results, BudgetConf(memory_mib=200), None)
    assert comparison.preferred == expected
    if expected == "micro_batch":
        assert "cannot be told apart in time (faster by the median: checkpoint, offload, hybrid)" in comparison.why


def test_a_baseline_inside_the_noise_of_a_faster_trial_is_kept() -> None:
    results = [trial("baseline", 300.0, 100.0), trial("micro_batch", 200.0, 99.0)]
    assert conclude(results, BudgetConf(), None).preferred == "baseline"
    results = [trial("baseline", 300.0, 100.0), trial("micro_batch", 200.0, 90.0)]
    assert conclude(results, BudgetConf(), None).preferred == "micro_batch"


def test_how_much_a_trial_changes_is_read_from_what_it_does_not_from_its_name() -> None:
    both = trial("offload", 150.0, 129.0, name="mine", knobs={"checkpoint__granularity": "blocks"})
    results = [trial("baseline", 300.0, 100.0), both, trial("offload", 150.0, 130.0)]
    assert conclude(results, BudgetConf(memory_mib=200), None).preferred == "offload"
    bare = [changed(r, config={}) for r in (trial("hybrid", 150.0, 129.0), trial("micro_batch", 150.0, 130.0))]
    assert conclude([results[0], *bare], BudgetConf(memory_mib=200), None).preferred == "micro_batch"


def test_a_saving_asked_for_rules_the_baseline_out() -> None:
    results = sweep_of_six()
    comparison = conclude(results, BudgetConf(min_saving_mib=150), None)
    assert comparison.preferred == "micro_batch"
    assert by_name(comparison, results)["baseline"].reasons == ["saving_too_small"]


def test_a_baseline_out_of_memory_leaves_the_others_to_be_compared_with_each_other() -> None:
    results = [trial("baseline", outcome="oom_device", evidence="measured"), *sweep_of_six("measured")[1:]]
    comparison = conclude(results, BudgetConf(), 200.0)
    assert comparison.preferred == "micro_batch"
    assert comparison.against == "absolute floors and each other: the baseline ran out of device memory"
    assert comparison.cheapest_saving is None


def test_nothing_accepted_yet_names_the_nearest_and_its_next_action() -> None:
    comparison = conclude(sweep_of_six("smoke"), BudgetConf(memory_mib=140), None)
    assert (comparison.verdict, comparison.preferred, comparison.evidence) == ("tune", None, "smoke")
    assert comparison.next_action.startswith("micro_batch: try measure.steps=")
    assert comparison.feasible
    comparison = conclude(sweep_of_six(), BudgetConf(memory_mib=30), None)
    assert (comparison.verdict, comparison.preferred, comparison.feasible) == ("reject", None, False)
    assert comparison.next_action.startswith("hybrid: ")


def test_every_trial_out_of_memory_is_a_verdict_and_not_an_error() -> None:
    results = [trial(name, outcome="oom_device") for name in ("baseline", "micro_batch", "hybrid")]
    comparison = conclude(results, BudgetConf(), 100.0)
    assert (comparison.verdict, comparison.preferred, comparison.feasible) == ("tune", None, False)
    assert "micro_batch: try strategy.micro_batch_size=2" in comparison.next_action


def test_advice_that_was_run_already_says_what_came_of_it() -> None:
    results = sweep_of_six()
    decisions = by_name(conclude(results, BudgetConf(memory_mib=150), None), results)
    assert decisions["checkpoint_selective"].next_action.endswith("; run here already as checkpoint: accept")
    decisions = by_name(conclude(results, BudgetConf(memory_mib=140), None), results)
    assert decisions["checkpoint_selective"].next_action.endswith("checkpoint: tune, over_memory")


def test_predictions_are_compared_without_times_and_never_called_fast() -> None:
    results = [trial(r.name, r.peak_mib, mode="predict", evidence="predicted") for r in sweep_of_six()]
    comparison = conclude(results, BudgetConf(memory_mib=150), None)
    assert (comparison.preferred, comparison.evidence) == ("micro_batch", "predicted")
    assert "fastest" not in comparison.why
    assert "nothing was run" in comparison.why
    assert "mode=measure" in comparison.next_action
    kept = conclude(results, BudgetConf(), None)
    assert kept.preferred == "baseline"
    assert "what it costs in time is not known" in kept.next_action


def test_among_predictions_of_one_kind_the_larger_micro_batch_changes_less() -> None:
    results = [
        trial(
            "micro_batch", 100.0 + m, mode="predict", evidence="predicted", name=f"m{m}", knobs={"micro_batch_size": m}
        )
        for m in (2, 8, 4)
    ]
    assert conclude(results, BudgetConf(memory_mib=150), None).preferred == "m8"


def test_a_cpu_verdict_never_speaks_of_a_gpu_gain() -> None:
    comparison = conclude(sweep_of_six(), BudgetConf(memory_mib=150), None)
    assert "on this CPU: memory is the ledger's, times are this CPU's" in comparison.why
    assert "says nothing about a GPU" in comparison.next_action


def test_two_workloads_are_two_comparisons() -> None:
    results = sweep_of_six() + [changed(r, fixed_id="f2", workload="vit_digits") for r in sweep_of_six()[1:]]
    first, second = (group.conclude() for group in grouped(results, BudgetConf(), None))
    assert (first.workload, first.preferred) == ("gpt_tiny", "baseline")
    assert (second.workload, second.baseline, len(second.decisions)) == ("vit_digits", None, 5)
    assert "there is no baseline here" in second.against
    with pytest.raises(ValueError, match="one fixed_id"):
        conclude(results, BudgetConf(), None)


def test_each_comparison_is_judged_by_its_own_device_and_its_own_budget() -> None:
    large, small = (
        [changed(r, fixed_id=device, device=device, capacity_mib=capacity) for r in sweep_of_six()]
        for device, capacity in (("large", 400.0), ("small", 200.0))
    )
    first, second = (group.conclude() for group in grouped([*large, *small]))
    assert (first.cap_mib, first.preferred) == (400.0, "baseline")
    assert (second.cap_mib, second.preferred) == (200.0, "micro_batch")
    # One run that two jobs asked for, under a budget each; the baseline was run for the first.
    results = sweep_of_six()
    for r in results:
        r.budgets = [{"memory_mib": 115.0}] if r.is_baseline else [{"memory_mib": 115.0}, {"memory_mib": 150.0}]
    results[1].budgets.pop()
    strict, loose = grouped(results)
    assert (strict.conclude().cap_mib, strict.conclude().preferred) == (115.0, "hybrid")
    assert (loose.conclude().cap_mib, loose.conclude().preferred) == (150.0, "checkpoint")
    assert loose.conclude().baseline == "baseline"
    assert (len(strict.results), len(loose.results)) == (6, 5)
    assert loose.under == "budget.memory_mib=150"


def test_trials_of_other_data_are_another_comparison() -> None:
    results = [changed(r, data_version="a") for r in sweep_of_six()]
    results[2].data_version, results[3].data_version = "b", ""  # the data changed; it ended before it knew
    first, second = grouped(results)
    assert [r.name for r in second.results] == ["checkpoint"]
    assert len(first.results) == 5


def test_of_several_baselines_the_one_that_ran_is_the_reference() -> None:
    results = [trial("baseline", outcome="crashed"), trial("baseline", 300.0, 100.0, name="again"), CHECKPOINT]
    comparison = conclude(results, BudgetConf(), None)
    assert (comparison.baseline, comparison.baseline_index) == ("again", 1)


def test_a_stored_result_is_decided_as_the_fresh_one() -> None:
    results = sweep_of_six()
    results[2].measurement = measurement(145.5, 152.3, eval_loss=float("nan"))  # becomes null in JSON
    stored = [from_dict(TrialResult, to_dict(r)) for r in results]
    budget = BudgetConf(memory_mib=130, max_eval_loss_ratio=1.1, min_throughput_ratio=0.7)
    assert to_dict(conclude(stored, budget, None)) == to_dict(conclude(results, budget, None))


def test_a_comparison_survives_json() -> None:
    comparison = conclude(sweep_of_six(), BudgetConf(memory_mib=150), None)
    assert from_dict(Comparison, to_dict(comparison)) == comparison


def test_every_reason_has_a_meaning_and_a_next_step_for_every_strategy() -> None:
    for name in ("baseline", "micro_batch", "checkpoint", "checkpoint_selective", "offload", "hybrid", "unknown"):
        for code, reason in REASONS.items():
            for config in (trial(name).config, {}):
                step = reason.next_step(Case(trial(name, config=config), None))
                assert reason.meaning
                assert step.overrides or len(step.words) > 10, (code, name)


def test_deciding_needs_no_torch() -> None:
    code = "import sys, sweep.decide.verdict; assert not {'torch', 'mlflow', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trial_that_ran_and_failed_is_an_observation_and_no_prediction() -> None:
    """Nothing was measured to the end, but out of memory and NaN happened here, on this CPU."""
    failed = [trial("baseline", outcome="nan"), trial("checkpoint", outcome="oom_device")]
    assert conclude(failed, BudgetConf(), None).evidence == "cpu"
    refused = [trial("baseline", outcome="over_budget"), trial("checkpoint", outcome="over_budget")]
    assert conclude(refused, BudgetConf(), None).evidence == "predicted"


def test_the_quality_gate_is_asked_of_the_mean_over_the_seeds() -> None:
    baseline, *others = sweep_over_seeds(seeds=3)
    micro = next(r for r in others if r.strategy == "micro_batch")
    assert baseline.measurement is not None and micro.measurement is not None
    own = [r.eval_loss for r in micro.measurement.runs]
    base = [r.eval_loss for r in baseline.measurement.runs]
    ratio = statistics.mean(own) / statistics.mean(base)
    assert ratio != pytest.approx(own[0] / base[0], abs=1e-6), "the first seed alone says something else"
    for gate, verdict in ((ratio * 0.9999, "reject"), (ratio * 1.0001, "accept")):
        decision = decide(micro, baseline, BudgetConf(max_eval_loss_ratio=gate), None)
        assert decision.eval_loss_ratio == pytest.approx(ratio)
        assert decision.verdict == verdict, decision.why
    for gate, verdict in ((statistics.mean(own) * 0.9999, "reject"), (statistics.mean(own) * 1.0001, "accept")):
        assert decide(micro, baseline, BudgetConf(max_eval_loss=gate), None).verdict == verdict
