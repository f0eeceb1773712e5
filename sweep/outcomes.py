"""Which outcome an exception is. Out of memory has many guises, and host memory running out looks like a GPU's.

Knows torch's own error by its name: a search over any app asks here, too, and need not have torch.
"""

from __future__ import annotations

from sweep.errors import BadInput, CannotPredict, DeviceOutOfMemory, NotEquivalent, NotOnDevice
from sweep.results import Outcome

_DEVICE_MESSAGES = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cuda_error_out_of_memory",
    "hip out of memory",
    "mps backend out of memory",
)
_HOST_MESSAGES = (
    "defaultcpuallocator",
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "cudahostalloc",
    "cudahostregister",
    "cachinghostallocator",
)
#: Say that page-locked host memory was asked for; out of memory together with "out of memory" only.
_PINNED_WORDS = ("pin_memory", "pin memory", "pinned")


class NotFinite(Exception):
    """The loss is no number any more."""


class TimedOut(Exception):
    """The trial took longer than measure.timeout_s."""


def is_out_of_memory(error: BaseException) -> bool:
    return outcome_of(error) in (Outcome.oom_device, Outcome.oom_host)


def outcome_of(error: BaseException) -> Outcome:
    """The outcome that an exception stands for; `failed` for those that stand for nothing else."""
    text = str(error).lower()
    if isinstance(error, DeviceOutOfMemory):
        return Outcome.oom_device
    # Before the device: failing to pin host memory is reported as a CUDA out-of-memory error, too.
    pinned = "out of memory" in text and any(m in text for m in _PINNED_WORDS)
    if isinstance(error, MemoryError) or pinned or any(m in text for m in _HOST_MESSAGES):
        return Outcome.oom_host
    if type(error).__name__ == "OutOfMemoryError" or any(m in text for m in _DEVICE_MESSAGES):
        return Outcome.oom_device
    if isinstance(error, (NotEquivalent, CannotPredict, NotOnDevice, BadInput)):
        return Outcome.invalid
    if isinstance(error, NotFinite):
        return Outcome.nan
    if isinstance(error, TimedOut):
        return Outcome.timeout
    return Outcome.failed


def one_line(error: BaseException) -> str:
    """Type and first line, such as a table has room for."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
