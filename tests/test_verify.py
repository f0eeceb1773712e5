"""Verification catches strategies that are wrong on purpose, and says what it compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_workloads import config, data_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sweep.verify as verify_module
import sweep.verify_run as module
from sweep.errors import DeviceOutOfMemory
from sweep.outcomes import NotFinite
from sweep.results import Verification
from sweep.schema import Config, Dtype
from sweep.step import StepResult, run_step, split, update
from sweep.strategy import Applied
from sweep.strategy.patching import patched_forward
from sweep.verify import FLOOR, TOLERANCE, NoDropout, Record, judge, verify
from sweep.workload import Workload

CPU = torch.device("cpu")


def run(c: Config, capacity_mib: float | None = None) -> Verification:
    return verify(c, CPU, data_of(c.workload), capacity_mib)


@contextmanager
def wrong_strategy(monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Workload, Applied], Any]) -> Iterator[None]:
    """Every run but the baseline's goes through `break_it`, a context manager around the model while steps are run."""
    real = module.applied

    @contextmanager
    def applied(conf: Any, model: nn.Module, blocks: Any, *rest: Any) -> Iterator[Applied]:
        with real(conf, model, blocks, *rest) as force:
            if conf.name == "baseline":
                yield force
            else:
                with break_it(model, blocks):
                    yield force

    monkeypatch.setattr(module, "applied", applied)
    yield


def broken_step(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., StepResult]) -> None:
    """The second run, the strategy's, takes its steps by `wrong`."""
    runs: list[int] = []

    def step(workload: Workload, *args: Any, **kwargs: Any) -> StepResult:
        if id(workload.model) not in runs:
            runs.append(id(workload.model))
            kept.append(workload.model)  # so that the number is not given to another
        return (run_step if len(runs) == 1 else wrong)(workload, *args, **kwargs)

    kept: list[nn.Module] = []
    monkeypatch.setattr(module, "run_step", step)


def test_a_checkpoint_that_draws_other_masks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def careless(model: nn.Module, blocks: Any) -> Iterator[None]:
        def wrap(forward: Any) -> Any:
            return lambda *a: checkpoint(forward, *a, use_reentrant=False, preserve_rng_state=False)

        with patched_forward(blocks[1].module, wrap):
            yield

    with wrong_strategy(monkeypatch, careless):
        found = run(config("gpt", "checkpoint_every_2"))
    assert not found.passed
    assert "gradients differ" in found.reason
    assert "blocks.1" in found.reason
    assert found.loss_rel_err == 0  # forward is right: only backward tells
    assert found.rng_equal is False
    assert "the random state after the step differs" in found.reason


def test_a_buffer_that_is_updated_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def careless(model: nn.Module, blocks: Any) -> Iterator[None]:
        with patched_forward(blocks[1].module, lambda f: lambda x: checkpoint(f, x, use_reentrant=False)):
            yield

    with wrong_strategy(monkeypatch, careless):
        found = run(config("convnet", "checkpoint_every_2"))  # of which block 1 is none
    assert not found.passed
    assert found.reason.startswith("buffers differ by")
    assert "blocks.1" in found.reason
    assert found.grad_rel_err == 0


def test_a_wrong_state_beside_a_mask_of_infinities_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def careless(model: nn.Module, blocks: Any) -> Iterator[None]:
        yield
        model.layers[3].mean.mul_(1.01)

    with wrong_strategy(monkeypatch, careless):
        found = run(config("stateful", "offload"))
    assert not found.passed
    assert "buffers differ by 0.01, most at layers.3.mean" in found.reason


def test_a_part_of_the_output_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def careless(model: nn.Module, blocks: Any) -> Iterator[None]:
        def wrap(forward: Any) -> Any:
            def changed(**kwargs: Any) -> Any:
                out = forward(**kwargs)
                return {**out, "norm": out["norm"] * 1.001}

            return changed

        with patched_forward(blocks[2].module, wrap):
            yield

    with wrong_strategy(monkeypatch, careless):
        found = run(config("dicts", "checkpoint"))
    assert not found.passed
    assert "outputs differ by 0.001, most at output.norms.2" in found.reason


