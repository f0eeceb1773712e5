"""A replay of PyTorch's CUDA caching allocator: from malloc and free events to what torch.cuda would report.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of PyTorch 2.1 to 2.13, which
did not change in what concerns sizes:

- A request is rounded up to 512 B. Up to 1 MiB it is served by the small pool, above by the large one.
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

Not replayed: pools of other streams, and what is off by default: CUDA graphs' private pools,
garbage_collection_threshold, roundup_power2_divisions, user memory pools.

All sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from sweep.config.device import AllocatorOptions
from sweep.results import MIB

MIN_BLOCK = 512  # kMinBlockSize: everything is a multiple of it
SMALL_SIZE = 1 * MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: from here on a segment of its own size
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer: segment of the large pool's smaller requests
ROUND_LARGE = 2 * MIB  # kRoundLarge
#: An unsplittable block may be larger than the request by less than this (max_non_split_rounding_size).
MAX_NON_SPLIT_ROUNDING = LARGE_SEGMENT
DEFAULT_OPTIONS = AllocatorOptions()


def round_up(nbytes: int, multiple: int = MIN_BLOCK) -> int:
    return -(-nbytes // multiple) * multiple


def segment_size(size: int) -> int:
    """The cudaMalloc that a request of `size` bytes (rounded) leads to when no free block is large enough."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE_ALLOC else round_up(size, ROUND_LARGE)


class Block:
    """A piece of a segment: in use, free, or (expandable segments only) not backed by memory."""

    __slots__ = ("address", "allocated", "mapped", "next", "origin", "pool", "prev", "size")

    def __init__(self, address: int, size: int, pool: Pool, origin: int) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.origin = origin  # the segment's address
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.mapped = True

    def split(self, size: int) -> Block:
        """Keep the first `size` bytes; returns the rest."""
        rest = Block(self.address + size, self.size - size, self.pool, self.origin)
        rest.mapped = self.mapped
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb(self, after: Block) -> Block:
        """Merge with the next block."""
        self.size += after.size
        self.next = after.next
        if after.next is not None:
            after.next.prev = self
        return self


