"""What a strategy is called: its kind, its description, and the name of a trial."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from omegaconf import OmegaConf

from sweep.config.schema import (
    MATMUL_AND_ATTENTION,
    CheckpointConf,
    Config,
    Granularity,
    OffloadConf,
    OffloadImplementation,
    Placement,
    StrategyConf,
    plain,
)
from sweep.results import TrialResult, from_dict


def micro_batch_size(strategy: StrategyConf, global_batch_size: int) -> int:
    """Samples per micro-batch; the last one of a window may be shorter."""
    return min(strategy.micro_batch_size or global_batch_size, global_batch_size)


def accumulation_steps(strategy: StrategyConf, global_batch_size: int) -> int:
    return -(-global_batch_size // micro_batch_size(strategy, global_batch_size))


#: How much a strategy changes, least first. Decides where neither time nor memory does.
CHANGES_LEAST_FIRST = ("baseline", "micro_batch", "checkpoint", "offload", "hybrid")


def strategy_of(result: TrialResult) -> StrategyConf:
    """What a trial did, from its stored config. One object for equal configs: not to be changed."""
    return _strategy(json.dumps(result.config.get("strategy") or {}, sort_keys=True))


@lru_cache(maxsize=4096)
def _strategy(text: str) -> StrategyConf:
    return from_dict(StrategyConf, json.loads(text))


def batch_of(result: TrialResult) -> int:
    """Samples per optimizer step; 1 where the stored config does not tell."""
    return (result.config.get("workload") or {}).get("global_batch_size") or 1


def change_rank(result: TrialResult) -> int:
    """Place in CHANGES_LEAST_FIRST, by what the trial does rather than by what it is called."""
    kind = kind_of(strategy_of(result), batch_of(result)).removesuffix("_selective")
    return CHANGES_LEAST_FIRST.index("baseline" if result.is_baseline else kind)


def describe(strategy: StrategyConf, global_batch_size: int) -> str:
    """What a candidate is called in tables: `micro 4, blocks/2, offload inputs`. The baseline is `baseline`."""
    said = []
    micro = micro_batch_size(strategy, global_batch_size)
    if micro < global_batch_size:
        said.append(f"micro {micro}")
    if strategy.checkpoint.granularity is not Granularity.none:
        said.append(describe_checkpoint(strategy.checkpoint))
    if strategy.offload.placement is not Placement.none:
        said.append(f"offload {describe_placement(strategy.offload)} >={strategy.offload.min_tensor_kib:g}K")
    return ", ".join(said) or "baseline"


def describe_checkpoint(c: CheckpointConf) -> str:
    """none, blocks, blocks/2 (every second), selective, segments of 2, or the parts."""
    if c.granularity is Granularity.parts:
        return "+".join(c.parts)
    if c.granularity is Granularity.segments:
        return f"segments of {c.segment_size}"
    every_k = f"/{c.every_k}" if c.every_k > 1 and c.granularity is not Granularity.none else ""
    return c.granularity.name + every_k


def describe_placement(o: OffloadConf) -> str:
    """none, inputs, all, or the chosen blocks, such as first:2."""
    return str(o.blocks) if o.placement is Placement.blocks else o.placement.name


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
    return changed(config.strategy, words)


def changed(strategy: StrategyConf, words: Sequence[str]) -> StrategyConf | None:
    """A strategy with words of the command line behind it; None where they set more than its keys."""
    node = OmegaConf.structured(strategy)
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if not key.startswith("strategy."):
            return None
        OmegaConf.update(node, key.removeprefix("strategy."), OmegaConf.create({"v": _parsed(value)})["v"])
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
        return describe(s, config.workload.global_batch_size)
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


# -- what is computed, whatever it is called --------------------------------------------------------------------------


def is_baseline(strategy: StrategyConf, global_batch_size: int) -> bool:
    """Whether a strategy changes nothing, whatever it is called."""
    return (
        micro_batch_size(strategy, global_batch_size) == global_batch_size
        and strategy.checkpoint.granularity is Granularity.none
        and strategy.offload.placement is Placement.none
    )


#: Fields of `measure` that change how the same is measured, and not what.
HOW_TO_MEASURE = ("isolate", "timeout_s", "verify", "verify_steps", "ledger", "interleave", "drift")


def fixed_id(config: Config) -> str:
    """Digest of what must be equal for two trials to be comparable. The data's version, which only the data know, is
    compared beside it (see `sweep.decide.verdict.by_comparison`)."""
    workload = {k: v for k, v in plain(config.workload).items() if k != "name"}
    device = {k: v for k, v in plain(config.device).items() if k not in ("source", "torch_name")}
    measure_conf = {k: v for k, v in plain(config.measure).items() if k not in HOW_TO_MEASURE}
    return digest([workload, device, measure_conf, config.mode.value])


def strategy_id(config: Config) -> str:
    """Digest of what the strategy does; equal with that of the baseline for all that change nothing."""
    return digest(effective(config))


def effective(config: Config) -> dict[str, Any]:
    """The keys of the strategy that mean something beside each other, the workload and the device, by their dotted
    names: two strategies with equal ones are one computation, whatever they are called."""
    s, on_cuda = config.strategy, config.device.type == "cuda"
    c, o = s.checkpoint, s.offload
    found: dict[str, Any] = {"micro_batch_size": micro_batch_size(s, config.workload.global_batch_size)}
    if c.granularity is not Granularity.none:
        found["checkpoint.granularity"] = c.granularity.name
        if c.granularity is Granularity.segments:
            found["checkpoint.segment_size"] = c.segment_size
        else:
            found["checkpoint.every_k"] = c.every_k
        if c.granularity is Granularity.parts:
            found["checkpoint.parts"] = sorted(set(c.parts))
        if c.granularity is Granularity.selective:
            kept = MATMUL_AND_ATTENTION if c.keep_ops is None else c.keep_ops
            found["checkpoint.keep_ops"] = sorted({op if op.count(".") > 1 else f"{op}.default" for op in kept})
    if o.placement is not Placement.none:
        found["offload.implementation"] = o.implementation.name
        if on_cuda:
            found["offload.pin_memory"] = o.pin_memory
        if o.implementation is OffloadImplementation.hooks:  # save_on_cpu moves whatever is saved
            found |= {"offload.placement": o.placement.name, "offload.keep_last": o.keep_last}
            found["offload.min_tensor_kib"] = float(o.min_tensor_kib)
            if o.placement is Placement.blocks:
                found["offload.blocks"] = str(o.blocks).replace(" ", "").strip("[]")
    return found


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:12]
