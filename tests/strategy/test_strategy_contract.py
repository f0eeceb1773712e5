"""What every strategy owes every model: the baseline's result, and a model that is left as it was found.

A strategy joins by its file in conf/strategy/, a workload by its entry in small_workloads.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import hard_models
import pytest
import torch
from small_workloads import STRATEGIES, VARIANTS, WORKLOADS, config, data_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sweep.config.schema import Dtype, Granularity, OffloadImplementation, Placement
from sweep.errors import NotEquivalent, NothingOffloaded, NothingRecomputed
from sweep.results import Verification
from sweep.strategy import applied
from sweep.trial.measure import memory_pass
from sweep.trial.predict import predict
from sweep.trial.trial import run_trial
from sweep.trial.verify import MOVED, ROUNDING, TOLERANCE, FixedDraws, verify
from sweep.workload import Workload, build_workload
from sweep.workload.data import random_states, seed_everything
from sweep.workload.step import Phases, run_step

CPU = torch.device("cpu")
PAIRS = [(w, s) for w in WORKLOADS for s in STRATEGIES]
VERIFIED = [(w, s) for w, s in PAIRS if s != "baseline"]
SEGMENTS_OF_MORE = {s for s in STRATEGIES if config("gpt", s).strategy.checkpoint.segment_size > 1}


def accumulates(strategy: str) -> bool:
    return config("gpt", strategy).strategy.micro_batch_size is not None


def offloads(strategy: str) -> bool:
    return config("gpt", strategy).strategy.offload.placement is not Placement.none


def why_not(workload: str, strategy: str) -> str:
    """The cause by which a pair is refused that cannot be equivalent, or its error's words; "" for all others."""
    if workload == "convnet" and accumulates(strategy):
        return "batch_statistics: stem.1"
    if workload == "convnet" and strategy == "parts_all":
        return "modified by an inplace operation"  # its ReLU overwrites its input, which is all that a part keeps
    if workload == "stateful" and accumulates(strategy):
        return "state: layers.0.calls"
    segments = config("gpt", strategy).strategy.checkpoint.granularity is Granularity.segments
    if workload == "dicts" and segments:
        return "keyword arguments alone"
    if workload == "tied" and strategy in SEGMENTS_OF_MORE:
        return "gradients differ"  # that model adds the blocks' results to the stream outside of them
    return ""


def refused(workload: str, strategy: str) -> str:
    """The cause and the words with which a pair is refused."""
    try:
        found = verified(workload, strategy)
    except (NotEquivalent, RuntimeError) as error:
        return str(error)
    assert not found.passed
    assert found.status == "not_equal"
    return f"{found.cause}: {found.where}; {found.reason}"


def verified(workload: str, strategy: str) -> Verification:
    c = config(workload, strategy)
    return verify(c, CPU, data_of(c.workload))


@pytest.mark.parametrize(("workload", "strategy"), VERIFIED, ids=[f"{w}-{s}" for w, s in VERIFIED])
def test_computes_what_the_baseline_computes(workload: str, strategy: str) -> None:
    if refusal := why_not(workload, strategy):
        assert refusal in refused(workload, strategy)
        return
    found = verified(workload, strategy)
    assert found.passed, found.reason
    assert found.reason == ""
    assert found.scope == "full"
    assert (found.steps, found.updates) == (2, 2)
    assert found.status == "equal"
    assert found.compared_share == 1.0
    assert found.max_rel_err is not None
    if accumulates(strategy):
        assert found.dropout == "off"
        assert (found.rng_equal is None) == (strategy in ("micro_batch", "micro_batch_unequal"))
        assert found.max_rel_err <= MOVED
        assert found.grad_rel_err is not None and found.grad_rel_err <= TOLERANCE / 10
    else:
        assert found.dropout == "on"
        assert found.rng_equal is True
        # save_on_cpu hands back contiguous copies, whose sums may be taken in another order.
        implementation = config("gpt", strategy).strategy.offload.implementation
        assert found.bit_equal or implementation is OffloadImplementation.save_on_cpu


@dataclass
class After:
    """Everything that a few steps leave behind."""

    state: dict[str, Tensor]
    outputs: list[Tensor]  # of a forward without gradients
    losses: list[float]
    moments: list[Tensor]
    rng: Tensor


class Interrupted(Exception):
    pass


class NoDropout(FixedDraws):
    """Each draw is like the first, also those that a recomputation draws again."""

    def __torch_dispatch__(self, *call: Any, **more: Any) -> Any:
        self.begin_forward()
        return super().__torch_dispatch__(*call, **more)


