"""The errors that a person can act on. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

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
