"""Ctrl-C and SIGTERM: they wait until what is being written is written, and end a command with all it has started.

An exception that a signal handler raises inside of a statement leaves the store locked: SQLite keeps the connection for
as long as the traceback keeps the cursor, and whoever records next waits for it.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Signals whose Python handlers wait: those that end a command, and the timers of whoever runs one.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)]
_depth = 0
_waiting: list[int] = []
_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # by signal, whom `_on_signal` stands in for


class Terminated(KeyboardInterrupt):
    """SIGTERM. Whatever ends at Ctrl-C ends at it, too."""


@contextmanager
def whole() -> Iterator[None]:
    """A write that is made whole or not at all: signal handlers run when the outermost of these blocks has ended.

    Also a decorator. Handlers run in the main thread only, so elsewhere there is nothing to hold back.
    """
    global _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not _on_signal:  # neither the system's own nor ignored
            _handlers[number] = handler
            signal.signal(number, _on_signal)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _waiting and not _depth:
            _on_signal(_waiting[0], None)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _depth:
        _waiting.append(number)
        return
    _waiting.clear()
    _handlers[number](number, frame)


@contextmanager
def ended_by_signals() -> Iterator[list[int]]:
    """In here Ctrl-C raises KeyboardInterrupt and SIGTERM Terminated, unless somebody else handles them.

    Yields the numbers of those that came: whoever cleans up while the exception passes may raise another in its place.
    Afterwards all handlers are as they were.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        if before[signal.SIGTERM] is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, end)
        if before[signal.SIGINT] is signal.default_int_handler:
            signal.signal(signal.SIGINT, end)
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """End this process, and the group that it leads, with the one that started it, however that ends.

    Standard input is a pipe that the parent holds and never writes to. From here on, what reads it finds it empty.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return  # started by hand
    pipe = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait() -> None:
        os.read(pipe, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
