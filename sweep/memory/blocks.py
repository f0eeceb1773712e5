"""The parts of the caching allocator's replay: sizes, options, blocks, pools and segments. All sizes are bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass

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
