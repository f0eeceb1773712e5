"""Changes of the workload that lower a peak: which apply, what they are predicted to save, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
from small_workloads import GPT, TOKENS, VIT, config, data_of

from sweep.config.schema import Config, Dtype, Implementation, Mode
from sweep.results import Prediction, WhatIf
from sweep.trial.predict import predict
from sweep.trial.trial import run_trial
from sweep.trial.what_if import config_at, what_if

CARD = {"name": "card", "type": "cuda", "capacity_mib": 4000.0, "context_mib": 100.0, "compute_capability": "8.9"}
#: One sample at a time of a model that is wide for its 16 tokens: the optimizer's step is the peak.
WIDE: dict[str, Any] = {"model": GPT | {"d_model": 512}, "data": TOKENS, "global_batch_size": 1}
MANY: dict[str, Any] = {"model": GPT, "data": TOKENS, "global_batch_size": 32}
FUSED = "workload.optimizer.implementation=fused"


def on_card(workload: dict[str, Any], strategy: str = "baseline", **device: object) -> Config:
    return config(workload, strategy, device=CARD | device)


def found(conf: Config, **how: bool) -> tuple[Prediction, dict[str, WhatIf]]:
    data = data_of(conf.workload)
    prediction = predict(conf, data)
    return prediction, {w.override: w for w in what_if(conf, data, prediction, **how)}


def test_a_fused_optimizer_takes_the_list_of_temporaries_off_and_the_largest_saving_comes_first() -> None:
    conf = on_card(WIDE, "checkpoint")
    prediction, changes = found(conf)
    assert prediction.peak_phase == "optimizer"
    fused = changes[FUSED]
    assert fused.phase_saved_mib == pytest.approx(prediction.at_peak_mib["parameter"], rel=0.02)
    conf.workload.optimizer.implementation = Implementation.fused
    again = predict(conf, data_of(conf.workload))
    assert (fused.allocated_mib, fused.reserved_mib) == (again.allocated_mib, again.reserved_mib)
    assert fused.saved_mib == prediction.allocated_mib - again.allocated_mib > 0
    assert (fused.change, fused.peak_phase) == ("fused", again.peak_phase)
    saved = [w.saved_mib for w in changes.values() if w.saved_mib > 0]
    assert len(saved) >= 3 and saved == sorted(saved, reverse=True)
    assert min(saved) >= 0.01 * prediction.allocated_mib, "each is worth a line"


def test_an_optimizer_that_has_no_fused_form_is_left_alone() -> None:
    _, changes = found(on_card(WIDE | {"optimizer": {"target": "torch.optim.RMSprop"}}, "checkpoint"))
    assert FUSED not in changes and not any("sgd" in override for override in changes)


@pytest.mark.parametrize(("optimizer", "override"), [
    ({"kwargs": {"betas": [0.9, 0.95]}}, "workload.optimizer.name=sgd ~workload.optimizer.kwargs.betas"),
    (
        {"name": "sgd", "kwargs": {"momentum": 0.9, "nesterov": True}, "implementation": "fused"},
        "~workload.optimizer.kwargs.momentum ~workload.optimizer.kwargs.nesterov",
    ),
])  # fmt: skip
def test_state_goes_with_sgd_and_so_do_the_arguments_that_it_has_not(optimizer: dict[str, Any], override: str) -> None:
    conf = on_card(WIDE | {"optimizer": optimizer}, "checkpoint")
    prediction, changes = found(conf)
    change = changes[override]
    again = config_at(conf, override.split())
    assert again.workload.optimizer.name.name == "sgd" and again.workload.optimizer.kwargs == {}
    assert change.allocated_mib == predict(again, data_of(conf.workload)).allocated_mib
    assert change.saved_mib >= 0.9 * prediction.at_peak_mib["optimizer_state"]
    _, changes = found(again)
    assert not any("kwargs" in override or "sgd" in override for override in changes)


def test_narrower_numbers_are_those_that_the_card_has() -> None:
    many = MANY | {"model": GPT | {"d_model": 128}, "global_batch_size": 64}
    prediction, changes = found(on_card(many))
    assert {"workload.dtype=amp_bf16", "workload.dtype=bf16"} <= set(changes)
    # Holes of the allocator, of which this workload has many.
    assert prediction.reserved_mib > 1.05 * prediction.allocated_mib, "or this workload shows nothing"
    conf = on_card(many, alloc_conf="expandable_segments:True")
    other, again = found(conf)
    expandable = changes.get("device.alloc_conf=expandable_segments:True")
    if other.reserved_mib <= 0.99 * prediction.reserved_mib:
        assert expandable is not None and expandable.reserved_saved_mib == prediction.reserved_mib - other.reserved_mib
    else:
        assert expandable is None
    assert not any("alloc_conf" in override for override in again)
    _, changes = found(on_card(many, compute_capability="7.5"))
    assert "workload.dtype=amp_fp16" in changes and not any("bf16" in override for override in changes)
    _, changes = found(on_card(many | {"dtype": "bf16"}))
    assert not any("dtype" in override for override in changes)


def test_fewer_and_shorter_samples_only_where_that_changes_something() -> None:
    prediction, changes = found(config(MANY))
    half, shorter = changes["workload.global_batch_size=16"], changes["workload.seq_len=8"]
    conf = config(MANY | {"global_batch_size": 16})
    assert half.allocated_mib == predict(conf, data_of(conf.workload)).allocated_mib < prediction.allocated_mib
    conf = config(MANY | {"model": GPT | {"max_seq_len": 8}, "data": TOKENS | {"seq_len": 8}})
    assert shorter.allocated_mib == predict(conf, data_of(conf.workload)).allocated_mib
    assert not any("alloc_conf" in override for override in changes)  # a CPU has no such allocator
    for batch_in_parts in (config(MANY, {"micro_batch_size": 8}), config(WIDE)):
        _, changes = found(batch_in_parts)
        assert not any("batch_size" in override for override in changes)
    _, changes = found(config({"model": VIT, "data": {"_target_": "sweep.workload.data.Digits"}}))
    assert not any("seq_len" in override for override in changes), "these data do not follow the config"


def test_attention_that_stores_its_probabilities() -> None:
    long: dict[str, Any] = {
        "model": GPT | {"attention": "eager", "max_seq_len": 256, "dropout": 0.0},
        "data": TOKENS | {"seq_len": 256},
        "global_batch_size": 4,
    }
    prediction, changes = found(on_card(long))
    assert changes["workload.model.attention=sdpa"].saved_mib > 0.1 * prediction.allocated_mib
    _, changes = found(on_card(long | {"attention": "eager"}))
    assert "workload.attention=sdpa" in changes
    _, changes = found(on_card(long | {"model": long["model"] | {"attention": "sdpa"}}))
    assert not any("attention" in override for override in changes)


def test_a_change_that_the_model_cannot_take_is_left_out() -> None:
    # This model's Fourier transform has no bfloat16.
    conf = config("fourier")
    _, changes = found(conf)
    assert "workload.dtype=bf16" not in changes
    with pytest.raises(Exception, match=r"(?i)bfloat16|unsupported dtype|dtype"):
        conf.workload.dtype = Dtype.bf16
        predict(conf, data_of(conf.workload))


def test_a_predicted_trial_says_the_mildest_change_to_what_fills_its_peak() -> None:
    conf = on_card(WIDE, "checkpoint")
    conf.mode = Mode.predict
    result = run_trial(conf, "checkpoint")
    assert result.prediction is not None
    assert [w.override for w in result.prediction.what_if] == [FUSED]
    _, changes = found(on_card(WIDE | {"optimizer": {"implementation": "fused"}}, "checkpoint"), at_peak_only=True)
    assert list(changes) == ["workload.optimizer.name=sgd"]
    assert found(on_card(MANY), at_peak_only=True)[1] == {}, "its peak lies in the activations"


def test_a_strategy_of_the_command_line_is_read_from_its_file() -> None:
    conf = config_at(config(MANY), ["strategy=micro_batch"])
    assert (conf.strategy.name, conf.strategy.micro_batch_size) == ("micro_batch", 8)
    conf = config_at(config(MANY), ["strategy=hybrid", "strategy.offload.keep_last=0"])
    assert (conf.strategy.checkpoint.granularity.name, conf.strategy.offload.placement.name) == ("blocks", "all")
    assert conf.strategy.offload.keep_last == 0
