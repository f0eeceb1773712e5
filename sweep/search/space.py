"""From the words of a command line to a search space, and from a sampled point back to the words of one job.

Hydra's own grammar decides what a word means. In particular a range leaves its stop out, for every sampler and for a
grid alike; `int(interval(a, b))` includes both ends, as optimizing sweepers have always read it.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
)
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import BaseTrial

from sweep.config.schema import encode
from sweep.errors import BadInput


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


#: A custom search space: gets the composed config and a trial, suggests further keys. Conditions are plain `if`s.
Extend = Callable[[DictConfig, BaseTrial], None]
#: One point: override keys (with their + where they have one) and the values that Optuna knows them by.
Point = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One searched key: how Optuna samples it and how each value is written on a command line."""

    key: str  # as in an override: "db", "db@other", "a.b", "+new"
    distribution: BaseDistribution
    texts: tuple[str, ...] = ()  # categorical: Hydra's text of each choice, in the order of the choices
    values: tuple[float, ...] = ()  # range over floats: the exact values, so that no rounding reaches the job
    shuffled: bool = False

    def text(self, value: Any) -> str:
        if isinstance(self.distribution, CategoricalDistribution):
            return self.texts[int(self.distribution.to_internal_repr(value))]
        if self.values:
            value = min(self.values, key=lambda v: abs(v - value))
        return encode(int(value) if isinstance(self.distribution, IntDistribution) else float(value))

    def candidates(self) -> list[Any] | None:
        """All values, in the order in which they were written; None for an interval of floats."""
        d = self.distribution
        if isinstance(d, CategoricalDistribution):
            return list(d.choices)
        if self.values:
            return list(self.values)
        return list(range(d.low, d.high + 1, d.step)) if isinstance(d, IntDistribution) else None

    def label(self, value: Any) -> Any:
        """The value by which Optuna knows what a person wrote, such as `[1, 2]`. BadInput if it is no candidate."""
        d = self.distribution
        if isinstance(d, CategoricalDistribution):
            for choice, text in zip(d.choices, self.texts):
                if text == encode(value) or (type(choice) is type(value) and choice == value):
                    return choice
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and d._contains(float(value)):
            return int(value) if isinstance(d, IntDistribution) else float(value)
        raise BadInput(self.key, value, "is not in the search space", f"give a value of {describe(self)}")


@dataclass
class Space:
    """What is searched, what is fixed, and in which order the words stood."""

    words: list[Parameter | str]  # a string is a fixed override, taken over as it is
    extend: Extend | None = None
    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}))  # handed to `extend`
    extend_name: str = ""

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        return {w.key: w for w in self.words if isinstance(w, Parameter)}

    @cached_property
    def fixed(self) -> list[str]:
        return [w for w in self.words if isinstance(w, str)]

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {key: p.distribution for key, p in self.parameters.items()}

    def suggest_rest(self, trial: BaseTrial) -> None:
        """Let the custom search space suggest what it adds to a trial that has the other keys already."""
        if self.extend is not None:
            self.extend(self.config, trial)

    def overrides(self, point: Mapping[str, Any]) -> list[str]:
        """The words of one job: every word in its place, the custom search space's keys at the end."""
        parameters = self.parameters
        fixed = {bare(w.partition("=")[0]) for w in self.fixed}
        said = [f"{w.key}={w.text(point[w.key])}" if isinstance(w, Parameter) else w for w in self.words]
        rest = [k for k in point if k not in parameters and bare(k) not in fixed]
        return said + [f"{k}={point[k] if isinstance(point[k], str) else encode(point[k])}" for k in rest]

    def identity(self, point: Mapping[str, Any]) -> tuple[str, ...]:
        """Equal for two points exactly when their jobs get the same words."""
        return tuple(sorted(self.overrides(point)))

    def points(self, limit: int) -> list[Point] | None:
        """Every point of a finite space, the first key changing slowest; None if it is not finite, or above `limit`."""
        candidates = {key: p.candidates() for key, p in self.parameters.items()}
        if any(c is None for c in candidates.values()):
            return None
        if math.prod(len(c) for c in candidates.values() if c is not None) > limit:
            return None
        products = itertools.product(*(c for c in candidates.values() if c is not None))
        static = [dict(zip(candidates, values)) for values in products]
        if self.extend is None:
            return static
        try:
            return list(walk(static, self.suggest_rest, limit))
        except BadInput:
            raise
        except Exception:  # Continuous, TooMany, or it needs more of a trial than a walk has
            return None

    def label(self, point: Mapping[str, Any]) -> Point:
        """A point as a person writes it, in Optuna's values. Keys of a custom search space are taken as they are."""
        by_bare = {bare(key): p for key, p in self.parameters.items()}
        found: Point = {}
        for key, value in point.items():
            parameter = by_bare.get(bare(str(key)))
            if parameter is None and self.extend is None:
                known = ", ".join(self.parameters) or "nothing"
                raise BadInput("hydra.sweeper.enqueue", key, "is not searched", f"searched are: {known}")
            found[parameter.key if parameter else str(key)] = parameter.label(value) if parameter else value
        return found

    def describe(self) -> dict[str, str]:
        """What must stay the same within a study, per key, in words that tell any two spaces apart."""
        said = {key: describe(p) for key, p in self.parameters.items()}
        if self.extend_name:
            said["hydra.sweeper.custom_search_space"] = self.extend_name
        return said


