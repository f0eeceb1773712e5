"""The traps of offloading what autograd saves, one test each. The "device" is emulated: copies are real."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import TiedBlocks
from small_workloads import TOKENS, config, data_of
from torch import Tensor, nn

from sweep.config.schema import CheckpointConf, Granularity, OffloadConf, OffloadImplementation, Placement, StrategyConf
from sweep.errors import BadInput, DeviceOutOfMemory, NothingOffloaded, outcome_of
from sweep.memory.ledger import Ledger
from sweep.results import MIB, Outcome
from sweep.strategy import Applied, applied, check_blocks
from sweep.strategy.offload import (
    CudaCopier,
    HostCopy,
    Kept,
    Offload,
    PlainCopier,
    View,
    check,
    chosen_blocks,
    copier_for,
    held_bytes,
    host_buffer,
    span_bytes,
)
from sweep.trial.verify import verify
from sweep.workload import Block, build_workload, find_blocks
from sweep.workload.step import Phases, run_step

CPU = torch.device("cpu")


@contextmanager
def offloading(model: nn.Module, blocks: list[Block] | None = None, **conf: Any) -> Iterator[Offload]:
    """Everything leaves unless `conf` says otherwise."""
    conf = {"placement": Placement.all, "keep_last": 0, "min_tensor_kib": 0.0} | conf
    found = find_blocks(model) if blocks is None else blocks
    offload = Offload(OffloadConf(**conf), [model], found, Phases(), CPU)
    with offload.installed():
        yield offload


def round_trip(offload: Offload, *tensors: Tensor) -> list[Tensor]:
    """What autograd would get back."""
    packed = [offload._pack(t) for t in tensors]
    assert all(isinstance(p, View) for p in packed)
    return [offload._unpack(p) for p in packed]


def moved_shapes(offload: Offload, run: Callable[[], Tensor]) -> list[tuple[int, ...]]:
    """Shapes of the tensors that leave while `run` computes, in order."""
    shapes = []
    pack = offload._pack

    def watch(tensor: Tensor) -> Any:
        packed = pack(tensor)
        if isinstance(packed, View):
            shapes.append(tuple(tensor.shape))
        return packed

    offload._pack = watch  # type: ignore[method-assign]
    with offload.around_forward():
        run()
    return shapes


class Holder(nn.Module):
    """A model that only owns what it is given."""

    def __init__(self, **owned: Any) -> None:
        super().__init__()
        for name, value in owned.items():
            if isinstance(value, nn.Parameter | nn.Module):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)


# -- what never leaves -----------------------------------------------------------------------------------------------


def test_weights_reach_the_hook_as_views_and_stay() -> None:
    """A Linear's weight is saved transposed: a plain tensor, not a Parameter."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    x = torch.randn(5, 8, requires_grad=True)
    kinds = []

    def pack(tensor: Tensor) -> Tensor:
        kinds.append((type(tensor), tensor.is_contiguous()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    assert (Tensor, False) in kinds  # the trap is there
    with offloading(model) as offload:
        assert moved_shapes(offload, lambda: model(x)) == [(5, 8), (5, 16)]


def test_tied_weights_buffers_and_views_of_them_stay() -> None:
    tied = nn.Parameter(torch.randn(6, 6))
    model = Holder(one=nn.Linear(6, 6), two=nn.Linear(6, 6), table=torch.randn(20, 6), running=torch.randn(6))
    model.one.weight = model.two.weight = tied
    x = torch.randn(4, 6, requires_grad=True)

    def forward() -> Tensor:
        y = x * model.table[3:7] + x * model.running  # a slice and a whole buffer
        y = y @ model.one.weight + y @ model.two.weight.t() + F.linear(y, model.one.weight[:, :].view(36).view(6, 6))
        return y * model.table.view(-1)[:6]

    with offloading(model, []) as offload:
        shapes = moved_shapes(offload, forward)
    assert set(shapes) == {(4, 6)}
    # x, and y on its way: the rest is parameters and buffers.
    assert offload.moved.to_host_bytes <= 3 * 4 * 6 * 4


def test_a_weight_replaced_between_steps_stays() -> None:
    """Optimizers and casts may rebind storages: what is resident is asked for at each forward."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(3, 8, requires_grad=True)
    with offloading(model) as offload:
        moved_shapes(offload, lambda: model(x))
        for p in model.parameters():
            p.data = p.data.clone()
        assert moved_shapes(offload, lambda: model(x)) == [(3, 8), (3, 8)]


# -- what comes back -------------------------------------------------------------------------------------------------

BASE = torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)
VIEWS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: BASE.clone(),
    "transposed": lambda: BASE.clone().transpose(0, 2),
    "expanded": lambda: torch.randn(1, 6, 1).expand(5, 6, 7),
    "expanded slice": lambda: BASE.clone()[:1, 2:3].expand(9, 5, 8),
    "offset": lambda: BASE.clone()[2:, 1:4, 3:],
    "strided": lambda: BASE.clone()[::2, ::3, ::5],
    "narrow column": lambda: BASE.clone().view(-1, 8)[:, 3],
    "one element": lambda: BASE.clone().view(-1)[77:78],
    "scalar": lambda: torch.tensor(3.0),
    "chunk of qkv": lambda: torch.randn(2, 5, 24).chunk(3, dim=-1)[1].view(2, 5, 4, 2).transpose(1, 2),
    "bf16": lambda: torch.randn(3, 7, dtype=torch.bfloat16).t(),
    "bits of fp32": lambda: torch.randn(6, 4).view(torch.bfloat16)[1:, 1:5],
    "bool": lambda: (torch.randn(5, 9) > 0).t(),
    "int64": lambda: torch.arange(30).view(5, 6)[:, 2:],
    "complex": lambda: torch.randn(4, 5, dtype=torch.complex64).t(),
    "real part": lambda: torch.randn(4, 5, dtype=torch.complex64).real,
    "imaginary part": lambda: torch.view_as_real(torch.randn(4, 5, dtype=torch.complex64))[..., 1],
    "overlapping": lambda: BASE.clone().view(-1).unfold(0, 5, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_values_strides_and_dtypes_come_back_exactly(name: str) -> None:
    tensor = VIEWS[name]()
    expected, shape, stride = tensor.clone(), tensor.shape, tensor.stride()
    with offloading(nn.Identity(), []) as offload:
        packed = offload._pack(tensor)
        assert isinstance(packed, View)
        moved = offload.moved.to_host_bytes
        storage = tensor.untyped_storage().nbytes()
        del tensor
        back = offload._unpack(packed)
    assert torch.equal(back, expected)
    assert (back.shape, back.stride(), back.dtype) == (shape, stride, expected.dtype)
    assert moved <= storage  # never more than there is, however large the view looks


def test_aliases_are_moved_once_and_come_back_as_aliases() -> None:
    qkv = torch.randn(2, 5, 24)
    q, k, v = qkv.chunk(3, dim=-1)
    with offloading(nn.Identity(), []) as offload:
        packed = [offload._pack(t) for t in (q, k, v, qkv, qkv.transpose(0, 1))]
        assert offload.moved.to_host_bytes == qkv.numel() * 4
        back = [offload._unpack(p) for p in packed]
        assert offload.moved.from_host_bytes == qkv.numel() * 4
        assert len({t.untyped_storage()._cdata for t in back}) == 1
    for got, sent in zip(back, (q, k, v, qkv, qkv.transpose(0, 1)), strict=True):
        assert torch.equal(got, sent)
        assert (got.stride(), got.storage_offset()) == (sent.stride(), sent.storage_offset())


def test_views_of_small_parts_move_their_parts_only() -> None:
    big = torch.randn(1000, 8)
    with offloading(nn.Identity(), []) as offload:
        back = round_trip(offload, big[10:12], big[500:503])
        assert offload.moved.to_host_bytes == (2 + 3) * 8 * 4
    assert torch.equal(back[0], big[10:12])
    assert torch.equal(back[1], big[500:503])


def test_a_square_transpose_does_not_come_back_as_its_base() -> None:
    """Same storage, shape and offset; only strides differ."""
    base = torch.randn(16, 16)
    with offloading(nn.Identity(), []) as offload:
        for order in ((base, base.t()), (base.t(), base)):
            back = round_trip(offload, *order)
            assert all(map(torch.equal, back, order))
        assert offload.moved.to_host_bytes == 2 * base.numel() * 4  # both of a pair from one copy


@pytest.mark.parametrize("order", ["bf16 first", "fp32 first"])
def test_views_of_another_dtype_share_a_copy_only_where_they_fit(order: str) -> None:
    base = torch.randn(4000)
    half, full = base.view(torch.bfloat16)[1:301], base[1:100]  # bytes 2 to 602 and 4 to 400
    tensors = (half, full) if order == "bf16 first" else (full, half)
    expected = [t.clone() for t in tensors]
    with offloading(nn.Identity(), []) as offload:
        back = round_trip(offload, *tensors)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(back, expected, strict=True))


def test_conjugated_and_negated_views_do_not_stand_for_their_storage() -> None:
    z = torch.randn(8, 8, dtype=torch.complex64)
    with offloading(nn.Identity(), []) as offload:
        packed = [offload._pack(t) for t in (z.conj(), z, z.conj().imag, z.imag)]
        back = [offload._unpack(p) for p in packed]
    for got, sent in zip(back, (z.conj(), z, z.conj().imag, z.imag), strict=True):
        assert torch.equal(got, sent)
        assert (got.is_conj(), got.is_neg()) == (sent.is_conj(), sent.is_neg())


# -- keys and versions -----------------------------------------------------------------------------------------------


def test_a_storage_at_a_recurring_address_does_not_get_the_old_copy() -> None:
    with offloading(nn.Identity(), []) as offload:
        recurred = 0
        seen: set[int] = set()
        kept = []
        for value in range(200):
            tensor = torch.full((64,), float(value))
            recurred += tensor.untyped_storage()._cdata in seen
            seen.add(tensor.untyped_storage()._cdata)
            packed = offload._pack(tensor)
            kept.append((value, packed))
            del tensor
            assert not offload._packed  # the key went with its storage
        assert recurred  # the trap is there
        assert all(torch.equal(offload._unpack(p), torch.full((64,), float(v))) for v, p in kept)


@pytest.mark.parametrize("stays", [False, True], ids=["offloaded", "resident"])
@pytest.mark.parametrize("through", ["itself", "a view", "its base"])
def test_a_tensor_changed_after_it_was_saved_is_an_error(stays: bool, through: str) -> None:
    """Hooks switch autograd's own check off."""
    model = nn.Identity()
    with offloading(model, [], min_tensor_kib=1e6 if stays else 0.0) as offload:
        base = torch.randn(6, 6, requires_grad=True) * 1
        x = base[:4] if through == "its base" else base
        with offload.around_forward():
            y = x.exp() if through == "itself" else x.sin()
        changed = {"itself": y, "a view": x[0], "its base": base}[through]
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_weight_that_is_updated_before_backward_is_an_error() -> None:
    model = nn.Linear(6, 6)
    with offloading(model, []) as offload:
        with offload.around_forward():
            y = model(torch.randn(3, 6, requires_grad=True))
        with torch.no_grad():
            model.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_change_before_saving_or_of_something_else_is_none() -> None:
    x = torch.randn(6, 6, requires_grad=True)
    with offloading(nn.Identity(), []) as offload:
        with offload.around_forward():
            y = (x * 2).relu_()  # saves the result of the change in place
            z = y.sin()
        with torch.no_grad():
            z.mul_(5)  # not saved by anyone
        z.sum().backward()
    assert torch.equal(x.grad, ((x > 0) * (x * 2).cos() * 2))  # type: ignore[arg-type]


def test_what_was_changed_and_saved_again_is_not_served_from_a_stale_copy() -> None:
    with offloading(nn.Identity(), []) as offload:
        x = torch.randn(32)
        stale = offload._pack(x)  # as a graph would hold it
        x.mul_(3)
        again = offload._pack(x)
        view = offload._pack(x[4:8])
        assert torch.equal(offload._unpack(again), x)
        assert torch.equal(offload._unpack(view), x[4:8])
        assert offload.moved.to_host_bytes == 2 * 32 * 4
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            offload._unpack(stale)


@pytest.mark.parametrize("through", ["unsafe_chunk", "unsafe_view", "data"])
def test_tensors_that_share_memory_but_no_version_counter_do_not_share_a_copy(through: str) -> None:
    """As in a GRU's cell: its gates are parts of one product, and some are changed in place while others are saved."""
    whole = torch.randn(4, 24)
    share = {
        "unsafe_chunk": lambda: whole.unsafe_chunk(3, 1)[1],
        "unsafe_view": lambda: torch.ops.aten._unsafe_view(whole, [24, 4]),
        "data": lambda: whole.data,
    }[through]
    one, other = share(), share()
    with offloading(nn.Identity(), []) as offload:
        one.mul_(2)
        first, expected = offload._pack(one), one.clone()
        other.mul_(3)  # as many changes as of `one`, counted elsewhere
        assert torch.equal(offload._unpack(offload._pack(other)), other)
        assert torch.equal(offload._unpack(first), expected)


def test_gradients_through_a_gru_are_the_baselines() -> None:
    gru = nn.GRU(8, 8, batch_first=True)
    x = torch.randn(3, 5, 8)

    def gradients(context: Any) -> list[Tensor]:
        gru.zero_grad()
        with context:
            loss = gru(x)[0].square().sum()
        loss.backward()
        return [p.grad.clone() for p in gru.parameters() if p.grad is not None]

    expected = gradients(nullcontext())
    with offloading(gru, []) as offload:
        assert all(map(torch.equal, gradients(offload.around_forward()), expected))
        assert offload.moved.to_host_bytes > 0


# -- what leaves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_smallest_size_counts_bytes_and_not_elements(dtype: torch.dtype) -> None:
    numbers = 2048 // torch.empty((), dtype=dtype).element_size()
    with offloading(nn.Identity(), [], min_tensor_kib=2) as offload:
        assert isinstance(offload._pack(torch.zeros(numbers, dtype=dtype)), View)
        assert isinstance(offload._pack(torch.zeros(numbers - 1, dtype=dtype)), Kept)


def test_an_expanded_tensor_counts_what_it_holds() -> None:
    assert held_bytes(torch.zeros(()).expand(1000, 1000)) == 4
    assert held_bytes(torch.zeros(1000, 1000)[:, 3]) == 4000
    assert held_bytes(torch.zeros(10, 10)) == 400
    assert span_bytes(torch.zeros(10, 10)[2:4, 1]) == (84, 128)
    with offloading(nn.Identity(), [], min_tensor_kib=1) as offload:
        assert isinstance(offload._pack(torch.zeros(()).expand(1000, 1000)), Kept)


def test_empty_and_sparse_tensors_stay() -> None:
    with offloading(nn.Identity(), []) as offload:
        for tensor in (torch.empty(0, 5), torch.eye(4).to_sparse()):
            packed = offload._pack(tensor)
            assert isinstance(packed, Kept)
            assert offload._unpack(packed).shape == tensor.shape


class Mlp(nn.Module):
    """Four blocks of Linear(8, 8) and tanh, and a Linear at the end; 16 samples: a block saves input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


ONE = 16 * 8 * 4  # bytes of an activation


def run_mlp(conf: OffloadConf, checkpoint: CheckpointConf | None = None) -> tuple[Applied, list[Tensor]]:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(16, 8)
    strategy = StrategyConf("own", checkpoint=checkpoint or CheckpointConf(), offload=conf)
    with applied(strategy, model, find_blocks(model), 16, Phases(), CPU) as force:
        with force.around_forward():
            loss = model(x).sum()
        loss.backward()
    return force, [p.grad for p in model.parameters() if p.grad is not None]


def tensors_moved(checkpoint: bool = False, **conf: Any) -> float:
    """Activations of the MLP that leave: of x and the four blocks' outputs; each is saved twice but moved once."""
    conf = {"placement": Placement.all, "keep_last": 0, "min_tensor_kib": 0.0} | conf
    force, grads = run_mlp(OffloadConf(**conf), CheckpointConf(granularity=Granularity.blocks) if checkpoint else None)
    assert all(map(torch.equal, grads, run_mlp(OffloadConf())[1]))
    assert force.moved.from_host_bytes == force.moved.to_host_bytes
    return force.moved.to_host_bytes / ONE


def test_bytes_by_hand() -> None:
    # The input, and the outputs of four blocks (each is the next one's input, too; the last is the head's).
    assert tensors_moved() == 5
    assert tensors_moved(min_tensor_kib=ONE / 1024) == 5
    force, _ = run_mlp(OffloadConf(Placement.all, keep_last=0, min_tensor_kib=ONE / 1024 + 0.01))
    assert force.moved.to_host_bytes == 0


@pytest.mark.parametrize(("keep_last", "moved"), [(0, 5), (1, 4), (2, 3), (3, 2)])
def test_the_last_blocks_and_what_follows_them_stay(keep_last: int, moved: int) -> None:
    # With one kept, the head's input and the last block's tensors stay; the third's output was saved before it began.
    assert tensors_moved(keep_last=keep_last) == moved


@pytest.mark.parametrize(
    ("blocks", "keep_last", "moved"),
    [("first:2", 0, 3), ("0", 1, 2), ("0,2", 0, 4), ("every:2", 0, 4), ("every:2", 2, 2), ("3", 0, 2)],
)
def test_only_the_chosen_blocks_leave(blocks: str, keep_last: int, moved: int) -> None:
    assert tensors_moved(placement=Placement.blocks, blocks=blocks, keep_last=keep_last) == moved


@pytest.mark.parametrize(("keep_last", "moved"), [(0, 4), (1, 3), (3, 1)])
def test_inputs_moves_the_blocks_inputs_only(keep_last: int, moved: int) -> None:
    assert tensors_moved(placement=Placement.inputs, keep_last=keep_last) == moved
    assert tensors_moved(placement=Placement.inputs, keep_last=keep_last, checkpoint=True) == moved


def test_hybrid_moves_block_inputs_and_what_is_outside_of_blocks() -> None:
    # Blocks are recomputed: what is left to save is their inputs, and the head's.
    assert tensors_moved(checkpoint=True) == 5
    assert tensors_moved(checkpoint=True, keep_last=1) == 3
    assert tensors_moved(checkpoint=True, placement=Placement.blocks, blocks="first:4") == 4


def test_a_tensor_that_is_saved_twice_is_moved_once_each_way() -> None:
    x = torch.randn(64, requires_grad=True)
    with offloading(nn.Identity(), []) as offload:
        with offload.around_forward():
            y = x * 1
            loss = (y * y).sum() + y.sin().sum() + y.cos().sum()
        loss.backward()
    assert torch.allclose(x.grad, 2 * x + x.cos() - x.sin())  # type: ignore[arg-type]
    assert offload.moved.to_host_bytes == offload.moved.from_host_bytes == 64 * 4


def test_what_came_back_is_not_kept_once_all_its_aliases_are_there() -> None:
    x = torch.randn(64)
    with offloading(nn.Identity(), []) as offload:
        packed = [offload._pack(x), offload._pack(x[8:])]
        first = offload._unpack(packed[0])
        reloaded = weakref.ref(first.untyped_storage())
        del first
        assert reloaded() is not None  # for the alias that is still awaited
        second = offload._unpack(packed[1])
        assert second.untyped_storage() is reloaded()
        del second
        assert reloaded() is None


def test_backward_can_be_run_twice_over_a_kept_graph() -> None:
    x = torch.randn(64, requires_grad=True)
    with offloading(nn.Identity(), []) as offload:
        with offload.around_forward():
            loss = (x.exp() * x.sin()).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()  # type: ignore[union-attr]
        loss.backward()
    assert torch.equal(x.grad, 2 * first)  # type: ignore[arg-type]


def test_gradients_of_gradients() -> None:
    x = torch.randn(64, requires_grad=True)
    with offloading(nn.Identity(), []) as offload, offload.around_forward():
        (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.allclose(second, 6 * x)


# -- life and death --------------------------------------------------------------------------------------------------


def host_copies() -> int:
    return sum(type(o) is HostCopy for o in gc.get_objects())


def test_graphs_that_are_never_run_backward_release_their_copies() -> None:
    model = Mlp()
    with offloading(model) as offload:
        for _ in range(3):
            with offload.around_forward():
                loss = model(torch.randn(16, 8))
        assert host_copies() == 5  # those of the last graph
        del loss
        assert host_copies() == 0
        assert not offload._packed


def test_a_copy_goes_with_its_graph_also_where_the_tensor_itself_stays() -> None:
    x = torch.randn(64, requires_grad=True)
    kept = x * 1
    with offloading(nn.Identity(), []) as offload:
        for step in (1, 2):
            with offload.around_forward():
                loss = kept.detach().requires_grad_().sin().sum()
            loss.backward()
            assert host_copies() == 0
            assert offload.moved.to_host_bytes == step * 64 * 4  # moved in each step, not served from the last one


def test_copies_go_as_backward_proceeds() -> None:
    model, left = Mlp(), []
    with offloading(model) as offload:
        with offload.around_forward():
            loss = model(torch.randn(16, 8)).sum()
        for layer in model.layers:
            layer[0].weight.register_hook(lambda _: left.append(host_copies()))
        loss.backward()
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1]
    assert host_copies() == 0


def test_the_hooks_hold_no_storage_of_what_left() -> None:
    with offloading(nn.Identity(), []) as offload:
        x = torch.randn(1000, requires_grad=True)
        with offload.around_forward():
            y = (x * 1).sin()
            storage = weakref.ref((x * 2).untyped_storage())
            z = x * 3
            inner = weakref.ref(z.untyped_storage())
            out = z.cos().sum() + y.sum()
            del z
        gc.collect()
        assert storage() is None
        assert inner() is None  # cos saved it, on the host
        out.backward()


def test_the_next_step_is_clean_after_running_out_of_memory() -> None:
    model, x = Mlp(), torch.randn(16, 8)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    def full(*_: Any) -> None:
        raise DeviceOutOfMemory("full")

    with offloading(model, keep_last=1) as offload:
        for where in (0, 2, 3):  # 3 is a kept one: from it on, tensors stay
            handle = model.layers[where][0].register_forward_hook(full)
            with pytest.raises(DeviceOutOfMemory), offload.around_forward():
                model(x)
            handle.remove()
            gc.collect()  # the exception's traceback held the graph
            assert host_copies() == 0
        with offload.around_forward():
            loss = model(x).sum()
        handle = model.layers[1][0].weight.register_hook(full)
        with pytest.raises(DeviceOutOfMemory):
            loss.backward()
        handle.remove()
        model.zero_grad()
        offload.moved.reset()
        with offload.around_forward():
            loss = model(x.clone()).sum()
        loss.backward()
    assert offload.moved.to_host_bytes == 4 * ONE
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]


def test_moving_nothing_is_an_error_and_says_what_to_change() -> None:
    force, _ = run_mlp(OffloadConf(Placement.all, min_tensor_kib=64))
    with pytest.raises(NothingOffloaded, match=r"placement=all: not one byte.*min_tensor_kib \(now 64\).*keep_last"):
        force.require_effect()
    run_mlp(OffloadConf(Placement.none))[0].require_effect()
    force, _ = run_mlp(OffloadConf(Placement.all, min_tensor_kib=0))
    force.require_effect()
    force.moved.reset()
    with pytest.raises(NothingOffloaded):
        force.require_effect()


# -- memory, as the ledger sees it -----------------------------------------------------------------------------------


def ledger_of(strategy: str | dict[str, Any]) -> tuple[Ledger, Applied]:
    c = config("gpt_eager", strategy)
    c.workload.model |= {"layers": 8, "dropout": 0.0}
    w, phases, ledger = build_workload(c.workload, CPU, data_of(c.workload)), Phases(), Ledger()
    with (
        applied(c.strategy, w.model, w.blocks, 8, phases, CPU) as force, ledger, phases.listening(ledger)
    ):  # fmt: skip
        ledger.track(w.model, w.optimizer)
        for step in range(2):
            batch = w.train_batch(step)
            ledger.reset_peak()
            force.moved.reset()
            run_step(w, batch, phases, around_forward=force.around_forward)
    return ledger, force


def test_offload_frees_device_memory_and_counts_as_host() -> None:
    baseline, _ = ledger_of("baseline")
    for strategy in ("offload", "offload_everything", "hybrid", "save_on_cpu"):
        ledger, force = ledger_of(strategy)
        assert ledger.log.host_in_use == 0, strategy
        # Rounded up to 512 each: a little more than what was moved, and nearly all of it is there at once.
        assert force.moved.to_host_bytes <= ledger.log.host_peak < 1.5 * force.moved.to_host_bytes, strategy
        assert ledger.peak().host_peak_mib == ledger.log.host_peak / MIB
        if strategy != "save_on_cpu":
            assert ledger.log.peak < 0.7 * baseline.log.peak, strategy
    assert baseline.log.host_peak == 0


def test_the_device_does_not_hold_what_was_offloaded() -> None:
    """After a forward under offload, the device holds next to nothing more than before it."""
    model, ledger, x = Mlp(), Ledger(), torch.randn(16, 8)
    with offloading(model) as offload, ledger:
        ledger.track(model)
        before = ledger.log.in_use
        with offload.around_forward():
            out = model(x)
        assert ledger.log.in_use - before == 512  # the output
        assert ledger.log.host_in_use == 5 * ONE
        out.sum().backward()


def test_our_offload_moves_less_than_save_on_cpu() -> None:
    ours, torchs = (
        run_mlp(OffloadConf(Placement.all, keep_last=0, min_tensor_kib=0)),
        run_mlp(OffloadConf(Placement.all, implementation=OffloadImplementation.save_on_cpu)),
    )
    weights = sum(8 * 8 * 4 for _ in range(3)) + 8 * 4 * 4  # the first block's input takes no gradient
    assert torchs[0].moved.to_host_bytes == 9 * ONE + weights
    assert ours[0].moved.to_host_bytes == 5 * ONE
    for a, b in zip(ours[1], torchs[1], strict=True):  # from contiguous copies, sums come in another order
        assert (a - b).norm() < 1e-6 * a.norm()


# -- bad values ------------------------------------------------------------------------------------------------------

BLOCKS = find_blocks(Mlp())


@pytest.mark.parametrize(("spec", "keep_last", "chosen"), [
    ("first:1", 0, {0}), ("first:4", 1, {0, 1, 2}), ("every:1", 0, {0, 1, 2, 3}), ("every:3", 0, {0, 3}),
    ("every:9", 0, {0}), ("0,3", 1, {0}), (" 1, 2 ", 0, {1, 2}), ("[0,1]", 0, {0, 1}), ("2,2", 0, {2}),
])  # fmt: skip
def test_choice_of_blocks(spec: str, keep_last: int, chosen: set[int]) -> None:
    assert chosen_blocks(OffloadConf(Placement.blocks, blocks=spec, keep_last=keep_last), 4) == chosen


@pytest.mark.parametrize(("conf", "line"), [
    (OffloadConf(Placement.all, keep_last=4), "strategy.offload.keep_last=4: keeps every one of the 4 blocks"),
    (OffloadConf(Placement.inputs, keep_last=9), "strategy.offload.keep_last=9: keeps every one of the 4 blocks"),
    (OffloadConf(Placement.blocks, blocks="3"), "strategy.offload.blocks=3: leaves nothing to offload with keep"),
    (OffloadConf(Placement.blocks, blocks="4"), "strategy.offload.blocks=4: the model has blocks 0 to 3"),
    (OffloadConf(Placement.blocks, blocks="-1"), "strategy.offload.blocks=-1: the model has blocks 0 to 3"),
    (OffloadConf(Placement.blocks, blocks="first:5"), "strategy.offload.blocks=first:5: the model has blocks 0 to 3"),
    (OffloadConf(Placement.blocks, blocks="first:0"), "strategy.offload.blocks=first:0: is no choice of blocks"),
    (OffloadConf(Placement.blocks, blocks="every:x"), "strategy.offload.blocks=every:x: is no choice of blocks"),
    (OffloadConf(Placement.blocks, blocks="last:2"), "strategy.offload.blocks=last:2: is no choice of blocks"),
    (OffloadConf(Placement.blocks, blocks="0,,1"), "strategy.offload.blocks=0,,1: is no choice of blocks"),
])  # fmt: skip
def test_bad_values_are_one_line(conf: OffloadConf, line: str) -> None:
    with pytest.raises(BadInput) as caught:
        check(conf, BLOCKS)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput):
        Offload(conf, [Mlp()], BLOCKS, Phases(), CPU)


