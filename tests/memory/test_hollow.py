"""Tensors without memory: what operators on them return, what they refuse, and what can be read all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ledger_events import what_happened
from torch import Tensor, nn

from sweep.errors import CannotPredict
from sweep.memory import hollow as onednn
from sweep.memory.hollow import HollowLedger, hollow, is_hollow
from sweep.memory.ledger import Ledger
from sweep.results import Phase
from sweep.workload.step import Phases


def test_a_tensor_of_a_tebibyte_takes_no_memory_and_can_be_shown() -> None:
    x = hollow((2**28, 1024), torch.float32)
    assert is_hollow(x)
    assert x.untyped_storage().nbytes() == 2**40
    assert "0." in repr(x[:2])
    assert not is_hollow(torch.ones(3))


def test_its_memory_is_not_handed_out() -> None:
    x = hollow((4, 4), torch.float32)
    for take in (lambda: x.numpy(), lambda: np.asarray(x), lambda: x.data_ptr(), lambda: x.add_(1)):
        with pytest.raises(RuntimeError):
            take()


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "matmul": lambda x, y: x @ y.mT,
    "transposed": lambda x, y: (x.mT * 2).contiguous(),
    "reduce": lambda x, y: x.sum(-1, keepdim=True),
    "max": lambda x, y: x.max(-1),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "compare": lambda x, y: x > y,
    "where": lambda x, y: torch.where(x > 0, x, 0.0),
    "cat": lambda x, y: torch.cat([x, y], -1),
    "split": lambda x, y: torch.split(x * 1, 3, -1),
    "topk": lambda x, y: torch.topk(x, 2),
    "sort": lambda x, y: torch.sort(x),
    "gather": lambda x, y: torch.gather(x, -1, y.argmax(-1, keepdim=True)),
    "embedding": lambda x, y: F.embedding(torch.zeros(3, 2, dtype=torch.long), x[0]),
    "index": lambda x, y: x[:, torch.tensor([0, 2])],
    "conv": lambda x, y: F.conv1d(x, y[:, :5, :3]),
    "pool": lambda x, y: F.max_pool1d(x, 2, return_indices=True),
    "cast": lambda x, y: x.to(torch.float64),
    "var_mean": lambda x, y: torch.var_mean(x, -1),
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "interpolate": lambda x, y: F.interpolate(x, scale_factor=2.0),
    "pad": lambda x, y: F.pad(x, (1, 2)),
    "cumsum": lambda x, y: x.cumsum(-1),
    "one_hot": lambda x, y: F.one_hot(torch.arange(3), 7),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "cross_entropy": lambda x, y: F.cross_entropy(x[0], torch.zeros(5, dtype=torch.long)),
}
aten = torch.ops.aten
#: Gradients that are not contiguous, such as pooling over the tokens leaves: g is (B, S, W), its strides (B, W, S)'s.
BACKWARD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "layer_norm": lambda g, x: aten.native_layer_norm_backward(
        g, x, [8], x[..., :1], x[..., :1], x[0, 0], None, [True, True, False]
    )[:2],
    "batch_norm": lambda g, x: aten.native_batch_norm_backward(
        g, x, *(x[0, :, 0] for _ in range(5)), True, 1e-5, [True, True, True]
    ),
    "group_norm": lambda g, x: aten.native_group_norm_backward(
        g[None].permute(0, 3, 1, 2), x[None].permute(0, 3, 1, 2).contiguous(), *(x[:1, 0, :2] for _ in range(2)),
        x[0, 0], 1, 8, 10, 2, [True, True, True],
    ),
    "log_softmax": lambda g, x: aten._log_softmax_backward_data(g, x, -1, torch.float32),
    "mse": lambda g, x: aten.mse_loss_backward(x.sum(), g, x, 1),
    "elu": lambda g, x: aten.elu_backward(g, 1, 1, 1, False, x),
    "hardswish": lambda g, x: aten.hardswish_backward(g, x),
    "leaky_relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "relu": lambda g, x: aten.threshold_backward(g, x, 0),
    "dropout": lambda g, x: aten.native_dropout_backward(g, x > 0, 2.0),
}  # fmt: skip
CASES |= {f"{name}_backward": lambda x, y, f=f: f(x.mT.contiguous().mT, y) for name, f in BACKWARD.items()}


def described(value: Any) -> list[tuple[Any, ...]]:
    tensors = [value] if isinstance(value, Tensor) else list(value)
    return [(tuple(t.shape), t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors]


@pytest.mark.parametrize("name", CASES)
def test_results_look_like_the_real_ones(name: str) -> None:
    """Shape, strides, type and the size of the storage; the second call is answered from memory."""
    real = described(CASES[name](torch.randn(2, 5, 8), torch.randn(2, 5, 8)))
    x, y = (hollow((2, 5, 8), torch.float32) for _ in range(2))
    with HollowLedger():
        results = [CASES[name](x, y) for _ in range(2)]
    assert described(results[0]) == real
    assert described(results[1]) == real


def test_a_numbers_kind_matters_and_its_value_does_not() -> None:
    x = hollow((3,), torch.int64)
    with HollowLedger() as ledger:
        assert (x * 2).dtype is torch.int64
        assert (x * 2.0).dtype is torch.float32
        assert (x * True).dtype is torch.int64
        before = len(ledger._known)
        assert (x * 3.5).dtype is torch.float32
        assert len(ledger._known) == before
        assert torch.arange(0, 1, 0.25).shape == (4,)
        assert torch.arange(0, 1, 0.5).shape == (2,)


def test_known_values_can_be_read_and_computed_with() -> None:
    with HollowLedger():
        positions = torch.arange(10)
        assert int((positions * 2).sum()) == 90
        assert positions.tolist() == list(range(10))
        assert (positions > 4).nonzero().shape == (5, 1)
        counter = torch.tensor(0.0)
        counter += 1
        assert counter.item() == 1.0


@pytest.mark.parametrize(("rate", "drops"), [(0.0, False), (1.0, True)])
def test_a_random_number_against_a_rate_that_leaves_no_choice_is_known(rate: float, drops: bool) -> None:
    with HollowLedger():
        for number in (torch.rand([]), torch.rand(1)):
            assert bool(number < rate) is drops
            assert bool(number >= rate) is not drops
            with pytest.raises(CannotPredict, match="reads a value"):
                bool(number < 0.5)
            number.mul_(3)
            with pytest.raises(CannotPredict, match="reads a value"):
                bool(number < rate)


def test_weights_can_be_drawn_within_bounds() -> None:
    original = torch.nn.init._no_grad_trunc_normal_
    with HollowLedger():
        layer = torch.nn.Linear(64, 64)
        assert torch.nn.init.trunc_normal_(layer.weight, std=0.02) is layer.weight
    assert torch.nn.init._no_grad_trunc_normal_ is original
    assert torch.nn.init.trunc_normal_(torch.empty(9), std=0.02).abs().max() <= 2


def test_known_values_are_lost_when_unknown_ones_are_written() -> None:
    x = hollow((3,), torch.float32)
    with HollowLedger():
        total = torch.tensor(0.0)
        total += x.sum()
        with pytest.raises(CannotPredict, match="reads a value"):
            total.item()


def test_large_results_of_known_values_are_not_computed() -> None:
    with HollowLedger() as ledger:
        positions = torch.arange(60_000)
        mask = positions[:, None] >= positions  # 3.6e9 elements
        assert is_hollow(mask)
        assert ledger.log.in_use > 3.6e9


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.unique(x),
        lambda x: float(x[0]),
    ],
)
def test_unknown_values_are_refused(read: Callable[[Tensor], Any]) -> None:
    x = hollow((3,), torch.float32)
    with HollowLedger(), pytest.raises(CannotPredict):
        read(x)


def test_resizing_gives_another_storage() -> None:
    with HollowLedger() as ledger:
        x = torch.empty(100, 100)
        torch.mm(torch.empty(500, 100), torch.empty(100, 100), out=x)
        assert x.shape == (500, 100)
        x.resize_(2, 3)
        assert x.untyped_storage().nbytes() == 500 * 100 * 4
        assert ledger.log.in_use == -(-500 * 100 * 4 // 512) * 512


# -- layers whose kernels differ ---------------------------------------------------------------------------------------


def taken(build: Callable[[], Any], run: Callable[[Any, Tensor], Tensor], real: Tensor) -> list[tuple[str, int, str]]:
    """What a model takes forward and backward, in order: the same on real and on hollow tensors."""
    found = []
    for kind, inputs in ((Ledger, real), (HollowLedger, hollow(real.shape, real.dtype))):
        with kind():
            model = build()
        with kind() as ledger:
            run(model, inputs).sum().backward()
        found.append(what_happened(ledger))
    assert found[1] == found[0]
    return found[0]


def lstm(model: nn.LSTM, inputs: Tensor) -> Tensor:
    return model(inputs)[0]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"num_layers": 2, "bidirectional": True, "dropout": 0.1, "batch_first": True}),
        (torch.float32, {"bias": False}),
        (torch.bfloat16, {}),
    ],
)
def test_an_lstm_takes_what_onednn_takes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    found = taken(lambda: nn.LSTM(32, 16, dtype=dtype, **options), lstm, torch.randn(5, 7, 32, dtype=dtype))
    assert any(size > 16384 and operator == "aten.mkldnn_rnn_layer" for _, size, operator in found), "the workspace"


def test_a_large_lstms_workspace_follows_from_a_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "AFFORDABLE", 0)
    taken(lambda: nn.LSTM(32, 16), lstm, torch.randn(6, 128, 32))
    with pytest.raises(CannotPredict, match="6 steps and 100 samples .* give a multiple of 64 samples"):
        taken(lambda: nn.LSTM(32, 16), lstm, torch.randn(6, 100, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_take_what_they_take(dtype: torch.dtype, mode: str) -> None:
    tokens = torch.randint(50, (16, 12))
    taken(lambda: nn.EmbeddingBag(50, 32, mode=mode, dtype=dtype), lambda model, x: model(x), tokens)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("lengths", [[5, 3, 3, 1], [1, 5, 3, 3]])
def test_packed_sequences_take_what_they_take(kind: type[nn.RNNBase], lengths: list[int]) -> None:
    def run(model: nn.Module, inputs: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        padded, found = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        assert padded.shape == (4, 5, 16) and found.shape == (4,)
        return padded

    taken(lambda: kind(32, 16, batch_first=True), run, torch.randn(4, 5, 32))


def test_sequences_of_unknown_lengths_are_refused() -> None:
    with HollowLedger(), pytest.raises(CannotPredict, match="needs the sequences' lengths"):
        nn.utils.rnn.pack_padded_sequence(hollow((4, 5, 32), torch.float32), hollow((4,), torch.int64))


# -- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adafactor in one": lambda p: torch.optim.Adafactor(p, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "muon": lambda p: torch.optim.Muon(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_what_they_take(name: str) -> None:
    """Adafactor reads norms, which have no values, and Adagrad makes its state at once."""

    def events(ledger: Ledger, make: Callable[..., Tensor]) -> list[tuple[str, int, str]]:
        phases = Phases()
        with HollowLedger() if isinstance(ledger, HollowLedger) else Ledger():
            weights = [nn.Parameter(make(64, 32)), nn.Parameter(make(32, 64))]
        with ledger, phases.listening(ledger):
            optimizer = OPTIMIZERS[name](weights)
            for _ in range(2):
                for weight in weights:
                    weight.grad = make(*weight.shape)
                with phases(Phase.optimizer):
                    torch.nn.utils.clip_grad_norm_(weights, 1.0, error_if_nonfinite=True)
                    optimizer.step()
        return what_happened(ledger, Phase.optimizer)

    real = events(Ledger(), torch.randn)
    assert events(HollowLedger(), lambda *shape: hollow(shape, torch.float32)) == real


def test_numbers_are_assumed_for_optimizers_alone() -> None:
    x = hollow((3,), torch.float32)
    ledger, phases = HollowLedger(), Phases()
    with ledger, phases.listening(ledger):
        with phases(Phase.optimizer):
            assert x.norm().item() == 1.0
        with phases(Phase.forward), pytest.raises(CannotPredict):
            x.norm().item()


@pytest.mark.parametrize(
    ("shape", "compute"),
    [
        ((6, 40), lambda x: F.mse_loss(x, torch.ones(6, 40))),
        ((6, 40), lambda x: F.mse_loss(x, torch.ones(6, 40), reduction="none").mean()),
        ((6, 40), lambda x: F.smooth_l1_loss(x, torch.ones(1, 40))),
        ((6, 40), lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(6, 40))),
        ((2, 36, 49), lambda x: F.fold(x, (9, 9), 3)),
        ((2, 4, 9, 9), lambda x: F.unfold(x, 3)),
        ((6, 40), lambda x: x.max()),
        ((6, 40), lambda x: x / x.abs().max()),
    ],
)
def test_kernels_keep_and_read_what_they_do(shape: tuple[int, ...], compute: Callable[[Tensor], Tensor]) -> None:
    """Reduced losses keep the memory of all their terms, folding that of all patches; max asks for NaN backward."""
    taken(lambda: None, lambda _, x: compute(x.requires_grad_()), torch.randn(shape))
