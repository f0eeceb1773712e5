"""Verification catches strategies that are wrong on purpose, accepts right ones, and says what it compared and why."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_workloads import config, data_of
from torch import Tensor, nn

import sweep.strategy as strategy_module
import sweep.trial.verify as run_module
import sweep.trial.verify as verify_module
from sweep.config.schema import Config, Dtype
from sweep.errors import DeviceOutOfMemory, NotFinite
from sweep.results import Verification
from sweep.trial.verify import FLOOR, ROUNDING, FixedDraws, Kept, Record, differences, verify
from sweep.workload import Workload
from sweep.workload.step import StepResult, run_step

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from soundness import MUTANTS, is_found

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_record_of_another_test() -> None:
    verify_module._records.clear()


def run(c: Config) -> Verification:
    return verify(c, CPU, data_of(c.workload))


# -- what is wrong is found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_strategy_is_found(name: str) -> None:
    m = MUTANTS[name]
    dtype = Dtype.fp32 if Dtype.fp32 in m.dtypes else m.dtypes[0]
    found, words = is_found(name, m.workloads[0], dtype)
    assert found, words
    assert words


@pytest.mark.parametrize("dtype", [Dtype.amp_bf16, pytest.param(Dtype.amp_fp16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [n for n, m in MUTANTS.items() if m.strategy in ("offload", "micro_batch")])
def test_a_coarse_format_hides_nothing(name: str, dtype: Dtype) -> None:
    found, words = is_found(name, MUTANTS[name].workloads[-1], dtype)
    assert found, words


# -- models that people bring ----------------------------------------------------------------------------------------


class Noise:
    """Inputs (size, 16) and targets of the same shape, a function of the step."""

    version = "noise"

    def __init__(self, weights: bool = False) -> None:
        self.weights = weights

    def describe(self) -> dict[str, Any]:
        return {"source": "noise"}

    def train_batch(self, step: int, size: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step + 5)
        x = torch.randn(size, 16, generator=generator)
        return {"inputs": x, "targets": x.roll(1, -1), "weights": torch.rand(size, generator=generator)}

    eval_batch = train_batch


class Stack(nn.Module):
    """Four residual blocks of one kind."""

    block: type[nn.Module]

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def stack_of(block: type[nn.Module]) -> type[Stack]:
    return type(f"StackOf{block.__name__}", (Stack,), {"block": block})


class Gated(Mlp):
    """A zero-initialised gate around something that depends on the batch: nothing behind it has a gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * super().forward(x - x.mean(0))


class Counting(Mlp):
    """Weighs its result by a plain counter, as annealing does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Remembering(Mlp):
    """Keeps what it computed last, for whoever wants to log it; no forward reads it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last, self.seen = y.detach(), len(x)
        return y


class Dropping(Mlp):
    """Stochastic depth by torch, an amplitude by Python, a shift by numpy."""

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(len(x), 1) < 0.8
        return super().forward(x) * keep * (1 + random.random()) + float(np.random.rand())


class PerSampleByNumpy(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.as_tensor(np.random.rand(len(x), 1), dtype=x.dtype)


class Unseeded(Mlp):
    """Draws from a generator of its own that no seed reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.SystemRandom().random()


class Teacher(nn.Module):
    """A student and a teacher without gradient that every forward moves towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.teacher = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.layers[0].up.weight[:16], 0.1)
            target = self.teacher(x)
        for layer in self.layers:
            x = x + layer(x)
        return x - 0.1 * target


class SequenceFirst(nn.Module):
    """The sample in dimension 1 inside, and outputs of other shapes beside the result."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.encoder(x.view(len(x), 4, 4).transpose(0, 1))
        return {"y": y.transpose(0, 1).reshape(len(x), 16), "mean": y.mean((1, 2)), "all": y}


class Twice(nn.Module):
    """Two blocks that run three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for layer in self.layers:
                x = x + layer(x)
        return x


class Indexing(Stack):
    """Reaches its blocks by number."""

    block = Mlp

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = x + self.layers[i](x)
        return x


class Unused(nn.Module):
    """Most of its parameters have a gradient that is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.dead = nn.Linear(16, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x + 0.0 * self.dead(x).sum(-1, keepdim=True)


for _block in (Mlp, Gated, Counting, Remembering, Dropping, PerSampleByNumpy, Unseeded):
    _stack = stack_of(_block)
    globals()[_stack.__name__] = _stack


def mse(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    y = model(batch["inputs"])
    return F.mse_loss(y["y"] if isinstance(y, dict) else y, batch["targets"])


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean weighted over the batch: under micro-batches it is another one."""
    errors = (model(batch["inputs"]) - batch["targets"]).square().mean(-1)
    return (errors * batch["weights"]).sum() / batch["weights"].sum()


