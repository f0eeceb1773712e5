"""torch's `save_on_cpu`, with its bytes counted: offload as people know it, to compare with.

Moves every saved tensor, weights included, and hands back contiguous copies. The same copies as
torch.autograd.graph.save_on_cpu makes, written out so that they are counted and work on an emulated device too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sweep.memory.ledger import host_memory
from sweep.results import Phase
from sweep.step import FROM_HOST, TO_HOST, Phases
from sweep.strategy.copier import host_buffer
from sweep.strategy.offload import Moved


class SaveOnCpu:
    def __init__(self, phases: Phases, device: torch.device, pin_memory: bool) -> None:
        self.moved = Moved()
        self._phases, self._device = phases, device
        self._pin = pin_memory and device.type == "cuda"

    @contextmanager
    def installed(self) -> Iterator[None]:
        yield

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        with torch.no_grad(), self._phases(Phase.transfer, TO_HOST), host_memory():
            host = host_buffer(tensor.size(), tensor.dtype, pin=self._pin)
            host.copy_(tensor.detach())
        self.moved.to_host_bytes += host.numel() * host.element_size()
        return host

    def _unpack(self, host: Tensor) -> Tensor:
        with torch.no_grad(), self._phases(Phase.transfer, FROM_HOST):
            self.moved.from_host_bytes += host.numel() * host.element_size()
            return host.to(self._device, non_blocking=self._pin, copy=True)
