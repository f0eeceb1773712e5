"""Which outcome an error is: a table of messages as torch, CUDA and its libraries word them."""

from __future__ import annotations

import pytest
import torch

from sweep.errors import (
    BadInput,
    CannotPredict,
    DeviceOutOfMemory,
    NotEquivalent,
    NotFinite,
    NothingOffloaded,
    TimedOut,
    is_out_of_memory,
    one_line,
    outcome_of,
)
from sweep.results import Outcome

AcceleratorError = getattr(torch, "AcceleratorError", RuntimeError)


def accelerator(message: str) -> BaseException:
    """torch.AcceleratorError is made by C++ only, from a message and an error code."""
    try:
        return AcceleratorError(message)
    except TypeError:
        return RuntimeError(message)


ASYNC = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
DEVICE: list[BaseException] = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.76 GiB of which 1.12 GiB is "
        "free. Including non-PyTorch memory, this process has 10.63 GiB memory in use. Of the allocated memory "
        "9.79 GiB is allocated by PyTorch, and 520.13 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    ),
    torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory. (out of memory)"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: out of memory" + ASYNC),
    accelerator("CUDA error: out of memory" + ASYNC),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory; CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("HIP out of memory. Tried to allocate 1.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 18.11 GB)"),
    DeviceOutOfMemory("out of memory on the emulated device: tried to allocate 4.00 MiB in aten.mm of forward"),
]
HOST: list[BaseException] = [
    MemoryError(),
    MemoryError("no more page-locked host memory for (5,) of torch.uint8: CUDA error: out of memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("CUDA error: out of memory in cudaHostAlloc" + ASYNC),
    RuntimeError("cudaHostRegister failed: out of memory"),
    RuntimeError("Caught RuntimeError in pin memory thread for device 0.\nRuntimeError: CUDA error: out of memory"),
    RuntimeError("CachingHostAllocator: out of memory"),
    torch.OutOfMemoryError("CUDA error: out of memory while allocating pinned memory"),
    RuntimeError("std::bad_alloc"),
]
OTHERS: list[tuple[BaseException, Outcome]] = [
    (NotFinite("the loss is nan by step 3"), Outcome.nan),
    (TimedOut("measure.timeout_s=1: not done"), Outcome.timeout),
    (NotEquivalent("gradients differ by 0.3"), Outcome.invalid),
    (CannotPredict("data-dependent shape"), Outcome.invalid),
    (BadInput("strategy.offload.pin_memory", "x", "is wrong", "do"), Outcome.invalid),
    (NothingOffloaded("not one byte was moved"), Outcome.failed),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Outcome.failed),
    (RuntimeError("CUDA error: an illegal memory access was encountered" + ASYNC), Outcome.failed),
    (RuntimeError("CUDA error: device-side assert triggered"), Outcome.failed),
    (TypeError("empty() got an unexpected keyword argument 'pin_memory'"), Outcome.failed),
    (RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"), Outcome.failed),
    (RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"), Outcome.failed),
    (KeyError("memory"), Outcome.failed),
    (ZeroDivisionError(), Outcome.failed),
]


@pytest.mark.parametrize("error", DEVICE, ids=lambda e: str(e)[:40])
def test_device_memory(error: BaseException) -> None:
    assert outcome_of(error) is Outcome.oom_device
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", HOST, ids=lambda e: str(e)[:40])
def test_host_memory_although_it_looks_like_the_devices(error: BaseException) -> None:
    assert outcome_of(error) is Outcome.oom_host
    assert is_out_of_memory(error)


@pytest.mark.parametrize(("error", "outcome"), OTHERS, ids=lambda e: str(e)[:40])
def test_all_else(error: BaseException, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome
    assert not is_out_of_memory(error)


def test_a_real_host_allocation_that_cannot_be() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert outcome_of(caught.value) is Outcome.oom_host


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("first\nsecond"), "ValueError: first"),
    (ValueError("\n\n  first  \nsecond"), "ValueError: first"),
    (MemoryError(), "MemoryError"),
    (KeyError("name"), "KeyError: 'name'"),
])  # fmt: skip
def test_one_line(error: BaseException, line: str) -> None:
    assert one_line(error).strip() == line
    assert "\n" not in one_line(error)
