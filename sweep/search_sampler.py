"""From `hydra.sweeper.sampler` to an Optuna sampler, or to a plain walk over a finite space."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from optuna.samplers import BaseSampler, RandomSampler

from sweep.errors import BadInput

KEY = "hydra.sweeper.sampler"
#: Exhaustive samplers, and whether they take the points in order. Walking the points ourselves serves enqueued points,
#: conditional keys, resuming and an end once all are known, none of which Optuna's own two serve together.
_WALKS = {"GridSampler": True, "BruteForceSampler": False}
#: Samplers that need a package beside Optuna's own.
_NEEDS = {"CmaEsSampler": "cmaes", "GPSampler": "torch"}
_SINGLE_OBJECTIVE = ("CmaEsSampler",)


class Sampler:
    """The sampler of a study, or a walk (`exhaustive`), then with `ordered` saying in which order."""

    def __init__(self, conf: Mapping[str, Any], seed: int | None, known_trials: int, objectives: int) -> None:
        """`seed` varies with the number of trials already known, so that a resumed search does not repeat itself."""
        target = str(conf.get("_target_") or "")
        name = target.rpartition(".")[2]
        if not target:
            raise BadInput(f"{KEY}._target_", None, "is missing", "give the import path of an Optuna sampler")
        self.name = name
        given = conf.get("seed")
        self.seed = seed if given is None else int(given)
        self.exhaustive = name in _WALKS
        self.ordered = _WALKS.get(name, False)
        if self.exhaustive:
            self.optuna: BaseSampler = RandomSampler(seed=self.seed)
            return
        if name in _SINGLE_OBJECTIVE and objectives > 1:
            raise BadInput(f"{KEY}._target_", target, f"cannot serve {objectives} objectives", "use tpe, nsgaii or gp")
        needed = _NEEDS.get(name)
        if needed is not None and importlib.util.find_spec(needed) is None:
            raise BadInput(f"{KEY}._target_", target, f"needs the package {needed}", f"pip install {needed}")
        self.optuna = _build(conf, target, None if self.seed is None else self.seed + known_trials)


def _build(conf: Mapping[str, Any], target: str, seed: int | None) -> BaseSampler:
    from hydra.utils import get_class, instantiate

    try:
        cls = get_class(target)
    except Exception as error:
        raise BadInput(f"{KEY}._target_", target, "cannot be imported", "give an Optuna sampler's path") from error
    takes = inspect.signature(cls).parameters
    # null means the sampler's own default, so that one config serves every version of Optuna.
    arguments = {k: v for k, v in conf.items() if v is not None and k != "seed" and not str(k).startswith("_")}
    for key in arguments:
        if key not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            known = ", ".join(takes)
            raise BadInput(f"{KEY}.{key}", arguments[key], f"{cls.__name__} takes no such argument", f"use {known}")
    if "seed" in takes:
        arguments["seed"] = seed
    try:
        sampler = instantiate({**arguments, "_target_": target}, _convert_="all")
    except Exception as error:
        raise BadInput(KEY, target, f"cannot be made ({error})", "correct its arguments") from error
    if not isinstance(sampler, BaseSampler):
        raise BadInput(f"{KEY}._target_", target, "is no Optuna sampler", "give one such as optuna.samplers.TPESampler")
    return sampler
