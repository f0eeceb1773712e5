"""The errors that a person can act on, and which outcome an exception is. Everything else keeps its traceback."""

from __future__ import annotations

from sweep.results import Outcome

#: Exit codes of every command; the last two, interrupted and terminated, are the shell's own.
EXIT_OK, EXIT_BAD_INPUT, EXIT_NOTHING_FEASIBLE, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 2, 3, 130, 143


class SweepError(Exception):
    """Base of all errors of this package."""

    reason = ""  # code of sweep.decide.reasons or of a cause, where the error says more than its outcome


class BadInput(SweepError):
    """A value that cannot be used. Printed as one line `key.path=value: what is wrong; what to do`, exit code 2."""

    def __init__(self, key: str, value: object, wrong: str, todo: str) -> None:
        self.key, self.value, self.wrong, self.todo = key, value, wrong, todo
        shown = "null" if value is None else str(value)
        super().__init__(f"{key}={shown}: {wrong}; {todo}")

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, object, str, str]]:
        # The default would call __init__ with the one formatted argument when an error crosses a process border.
        return type(self), (self.key, self.value, self.wrong, self.todo)


class DoesNotFit(BadInput):
    """A strategy that the model's blocks do not allow: of several trials, the other ones still run."""


class DeviceOutOfMemory(SweepError):
    """The emulated device (`device.capacity_mib` on a CPU) is full. Stands for torch.OutOfMemoryError there."""


class NotEquivalent(SweepError):
    """A strategy does not compute what the baseline computes. `reason`: see results.Verification.cause."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class CannotPredict(SweepError):
    """The peak cannot be predicted (data-dependent shapes, custom kernels, compiled graphs). Names the cause."""


class NoEffect(SweepError):
    """A strategy did nothing: an error, since it would otherwise look like a result. `reason`: its reason code."""


class NothingOffloaded(NoEffect):
    """Offload was asked for and moved no byte."""

    reason = "nothing_offloaded"


class NothingRecomputed(NoEffect):
    """Checkpointing was asked for and no block was computed again."""

    reason = "nothing_recomputed"


class NotOnDevice(SweepError):
    """The device cannot do what the workload asks for. Ends with what to do, as BadInput does."""

    reason = "bad_setting"


# -- outcomes -------------------------------------------------------------------------------------------------------
# Out of memory has many guises, and host memory running out looks like a GPU's. torch's own error is known by its name:
# a search over any app asks here, too, and need not have torch.

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
