"""The replay of the caching allocator against event lists worked out by hand, and against invariants."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch.cuda._memory_viz as viz

from sweep.errors import BadInput
from sweep.memory.allocator import AllocatorOptions, CachingAllocator, make_allocator, replay, round_size, segment_size

KIB, MIB = 2**10, 2**20
EXPANDABLE = AllocatorOptions(expandable_segments=True)


def test_sizes_are_rounded_as_documented() -> None:
    assert [round_size(n) for n in (1, 511, 512, 513, 1024)] == [512, 512, 512, 1024, 1024]
    # 1 MiB is still small; above it and below 10 MiB a 20 MiB segment; from 10 MiB on the next multiple of 2 MiB.
    assert segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == 20 * MIB
    assert segment_size(10 * MIB - 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB
    assert segment_size(10 * MIB + 512) == 12 * MIB
    assert segment_size(21 * MIB) == 22 * MIB


def test_small_requests_share_one_segment_of_2_mib() -> None:
    a = replay([("malloc", i, 100) for i in range(4096)])  # 4096 x 512 B = 2 MiB exactly
    assert (a.allocated, a.reserved, a.segments_made) == (2 * MIB, 2 * MIB, 1)
    assert a.requested == 4096 * 100
    a.malloc("one more", 1)
    assert (a.allocated, a.reserved, a.segments_made) == (2 * MIB + 512, 4 * MIB, 2)


def test_zero_bytes_take_nothing() -> None:
    a = replay([("malloc", 0, 0), ("free", 0)])
    assert (a.allocated_peak, a.reserved_peak, a.segments_made) == (0, 0, 0)


def test_large_rest_of_up_to_1_mib_is_not_cut_off_and_counts_as_allocated() -> None:
    # 11 MiB takes a segment of 12 MiB; the rest of exactly 1 MiB is not "more than 1 MiB".
    a = replay([("malloc", 0, 11 * MIB)])
    assert (a.allocated, a.requested, a.reserved) == (12 * MIB, 11 * MIB, 12 * MIB)
    assert a.block_bytes(0) == 12 * MIB
    # 512 B less, and the rest is worth keeping.
    b = replay([("malloc", 0, 11 * MIB - 512)])
    assert (b.allocated, b.reserved) == (11 * MIB - 512, 12 * MIB)


def test_small_rest_of_512_bytes_is_cut_off() -> None:
    a = replay([("malloc", 0, MIB), ("malloc", 1, MIB - 512), ("malloc", 2, 512)])
    assert (a.allocated, a.reserved, a.segments_made) == (2 * MIB, 2 * MIB, 1)


def test_best_fit_takes_the_smallest_sufficient_block() -> None:
    events: list[tuple[Any, ...]] = [("malloc", name, size * MIB) for name, size in (("a", 40), ("b", 20), ("c", 30))]
    events += [("free", "a"), ("free", "b"), ("free", "c"), ("malloc", "d", 25 * MIB)]
    a = replay(events)
    # d goes into c's 30 MiB, not into a's 40, which came first; 5 MiB stay free there.
    owner = {
        block["id"]: segment["total_size"] for segment in a.snapshot() for block in segment["blocks"] if "id" in block
    }
    assert owner == {"d": 30 * MIB}
    assert a.reserved == 90 * MIB and a.allocated == 25 * MIB


def test_equal_blocks_are_taken_from_the_lowest_address() -> None:
    a = replay([("malloc", i, 20 * MIB) for i in range(3)] + [("free", 2), ("free", 0), ("malloc", "x", 20 * MIB)])
    first, second, third = a.snapshot()
    assert [b.get("id") for b in first["blocks"]] == ["x"]
    assert [b.get("id") for b in second["blocks"]] == [1] and third["allocated_size"] == 0


def test_freed_neighbours_merge_in_every_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        a = replay([("malloc", i, 4 * MIB) for i in range(5)])  # five fill one segment of 20 MiB
        assert a.reserved == 20 * MIB
        for i in order:
            a.free(i)
        a.malloc("x", 12 * MIB)  # fits only if 0, 1 and 2 are one block again
        assert (a.reserved, a.segments_made) == (20 * MIB, 1)


def test_neighbours_in_other_segments_do_not_merge() -> None:
    a = replay([("malloc", 0, 20 * MIB), ("malloc", 1, 20 * MIB), ("free", 0), ("free", 1), ("malloc", 2, 40 * MIB)])
    assert a.reserved == 80 * MIB


def test_fragmentation_makes_reserved_larger_than_allocated() -> None:
    # Two 12 MiB blocks with a small one (a 20 MiB segment's 2 MiB) between: the hole of 20 - 2 MiB cannot serve 19 MiB.
    a = replay([("malloc", "keep", 2 * MIB), ("malloc", "x", 19 * MIB)])
    assert a.reserved_peak == 20 * MIB + 20 * MIB
    # 19 MiB in 20: the rest of 1 MiB is not cut off.
    assert a.allocated_peak == 2 * MIB + 20 * MIB
    assert a.fragmentation == 18 * MIB


def test_streams_do_not_share_blocks() -> None:
    a = replay([("malloc", 0, 30 * MIB, 0), ("free", 0), ("malloc", 1, 30 * MIB, 7)])
    assert a.reserved == 60 * MIB
    assert [s["stream"] for s in a.snapshot()] == [0, 7]


def test_small_and_large_pools_do_not_share_blocks() -> None:
    a = replay([("malloc", 0, 20 * MIB), ("free", 0), ("malloc", 1, KIB)])
    assert a.reserved == 22 * MIB


def test_full_device_gives_the_cache_back_and_retries_once() -> None:
    # 60 of 100 MiB are cached in two segments; 70 MiB fit only after both went back.
    events: list[tuple[Any, ...]] = [("malloc", 0, 30 * MIB), ("malloc", 1, 30 * MIB), ("free", 0), ("free", 1)]
    a = replay([*events, ("malloc", 2, 70 * MIB)], capacity=100 * MIB)
    assert a.oom is None and a.retries == 1
    assert (a.reserved, a.reserved_peak, a.segments_made) == (70 * MIB, 70 * MIB, 3)
    unlimited = replay([*events, ("malloc", 2, 70 * MIB)])
    assert unlimited.retries == 0 and unlimited.reserved_peak == 130 * MIB


def test_partly_used_segments_do_not_go_back() -> None:
    events: list[tuple[Any, ...]] = [("malloc", 0, 4 * MIB), ("malloc", 1, 4 * MIB), ("malloc", 2, 30 * MIB)]
    events += [("free", 0), ("free", 2), ("malloc", 3, 60 * MIB)]
    a = replay(events, capacity=70 * MIB)
    # The 20 MiB segment still holds request 1, so 70 - 20 = 50 MiB are left for 60.
    assert a.oom is not None and a.retries == 1
    assert (a.oom.request, a.oom.id, a.oom.nbytes, a.oom.segment_bytes) == (3, 3, 60 * MIB, 60 * MIB)
    assert (a.oom.reserved, a.oom.allocated) == (20 * MIB, 4 * MIB)
    assert a.oom.largest_free == 12 * MIB  # behind request 1


def test_replay_goes_on_after_an_out_of_memory() -> None:
    a = CachingAllocator(capacity=50 * MIB)
    assert a.malloc("a", 40 * MIB) and not a.malloc("b", 40 * MIB)
    first = a.oom
    assert not a.malloc("c", 41 * MIB) and a.oom is first
    a.free("a")
    assert a.malloc("b", 40 * MIB) and a.allocated == 40 * MIB


def test_reset_peaks_starts_again_from_what_is_held() -> None:
    a = replay([("malloc", 0, 64 * MIB), ("malloc", 1, 32 * MIB), ("free", 0)])
    assert (a.allocated_peak, a.reserved_peak, a.allocated) == (96 * MIB, 96 * MIB, 32 * MIB)
    a.reset_peaks()
    # As in torch, cached memory is still reserved: only empty_cache lowers it.
    assert (a.allocated_peak, a.reserved_peak, a.fragmentation) == (32 * MIB, 96 * MIB, 64 * MIB)
    a.malloc(2, 10 * MIB)
    assert (a.allocated_peak, a.reserved_peak, a.fragmentation) == (42 * MIB, 96 * MIB, 54 * MIB)
    a.empty_cache()
    assert a.reserved == 96 * MIB  # 10 of the 64 MiB are in use again
    a.free(2)
    a.empty_cache()
    assert a.reserved == 32 * MIB and a.reserved_peak == 96 * MIB


def test_max_split_size_keeps_large_blocks_whole() -> None:
    options = AllocatorOptions(max_split_size=64 * MIB)
    events: list[tuple[Any, ...]] = [("malloc", 0, 100 * MIB), ("free", 0)]
    # A small request may not cut the cached 100 MiB, a large one takes it whole if it wastes less than 20 MiB.
    assert replay([*events, ("malloc", 1, 30 * MIB)], options=options).reserved == 130 * MIB
    fits = replay([*events, ("malloc", 1, 82 * MIB)], options=options)
    assert (fits.reserved, fits.allocated) == (100 * MIB, 100 * MIB)
    assert replay([*events, ("malloc", 1, 80 * MIB)], options=options).reserved == 180 * MIB


def test_max_split_size_gives_back_only_what_is_needed() -> None:
    options = AllocatorOptions(max_split_size=64 * MIB)
    events: list[tuple[Any, ...]] = [("malloc", 0, 70 * MIB), ("malloc", 1, 90 * MIB), ("malloc", 2, 20 * MIB)]
    events += [("free", i) for i in range(3)]
    # 110 of 200 MiB: no free block is as large, so the largest ones go back until they make 110: 90, then 70.
    a = replay([*events, ("malloc", 3, 110 * MIB)], capacity=200 * MIB, options=options)
    assert (a.reserved, a.retries) == (130 * MIB, 0)


def test_allocator_conf_is_read_in_torchs_syntax() -> None:
    parsed = AllocatorOptions.parse("expandable_segments:True, max_split_size_mb:128")
    assert parsed == AllocatorOptions(128 * MIB, True)
    assert AllocatorOptions.parse("") == AllocatorOptions()
    with pytest.raises(BadInput, match=r"x=backend:cudaMallocAsync: backend:cudaMallocAsync cannot be replayed"):
        AllocatorOptions.parse("backend:cudaMallocAsync", key="x")
    with pytest.raises(BadInput, match="max_split_size_mb is too small"):
        AllocatorOptions.parse("max_split_size_mb:20")


def test_expandable_segment_grows_where_an_ordinary_one_fragments() -> None:
    events: list[tuple[Any, ...]] = [("malloc", 0, 30 * MIB), ("malloc", 1, 30 * MIB), ("free", 0), ("free", 1)]
    events += [("malloc", 2, 70 * MIB)]
    assert replay(events).reserved == 130 * MIB
    # 30 MiB map 2 x 20; 30 more map 1 x 20 (10 were left); 70 map 1 x 20 after the 60 that merged.
    a = replay(events, options=EXPANDABLE)
    assert (a.reserved, a.allocated, a.segments_made) == (80 * MIB, 70 * MIB, 1)


def test_expandable_segment_cuts_every_rest() -> None:
    a = replay([("malloc", 0, 19 * MIB + 512)], options=EXPANDABLE)
    assert (a.allocated, a.reserved) == (19 * MIB + 512, 20 * MIB)
    small = replay([("malloc", 0, KIB)], options=EXPANDABLE)
    assert (small.allocated, small.reserved) == (KIB, 2 * MIB)


def test_expandable_segment_gives_back_pieces_from_the_middle() -> None:
    a = replay([("malloc", i, 30 * MIB) for i in range(3)], options=EXPANDABLE)  # 90 MiB in 100 mapped
    assert a.reserved == 100 * MIB
    a.free(1)
    a.empty_cache()
    # Block 1 covers 30..60; the only whole piece within it is 40..60. The tail 90..100 is no whole piece.
    assert a.reserved == 80 * MIB
    a.malloc(3, 30 * MIB)  # 30..40 is free and 40..60 is mapped again
    assert a.reserved == 100 * MIB and a.allocated == 90 * MIB
    for i in (0, 2, 3):
        a.free(i)
    a.empty_cache()
    assert a.reserved == 0 and a.snapshot() == []


def test_expandable_segment_runs_out_of_memory() -> None:
    a = replay([("malloc", 0, 50 * MIB), ("malloc", 1, 50 * MIB)], capacity=100 * MIB, options=EXPANDABLE)
    assert a.oom is None
    b = replay([("malloc", 0, 50 * MIB), ("malloc", 1, 60 * MIB)], capacity=100 * MIB, options=EXPANDABLE)
    assert b.oom is not None and b.oom.id == 1 and b.reserved <= 100 * MIB


@pytest.mark.parametrize("options", [AllocatorOptions(), AllocatorOptions(max_split_size=32 * MIB), EXPANDABLE])
@pytest.mark.parametrize("capacity_mib", [None, 3000, 400])
def test_invariants_hold_on_random_events(options: AllocatorOptions, capacity_mib: int | None) -> None:
    rng = random.Random(0)
    a = make_allocator(None if capacity_mib is None else capacity_mib * MIB, options)
    live: dict[int, int] = {}
    peak = reserved_peak = 0
    for step in range(3000):
        if live and rng.random() < 0.5:
            a.free(victim := rng.choice(list(live)))
            del live[victim]
        else:
            nbytes = int(2 ** rng.uniform(0, 26))
            if a.malloc(step, nbytes, stream=rng.choice((0, 0, 0, 1))):
                live[step] = nbytes
        peak, reserved_peak = max(peak, a.allocated), max(reserved_peak, a.reserved)
        if step % 20 == 0:
            _check_structure(a, live)
    assert (a.allocated_peak, a.reserved_peak) == (peak, reserved_peak)
    if capacity_mib is None:
        assert a.oom is None and a.retries == 0
    else:
        assert a.reserved_peak <= capacity_mib * MIB
        assert (a.retries > 0) == (capacity_mib == 400)
    for id in live:
        a.free(id)
    assert a.allocated == a.requested == 0
    a.empty_cache()
    # Expandable segments keep pieces that are only partly within a free block; here all blocks are free.
    assert a.reserved == 0


def _check_structure(a: CachingAllocator, live: dict[int, int]) -> None:
    seen: dict[Any, int] = {}
    previous_end = 0
    for segment in a.snapshot():
        assert segment["address"] >= previous_end, "segments overlap"
        at, was_free = segment["address"], False
        for block in segment["blocks"]:
            if block["address"] != at:
                assert segment["is_expandable"] and block["address"] > at, "a hole, or blocks overlap"
                was_free = False
            assert block["size"] > 0 and block["size"] % 512 == 0
            is_free = block["state"] == "inactive"
            assert not (is_free and was_free), "free neighbours were not merged"
            was_free, at = is_free, block["address"] + block["size"]
            if not is_free:
                seen[block["id"]] = block["size"]
                assert block["size"] >= block["requested_size"] == live[block["id"]]
        previous_end = at
        if not segment["is_expandable"]:
            assert at - segment["address"] == segment["total_size"]
    assert seen.keys() == live.keys()
    assert sum(seen.values()) == a.allocated and sum(live.values()) == a.requested
    assert sum(s["total_size"] for s in a.snapshot()) == a.reserved >= a.allocated


def test_best_fit_agrees_with_a_search_through_all_blocks() -> None:
    """The sorted lists against the rule as written: over all free blocks, the least (size, address) that is enough."""
    rng = random.Random(1)
    a = CachingAllocator()
    live: list[int] = []
    for step in range(1500):
        if live and rng.random() < 0.5:
            a.free(live.pop(rng.randrange(len(live))))
            continue
        nbytes = rng.choice((512, 4 * KIB, 300 * KIB, 2 * MIB, 7 * MIB, 11 * MIB, 33 * MIB))
        kind = "small" if nbytes <= MIB else "large"
        free = [
            (b["size"], b["address"])
            for s in a.snapshot()
            if s["segment_type"] == kind
            for b in s["blocks"]
            if b["state"] == "inactive" and b["size"] >= nbytes
        ]
        before = a.segments_made
        a.malloc(step, nbytes)
        live.append(step)
        address = next(b["address"] for s in a.snapshot() for b in s["blocks"] if b.get("id") == step)
        assert a.segments_made == before + (not free)
        if free:
            assert address == min(free)[1]


def test_snapshot_is_read_by_torchs_own_viewer() -> None:
    a = replay([("malloc", 0, 11 * MIB), ("malloc", 1, 5 * KIB), ("malloc", 2, 3 * MIB), ("free", 2)])
    text = viz.segsum({"segments": a.snapshot(), "device_traces": []})
    assert "34.0MiB" in text  # 12 + 2 + 20


def test_misuse_is_an_error() -> None:
    a = replay([("malloc", 0, 1)])
    with pytest.raises(ValueError, match="already allocated"):
        a.malloc(0, 1)
    with pytest.raises(ValueError, match="negative"):
        a.malloc(1, -1)
    with pytest.raises(KeyError):
        a.free("never seen")


def test_100k_events_take_well_under_a_second() -> None:
    rng = random.Random(2)
    events: list[tuple[Any, ...]] = []
    live: list[int] = []
    while len(events) < 100_000:
        if len(live) > 1000 or (live and rng.random() < 0.49):
            events.append(("free", live.pop(rng.randrange(len(live)))))
        else:
            events.append(("malloc", len(events), int(2 ** rng.uniform(4, 27))))
            live.append(len(events) - 1)
    start = time.process_time()
    a = replay(events)
    assert time.process_time() - start < 1.0
    assert a.allocated > 0
