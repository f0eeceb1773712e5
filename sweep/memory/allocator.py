"""A replay of PyTorch's CUDA caching allocator: from malloc and free events to what torch.cuda would report.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of PyTorch 2.1 to 2.13, which
did not change in what concerns sizes:

- A request is rounded up to 512 B. Up to 1 MiB it is served by the small pool, above by the large one; each stream has
  its own two.
- A pool gives its smallest free block that is large enough, at equal size the one with the lowest address, and cuts it
  if the rest is worth keeping: 512 B or more in the small pool, more than 1 MiB in the large one. A rest that is not
  cut off is part of the block, and torch counts the whole block as allocated.
- Without such a block the pool takes a new segment with cudaMalloc: 2 MiB for the small pool; for the large one 20 MiB
  for requests below 10 MiB, else the request rounded up to 2 MiB.
- If that fails, every segment that is wholly free goes back to the driver and cudaMalloc is tried once more.
- A freed block merges with its free neighbours in the same segment.

Assumption: cudaMalloc hands out rising addresses and does not reuse those of segments that went back. Addresses decide
only between free blocks of equal size, so another order moves the reserved peak by a few segments at most. CUDA
promises no order.

Not replayed, all of them off by default: CUDA graphs' private pools, garbage_collection_threshold,
roundup_power2_divisions, user memory pools. `Tensor.record_stream` delays a free by the time of another stream; here a
free takes effect where it stands in the events.

All sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from sweep.errors import BadInput

MIB = 2**20
MIN_BLOCK = 512  # kMinBlockSize: everything is a multiple of it
SMALL_SIZE = 1 * MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: from here on a segment of its own size
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer: segment of the large pool's smaller requests
ROUND_LARGE = 2 * MIB  # kRoundLarge
#: An unsplittable block may be larger than the request by less than this (max_non_split_rounding_size).
MAX_NON_SPLIT_ROUNDING = LARGE_SEGMENT


def round_size(nbytes: int) -> int:
    """What a request of `nbytes` takes at least."""
    return max(MIN_BLOCK, (nbytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK)


def segment_size(size: int) -> int:
    """The cudaMalloc that a request of `size` bytes (rounded) leads to when no free block is large enough."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOC:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


@dataclass(frozen=True)
class AllocatorOptions:
    """The part of PYTORCH_CUDA_ALLOC_CONF that changes where blocks go."""

    max_split_size: int | None = None  # bytes; blocks from this size on are never cut
    expandable_segments: bool = False

    @classmethod
    def parse(cls, text: str, key: str = "PYTORCH_CUDA_ALLOC_CONF") -> AllocatorOptions:
        """Read PYTORCH_CUDA_ALLOC_CONF's own syntax, such as "expandable_segments:True,max_split_size_mb:128".

        `key` names the setting in the BadInput that an option without a replay raises.
        """
        split: int | None = None
        expandable = False
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = (p.strip() for p in part.partition(":"))
            if name == "max_split_size_mb" and value.isdigit():
                split = int(value) * MIB
                if split <= LARGE_SEGMENT:
                    raise BadInput(
                        key, text, "max_split_size_mb is too small", f"give more than {LARGE_SEGMENT // MIB}"
                    )
            elif name == "expandable_segments" and value.lower() in ("true", "false"):
                expandable = value.lower() == "true"
            else:
                raise BadInput(
                    key,
                    text,
                    f"{part} cannot be replayed",
                    "use max_split_size_mb:N and expandable_segments:True|False",
                )
        return cls(split, expandable)


DEFAULT_OPTIONS = AllocatorOptions()


@dataclass(frozen=True)
class OutOfMemory:
    """The first request that found no memory."""

    request: int  # its number, counted from 0 over all mallocs
    id: Hashable
    nbytes: int
    segment_bytes: int  # what cudaMalloc was asked for
    allocated: int
    reserved: int  # after the wholly free segments went back
    largest_free: int  # the largest free block of the request's pool: fragmentation, if it is near the request