def views(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Two noisy views of each sample, as siamese networks have."""
    x = batch["inputs"]
    return F.mse_loss(model(x + torch.randn_like(x)), model(x + torch.randn_like(x)))


def overflowing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """So large that a gradient scaler's first scales overflow."""
    return mse(model, batch) * 1e3


def own(model: str, strategy: str, loss: str = "mse", **workload: Any) -> Config:
    c = config(
        {"model": {"_target_": f"test_verify.{model}"}, "data": {"_target_": "test_verify.Noise"},
         "loss": {"_target_": f"test_verify.{loss}"}, **workload},
        strategy,
    )  # fmt: skip
    return c


@pytest.mark.parametrize(("model", "strategy", "loss"), [
    ("StackOfGated", "checkpoint", "mse"), ("StackOfGated", "offload", "mse"),
    ("StackOfRemembering", "micro_batch", "mse"), ("StackOfRemembering", "checkpoint", "mse"),
    ("StackOfDropping", "micro_batch", "mse"), ("StackOfDropping", "offload", "mse"),
    ("StackOfDropping", "checkpoint", "mse"), ("StackOfCounting", "offload", "mse"),
    ("SequenceFirst", "micro_batch", "mse"), ("SequenceFirst", "everything", "mse"),
    ("Twice", "micro_batch", "mse"), ("Twice", "everything", "mse"), ("StackOfMlp", "micro_batch", "views"),
    ("Teacher", "offload", "mse"),
])  # fmt: skip
def test_a_right_strategy_is_accepted(model: str, strategy: str, loss: str) -> None:
    found = run(own(model, strategy, loss))
    assert (found.status, found.reason) == ("equal", "")
    assert found.passed
    assert found.compared_share is not None and found.compared_share > 0.99
    assert found.steps >= 2


@pytest.mark.parametrize(("model", "strategy", "loss", "cause", "where"), [
    ("StackOfGated", "micro_batch", "mse", "batch_statistics", "layers.0"),
    ("StackOfCounting", "micro_batch", "mse", "state", "layers.0.calls"),
    ("Teacher", "micro_batch", "mse", "state", "teacher.weight"),
    ("StackOfMlp", "micro_batch", "weighted", "loss_is_no_mean_over_samples", "test_verify.weighted"),
])  # fmt: skip
def test_what_is_not_equivalent_is_refused_by_its_cause(
    model: str, strategy: str, loss: str, cause: str, where: str
) -> None:
    found = run(own(model, strategy, loss))
    assert (found.status, found.cause, found.where) == ("not_equal", cause, where)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "amp_bf16"])
def test_the_number_format_does_not_decide_the_mathematics(dtype: str) -> None:
    assert run(own("StackOfMlp", "micro_batch", "weighted", dtype=dtype)).status == "not_equal"
    assert run(own("StackOfMlp", "micro_batch", dtype=dtype)).status == "equal"


def test_draws_that_no_one_can_repeat_are_not_called_a_fault_of_the_strategy() -> None:
    for strategy in ("offload", "micro_batch"):
        found = run(own("StackOfUnseeded", strategy))
        assert not found.passed
        assert (found.status, found.cause) == ("not_comparable", "baseline_does_not_repeat")


def test_draws_of_other_libraries_by_sample_are_not_comparable_between_micro_batches() -> None:
    found = run(own("StackOfPerSampleByNumpy", "micro_batch"))
    assert (found.status, found.cause, found.where) == ("not_comparable", "random", "numpy.random")


def test_too_little_evidence_is_not_verified() -> None:
    for strategy in ("checkpoint", "micro_batch"):
        found = run(own("Unused", strategy))
        assert found.status == "not_verified"
        assert not found.passed
        assert found.compared_share is not None and found.compared_share < 0.5
        assert found.steps > 2  # more were tried


def test_a_scaler_that_skips_its_first_steps_is_settled_before_anything_is_compared() -> None:
    found = run(own("StackOfMlp", "checkpoint", "overflowing", dtype="amp_fp16"))
    assert (found.status, found.updates, found.compared_share) == ("equal", 2, 1.0)


def test_a_baseline_that_is_not_finite_is_that_and_no_difference() -> None:
    c = config("vit", "checkpoint")
    c.workload.optimizer.lr = 1e30
    c.measure.verify_steps = 3
    with pytest.raises(NotFinite, match="the baseline's loss is nan"):
        run(c)