class Pool:
    """The free blocks of one size class, sorted by size, then address."""

    __slots__ = ("free", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address; expandable segments only

    @property
    def piece(self) -> int:
        """What an expandable segment grows and shrinks by."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def add(self, block: Block) -> Block:
        """Add a free block, merged with its free neighbours; returns the merged one."""
        before, after = block.prev, block.next
        if after is not None and not after.allocated and after.mapped:
            self.remove(after)
            block.absorb(after)
        if before is not None and not before.allocated and before.mapped:
            self.remove(before)
            block = before.absorb(block)
        insort(self.free, (block.size, block.address, block))
        return block

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """Replays events one at a time. `make_allocator` chooses between this class and the one for expandable segments.

    `capacity` is what the allocator may reserve: the card less what driver, context and other processes take, or
    set_per_process_memory_fraction's share of the card, whichever is less. None: unlimited.
    """

    def __init__(self, capacity: int | None = None, options: AllocatorOptions = DEFAULT_OPTIONS) -> None:
        self.capacity = capacity
        self.allocated = self.allocated_peak = 0  # whole blocks, as torch counts
        self.reserved = self.reserved_peak = 0
        self._max_split_size = options.max_split_size
        self._split_limit = 1 << 62 if options.max_split_size is None else options.max_split_size
        self._small, self._large = Pool(True), Pool(False)
        self._live: dict[int, Block] = {}
        self._next_address = 1 << 40

    # -- events --

    def malloc(self, id: int, nbytes: int) -> bool:
        """Serve one request. False when out of memory."""
        size = round_up(nbytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        block = self._take_free(pool, size) or self._grow(pool, size)
        if block is None:
            return False
        block.allocated = True
        if self._is_cut(pool, size, block.size - size):
            rest = block.split(size)
            rest.pool.add(rest)
        self._live[id] = block
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return True

    def free(self, id: int) -> None:
        """Give one allocation back to its pool."""
        block = self._live.pop(id)
        self.allocated -= block.size
        block.allocated = False
        block.pool.add(block)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache: every wholly free segment goes back to the driver."""
        for pool in (self._small, self._large):
            for _, _, block in list(pool.free):
                self._give_back(block)

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats: the peaks start again from what is held now."""
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    # -- how memory is found --

    def _is_cut(self, pool: Pool, size: int, rest: int) -> bool:
        return rest >= MIN_BLOCK if pool.small else rest > SMALL_SIZE and size < self._split_limit

    def _best_fit(self, pool: Pool, size: int) -> int:
        return bisect_left(pool.free, (size,))

    def _take_free(self, pool: Pool, size: int) -> Block | None:
        """get_free_block: best fit, unless one of the two is too large to be cut."""
        at = self._best_fit(pool, size)
        if at == len(pool.free):
            return None
        found = pool.free[at][0]
        limit = self._split_limit if size < self._split_limit else size + MAX_NON_SPLIT_ROUNDING
        return None if found >= limit else pool.free.pop(at)[2]

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """cudaMalloc, and what is tried when it fails, in torch's order."""
        block = self._new_block(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.empty_cache()
            block = self._new_block(pool, size)
        return block

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        asked = segment_size(size)
        if not self._reserve(asked):
            return None
        return self._at_new_addresses(pool, asked)

    def _at_new_addresses(self, pool: Pool, size: int) -> Block:
        block = Block(self._next_address, size, pool, self._next_address)
        self._next_address += size + MIB
        return block

    def _reserve(self, nbytes: int) -> bool:
        """Take memory from the driver. False: there is not as much."""
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """release_available_cached_blocks: with max_split_size, just enough large blocks, the largest first."""
        limit = self._max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        at = bisect_left(pool.free, (wanted,))
        if at < len(pool.free):
            self._give_back(pool.free[at][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= limit:
            released += pool.free[-1][0]
            self._give_back(pool.free[-1][2])
        return released >= wanted

    def _give_back(self, block: Block) -> None:
        """cudaFree of a segment that is wholly free."""
        if block.prev is None and block.next is None:
            block.pool.remove(block)
            self.reserved -= block.size


class ExpandableAllocator(CachingAllocator):
    """With expandable_segments: one range of addresses per pool, which is backed by memory piece by piece."""

    def __init__(self, capacity: int | None = None, options: AllocatorOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(capacity, options)
        self._span = 2**45 if capacity is None else capacity + capacity // 8

    def _is_cut(self, pool: Pool, size: int, rest: int) -> bool:
        return rest >= MIN_BLOCK

    def _best_fit(self, pool: Pool, size: int) -> int:
        """A block that can grow counts with what it can grow to."""
        free, at = pool.free, bisect_left(pool.free, (size,))
        while at + 1 < len(free) and _reach(free[at + 1][2]) < _reach(free[at][2]):
            at += 1
        return at

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        block = self._find_room(pool, size)
        while not block.mapped or block.size < size:
            edge, missing = (block.next, size - block.size) if block.mapped else (block, size)
            assert edge is not None
            mapped = self._map(edge, missing)
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
        block = self._at_new_addresses(pool, round_up(max(self._span, size), pool.piece))
        block.mapped = False
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the first `size` bytes of an unbacked block with memory; gives the free block that they are now part of.

        None when the device is full (cuMemCreate fails); what was mapped before stays mapped.
        """
        pool = block.pool
        mapped = min(round_up(size, pool.piece), block.size)
        if not self._reserve(mapped):
            return None
        pool.remove_unmapped(block)
        if mapped < block.size:
            pool.add_unmapped(block.split(mapped))
        block.mapped = True
        return pool.add(block)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        return False  # only blocks of ordinary segments are released here, and there are none

    def _give_back(self, block: Block) -> None:
        """Give the whole pieces within a free block back to the driver."""
        pool, piece = block.pool, block.pool.piece
        start = block.origin + round_up(block.address - block.origin, piece)
        end = block.origin + (block.address + block.size - block.origin) // piece * piece
        if start >= end:
            return
        pool.remove(block)
        block.allocated = True  # so that what is left of it does not merge with it
        if block.address + block.size > end:
            pool.add(block.split(end - block.address))
        if start > block.address:
            head, block = block, block.split(start - block.address)
            block.mapped = head.allocated = False
            pool.add(head)
        block.mapped = block.allocated = False
        self.reserved -= block.size
        before, after = block.prev, block.next
        if before is not None and not before.mapped:
            pool.remove_unmapped(before)
            block = before.absorb(block)
        if after is not None and not after.mapped:
            pool.remove_unmapped(after)
            block.absorb(after)
        if block.prev is not None or block.next is not None:  # else the whole segment is gone
            pool.add_unmapped(block)


def _reach(block: Block) -> int:
    """The size that a free block can grow to."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def make_allocator(capacity: int | None = None, options: AllocatorOptions = DEFAULT_OPTIONS) -> CachingAllocator:
    """The allocator for these options. `capacity` in bytes, None: unlimited."""
    kind = ExpandableAllocator if options.expandable_segments else CachingAllocator
    return kind(capacity, options)
