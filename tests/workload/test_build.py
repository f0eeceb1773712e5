"""From a config to model, data, loss and optimizer; what is no good is said in one line."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from small_models import PlainSgd
from small_workloads import CONVNET, DIGITS, GPT, TOKENS, VIT, WORKLOADS, config, data_of
from torch import Tensor, nn

from sweep.config.schema import WorkloadConf
from sweep.errors import BadInput
from sweep.results import MIB
from sweep.trial.measure import memory_pass
from sweep.trial.predict import predict
from sweep.workload import (
    build_data,
    build_loss,
    build_model,
    build_optimizer,
    build_scheduler,
    build_workload,
    find_blocks,
    patterns_of,
    to_device,
)
from sweep.workload.step import Phases, run_step

CPU = torch.device("cpu")


def conf(**overrides: Any) -> WorkloadConf:
    return config({"model": GPT, "data": TOKENS} | overrides).workload


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def names(model: nn.Module, pattern: str | list[str] | None = None) -> list[str]:
    return [block.name for block in find_blocks(model, pattern)]


class Net(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


# -- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_small_workload_has_four_blocks(workload: str) -> None:
    w = build_workload(config(workload).workload, CPU, data_of(config(workload).workload))
    assert len(w.blocks) == 4
    assert len({type(b.module) for b in w.blocks}) == 1
    assert all(w.model.get_submodule(b.name) is b.module for b in w.blocks)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def test_all_lists_of_like_modules_are_found_the_outermost_of_each() -> None:
    """Encoders before decoders; experts, heads and single operators are no blocks; tiny lists are left out."""
    expert = lambda: nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    routed = lambda: Net(attn=layer(), norm=nn.LayerNorm(4), experts=nn.ModuleList(expert() for _ in range(8)))
    heads = nn.ModuleList(Net(query=nn.Linear(4, 4), key=nn.Linear(4, 4)) for _ in range(6))
    model = Net(
        stem=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        decoder=Net(layers=nn.ModuleList(Net(heads=heads, out=nn.Linear(400, 4)) for _ in range(3))),
        tiny=nn.ModuleList(layer() for _ in range(9)),
        encoder=Net(layers=nn.ModuleList(routed() for _ in range(5))),
    )
    assert names(model) == numbered("encoder.layers.", 5) + numbered("decoder.layers.", 3)


def test_the_blocks_of_all_stages_are_found() -> None:
    """Stages as modules of their own, as lists, and as numbered attributes; one of them has a single block."""
    stage = lambda depth: Net(blocks=nn.Sequential(*(normed() for _ in range(depth))), down=nn.Linear(4, 4))
    expected = [f"s.{i}.blocks.{j}" for i, depth in enumerate((2, 1, 3)) for j in range(depth)]
    assert names(Net(s=nn.ModuleList(map(stage, (2, 1, 3))))) == expected
    sequences = {f"layer{i + 1}": nn.Sequential(*(normed() for _ in range(2))) for i in range(3)}
    assert names(Net(stem=nn.Linear(4, 4), **sequences)) == [f"layer{i + 1}.{j}" for i in range(3) for j in range(2)]


def test_a_way_down_and_up_is_found_whole() -> None:
    """The lists of a U-Net hold modules of their own kinds; attributes may be numbered instead."""
    kind = lambda name: type(name, (Net,), {})
    down, up = kind("Down"), kind("Up")
    of = lambda cls: [cls(conv=nn.Conv2d(8, 8, 3), norm=nn.GroupNorm(2, 8)) for _ in range(3)]
    lists = Net(up=nn.ModuleList(of(up)), down=nn.ModuleList(of(down)), mid=nn.ModuleList(of(Net)))
    assert names(lists) == numbered("down.", 3) + numbered("mid.", 3) + numbered("up.", 3)
    attributes = Net(**dict(zip(numbered("down", 3), of(down))), **dict(zip(numbered("up", 3), of(up))))
    assert names(attributes) == numbered("down", 3) + numbered("up", 3)


def test_one_block_that_is_used_again_and_again_is_found() -> None:
    groups = nn.ModuleList([Net(layers=nn.ModuleList([normed()]))])
    assert names(Net(tokens=nn.Embedding(100, 4), groups=groups, head=nn.Linear(4, 2))) == ["groups.0"]


def test_blocks_between_other_modules_of_a_sequential() -> None:
    model = nn.Sequential(
        OrderedDict(stem=nn.Conv2d(1, 4, 3), one=layer(), two=layer(), three=layer(), pool=nn.ReLU(), four=layer())
    )
    assert names(model) == ["one", "two", "three"]


def test_modules_without_parameters_are_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(nn.ReLU() for _ in range(5)), nn.Linear(4, 4), nn.Linear(4, 4))
    assert names(model) == ["6", "7"]


def test_lists_of_lists_are_looked_into_and_are_no_blocks_themselves() -> None:
    """A ModuleList is never called: replacing its forward would do nothing, in silence."""
    stages = nn.ModuleList(nn.ModuleList(layer() for _ in range(2)) for _ in range(4))
    assert names(Net(stages=stages)) == [f"stages.{i}.{j}" for i in range(4) for j in range(2)]
    named = nn.ModuleList(nn.ModuleDict({"attn": layer(), "norm": nn.LayerNorm(4)}) for _ in range(4))
    assert names(Net(stages=named)) == [f"stages.{i}.attn" for i in range(4)]


def test_one_module_used_several_times_is_one() -> None:
    shared = normed()
    assert names(Net(layers=nn.ModuleList([shared] * 6))) == ["layers.0"]
    both = nn.ModuleList([shared, layer(), shared, layer()])
    assert names(Net(layers=both)) == ["layers.0", "layers.1", "layers.3"]


def test_a_model_may_have_no_blocks() -> None:
    assert names(nn.Linear(4, 4)) == []
    assert names(nn.Sequential(nn.Linear(4, 4))) == []
    assert names(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))) == []


NESTED = Net(
    layer1=nn.Sequential(layer(), layer()), layer2=nn.Sequential(layer(), layer(), layer()), head=nn.Linear(4, 4)
)


@pytest.mark.parametrize(("pattern", "expected"), [
    ("layer1.*", ["layer1.0", "layer1.1"]),
    ("layer*.*", ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"]),
    ("layer?", ["layer1", "layer2"]),
    ("layer2.[02]", ["layer2.0", "layer2.2"]),
    ("layer*.*.0", ["layer1.0.0", "layer1.1.0", "layer2.0.0", "layer2.1.0", "layer2.2.0"]),
    ("head", ["head"]),
    ("*", ["layer1", "layer2", "head"]),
])  # fmt: skip
def test_patterns_stay_within_one_level(pattern: str, expected: list[str]) -> None:
    assert [n for n in names(NESTED, pattern) if n] == expected


def test_several_patterns_are_taken_in_their_order() -> None:
    both = ["layer2.0", "layer2.1", "layer2.2", "layer1.0"]
    assert names(NESTED, "layer2.*, layer1.0") == names(NESTED, ["layer2.*", "layer1.0"]) == both
    assert names(NESTED, "layer1.0,layer1.*") == ["layer1.0", "layer1.1"]
    with pytest.raises(BadInput, match=r"^workload.blocks=nothing: matches no module"):
        names(NESTED, ["layer2.*", "nothing"])
    assert conf(blocks=["layer2.*", "layer1.0"]).blocks == ["layer2.*", "layer1.0"]
    for wrong in ([], [3], "", {"layers": 1}):
        with pytest.raises(BadInput, match=r"^workload.blocks="):
            conf(blocks=wrong)
    assert patterns_of(["encoder.layers.0", "encoder.layers.11", "layer1.0", "block_3", "mlp2x"]) == [
        "encoder.layers.*", "layer1.*", "block_*", "mlp2x",
    ]  # fmt: skip


@pytest.mark.parametrize("pattern", ["nothing.*", "layer3.*", "layer1.*.*.*.*", "Layer1.*", "head.weight"])
def test_a_pattern_that_matches_nothing_says_what_there_is(pattern: str) -> None:
    with pytest.raises(BadInput) as caught:
        find_blocks(NESTED, pattern)
    line = str(caught.value)
    assert line.startswith(f"workload.blocks={pattern}: matches no module; give a pattern such as one of: ")
    assert "layer1.*" in line
    assert "\n" not in line


# -- _target_ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "key", "words"), [
    ({"_target_": "no_such_package.Net"}, "workload.model._target_=no_such_package.Net", "no_such_package"),
    ({"_target_": "torch.nn.NoSuchNet"}, "workload.model._target_=torch.nn.NoSuchNet", "cannot be imported"),
    ({"_target_": "JustAName"}, "workload.model._target_=JustAName", "cannot be imported"),
    ({"_target_": ""}, "workload.model", ""),
    ({"_target_": "torch.nn.Linear"}, "workload.model=torch.nn.Linear", "missing 2 required positional arguments"),
    ({"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2, "depth": 3},
     "workload.model=torch.nn.Linear", "unexpected keyword argument 'depth'"),
    ({"_target_": "torch.nn.Linear", "in_features": -2, "out_features": 2}, "workload.model=torch.nn", "negative"),
    ({"_target_": "builtins.dict"}, "workload.model._target_=builtins.dict", "is no nn.Module"),
    (GPT | {"heads": 3}, "workload.model.heads=3", "32"),
    ({"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Nope"}]}, "workload.model", "Nope"),
])  # fmt: skip
def test_a_model_that_cannot_be_built_is_one_line(model: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_model(conf(model=model))
    line = str(caught.value)
    assert line.startswith(key)
    assert words in line
    assert "\n" not in line
    assert "full_key" not in line


def test_data_and_loss_that_cannot_be_built_name_their_keys() -> None:
    with pytest.raises(BadInput, match=r"^workload.data._target_=no.such.Data: cannot be imported"):
        build_data(conf(data={"_target_": "no.such.Data"}))
    with pytest.raises(BadInput, match=r"^workload.data=sweep.workload.data.RandomTokens: .*'vocab_size'"):
        build_data(conf(data={"_target_": "sweep.workload.data.RandomTokens", "seq_len": 4}))
    with pytest.raises(BadInput, match=r"^workload.data.path=/nowhere: "):
        build_data(conf(data={"_target_": "sweep.workload.data.TextBytes", "seq_len": 4, "path": "/nowhere"}))
    with pytest.raises(BadInput, match=r"^workload.loss._target_=builtins.dict: is not callable"):
        build_loss(conf(loss={"_target_": "builtins.dict"}))


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    one, two, other = build_model(conf()), build_model(conf()), build_model(conf(seed=4))
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert not all(map(torch.equal, one.parameters(), other.parameters()))
    assert one.training


def test_bf16_casts_parameters_and_float_inputs() -> None:
    c = config({"model": CONVNET, "data": DIGITS, "dtype": "bf16"}).workload
    w = build_workload(c, CPU, data_of(c))
    assert {p.dtype for p in w.model.parameters()} == {torch.bfloat16}
    batch = w.train_batch(0)
    assert batch["inputs"].dtype == torch.bfloat16
    assert batch["targets"].dtype == torch.int64
    assert torch.isfinite(run_step(w, batch, Phases()).loss)


def test_batches_are_copied_to_the_device_also_on_a_cpu() -> None:
    batch = {"inputs": torch.ones(3)}
    assert to_device(batch, CPU)["inputs"].data_ptr() != batch["inputs"].data_ptr()


# -- loss ------------------------------------------------------------------------------------------------------------


def test_a_loss_without_count_is_the_mean_over_samples() -> None:
    c = config({
        "model": CONVNET, "data": DIGITS,
        "loss": {"_target_": "small_models.mean_loss", "_partial_": True}, "optimizer": {"name": "sgd"},
    }).workload  # fmt: skip
    whole, split_up = build_workload(c, CPU, data_of(c)), build_workload(c, CPU, data_of(c))
    for w in (whole, split_up):  # micro-batches are another model in training mode
        w.model.eval()
    batch = whole.train_batch(0)
    assert whole.loss.count(batch) == 8
    expected = nn.functional.mse_loss(whole.model(batch["inputs"]), batch["targets"][:, None].float().expand(-1, 10))
    for w, size in ((whole, None), (split_up, 3)):
        loss = run_step(w, batch, Phases(), micro_batch_size=size).loss
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(whole.model.parameters(), split_up.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


PROXIES = {"loss.centres", "loss.scale"}
HELD = {"loss.parts_proxies.centres", "loss.parts_proxies.scale", "loss.temperature"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("target", "trained"), [("ProxyLoss", PROXIES), ("HoldingLoss", HELD)])
def test_what_a_loss_holds_is_trained_like_the_model(target: str, trained: set[str], dtype: str) -> None:
    c = conf(
        model=VIT, data=DIGITS, loss={"_target_": f"small_models.{target}"}, dtype=dtype, grad_clip_norm=0.5,
        optimizer={"name": "sgd", "lr": 0.5},
    )  # fmt: skip
    w = build_workload(c, CPU, data_of(c))
    parameters = dict(w.named_parameters())
    assert {n for n, p in parameters.items() if n.startswith("loss.") and p.requires_grad} == trained
    assert len(parameters) == len({id(p) for p in w.parameters()}) == len(w.parameters())
    before = {n: p.detach().clone() for n, p in parameters.items()}
    for step in range(2):
        run_step(w, w.train_batch(step), Phases())
    assert all(not torch.equal(parameters[n], before[n]) for n in trained)
    # Clipped together with the model's, and not added up over steps.
    norm = torch.stack([p.grad.float().norm() for p in parameters.values() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(0.5, rel=2e-2)
    tensors = [*w.parameters(), *(b for _, b in w.named_buffers())]
    assert {t.dtype for t in tensors} == {torch.bfloat16 if dtype == "bf16" else torch.float32}
    assert all(torch.equal(t, p) for t, p in zip(before.values(), build_workload(c, CPU, w.data).parameters()))


def test_evaluation_leaves_each_module_in_its_own_mode() -> None:
    c = conf(model=VIT, data=DIGITS, loss={"_target_": "small_models.HoldingLoss"})
    w = build_workload(c, CPU, data_of(c))
    modes = {n: m.training for _, top in w.modules_with_state() for n, m in top.named_modules()}
    with w.evaluating():
        assert not any(m.training for _, top in w.modules_with_state() for m in top.modules())
    assert {n: m.training for _, top in w.modules_with_state() for n, m in top.named_modules()} == modes
    assert w.model.training and not modes["teacher"]


@pytest.mark.parametrize(("target", "wrong"), [
    ("UnreachableLoss", "temperature takes gradients and is no parameter"),
    ("loss_with_global", "uses the global _shared_proxies"),
])  # fmt: skip
def test_state_of_a_loss_that_cannot_be_reached_is_refused_by_name(target: str, wrong: str) -> None:
    c = conf(model=VIT, data=DIGITS, loss={"_target_": f"small_models.{target}"})
    with pytest.raises(BadInput, match=f"workload.loss._target_=small_models.{target}: {wrong}"):
        build_workload(c, CPU, data_of(c))


@pytest.mark.parametrize("strategy", ["baseline", "offload_everything", "micro_batch"])
def test_what_a_loss_holds_is_counted(strategy: str) -> None:
    """Held parameters, their gradients and state; predicted and counted alike, and never moved to the host."""
    of = lambda classes: config(
        {"model": VIT, "data": DIGITS, "loss": {"_target_": "small_models.ProxyLoss", "classes": classes}}, strategy
    )
    small, large = of(10), of(100_010)
    peaks = [memory_pass(c, CPU, data_of(c.workload)).peak for c in (small, large)]
    predicted = predict(large, data_of(large.workload), emulations="cpu")
    assert predicted.peak.mib == peaks[1].mib
    further = 100_000 * 10 * 4 / MIB
    for category, copies in (("parameter", 1), ("optimizer_state", 2)):
        more = peaks[1].at_peak_mib[category] - peaks[0].at_peak_mib[category]
        assert more == pytest.approx(copies * further, abs=0.01)
    assert ("parameter", "loss.centres") in {(h.category, h.name) for h in peaks[1].largest}


# -- optimizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize(("implementation", "fused", "foreach"), [
    ("auto", None, None), ("fused", True, None), ("foreach", None, True), ("loop", None, False),
])  # fmt: skip
def test_implementations(name: str, implementation: str, fused: bool | None, foreach: bool | None) -> None:
    c = conf(optimizer={"name": name, "implementation": implementation, "lr": 0.5, "weight_decay": 0.25})
    w = build_workload(c, CPU, data_of(c))
    group = w.optimizer.param_groups[0]
    assert type(w.optimizer).__name__.lower() == name
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert (group["fused"], group["foreach"]) == (fused, foreach)
    assert run_step(w, w.train_batch(0), Phases()).updates == 1


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_implementations_agree(name: str) -> None:
    weights = []
    for implementation in ("auto", "fused", "foreach", "loop"):
        c = conf(optimizer={"name": name, "implementation": implementation, "lr": 0.01})
        w = build_workload(c, CPU, data_of(c))
        torch.manual_seed(0)
        for step in range(2):
            run_step(w, w.train_batch(step), Phases())
        weights.append(torch.cat([p.detach().flatten() for p in w.model.parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-3, atol=1e-4)


def test_a_weight_decay_of_zero_is_zero() -> None:
    """torch's AdamW would decay by 0.01."""
    assert build_optimizer(conf(), nn.Linear(2, 2)).param_groups[0]["weight_decay"] == 0


