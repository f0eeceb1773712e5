"""What a strategy does, read from the resolved config that a result carries."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from typing import Any

from sweep.results import TrialResult

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
