"""From the words of a command line to a search space, and from a sampled point back to the words of one job.

Hydra's own grammar decides what a word means. In particular a range leaves its stop out, for every sampler and for a
grid alike; `int(interval(a, b))` includes both ends, as optimizing sweepers have always read it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, QuotedString, RangeSweep
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial, FixedTrial

from sweep.config.schema import encode
from sweep.errors import BadInput


class Branch(BaseException):
    """A suggestion that a walk has no value for yet. Whoever suggests shall not catch it."""

    def __init__(self, name: str, candidates: list[Any] | None) -> None:
        self.name, self.candidates = name, candidates


class Walker(FixedTrial):
    """A trial with given values."""

    def __init__(self, point: dict[str, Any]) -> None:
        super().__init__(point)
        self._suggested_params = dict(point)

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        if name not in self._params:
            raise Branch(name, values_of(distribution))
        return self._params[name]


def walk(point: dict[str, Any], suggest: Callable[[BaseTrial], None]) -> Iterator[dict[str, Any]]:
    """All points that `suggest` leads to from a point, depth first. Raises ValueError where a key is continuous."""
    try:
        suggest(Walker(point))
    except Branch as branch:
        if branch.candidates is None:
            raise ValueError(f"{branch.name} is continuous") from None
        for value in branch.candidates:
            yield from walk({**point, branch.name: value}, suggest)
    else:
        yield point


def values_of(d: BaseDistribution) -> list[Any] | None:
    """All values in order; None for an interval of floats."""
    if isinstance(d, CategoricalDistribution):
        return list(d.choices)
    if isinstance(d, IntDistribution):
        return list(range(d.low, d.high + 1, d.step))
    assert isinstance(d, FloatDistribution)
    return None if d.step is None else [d.low + i * d.step for i in range(int((d.high - d.low) / d.step + 1e-9) + 1)]


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
        return list(self.values) if self.values else values_of(self.distribution)

    def texts_to_compose(self) -> list[str]:
        """All choices, or the ends of a range."""
        d = self.distribution
        if isinstance(d, CategoricalDistribution):
            return list(self.texts)
        assert isinstance(d, (IntDistribution, FloatDistribution))
        return list(dict.fromkeys([self.text(d.low), self.text(d.high)]))

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
        candidates = [p.candidates() for p in self.parameters.values()]
        finite = [c for c in candidates if c is not None]
        if len(finite) < len(candidates) or math.prod(map(len, finite)) > limit:
            return None
        points: Iterator[Point] = (dict(zip(self.parameters, values)) for values in itertools.product(*finite))
        if self.extend is not None:
            points = itertools.chain.from_iterable(walk(p, self.suggest_rest) for p in points)
        try:
            found = list(itertools.islice(points, limit + 1))
        except BadInput:
            raise
        except Exception:  # a continuous key, or the function needs more of a trial than a walk has
            return None
        return found if len(found) <= limit else None

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
