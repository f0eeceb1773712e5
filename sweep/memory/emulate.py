"""CUDA's memory behaviour on CPU tensors, where the CPU's differs.

Each emulation is one named thing with its source, and none is fitted to measurements. They hold only inside of
`emulated_cuda(...)`, for all threads, so nothing real may run on the CPU at the same time:

- attention (`emulate_attention`): the backend that CUDA would choose, and what it saves and allocates
- autocast (`emulate_autocast`): CUDA's operator lists, and its cache of weights in lower precision
- dropout: CUDA's fused kernel saves a mask of one byte per element, where the CPU saves a scaled mask of the input's
  type (Dropout.cpp, is_fused_kernel_acceptable)
- rms_norm: one kernel that saves the reciprocal root mean squares (layer_norm.cpp, rms_norm_symint); the CPU computes
  it from several operators, each with a result
- optimizers and gradient clipping: foreach by default, as on CUDA (torch/utils/_foreach_utils.py)
- scalars made from Python's numbers, such as an optimizer's step counters, live on the host
- cuBLAS: one workspace per thread that multiplies matrices, forward's and autograd's (CublasHandlePool.cpp)
- kernels that take memory inside of one operator (`emulate_kernels`)
- answers to code that asks for the device, and which tensors are on it (`emulate_device`)

Not emulated, since it is not documented or depends on the library's own choice at run time: what is listed as UNCOUNTED
in `emulate_kernels` and said of each prediction in which it ran, and the partial sums of large reductions (at most a
few MiB).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils._foreach_utils
from torch import Tensor

from sweep.errors import CannotPredict
from sweep.memory.emulate_attention import WORKSPACES as ATTENTION_WORKSPACES
from sweep.memory.emulate_attention import CudaAttention, flash_forward_workspace
from sweep.memory.emulate_autocast import CudaAutocast
from sweep.memory.emulate_device import CudaAnswers
from sweep.memory.emulate_kernels import GEMM, REFUSED
from sweep.memory.emulate_kernels import WORKSPACES as KERNEL_WORKSPACES
from sweep.memory.ledger import Ledger

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default

NAMES = (
    CudaAttention.name,
    CudaAutocast.name,
    "dropout: a mask of bytes",
    "rms_norm: one kernel",
    "optimizer: foreach by default",
    "scalars from Python on the host",
    "cuBLAS: a workspace per thread",
    "kernels: memory inside of an operator",
    "code that asks for the device",
)


class CublasWorkspaces:
    """Allocates the workspace when a thread first multiplies matrices; it then stays. To be given to a ledger.

    nbytes: per cuBLAS handle and stream (sweep.memory.device.cublas_workspace_mib).
    kept: False: it is taken for each product and given back (cublas_workspace_kept).
    """

    def __init__(self, nbytes: int, kept: bool = True) -> None:
        self.nbytes, self.kept = nbytes, kept
        self.ledger: Ledger | None = None
        self._threads: set[str] = set()

    def reserve(self) -> None:
        """To be called for each product of matrices."""
        ledger = self.ledger
        if ledger is not None and len(self._threads) < 2:
            # On CUDA, backward runs on a thread of autograd's own, recomputation included.
            thread = "autograd" if ledger.in_backward else "main"
            if thread not in self._threads:
                self._threads.add(thread)
                ledger.allocate(self.nbytes, f"cuBLAS workspace ({thread} thread)", module="")

    def before(self, sizes: Callable[..., Iterable[int]]) -> Callable[..., Iterable[int]]:
        def with_workspace(args: Any, kwargs: Any, out: Any) -> Iterable[int]:
            if not self.kept:
                return [*sizes(args, kwargs, out), self.nbytes]
            self.reserve()
            return sizes(args, kwargs, out)

        return with_workspace


def cuda_workspaces(
    cublas: CublasWorkspaces, multiprocessors: int | None = None
) -> Mapping[Any, Callable[..., Iterable[int]]]:
    """What the ledger of an emulated CUDA device needs as `workspaces`.

    multiprocessors: the card's, by which flash attention splits keys; None: not known, it never does.
    """
    products = {op: cublas.before(sizes) for op, sizes in GEMM.items()}
    split = {} if multiprocessors is None else {FLASH: flash_forward_workspace(multiprocessors)}
    return {**KERNEL_WORKSPACES, **ATTENTION_WORKSPACES, **split, **products}


@contextmanager
def emulated_cuda(capability: tuple[int, int], answers: CudaAnswers | None = None) -> Iterator[None]:
    """CPU operators behave as CUDA's do for memory, inside. With `answers`, who asks for the device is told of CUDA."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            library.impl("scaled_dot_product_attention", CudaAttention(capability), "AutogradCPU", allow_override=True)
            library.impl("dropout", _dropout, "AutogradCPU", allow_override=True)
            library.impl("rms_norm", _rms_norm, "AutogradCPU", allow_override=True)
            # With a kernel of its own it is one operator with its own backward, as on CUDA; it is never run.
            library.impl("_fused_rms_norm", _never, "CPU")
            for name, why in REFUSED.items():
                library.impl(name, _refusal(name, why), "AutogradCPU", allow_override=True)
            stack.enter_context(CudaAutocast().installed(library))
            stack.enter_context(_foreach_by_default())
            if answers is not None:
                stack.enter_context(answers.installed())
            yield
    finally:
        library._destroy()


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    if p < 1:
        return aten.native_dropout(input, p, train)[0]
    return input * torch.zeros((), dtype=input.dtype)


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    fused = not input.is_complex() and (weight is None or weight.dtype is input.dtype)
    if fused and not (input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)):
        return aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
    scale = torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + (eps or 0.0))
    normed = (input.float() * scale).type_as(input)
    return normed if weight is None else normed * weight


def _refusal(name: str, why: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CannotPredict(f"aten.{name} runs {why} on CUDA, whose memory is not known")

    return refuse


def _never(*_: Any) -> Any:
    raise NotImplementedError("there is no such kernel on the CPU")


@contextmanager
def _foreach_by_default() -> Iterator[None]:
    utils: Any = sys.modules["torch.utils._foreach_utils"]
    original = utils._get_foreach_kernels_supported_devices
    changed = lambda: [*original(), "cpu"]
    modules = [
        m for n, m in list(sys.modules.items()) if n.startswith(("torch.optim", "torch.nn.utils", "torch.utils"))
    ]
    holders: list[Any] = [m for m in modules if getattr(m, "_get_foreach_kernels_supported_devices", None) is original]
    for holder in holders:
        holder._get_foreach_kernels_supported_devices = changed
    try:
        yield
    finally:
        for holder in holders:
            holder._get_foreach_kernels_supported_devices = original
