"""What a trial is called: its strategy, and what a person set beside it."""

from __future__ import annotations

from collections.abc import Sequence

from sweep.candidates import kind_of, name_of
from sweep.schema import Config, Granularity, Placement


def trial_name(config: Config, overrides: Sequence[str]) -> str:
    """What a person calls the trial: its strategy, and what was set beside it and has an effect."""
    s = config.strategy
    if config.search.name is not None:
        return name_of(s, config.workload.global_batch_size)
    idle = [
        *(["checkpoint."] if s.checkpoint.granularity is Granularity.none else []),
        *(["offload."] if s.offload.placement is Placement.none else []),
    ]
    said = [s.name]
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        name = key.removeprefix("strategy.")
        if name != key and not name.startswith(tuple(idle)):
            said.append(f"{name.rsplit('.', 1)[-1]}={value}")
    return " ".join(said)


def without_search(overrides: Sequence[str]) -> list[str]:
    """The words that make a trial, less those that make the search around it."""
    return [o for o in overrides if not o.lstrip("+~").startswith(("search=", "search.", "search/", "search@"))]


def name_strategy(config: Config) -> None:
    """A searched strategy is named after what it does, not after the option that the search began from."""
    if config.search.name is not None:
        config.strategy.name = kind_of(config.strategy, config.workload.global_batch_size)
