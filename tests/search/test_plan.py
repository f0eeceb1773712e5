"""The plan, the forecast and the candidates: on a real small workload, or on made-up pieces."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from small_workloads import config

from sweep.config.schema import CheckpointConf, Config, Granularity, OffloadConf, Placement, StrategyConf, plain
from sweep.config.strategy_names import describe as name_of
from sweep.config.strategy_names import is_baseline, kind_of, strategy_at
from sweep.results import Measurement, Outcome, TrialResult
from sweep.search import plan
from sweep.search.candidate import Job
from sweep.search.plan import Candidate, Forecast, Line, Pieces, fill, make_plan, probe_here, rank, signature
from sweep.search.preflight import Preflight, Suggest, choices, limits
from sweep.search.space import walk
from sweep.search.study import Record
from sweep.trial.measure import no_progress
from sweep.trial.process import call
from sweep.trial.trial import describe

WHOLE = 8


def strategy(micro: int = WHOLE, granularity: str = "none", every_k: int = 1, placement: str = "none") -> StrategyConf:
    return StrategyConf(
        name="own",
        micro_batch_size=micro,
        checkpoint=CheckpointConf(granularity=Granularity[granularity], every_k=every_k),
        offload=OffloadConf(placement=Placement[placement], min_tensor_kib=1.0),
    )


@pytest.fixture
def small() -> Config:
    return config("gpt")


def points(small: Config) -> list[dict[str, Any]]:
    node = OmegaConf.structured(small)
    return list(walk({}, partial(Suggest(), node)))


# -- candidates


def test_the_space_has_the_divisors_and_what_the_blocks_allow(small: Config) -> None:
    assert choices(small) == {
        "strategy.micro_batch_size": [8, 4, 2, 1],
        "strategy.checkpoint.granularity": ["none", "blocks", "selective", "parts"],
        "strategy.checkpoint.every_k": [4, 2, 1],
        "strategy.checkpoint.parts": ["[attn]", "[mlp]"],
        "strategy.offload.placement": ["none", "inputs", "blocks", "all"],
        "strategy.offload.blocks": ["first:1", "first:2", "first:3"],
        "strategy.offload.min_tensor_kib": [64.0, 1024.0],
    }


def test_a_key_that_means_nothing_is_not_asked_for_and_one_point_is_the_baseline(small: Config) -> None:
    found = points(small)
    assert len({tuple(sorted(p.items())) for p in found}) == len(found)
    checkpoint, offload = "strategy.checkpoint", "strategy.offload"
    for p in found:
        assert (f"{checkpoint}.every_k" in p) == (p[f"{checkpoint}.granularity"] == "blocks")
        assert (f"{checkpoint}.parts" in p) == (p[f"{checkpoint}.granularity"] == "parts")
        assert (f"{offload}.blocks" in p) == (p[f"{offload}.placement"] == "blocks")
        assert (f"{offload}.min_tensor_kib" in p) == (p[f"{offload}.placement"] != "none")
    strategies = [strategy_at(small, {k: str(v) for k, v in p.items()}) for p in found]
    assert sum(s is not None and is_baseline(s, WHOLE) for s in strategies) == 1


def test_a_model_without_blocks_is_searched_over_micro_batches_alone(small: Config) -> None:
    small.workload.model = {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 2}
    assert [v for v in choices(small).values() if v != ["none"]] == [[8, 4, 2, 1]]


def test_words_that_set_more_than_the_strategy_are_no_candidate(small: Config) -> None:
    assert strategy_at(small, ["workload.seq_len=4"]) is None
    found = strategy_at(small, ["strategy.checkpoint.granularity=parts", "strategy.checkpoint.parts=[attn,mlp]"])
    assert found is not None
    assert found.checkpoint.parts == ["attn", "mlp"]


@pytest.mark.parametrize(
    ("made", "name", "kind"),
    [
        (strategy(), "baseline", "baseline"),
        (strategy(4), "micro 4", "micro_batch"),
        (strategy(4, "blocks", 2), "micro 4, blocks/2", "checkpoint"),
        (strategy(8, "selective"), "selective", "checkpoint_selective"),
        (strategy(8, placement="inputs"), "offload inputs >=1K", "offload"),
        (strategy(2, "blocks", 1, "all"), "micro 2, blocks, offload all >=1K", "hybrid"),
    ],
)
def test_candidates_are_called_by_what_they_do(made: StrategyConf, name: str, kind: str) -> None:
    assert name_of(made, WHOLE) == name
    assert kind_of(made, WHOLE) == kind


# -- forecast


def test_a_prediction_is_compared_with_the_budget_and_with_the_capacity(small: Config) -> None:
    forecast = Forecast()
    peak = forecast.judge(small).prediction.allocated_mib
    assert forecast.judge(small).over == -1
    small.budget.memory_mib = peak / 2
    judged = forecast.judge(small)
    assert judged.over == pytest.approx(1.0)
    assert "budget.memory_mib" in judged.reason
    small.budget.memory_mib = None
    small.device.capacity_mib = peak / 2
    judged = forecast.judge(small)
    assert judged.over == pytest.approx(1.0, rel=0.1)
    assert "device.capacity_mib" in judged.reason


def test_what_was_measured_corrects_predictions_and_a_disagreement_is_said_loudly(small: Config) -> None:
    said: list[str] = []
    forecast = Forecast(margin=0.02, say=said.append)
    predicted = forecast.judge(small).prediction.allocated_mib
    small.budget.memory_mib = predicted * 1.05
    assert forecast.judge(small).fits
    forecast.learn(0, 100.0, 101.0)
    assert said == []
    forecast.learn(1, 100.0, 110.0)
    forecast.learn(2, 100.0, 110.0)
    assert said[0].startswith("WARNING: prediction and measurement disagree: trial 1")
    assert forecast.ratio == pytest.approx(1.1)
    assert not forecast.judge(small).fits
    assert "corrected by 1.100" in forecast.judge(small).reason


def test_an_unforeseen_out_of_memory_error_makes_the_forecast_more_careful(small: Config) -> None:
    said: list[str] = []
    forecast = Forecast(say=said.append)
    small.budget.memory_mib = forecast.judge(small).prediction.allocated_mib * 1.03
    over = forecast.judge(small).over
    assert over < 0
    forecast.learn_out_of_memory(0, over)
    assert not forecast.judge(small).fits
    assert "ran out of memory" in said[0]


def test_strategies_that_are_the_same_computation_have_one_signature(small: Config) -> None:
    forecast = Forecast()

    def signed(s: StrategyConf) -> str:
        own = replace(small, strategy=s)
        return signature(forecast.judge(own), own)

    assert signed(strategy(4)) == signed(replace(strategy(4), name="other"))
    assert signed(strategy(4, placement="all")) == signed(
        replace(strategy(4), offload=OffloadConf(placement=Placement.all, min_tensor_kib=1.01))
    )
    assert len({signed(strategy(m, g)) for m in (8, 4) for g in ("none", "blocks", "selective")}) == 6


def test_whatever_else_is_swept_is_another_computation(small: Config) -> None:
    """Its predicted peak, FLOPs and bytes may all be equal."""
    forecast, w = Forecast(), small.workload
    workloads = [
        w,
        replace(w, optimizer=replace(w.optimizer, lr=1000.0)),
        replace(w, optimizer=replace(w.optimizer, kwargs={"betas": [0.5, 0.9]})),
        replace(w, scheduler=replace(w.scheduler, warmup_steps=3)),
        replace(w, seed=1),
        replace(w, grad_clip_norm=0.1),
    ]
    others = [replace(small, workload=each) for each in workloads]
    others.append(replace(small, measure=replace(small.measure, steps=small.measure.steps + 1)))
    first = forecast.judge(small)
    assert len({signature(first, each) for each in others}) == len(others)
    preflight, info = Preflight(), {"computation": signature(first, others[1]), "predicted_mib": 1.0}
    preflight.learn(measured(0, info))
    said = preflight(asked(small, 1))
    assert said is not None and said.same_as is None


def asked(own: Config, number: int) -> Job:
    return Job(number, {}, [], ["samples_per_s"], config=OmegaConf.structured(own))


def measured(number: int, info: dict[str, Any]) -> Record:
    return Record(number, "ok", values=[1.0], info=info)


def test_the_preflight_refuses_with_a_violation_and_names_twins(small: Config) -> None:
    preflight = Preflight()
    said = preflight(asked(small, 0))
    assert said is not None and (said.constraints, said.same_as) == ({"memory": -1.0}, None)
    preflight.learn(measured(0, {**said.info, "measured_mib": said.info["predicted_mib"]}))
    small.strategy = replace(small.strategy, name="same", micro_batch_size=WHOLE)
    again = preflight(asked(small, 1))
    assert again is not None and again.same_as == 0
    small.budget.memory_mib = said.info["predicted_mib"] * 0.8
    refused = Preflight()(asked(small, 2))
    assert refused is not None and refused.constraints["memory"] == pytest.approx(0.25)


def test_offload_that_moves_nothing_is_refused_as_invalid(small: Config) -> None:
    small.strategy.offload = OffloadConf(placement=Placement.all, min_tensor_kib=1e6)
    said = Preflight()(asked(small, 0))
    assert said is not None and (said.run, said.constraints) == (False, {"valid": 1.0})


# -- what a trial came to


def ended(own: Config, outcome: str = "ok", peak: float = 50.0, speed: float = 100.0, loss: float = 2.0) -> TrialResult:
    result = describe(own, "trial")
    result.outcome = outcome
    if outcome == "ok":
        result.measurement = Measurement("cpu", 2, 2, 10.0, 9.0, 11.0, speed, None, peak, None, eval_loss=loss)
    return result


def test_each_limit_is_a_share_beyond_it(small: Config) -> None:
    small.strategy = strategy(4)
    baseline = ended(small, speed=200.0, loss=1.0)
    small.budget.memory_mib, small.budget.min_throughput_ratio, small.budget.max_eval_loss_ratio = 40.0, 0.8, 1.05
    found = limits(ended(small), baseline, small)
    assert found["memory"] == pytest.approx(0.25)
    assert found["throughput"] == pytest.approx(0.6)
    assert found["eval_loss"] == pytest.approx(2 / 1.05 - 1)
    assert limits(ended(small, peak=40.0, speed=160.0, loss=1.05), baseline, small) == pytest.approx(
        {"memory": 0, "throughput": 0, "eval_loss": 0, "valid": 0}
    )
    # Relative ones do not apply against a baseline that was not run.
    refused = limits(ended(small), ended(small, Outcome.over_budget.value), small)
    assert (refused["throughput"], refused["eval_loss"]) == (0, 0)


@pytest.mark.parametrize(
    ("outcome", "key"),
    [
        ("oom_device", "memory"),
        ("oom_host", "memory"),
        ("invalid", "valid"),
        ("nan", "valid"),
        ("timeout", "throughput"),
    ],
)
def test_a_trial_that_went_wrong_violates_a_limit(small: Config, outcome: str, key: str) -> None:
    found = limits(ended(small, outcome), None, small)
    assert found[key] > 0
    assert sum(v > 0 for v in found.values()) == 1
    if key == "memory":
        assert 0 < limits(ended(small, outcome), None, small, predicted_over=-0.1)["memory"] < 1


# -- the plan


def test_a_line_is_measured_points_and_straight_between_them() -> None:
    line = Line({2: 10.0, 4: 18.0, 16: 60.0})
    assert line.at(4) == 18.0
    assert line.at(3) == pytest.approx(14.0)
    assert line.at(1) == pytest.approx(6.0)
    assert Line({4: 8.0}).at(2) == 4.0
    assert Line().at(3) == 0.0


def test_a_step_is_made_of_its_pieces() -> None:
    pieces = Pieces(Line({4: 10.0, 8: 18.0}), {"blocks": Line({4: 4.0})}, 1.0, 0.5, 3.0, blocks=4)
    assert pieces.step_ms(strategy(8), WHOLE, 0.0) == pytest.approx(21.0)
    assert pieces.step_ms(strategy(4), WHOLE, 0.0) == pytest.approx(23.0)
    assert pieces.step_ms(strategy(4, "blocks", 1), WHOLE, 0.0) == pytest.approx(31.0)
    assert pieces.step_ms(strategy(4, "blocks", 2), WHOLE, 0.0) == pytest.approx(27.0)
    assert pieces.step_ms(strategy(4, placement="all"), WHOLE, 10.0) == pytest.approx(2 * 11 + 5 + 3)


def test_the_ranking_finds_the_best_that_are_predicted_to_fit_and_predicts_few(small: Config) -> None:
    """Against ranking everything: the same answer from fewer predictions."""
    pieces = Pieces(
        Line({1: 3.0, 2: 5.0, 4: 8.0, 8: 14.0}),
        {"blocks": Line({4: 3.0, 8: 5.0}), "selective": Line({4: 2.0, 8: 3.5})},
        hooks_ms=1.0,
        ms_per_mib=2.0,
        blocks=4,
    )
    forecast = Forecast()
    every_kind = itertools.product((8, 4, 2, 1), ("none", "blocks", "selective"), (1,), ("none", "all"))
    grid = [Candidate(i, strategy(*kind)) for i, kind in enumerate(every_kind)]
    small.budget.memory_mib = forecast.judge(replace(small, strategy=strategy(4, "selective"))).allocated_mib * 1.01
    every = []
    for c in grid:
        judged = forecast.judge(replace(small, strategy=c.strategy))
        if judged.fits:
            moved = judged.prediction.to_host_mib + judged.prediction.from_host_mib
            every.append((WHOLE / pieces.step_ms(c.strategy, WHOLE, moved) * 1000, c.point))
    best, predicted = rank(small, grid, pieces, forecast, 3)
    assert [r.samples_per_s for r in best] == pytest.approx([s for s, _ in sorted(every, reverse=True)[:3]])
    assert predicted < len(grid)


def test_a_plan_from_real_micro_steps_estimates_what_is_then_measured(small: Config, tmp_path: Path) -> None:
    kinds = [(8,), (4,), (1,), (8, "blocks"), (1, "blocks"), (8, "none", 1, "all")]
    candidates = [Candidate(i, strategy(*kind)) for i, kind in enumerate(kinds)]
    made = make_plan(small, candidates, Forecast(), 6, tmp_path)
    speeds = [r.samples_per_s for r in made.ranked]
    assert len(speeds) == 6 and min(speeds) > 0
    assert speeds == sorted(speeds, reverse=True)
    assert set(made.pieces.plain.points) == {1, 4, 8}
    # Eight micro-steps of one sample take longer than one of eight: the overhead of each is most of it here.
    order = [r.point for r in made.ranked]
    assert order.index(0) < min(order.index(2), order.index(4))


def test_micro_steps_can_be_timed_in_a_process_of_their_own(small: Config, tmp_path: Path) -> None:
    """What CUDA devices get; here the process has a CPU."""
    strategies = [strategy(4), strategy(4, "blocks"), strategy(4, "segments")]
    strategies[2].checkpoint.segment_size = 9  # more than there are blocks: goes wrong, and is not the end of it
    probed = call(probe_here, small, tmp_path, "probe.json", no_progress, strategies=[plain(s) for s in strategies])
    plainly, blocks, wrong = probed.micro_step_ms
    assert plainly > 0 and blocks > 0 and wrong is None
    assert probed.update_ms > 0


def test_a_size_that_does_not_fit_plainly_is_measured_with_what_lets_it_fit() -> None:
    pieces = Pieces(blocks=4)
    times = [(strategy(2), 10.0), (strategy(4), 18.0), (strategy(2, "blocks"), 14.0), (strategy(4, "blocks"), 24.0)]
    times += [
        (strategy(4, placement="all"), 18.0 + 1.0 + 4 * 0.5),
        (strategy(2, placement="all"), 10.0 + 1.0 + 2 * 0.5),
    ]
    times += [(strategy(8, "blocks"), 46.0), (strategy(8, placement="all"), 41.0)]
    fill(pieces, times, lambda s: float(s.micro_batch_size or 0))
    assert (pieces.hooks_ms, pieces.ms_per_mib) == (pytest.approx(1.0), pytest.approx(0.5))
    assert pieces.recompute_ms(strategy(8, "blocks").checkpoint, 8) == pytest.approx(10.0)
    assert pieces.plain.at(8) == pytest.approx((36.0 + 36.0) / 2)


def test_where_nothing_fits_plainly_the_share_of_recomputed_flops_tells_plain_times() -> None:
    pieces = Pieces(blocks=4)
    times = [(strategy(2, "selective"), 13.0), (strategy(2, "blocks"), 14.0), (strategy(2, placement="all"), 14.0)]
    share = {"selective": 0.2, "blocks": 0.4}
    fill(pieces, times, lambda s: 2.0, lambda s: share[s.checkpoint.granularity.name])
    assert pieces.plain.at(2) == pytest.approx(10.0)
    assert pieces.recompute_ms(strategy(2, "blocks").checkpoint, 2) == pytest.approx(4.0)
    assert pieces.recompute_ms(strategy(2, "selective").checkpoint, 2) == pytest.approx(3.0)
    assert pieces.step_ms(strategy(2, placement="all"), 2, 2.0) == pytest.approx(14.0)


def test_nothing_is_timed_that_is_predicted_not_to_fit(
    small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast, timed = Forecast(), []
    small.budget.memory_mib = forecast.judge(replace(small, strategy=strategy(2))).allocated_mib * 1.001
    real = plan.probe
    monkeypatch.setattr(plan, "probe", lambda c, s, f: timed.extend(s) or real(c, s, f))
    grid = [Candidate(None, strategy(m, g)) for m in (8, 4, 2, 1) for g in ("none", "blocks")]
    ranked = [r.strategy for r in make_plan(small, grid, forecast, 3, tmp_path).ranked]
    assert timed and ranked
    assert all(forecast.judge(replace(small, strategy=s)).fits for s in [*timed, *ranked])