def run_eventfully(workload: str, strategy: str, *, dropout: bool) -> After:
    """A look without gradients, a forward and a backward that break off, then two steps; all under one strategy."""
    c = config(workload, strategy)
    w, phases = build_workload(c.workload, CPU, data_of(c.workload)), Phases()
    before = footprint(w.model)
    torch.manual_seed(11)
    with ExitStack() as stack:
        force = stack.enter_context(applied(c.strategy, w.model, w.blocks, c.workload.global_batch_size, phases, CPU))
        if not dropout:
            stack.enter_context(NoDropout())
        with torch.no_grad(), w.autocast():
            outputs = [t.clone() for t in tree_leaves(w.model(w.train_batch(0)["inputs"])) if isinstance(t, Tensor)]

        def step(number: int) -> float:
            batch = w.train_batch(number)
            return run_step(
                w, batch, phases, micro_batch_size=force.micro_batch_size, around_forward=force.around_forward
            ).loss.item()

        for interrupting in (interrupted_forward, interrupted_backward):
            with interrupting(w), pytest.raises(Interrupted):
                step(0)
            assert phases.stack == []
        force.moved.reset()
        losses = [step(1), step(2)]
        if (workload, strategy) == ("stateful", "offload_inputs"):
            with pytest.raises(NothingOffloaded):
                force.require_effect()  # no operator of its blocks saves the block's input
        elif offloads(strategy):
            force.require_effect()
            assert force.moved.from_host_bytes > 0
        rng = torch.get_rng_state()
    assert footprint(w.model) == before
    assert no_saved_tensor_hooks()
    moments = [t.clone() for state in w.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return After({n: t.clone() for n, t in w.model.state_dict().items()}, outputs, losses, moments, rng)


def footprint(model: nn.Module) -> list[tuple[Any, ...]]:
    """What a strategy could forget on a model: replaced forwards, hooks, rebound buffers, training mode."""
    return [
        (
            name,
            module.__dict__.get("forward"),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
            sorted(module._buffers),
            type(module),
            module.training,
        )
        for name, module in model.named_modules()
    ]


def no_saved_tensor_hooks() -> bool:
    """Whether a tensor is saved as it is."""
    x = torch.ones(3, requires_grad=True)
    result = x.exp()
    return result.grad_fn._saved_result.data_ptr() == result.data_ptr()  # type: ignore[union-attr]


@contextmanager
def interrupted_forward(w: Workload) -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise Interrupted

    handle = w.blocks[-1].module.register_forward_hook(interrupt)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def interrupted_backward(w: Workload) -> Iterator[None]:
    def interrupt(_: Tensor) -> None:
        raise Interrupted

    def plant(_: nn.Module, __: Any, output: Any) -> None:
        next(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad).register_hook(interrupt)

    handle = w.blocks[1].module.register_forward_hook(plant)
    try:
        yield
    finally:
        handle.remove()


@cache
def baseline_after(workload: str, *, dropout: bool) -> After:
    return run_eventfully(workload, "baseline", dropout=dropout)


EQUIVALENT = [(w, s) for w, s in PAIRS if not why_not(w, s)]


@pytest.mark.parametrize(("workload", "strategy"), EQUIVALENT, ids=[f"{w}-{s}" for w, s in EQUIVALENT])
def test_is_clean_after_interruptions_and_leaves_the_model_as_it_was(workload: str, strategy: str) -> None:
    dropout = not accumulates(strategy)
    expected = baseline_after(workload, dropout=dropout)
    actual = run_eventfully(workload, strategy, dropout=dropout)
    exact = dropout and strategy != "save_on_cpu"
    close = close_to(0.0 if exact else 10 * ROUNDING[config(workload).workload.dtype])
    assert all(map(torch.equal, actual.outputs, expected.outputs))
    assert actual.losses == pytest.approx(expected.losses, rel=0.0 if exact else 1e-2, abs=0)
    assert actual.state.keys() == expected.state.keys()
    # A step of an adaptive optimizer is a gradient's sign where there is next to none: moments are compared instead.
    if exact:
        assert all(map(torch.equal, actual.state.values(), expected.state.values()))
        assert torch.equal(actual.rng, expected.rng)
    assert len(actual.moments) == len(expected.moments)
    assert all(map(close, actual.moments, expected.moments))


def close_to(tolerance: float) -> Callable[[Tensor, Tensor], bool]:
    def close(a: Tensor, b: Tensor) -> bool:
        if not tolerance:
            return torch.equal(a, b)
        wide = torch.complex128 if b.is_complex() else torch.float64
        difference = (a.to(wide) - b.to(wide)).norm().item()
        return difference <= tolerance * max(b.to(wide).norm().item(), 1e-3)

    return close


def test_a_baseline_run_would_notice_a_difference() -> None:
    """The comparison above is not blind: another seed of dropout shows."""
    one, other = baseline_after("gpt", dropout=True), baseline_after("gpt", dropout=False)
    assert one.losses != other.losses
    assert not all(map(torch.equal, one.state.values(), other.state.values()))


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if not accumulates(s)])
def test_buffers_count_a_batch_once(strategy: str) -> None:
    """BatchNorm's statistics and a model's own counter, also where blocks are computed twice."""
    for workload, name in (("convnet", "blocks.0.norm1.num_batches_tracked"), ("stateful", "layers.0.calls")):
        if why_not(workload, strategy):
            continue
        calls = run_eventfully(workload, strategy, dropout=True).state[name]
        assert calls == 5  # once without gradients, twice interrupted, two steps


