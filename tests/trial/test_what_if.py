"""Changes of the workload that lower a peak: which apply, what they are predicted to save, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import peak
from small_workloads import GPT, TOKENS, VIT, config, data_of

from sweep.config.schema import Config, Dtype, Implementation, Mode, OptimizerName
from sweep.results import Prediction, WhatIf, lies_in_activations
from sweep.trial.predict import predict
from sweep.trial.trial import run_trial
from sweep.trial.what_if import what_if

CARD = {"name": "card", "type": "cuda", "capacity_mib": 4000.0, "context_mib": 100.0, "compute_capability": "8.9"}
#: One sample at a time of a model that is wide for its 16 tokens: the optimizer's step is the peak.
WIDE = {"model": GPT | {"d_model": 512}, "data": TOKENS, "global_batch_size": 1}


def on_card(workload: object, strategy: str = "baseline", **device: object) -> Config:
    return config(workload, strategy, device=CARD | device)  # type: ignore[arg-type]


def found(conf: Config, **how: bool) -> tuple[Prediction, dict[str, WhatIf]]:
    data = data_of(conf.workload)
    prediction = predict(conf, data)
    return prediction, {w.override: w for w in what_if(conf, data, prediction, **how)}


FUSED = "workload.optimizer.implementation=fused"


def test_a_fused_optimizer_takes_the_list_of_temporaries_off_the_optimizer() -> None:
    conf = on_card(WIDE, "checkpoint")
    prediction, changes = found(conf)
    assert prediction.peak_phase == "optimizer"
    fused = changes[FUSED]
    parameters = prediction.at_peak_mib["parameter"]
    assert fused.phase_saved_mib == pytest.approx(parameters, rel=0.02)
    conf.workload.optimizer.implementation = Implementation.fused
    again = predict(conf, data_of(conf.workload))
    assert (fused.allocated_mib, fused.reserved_mib) == (again.allocated_mib, again.reserved_mib)
    assert fused.saved_mib == prediction.allocated_mib - again.allocated_mib > 0
    assert fused.peak_phase == again.peak_phase
    assert "the default here" in fused.words and "pays with" in fused.words


@pytest.mark.parametrize("implementation", ["fused", "loop"])
def test_what_is_fused_already_is_not_proposed_and_a_loop_is_told_as_one(implementation: str) -> None:
    conf = on_card(WIDE | {"optimizer": {"implementation": implementation}}, "checkpoint")
    _, changes = found(conf)
    if implementation == "fused":
        assert FUSED not in changes
    elif FUSED in changes:
        assert "a loop takes" in changes[FUSED].words and "default" not in changes[FUSED].words


def test_an_optimizer_that_has_no_fused_form_is_left_alone() -> None:
    conf = on_card(WIDE | {"optimizer": {"target": "torch.optim.RMSprop"}}, "checkpoint")
    _, changes = found(conf)
    assert FUSED not in changes
    assert not any("sgd" in override for override in changes)


def test_state_goes_with_sgd_and_so_do_the_arguments_that_it_has_not() -> None:
    conf = on_card(WIDE | {"optimizer": {"kwargs": {"betas": [0.9, 0.95]}}}, "checkpoint")
    prediction, changes = found(conf)
    sgd = changes["workload.optimizer.name=sgd ~workload.optimizer.kwargs.betas"]
    conf.workload.optimizer = replace(conf.workload.optimizer, name=OptimizerName.sgd, kwargs={})
    assert sgd.allocated_mib == predict(conf, data_of(conf.workload)).allocated_mib
    # Both moments are gone.
    assert sgd.saved_mib >= 0.9 * prediction.at_peak_mib["optimizer_state"]


def test_momentum_is_taken_off_an_sgd_that_has_it() -> None:
    kwargs = {"momentum": 0.9, "nesterov": True}
    conf = config(WIDE | {"optimizer": {"name": "sgd", "kwargs": kwargs, "implementation": "fused"}})
    _, changes = found(conf)
    plain = changes["~workload.optimizer.kwargs.momentum ~workload.optimizer.kwargs.nesterov"]
    assert plain.saved_mib > 0
    conf.workload.optimizer.kwargs = {}
    _, changes = found(conf)
    assert not any("kwargs" in override for override in changes)


def test_narrower_numbers_are_those_that_the_card_has() -> None:
    many = {"model": GPT | {"d_model": 128}, "data": TOKENS, "global_batch_size": 64}
    _, changes = found(on_card(many))
    assert {"workload.dtype=amp_bf16", "workload.dtype=bf16"} <= set(changes)
    _, changes = found(on_card(many, compute_capability="7.5"))
    assert "workload.dtype=amp_fp16" in changes
    assert not any("bf16" in override for override in changes)
    _, changes = found(on_card(many | {"dtype": "bf16"}))
    assert not any("dtype" in override for override in changes)


def test_fewer_samples_only_where_the_batch_is_computed_whole() -> None:
    many = {"model": GPT, "data": TOKENS, "global_batch_size": 32}
    prediction, changes = found(on_card(many))
    half = changes["workload.global_batch_size=16"]
    conf = on_card(many | {"global_batch_size": 16})
    assert half.allocated_mib == predict(conf, data_of(conf.workload)).allocated_mib < prediction.allocated_mib
    assert "micro_batch" in half.words
    _, changes = found(config(many, {"micro_batch_size": 8}, device=CARD))
    assert not any("batch_size" in override for override in changes)
    _, changes = found(on_card(WIDE))
    assert not any("batch_size" in override for override in changes)


def test_shorter_sequences_only_where_the_data_follow_the_config() -> None:
    many = {"model": GPT, "data": TOKENS, "global_batch_size": 32}
    _, changes = found(config(many))
    shorter = changes["workload.seq_len=8"]
    conf = config(many | {"model": GPT | {"max_seq_len": 8}, "data": TOKENS | {"seq_len": 8}})
    assert shorter.allocated_mib == predict(conf, data_of(conf.workload)).allocated_mib
    _, changes = found(config({"model": VIT, "data": {"_target_": "sweep.workload.data.Digits"}}))
    assert not any("seq_len" in override for override in changes)


def test_attention_that_stores_its_probabilities() -> None:
    long = {
        "model": GPT | {"attention": "eager", "max_seq_len": 256, "dropout": 0.0},
        "data": TOKENS | {"seq_len": 256},
        "global_batch_size": 4,
    }
    prediction, changes = found(on_card(long))
    assert changes["workload.model.attention=sdpa"].saved_mib > 0.1 * prediction.allocated_mib
    _, changes = found(on_card(long | {"attention": "eager"}))
    assert "workload.attention=sdpa" in changes
    _, changes = found(on_card(long | {"model": long["model"] | {"attention": "sdpa"}}))  # type: ignore[operator]
    assert not any("attention" in override for override in changes)


def test_holes_of_the_allocator() -> None:
    conf = on_card({"model": GPT | {"d_model": 128}, "data": TOKENS, "global_batch_size": 64})
    prediction, changes = found(conf)
    assert prediction.reserved_mib > 1.05 * prediction.allocated_mib, "or this workload shows nothing"
    conf.device.alloc_conf = "expandable_segments:True"
    other = predict(conf, data_of(conf.workload))
    expandable = changes.get("device.alloc_conf=expandable_segments:True")
    if other.reserved_mib <= 0.99 * prediction.reserved_mib:
        assert expandable is not None and expandable.reserved_saved_mib == prediction.reserved_mib - other.reserved_mib
    else:
        assert expandable is None
    _, changes = found(conf)
    assert not any("alloc_conf" in override for override in changes)
    _, changes = found(config({"model": GPT, "data": TOKENS, "global_batch_size": 64}))
    assert not any("alloc_conf" in override for override in changes)  # a CPU has no such allocator


def test_the_largest_saving_comes_first_and_each_is_worth_a_line() -> None:
    conf = on_card(WIDE, "checkpoint")
    prediction, changes = found(conf)
    saved = [w.saved_mib for w in changes.values() if w.saved_mib > 0]
    assert len(saved) >= 3 and saved == sorted(saved, reverse=True)
    assert min(saved) >= 0.01 * prediction.allocated_mib


def test_a_change_that_the_model_cannot_take_is_left_out() -> None:
    # This model's Fourier transform has no bfloat16.
    conf = config("fourier")
    _, changes = found(conf)
    assert "workload.dtype=bf16" not in changes
    with pytest.raises(Exception, match=r"(?i)bfloat16|unsupported dtype|dtype"):
        conf.workload.dtype = Dtype.bf16
        predict(conf, data_of(conf.workload))


def test_in_passing_only_the_mildest_change_to_what_fills_the_peak() -> None:
    _, changes = found(on_card(WIDE, "checkpoint"), at_peak_only=True)
    assert list(changes) == [FUSED]
    _, changes = found(on_card(WIDE | {"optimizer": {"implementation": "fused"}}, "checkpoint"), at_peak_only=True)
    assert list(changes) == ["workload.optimizer.name=sgd"]
    _, changes = found(on_card({"model": GPT, "data": TOKENS, "global_batch_size": 64}), at_peak_only=True)
    assert changes == {}


def test_where_a_peak_lies() -> None:
    assert lies_in_activations(peak(300.0))
    assert not lies_in_activations(peak(300.0, "optimizer"))
    assert not lies_in_activations(peak(300.0, parameter=200.0, optimizer_state=50.0, activation=50.0))


def test_a_predicted_trial_says_what_else_would_help() -> None:
    conf = on_card(WIDE, "checkpoint")
    conf.mode = Mode.predict
    result = run_trial(conf, "checkpoint")
    assert result.prediction is not None
    assert [w.override for w in result.prediction.what_if] == [FUSED]
    conf = on_card({"model": GPT, "data": TOKENS, "global_batch_size": 64})
    conf.mode = Mode.predict
    result = run_trial(conf, "baseline")
    assert result.prediction is not None and result.prediction.what_if == []