def test_more_steps_are_compared_when_asked_and_one_in_a_quick_look() -> None:
    for measure, steps, mode in (({"verify_steps": 3}, 3, "full"), ({"verify": "quick"}, 1, "quick")):
        found = run(config("gpt", "hybrid", measure=measure))
        assert (found.passed, found.steps, found.updates, found.mode) == (True, steps, steps, mode)


# -- what does not fit -----------------------------------------------------------------------------------------------


def full_beyond(limit: Callable[[Workload, Any], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def step(workload: Workload, batch: Any, *args: Any, **kwargs: Any) -> StepResult:
        if limit(workload, batch):
            raise DeviceOutOfMemory("full")
        return run_step(workload, batch, *args, **kwargs)

    monkeypatch.setattr(strategy_module, "run_step", step)


def test_what_does_not_fit_is_compared_on_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    full_beyond(lambda workload, batch: len(batch["inputs"]) > 4, monkeypatch)
    for strategy in ("checkpoint", "micro_batch", "everything"):
        found = run(config("gpt", strategy))
        assert found.passed, found.reason
        assert found.scope == "reduced: 4 samples"


@pytest.mark.parametrize(
    "strategy", ["micro_batch", "checkpoint_every_2", "segments_3", "offload_first_2", "offload_list", "everything"]
)
def test_or_on_few_blocks_too(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    full_beyond(lambda workload, batch: len(workload.blocks) > 5, monkeypatch)
    c = config("gpt", strategy)
    c.workload.model |= {"layers": 6}
    before = copy.deepcopy(c)
    found = run(c)
    assert found.passed, found.reason
    assert found.scope.startswith("reduced: at most ")
    assert found.scope.endswith(" blocks, 4 samples")
    assert c == before


def test_a_model_that_indexes_its_blocks_can_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    full_beyond(lambda workload, batch: len(workload.blocks) > 2, monkeypatch)
    found = run(own("Indexing", "checkpoint"))
    assert found.passed, found.reason
    assert found.scope == "reduced: at most 2 blocks, 4 samples"


def test_what_fits_in_no_way_is_not_verified_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    full_beyond(lambda workload, batch: True, monkeypatch)
    found = run(config("gpt", "checkpoint"))
    assert (found.status, found.cause, found.passed) == ("not_verified", "does_not_fit", False)


def test_another_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> StepResult:
        raise ZeroDivisionError

    monkeypatch.setattr(strategy_module, "run_step", wrong)
    for strategy in ("checkpoint", "micro_batch"):
        with pytest.raises(ZeroDivisionError):
            run(config("gpt", strategy))


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_what_strategies_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, bool]] = []
    real = verify_module.run_and_record

    def counted(conf: Any, strategy: Any, watched: Any, device: Any, data: Any, how: Any, reference: Any) -> Record:
        ran.append((strategy.name, how.fixed_draws))
        return real(conf, strategy, watched, device, data, how, reference)

    monkeypatch.setattr(verify_module, "run_and_record", counted)
    for strategy in ("checkpoint", "offload", "micro_batch", "hybrid", "micro_batch"):
        conf = config("gpt", strategy)
        assert run(conf).passed
    assert ran.count(("baseline", False)) == 1
    assert ran.count(("baseline", True)) == 1
    assert ran.count(("micro_batch", True)) == 1
    conf.workload.seed += 1
    assert run(conf).passed
    assert ran.count(("baseline", True)) == 2


def test_a_strategy_takes_no_more_steps_than_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    current: list[str] = []
    real, real_step = verify_module.run_and_record, run_step

    def named(conf: Any, strategy: Any, *rest: Any) -> Record:
        current.append(strategy.name)
        return real(conf, strategy, *rest)

    def counted(*args: Any, **kwargs: Any) -> StepResult:
        steps.append(current[-1])
        return real_step(*args, **kwargs)

    monkeypatch.setattr(verify_module, "run_and_record", named)
    monkeypatch.setattr(strategy_module, "run_step", counted)
    assert run(config("gpt", "checkpoint")).passed
    assert steps.count("checkpoint") == 2


# -- differences -----------------------------------------------------------------------------------------------------


def record(**overrides: Any) -> Record:
    torch.manual_seed(0)
    weights = {"w": Kept(torch.randn(6))}
    base = Record(
        loss=[2.0, 1.0],
        outputs={"output": Kept(torch.randn(4, 5))},
        grads={"large": Kept(torch.randn(50)), "small": Kept(torch.randn(50) * 1e-9)},
        block_inputs={"blocks.0": Kept(torch.randn(4, 5))},
        before=weights,
        parameters={"w": Kept(weights["w"].values + torch.randn(6) * 1e-3)},
        optimizer={"exp_avg": {"w": Kept(torch.randn(6))}},
        settings=[{"lr": 0.1, "betas": (0.9, 0.95)}],
        buffers={"count": Kept(torch.tensor(3))},
        attributes={"layer.calls": 2},
        moving=frozenset({"layer.calls", "count"}),
        rng={"torch": b"1", "python": b"2"},
        updates=2,
        steps=2,
    )
    return replace(base, **overrides)


@pytest.mark.parametrize(("field", "value"), [
    ("grads", {"large": Kept(torch.ones(50))}),
    ("grads", {"large": Kept(torch.ones(51)), "small": Kept(torch.ones(50))}),
    ("grads", {"large": Kept(torch.full((50,), math.nan)), "small": Kept(torch.ones(50))}),
    ("outputs", {}),
    ("outputs", {"output": Kept(torch.full((4, 5), math.inf))}),
    ("block_inputs", {}),
    ("parameters", {"w": Kept(torch.ones(6))}),
    ("optimizer", {}),
    ("optimizer", {"exp_avg": {"w": Kept(torch.ones(6))}}),
    ("settings", [{"lr": 0.1001, "betas": (0.9, 0.95)}]),
    ("settings", [{"lr": 0.1, "betas": (0.9, 0.99)}]),
    ("buffers", {"count": Kept(torch.tensor(4))}),
    ("attributes", {"layer.calls": 3}),
    ("attributes", {"layer.calls": 2, "layer.more": 1}),
    ("loss", [2.0, math.nan]),
    ("loss", [2.0, 1.1]),
    ("rng", {"torch": b"1", "python": b"3"}),
    ("updates", 1),
    ("updates", 3),
    ("scheduler_steps", 1),
])  # fmt: skip
def test_everything_that_is_recorded_is_compared(field: str, value: Any) -> None:
    found = differences(record(), record(**{field: value}))
    assert not found.none
    assert not found.within(1e-4, 1e-4)
    assert found.words()


def test_equal_records_do_not_differ() -> None:
    assert differences(record(), record()).none
    assert differences(record(), record(), exact=False).none


def test_what_a_forward_leaves_of_its_batch_alone_does_not_count() -> None:
    expected = record(attributes={"layer.calls": 2, "layer.last": 7})
    assert differences(expected, record(attributes={"layer.calls": 2, "layer.last": 8})).none


def test_noise_in_a_gradient_that_is_zero_does_not_decide_but_a_value_does() -> None:
    expected = record()
    size = expected.grads["large"].values.norm()
    noise = expected.grads | {"small": Kept(torch.randn(50) * 1e-9)}
    assert differences(expected, record(grads=noise)).within(1e-4, 1e-4)
    wrong = expected.grads | {"small": Kept(torch.full((50,), 2e-4 * FLOOR * size / math.sqrt(50)))}
    found = differences(expected, record(grads=wrong))
    assert not found.within(1e-4, 1e-4)
    assert found.errors["gradients"][1] == "small"


def test_equal_overflows_are_equal_and_others_are_not() -> None:
    overflow = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    expected = record(grads={"a": Kept(overflow)})
    assert differences(expected, record(grads={"a": Kept(overflow.clone())})).none
    near = torch.tensor([1.01, math.inf, -math.inf, math.nan])
    swapped = torch.tensor([1.0, -math.inf, math.inf, math.nan])
    for wrong, error in ((near, 0.01), (swapped, math.inf)):
        found = differences(expected, record(grads={"a": Kept(wrong)}))
        assert found.errors["gradients"][0] == pytest.approx(error, rel=1e-3)


def test_imaginary_parts_count() -> None:
    z = torch.randn(8, dtype=torch.complex64)
    found = differences(record(grads={"a": Kept(z)}), record(grads={"a": Kept(torch.complex(z.real, z.imag * 1.1))}))
    assert not found.within(1e-3, 1e-3)


def test_a_change_between_the_elements_that_are_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "ELEMENTS_KEPT", 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool):
        tensor = torch.ones(1000, dtype=dtype)
        other = tensor.clone()
        other[1] = 0  # of which every 63rd element is kept
        assert Kept.of(tensor).same(Kept.of(tensor.clone()))
        assert not Kept.of(tensor).same(Kept.of(other))