def read_space(
    params: Mapping[str, Any],
    arguments: Sequence[str],
    loader: ConfigLoader | None,
    extend: Extend | None = None,
    config: DictConfig | None = None,
    extend_name: str = "",
) -> Space:
    """The space of `hydra.sweeper.params` and a command line, which wins: a fixed override fixes a searched key."""
    parser = OverridesParser.create(config_loader=loader)
    lines = [f"{key}={value if isinstance(value, str) else encode(value)}" for key, value in params.items()]
    words: dict[str, Parameter | str] = {}
    for override in parser.parse_overrides([*lines, *arguments]):
        key = override.get_key_element()
        if not override.is_delete():
            for other in [k for k, w in words.items() if bare(k) == bare(key)]:
                # `+new=1 new=2,3` means something to Hydra, so only what is said twice or searched before is dropped.
                if other == key or isinstance(words[other], Parameter):
                    del words[other]
        words[key] = read_parameter(override) if override.is_sweep_override() else str(override.input_line)
    return Space(list(words.values()), extend, config if config is not None else OmegaConf.create({}), extend_name)


def read_parameter(override: Override) -> Parameter:
    key, written = override.get_key_element(), override.get_value_string()
    value: Any = override.value()
    if override.is_choice_sweep():
        chosen: Iterable[Any] = value.list if isinstance(value, ChoiceSweep) else override.sweep_iterator()
        return _choice(key, written, list(chosen), bool(getattr(value, "shuffle", False)))
    if isinstance(value, RangeSweep):
        return _range(key, written, value)
    assert isinstance(value, IntervalSweep)
    return _interval(key, written, value)


def _choice(key: str, written: str, elements: list[Any], shuffled: bool) -> Parameter:
    texts = list(dict.fromkeys(encode(e) for e in elements))
    if not texts:
        raise BadInput(key, written, "matches no option", "see --help for the options of a group")
    first = {encode(e): e for e in reversed(elements)}
    labels = [_optuna_value(first[t]) for t in texts]
    # Optuna finds a choice by ==, under which 1, 1.0 and True are one.
    if len(set(labels)) < len(labels):
        labels = list(texts)
    return Parameter(key, CategoricalDistribution(labels), tuple(texts), shuffled=shuffled)


def _range(key: str, written: str, sweep: RangeSweep) -> Parameter:
    values = list(sweep.range())
    if not values:
        raise BadInput(key, written, "is empty", "give a stop beyond the start; a range leaves its stop out")
    low, high, step = min(values), max(values), abs(sweep.step) if len(values) > 1 else 1
    log = "log" in sweep.tags
    if all(isinstance(v, int) for v in values):
        if log and step != 1:
            raise BadInput(key, written, "has a step and the tag log", "leave out one of them")
        _positive_if_log(key, written, log, low)
        distribution: BaseDistribution = IntDistribution(low, high, log=log, step=int(step))
        return Parameter(key, distribution, shuffled=sweep.shuffle)
    if log:
        raise BadInput(key, written, "has a step and the tag log", "use tag(log, interval(low, high))")
    exact = tuple(float(v) for v in values)
    return Parameter(key, FloatDistribution(low, high, step=float(step)), values=exact, shuffled=sweep.shuffle)


def _interval(key: str, written: str, sweep: IntervalSweep) -> Parameter:
    low, high, log = sweep.start, sweep.end, "log" in sweep.tags
    assert low is not None
    assert high is not None
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise BadInput(key, written, "is no interval", "give a finite start and an end that is not below it")
    _positive_if_log(key, written, log, low)
    if isinstance(low, int) and isinstance(high, int):
        return Parameter(key, IntDistribution(low, high, log=log))
    return Parameter(key, FloatDistribution(float(low), float(high), log=log))


def _positive_if_log(key: str, written: str, log: bool, low: float) -> None:
    if log and low <= 0:
        raise BadInput(key, written, "reaches zero or below with the tag log", "start above zero")


def _optuna_value(element: Any) -> Any:
    """What Optuna may store: its own scalar types as they are, anything else as Hydra's text."""
    if isinstance(element, QuotedString):
        return element.text
    if isinstance(element, float) and not math.isfinite(element):
        return encode(element)
    return element if element is None or isinstance(element, (bool, int, float, str)) else encode(element)


def bare(key: str) -> str:
    """A key without the prefix that says whether it is added, forced or deleted."""
    return key.lstrip("+~")


def describe(parameter: Parameter) -> str:
    """The values of a parameter as a person would write them."""
    d = parameter.distribution
    if isinstance(d, CategoricalDistribution):
        return ",".join(parameter.texts)
    assert isinstance(d, (IntDistribution, FloatDistribution))
    kind = "int" if isinstance(d, IntDistribution) else "float"
    step = f" in steps of {d.step:g}" if d.step not in (None, 1) else ""
    return f"{kind} from {d.low!r} to {d.high!r}{step}{', log' if d.log else ''}"


def iter_texts(space: Space) -> Iterator[tuple[str, list[str]]]:
    """Per searched key, the words that it may become: all choices, or the ends of a range."""
    for key, p in space.parameters.items():
        d = p.distribution
        if isinstance(d, CategoricalDistribution):
            yield key, list(p.texts)
        else:
            assert isinstance(d, (IntDistribution, FloatDistribution))
            yield key, list(dict.fromkeys([p.text(d.low), p.text(d.high)]))
