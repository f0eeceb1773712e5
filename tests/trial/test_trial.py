"""One trial, and what makes it the same as another: identity is the computation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from small_workloads import config
from torch import nn

from sweep.config.device import load_profile
from sweep.config.schema import (
    CheckpointConf,
    Config,
    DeviceConf,
    Dtype,
    Granularity,
    Mode,
    OffloadConf,
    OffloadImplementation,
    Placement,
    StrategyConf,
    TrackingConf,
)
from sweep.config.strategy_names import fixed_id, is_baseline, strategy_id
from sweep.decide.verdict import conclude
from sweep.errors import NotEquivalent
from sweep.report import judge
from sweep.session import Session, State, now
from sweep.trial.check import check_known
from sweep.trial.trial import run_trial

BLOCKS, SELECTIVE, SEGMENTS = Granularity.blocks, Granularity.selective, Granularity.segments
IN_BLOCKS, SAVE_ON_CPU = Placement.blocks, OffloadImplementation.save_on_cpu


def checkpoint(granularity: Granularity = BLOCKS, **changes: object) -> StrategyConf:
    return StrategyConf(name="c", checkpoint=CheckpointConf(granularity=granularity, **changes))  # type: ignore[arg-type]


def offload(placement: Placement = Placement.all, **changes: object) -> StrategyConf:
    return StrategyConf(name="o", offload=OffloadConf(placement=placement, **changes))  # type: ignore[arg-type]


SAME = {
    "name": (StrategyConf(name="a"), StrategyConf(name="b")),
    "whole batch": (StrategyConf(name="a", micro_batch_size=8), StrategyConf(name="a")),
    "more than the batch": (StrategyConf(name="a", micro_batch_size=99), StrategyConf(name="a")),
    "idle checkpoint": (
        StrategyConf(name="a", checkpoint=CheckpointConf(every_k=3, segment_size=2, parts=["mlp"], keep_ops=["x"])),
        StrategyConf(name="a"),
    ),
    "idle offload": (
        StrategyConf(name="a", offload=OffloadConf(min_tensor_kib=1, keep_last=3, blocks="first:2", pin_memory=False)),
        StrategyConf(name="a"),
    ),
    "segments by size": (checkpoint(SEGMENTS, segment_size=2, every_k=3), checkpoint(SEGMENTS, segment_size=2)),
    "operators of selective": (checkpoint(keep_ops=["aten.mm.default"]), checkpoint()),
    "operators by name": (
        checkpoint(SELECTIVE, keep_ops=["aten.mm"]),
        checkpoint(SELECTIVE, keep_ops=["aten.mm.default"]),
    ),
    "blocks of offload all": (offload(blocks="first:2"), offload()),
    "pinned on a CPU": (offload(pin_memory=False), offload()),
    "save_on_cpu": (
        offload(implementation=SAVE_ON_CPU, keep_last=3, min_tensor_kib=1),
        offload(Placement.inputs, implementation=SAVE_ON_CPU),
    ),
}  # fmt: skip
OTHER = (
    StrategyConf(name="a"),
    StrategyConf(name="a", micro_batch_size=4),
    StrategyConf(name="a", micro_batch_size=3),
    checkpoint(),
    checkpoint(every_k=2),
    checkpoint(SELECTIVE),
    checkpoint(SELECTIVE, keep_ops=["aten.mm"]),
    checkpoint(SEGMENTS, segment_size=2),
    checkpoint(Granularity.parts, parts=["mlp"]),
    checkpoint(Granularity.parts, parts=["attn"]),
    offload(),
    offload(keep_last=2),
    offload(min_tensor_kib=1),
    offload(Placement.inputs),
    offload(IN_BLOCKS, blocks="first:1"),
    offload(IN_BLOCKS, blocks="first:2"),
    offload(implementation=SAVE_ON_CPU),
)


@pytest.fixture
def small() -> Config:
    found = config("gpt")
    found.device, found.tracking = DeviceConf(name="cpu", type="cpu"), TrackingConf(enabled=False)
    return found


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_a_key_that_does_nothing_is_no_part_of_a_strategys_identity(
    small: Config, one: StrategyConf, other: StrategyConf
) -> None:
    assert strategy_id(replace(small, strategy=one)) == strategy_id(replace(small, strategy=other))


def test_whatever_changes_the_computation_is_a_part_of_its_identity(small: Config) -> None:
    assert len({strategy_id(replace(small, strategy=s)) for s in OTHER}) == len(OTHER)
    on_cuda = replace(small, device=replace(small.device, type="cuda"))
    pinned, pageable = (replace(on_cuda, strategy=offload(pin_memory=p)) for p in (True, False))
    assert strategy_id(pinned) != strategy_id(pageable)
    none = strategy_id(replace(small, strategy=StrategyConf(name="baseline")))
    assert all(is_baseline(s, 8) == (strategy_id(replace(small, strategy=s)) == none) for s in OTHER)


def test_what_is_compared_has_equal_workloads_devices_and_measures_whatever_they_are_called(small: Config) -> None:
    w, d, m = small.workload, small.device, small.measure
    same = [
        small,
        replace(small, workload=replace(w, name="other")),
        replace(small, device=replace(d, source="elsewhere")),
        replace(small, measure=replace(m, verify_steps=7, timeout_s=1.0)),
    ]
    other = [
        replace(small, workload=replace(w, seed=1)),
        replace(small, workload=replace(w, optimizer=replace(w.optimizer, lr=1.0))),
        replace(small, workload=replace(w, optimizer=replace(w.optimizer, kwargs={"eps": 1.0}))),
        replace(small, workload=replace(w, data={**w.data, "vocab_size": 3})),
        replace(small, device=replace(d, capacity_mib=99.0)),
        replace(small, measure=replace(m, steps=99)),
        replace(small, mode=Mode.predict),
    ]
    assert len({fixed_id(c) for c in same}) == 1
    assert len({fixed_id(c) for c in [small, *other]}) == 1 + len(other)


class InEvaluation(nn.BatchNorm2d):
    """Kept in evaluation mode, as by those who train with few samples."""

    def train(self, mode: bool = True) -> InEvaluation:
        return super().train(False)


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Computes with its buffers alone, whatever its mode."""