def test_a_model_without_blocks_can_offload_everything_only() -> None:
    model = nn.Linear(4, 4)
    for conf in (OffloadConf(Placement.inputs), OffloadConf(Placement.all), OffloadConf(Placement.blocks, blocks="0")):
        with pytest.raises(BadInput, match="has no repeated blocks"):
            check_blocks(StrategyConf("own", offload=conf), [])
    with offloading(model, []) as offload:
        assert moved_shapes(offload, lambda: model(torch.randn(3, 4))) == [(3, 4)]


# -- the copiers -----------------------------------------------------------------------------------------------------


def test_the_copier_follows_the_device() -> None:
    assert isinstance(copier_for(CPU, pin=True), PlainCopier)


def test_cuda_copier_without_a_gpu_only_that_it_fails_at_once_and_not_in_the_middle_of_a_step() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: see the test that is marked so")
    with pytest.raises((RuntimeError, AssertionError, AttributeError)):
        copier_for(torch.device("cuda", 0), pin=True)


def test_with_torch_empty_mocked_failing_to_pin_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="no more page-locked host memory for") as caught:
        host_buffer((5,), torch.uint8, pin=True)
    assert outcome_of(caught.value) is Outcome.oom_host
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_cuda_copies_come_back_exactly_from_a_pool_and_the_device_is_freed() -> None:
    device = torch.device("cuda", 0)
    copier = CudaCopier(device, pin=True)
    for round_ in range(3):
        sources = [torch.randn(2**20, device=device) for _ in range(8)]
        expected = [s.clone() for s in sources]
        torch.cuda.synchronize()
        handles = [copier.to_host(s) for s in sources]
        assert all(h.buffer.is_pinned() for h in handles)
        sources.clear()
        copier.finish_forward()
        # Would be written over sources that were given back before their copies were done.
        scratch = [torch.full((2**20,), float(round_), device=device) for _ in range(8)]
        back = [copier.from_host(h) for h in reversed(handles)]
        assert all(map(torch.equal, reversed(back), expected))
        del scratch, back, handles
    assert sum(map(len, copier._pool.values())) == 8  # buffers were used again, not pinned anew
    copier.release()
    assert not copier._pool


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["offload", "offload_everything", "hybrid", "offload_inputs", "save_on_cpu"])
def test_cuda_gradients_are_the_baselines(strategy: str) -> None:
    c = config("gpt_bf16", strategy)
    found = verify(c, torch.device("cuda", 0), data_of(c.workload))
    assert found.passed, found.reason


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["offload", "checkpoint"])
def test_blocks_that_are_compiled_modules_can_be_treated(strategy: str) -> None:
    c = config({"model": {"_target_": "test_offload.CompiledStack"}, "data": TOKENS, "seq_len": 16}, strategy)
    assert verify(c, torch.device("cpu"), data_of(c.workload)).status == "equal"


class CompiledStack(TiedBlocks):
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        for i, layer in enumerate(self.layers):
            if in_place:
                layer.compile(backend="eager")
            else:
                self.layers[i] = torch.compile(layer, backend="aot_eager")  # type: ignore[call-overload]


def test_a_block_compiled_in_place_is_refused_by_name() -> None:
    blocks = find_blocks(CompiledStack(in_place=True))
    for strategy in ("offload", "checkpoint"):
        with pytest.raises(BadInput, match="layers.0 is compiled in place"):
            check_blocks(config("gpt", strategy).strategy, blocks)
    check_blocks(config("gpt", "micro_batch").strategy, blocks)
