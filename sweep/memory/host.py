"""Marks allocations as host copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Host(threading.local):
    depth = 0


#: `depth` is above zero where this thread is inside of `host_memory`.
host = _Host()


@contextmanager
def host_memory() -> Iterator[None]:
    """What this thread allocates in here are host copies: not counted on the device, their peak reported beside it."""
    host.depth += 1
    try:
        yield
    finally:
        host.depth -= 1