@pytest.mark.parametrize(
    ("norm", "found"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.SyncBatchNorm(4), True),
        (nn.LazyBatchNorm2d(), True),
        (nn.BatchNorm2d(4).eval(), True),  # training switches it on again
        (InEvaluation(4), False),
        (InEvaluation(4, track_running_stats=False), True),
        (FrozenBatchNorm2d(4), False),
        (nn.InstanceNorm2d(4), False),
        (nn.InstanceNorm2d(4, track_running_stats=True), True),
        (nn.GroupNorm(2, 4), False),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_micro_batches_are_refused_without_running_where_a_norm_needs_the_whole_batch(
    small: Config, norm: nn.Module, found: bool
) -> None:
    small.strategy = StrategyConf(name="micro_batch", micro_batch_size=2)
    model = nn.Sequential(nn.Linear(4, 4), norm)
    with pytest.raises(NotEquivalent, match=r"^1 \(") if found else nullcontext():
        check_known(small, model)
    check_known(replace(small, strategy=checkpoint()), model)


def test_a_prediction_never_accepts_what_is_known_to_be_wrong(small: Config) -> None:
    images = replace(config("convnet", "micro_batch"), mode=Mode.predict, device=small.device)
    refused = run_trial(images, "micro_batch")
    assert (refused.outcome, refused.reason) == ("invalid", "batch_statistics")
    assert "stem.1 (BatchNorm2d)" in refused.error
    decision = conclude([refused], images.budget, None).decisions[0]
    assert (decision.verdict, decision.reasons) == ("reject", ["not_equivalent"])


def test_a_number_format_that_a_card_has_not_ends_its_trial_and_no_other(small: Config) -> None:
    small.mode, small.workload = Mode.predict, replace(small.workload, dtype=Dtype.amp_bf16)
    old, new = (run_trial(replace(small, device=load_profile(card)), card) for card in ("t4", "a100_80gb"))
    assert (old.outcome, new.outcome) == ("invalid", "ok")
    assert old.error.startswith("NotOnDevice: workload.dtype=amp_bf16: t4 has no bfloat16; use ")
    decision = conclude([old], small.budget, None).decisions[0]
    assert (decision.verdict, decision.reasons) == ("reject", ["bad_setting"])


def test_what_several_jobs_ask_for_is_computed_once_and_judged_by_the_budget_of_each(
    small: Config, tmp_path: Path
) -> None:
    session = Session(tmp_path, State(now(), None, ""), small.tracking, owner=False)
    small.mode = Mode.predict
    jobs = [
        (checkpoint(), None),
        (checkpoint(keep_ops=["aten.mm"]), 100.0),
        (StrategyConf(name="other", micro_batch_size=8), 100.0),
    ]
    for i, (strategy, cap) in enumerate(jobs):
        own = replace(small, strategy=strategy, budget=replace(small.budget, memory_mib=cap))
        session.run(own, tmp_path / str(i), [])
        assert (tmp_path / str(i) / "result.json").is_file()
    baseline, recomputed = session.results()
    assert baseline.is_baseline
    assert [b["memory_mib"] for b in recomputed.budgets] == [None, 100.0]
    assert [c.cap_mib for _, c in judge([baseline, recomputed])] == [None, 100.0]