def test_further_arguments_and_ones_own_optimizer() -> None:
    further = {"name": "adam", "kwargs": {"betas": [0.5, 0.6], "eps": 1.0}}
    (group,) = build_optimizer(conf(optimizer=further), nn.Linear(2, 2)).param_groups
    assert (tuple(group["betas"]), group["eps"]) == ((0.5, 0.6), 1.0)
    own = {"target": "small_models.PlainSgd", "lr": 0.3, "weight_decay": 0.1, "implementation": "foreach"}
    optimizer = build_optimizer(conf(optimizer=own), nn.Linear(2, 2))
    assert type(optimizer) is PlainSgd
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    (group,) = build_optimizer(conf(), model).param_groups
    assert group["params"] == [model.bias]


@pytest.mark.parametrize(("optimizer", "line"), [
    ({"target": "torch.optim.Nope"}, "workload.optimizer.target=torch.optim.Nope: "),
    ({"target": "torch.optim.LBFGS"}, "workload.optimizer.target=torch.optim.LBFGS: computes the loss again"),
    ({"target": "no.such.Optimizer"}, "workload.optimizer.target=no.such.Optimizer: "),
    ({"target": "torch.nn.functional.relu"}, "workload.optimizer.target=torch.nn.functional.relu: "),
    ({"kwargs": {"nope": 1}}, "workload.optimizer=torch.optim.AdamW: "),
    ({"kwargs": {"betas": [2.0, 3.0]}}, "workload.optimizer=torch.optim.AdamW: Invalid beta"),
    ({"implementation": "fused", "kwargs": {"foreach": True}}, "workload.optimizer=torch.optim.AdamW: "),
])  # fmt: skip
def test_an_optimizer_that_cannot_be_built_is_one_line(optimizer: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_optimizer(conf(optimizer=optimizer), nn.Linear(2, 2))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_model_with_nothing_to_train_is_said_so() -> None:
    with pytest.raises(BadInput, match="empty parameter list"):
        build_optimizer(conf(), nn.ReLU())


# -- scheduler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheduler", "rates"), [
    ({"name": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    ({"name": "linear", "total_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
    ({"name": "linear", "warmup_steps": 2, "total_steps": 4}, [0.5, 1, 1, 0.5, 0, 0]),
    ({"name": "cosine", "total_steps": 4}, [1, 0.853553, 0.5, 0.146447, 0, 0]),
    ({"name": "cosine", "warmup_steps": 9, "total_steps": 3}, [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9, 6 / 9]),
])  # fmt: skip
def test_schedules(scheduler: dict[str, Any], rates: list[float]) -> None:
    c = conf(scheduler=scheduler)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_scheduler(c, optimizer)
    assert schedule is not None
    found = []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(rates, abs=1e-5)


def test_a_constant_rate_needs_no_scheduler() -> None:
    assert build_scheduler(conf(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)) is None


def test_only_fp16_has_a_scaler() -> None:
    for dtype, wanted in (("fp32", False), ("bf16", False), ("amp_bf16", False), ("amp_fp16", True)):
        c = conf(dtype=dtype)
        w = build_workload(c, CPU, data_of(c))
        assert (w.scaler is not None) is wanted
        seen: list[torch.dtype] = []
        w.blocks[0].module.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o.dtype))
        with w.autocast():
            out: Tensor = w.model(w.train_batch(0)["inputs"])
        assert out.dtype == {"fp32": torch.float32, "amp_fp16": torch.float16}.get(dtype, torch.bfloat16)
