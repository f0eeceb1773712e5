"""Verdicts from made-up measurements: every reason code, every path to a preferred trial."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
from made_up import measurement, peak, prediction, sweep_of_six, sweep_over_seeds, trial, verified

from sweep.config.schema import BudgetConf, MinEvidence
from sweep.decide.reasons import REASONS, Case
from sweep.decide.verdict import STRENGTH, Facts, conclude, decide, grouped, memory_cap
from sweep.report import phrases
from sweep.report.phrases import advice, conclusion, next_action
from sweep.results import (
    Comparison,
    Conditions,
    Decision,
    Finding,
    Outcome,
    Run,
    TrialResult,
    WhatIf,
    from_dict,
    to_dict,
)

BASE = trial("baseline", 300.0, 100.0)
GPU_BASE = trial("baseline", 300.0, 100.0, evidence="measured")


def judged(
    result: TrialResult, baseline: TrialResult | None = BASE, capacity: float | None = None, **budget: Any
) -> Decision:
    return decide(Facts.of(result, baseline), BudgetConf(**budget), capacity)


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
BUSY = Conditions(cpu_others=1.4, disturbed=["cpu_others"])


def failing(error: str, outcome: str = "") -> TrialResult:
    result = repeated(trial("checkpoint", 150.0, 130.0), 130, 131, 132)
    assert result.measurement is not None
    result.measurement.runs[2] = Run(2, 0, "2025-01-01T00:20:00+00:00", error=error, outcome=outcome)
    return result


def differs(strategy: str, **verification: Any) -> TrialResult:
    """A trial that does not compute what the baseline computes."""
    return trial(strategy, outcome="invalid", verification=verified(0.3, passed=False, **verification))


# code, trial, baseline, budget, verdict, what the next action names
TABLE: list[tuple[str, TrialResult, TrialResult | None, dict[str, Any], str, str]] = [
    ("over_memory", CHECKPOINT, BASE, {"memory_mib": 140}, "tune", "strategy.micro_batch_size=8"),
    ("over_memory", MICRO, BASE, {"memory_mib": 140}, "tune", "strategy.micro_batch_size=2"),
    ("over_memory", BASE, None, {"memory_mib": 200}, "reject", "strategy=micro_batch strategy.micro_batch_size=8"),
    ("over_memory", PREDICTED, PREDICTED_BASE, {"memory_mib": 140}, "tune", "strategy.micro_batch_size=8"),
    ("over_memory", changed(PREDICTED, prediction=prediction(150.0, fits=False, capacity_mib=500.0)), PREDICTED_BASE,
     {}, "tune", "strategy.micro_batch_size=8"),
    ("below_throughput", CHECKPOINT, BASE, {"min_throughput_ratio": 0.9}, "tune", "strategy.checkpoint.every_k=2"),
    ("below_throughput", CHECKPOINT, BASE, {"min_samples_per_s": 150}, "tune", "strategy.checkpoint.every_k=2"),
    ("below_throughput", MICRO, BASE, {"min_throughput_ratio": 0.95}, "tune", "strategy.micro_batch_size=8"),
    ("below_throughput", BASE, None, {"min_samples_per_s": 500}, "reject", "faster device"),
    ("quality_lost", trial("micro_batch", 160.0, 110.0, measure={"eval_loss": 3.6}), BASE,
     {"max_eval_loss_ratio": 1.05}, "reject", "workload.seed=1"),
    ("quality_lost", MICRO, BASE, {"max_eval_loss": 3.0}, "reject", "keep the baseline"),
    ("saving_too_small", CHECKPOINT, BASE, {"min_saving_mib": 200}, "tune", "strategy.micro_batch_size=8"),
    ("saving_too_small", trial("offload", 310.0, 140.0), BASE, {}, "tune", "strategy.offload.keep_last=0"),
    ("saving_too_small", BASE, None, {"min_saving_mib": 1}, "reject", "strategy=micro_batch"),
    ("evidence_too_short", SHORT, GPU_BASE, {}, "tune", "measure.steps=10 measure.repeats=3"),
    ("evidence_too_short", SHORT, GPU_BASE, {"min_evidence": MinEvidence.smoke}, "tune", "measure.steps"),
    ("evidence_too_short", changed(SHORT, config={**SHORT.config, "measure": {"warmup_steps": 0}}), GPU_BASE, {},
     "tune", "measure.warmup_steps=2"),
    ("evidence_too_weak", CHECKPOINT, BASE, {"min_evidence": MinEvidence.measured}, "tune", "device=auto"),
    ("evidence_too_weak", PREDICTED, PREDICTED_BASE, {"min_evidence": MinEvidence.cpu}, "tune", "mode=measure"),
    ("not_equivalent", differs("micro_batch", cause="batch_statistics", where="bn1 (BatchNorm2d)"), BASE, {},
     "reject", "strategy=checkpoint (bn1 (BatchNorm2d) computes over all samples"),
    ("not_equivalent",
     trial("micro_batch", outcome="invalid", reason="batch_statistics", error="NotEquivalent: norm (BatchNorm1d)"),
     BASE, {}, "reject", "GroupNorm"),
    ("not_equivalent", differs("micro_batch", cause="loss_is_no_mean_over_samples"), BASE, {}, "reject",
     "give it `count(batch)`"),
    ("not_equivalent", differs("checkpoint", cause="state", where="memory"), BASE, {}, "reject",
     "forward changes memory"),
    ("not_equivalent", differs("checkpoint", cause="random"), BASE, {}, "reject", "numpy's global generator"),
    ("not_equivalent", differs("checkpoint", cause="baseline_does_not_repeat"), BASE, {}, "reject",
     "not the strategy's fault"),
    ("not_equivalent", changed(CHECKPOINT, verification=verified(0.3, passed=False)), BASE, {}, "reject", "not known"),
    ("not_equivalent", differs("offload", grad_worst="head.weight"), BASE, {}, "reject", "begin at head.weight"),
    ("not_equivalent", trial("offload", outcome="invalid", knobs={"offload__implementation": "save_on_cpu"}), BASE,
     {}, "tune", "strategy.offload.implementation=hooks"),
    ("repeat_failed", failing("tried to allocate", "oom_device"), BASE, {}, "tune", "strategy.micro_batch_size=8"),
    ("repeat_failed", failing("not done", "timeout"), BASE, {}, "tune", "measure.timeout_s=1200"),
    ("repeat_failed", failing("killed by SIGKILL", "crashed"), BASE, {}, "tune", "measure it again"),
    ("disturbed", repeated(CHECKPOINT, 130, 131, 132, conditions=BUSY), BASE, {}, "accept", "measure.repeats=6"),
    ("not_verified", changed(CHECKPOINT, verification=None), BASE, {}, "tune", "measure.verify=true"),
    ("out_of_memory", trial("micro_batch", outcome="oom_device"), BASE, {}, "tune", "strategy.micro_batch_size=2"),
    ("out_of_memory", trial("baseline", outcome="oom_device"), None, {}, "reject", "strategy=micro_batch"),
    ("out_of_host_memory", trial("offload", outcome="oom_host"), BASE, {}, "tune", "strategy.offload.placement=inputs"),
    ("out_of_host_memory", trial("checkpoint", outcome="oom_host"), BASE, {}, "reject", "host memory"),
    ("over_budget", trial("micro_batch", outcome="over_budget", evidence="predicted"), BASE, {}, "tune",
     "micro_batch_size=2"),
    ("not_finite", trial("checkpoint", outcome="nan"), BASE, {}, "reject", "workload.optimizer.lr=0.0001"),
    ("timed_out", trial("offload", outcome="timeout"), BASE, {}, "tune", "measure.timeout_s=1200"),
    ("crashed", trial("offload", outcome="crashed", folder="multirun/x/4"), BASE, {}, "reject",
     "multirun/x/4/result.json"),
    ("failed", trial("offload", outcome="failed", error="RuntimeError: no"), BASE, {}, "reject", "HYDRA_FULL_ERROR=1"),
    ("bad_setting",
     trial("checkpoint", outcome="invalid",
     error="BadInput: workload.blocks=x.*: matches no module; give another pattern"),
     BASE, {}, "reject", "do what its error says"),
    ("nothing_offloaded", trial("offload", outcome="failed", error="NothingOffloaded: 0 bytes"), BASE, {}, "tune",
     "min_tensor_kib=0"),
    ("nothing_offloaded", trial("offload", outcome="failed", reason="nothing_offloaded"), BASE, {}, "tune",
     "min_tensor_kib=0"),
    ("nothing_recomputed",
     trial("checkpoint", outcome="invalid", error="NothingRecomputed: layers.0 was not called; name others"), BASE,
     {}, "reject", "name the modules"),
    ("uncertain",
     changed(PREDICTED, prediction=prediction(150.0, capacity_mib=570.0, caveats=["not counted: workspaces"])),
     PREDICTED_BASE, {}, "tune", "mode=measure"),
    ("not_verified", changed(CHECKPOINT, verification=verified(passed=False, status="not_verified", steps=3)), BASE,
     {}, "tune", "measure.verify_steps=6"),
    ("not_verified",
     changed(CHECKPOINT, verification=verified(passed=False, status="not_comparable",
     cause="baseline_does_not_repeat")),
     BASE, {}, "tune", "the baseline does not repeat itself"),
    ("not_predictable",
     trial("checkpoint", outcome="invalid", mode="predict", evidence="predicted", error="CannotPredict: nonzero"),
     PREDICTED_BASE, {}, "tune", "mode=measure"),
    ("memory_unknown", trial("checkpoint", 150.0, 130.0, measure={"peak_allocated_mib": float("nan")}), BASE,
     {"memory_mib": 200}, "tune", "measure.ledger=true"),
    ("throughput_unknown", PREDICTED, PREDICTED_BASE, {"min_throughput_ratio": 0.5}, "tune", "mode=measure"),
    ("throughput_unknown", PREDICTED, PREDICTED_BASE, {"min_samples_per_s": 5}, "tune", "mode=measure"),
    ("quality_unknown", PREDICTED, PREDICTED_BASE, {"max_eval_loss": 3.0}, "tune", "mode=measure"),
    ("quality_unknown", trial("checkpoint", 150.0, 130.0, measure={"eval_loss": None}), BASE,
     {"max_eval_loss_ratio": 1.1}, "tune", "measure.eval_batches=2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "result", "baseline", "budget", "verdict", "action"), TABLE, ids=lambda v: v if isinstance(v, str) else ""
)
def test_each_reason_gives_its_verdict_and_names_what_to_type(
    code: str, result: TrialResult, baseline: TrialResult | None, budget: dict[str, Any], verdict: str, action: str
) -> None:
    decision = judged(result, baseline, **budget)
    assert decision.reasons == [code]
    assert decision.verdict == verdict
    assert action in advice(decision.advice)
    assert phrases.why(result, decision)


def test_what_a_prediction_does_not_count_makes_it_less_sure_and_is_said() -> None:
    sure = prediction(150.0, capacity_mib=16000.0)
    unsure = dataclasses.replace(sure, caveats=["not counted: workspaces"])
    decision = judged(changed(PREDICTED, prediction=unsure), PREDICTED_BASE)
    assert (decision.verdict, decision.reasons) == ("accept", ["uncertain"])
    assert judged(changed(PREDICTED, prediction=sure), PREDICTED_BASE).reasons == []
    whose = dataclasses.replace(sure, caveats=["the peak is in evaluation: it takes 150.0 MiB, training 90.0 MiB"])
    assert judged(changed(PREDICTED, prediction=whose), PREDICTED_BASE).reasons == []
    near = judged(changed(PREDICTED, prediction=unsure), PREDICTED_BASE, memory_mib=151)
    assert (near.verdict, near.reasons) == ("tune", ["uncertain"])
    comparison = conclude([PREDICTED_BASE, changed(PREDICTED, prediction=unsure)], BudgetConf(memory_mib=200), None)
    assert comparison.preferred == "checkpoint"


def test_the_table_covers_every_code() -> None:
    assert {row[0] for row in TABLE} == set(REASONS)


def test_every_outcome_but_ok_has_a_reason_of_its_own() -> None:
    codes = {o: judged(trial("offload", outcome=o.value)).reasons[0] for o in Outcome if o is not Outcome.ok}
    assert len(set(codes.values())) == len(codes)


def test_a_trial_within_the_whole_budget_is_accepted_with_its_numbers() -> None:
    decision = judged(CHECKPOINT, memory_mib=150, min_throughput_ratio=0.7, max_eval_loss_ratio=1.0, min_saving_mib=150)
    assert (decision.verdict, decision.reasons, decision.advice) == ("accept", [], None)
    assert (decision.peak_mib, decision.saved_mib, decision.eval_loss_ratio, decision.cap_mib) == (150, 150, 1, 150)
    assert decision.throughput_ratio == pytest.approx(100 / 130)
    assert decision.findings == []


@pytest.mark.parametrize(
    ("strategy", "knobs", "blocks", "cap", "expected"),
    [
        ("micro_batch", {"micro_batch_size": 4}, 8, 140, "strategy.micro_batch_size=2"),
        ("micro_batch", {"micro_batch_size": 3}, 8, 140, "strategy.micro_batch_size=1"),
        ("micro_batch", {"micro_batch_size": 8}, 8, 80, "strategy.micro_batch_size=1"),  # 60 + 90/8 fit, 60 + 90/4 not
        ("micro_batch", {"micro_batch_size": 1}, 8, 140, "strategy=checkpoint strategy.micro_batch_size=1"),
        ("checkpoint", {"checkpoint__every_k": 4}, 8, 140, "strategy.checkpoint.every_k=2"),
        ("checkpoint", {"checkpoint__every_k": 2}, 8, 140, "strategy.checkpoint.every_k=1 (recompute one block in 1"),
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
        ("hybrid", {}, 8, 40, "60.0 MiB, more than the cap"),
    ],
)
def test_over_memory_turns_the_knobs_of_its_own_strategy_first(
    strategy: str, knobs: dict[str, Any], blocks: int, cap: float, expected: str
) -> None:
    decision = judged(trial(strategy, 150.0, 130.0, knobs=knobs, blocks=blocks), memory_mib=cap)
    assert decision.reasons == ["over_memory"]
    assert expected in advice(decision.advice)
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
    assert expected in advice(decision.advice)
    assert decision.verdict == ("reject" if expected == "no faster setting" else "tune")


def test_a_floor_missed_inside_the_noise_asks_for_more_steps_not_for_another_setting() -> None:
    decision = judged(trial("checkpoint", 150.0, 112.0, measure={"spread": 0.02}), min_throughput_ratio=0.9)
    assert decision.reasons == ["below_throughput"]
    assert "measure.steps=10" in advice(decision.advice)
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
    assert "at once" in advice(decision.advice)


def test_a_reason_that_no_knob_mends_decides_over_one_that_can_be_tuned() -> None:
    result = trial("checkpoint", 150.0, 130.0, measure={"eval_loss": 9.0})
    decision = judged(result, memory_mib=140, max_eval_loss=4)
    assert decision.reasons == ["quality_lost", "over_memory"]
    assert decision.verdict == "reject"
    assert "workload.seed=1" in advice(decision.advice)


def test_a_peak_in_the_optimizer_points_to_a_change_of_the_optimizer_that_was_predicted() -> None:
    """What the workload would refuse (SGD with the betas of AdamW) is not among them."""
    at = {"parameter": 40.0, "gradient": 40.0, "optimizer_state": 80.0, "temporary": 40.0}
    result = trial("checkpoint", 200.0, 130.0, measure={"peak": peak(200.0, "optimizer", **at)})
    sgd = "workload.optimizer.name=sgd ~workload.optimizer.kwargs.betas"
    changes = [WhatIf(sgd, 120.0, 120.0, 80.0, "backward", "", "sgd")]
    result.prediction = prediction(200.0, what_if=changes)
    decision = judged(result, memory_mib=190)
    assert decision.verdict == "reject" and decision.advice is not None
    assert decision.advice.overrides == []  # of temporaries, which take a fifth of the peak, SGD keeps as many
    fused = WhatIf("workload.optimizer.implementation=fused", 160.0, 160.0, 40.0, "optimizer", "", "fused")
    result.prediction.what_if = [fused, *changes]
    assert "try workload.optimizer.implementation=fused" in advice(judged(result, memory_mib=190).advice)
    assert result.measurement is not None
    result.measurement.peak = peak(200.0, "optimizer", **{**at, "temporary": 2.0, "parameter": 78.0})
    result.prediction.what_if = changes
    found = judged(result, memory_mib=199).advice
    assert found is not None and found.overrides == sgd.split()


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
    results = [trial("baseline", outcome="oom_device"), result]
    comparison = conclude(results, BudgetConf(), 200.0)
    assert comparison.preferred == "checkpoint"
    assert "not verified" in conclusion(comparison, results)


def test_a_strategy_that_saves_nothing_must_be_faster() -> None:
    assert judged(trial("micro_batch", 300.0, 80.0)).verdict == "accept"
    assert judged(trial("micro_batch", 300.0, 99.0)).reasons == ["saving_too_small"]  # inside the noise
    assert judged(trial("micro_batch", 300.0, 80.0), min_saving_mib=0).verdict == "accept"


@pytest.mark.parametrize(
    ("evidence", "mode", "least", "verdict"),
    [
        ("cpu", "measure", MinEvidence.auto, "accept"), ("cpu", "measure", MinEvidence.predicted, "accept"),
        ("measured", "measure", MinEvidence.auto, "accept"), ("measured", "measure", MinEvidence.cpu, "accept"),
        ("predicted", "predict", MinEvidence.auto, "accept"),
        ("predicted", "predict", MinEvidence.measured, "tune"), ("cpu", "measure", MinEvidence.measured, "tune"),
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


@pytest.mark.parametrize("outcome", ["oom_device", "crashed", "over_budget", "nan"])
def test_without_a_baseline_that_ran_only_absolute_floors_count(outcome: str) -> None:
    base = trial("baseline", outcome=outcome, evidence="measured")
    result = trial("checkpoint", 150.0, 130.0, evidence="measured")
    floors = {"min_throughput_ratio": 0.99, "max_eval_loss_ratio": 0.5, "min_saving_mib": 1e6}
    relative = judged(result, base, capacity=200.0, **floors)
    assert relative.verdict == "accept"
    assert (relative.saved_mib, relative.throughput_ratio) == (None, None)
    assert judged(result, base, min_samples_per_s=200).reasons == ["below_throughput"]


def test_a_measured_peak_is_not_subtracted_from_a_predicted_one() -> None:
    base = trial("baseline", outcome="over_budget", evidence="predicted", prediction=prediction(900.0, fits=False))
    assert judged(trial("checkpoint", 150.0), base).saved_mib is None
    assert judged(PREDICTED, PREDICTED_BASE).saved_mib == 150.0
    dead = trial("checkpoint", outcome="oom_device", evidence="measured", prediction=prediction(500.0))
    assert judged(dead).peak_mib is None  # nor is what it would have taken given as its peak


# ---- how sure


def test_a_difference_inside_the_noise_is_called_none_everywhere() -> None:
    base, own = repeated(BASE, 99, 100, 101), repeated(trial("micro_batch", 200.0, 100.0), 102, 100, 99)
    decision = judged(own, base)
    assert decision.step is not None
    assert decision.step.none
    assert decision.step.low < 1 < decision.step.high
    assert conclude([base, own], BudgetConf(), None).preferred == "baseline"
    slower = repeated(trial("checkpoint", 150.0, 120.0), 120, 121, 119)
    decision = judged(slower, base)
    assert decision.step is not None
    assert not decision.step.none
    assert decision.step.low > 1.1


def test_a_drift_swallows_the_differences_below_it_and_is_told() -> None:
    base = repeated(BASE, 100, 102, 104, 107, at_end=True)
    own = repeated(trial("micro_batch", 200.0, 100.0), 97, 99, 101)
    comparison = conclude([base, own], BudgetConf(), None)
    assert comparison.drift is not None
    assert comparison.drift.difference.ratio == pytest.approx(1.07)
    assert comparison.drift.minutes == 30
    assert comparison.decisions[1].step is not None
    assert comparison.decisions[1].step.none
    assert comparison.preferred == "baseline"
    quiet = repeated(BASE, 102, 103, 104, at_end=False)  # the same times, and no repeat at the end
    comparison = conclude([quiet, own], BudgetConf(), None)
    assert comparison.drift is None
    assert comparison.decisions[1].step is not None
    assert not comparison.decisions[1].step.none
    assert comparison.preferred == "micro_batch"


def test_a_floor_missed_by_less_than_the_drift_asks_for_more_steps() -> None:
    base = repeated(BASE, 100, 102, 104, 107, at_end=True)
    own = repeated(trial("micro_batch", 200.0, 100.0), 108, 109, 110)
    decision = judged(own, base, min_throughput_ratio=0.99)
    assert decision.reasons == ["below_throughput"]
    assert "missed by less than the spread" in advice(decision.advice)
    assert "missed by" not in advice(judged(own, base, min_throughput_ratio=1.1).advice)


def test_a_disturbed_trial_is_marked_and_still_judged() -> None:
    own = repeated(CHECKPOINT, 130, 131, 132, conditions=BUSY)
    decision = judged(own)
    assert (decision.verdict, decision.reasons) == ("accept", ["disturbed"])
    assert decision.disturbed == [Finding("cpu_others", {"repeat": 1.0, "cores": 1.4}, {"throttled": ""})]
    comparison = conclude([repeated(BASE, 100, 101, 102, conditions=QUIET), own], BudgetConf(memory_mib=200), None)
    assert comparison.feasible
    assert judged(repeated(CHECKPOINT, 130, 131, 132, conditions=QUIET)).disturbed == []
    # What stands against a trial stays the first thing to do.
    assert "measure.repeats" not in advice(judged(own, memory_mib=140).advice)


def test_a_repeat_that_went_wrong_loses_nothing_and_is_not_accepted() -> None:
    decision = judged(failing("DeviceOutOfMemory: tried to allocate"))
    assert decision.verdict == "tune"
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
    assert "run it to its end: 1 of 3 repeats came to theirs" in advice(judged(short, GPU_BASE).advice)
    assert STRENGTH["smoke"] < STRENGTH["measured"]


# ---- the whole comparison


def test_with_no_budget_the_baseline_is_kept_and_the_cheapest_saving_named() -> None:
    results = sweep_of_six()
    comparison = conclude(results, BudgetConf(), None)
    assert (comparison.verdict, comparison.preferred, comparison.baseline) == ("accept", "baseline", "baseline")
    assert comparison.cheapest_saving == "micro_batch"  # 184 MiB for 13 ms; hybrid saves more, for 48 ms
    assert "nothing needs to change" in conclusion(comparison, results)
    assert "no memory cap is set" in conclusion(comparison, results)
    assert "if memory gets short, micro_batch" in next_action(comparison, results)
    assert comparison.feasible
    assert comparison.evidence == "cpu"


def test_a_saving_inside_the_noise_is_said_to_cost_no_time() -> None:
    results = [trial("baseline", 300.0, 100.0), trial("micro_batch", 200.0, 101.0), trial("checkpoint", 150.0, 120.0)]
    comparison = conclude(results, BudgetConf(), None)
    assert comparison.cheapest_saving == "micro_batch"
    words = "micro_batch saves 100.0 MiB (33 %) without a loss of time beyond the noise"
    assert words in next_action(comparison, results)


def test_under_a_cap_the_fastest_that_fits_is_preferred_not_the_smallest() -> None:
    results = sweep_of_six("measured")
    comparison = conclude(results, BudgetConf(memory_mib=130), None)
    decisions = by_name(comparison, results)
    assert comparison.preferred == "micro_batch"
    assert comparison.preferred_index == 1
    assert decisions["hybrid"].verdict == decisions["offload"].verdict == "accept"
    assert advice(decisions["baseline"].advice) == "use micro_batch instead"
    assert "measured on this GPU" in conclusion(comparison, results)
    assert "GPU" not in next_action(comparison, results)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        # Peak in MiB and step in ms; the times lie inside 4 % of each other unless they differ by more than that.
        ({"micro_batch": (150, 131), "checkpoint": (150, 130), "offload": (150, 128)}, "micro_batch"),
        ({"micro_batch": (150, 131), "checkpoint": (140, 130), "offload": (130, 128)}, "offload"),
        ({"micro_batch": (120, 150), "checkpoint": (140, 130), "offload": (150, 129)}, "checkpoint"),
        ({"checkpoint": (150, 130), "checkpoint_selective": (150, 129)}, "checkpoint_selective"),  # alike: the faster
        ({"baseline": (190, 131), "checkpoint": (150, 130)}, "baseline"),  # it fits, and none is faster
        ({"baseline": (190, 131), "checkpoint": (150, 120)}, "checkpoint"),
    ],
)
def test_of_those_that_cannot_be_told_apart_in_time_the_smaller_and_then_the_one_that_changes_less(
    trials: dict[str, tuple[float, float]], expected: str
) -> None:
    trials = {"baseline": (300, 100), **trials}
    results = [trial(name, peak, ms) for name, (peak, ms) in trials.items()]
    assert conclude(results, BudgetConf(memory_mib=200), None).preferred == expected


def test_no_accepted_trial_is_both_faster_and_smaller_than_the_one_to_take() -> None:
    """The slow one cannot be told apart from the fastest because it is noisy; the middle one can, and beats it."""
    fastest, middle = repeated(trial("offload", 150.0), 100, 100.2, 99.8), repeated(trial("hybrid", 100.0), 104, 104.2)
    noisy = repeated(trial("checkpoint", 140.0), 90, 110, 130)
    results = [trial("baseline", 300.0, 60.0), fastest, middle, noisy]
    assert conclude(results[:2] + results[3:], BudgetConf(memory_mib=200), None).preferred == "checkpoint"
    assert conclude(results, BudgetConf(memory_mib=200), None).preferred == "hybrid"


def test_how_much_a_trial_changes_is_read_from_what_it_does_not_from_its_name() -> None:
    both = trial("offload", 150.0, 129.0, name="mine", knobs={"checkpoint__granularity": "blocks"})
    results = [trial("baseline", 300.0, 100.0), both, trial("offload", 150.0, 130.0)]
    assert conclude(results, BudgetConf(memory_mib=200), None).preferred == "offload"


def test_a_baseline_out_of_memory_leaves_the_others_to_be_compared_with_each_other() -> None:
    results = [trial("baseline", outcome="oom_device", evidence="measured"), *sweep_of_six("measured")[1:]]
    comparison = conclude(results, BudgetConf(), 200.0)
    assert comparison.preferred == "micro_batch"
    assert comparison.cheapest_saving is None


def test_nothing_accepted_yet_names_the_nearest_and_its_next_action() -> None:
    results = sweep_of_six("smoke")
    comparison = conclude(results, BudgetConf(memory_mib=140), None)
    assert (comparison.verdict, comparison.preferred, comparison.evidence) == ("tune", None, "smoke")
    assert next_action(comparison, results).startswith("micro_batch: try measure.steps=")
    assert comparison.feasible
    results = sweep_of_six()
    comparison = conclude(results, BudgetConf(memory_mib=30), None)
    assert (comparison.verdict, comparison.preferred, comparison.feasible) == ("reject", None, False)
    assert next_action(comparison, results).startswith("hybrid: ")


def test_every_trial_out_of_memory_is_a_verdict_and_not_an_error() -> None:
    results = [trial(name, outcome="oom_device") for name in ("baseline", "micro_batch", "hybrid")]
    comparison = conclude(results, BudgetConf(), 100.0)
    assert (comparison.verdict, comparison.preferred, comparison.feasible) == ("tune", None, False)
    assert "micro_batch: try strategy.micro_batch_size=2" in next_action(comparison, results)


def test_advice_that_was_run_already_names_the_trial() -> None:
    results = sweep_of_six()
    decisions = by_name(conclude(results, BudgetConf(memory_mib=150), None), results)
    assert decisions["checkpoint_selective"].advice is not None
    assert decisions["checkpoint_selective"].advice.ran_as == "checkpoint"
    assert advice(decisions["checkpoint_selective"].advice).endswith("; run here already as checkpoint")
    decisions = by_name(conclude(results, BudgetConf(memory_mib=110), None), results)
    assert decisions["micro_batch"].advice is not None and decisions["micro_batch"].advice.ran_as == ""


def test_predictions_are_compared_without_times_and_never_called_fast() -> None:
    results = [trial(r.name, r.peak_mib, mode="predict", evidence="predicted") for r in sweep_of_six()]
    comparison = conclude(results, BudgetConf(memory_mib=150), None)
    assert (comparison.preferred, comparison.evidence) == ("micro_batch", "predicted")
    assert "fastest" not in conclusion(comparison, results)
    assert "nothing was run" in conclusion(comparison, results)
    assert "mode=measure" in next_action(comparison, results)
    kept = conclude(results, BudgetConf(), None)
    assert kept.preferred == "baseline"
    assert "what it costs in time is not known" in next_action(kept, results)


def test_among_predictions_of_one_kind_the_larger_micro_batch_changes_less() -> None:
    predicted = {"mode": "predict", "evidence": "predicted"}
    sizes = [(m, {"micro_batch_size": m}) for m in (2, 8, 4)]
    results = [trial("micro_batch", 100.0 + m, name=f"m{m}", knobs=knobs, **predicted) for m, knobs in sizes]
    assert conclude(results, BudgetConf(memory_mib=150), None).preferred == "m8"


def test_two_workloads_are_two_comparisons() -> None:
    results = sweep_of_six() + [changed(r, fixed_id="f2", workload="vit_digits") for r in sweep_of_six()[1:]]
    first, second = (group.conclude() for group in grouped(results, BudgetConf(), None))
    assert (first.workload, first.preferred) == ("gpt_tiny", "baseline")
    assert (second.workload, second.baseline, len(second.decisions)) == ("vit_digits", None, 5)
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
    comparison = conclude(results, budget, None)
    assert to_dict(conclude(stored, budget, None)) == to_dict(comparison)
    assert from_dict(Comparison, to_dict(comparison)) == comparison


def test_every_reason_has_advice_in_words_for_every_strategy() -> None:
    for name in ("baseline", "micro_batch", "checkpoint", "checkpoint_selective", "offload", "hybrid", "unknown"):
        for code, of in REASONS.items():
            for config in (trial(name).config, {}):
                assert len(advice(of(Case(trial(name, config=config), None)))) > 10, (code, name)


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
        decision = judged(micro, baseline, max_eval_loss_ratio=gate)
        assert decision.eval_loss_ratio == pytest.approx(ratio)
        assert decision.verdict == verdict
    for gate, verdict in ((statistics.mean(own) * 0.9999, "reject"), (statistics.mean(own) * 1.0001, "accept")):
        assert judged(micro, baseline, max_eval_loss=gate).verdict == verdict