@pytest.mark.parametrize("strategy", [*(s for s in STRATEGIES if s not in VARIANTS), "segments_2", "everything"])
def test_keeps_no_model_alive(strategy: str) -> None:
    c = config("gpt", strategy)
    w = build_workload(c.workload, CPU, data_of(c.workload))
    with applied(c.strategy, w.model, w.blocks, c.workload.global_batch_size, Phases(), CPU) as force:
        run_step(
            w, w.train_batch(0), Phases(),
            micro_batch_size=force.micro_batch_size, around_forward=force.around_forward,
        )  # fmt: skip
    model = weakref.ref(w.model)
    del w, force
    gc.collect()
    assert model() is None


def test_every_dtype_is_in_the_contract() -> None:
    assert {config(w).workload.dtype for w in WORKLOADS} == set(Dtype)


# -- blocks that are hard on a strategy --------------------------------------------------------------------------------


def hard(target: str, loss: str = "mse", **more: Any) -> dict[str, Any]:
    workload = {k: more.pop(k) for k in ("dtype", "optimizer") if k in more}
    model = {"_target_": f"hard_models.{target}"} | more
    data, of = {"_target_": "hard_models.Noise"}, {"_target_": f"hard_models.{loss}"}
    return {"model": model, "data": data, "loss": of} | workload


HARD: dict[str, dict[str, Any]] = {
    **{kind: hard("stateful", kind=kind) for kind in hard_models.STATES},
    **{f"looped_{kind}": hard("Looped", kind=kind) for kind in ("counter", "growing", "random")},
    "recycling": hard("Recycling"),
    "siamese": hard("stateful", "siamese", kind="average"),
    "double_backward": hard("stateful", "gradient_penalty", kind="counter"),
    **{kind: hard("OddArguments", kind=kind) for kind in ("dict", "dataclass", "cache", "skips")},
    "sparse": hard("sparse", optimizer={"name": "sgd"}),
    "encoder_decoder": hard("EncoderDecoder"),
    "mixture": hard("mixture"),
    "tied_amp": hard("Tied", dtype="amp_bf16"),
}
ON_HARD: dict[str, Any] = {s: s for s in ("checkpoint", "hybrid_segments", "hybrid_selective")}
KEEP_CASTS = {"checkpoint": {"granularity": "selective", "keep_ops": ["aten.addmm", "aten._to_copy"]}}


def three_steps(workload: dict[str, Any], strategy: str | dict[str, Any]) -> tuple[list[Any], list[str]]:
    """All that three steps leave behind, and the strategy's notes."""
    c = config(workload, strategy, measure={"steps": 1})
    w, phases = build_workload(c.workload, CPU, data_of(c.workload)), Phases()
    seed_everything(7)
    losses = []
    with applied(c.strategy, w.model, w.blocks, 8, phases, CPU) as force:
        for step in range(3):
            result = run_step(
                w, w.train_batch(step), phases,
                micro_batch_size=force.micro_batch_size, around_forward=force.around_forward,
            )  # fmt: skip
            losses.append(result.loss.item())
        force.require_effect()
        notes = force.notes()
    plain = [re.sub("0[xX][0-9a-fA-F]+", "", repr(vars(m).get("state"))) for m in w.model.modules()]  # with values
    tensors = [t.detach().clone() for _, t in (*w.named_parameters(), *w.named_buffers())]
    return [losses, plain, random_states(CPU), *tensors], notes


@cache
def hard_baseline(name: str) -> list[Any]:
    return three_steps(HARD[name], "baseline")[0]


PAIRS_OF_HARD = [(n, s) for n in HARD for s in ON_HARD] + [("tied_amp", "keep_casts")]