def test_a_gradient_that_is_wrong_at_a_block_input_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def careless(model: nn.Module, blocks: Any) -> Iterator[None]:
        model.tokens.weight.requires_grad_(False)
        model.positions.weight.requires_grad_(False)

        def wrap(forward: Any) -> Any:
            return lambda x: forward(x) if not x.requires_grad else forward(x * 1.0)

        with patched_forward(blocks[0].module, wrap):
            yield

    with wrong_strategy(monkeypatch, careless):
        found = run(config("gpt", "checkpoint"))
    assert not found.passed
    assert "gradients differ by inf" in found.reason
    assert "tokens.weight" in found.reason  # a missing gradient is named
    assert "gradients at the block inputs differ by inf, most at blocks.0" in found.reason
    assert found.max_rel_err is None  # JSON knows no infinity


@pytest.mark.parametrize("factor", [1.01, 0.5, -1.0, 0.0])
def test_a_loss_that_is_scaled_wrong_is_caught(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    def wrong(workload: Workload, *args: Any, **kwargs: Any) -> StepResult:
        real = workload.loss

        class Scaled:
            count = real.count

            def __call__(self, model: nn.Module, batch: Any) -> Tensor:
                return real(model, batch) * factor

        workload.loss = Scaled()  # type: ignore[assignment]
        return run_step(workload, *args, **kwargs)

    broken_step(monkeypatch, wrong)
    c = config("gpt", "micro_batch")
    c.workload.grad_clip_norm = None
    found = run(c)
    assert not found.passed
    assert found.loss_rel_err == pytest.approx(abs(factor - 1), rel=1e-3)
    assert found.grad_rel_err == pytest.approx(abs(factor - 1), rel=1e-2)


def test_the_mean_of_unequal_micro_batches_means_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(workload: Workload, batch: Any, *args: Any, micro_batch_size: int, **kwargs: Any) -> StepResult:
        workload.optimizer.zero_grad()
        parts, total = list(split(batch, micro_batch_size)), torch.zeros(())
        for part in parts:
            loss = workload.loss(workload.model, part) / workload.loss.count(part) / len(parts)
            loss.backward()
            total += loss.detach()
        return StepResult(total, workload.loss.count(batch), len(parts), update(workload))

    broken_step(monkeypatch, wrong)
    found = run(config("gpt", {"micro_batch_size": 6}))  # 6 samples and 2
    assert not found.passed
    assert "loss differ by" in found.reason
    assert "gradients differ by" in found.reason


def test_a_skipped_optimizer_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(workload: Workload, *args: Any, **kwargs: Any) -> StepResult:
        workload.optimizer.step = lambda *a, **k: None  # type: ignore[method-assign]
        return run_step(workload, *args, **kwargs)

    broken_step(monkeypatch, wrong)
    c = config("vit", "checkpoint")
    found = run(c)
    assert not found.passed
    assert found.reason == "0 optimizer steps instead of 1"
    assert (found.updates, found.updates_expected) == (0, 1)


def test_an_optimizer_step_per_micro_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(workload: Workload, *args: Any, **kwargs: Any) -> StepResult:
        run_step(workload, *args, **kwargs)
        return run_step(workload, *args, **kwargs)

    broken_step(monkeypatch, wrong)
    found = run(config("gpt", "micro_batch"))
    assert not found.passed
    assert "2 optimizer steps instead of 1" in found.reason


def test_a_scheduler_step_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(workload: Workload, *args: Any, **kwargs: Any) -> StepResult:
        result = run_step(workload, *args, **kwargs)
        assert workload.scheduler is not None
        workload.scheduler.step()
        return result

    broken_step(monkeypatch, wrong)
    found = run(config("gpt", "checkpoint"))
    assert not found.passed
    assert found.reason == "2 scheduler steps instead of 1"


def test_several_steps_are_compared_when_asked() -> None:
    c = config("gpt", "hybrid", measure={"verify_steps": 3})
    found = run(c)
    assert found.passed
    assert (found.updates, found.updates_expected) == (3, 3)


# -- judging ---------------------------------------------------------------------------------------------------------


def record(**overrides: Any) -> Record:
    torch.manual_seed(0)
    base = Record(
        loss=[2.0],
        outputs={"output": torch.randn(4, 5)},
        grads={"large": torch.randn(50), "small": torch.randn(50) * 1e-9},
        block_inputs={"blocks.0": torch.randn(4, 5)},
        buffers={"count": torch.tensor(3)},
        rng=[torch.get_rng_state()],
        updates=1,
    )
    return copy.deepcopy(base) if not overrides else Record(**(vars(base) | overrides))


def scaled(tensor: Tensor, error: float) -> Tensor:
    return tensor * (1 + error)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_an_error_just_within_the_tolerance_passes_and_one_beyond_fails(dtype: Dtype) -> None:
    tolerance = TOLERANCE[dtype]
    expected = record()
    for factor, passes in ((0.9, True), (1.1, False)):
        wrong = {n: scaled(t, tolerance * factor) for n, t in expected.grads.items()}
        found = judge(expected, record(grads=wrong), tolerance)
        assert found.passed is passes
        assert found.tolerance == tolerance
        assert found.grad_worst == "large"
        assert found.grad_rel_err == pytest.approx(tolerance * factor, rel=1e-2)
        assert not found.bit_equal


def test_tolerances_follow_the_dtypes() -> None:
    assert set(TOLERANCE) == set(Dtype)
    assert TOLERANCE[Dtype.fp32] < TOLERANCE[Dtype.amp_fp16] < TOLERANCE[Dtype.bf16]


def test_noise_in_a_gradient_that_is_zero_does_not_decide_but_a_value_does() -> None:
    expected = record()
    size = expected.grads["large"].norm()
    noise = expected.grads | {"small": torch.randn(50) * 1e-9}
    assert judge(expected, record(grads=noise), 1e-4).passed
    wrong = expected.grads | {"small": torch.full((50,), 2e-4 * FLOOR * size / math.sqrt(50))}
    found = judge(expected, record(grads=wrong), 1e-4)
    assert not found.passed
    assert found.grad_worst == "small"


@pytest.mark.parametrize(("field", "value"), [
    ("grads", {"large": torch.ones(50)}),
    ("grads", {"large": torch.ones(50), "small": torch.ones(50), "more": torch.ones(2)}),
    ("grads", {"large": torch.ones(51), "small": torch.ones(50)}),
    ("grads", {"large": torch.full((50,), math.nan), "small": torch.ones(50)}),
    ("outputs", {}),
    ("outputs", {"output": torch.full((4, 5), math.inf)}),
    ("block_inputs", {}),
    ("buffers", {"count": torch.tensor(4)}),
    ("loss", [math.nan]),
    ("loss", [2.1]),
    ("rng", [torch.zeros(5056, dtype=torch.uint8)]),
    ("updates", 0),
    ("updates", 2),
    ("scheduler_steps", 1),
])  # fmt: skip
def test_everything_that_is_recorded_is_judged(field: str, value: Any) -> None:
    found = judge(record(), record(**{field: value}), 1e-4)
    assert not found.passed
    assert found.reason
    assert not found.bit_equal


def test_equal_records_are_bit_equal() -> None:
    found = judge(record(), record(), 0.0)
    assert found.passed
    assert found.bit_equal
    assert found.max_rel_err == 0.0


def test_equal_overflows_are_equal_and_others_are_not() -> None:
    overflow = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    expected = record(grads={"a": overflow, "b": torch.ones(2)})
    assert judge(expected, record(grads={"a": overflow.clone(), "b": torch.ones(2)}), 1e-4).passed
    near = torch.tensor([1.01, math.inf, -math.inf, math.nan])
    found = judge(expected, record(grads={"a": near, "b": torch.ones(2)}), 1e-4)
    assert found.grad_rel_err == pytest.approx(0.01, rel=1e-3)
    swapped = torch.tensor([1.0, -math.inf, math.inf, math.nan])
    assert judge(expected, record(grads={"a": swapped, "b": torch.ones(2)}), 1e-4).grad_rel_err == math.inf


def test_imaginary_parts_count() -> None:
    z = torch.randn(8, dtype=torch.complex64)
    expected = record(grads={"a": z})
    assert not judge(expected, record(grads={"a": torch.complex(z.real, z.imag * 1.1)}), 1e-3).passed


def test_the_random_state_is_not_compared_with_dropout_off() -> None:
    found = judge(record(), record(rng=[torch.zeros(8)]), 1e-4, dropout=False)
    assert found.passed
    assert found.rng_equal is None
    assert found.dropout == "off"


# -- the reduced check -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    ["micro_batch", "micro_batch_unequal", "checkpoint", "checkpoint_every_2", "segments_3", "offload",
     "offload_first_2", "offload_list", "offload_every_2", "hybrid", "everything"],
)  # fmt: skip
@pytest.mark.parametrize("workload", ["gpt", "tuples", "vit"])
def test_where_gradients_do_not_fit_the_check_is_reduced_and_says_so(workload: str, strategy: str) -> None:
    c = config(workload, strategy)
    c.workload.model |= {"layers": 6}
    found = run(c, capacity_mib=0.05)
    assert found.passed, found.reason
    assert found.scope.startswith("reduced: at most ")
    assert found.scope.endswith(" blocks, 4 samples")


