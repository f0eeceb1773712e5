"""Moving it elsewhere: what autograd saves in forward goes to host memory and comes back in backward.

Built on saved-tensor hooks around the whole forward, outside of any checkpointing. What differs from torch's own
`save_on_cpu`, and why:

- Parameters and buffers never leave, tied ones and views of them included. A Linear's weight reaches the hook as a
  plain view, so they are known by their storage, not by their type.
- A saved tensor is moved as a range of its storage. Strides, offsets and aliases come back exactly, expanded tensors
  are not materialised, and views of one storage are moved once.
- Saved-tensor hooks switch off autograd's own check for tensors that were changed in place after they were saved, so it
  is done here, for those that stay as well.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sweep.config.schema import OffloadConf, Placement
from sweep.errors import BadInput
from sweep.memory.ledger import host_memory
from sweep.results import Phase
from sweep.strategy.checkpointing import Forward, patched_forward
from sweep.strategy.state import without_tensors
from sweep.workload import Block, compiled_module
from sweep.workload.step import FROM_HOST, TO_HOST, Phases


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


@dataclass
class Moved:
    """Bytes that went each way."""

    to_host_bytes: int = 0
    from_host_bytes: int = 0

    def reset(self) -> None:
        self.to_host_bytes = self.from_host_bytes = 0


def check(conf: OffloadConf, blocks: list[Block]) -> None:
    """Raise BadInput where the config does not fit the model's blocks."""
    if conf.placement is Placement.none:
        return
    count = len(blocks)
    if not blocks and (conf.placement is not Placement.all or conf.keep_last):
        raise BadInput(
            "strategy.offload.placement",
            conf.placement.name,
            "the model has no repeated blocks",
            "name them with workload.blocks, or use placement=all with keep_last=0",
        )
    if conf.keep_last and conf.keep_last >= count and count != 1:  # a single block runs several times
        raise BadInput(
            "strategy.offload.keep_last",
            conf.keep_last,
            f"keeps every one of the {count} blocks on the device",
            f"give 0 to {count - 1}",
        )
    if conf.placement is Placement.blocks and not chosen_blocks(conf, count) and count != 1:
        raise BadInput(
            "strategy.offload.blocks",
            conf.blocks,
            f"leaves nothing to offload with keep_last={conf.keep_last}",
            "choose earlier blocks or lower keep_last",
        )


def chosen_blocks(conf: OffloadConf, count: int) -> set[int]:
    """Indices of the blocks that may be offloaded: "first:N", "every:K" or "0,3,5", less the last `keep_last`."""
    return {i for i in _picked(conf, count) if i < count - conf.keep_last}


def _picked(conf: OffloadConf, count: int) -> set[int]:
    if conf.placement is not Placement.blocks:
        return set(range(count))
    spec = str(conf.blocks).strip()
    try:
        if spec.startswith("first:"):
            picked = set(range(_natural(spec[6:])))
        elif spec.startswith("every:"):
            picked = set(range(0, count, _natural(spec[6:])))
        else:
            picked = {int(part) for part in spec.strip("[]").split(",")}
    except ValueError:
        raise BadInput(
            "strategy.offload.blocks", spec, "is no choice of blocks", "give first:N, every:K or 0,3,5"
        ) from None
    if max(picked) >= count or min(picked) < 0:
        raise BadInput("strategy.offload.blocks", spec, f"the model has blocks 0 to {count - 1}", "choose among these")
    return picked


def _natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _as_it_is(hook: Any) -> Any:
    return hook


