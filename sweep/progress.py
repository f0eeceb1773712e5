"""Progress over the trials and over the steps of the one that runs; nothing where the output is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Display:
    """Two bars on a terminal. Lines printed through `console` go above them."""

    def __init__(self, trials: int | None, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._trials = self._bars.add_task("trials", total=trials, what="")
        self._steps: TaskID | None = None

    def start(self) -> None:
        self._bars.start()

    def stop(self) -> None:
        self._bars.stop()

    @contextmanager
    def trial(self, name: str, what: str = "preparing, predicting, verifying") -> Iterator[None]:
        self._bars.update(self._trials, what=name)
        self._steps = self._bars.add_task("steps", total=None, what=what)
        try:
            yield
        finally:
            self._bars.remove_task(self._steps)
            self._steps = None
            self._bars.advance(self._trials)

    def step(self, done: int, total: int, what: str) -> None:
        if self._steps is not None:
            self._bars.update(self._steps, completed=done, total=total, what=what)

    def predicting(self, what: str) -> None:
        """What is predicted now, of a number that is not known beforehand."""
        if self._steps is not None:
            self._bars.update(self._steps, what=f"predicting {what}")

    def one_more(self) -> None:
        """A trial that was not counted in the beginning: the baseline that a sweep leaves out."""
        total = self._bars.tasks[0].total
        if total is not None:
            self._bars.update(self._trials, total=total + 1)

    def repeats(self, total: int, description: str = "repeats") -> None:
        """The trials are done; from now on runs that repeat (or trace) them are counted."""
        self._bars.reset(self._trials, total=total, description=description, what="")

    def skip(self) -> None:
        """One that was counted and is not made."""
        self._bars.advance(self._trials)
