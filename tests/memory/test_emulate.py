"""CUDA's memory behaviour on hollow CPU tensors, each emulation by itself. No GPU is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ledger_events import Event, events
from torch import Tensor, nn
from torch import zeros as zeros_by_name

from sweep.config.check import typed
from sweep.config.device import cublas_workspace_mib, load_profile
from sweep.config.schema import DeviceConf, plain
from sweep.errors import CannotPredict
from sweep.memory.cuda import CublasWorkspaces, caveats_of, cuda_workspaces, emulated_cuda
from sweep.memory.cuda_attention import Backend, choose
from sweep.memory.device import CudaAnswers
from sweep.memory.hollow import HollowLedger, hollow
from sweep.results import MIB, Phase, Prediction
from sweep.trial.predict import predict
from sweep.workload.step import Phases

ADA, AMPERE, HOPPER, BLACKWELL, TURING, BLACKWELL_CONSUMER = (8, 9), (8, 0), (9, 0), (10, 0), (7, 5), (12, 0)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def size(numbers: int, bytes_each: int = 4) -> int:
    return -(-numbers * bytes_each // 512) * 512


def ledger_for(capability: tuple[int, int]) -> HollowLedger:
    card = DeviceConf("card", "cuda", compute_capability="{}.{}".format(*capability))
    cublas = CublasWorkspaces(round(cublas_workspace_mib(card) * MIB))
    ledger = HollowLedger(workspaces=cuda_workspaces(cublas), count_python_data=False, as_cuda=True)
    cublas.ledger = ledger
    return ledger


@pytest.fixture
def ledger() -> Iterator[HollowLedger]:
    ledger = ledger_for(AMPERE)
    with ledger, emulated_cuda(AMPERE):
        yield ledger


def made_by(ledger: HollowLedger, operator: str) -> list[int]:
    """Bytes of what an operator allocated, in order."""
    return [e.bytes for e in mallocs(ledger) if e.operator == f"aten.{operator}"]


def mallocs(ledger: HollowLedger) -> list[Event]:
    return [e for e in events(ledger) if e.kind == "malloc"]


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "kv_heads", "mask", "dropout", "capability", "expected"),
    [
        (BF16, (2, 8, 128, 64), 8, False, 0.0, AMPERE, Backend.flash),
        (BF16, (2, 8, 128, 64), 8, False, 0.1, ADA, Backend.flash),
        (F16, (2, 8, 128, 64), 8, False, 0.0, BLACKWELL_CONSUMER, Backend.flash),
        (BF16, (2, 8, 128, 64), 2, False, 0.0, AMPERE, Backend.flash),  # grouped queries
        (BF16, (2, 8, 128, 64), 8, True, 0.0, AMPERE, Backend.efficient),  # flash takes no mask
        (BF16, (2, 8, 128, 64), 2, True, 0.0, AMPERE, Backend.math),  # and the efficient one no groups
        (F32, (2, 8, 128, 64), 8, False, 0.0, AMPERE, Backend.efficient),
        (F32, (2, 8, 128, 64), 2, False, 0.0, AMPERE, Backend.math),  # fp32 with groups: no fused kernel
        (F32, (2, 8, 128, 64), 8, True, 0.0, AMPERE, Backend.efficient),
        (F32, (2, 8, 128, 63), 8, False, 0.0, AMPERE, Backend.math),  # head size not a multiple of 4
        (BF16, (2, 8, 128, 512), 8, False, 0.0, AMPERE, Backend.efficient),  # too large for flash
        (BF16, (2, 8, 128, 208), 8, False, 0.0, ADA, Backend.efficient),  # (192, 224] on sm86 to sm89, with gradients
        (BF16, (2, 8, 128, 208), 8, False, 0.0, AMPERE, Backend.flash),
        (F16, (2, 8, 128, 64), 8, False, 0.0, TURING, Backend.efficient),  # flash needs sm80
        (BF16, (2, 8, 128, 64), 8, False, 0.0, TURING, Backend.math),  # and the efficient one bf16 on sm80
        (BF16, (2, 8, 128, 64), 8, False, 0.0, HOPPER, Backend.cudnn),
        (BF16, (2, 8, 128, 64), 8, True, 0.0, BLACKWELL, Backend.cudnn),
        (BF16, (2, 8, 128, 256), 8, False, 0.0, HOPPER, Backend.cudnn),
        (BF16, (2, 8, 128, 256), 8, False, 0.0, BLACKWELL, Backend.flash),  # cuDNN there up to 128
        (F32, (2, 8, 128, 64), 8, False, 0.0, HOPPER, Backend.efficient),
        (torch.float64, (2, 8, 128, 64), 8, False, 0.0, AMPERE, Backend.math),
    ],
)
def test_attention_backend(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    kv_heads: int,
    mask: bool,
    dropout: float,
    capability: tuple[int, int],
    expected: Backend,
) -> None:
    batch, _, length, head_size = shape
    query = torch.empty(shape, dtype=dtype, device="meta").requires_grad_()
    key, value = (torch.empty(batch, kv_heads, length, head_size, dtype=dtype, device="meta") for _ in range(2))
    bias = torch.empty(length, length, dtype=torch.bool, device="meta") if mask else None
    assert choose(query, key, value, bias, dropout, not mask, kv_heads != shape[1], capability) is expected


def test_attention_of_unlike_lengths_or_with_disabled_backends() -> None:
    query, key = (torch.empty(1, 4, n, 64, dtype=BF16, device="meta") for n in (64, 128))
    assert choose(query, key, key, None, 0.0, True, False, AMPERE) is Backend.efficient
    assert choose(query, key, key, None, 0.0, False, False, AMPERE) is Backend.flash
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert choose(query, query, query, None, 0.0, True, False, AMPERE) is Backend.math


def attention_kept(dtype: torch.dtype, length: int, mask: Tensor | None, capability: tuple[int, int]) -> list[int]:
    """Bytes that attention over (2, 4, length, 64) leaves for backward, beside its inputs."""
    ledger = ledger_for(capability)
    inputs = [hollow((2, 4, length, 64), dtype).requires_grad_() for _ in range(3)]
    with ledger, emulated_cuda(capability):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None)
        alive = sorted(ledger.log.alive.values())
        out.sum().backward()
        assert inputs[0].grad is not None
    return alive


def test_flash_keeps_result_row_sums_and_seed() -> None:
    assert attention_kept(BF16, 100, None, AMPERE) == sorted([size(2 * 4 * 100 * 64, 2), size(2 * 4 * 100), 512, 512])


def test_efficient_attention_pads_row_sums_to_32_and_the_mask_to_16() -> None:
    kept = attention_kept(F32, 100, hollow((100, 100), F32), AMPERE)
    assert sorted([size(2 * 4 * 100 * 64), size(2 * 4 * 128), size(100 * 112)]) == [b for b in kept if b > 512]


def test_math_attention_keeps_the_probabilities() -> None:
    kept = attention_kept(F32, 64, None, AMPERE)  # causal: efficient
    assert size(2 * 4 * 64 * 64) not in [b for b in kept if b != size(2 * 4 * 64 * 64)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        kept = attention_kept(F32, 32, None, AMPERE)
    assert kept.count(size(2 * 4 * 32 * 32)) == 1


def test_flash_backward_takes_row_sums_and_fp32_query_gradients(ledger: HollowLedger) -> None:
    """And keys and values expanded to all query heads, where they are grouped."""
    query = hollow((2, 8, 100, 80), BF16).requires_grad_()
    key, value = (hollow((2, 2, 100, 80), BF16).requires_grad_() for _ in range(2))
    F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
    temporary = made_by(ledger, "_scaled_dot_product_flash_attention_backward")[:4]
    assert temporary == [
        2 * 8 * 128 * 4,
        2 * 128 * 8 * 96 * 4,
        size(2 * 100 * 8 * 80, 2),
        size(2 * 100 * 8 * 80, 2),
    ]


def test_efficient_backward_makes_the_product_of_gradient_and_output_in_fp32(ledger: HollowLedger) -> None:
    rows, numbers = 2 * 4 * 100, 2 * 4 * 100 * 64
    for dtype, inside in (
        (F32, [size(rows), size(rows), size(numbers)]),
        (BF16, [size(rows), 2 * 4 * 128 * 64 * 4]),  # the kernel computes the sums and adds up dq
    ):
        before = len(made_by(ledger, "_scaled_dot_product_efficient_attention_backward"))
        query, key, value = (hollow((2, 4, 100, 64), dtype).requires_grad_() for _ in range(3))
        F.scaled_dot_product_attention(query, key, value, attn_mask=torch.empty(100, 100, dtype=dtype)).sum().backward()
        made = made_by(ledger, "_scaled_dot_product_efficient_attention_backward")[before:]
        assert made[: len(inside)] == inside


@pytest.mark.parametrize(
    ("batch", "length", "dropout", "parts"),
    [(1, 512, 0.0, 2), (1, 1024, 0.0, 1), (4, 512, 0.0, 1), (1, 512, 0.1, 1), (1, 256, 0.0, 1)],
)
def test_flash_splits_the_keys_where_queries_do_not_fill_the_card(
    batch: int, length: int, dropout: float, parts: int
) -> None:
    """12 heads on 108 multiprocessors, two blocks of 64 queries on each; keys are in blocks of 256."""
    ledger = HollowLedger(workspaces=cuda_workspaces(CublasWorkspaces(0), 108), as_cuda=True)
    query = hollow((batch, 12, length, 64), BF16)
    with ledger, emulated_cuda(AMPERE):
        F.scaled_dot_product_attention(query, query, query, dropout_p=dropout, is_causal=True)
    accumulated = parts * batch * 12 * length * 64 * 4
    assert (accumulated in made_by(ledger, "_scaled_dot_product_flash_attention")) == (parts > 1)


# -- autocast ---------------------------------------------------------------------------------------------------------


def autocast_results(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype that operators give for a lower-precision argument under autocast."""
    x, w = torch.ones(4, 8, dtype=dtype), torch.ones(8, 8)
    index = torch.zeros(4, dtype=torch.long)
    with torch.autocast("cpu", dtype=dtype):
        return {
            "linear": F.linear(x, w).dtype,
            "einsum": torch.einsum("bi,oi->bo", x.float(), w).dtype,
            "matmul": (x @ w).dtype,
            "softmax": torch.softmax(x, -1).dtype,
            "log_softmax": torch.log_softmax(x, -1).dtype,
            "layer_norm": F.layer_norm(x, (8,)).dtype,
            "rms_norm": F.rms_norm(x, (8,)).dtype,
            "sum": x.sum().dtype,
            "pow": x.pow(2).dtype,
            "exp": x.exp().dtype,
            "rsqrt": x.rsqrt().dtype,
            "cumsum": x.cumsum(-1).dtype,
            "cross_entropy": F.cross_entropy(x, index).dtype,
            "mse_loss": F.mse_loss(x, x).dtype,
            "gelu": F.gelu(x).dtype,
            "add": (x + x).dtype,
            "mean": x.mean().dtype,
            "cat": torch.cat([x, x.float()]).dtype,
        }


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast_gives_cudas_dtypes(ledger: HollowLedger, dtype: torch.dtype) -> None:
    """Columns of torch's table "CUDA Op-Specific Behavior"; gelu, add and mean are in none of them."""
    low = {"linear", "einsum", "matmul", "gelu", "add", "mean"}
    for name, result in autocast_results(dtype).items():
        assert result is (dtype if name in low else F32), name