def test_the_reduced_check_leaves_the_config_alone() -> None:
    c = config("gpt", "everything")
    before = copy.deepcopy(c)
    run(c, capacity_mib=0.05)
    assert c == before


def test_what_fits_is_not_reduced() -> None:
    assert run(config("gpt", "checkpoint"), capacity_mib=1000).scope == "full"


def test_the_reduced_check_still_catches_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def careless(model: nn.Module, blocks: Any) -> Iterator[None]:
        assert len(blocks) == 2

        def wrap(forward: Any) -> Any:
            return lambda *a: checkpoint(forward, *a, use_reentrant=False, preserve_rng_state=False)

        with patched_forward(blocks[1].module, wrap):
            yield

    with wrong_strategy(monkeypatch, careless):
        found = run(config("gpt", "offload"), capacity_mib=0.05)
    assert not found.passed
    assert "gradients differ" in found.reason
    assert found.scope.startswith("reduced")


def test_the_reduced_check_still_refuses_batch_norm_with_micro_batches() -> None:
    found = run(config("convnet", "micro_batch"), capacity_mib=0.001)
    assert not found.passed
    assert "stem.1 computes its result from the whole batch" in found.reason


def test_running_out_of_memory_in_the_full_check_leads_to_the_reduced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(workload: Workload, *args: Any, **kwargs: Any) -> StepResult:
        if len(workload.blocks) > 2:
            raise DeviceOutOfMemory("full")
        return run_step(workload, *args, **kwargs)

    monkeypatch.setattr(module, "run_step", full)
    found = run(config("gpt", "checkpoint"))
    assert found.passed
    assert found.scope == "reduced: at most 2 blocks, 4 samples"


