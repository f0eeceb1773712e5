"""What a trace says in numbers: time of each named range, kernels by the range that launched them, hidden copies.

Reads the JSON that torch.profiler exports (the Chrome trace format, times in microseconds). Needs no torch.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.findings import RANGES

#: The categories that the profiler gives its events.
RANGE, OPERATOR, KERNEL, COPY, FILL = "user_annotation", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset"
LAUNCHES = ("cuda_runtime", "cuda_driver")
OTHER = "other"
COPIES = ("copy to host", "copy from host")

Event = dict[str, Any]
Span = tuple[float, float]  # begin and end, us


@dataclass
class Reading:
    """All in milliseconds over the whole trace; `operators` and `steps` are numbers."""

    steps: int
    step_ms: float  # sum of the steps
    ranges_ms: dict[str, float] = field(default_factory=dict)  # own time of each range, on the host
    operators: int = 0
    on_device: bool = False  # whether the device's kernels were recorded
    device_ms: dict[str, float] = field(default_factory=dict)  # kernels, by the range that launched them
    device_busy_ms: float = 0.0  # kernels, those that ran at the same time once
    copy_ms: float = 0.0  # the strategy's copies between host and device
    copy_hidden_ms: float = 0.0  # the part of them that ran beside kernels


def load(path: Path) -> list[Event]:
    """The events of a trace file, plain or gzipped."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[Event] = json.loads(content)["traceEvents"]
    return events


def read(events: list[Event], step_name: str) -> Reading:
    """Take a trace apart. `step_name`: the range around each optimizer step; what lies outside of them is left out."""
    whole = [e for e in events if e.get("ph") == "X"]
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in whole:
        by_category[event.get("cat", "")].append(event)
    steps = [_span(e) for e in by_category[RANGE] if e["name"] == step_name]
    inside = [e for e in by_category[RANGE] if e["name"] in RANGES]
    own = list(_innermost([*((*s, OTHER) for s in steps), *((*_span(e), e["name"]) for e in inside)]))
    found = Reading(len(steps), _ms(sum(end - begin for begin, end in steps)))
    times: dict[str, float] = defaultdict(float)
    for begin, end, name in own:
        times[name] += end - begin
    found.ranges_ms = {name: _ms(times[name]) for name in RANGES if name in times}
    found.operators = _called_by_host(by_category[OPERATOR], steps)
    if by_category[KERNEL]:
        _read_device(found, by_category, own)
    return found


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _ms(us: float) -> float:
    return us / 1000.0


def _innermost(ranges: list[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Pieces of time and the innermost range in each, in order. Ranges of other threads nest in time as well."""
    stack: list[tuple[float, str]] = []  # end and name
    since = 0.0

    def close(until: float) -> Iterator[tuple[float, float, str]]:
        nonlocal since
        while stack and stack[-1][0] <= until:
            end, name = stack.pop()
            if end > since:
                yield since, end, name
                since = end

    for begin, end, name in sorted(ranges, key=lambda r: (r[0], -r[1])):
        yield from close(begin)
        if stack and begin > since:
            yield since, begin, stack[-1][1]
        since = max(since, begin)
        # Clocks of two threads may differ by less than a microsecond: a range never outlives the one around it.
        stack.append((min(end, stack[-1][0]) if stack else end, name))
    yield from close(float("inf"))


def _called_by_host(operators: list[Event], steps: list[Span]) -> int:
    """Operators that Python or autograd called, not those that operators call themselves."""
    begins = [begin for begin, _ in steps]
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in operators:
        at = bisect_right(begins, event["ts"]) - 1
        if event["name"].startswith("aten::") and at >= 0 and event["ts"] <= steps[at][1]:
            by_thread[event.get("pid"), event.get("tid")].append(event)
    count = 0
    for events in by_thread.values():
        free_from = float("-inf")
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            if event["ts"] >= free_from:
                count += 1
                free_from = event["ts"] + event["dur"]
    return count


def _read_device(found: Reading, by_category: dict[str, list[Event]], own: list[tuple[float, float, str]]) -> None:
    launched_at = {
        e["args"]["correlation"]: e["ts"]
        for category in LAUNCHES
        for e in by_category[category]
        if "correlation" in e.get("args", {})
    }
    begins = [begin for begin, _, _ in own]

    def range_of(event: Event) -> str | None:
        """The range in which the host asked for it; None outside of the steps."""
        launched = launched_at.get(event.get("args", {}).get("correlation"))
        if launched is None:
            return None
        at = bisect_right(begins, launched) - 1
        return own[at][2] if at >= 0 and launched <= own[at][1] else None

    kernels: list[Span] = []
    copies: list[Span] = []
    device: dict[str, float] = defaultdict(float)
    for event in [*by_category[KERNEL], *by_category[FILL], *by_category[COPY]]:
        name = range_of(event)
        if name is None:
            continue
        between = event["cat"] == COPY and ("HtoD" in event["name"] or "DtoH" in event["name"])
        if not between:
            kernels.append(_span(event))
            device[name] += event["dur"]
        elif name in COPIES:
            copies.append(_span(event))
    busy = merged(kernels)
    found.on_device = True
    found.device_ms = {name: _ms(device[name]) for name in RANGES if name in device}
    found.device_busy_ms = _ms(sum(end - begin for begin, end in busy))
    found.copy_ms = _ms(sum(end - begin for begin, end in copies))
    found.copy_hidden_ms = _ms(sum(overlap(copy, busy) for copy in copies))


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(span: Span, busy: list[Span]) -> float:
    """How much of a span lies within the spans of `busy`, which are in order and apart from each other."""
    begin, end = span
    at = max(0, bisect_right(busy, (begin, float("inf"))) - 1)
    total = 0.0
    while at < len(busy) and busy[at][0] < end:
        total += max(0.0, min(end, busy[at][1]) - max(begin, busy[at][0]))
        at += 1
    return total