def test_the_cpus_own_autocast_is_back_afterwards() -> None:
    before = autocast_results(BF16)
    with ledger_for(AMPERE), emulated_cuda(AMPERE):
        assert autocast_results(BF16) != before
    assert autocast_results(BF16) == before


def test_weights_are_cast_once_per_context(ledger: HollowLedger) -> None:
    weight = nn.Parameter(torch.empty(64, 64))
    x = torch.empty(4, 64)
    for _ in range(2):
        before = len(made_by(ledger, "_to_copy"))
        with torch.autocast("cpu", dtype=BF16):
            for _ in range(3):
                F.linear(x, weight)
            linear = made_by(ledger, "_to_copy")[before:].count(size(64 * 64, 2))
            for _ in range(3):
                torch.einsum("bi,oi->bo", x, weight)
            assert linear == 1
            assert made_by(ledger, "_to_copy")[before:].count(size(64 * 64, 2)) == 2  # einsum keeps its own
    del x


def test_softmax_of_bf16_makes_a_copy_and_of_fp16_none(ledger: HollowLedger) -> None:
    with torch.autocast("cpu", dtype=BF16):
        torch.softmax(torch.empty(100, 100, dtype=BF16), -1)
    assert len(made_by(ledger, "_to_copy")) == 1
    with torch.autocast("cpu", dtype=F16):
        torch.softmax(torch.empty(100, 100, dtype=F16), -1)
    assert len(made_by(ledger, "_to_copy")) == 1