class Offload:
    """The hooks of one trial. `around_forward` is entered around model and loss; `moved` counts the bytes."""

    def __init__(
        self, conf: OffloadConf, stays: list[nn.Module], blocks: list[Block], phases: Phases, device: torch.device
    ) -> None:
        check(conf, blocks)
        self.conf, self.stays, self.phases = conf, stays, phases
        self.moved = Moved()
        self._blocks = blocks
        self._chosen = _picked(conf, len(blocks)) if blocks else set()
        self._first_kept = len(blocks) - conf.keep_last
        self.called: set[int] = set()  # indices of the blocks that have run with gradients
        self._calls = self._calls_before = 0  # of blocks, in this forward and in the last one that came to its end
        self._copier: Copier = copier_for(device, pin=conf.pin_memory)
        self._resident: set[int] = set()  # storages of parameters and buffers
        self._inside: list[int] = []  # indices of the blocks that are running
        self._block_inputs: set[int] = set()  # storages of the running block's arguments
        self._tail = False  # the kept blocks have begun for the last time: what follows is needed at once
        self._packed: dict[int, weakref.WeakSet[HostCopy]] = {}  # live storage -> its copies, which graphs own
        # The compiler would look into the hooks and take what they keep for constants. torch.compiler is asked for only
        # where it is used: it takes two seconds to load.
        self._hide: Callable[[Any], Any] = (
            torch.compiler.disable if any(compiled_module(m) is not None for m in stays) else _as_it_is
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Blocks tell where forward is, inside. Leaves nothing behind, also after an error."""
        with ExitStack() as stack:
            for index, block in enumerate(self._blocks):
                stack.enter_context(patched_forward(block.module, self._within(index)))
            try:
                yield
            finally:
                self._packed.clear()
                self._copier.release()

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        tensors = [t for module in self.stays for t in (*module.parameters(), *module.buffers())]
        self._resident = {t.untyped_storage()._cdata for t in tensors}
        self._tail, self._calls = False, 0
        self._inside.clear()  # an error in an earlier forward may have left entries
        with torch.autograd.graph.saved_tensors_hooks(self._hide(self._pack), self._hide(self._unpack)):
            yield
        self._calls_before = self._calls
        with self.phases(Phase.transfer, TO_HOST):  # what is waited for here is a transfer's time, not the forward's
            self._copier.finish_forward()

    def _within(self, index: int) -> Callable[[Forward], Forward]:
        def wrap(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled():
                    return forward(*args, **kwargs)
                self._begins(index)
                self._inside.append(index)
                if self.conf.placement is Placement.inputs:
                    given = without_tensors((args, kwargs))[1]
                    self._block_inputs = {t.untyped_storage()._cdata for t in given if t.layout is torch.strided}
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._inside.pop()

            return run

        return wrap

    def _begins(self, index: int) -> None:
        """Note a block's call, and whether it belongs to the tail: the last `keep_last` calls.

        Which are the last is known from the forward before; in the first one by the blocks' order, and anew whenever
        the blocks in front run again.
        """
        before, number = self._calls_before, self._calls
        self.called.add(index)
        self._calls += 1
        if not self.conf.keep_last:
            return
        if before:
            self._tail = before - self.conf.keep_last <= number < before
        else:
            self._tail = index >= self._first_kept

    def _leaves(self, tensor: Tensor) -> bool:
        """Whether a tensor that is being saved goes to the host."""
        if tensor.layout is not torch.strided or tensor.numel() == 0 or self._tail:
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False  # its storage holds other values than it shows, and other views would get a copy of these
        storage = tensor.untyped_storage()._cdata
        if storage in self._resident or held_bytes(tensor) < self.conf.min_tensor_kib * 1024:
            return False
        if tensor.device.type != self._copier.device.type:
            return False  # a host tensor (a scalar, an index) that the graph needs: it is there already
        if self.conf.placement is Placement.all:
            return True
        if not self._inside or self._inside[-1] not in self._chosen:
            return False
        return self.conf.placement is Placement.blocks or storage in self._block_inputs

    def _pack(self, tensor: Tensor) -> Kept | View:
        if not self._leaves(tensor):
            return Kept(tensor)
        with torch.no_grad(), self.phases(Phase.transfer, TO_HOST):
            copy = self._copy_of(tensor)
            copy.awaited += 1
            return View.of(tensor, copy)

    def _unpack(self, packed: Kept | View) -> Tensor:
        if isinstance(packed, Kept):
            return packed.get()
        with torch.no_grad(), self.phases(Phase.transfer, FROM_HOST):
            return packed.restore(self)

    def _copy_of(self, tensor: Tensor) -> HostCopy:
        """The host copy that holds `tensor`: one that is there already, or a new one of its storage or its span."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        start, stop = span_bytes(tensor)
        copies = self._packed.get(key)
        if copies is None:
            copies = self._packed[key] = weakref.WeakSet()
            # Addresses recur once a storage is gone: forget the key with the storage, or another would get its copy.
            weakref.finalize(storage, self._packed.pop, key, None).atexit = False
        itemsize, whole, others = tensor.element_size(), storage.nbytes(), False
        for copy in copies:
            # Views of another dtype may begin between this one's elements, counted from the copy's start.
            fits = copy.start <= start and stop <= copy.stop and not (start - copy.start) % itemsize
            if fits and not (copy.stop - copy.start) % itemsize:
                if copy.is_of(tensor):
                    return copy
                others = True
        if held_bytes(tensor) * 4 >= whole and whole % itemsize == 0 and not others:
            start, stop = 0, whole  # most of the storage: other views of it will find it here
        flat = torch.as_strided(tensor.detach(), ((stop - start) // itemsize,), (1,), start // itemsize)
        with host_memory():
            host = self._copier.to_host(flat)
        copy = HostCopy(host, start, stop, watcher_of(tensor))
        copies.add(copy)
        self.moved.to_host_bytes += stop - start
        return copy

    def reload(self, copy: HostCopy) -> Tensor:
        """The copy on the device again, as a flat tensor; aliases that are still awaited share it."""
        copy.awaited -= 1
        flat = copy.reloaded
        if flat is None:
            flat = self._copier.from_host(copy.host)
            self.moved.from_host_bytes += copy.stop - copy.start
        copy.reloaded = flat if copy.awaited > 0 else None
        return flat


class HostCopy:
    """Bytes [start, stop) of a storage, on the host. Lives as long as a graph refers to it."""

    __slots__ = ("__weakref__", "_version", "_watcher", "awaited", "host", "reloaded", "start", "stop")

    def __init__(self, host: Any, start: int, stop: int, watcher: Tensor) -> None:
        self.host, self.start, self.stop = host, start, stop
        self._watcher, self._version = watcher, watcher._version
        self.awaited = 0  # saved tensors that have not come back yet
        self.reloaded: Tensor | None = None

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor of the same storage is as it was when it was copied.

        Versions are compared only where they are counted together. Some operators (`unsafe_chunk`, `_unsafe_view`,
        `.data`) give tensors that share memory but not the counter, and a change of one is not seen in another.
        """
        version, set_version = tensor._version, torch._C._autograd._unsafe_set_version_counter
        if version != self._version or self._watcher._version != version:
            return False
        set_version((tensor,), (version + 1,))
        together = self._watcher._version != version
        set_version((tensor,), (version,))
        return together


def watcher_of(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter but not the storage, which may go."""
    watcher = tensor.detach()
    watcher.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return watcher


class _Versioned:
    """Notices a change in place after saving, as autograd does where there are no hooks."""

    def _watch(self, tensor: Tensor) -> None:
        self._version = tensor._version

    def _check(self, now: int) -> None:
        if now != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"it is at version {now}, expected version {self._version}"
            )


class Kept(_Versioned):
    """A saved tensor that stays on the device."""

    def __init__(self, tensor: Tensor) -> None:
        # detach(): a graph that held its own output would never be freed.
        self._tensor = tensor.detach()
        self._watch(tensor)

    def get(self) -> Tensor:
        self._check(self._tensor._version)
        return self._tensor


class View(_Versioned):
    """A saved tensor as a view of a host copy."""

    def __init__(self, copy: HostCopy, watcher: Tensor, size: Any, stride: Any, offset_bytes: int, dtype: Any) -> None:
        self.copy, self._watcher = copy, watcher
        self.size, self.stride, self.offset_bytes, self.dtype = size, stride, offset_bytes, dtype

    @classmethod
    def of(cls, tensor: Tensor, copy: HostCopy) -> View:
        offset = int(tensor.storage_offset()) * tensor.element_size() - copy.start
        view = cls(copy, watcher_of(tensor), tensor.size(), tensor.stride(), offset, tensor.dtype)
        view._watch(tensor)
        return view

    def restore(self, offload: Offload) -> Tensor:
        self._check(self._watcher._version)
        flat = offload.reload(self.copy)
        if flat.dtype is not self.dtype:
            flat = flat.view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset_bytes // flat.element_size())


def held_bytes(tensor: Tensor) -> int:
    """Bytes of different elements: those of an expanded tensor count once."""
    start, stop = span_bytes(tensor)
    return min(tensor.numel() * tensor.element_size(), stop - start)


def span_bytes(tensor: Tensor) -> tuple[int, int]:
    """First and last-plus-one byte of the tensor within its storage. `tensor` has at least one element."""
    first = int(tensor.storage_offset())
    last = first + int(sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True)))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


# -- how bytes get to the host and back: plainly where the device is emulated, over a side stream on CUDA ------------

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
