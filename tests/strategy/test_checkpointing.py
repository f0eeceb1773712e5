"""What checkpointing recomputes, to the FLOP, and what it must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_workloads import config, data_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sweep.config.schema import MATMUL_AND_ATTENTION, CheckpointConf, Granularity
from sweep.errors import BadInput, NotEquivalent
from sweep.results import Phase
from sweep.strategy.checkpointing import check, checkpointing
from sweep.strategy.state import SMALL_BYTES
from sweep.workload import Block, build_workload, find_blocks
from sweep.workload.step import Phases, run_step

CPU = torch.device("cpu")
LAYERS = 4


def flops_of_step(granularity: dict[str, Any] | None, workload: str = "gpt_eager") -> int:
    """Matmul FLOPs of one optimizer step."""
    c = config(workload, {"checkpoint": granularity} if granularity else "baseline")
    w, phases = build_workload(c.workload, CPU, data_of(c.workload)), Phases()
    with checkpointing(c.strategy.checkpoint, w.blocks, phases), FlopCounterMode(display=False) as counter:
        run_step(w, w.train_batch(0), phases)
    return counter.get_total_flops()


def flops_of_forward(select: Callable[[str], bool]) -> int:
    """Matmul FLOPs of those modules of gpt_eager that `select` takes, in one forward."""
    c = config("gpt_eager")
    w = build_workload(c.workload, CPU, data_of(c.workload))
    total = 0
    counter = FlopCounterMode(display=False)

    def before(*_: Any) -> None:
        nonlocal total
        total -= counter.get_total_flops()

    def after(*_: Any) -> None:
        nonlocal total
        total += counter.get_total_flops()

    for name, module in w.model.named_modules():
        if select(name):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
    with torch.no_grad(), counter:
        w.model(w.train_batch(0)["inputs"])
    return total


def blocks_chosen(*indices: int) -> int:
    """One forward of these blocks: a block ends in a dropout that saves its mask, so all of it is needed again."""
    return flops_of_forward(lambda name: name in {f"blocks.{i}" for i in indices})


BASELINE = flops_of_step(None)


@pytest.mark.parametrize(
    ("every_k", "chosen"), [(1, (0, 1, 2, 3)), (2, (0, 2)), (3, (0, 3)), (4, (0,))], ids=["1", "2", "3", "4"]
)
def test_every_kth_block_is_computed_twice(every_k: int, chosen: tuple[int, ...]) -> None:
    again = flops_of_step({"granularity": "blocks", "every_k": every_k}) - BASELINE
    assert again == blocks_chosen(*chosen)
    assert again > 0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_segments_compute_all_their_blocks_twice(size: int) -> None:
    again = flops_of_step({"granularity": "segments", "segment_size": size}) - BASELINE
    assert again == blocks_chosen(0, 1, 2, 3)


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize("workload", ["gpt_eager", "llama_eager", "gpt", "convnet"])
def test_selective_recomputes_no_matmul(workload: str, every_k: int) -> None:
    selective = flops_of_step({"granularity": "selective", "every_k": every_k}, workload)
    assert selective == flops_of_step(None, workload)


def test_selective_that_keeps_nothing_is_checkpointing() -> None:
    nothing = flops_of_step({"granularity": "selective", "keep_ops": []})
    assert nothing == flops_of_step({"granularity": "blocks"})


def test_selective_keeps_exactly_the_operators_it_is_told() -> None:
    bmm_only = flops_of_step({"granularity": "selective", "keep_ops": ["aten.bmm"]}) - BASELINE
    addmm_only = flops_of_step({"granularity": "selective", "keep_ops": ["aten.addmm.default"]}) - BASELINE
    assert 0 < bmm_only < blocks_chosen(0, 1, 2, 3)
    assert 0 < addmm_only < blocks_chosen(0, 1, 2, 3)
    assert bmm_only + addmm_only == blocks_chosen(0, 1, 2, 3)


def test_parts_compute_only_themselves_twice() -> None:
    mlp = flops_of_step({"granularity": "parts", "parts": ["mlp"]}) - BASELINE
    attn = flops_of_step({"granularity": "parts", "parts": ["attn"]}) - BASELINE
    both = flops_of_step({"granularity": "parts", "parts": ["attn", "mlp"]}) - BASELINE
    # Recomputation stops once all that was saved is there: before an MLP's last product, and attention's.
    assert mlp == flops_of_forward(lambda n: n.endswith(".mlp.up"))
    assert attn == flops_of_forward(lambda n: n.endswith(".attn")) - flops_of_forward(lambda n: n.endswith(".attn.out"))
    assert both == mlp + attn
    every_2 = flops_of_step({"granularity": "parts", "parts": ["mlp"], "every_k": 2}) - BASELINE
    assert every_2 == mlp // 2


def test_recomputation_is_announced_as_a_phase_inside_backward() -> None:
    c = config("gpt", "checkpoint")
    w, phases = build_workload(c.workload, CPU, data_of(c.workload)), Phases()
    stacks: list[list[Phase]] = []

    class Listener:
        def enter_phase(self, phase: str) -> None:
            if phase == "recompute":
                stacks.append(list(phases.stack))

        def leave_phase(self, phase: str) -> None:
            pass

    with checkpointing(c.strategy.checkpoint, w.blocks, phases), phases.listening(Listener()):
        run_step(w, w.train_batch(0), phases)
    assert stacks == [[Phase.backward, Phase.recompute]] * LAYERS


# -- what a forward may look like -------------------------------------------------------------------------------------


class Any_(nn.Module):
    """A block whose forward is given."""

    def __init__(self, forward: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.given = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.given(self, *args, **kwargs)


@contextmanager
def checkpointed(module: nn.Module, **conf: Any) -> Iterator[None]:
    conf = {"granularity": Granularity.blocks} | conf
    with checkpointing(CheckpointConf(**conf), [Block("block", module)], Phases()):
        yield


def as_tensor(block: Any, x: Tensor) -> Any:
    return F.dropout(block.linear(x).sin(), 0.3)


def as_tuple(block: Any, x: Tensor) -> Any:
    y = block.linear(x)
    return y.sin(), (None, 7, y.exp())


def as_dict(block: Any, x: Tensor) -> Any:
    y = block.linear(x)
    return {"hidden": y.sin(), "parts": [y.cos(), "text"], "nothing": None}


def tensors(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


@pytest.mark.parametrize("forward", [as_tensor, as_tuple, as_dict])
@pytest.mark.parametrize("granularity", [Granularity.blocks, Granularity.selective])
def test_outputs_keep_their_structure_and_gradients(forward: Callable[..., Any], granularity: Granularity) -> None:
    results = []
    block, x = Any_(forward), torch.randn(5, 6, requires_grad=True)
    for under in (False, True):
        torch.manual_seed(1)
        block.zero_grad()
        if under:
            with checkpointed(block, granularity=granularity):
                out = block(x)
                sum(t.sum() for t in tensors(out)).backward()
        else:
            out = block(x)
            sum(t.sum() for t in tensors(out)).backward()
        results.append((out, block.linear.weight.grad))
    (plain, plain_grad), (again, grad) = results
    assert torch.utils._pytree.tree_structure(plain) == torch.utils._pytree.tree_structure(again)
    assert all(map(torch.equal, tensors(plain), tensors(again)))
    assert torch.equal(plain_grad, grad)


def test_keyword_tensors_are_seen_by_outer_hooks_and_get_gradients() -> None:
    block = Any_(lambda self, *, state, shift, factor=2: self.linear(state).sin() * factor + shift.exp())
    state, shift = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with checkpointed(block), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(state=state, shift=shift, factor=3)
    out.sum().backward()
    assert {state.data_ptr(), shift.data_ptr()} <= set(saved)
    assert torch.equal(shift.grad, shift.exp())  # type: ignore[arg-type]
    assert state.grad is not None
    assert state.grad.any()


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_reach_the_parameters_when_the_input_takes_none(frozen: bool) -> None:
    """The reentrant form loses them."""
    block, x = Any_(as_tensor), torch.randn(5, 6, requires_grad=not frozen)
    with checkpointed(block):
        block(x).sum().backward()
    assert block.linear.weight.grad is not None


def test_dropout_masks_are_the_same_and_the_random_state_moves_on_once() -> None:
    def forward(block: Any, x: Tensor) -> Tensor:
        return F.dropout(block.linear(x), 0.5)

    block, x = Any_(forward), torch.ones(64, 6)
    torch.manual_seed(3)
    with checkpointed(block):
        out = block(x)
        after_forward = torch.get_rng_state()
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), after_forward)
    # The bias's gradient is 2 for each mask entry that let it through: it counts the mask that backward used.
    expected = (out != 0).sum(0) * 2.0
    assert torch.equal(block.linear.bias.grad, expected)
    torch.manual_seed(3)
    block(x)
    assert torch.equal(torch.get_rng_state(), after_forward)


@pytest.mark.parametrize("keep", [None, ["aten.addmm"], ["aten.native_dropout"]])
def test_masks_after_a_kept_operator_that_draws_are_the_same(keep: list[str] | None) -> None:
    """Such as attention with dropout on CUDA: what is kept is not drawn again, but later draws begin behind it."""

    def forward(block: Any, x: Tensor) -> Tensor:
        y = torch.native_dropout(block.linear(x), 0.5, True)[0]
        return F.dropout(y.sin(), 0.5).exp() * F.dropout(x, 0.5)

    block, x = Any_(forward), torch.randn(64, 6)
    grads = []
    for granularity in (Granularity.none, Granularity.selective):
        block.zero_grad()
        torch.manual_seed(3)
        with checkpointed(block, granularity=granularity, keep_ops=keep):
            block(x).sum().backward()
        grads.append((block.linear.weight.grad, torch.get_rng_state()))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("change", [
    lambda scores, x: scores.add_(x.sum()), lambda scores, x: scores.masked_fill_(scores > 0, -1.0),
    lambda scores, x: scores.unsafe_chunk(2, -1)[1].mul_(x[0, 0, 0]), lambda scores, x: scores.mT.div_(3.0),
])  # fmt: skip
def test_a_kept_result_that_is_changed_in_place_is_computed_again(change: Callable[..., Any]) -> None:
    """As T5 adds its bias to the scores: what a matmul kept would hold it already, and get it a second time."""

    def forward(block: Any, x: Tensor) -> Tensor:
        q = block.linear(x)
        scores = q @ q.mT
        change(scores, x)
        return scores.softmax(-1) @ q

    block, x, grads = Any_(forward), torch.randn(2, 4, 6, requires_grad=True), []
    for granularity in (Granularity.none, Granularity.selective):
        block.zero_grad()
        x.grad = None
        with checkpointed(block, granularity=granularity):
            block(x).square().sum().backward()
        grads.append((block.linear.weight.grad, x.grad))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("conf", [
    {"granularity": Granularity.blocks}, {"granularity": Granularity.selective}, {"granularity": Granularity.segments},
    {"granularity": Granularity.parts, "parts": ["1"]},
])  # fmt: skip
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_counts_a_batch_once(conf: dict[str, Any], momentum: float | None) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Tanh())

    x, plain, guarded = torch.randn(32, 6), net(), net()
    for _ in range(2):
        plain(x).sum().backward()
    statistics = guarded[1].running_mean
    with checkpointed(guarded, **conf):
        for _ in range(2):
            guarded(x).sum().backward()
    assert guarded[1].num_batches_tracked == 2
    assert guarded[1].running_mean is statistics
    for (name, a), b in zip(plain.named_buffers(), guarded.buffers(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(plain[0].weight.grad, guarded[0].weight.grad)


def test_a_large_buffer_is_copied_only_where_it_was_changed() -> None:
    large = SMALL_BYTES // 4 + 1

    def forward(block: Any, x: Tensor) -> Tensor:
        seen.append((block.table.data_ptr(), block.count.data_ptr()))
        block.count.add_(1)
        return block.linear(x).sin() + block.table[:6]

    seen: list[tuple[int, int]] = []
    block = Any_(forward)
    block.register_buffer("table", torch.randn(large))
    block.register_buffer("count", torch.zeros(large))
    with checkpointed(block):
        block(torch.randn(5, 6)).sum().backward()
    (table, count), (table_again, count_again) = seen
    assert table == table_again
    assert count != count_again
    assert torch.equal(block.count, torch.ones(large))


def test_buffers_are_put_back_after_a_recomputation_that_fails() -> None:
    def forward(block: Any, x: Tensor) -> Tensor:
        block.count.add_(1)
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("recomputation")
        return block.linear(x).sin()

    calls: list[int] = []
    block = Any_(forward)
    block.register_buffer("count", torch.zeros(()))
    count = block.count
    with checkpointed(block):
        out = block(torch.randn(5, 6)).sum()
        with pytest.raises(NotEquivalent, match="block fails when it is computed again.*recomputation"):
            out.backward()
        assert block.count is count
        assert block.count == 1


def test_without_gradients_nothing_is_checkpointed() -> None:
    block, x = Any_(as_tuple), torch.randn(5, 6)
    with checkpointed(block), torch.no_grad():
        out = block(x)
    assert not tensors(out)[0].requires_grad
    assert torch.equal(tensors(out)[0], tensors(block(x))[0])


def test_autocast_is_the_same_in_recomputation() -> None:
    dtypes = []

    def forward(block: Any, x: Tensor) -> Tensor:
        y = block.linear(x)
        dtypes.append(y.dtype)
        return y.sin()

    block = Any_(forward)
    with checkpointed(block):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = block(torch.randn(5, 6))
        out.float().sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


def test_a_block_that_is_used_twice_is_recomputed_twice() -> None:
    block, x = Any_(as_tensor), torch.randn(5, 6)
    grads = []
    for granularity in (Granularity.none, Granularity.blocks):
        block.zero_grad()
        torch.manual_seed(5)
        with checkpointed(block, granularity=granularity):
            block(block(x)).sum().backward()
        grads.append(block.linear.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(("call", "words"), [
    (lambda blocks, x: blocks[1](state=blocks[0](state=x)), "are called with keyword arguments alone"),
    (lambda blocks, x: blocks[1](blocks[0](x)[0]), "are given a Tensor and return a tuple"),
])  # fmt: skip
def test_segments_refuse_blocks_that_do_not_hand_on(call: Callable[..., Any], words: str) -> None:
    blocks = [Any_(lambda self, state: (self.linear(state),)) for _ in range(2)]
    conf = CheckpointConf(granularity=Granularity.segments, segment_size=2)
    with (
        checkpointing(conf, [Block(str(i), b) for i, b in enumerate(blocks)], Phases()),
        pytest.raises(NotEquivalent, match=words),
    ):
        call(blocks, torch.randn(5, 6))


# -- bad values -------------------------------------------------------------------------------------------------------

BLOCKS = find_blocks(build_workload(config("gpt").workload, CPU, data_of(config("gpt").workload)).model)


@pytest.mark.parametrize(("conf", "blocks", "line"), [
    (CheckpointConf(Granularity.blocks, every_k=5), BLOCKS, "strategy.checkpoint.every_k=5: the model has only 4"),
    (CheckpointConf(Granularity.selective, every_k=9), BLOCKS, "strategy.checkpoint.every_k=9: the model has only 4"),
    (CheckpointConf(Granularity.segments, segment_size=5), BLOCKS, "strategy.checkpoint.segment_size=5: the model has"),
    (CheckpointConf(Granularity.blocks), [], "strategy.checkpoint.granularity=blocks: the model has no repeated"),
    (CheckpointConf(Granularity.parts, parts=["mpl"]), BLOCKS, "strategy.checkpoint.parts=mpl: matches nothing inside"),
    (CheckpointConf(Granularity.parts, parts=["mlp", "x"]), BLOCKS, "strategy.checkpoint.parts=x: matches nothing"),
    (CheckpointConf(Granularity.selective, keep_ops=["mm"]), BLOCKS, "strategy.checkpoint.keep_ops=mm: is no operator"),
    (CheckpointConf(Granularity.selective, keep_ops=["aten.nope"]), BLOCKS, "strategy.checkpoint.keep_ops=aten.nope:"),
    (CheckpointConf(Granularity.selective, keep_ops=["aten.mm.nope"]), BLOCKS, "strategy.checkpoint.keep_ops=aten.mm"),
    (CheckpointConf(Granularity.selective, keep_ops=["a.b.c.d.e"]), BLOCKS, "strategy.checkpoint.keep_ops=a.b.c.d.e:"),
    (CheckpointConf(Granularity.selective, keep_ops=[""]), BLOCKS, "strategy.checkpoint.keep_ops=: is no operator"),
])  # fmt: skip
def test_bad_values_are_one_line(conf: CheckpointConf, blocks: list[Block], line: str) -> None:
    with pytest.raises(BadInput) as caught:
        check(conf, blocks)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput), checkpointing(conf, blocks, Phases()):
        pass
    assert all("forward" not in b.module.__dict__ for b in blocks)


def test_values_that_are_not_used_are_not_refused() -> None:
    check(CheckpointConf(Granularity.none, every_k=99), [])
    check(CheckpointConf(Granularity.segments, every_k=99), BLOCKS)
    check(CheckpointConf(Granularity.blocks, segment_size=99), BLOCKS)


def test_the_kept_operators_exist() -> None:
    """A misspelt default would silently keep nothing."""
    for name in MATMUL_AND_ATTENTION:
        namespace, op, overload = name.split(".")
        assert getattr(getattr(getattr(torch.ops, namespace), op), overload)
