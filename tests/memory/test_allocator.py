"""The replay of the caching allocator against event lists worked out by hand, and against invariants."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from sweep.config.device import AllocatorOptions
from sweep.memory.allocator import Block, CachingAllocator, make_allocator, round_up, segment_size

KIB, MIB = 2**10, 2**20
NO_OPTIONS = AllocatorOptions()
EXPANDABLE = AllocatorOptions(expandable_segments=True)


def replay(
    *events: tuple[int, float] | int, capacity: int | None = None, options: AllocatorOptions = NO_OPTIONS
) -> CachingAllocator:
    """`events`: (id, MiB) is allocated, an id alone is freed. `capacity` in MiB; all requests find memory."""
    allocator = make_allocator(None if capacity is None else capacity * MIB, options)
    for event in events:
        if isinstance(event, tuple):
            assert allocator.malloc(event[0], round(event[1] * MIB)), event
        else:
            allocator.free(event)
    return allocator


def sizes(a: CachingAllocator) -> tuple[float, float]:
    """MiB allocated and reserved."""
    return a.allocated / MIB, a.reserved / MIB


def segments(a: CachingAllocator) -> list[list[Block]]:
    """The blocks of each segment, in order, found from those that are in use or free."""
    first: dict[int, Block] = {}
    for block in [*a._live.values(), *(b for pool in (a._small, a._large) for _, _, b in pool.free)]:
        while block.prev is not None:
            block = block.prev
        first[block.address] = block
    found = []
    for _, block in sorted(first.items()):
        found.append([block])
        while block.next is not None:
            block = block.next
            found[-1].append(block)
    return found


def test_sizes_are_rounded_as_documented() -> None:
    assert [round_up(n) for n in (1, 511, 512, 513, 1024)] == [512, 512, 512, 1024, 1024]
    # 1 MiB is still small; above it and below 10 MiB a 20 MiB segment; from 10 MiB on the next multiple of 2 MiB.
    asked = [MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 10 * MIB + 512, 21 * MIB]
    assert [segment_size(size) // MIB for size in asked] == [2, 20, 20, 10, 12, 22]


def test_small_requests_share_one_segment_of_2_mib() -> None:
    a = CachingAllocator()
    for i in range(4096):
        a.malloc(i, 100)  # 4096 x 512 B = 2 MiB exactly
    assert sizes(a) == (2, 2)
    a.malloc(-1, 1)
    assert (a.allocated, a.reserved) == (2 * MIB + 512, 4 * MIB)


REST = 512 / MIB


@pytest.mark.parametrize(
    ("events", "allocated", "reserved"),
    [
        # 11 MiB takes a segment of 12 MiB; the rest of exactly 1 MiB is not "more than 1 MiB".
        ([(0, 11)], 12, 12),
        ([(0, 11 - REST)], 11 - REST, 12),
        # In the small pool a rest of 512 bytes is cut off.
        ([(0, 1), (1, 1 - REST), (2, REST)], 2, 2),
        # Best fit: 25 MiB go into the 30, not into the 40 that came first. 5 MiB stay free there, the 40 whole.
        ([(0, 40), (1, 20), (2, 30), 0, 1, 2, (3, 25), (4, 40)], 65, 90),
        # Neighbours in other segments do not merge.
        ([(0, 20), (1, 20), 0, 1, (2, 40)], 40, 80),
        # Small and large pools do not share blocks.
        ([(0, 20), 0, (1, KIB / MIB)], KIB / MIB, 22),
        # Freed neighbours merge in every order: five of 4 MiB fill one segment, and 12 fit if 0, 1 and 2 are one again.
        *(([*((i, 4) for i in range(5)), *order, (9, 12)], 20, 20) for order in itertools.permutations(range(3))),
    ],
)  # fmt: skip
def test_blocks_are_found_cut_and_merged(events: list[Any], allocated: float, reserved: float) -> None:
    assert sizes(replay(*events)) == (allocated, reserved)


def test_equal_blocks_are_taken_from_the_lowest_address() -> None:
    first, second, third = segments(replay((0, 20), (1, 20), (2, 20), 2, 0, (3, 20)))
    assert [blocks[0].allocated for blocks in (first, second, third)] == [True, True, False]


def test_fragmentation_makes_reserved_larger_than_allocated() -> None:
    # The hole of 18 MiB beside the 2 cannot serve 19, which take 20: the rest of 1 MiB is not cut off.
    a = replay((0, 2), (1, 19))
    assert (a.allocated_peak, a.reserved_peak) == (22 * MIB, 40 * MIB)


def test_full_device_gives_the_cache_back_and_tries_again() -> None:
    # 60 of 100 MiB are cached in two segments; 70 MiB fit only after both went back.
    events: list[Any] = [(0, 30), (1, 30), 0, 1, (2, 70)]
    a = replay(*events, capacity=100)
    assert (a.reserved, a.reserved_peak) == (70 * MIB, 70 * MIB)
    assert replay(*events).reserved_peak == 130 * MIB


def test_partly_used_segments_do_not_go_back() -> None:
    a = replay((0, 4), (1, 4), (2, 30), 0, 2, capacity=70)
    # The 20 MiB segment still holds request 1, so 70 - 20 = 50 MiB are left for 60.
    assert not a.malloc(3, 60 * MIB) and sizes(a) == (4, 20)
    assert a.malloc(3, 50 * MIB) and sizes(a) == (54, 70)


def test_reset_peaks_starts_again_from_what_is_held() -> None:
    def peaks() -> tuple[float, ...]:
        return a.allocated_peak / MIB, a.reserved_peak / MIB

    a = replay((0, 64), (1, 32), 0)
    assert peaks() == (96, 96) and a.allocated == 32 * MIB
    a.reset_peaks()
    # As in torch, cached memory is still reserved: only empty_cache lowers it.
    assert peaks() == (32, 96)
    a.malloc(2, 10 * MIB)
    assert peaks() == (42, 96)
    a.empty_cache()
    assert a.reserved == 96 * MIB  # 10 of the 64 MiB are in use again
    a.free(2)
    a.empty_cache()
    assert a.reserved == 32 * MIB and a.reserved_peak == 96 * MIB


def test_max_split_size_keeps_large_blocks_whole() -> None:
    options = AllocatorOptions(max_split_size=64 * MIB)
    # A small request may not cut the cached 100 MiB, a large one takes it whole if it wastes less than 20 MiB.
    for asked, expected in ((30, (30, 130)), (82, (100, 100)), (80, (80, 180))):
        assert sizes(replay((0, 100), 0, (1, asked), options=options)) == expected
    # 110 of 200 MiB: no free block is as large, so the largest ones go back until they make 110: 90, then 70.
    a = replay((0, 70), (1, 90), (2, 20), 0, 1, 2, (3, 110), capacity=200, options=options)
    assert a.reserved == 130 * MIB
    # One that is larger goes back alone.
    assert replay((0, 100), (1, 66), 0, 1, (2, 70), capacity=168, options=options).reserved == 136 * MIB


def test_expandable_segment_grows_where_an_ordinary_one_fragments() -> None:
    events: list[Any] = [(0, 30), (1, 30), 0, 1, (2, 70)]
    assert replay(*events).reserved == 130 * MIB
    # 30 MiB map 2 x 20; 30 more map 1 x 20 (10 were left); 70 map 1 x 20 after the 60 that merged.
    assert sizes(replay(*events, options=EXPANDABLE)) == (70, 80)


def test_expandable_segment_cuts_every_rest() -> None:
    assert sizes(replay((0, 19 + REST), options=EXPANDABLE)) == (19 + REST, 20)
    assert sizes(replay((0, KIB / MIB), options=EXPANDABLE)) == (KIB / MIB, 2)


def test_expandable_segment_gives_back_pieces_from_the_middle() -> None:
    a = replay((0, 30), (1, 30), (2, 30), options=EXPANDABLE)  # 90 MiB in 100 mapped
    assert a.reserved == 100 * MIB
    a.free(1)
    a.empty_cache()
    # Block 1 covers 30..60; the only whole piece within it is 40..60. The tail 90..100 is no whole piece.
    assert a.reserved == 80 * MIB
    a.malloc(3, 30 * MIB)  # 30..40 is free and 40..60 is mapped again
    assert sizes(a) == (90, 100)
    for i in (0, 2, 3):
        a.free(i)
    a.empty_cache()
    assert a.reserved == 0 and segments(a) == []


def test_expandable_segment_runs_out_of_memory() -> None:
    assert replay((0, 50), (1, 50), capacity=100, options=EXPANDABLE).reserved == 100 * MIB
    a = replay((0, 50), capacity=100, options=EXPANDABLE)
    assert not a.malloc(1, 60 * MIB) and a.reserved <= 100 * MIB


@pytest.mark.parametrize("options", [NO_OPTIONS, AllocatorOptions(max_split_size=32 * MIB), EXPANDABLE])
@pytest.mark.parametrize("capacity_mib", [None, 3000, 400])
def test_invariants_hold_on_random_events(options: AllocatorOptions, capacity_mib: int | None) -> None:
    rng = random.Random(0)
    a = make_allocator(None if capacity_mib is None else capacity_mib * MIB, options)
    live: dict[int, int] = {}
    peak = reserved_peak = refused = 0
    for step in range(2000):
        if live and rng.random() < 0.5:
            a.free(victim := rng.choice(list(live)))
            del live[victim]
        elif a.malloc(step, nbytes := int(2 ** rng.uniform(0, 26)) + 1):
            live[step] = nbytes
        else:
            refused += 1
        peak, reserved_peak = max(peak, a.allocated), max(reserved_peak, a.reserved)
        if step % 20 == 0:
            _check_structure(a, live, expandable=options is EXPANDABLE)
    assert (a.allocated_peak, a.reserved_peak) == (peak, reserved_peak)
    assert capacity_mib is None or a.reserved_peak <= capacity_mib * MIB
    assert (refused > 0) == (capacity_mib == 400)
    for id in live:
        a.free(id)
    a.empty_cache()
    # Expandable segments keep pieces that are only partly within a free block; here all blocks are free.
    assert a.allocated == a.reserved == 0


def _check_structure(a: CachingAllocator, live: dict[int, int], expandable: bool) -> None:
    end = reserved = 0
    in_use: dict[int, int] = {}
    for blocks in segments(a):
        assert blocks[0].address >= end, "segments overlap"
        assert all(x.address + x.size == y.address for x, y in itertools.pairwise(blocks)), "a gap"
        kinds = [(block.allocated, block.mapped) for block in blocks]
        assert all(x[0] or y != x for x, y in itertools.pairwise(kinds)), "free neighbours were not merged"
        assert expandable or all(block.mapped for block in blocks)
        assert all(block.size > 0 and block.size % 512 == 0 for block in blocks)
        end = blocks[-1].address + blocks[-1].size
        reserved += sum(block.size for block in blocks if block.mapped)
        in_use |= {block.address: block.size for block in blocks if block.allocated}
    assert in_use == {block.address: block.size for block in a._live.values()} and a._live.keys() == live.keys()
    assert all(a._live[id].size >= nbytes for id, nbytes in live.items())
    assert sum(in_use.values()) == a.allocated and reserved == a.reserved >= a.allocated


def test_best_fit_agrees_with_a_search_through_all_blocks() -> None:
    """The sorted lists against the rule as written: over all free blocks, the least (size, address) that is enough."""
    rng = random.Random(1)
    a = CachingAllocator()
    live: list[int] = []
    for step in range(800):
        if live and rng.random() < 0.5:
            a.free(live.pop(rng.randrange(len(live))))
            continue
        nbytes = rng.choice((512, 4 * KIB, 300 * KIB, 2 * MIB, 7 * MIB, 11 * MIB, 33 * MIB))
        pool = a._small if nbytes <= MIB else a._large
        blocks = [block for segment in segments(a) for block in segment if block.pool is pool and not block.allocated]
        fitting = [(block.size, block.address) for block in blocks if block.size >= nbytes]
        before = a.reserved
        a.malloc(step, nbytes)
        live.append(step)
        assert (a.reserved > before) == (not fitting)
        assert not fitting or a._live[step].address == min(fitting)[1]