def test_every_format_has_its_rounding() -> None:
    assert set(ROUNDING) == set(Dtype)
    assert ROUNDING[Dtype.fp32] < ROUNDING[Dtype.amp_fp16] < ROUNDING[Dtype.bf16]


# -- draws with fixed outcomes ---------------------------------------------------------------------------------------


def rows(size: int) -> Tensor:
    return torch.linspace(0.1, 2.0, 4 * 3 * 8).view(4, 3, 8)[:size]


ATTENTION = nn.MultiheadAttention(8, 2, 0.5, batch_first=True)
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True)


@pytest.mark.parametrize("draw", [
    lambda x: F.dropout(x, 0.6), lambda x: F.dropout(x.clone(), 0.5, True, inplace=True),
    lambda x: nn.Dropout1d(0.5)(x), lambda x: nn.AlphaDropout(0.5)(x), lambda x: nn.FeatureAlphaDropout(0.5)(x),
    lambda x: torch.native_dropout(x, 0.5, True)[0], lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    lambda x: ATTENTION(x, x, x)[0], lambda x: ENCODER(x),
    lambda x: x * torch.rand(len(x), 1, 1), lambda x: x + torch.randn_like(x), lambda x: F.gumbel_softmax(x),
    lambda x: F.rrelu(x - 1, training=True), lambda x: x[:, torch.randperm(3)], lambda x: torch.bernoulli(x / 3),
    lambda x: torch.multinomial(x[:, 0], 3), lambda x: torch.normal(x, 2.0), lambda x: torch.randint(0, 9, (len(x),)),
    lambda x: torch.distributions.Normal(x, 1.0).rsample(), lambda x: torch.distributions.Gamma(x, x).rsample(),
    lambda x: torch.distributions.Categorical(logits=x).sample(), lambda x: torch.poisson(x),
    lambda x: x.clone().exponential_(2.0), lambda x: torch.distributions.Dirichlet(x).rsample(),
])  # fmt: skip
def test_a_fixed_draw_is_the_same_for_a_sample_whatever_batch_it_is_in(draw: Callable[[Tensor], Tensor]) -> None:
    first, second = draw(rows(4)), draw(rows(4))
    assert not torch.equal(first, second) or first.dtype == torch.int64  # it draws
    results = []
    for size in (4, 2):
        with FixedDraws() as draws:
            results.append(draw(rows(size)))
        assert not draws.unknown
    whole, part = results
    assert torch.allclose(whole[:2], part, atol=1e-6)
    assert whole.isfinite().all()