def test_another_error_in_the_full_check_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> StepResult:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "run_step", wrong)
    with pytest.raises(ZeroDivisionError):
        run(config("gpt", "checkpoint"))


def test_a_baseline_that_is_not_finite_is_that_and_no_difference() -> None:
    c = config("vit", "checkpoint")
    c.workload.optimizer.lr = 1e30
    c.measure.verify_steps = 3
    with pytest.raises(NotFinite, match="the baseline's loss is nan"):
        run(c)


# -- dropout off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [
    lambda x: nn.Dropout(0.5)(x), lambda x: nn.Dropout1d(0.5)(x), lambda x: nn.AlphaDropout(0.5)(x),
    lambda x: nn.FeatureAlphaDropout(0.5)(x), lambda x: F.dropout(x, p=0.5), lambda x: F.dropout(input=x, p=0.5),
    lambda x: torch.dropout(x, 0.5, True), lambda x: torch.alpha_dropout(x, 0.5, True),
    lambda x: F.dropout(x.clone(), 0.5, True, inplace=True),
])  # fmt: skip
def test_no_dropout_by_any_name(call: Callable[[Tensor], Tensor]) -> None:
    x, state = torch.randn(3, 8, 8), torch.get_rng_state()
    assert not torch.equal(call(x), x)  # the call drops something
    torch.set_rng_state(state)
    with NoDropout():
        assert torch.equal(call(x), x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("positional", [False, True])
def test_no_dropout_inside_of_attention(positional: bool) -> None:
    q = torch.randn(2, 4, 8, 16)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with NoDropout():
        if positional:
            out = F.scaled_dot_product_attention(q, q, q, None, 0.5, True)
        else:
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True)
    assert torch.allclose(out, expected, atol=1e-6)


def test_no_dropout_lasts_into_recomputation_and_ends_outside() -> None:
    x = torch.randn(64, requires_grad=True)
    with NoDropout():
        out = checkpoint(lambda t: F.dropout(t.sin(), 0.5).exp(), x, use_reentrant=False)
        out.sum().backward()
    assert torch.allclose(x.grad, x.sin().exp() * x.cos())  # type: ignore[arg-type]
    assert not torch.equal(F.dropout(x, 0.5), x)


def test_the_baseline_is_computed_once_for_all_strategies_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout on and with dropout off it is another; with another seed, too."""
    ran: list[str] = []
    real = verify_module.run_and_record

    def counted(conf: Any, strategy: Any, *args: Any, **kwargs: Any) -> Record:
        ran.append(strategy.name)
        return real(conf, strategy, *args, **kwargs)

    monkeypatch.setattr(verify_module, "run_and_record", counted)
    for strategy in ("checkpoint", "offload", "micro_batch", "hybrid"):
        conf = config("gpt", strategy)
        assert run(conf).passed
    assert ran.count("baseline") == 2
    conf.workload.seed += 1
    assert run(conf).passed
    assert ran.count("baseline") == 3
