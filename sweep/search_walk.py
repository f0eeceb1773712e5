"""Every point of a space that is written as a function: the function is called again and again, each time taking the
next branch, as an odometer turns.

The function must suggest the same keys whenever it has got the same values so far, which Optuna's samplers need, too.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from optuna.trial import BaseTrial


class Continuous(Exception):
    """The function suggests a float without a step."""


class TooMany(Exception):
    """There are more points than asked for."""


def walk(
    starts: Iterable[dict[str, Any]], suggest: Callable[[BaseTrial], None], limit: int
) -> Iterator[dict[str, Any]]:
    """All points that `suggest` leads to from each start, depth first. Raises Continuous or TooMany."""
    count = 0
    for start in starts:
        turn: list[int] = []
        while True:
            trial = Walker(start, turn)
            suggest(trial)
            count += 1
            if count > limit:
                raise TooMany
            yield trial.params
            # Turn the last wheel that has not come round, and take off those behind it.
            turn = list(trial.taken)
            while turn and turn[-1] + 1 >= trial.sizes[len(turn) - 1]:
                turn.pop()
            if not turn:
                break
            turn[-1] += 1


class Walker(BaseTrial):
    """A trial that answers each suggestion with the candidate of a given index, the first where none is given."""

    def __init__(self, start: dict[str, Any], turn: Sequence[int]) -> None:
        self._params = dict(start)
        self._turn = turn
        self.taken: list[int] = []
        self.sizes: list[int] = []
        self._attrs: dict[str, Any] = {}

    def _take(self, name: str, candidates: Sequence[Any]) -> Any:
        if name not in self._params:
            depth = len(self.taken)
            index = self._turn[depth] if depth < len(self._turn) else 0
            self.taken.append(index)
            self.sizes.append(len(candidates))
            self._params[name] = candidates[index]
        return self._params[name]

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._take(name, list(choices))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self._take(name, range(low, high + 1, step)))

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        if step is None:
            raise Continuous
        return float(self._take(name, [low + i * step for i in range(int((high - low) / step + 1e-9) + 1)]))

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        return self.suggest_float(name, low, high, step=q)

    def report(self, value: float, step: int) -> None: ...

    def should_prune(self) -> bool:
        return False

    def set_user_attr(self, key: str, value: Any) -> None:
        self._attrs[key] = value

    def set_constraint(self, key: str, value: float) -> None: ...

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._params)

    @property
    def distributions(self) -> dict[str, Any]:
        return {}

    @property
    def user_attrs(self) -> dict[str, Any]:
        return dict(self._attrs)

    @property
    def datetime_start(self) -> datetime.datetime | None:
        return None

    @property
    def number(self) -> int:
        return 0