def test_two_draws_in_a_forward_differ_and_the_next_forward_draws_the_same() -> None:
    with FixedDraws() as draws:
        a, b = torch.randn(3), torch.randn(3)
        draws.begin_forward()
        c = torch.randn(3)
    assert not torch.equal(a, b)
    assert torch.equal(a, c)


def test_a_permutation_of_the_samples_mixes_them() -> None:
    """So that micro-batches which permute within themselves are not taken to be equal."""
    with FixedDraws():
        assert not torch.equal(torch.randperm(8)[:2], torch.randperm(2))


def test_other_processes_find_what_was_computed_and_come_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    real = verify_module.run_and_record

    def counted(conf: Any, strategy: Any, *rest: Any) -> Record:
        ran.append(strategy.name)
        return real(conf, strategy, *rest)

    monkeypatch.setattr(verify_module, "run_and_record", counted)
    for strategy in ("checkpoint", "offload", "micro_batch", "micro_batch"):
        verify_module._records.clear()  # as a fresh process begins
        c = config("gpt", strategy)
        assert verify(c, CPU, data_of(c.workload), tmp_path).passed
    assert ran == ["baseline", "checkpoint", "offload", "baseline", "micro_batch"]


class Float32Inside(Mlp):
    """Has numbers of its own format in it, so that it cannot be run in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ torch.ones(16, 1, dtype=torch.float32))


globals()["StackOfFloat32Inside"] = stack_of(Float32Inside)


@pytest.mark.parametrize("cheap", [True, False])
def test_without_float64_float32_decides(cheap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_double_is_cheap", lambda device: cheap)
    model = "StackOfFloat32Inside" if cheap else "StackOfMlp"
    assert run(own(model, "micro_batch")).status == "equal"
    assert run(own(model, "micro_batch", "weighted")).status == "not_equal"
    assert run(config("convnet", "save_on_cpu")).status == "equal"  # whose sums are taken in another order