class Block:
    """A piece of a segment: in use, free, or (expandable segments only) not backed by memory."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "prev", "requested", "segment", "size")

    def __init__(self, address: int, size: int, pool: Pool, segment: Segment) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.requested = 0
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.mapped = True


class Pool:
    """The free blocks of one stream and one size class, sorted by size, then address."""

    __slots__ = ("free", "small", "stream", "unmapped")

    def __init__(self, stream: int, small: bool) -> None:
        self.stream, self.small = stream, small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address; expandable segments only

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class Segment:
    """One cudaMalloc, or one reserved range of addresses. `first` stays the same object through splits and merges."""

    __slots__ = ("address", "expandable", "first", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool, expandable: bool = False) -> None:
        self.address, self.size, self.pool, self.expandable = address, size, pool, expandable
        self.first = Block(address, size, pool, self)


class CachingAllocator:
    """Replays events one at a time. `make_allocator` chooses between this class and the one for expandable segments.

    `capacity` is what the allocator may reserve: the card less what driver, context and other processes take, or
    set_per_process_memory_fraction's share of the card, whichever is less. None: unlimited.
    """

    expandable = False

    def __init__(self, capacity: int | None = None, options: AllocatorOptions = DEFAULT_OPTIONS) -> None:
        self.capacity, self.options = capacity, options
        self.allocated = self.allocated_peak = 0  # whole blocks, as torch counts
        self.requested = self.requested_peak = 0  # what was asked for, before rounding
        self.reserved = self.reserved_peak = 0
        self.requests = 0
        self.segments_made = 0  # successful cudaMallocs
        self.retries = 0  # torch's num_alloc_retries: cudaMallocs tried again after the cache was given back
        self.oom: OutOfMemory | None = None
        self._allocated_at_reserved_peak = 0
        self._split_limit = options.max_split_size if options.max_split_size is not None else 1 << 62
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._live: dict[Hashable, Block | None] = {}
        self._segments: dict[int, Segment] = {}  # by address
        self._next_address = 1 << 40

    # -- events --

    def malloc(self, id: Hashable, nbytes: int, stream: int = 0) -> bool:
        """Serve one request. False when out of memory: `oom` says where; the state is that after the failed retry."""
        live = self._live
        if id in live:
            raise ValueError(f"malloc({id!r}): is already allocated")
        self.requests += 1
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"malloc({id!r}, {nbytes}): negative size")
            live[id] = None  # torch gives a null pointer and counts nothing
            return True
        size = (nbytes + 511) & -512
        small = size <= SMALL_SIZE
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(stream, small)
        block = self._take_free(pool, size)
        if block is None:
            block = self._grow(pool, size)
            if block is None:
                self._note_oom(id, nbytes, size, pool)
                return False
        rest = block.size - size
        if rest >= MIN_BLOCK if small or self.expandable else rest > SMALL_SIZE and size < self._split_limit:
            remainder = Block(block.address + size, rest, pool, block.segment)
            remainder.prev, remainder.next = block, block.next
            if block.next is not None:
                block.next.prev = remainder
            block.next, block.size = remainder, size
            insort(pool.free, (rest, remainder.address, remainder))
        block.allocated, block.requested = True, nbytes
        live[id] = block
        self.requested += nbytes
        self.requested_peak = max(self.requested_peak, self.requested)
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        if self.reserved == self.reserved_peak and self.allocated > self._allocated_at_reserved_peak:
            self._allocated_at_reserved_peak = self.allocated
        return True

    def free(self, id: Hashable) -> None:
        """Give one allocation back to its pool."""
        block = self._live.pop(id)
        if block is None:
            return
        self.allocated -= block.size
        self.requested -= block.requested
        block.allocated, block.requested = False, 0
        pool = block.pool
        free = pool.free
        before, after = block.prev, block.next
        if after is not None and not after.allocated and after.mapped:
            del free[bisect_left(free, (after.size, after.address))]
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.prev = block
        if before is not None and not before.allocated and before.mapped:
            del free[bisect_left(free, (before.size, before.address))]
            before.size += block.size
            before.next = block.next
            if block.next is not None:
                block.next.prev = before
            block = before
        insort(free, (block.size, block.address, block))

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache: every wholly free segment goes back to the driver."""
        for pool in self._pools.values():
            self._release_pool(pool)

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats: the peaks start again from what is held now."""
        self.allocated_peak, self.requested_peak, self.reserved_peak = self.allocated, self.requested, self.reserved
        self._allocated_at_reserved_peak = self.allocated

    # -- results --

    @property
    def fragmentation(self) -> int:
        """Reserved peak less the most that was allocated while so much was reserved."""
        return self.reserved_peak - self._allocated_at_reserved_peak

    @property
    def live_ids(self) -> list[Hashable]:
        return list(self._live)

    def block_bytes(self, id: Hashable) -> int:
        """What the allocation `id` counts for in `allocated`."""
        block = self._live[id]
        return 0 if block is None else block.size

    def snapshot(self) -> list[dict[str, Any]]:
        """All segments and blocks in address order, in the form of torch.cuda.memory_snapshot() (its viewers read it).

        Each block in use carries the `id` of its request beside torch's own keys.
        """
        names = {block.address: id for id, block in self._live.items() if block is not None}
        return [self._describe(segment, names) for _, segment in sorted(self._segments.items())]

    def _describe(self, segment: Segment, names: dict[int, Hashable]) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        block: Block | None = segment.first
        while block is not None:
            if block.mapped:
                shown = {"address": block.address, "size": block.size, "requested_size": block.requested, "frames": []}
                shown["state"] = "active_allocated" if block.allocated else "inactive"
                if block.allocated:
                    shown["id"] = names[block.address]
                blocks.append(shown)
            block = block.next
        in_use = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
        return {
            "device": 0,
            "address": segment.address,
            "total_size": sum(b["size"] for b in blocks),
            "allocated_size": in_use,
            "active_size": in_use,
            "requested_size": sum(b["requested_size"] for b in blocks),
            "stream": segment.pool.stream,
            "segment_type": "small" if segment.pool.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": segment.expandable,
            "frames": [],
            "blocks": blocks,
        }

    # -- how memory is found --

    def _take_free(self, pool: Pool, size: int) -> Block | None:
        """get_free_block: best fit, unless one of the two is too large to be cut."""
        free = pool.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        found = free[at][0]
        if size < self._split_limit:
            if found >= self._split_limit:
                return None
        elif found >= size + MAX_NON_SPLIT_ROUNDING:
            return None
        return free.pop(at)[2]

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """cudaMalloc, and what is tried when it fails, in torch's order."""
        block = self._new_block(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, size)
        return block

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        asked = segment_size(size)
        if self.capacity is not None and self.reserved + asked > self.capacity:
            return None
        segment = Segment(self._next_address, asked, pool)
        self._next_address += asked
        self._segments[segment.address] = segment
        self.segments_made += 1
        self._reserve(asked)
        return segment.first

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        if self.reserved > self.reserved_peak:
            self.reserved_peak = self.reserved
            self._allocated_at_reserved_peak = 0  # the request that is being served sets it

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """release_available_cached_blocks: with max_split_size, just enough large blocks, the largest first."""
        limit = self.options.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        at = bisect_left(pool.free, (wanted,))
        if at < len(pool.free):
            self._release(pool.free[at][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= limit:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _release(self, block: Block) -> None:
        """cudaFree of a segment that consists of this one free block."""
        block.pool.remove(block)
        del self._segments[block.segment.address]
        self.reserved -= block.size

    def _release_pool(self, pool: Pool) -> None:
        for _, _, block in list(pool.free):
            if block.prev is None and block.next is None:
                self._release(block)

    def _note_oom(self, id: Hashable, nbytes: int, size: int, pool: Pool) -> None:
        if self.oom is None:
            largest = pool.free[-1][0] if pool.free else 0
            self.oom = OutOfMemory(
                self.requests - 1, id, nbytes, segment_size(size), self.allocated, self.reserved, largest
            )


def make_allocator(capacity: int | None = None, options: AllocatorOptions = DEFAULT_OPTIONS) -> CachingAllocator:
    """The allocator for these options. `capacity` in bytes, None: unlimited."""

    return (
        ExpandableAllocator(capacity, options) if options.expandable_segments else CachingAllocator(capacity, options)
    )


#: ("malloc", id, bytes), ("malloc", id, bytes, stream), ("free", id), ("reset_peaks",) or ("empty_cache",)
Event = tuple[Any, ...]


def replay(
    events: Iterable[Event], capacity: int | None = None, options: AllocatorOptions = DEFAULT_OPTIONS
) -> CachingAllocator:
    """Replay `events` in order up to the first out-of-memory (see `oom` of the result)."""
    allocator = make_allocator(capacity, options)
    handlers: dict[str, Any] = {
        name: getattr(allocator, name) for name in ("malloc", "free", "reset_peaks", "empty_cache")
    }
    for event in events:
        if handlers[event[0]](*event[1:]) is False:
            break
    return allocator


_UNLIMITED = 2**45  # addresses of a segment on a card of unknown size


class ExpandableAllocator(CachingAllocator):
    expandable = True

    def __init__(self, capacity: int | None = None, options: AllocatorOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(capacity, options)
        self._span = _UNLIMITED if capacity is None else capacity + capacity // 8

    def _take_free(self, pool: Pool, size: int) -> Block | None:
        """Best fit, where a block that can grow counts with what it can grow to."""
        free = pool.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        while at + 1 < len(free) and _reach(free[at + 1][2]) < _reach(free[at][2]):
            at += 1
        found = free[at][0]
        if size < self._split_limit <= found:
            return None
        if size >= self._split_limit and found >= size + LARGE_SEGMENT:
            return None
        return free.pop(at)[2]

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        block = self._find_room(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.next is not None and not block.next.mapped
            mapped = self._map(block.next, min(size - block.size, block.next.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _find_room(self, pool: Pool, size: int) -> Block:
        """The first unbacked range that, with a free block before it, has room for `size` bytes; else a new segment."""
        for _, block in pool.unmapped:
            start = block.prev if block.prev is not None and not block.prev.allocated else block
            room, at = 0, start
            while at is not None and not at.allocated and room < size:
                room += at.size
                at = at.next  # type: ignore[assignment]
            if room >= size:
                return start
        piece = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        span = max(-(-self._span // piece), -(-size // piece)) * piece
        segment = Segment(self._next_address, span, pool, expandable=True)
        self._next_address += span + MIB
        self._segments[segment.address] = segment
        self.segments_made += 1
        segment.first.mapped = False
        insort(pool.unmapped, (segment.address, segment.first))
        return segment.first

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the first `size` bytes of an unbacked block with memory; gives the free block that they are now part of.

        None when the device is full (cuMemCreate fails); what was mapped before stays mapped.
        """
        pool = block.pool
        piece = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        mapped = min(-(-size // piece) * piece, block.size)
        if self.capacity is not None and self.reserved + mapped > self.capacity:
            return None
        del pool.unmapped[bisect_left(pool.unmapped, (block.address,))]
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, pool, block.segment)
            rest.mapped = False
            _link_after(block, rest)
            block.size = mapped
            insort(pool.unmapped, (rest.address, rest))
        self._reserve(mapped)
        before = block.prev
        if before is not None and not before.allocated and before.mapped:
            pool.remove(before)
            block = _absorb(before)
        after = block.next
        if after is not None and not after.allocated and after.mapped:
            pool.remove(after)
            _absorb(block)
        pool.add(block)
        return block

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        return False  # only blocks of ordinary segments are released here, and there are none

    def _release_pool(self, pool: Pool) -> None:
        for _, _, block in list(pool.free):
            self._unmap(block)

    def _unmap(self, block: Block) -> None:
        """Give the whole pieces within a free block back to the driver."""
        pool = block.pool
        piece = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        origin = block.segment.address
        start = -(-(block.address - origin) // piece) * piece + origin
        end = (block.address + block.size - origin) // piece * piece + origin
        if start >= end:
            return
        pool.remove(block)
        tail = block.address + block.size - end
        if tail:
            after = Block(end, tail, pool, block.segment)
            _link_after(block, after)
            pool.add(after)
            block.size -= tail
        head = start - block.address
        if head:
            hole = Block(start, block.size - head, pool, block.segment)
            _link_after(block, hole)
            block.size = head
            pool.add(block)
            block = hole
        block.mapped = False
        self.reserved -= block.size
        before, after_hole = block.prev, block.next
        if before is not None and not before.mapped:
            del pool.unmapped[bisect_left(pool.unmapped, (before.address,))]
            block = _absorb(before)
        if after_hole is not None and not after_hole.mapped:
            del pool.unmapped[bisect_left(pool.unmapped, (after_hole.address,))]
            _absorb(block)
        insort(pool.unmapped, (block.address, block))
        if block.prev is None and block.next is None:
            pool.unmapped.remove((block.address, block))
            del self._segments[block.segment.address]


def _reach(block: Block) -> int:
    """The size that a free block can grow to."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _link_after(block: Block, new: Block) -> None:
    new.prev, new.next = block, block.next
    if block.next is not None:
        block.next.prev = new
    block.next = new


def _absorb(block: Block) -> Block:
    """Merge `block` with its successor."""
    after = block.next
    assert after is not None
    block.size += after.size
    block.next = after.next
    if after.next is not None:
        after.next.prev = block
    return block
