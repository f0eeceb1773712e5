"""How bytes get to the host and back: plainly where the device is emulated, over a side stream on CUDA."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Copier(Protocol):
    device: torch.device

    def to_host(self, flat: Tensor) -> Any:
        """Start copying a flat device tensor; the source may be dropped at once. Returns a handle."""

    def from_host(self, handle: Any) -> Tensor:
        """The flat tensor on the device again, ready for the stream that is current."""

    def finish_forward(self) -> None:
        """All copies to the host have been asked for."""

    def release(self) -> None:
        """Drop whatever is kept between steps."""


def copier_for(device: torch.device, *, pin: bool) -> Copier:
    return CudaCopier(device, pin) if device.type == "cuda" else PlainCopier(device)


def host_buffer(size: Sequence[int], dtype: torch.dtype, *, pin: bool) -> Tensor:
    """An uninitialised host tensor, page-locked if `pin`.

    Raises MemoryError where the host has no more: CUDA words a failure to lock pages like a GPU that is full.
    """
    try:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=pin)
    except RuntimeError as error:
        kind = "page-locked host memory" if pin else "host memory"
        raise MemoryError(f"no more {kind} for {tuple(size)} of {dtype}: {str(error).splitlines()[0]}") from error


class PlainCopier:
    """The emulated device of a CPU: real copies, at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, flat: Tensor) -> Tensor:
        return host_buffer(flat.shape, flat.dtype, pin=False).copy_(flat)

    def from_host(self, handle: Tensor) -> Tensor:
        return torch.empty(handle.shape, dtype=handle.dtype, device=self.device).copy_(handle)

    def finish_forward(self) -> None:
        pass

    def release(self) -> None:
        pass


class PinnedCopy:
    """A page-locked buffer in use. Goes back to its pool when the graph lets go of it."""

    def __init__(self, copier: CudaCopier, buffer: Tensor, dtype: torch.dtype, nbytes: int) -> None:
        self._copier, self.buffer, self.dtype, self.nbytes = copier, buffer, dtype, nbytes
        self.written = torch.cuda.Event()

    def view(self) -> Tensor:
        return self.buffer[: self.nbytes].view(self.dtype)

    def __del__(self) -> None:
        self._copier.give_back(self.buffer)


class CudaCopier:
    """Copies on a side stream, in order. Pinned buffers are pooled by size, since pinning costs milliseconds."""

    #: Copies out that may be under way while their sources are still held. More hide better and hold more memory.
    IN_FLIGHT = 2

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.device, self.pin = device, pin
        self._side = torch.cuda.Stream(device)
        self._pool: dict[int, list[Tensor]] = defaultdict(list)
        self._flying: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def to_host(self, flat: Tensor) -> PinnedCopy:
        # The current stream is asked for at each call: forward, backward and the caller may be on different ones.
        compute = torch.cuda.current_stream(self.device)
        nbytes = flat.numel() * flat.element_size()
        free = self._pool[nbytes]
        # Reuse is safe without waiting: the buffer's last read was on the same side stream, before this write.
        buffer = free.pop() if free else host_buffer((nbytes,), torch.uint8, pin=self.pin)
        copy = PinnedCopy(self, buffer, flat.dtype, nbytes)
        self._side.wait_stream(compute)
        with torch.cuda.stream(self._side):
            copy.view().copy_(flat, non_blocking=True)
            copy.written.record(self._side)
        self._flying.append((copy.written, flat))
        while len(self._flying) > self.IN_FLIGHT:
            self._land(compute)
        return copy

    def _land(self, compute: torch.cuda.Stream) -> None:
        # The source was allocated on the compute stream and returns to its pool here, so that stream has to wait for
        # the copy before anything can be written over it.
        written, _source = self._flying.popleft()
        compute.wait_event(written)

    def from_host(self, handle: PinnedCopy) -> Tensor:
        compute = torch.cuda.current_stream(self.device)
        source = handle.view()
        # Allocated on the compute stream, which will use and free it.
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        self._side.wait_stream(compute)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self._side)
        compute.wait_event(ready)
        return target

    def finish_forward(self) -> None:
        compute = torch.cuda.current_stream(self.device)
        while self._flying:
            self._land(compute)

    def give_back(self, buffer: Tensor) -> None:
        self._pool[buffer.numel()].append(buffer)

    def release(self) -> None:
        self.finish_forward()
        self._side.synchronize()
        self._pool.clear()
