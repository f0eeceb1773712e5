"""What a search chooses from: the strategies that make sense for a workload, and only keys that mean something.

`suggest` is a custom search space of the sweeper: it asks a trial for one value after the other, so that a key which
means nothing beside the values so far (every_k without checkpointing) is never asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sweep.errors import BadInput
from sweep.schema import (
    CheckpointConf,
    Config,
    Granularity,
    OffloadConf,
    Placement,
    SearchSpaceConf,
    StrategyConf,
    typed,
)
from sweep.strategy import check_blocks, micro_batch_size
from sweep.trial import digest
from sweep.workload import build_outline, find_blocks

MICRO, GRANULARITY = "strategy.micro_batch_size", "strategy.checkpoint.granularity"
EVERY_K, PARTS = "strategy.checkpoint.every_k", "strategy.checkpoint.parts"
PLACEMENT, FIRST = "strategy.offload.placement", "strategy.offload.blocks"
MIN_KIB = "strategy.offload.min_tensor_kib"

#: A part of a block is worth recomputing by itself from this share of the block's parameters on.
SHARE_OF_A_PART = 0.1


@dataclass
class Choices:
    """The values of each key for one workload."""

    micro_batch_sizes: list[int]  # samples, the whole global batch first
    every_k: list[int] = field(default_factory=list)
    selective: bool = False
    parts: list[str] = field(default_factory=list)
    placements: list[str] = field(default_factory=lambda: ["none"])
    first_blocks: list[int] = field(default_factory=list)
    min_tensor_kib: list[float] = field(default_factory=list)

    @property
    def granularities(self) -> list[str]:
        kinds = {"blocks": bool(self.every_k), "selective": self.selective, "parts": bool(self.parts)}
        return ["none", *(kind for kind, there in kinds.items() if there)]


def choices(config: Config) -> Choices:
    """What the model and the batch allow of `config.search.space`."""
    w, s = config.workload, config.search.space
    sizes = s.micro_batch_sizes or [n for n in range(1, w.global_batch_size + 1) if w.global_batch_size % n == 0]
    found = Choices(sorted(set(sizes), reverse=True))
    blocks = find_blocks(build_outline(w), w.blocks)
    if not blocks:
        for key, asked in (("first_blocks", s.first_blocks), ("parts", s.parts)):
            if asked:
                todo = "name them with workload.blocks, or leave it out"
                raise BadInput(f"search.space.{key}", asked, "the model has no repeated blocks", todo)
        return found
    found.every_k = sorted({k for k in s.every_k if k <= len(blocks)}, reverse=True)
    found.selective = s.selective
    for part in s.parts or ():
        try:
            check_blocks(StrategyConf("", checkpoint=CheckpointConf(Granularity.parts, parts=[part])), blocks)
        except BadInput as error:
            raise BadInput("search.space.parts", part, error.wrong, error.todo) from error
    found.parts = s.parts if s.parts is not None else _parts_worth_it(blocks[0].module)
    _add_offload(found, s, config.strategy.offload, len(blocks))
    return found


def _parts_worth_it(block: Any) -> list[str]:
    whole = sum(p.numel() for p in block.parameters())
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in block.named_children()}
    worth = [name for name, size in sizes.items() if size >= SHARE_OF_A_PART * whole]
    return worth if len(worth) > 1 else []  # a part that is the whole block is no other strategy


def _add_offload(found: Choices, s: SearchSpaceConf, offload: OffloadConf, blocks: int) -> None:
    movable = blocks - offload.keep_last
    for n in s.first_blocks or ():
        if n > movable:
            wrong = f"the model has {blocks} blocks, of which {max(movable, 0)} may be offloaded"
            todo = f"give 1 to {movable}, or lower strategy.offload.keep_last" if movable > 0 else "leave it out"
            raise BadInput("search.space.first_blocks", n, wrong, todo)
    if movable < 1:
        return
    wanted = s.first_blocks or [round(blocks * share) for share in (0.25, 0.5, 0.75)]
    found.first_blocks = sorted({n for n in wanted if 0 < n <= movable})
    found.placements = [p.name for p in s.placements if p is not Placement.blocks or found.first_blocks]
    found.min_tensor_kib = sorted(set(s.min_tensor_kib)) or [offload.min_tensor_kib]


_choices: dict[str, Choices] = {}


def suggest(config: DictConfig, trial: Any) -> None:
    """Ask an Optuna trial for one strategy."""
    key = digest(OmegaConf.to_container(config, resolve=False))
    if key not in _choices:
        _choices[key] = choices(typed(config, whole=False))
    c = _choices[key]
    trial.suggest_categorical(MICRO, c.micro_batch_sizes)
    granularity = trial.suggest_categorical(GRANULARITY, c.granularities)
    if granularity == "blocks":
        trial.suggest_categorical(EVERY_K, c.every_k)
    if granularity == "parts":
        trial.suggest_categorical(PARTS, [f"[{part}]" for part in c.parts])
    placement = trial.suggest_categorical(PLACEMENT, c.placements)
    if placement == "blocks":
        trial.suggest_categorical(FIRST, [f"first:{n}" for n in c.first_blocks])
    if placement != "none":
        trial.suggest_categorical(MIN_KIB, c.min_tensor_kib)


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
