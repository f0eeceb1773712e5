"""Expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) in the replay of the caching allocator.

A segment is a range of addresses as large as 9/8 of the card, backed by memory piece by piece at its end (cuMemMap):
2 MiB pieces in the small pool, 20 MiB in the large one. A block may grow into the unbacked range behind it, so there is
hardly any fragmentation, and pieces in the middle of a segment can go back to the driver. Rules: find_expandable_block,
map_block and unmap_block of CUDACachingAllocator.cpp.

The capacity is the card's: under set_per_process_memory_fraction torch refuses up to one piece earlier, since it
compares the whole rounded request with the limit before it knows how much of it is already mapped.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from sweep.memory.allocator import CachingAllocator
from sweep.memory.blocks import (
    DEFAULT_OPTIONS,
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    AllocatorOptions,
    Block,
    Pool,
    Segment,
)

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