# -- operators --------------------------------------------------------------------------------------------------------


def test_dropout_keeps_a_mask_of_bytes(ledger: HollowLedger) -> None:
    x = torch.empty(1000, requires_grad=True)
    before = ledger.log.in_use
    kept = F.dropout(x, 0.5)
    assert ledger.log.in_use - before == size(1000) + size(1000, 1)
    assert F.dropout(x, 0.5, training=False) is x
    assert F.dropout(x, 0.0).untyped_storage()._cdata == x.untyped_storage()._cdata
    kept.sum().backward()


def test_rms_norm_is_one_kernel(ledger: HollowLedger) -> None:
    norm, x = nn.RMSNorm(256), torch.empty(10, 256, requires_grad=True)
    norm(torch.empty(10, 256, dtype=BF16))
    assert made_by(ledger, "_fused_rms_norm") == [], "not for another type than its weight's"
    before = ledger.log.in_use
    y = norm(x)
    assert ledger.log.in_use - before == size(10 * 256) + 512  # the result, and ten reciprocal root mean squares
    y.sum().backward()
    assert made_by(ledger, "_fused_rms_norm_backward")[-2:] == [size(10 * 256), size(256)]


def test_optimizers_are_foreach_by_default(ledger: HollowLedger) -> None:
    parameters = [nn.Parameter(torch.empty(1000)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.empty(1000)
    optimizer.step()
    assert made_by(ledger, "_foreach_sqrt") == [size(1000)] * 3
    state = optimizer.state[parameters[0]]
    assert state["step"].untyped_storage()._cdata not in ledger._live, "step counters live on the host"
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert len(made_by(ledger, "_foreach_norm")) == 1 + 3


def test_optimizers_are_loops_on_the_cpu() -> None:
    ledger = HollowLedger()
    with ledger:
        parameter = nn.Parameter(torch.empty(1000))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.empty(1000)
        optimizer.step()
    assert made_by(ledger, "_foreach_sqrt") == []
    assert made_by(ledger, "sqrt") == [size(1000)]


@pytest.mark.parametrize(("capability", "mib"), [(AMPERE, 8.125), (HOPPER, 32.0)])
def test_cublas_takes_a_workspace_per_thread(capability: tuple[int, int], mib: float) -> None:
    ledger, phases = ledger_for(capability), Phases()
    with ledger, phases.listening(ledger), emulated_cuda(capability):
        weight = nn.Parameter(torch.empty(16, 16))
        x = torch.empty(4, 16, requires_grad=True)
        with phases(Phase.forward):
            y = F.linear(F.linear(x, weight), weight)
        with phases(Phase.backward):
            y.sum().backward()
    workspaces = [e for e in mallocs(ledger) if e.operator.startswith("cuBLAS")]
    assert [e.bytes for e in workspaces] == [mib * MIB] * 2
    assert "free" not in {e.kind for e in events(ledger) if e.operator.startswith("cuBLAS")}


def test_cublas_takes_a_workspace_per_product_where_none_are_kept() -> None:
    cublas = CublasWorkspaces(8 * MIB, kept=False)
    ledger = HollowLedger(workspaces=cuda_workspaces(cublas), count_python_data=False, as_cuda=True)
    cublas.ledger = ledger
    with ledger, emulated_cuda(AMPERE):
        x = torch.empty(16, 16)
        for _ in range(2):
            x @ x
    assert made_by(ledger, "mm") == [8 * MIB, size(256)] * 2
    assert ledger.log.peak == 8 * MIB + 2 * size(256) and ledger.log.in_use == size(256)


@pytest.mark.parametrize("tokens", [3072, 3073])
def test_embedding_backward_sorts_from_3073_indices_on(ledger: HollowLedger, tokens: int) -> None:
    embed, ids = nn.Embedding(500, 64), torch.empty(tokens, dtype=torch.long)
    embed(ids).sum().backward()
    inside = made_by(ledger, "embedding_dense_backward")[:-1]
    expanded = size(tokens * 64)  # sum's gradient is an expanded number, which the kernel copies
    parts = tokens // 10 + 500
    by_sorting = [size(tokens, 8)] * 2 + [size(tokens, 16)] + [size(500, 8)] * 2 + [size(parts, 8), size(parts * 64)]
    assert inside == [expanded] + (by_sorting if tokens > 3072 else [])


def test_layer_norm_keeps_fp32_statistics_of_16_bit_inputs(ledger: HollowLedger) -> None:
    """layer_norm_kernel.cu; the CPU's are of the input's type."""
    F.layer_norm(torch.empty(1000, 64, dtype=BF16), (64,))
    assert made_by(ledger, "native_layer_norm") == [size(1000 * 64, 2), size(1000), size(1000)]


def test_expanded_matrices_are_copied_and_transposed_ones_are_not(ledger: HollowLedger) -> None:
    x, w = torch.empty(100, 50), torch.empty(30, 50)
    x @ w.t()
    assert made_by(ledger, "mm") == [size(100 * 30)]
    torch.empty(1).expand(100, 50) @ w.t()
    assert made_by(ledger, "mm")[1:] == [size(100 * 50), size(100 * 30)]


def test_a_long_sort_takes_its_keys_and_values_twice(ledger: HollowLedger) -> None:
    torch.sort(torch.empty(3, 4096))
    assert made_by(ledger, "sort") == [size(3 * 4096), size(3 * 4096, 8)]
    torch.sort(torch.empty(3, 5000))
    assert made_by(ledger, "sort")[2:5] == [size(15000), size(15000, 8), size(15000, 12)]


def test_what_is_not_counted_is_said_of_what_ran_and_of_nothing_else(ledger: HollowLedger) -> None:
    x = torch.empty(2, 3, 8, 8)
    (x @ x).sum()
    assert caveats_of(op.name for op in ledger.operators) == []
    F.conv2d(x, torch.empty(4, 3, 3, 3)), torch.topk(x, 2), torch.fft.rfft(x), torch.linalg.qr(x)
    said = " ".join(caveats_of(op.name for op in ledger.operators))
    assert [word for word in ("convolutions", "attention", "cub", "cuFFT", "cuSOLVER", "layer") if word in said] == [
        *("convolutions", "cub", "cuFFT", "cuSOLVER")
    ]


def test_recurrent_kernels_are_refused(ledger: HollowLedger) -> None:
    with pytest.raises(CannotPredict, match=r"aten\.lstm\.input runs cuDNN"):
        nn.LSTM(8, 8)(torch.empty(4, 2, 8))


def test_nothing_is_left_behind() -> None:
    names = ("dropout", "scaled_dot_product_attention", "rms_norm")
    clear, supported = torch.clear_autocast_cache, torch.utils._foreach_utils._get_foreach_kernels_supported_devices
    with pytest.raises(ZeroDivisionError), emulated_cuda(AMPERE):
        raise ZeroDivisionError
    for name in names:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutogradCPU")
    assert torch.clear_autocast_cache is clear
    assert torch.utils._foreach_utils._get_foreach_kernels_supported_devices is supported
    x = torch.ones(4, 8, requires_grad=True)
    F.dropout(F.rms_norm(x, (8,)), 0.5).sum().backward()
    assert x.grad is not None


# -- code that asks for the device ------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[HollowLedger]:
    """A ledger inside of an emulated A100 that answers as one."""
    ledger, card = ledger_for(AMPERE), load_profile("a100_80gb")
    with emulated_cuda(AMPERE, CudaAnswers(card, AMPERE, ledger)), ledger:
        yield ledger


def on_the_device(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda")


MADE_ON_THE_DEVICE: dict[str, Callable[[Tensor], Tensor]] = {
    "an operator": lambda x: x + 1,
    "a view": lambda x: x[0],
    "detach": lambda x: x.detach(),
    "device=x.device": lambda x: torch.zeros(3, device=x.device),
    "device by name": lambda x: torch.rand(3, device="cuda:0"),
    "device by number": lambda x: torch.arange(3, device=0),
    "imported by name": lambda x: zeros_by_name(3, device="cuda"),
    "a list": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    "numpy": lambda x: torch.from_numpy(np.ones(3)).to(x.device),
    "as_tensor of numpy": lambda x: torch.as_tensor(np.ones(3), device=x.device),
    "cuda()": lambda x: torch.zeros(3).cuda(),
    "to(tensor)": lambda x: torch.tensor(2.0).to(x),
    "like it": lambda x: torch.ones_like(x),
    "new_zeros": lambda x: x.new_zeros(3),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "a host scalar beside": lambda x: torch.tensor(2.0) * x,
    "back again": lambda x: x.cpu().to("cuda", torch.float16, non_blocking=True),
    "a module": lambda x: nn.Linear(3, 3).to(x.device).weight,
}
MADE_ON_THE_HOST: dict[str, Callable[[Tensor], Tensor]] = {
    "no device": lambda x: torch.zeros(3),
    "the CPU by name": lambda x: torch.ones(3, device="cpu"),
    "a list": lambda x: torch.tensor([1.0, 2.0]),
    "numpy": lambda x: torch.from_numpy(np.ones(3)),
    "cpu()": lambda x: x.cpu(),
    "to('cpu')": lambda x: x.to("cpu"),
    "an operator there": lambda x: torch.arange(3) + torch.zeros(3),
}


@pytest.mark.parametrize("name", MADE_ON_THE_DEVICE)
def test_tensors_of_the_device_say_so_and_count(told: HollowLedger, name: str) -> None:
    x = on_the_device(64, 64)
    made = MADE_ON_THE_DEVICE[name](x)
    assert made.is_cuda and not made.is_cpu and made.device == torch.device("cuda", 0) and made.get_device() == 0
    before, shared = told.log.in_use, made.untyped_storage()._cdata == x.untyped_storage()._cdata
    untracked = isinstance(made, nn.Parameter)
    del made
    assert shared or untracked or told.log.in_use < before


@pytest.mark.parametrize("name", MADE_ON_THE_HOST)
def test_tensors_of_the_host_say_so_and_do_not_count(told: HollowLedger, name: str) -> None:
    x = on_the_device(64, 64)
    before = told.log.in_use
    made = MADE_ON_THE_HOST[name](x)
    assert made.is_cpu and not made.is_cuda and made.device == torch.device("cpu") and made.get_device() == -1
    assert told.log.in_use == before


def test_values_survive_the_way_to_the_device_and_back(told: HollowLedger) -> None:
    assert torch.tensor([1, 2, 3], device="cuda").cpu().tolist() == [1, 2, 3]
    assert int(torch.arange(4, device="cuda").sum()) == 6


def test_gradients_go_the_way_back_of_a_copy_to_the_host(told: HollowLedger) -> None:
    x = on_the_device(64, 64).requires_grad_()
    y = x.cpu()
    assert y.is_cpu and y.requires_grad
    (y * 2).to(x.device).sum().backward()
    assert x.grad is not None and x.grad.is_cuda


def test_saved_tensors_on_the_host_are_off_the_device(told: HollowLedger) -> None:
    def kept(pin: bool | None) -> int:
        x = on_the_device(256, 256).requires_grad_()
        before = told.log.in_use
        with torch.autograd.graph.save_on_cpu(pin) if pin is not None else contextlib.nullcontext():
            y = (x * x).sin().sum()
        grown = told.log.in_use - before
        y.backward()
        assert x.grad is not None and x.grad.is_cuda
        return grown

    assert kept(None) == size(256 * 256) + 512
    assert kept(False) == kept(True) == 512  # the sum alone


def test_torch_cuda_answers_as_the_card(told: HollowLedger) -> None:
    cuda = torch.cuda
    assert cuda.is_available() and cuda.device_count() == 1 and cuda.current_device() == 0
    assert cuda.get_device_capability() == (8, 0) and "A100" in cuda.get_device_name()
    assert cuda.is_bf16_supported(including_emulation=False) and cuda.get_device_properties(0).major == 8
    x = on_the_device(1000, 1000)
    assert cuda.memory_allocated() == told.log.in_use >= x.nbytes
    assert cuda.mem_get_info()[1] == round(load_profile("a100_80gb").capacity_mib * MIB)
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side), cuda.nvtx.range("copy"):
        x.record_stream(side)
        cuda.Event(enable_timing=True).record()
    cuda.synchronize()
    with torch.random.fork_rng():
        torch.manual_seed(1)
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda and torch.tensor([1.0]).is_cuda and torch.as_tensor([1.0]).is_cuda
    with pytest.raises(CannotPredict, match=r"torch\.cuda\.memory_summary"):
        cuda.memory_summary()


def test_a_models_own_autocast_for_cuda_takes_effect(told: HollowLedger) -> None:
    linear, x = nn.Linear(8, 8).to("cuda"), on_the_device(4, 8)
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is F16
        assert linear(x).dtype is F16 and torch.softmax(linear(x), -1).dtype is F32
        with torch.autocast("cuda", enabled=False):
            assert linear(x).dtype is F32
    with torch.autocast(x.device.type, dtype=BF16):
        assert linear(x).dtype is BF16
    assert not torch.is_autocast_enabled("cuda") and linear(x).dtype is F32


def test_a_device_that_was_told_of_is_forgotten_afterwards() -> None:
    owners = (Tensor, torch, torch.cuda, torch.cuda.nvtx, torch.accelerator, torch._C)
    before = [dict(vars(owner)) for owner in owners]
    dtype = torch.get_autocast_dtype("cpu")
    ledger = ledger_for(AMPERE)
    answers = CudaAnswers(load_profile("a100_80gb"), AMPERE, ledger)
    with pytest.raises(ZeroDivisionError), emulated_cuda(AMPERE, answers), ledger:
        torch.zeros(3, device="cuda")
        raise ZeroDivisionError
    assert [dict(vars(owner)) for owner in owners] == before
    assert torch.get_autocast_dtype("cpu") is dtype and not ledger.sides
    assert torch.zeros(3).device.type == "cpu" and not torch.zeros(3).is_cuda


def predicted_for(device: str, asks: str) -> Prediction:
    tokens = {"_target_": "sweep.workload.data.RandomTokens", "vocab_size": 32, "seq_len": 64}
    model = {"_target_": "small_models.AsksForTheDevice", "asks": asks}
    workload = {"name": "asks", "model": model, "data": tokens, "global_batch_size": 64}
    card = plain(load_profile(device))
    return predict(typed({"workload": workload, "strategy": {"name": "baseline"}, "device": card, "mode": "predict"}))


def test_a_model_takes_the_branch_of_the_device_that_is_predicted_for() -> None:
    fused, plain = (predicted_for("a100_80gb", asks).peak.mib for asks in ("yes", "no"))
    assert fused < plain - 1
    for asks in ("is_cuda", "type", "available", "weight", "synchronize", "at first"):
        assert predicted_for("a100_80gb", asks).peak.mib == fused, asks
    for asks in ("is_cuda", "type", "weight", "at first"):
        assert predicted_for("cpu", asks).peak.mib == predicted_for("cpu", "no").peak.mib, asks


def test_a_model_that_needs_cuda_is_refused_on_a_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch.cuda works here")
    with pytest.raises(CannotPredict, match="the model asks for CUDA: Torch not compiled with CUDA enabled"):
        predicted_for("cpu", "synchronize")