@pytest.mark.parametrize(("name", "strategy"), PAIRS_OF_HARD, ids=map("-".join, PAIRS_OF_HARD))
def test_hard_blocks_compute_what_the_baseline_computes(name: str, strategy: str) -> None:
    expected, (actual, notes) = hard_baseline(name), three_steps(HARD[name], ON_HARD.get(strategy, KEEP_CASTS))
    assert actual[:2] == expected[:2]
    assert actual[2] == expected[2]
    assert all(map(torch.equal, actual[3:], expected[3:]))
    assert notes == []


@pytest.mark.parametrize("name", ["codebook", "teacher", "growing", "looped_counter", "cache", "encoder_decoder"])
def test_copies_of_state_are_counted_and_predicted(name: str) -> None:
    c = config(HARD[name], "checkpoint", measure={"steps": 1})
    data = data_of(c.workload)
    assert predict(c, data, emulations="cpu").allocated_mib == memory_pass(c, CPU, data).peak_mib


# -- strategies that do nothing, or act on a part ----------------------------------------------------------------------


def test_blocks_that_are_never_called_are_named() -> None:
    said = "the model's forward does not call layers.*; name modules that it calls with workload.blocks"
    with pytest.raises(NothingRecomputed, match=re.escape(f"no block was computed again: {said}")):
        three_steps(hard("Methods"), "checkpoint")
    with pytest.raises(NothingOffloaded, match=re.escape(said)):
        three_steps(hard("Methods"), "offload_inputs")
    for strategy in ("checkpoint", "offload_first_2", "hybrid_every_2"):
        notes = three_steps(hard("Methods", called=1), strategy)[1]
        assert re.fullmatch(r"[13] of [24] blocks were never called: layers\.[12].*", notes[0]), notes


def test_a_trial_that_did_nothing_says_so_and_is_never_recommended() -> None:
    result = run_trial(config(hard("Methods"), "checkpoint", mode="predict"), "checkpoint")
    assert (result.outcome, result.reason) == ("failed", "nothing_recomputed")
    assert result.error.startswith("NothingRecomputed: strategy.checkpoint.granularity=blocks: no block was computed")


def test_blocks_whose_result_takes_no_gradient_are_said_to_be_of_no_use_in_backward() -> None:
    c = config(hard("Detached"), "checkpoint")
    with pytest.raises(NothingRecomputed, match=r"layers\.\*: nothing of it was needed in backward"):
        three_steps(hard("Detached"), c.strategy.name)


@pytest.mark.parametrize(("kind", "words"), [
    ("more", r"layers\.3 computes other tensors when it is computed again"),
    ("raises", r"layers\.3 fails when it is computed again \(IndexError: pop from empty list\)"),
])  # fmt: skip
def test_state_that_no_guard_reaches_is_named_by_its_block(kind: str, words: str) -> None:
    with pytest.raises(NotEquivalent, match=words + ".*look for state that its forward changes"):
        three_steps(hard("Outside", kind=kind), "checkpoint")


@pytest.mark.parametrize(("workload", "moved"), [("Plain", 3), ("Recycling", 3), ("Looped", 7)])
def test_the_tail_of_offload_begins_with_the_last_calls(workload: str, moved: int) -> None:
    """In units of the bytes of one block's call. All blocks are alike; Looped runs its four twice."""
    found = []
    for keep in (0, 1):
        more = {"kind": "average"} if workload == "Looped" else {}
        offload = {"placement": "blocks", "blocks": "first:4", "min_tensor_kib": 0.0, "keep_last": keep}
        c = config(hard(workload, **more), {"offload": offload}, measure={"steps": 1})
        w = build_workload(c.workload, CPU, data_of(c.workload))
        with applied(c.strategy, w.model, w.blocks, 8, Phases(), CPU) as force:
            for step in range(2):
                force.moved.reset()
                run_step(w, w.train_batch(step), Phases(), around_forward=force.around_forward)
            found.append(force.moved.to_host_bytes)
    assert found[1] / found[0] == pytest.approx(moved / (moved + 1), rel=0.02)


def test_blocks_are_named_in_a_trial_with_their_share_of_the_activations() -> None:
    result = run_trial(config(hard("EncoderDecoder"), "baseline", mode="predict"), "baseline")
    assert result.block_patterns == ["encoder.layers.*", "decoder.layers.*"]
    assert result.blocks == 5
    assert result.block_share is not None
    assert result.block_share > 0.9
    one = run_trial(config(hard("EncoderDecoder") | {"blocks": "encoder.layers.0"}, "baseline", mode="predict"), "one")
    assert one.block_patterns == ["encoder.layers.*"]
    assert one.block_share is not None
    assert 0.05 < one.block_share < 0.3
