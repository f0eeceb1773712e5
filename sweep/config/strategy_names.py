"""What a trial is called: its strategy, and what a person set beside it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from sweep.config.schema import Config, Granularity, Placement, StrategyConf
from sweep.results import TrialResult


def micro_batch_size(strategy: StrategyConf, global_batch_size: int) -> int:
    """Samples per micro-batch; the last one of a window may be shorter."""
    return min(strategy.micro_batch_size or global_batch_size, global_batch_size)


def accumulation_steps(strategy: StrategyConf, global_batch_size: int) -> int:
    return -(-global_batch_size // micro_batch_size(strategy, global_batch_size))


#: How much a strategy changes, least first. Decides inside the noise.
CHANGES_LEAST_FIRST = ("baseline", "micro_batch", "checkpoint", "offload", "hybrid")


@dataclass(frozen=True)
class Knobs:
    """The strategy config of a trial, whichever of its keys are there."""

    granularity: str = "none"
    every_k: int = 1
    segment_size: int = 1
    placement: str = "none"
    keep_last: int = 1
    min_tensor_kib: float = 64.0
    pin_memory: bool = True
    save_on_cpu: bool = False
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    blocks: int | None = None

    @classmethod
    def of(cls, result: TrialResult) -> Knobs:
        strategy = result.config.get("strategy") or {}
        checkpoint, offload = strategy.get("checkpoint") or {}, strategy.get("offload") or {}
        # A result without its config still tells from its name which direction it took.
        named = _BY_NAME.get(result.strategy, {}) if not strategy else {}
        return cls(
            granularity=checkpoint.get("granularity", named.get("granularity", "none")),
            every_k=checkpoint.get("every_k", 1),
            segment_size=checkpoint.get("segment_size", 1),
            placement=offload.get("placement", named.get("placement", "none")),
            keep_last=offload.get("keep_last", 1),
            min_tensor_kib=offload.get("min_tensor_kib", 64.0),
            pin_memory=offload.get("pin_memory", True),
            save_on_cpu=offload.get("implementation") == "save_on_cpu",
            micro_batch_size=strategy.get("micro_batch_size"),
            global_batch_size=(result.config.get("workload") or {}).get("global_batch_size"),
            blocks=result.blocks,
        )

    @property
    def checkpoints(self) -> bool:
        return self.granularity != "none"

    @property
    def offloads(self) -> bool:
        return self.placement != "none"

    @property
    def splits(self) -> bool:
        """Whether the global batch is computed in parts."""
        m, b = self.micro_batch_size, self.global_batch_size
        return m is not None and (b is None or m < b)

    @property
    def samples_at_once(self) -> int | None:
        return self.micro_batch_size if self.micro_batch_size is not None else self.global_batch_size


_BY_NAME: dict[str, dict[str, str]] = {
    "checkpoint": {"granularity": "blocks"},
    "checkpoint_selective": {"granularity": "selective"},
    "offload": {"placement": "all"},
    "hybrid": {"granularity": "blocks", "placement": "inputs"},
}


def change_rank(result: TrialResult) -> int:
    """Place in CHANGES_LEAST_FIRST, by what the trial does rather than by what it is called."""
    knobs = Knobs.of(result)
    if result.is_baseline:
        kind = "baseline"
    elif knobs.checkpoints and knobs.offloads:
        kind = "hybrid"
    elif knobs.offloads:
        kind = "offload"
    elif knobs.checkpoints:
        kind = "checkpoint"
    else:
        kind = "micro_batch" if knobs.splits or result.strategy == "micro_batch" else "baseline"
    return CHANGES_LEAST_FIRST.index(kind)


def strategy_of(result: TrialResult) -> dict[str, Any]:
    """The strategy config without its name: what a trial does, whatever it is called."""
    return {k: v for k, v in (result.config.get("strategy") or {}).items() if k != "name"}


def with_overrides(result: TrialResult, action: str) -> dict[str, Any] | None:
    """The strategy config that the `strategy.*=value` overrides in `action` lead to; None where it names none."""
    strategy = copy.deepcopy(strategy_of(result))
    found = re.findall(r"\bstrategy\.([a-z_.]+)=([^\s(),;]+)", action)
    if not found or not strategy or "strategy=" in action:
        return None
    for key, value in found:
        *path, last = key.split(".")
        node = strategy
        for part in path:
            node = node.setdefault(part, {})
        node[last] = _value(value)
    return strategy


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def name_of(strategy: StrategyConf, global_batch_size: int) -> str:
    """What a candidate is called in tables: `micro 4, blocks/2, offload inputs`. The baseline is `baseline`."""
    c, o = strategy.checkpoint, strategy.offload
    said = []
    micro = micro_batch_size(strategy, global_batch_size)
    if micro < global_batch_size:
        said.append(f"micro {micro}")
    if c.granularity is Granularity.parts:
        said.append("+".join(c.parts))
    elif c.granularity is Granularity.segments:
        said.append(f"segments of {c.segment_size}")
    elif c.granularity is not Granularity.none:
        said.append(c.granularity.name + (f"/{c.every_k}" if c.every_k > 1 else ""))
    if o.placement is not Placement.none:
        where = str(o.blocks) if o.placement is Placement.blocks else o.placement.name
        said.append(f"offload {where} >={o.min_tensor_kib:g}K")
    return ", ".join(said) or "baseline"


def kind_of(strategy: StrategyConf, global_batch_size: int) -> str:
    """The kind of strategy that a candidate is, as the options of conf/strategy/ are named."""
    checkpoint, offload = strategy.checkpoint.granularity, strategy.offload.placement
    if checkpoint is not Granularity.none and offload is not Placement.none:
        return "hybrid"
    if offload is not Placement.none:
        return "offload"
    if checkpoint is not Granularity.none:
        return "checkpoint_selective" if checkpoint is Granularity.selective else "checkpoint"
    return "micro_batch" if micro_batch_size(strategy, global_batch_size) < global_batch_size else "baseline"


def strategy_at(config: Config, overrides: Mapping[str, str] | list[str]) -> StrategyConf | None:
    """The strategy of a candidate from its command-line words; None where they set more than keys of the strategy."""
    words = overrides if isinstance(overrides, list) else [f"{k}={v}" for k, v in overrides.items()]
    node = OmegaConf.structured(config.strategy)
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key.startswith("strategy."):
            OmegaConf.update(node, key.removeprefix("strategy."), OmegaConf.create({"v": _parsed(value)})["v"])
        else:
            return None
    found = OmegaConf.to_object(node)
    assert isinstance(found, StrategyConf)
    return found


@cache
def _parsed(value: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(f"v={value}").value()


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
