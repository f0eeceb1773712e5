"""Strategies as a diagnosis predicts them: the extreme of every direction, and what changes least and still fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from sweep.candidates import strategy_at
from sweep.diagnosis import (
    ALL,
    CHECKPOINT,
    DIRECTIONS,
    HYBRID,
    MICRO,
    MICRO_CHECKPOINT,
    OFFLOAD,
    SELECTIVE,
    Facts,
    Setting,
)
from sweep.errors import BadInput, NotEquivalent, NothingOffloaded
from sweep.outcomes import one_line
from sweep.predict import predict
from sweep.results import Prediction
from sweep.schema import Config, Granularity, Placement, StrategyConf, quarter_of
from sweep.strategy import accumulation_steps, check_blocks, micro_batch_size
from sweep.trial import check_known
from sweep.workload import Block, DataSource

#: As conf/strategy/ has them, without the block that offload keeps by default.
_RECOMPUTE = "strategy.checkpoint.granularity=blocks"
_EXTREME = {
    MICRO: ["strategy=micro_batch", "strategy.micro_batch_size=1"],
    SELECTIVE: ["strategy=checkpoint_selective"],
    CHECKPOINT: ["strategy=checkpoint"],
    OFFLOAD: ["strategy=offload", "strategy.offload.keep_last=0"],
    HYBRID: ["strategy=hybrid", "strategy.offload.keep_last=0"],
    MICRO_CHECKPOINT: ["strategy=checkpoint", "strategy.micro_batch_size=1"],
    ALL: ["strategy=hybrid", "strategy.offload.keep_last=0", "strategy.micro_batch_size=1"],
}
#: What the options of conf/strategy/ set.
_OPTION = {
    "micro_batch": [],
    "checkpoint": [_RECOMPUTE],
    "checkpoint_selective": ["strategy.checkpoint.granularity=selective"],
    "offload": ["strategy.offload.placement=all"],
    "hybrid": [_RECOMPUTE, "strategy.offload.placement=all"],
}
#: Milder forms of checkpointing, those that change least first; the extreme comes after them.
_MILDER = (
    ["strategy=checkpoint", "strategy.checkpoint.every_k=4"],
    ["strategy=checkpoint", "strategy.checkpoint.every_k=2"],
    ["strategy=checkpoint_selective"],
)

Progress = Callable[[str], None]


class Settings:
    """Predicts strategies of one workload."""

    def __init__(
        self,
        config: Config,
        data: DataSource,
        facts: Facts,
        outline: nn.Module,
        blocks: list[Block],
        progress: Progress,
    ) -> None:
        self.config, self.data, self.facts, self.blocks, self.progress = config, data, facts, blocks, progress
        self.predictions: dict[str, Prediction] = {}  # of the extremes, by direction
        self._outline = outline

    def extremes(self) -> list[Setting]:
        return [self.predicted(direction, _EXTREME[direction]) for direction in DIRECTIONS]

    def config_of(self, words: list[str]) -> Config:
        option = words[0].removeprefix("strategy=")
        strategy = strategy_at(replace(self.config, strategy=StrategyConf(name=option)), [*_OPTION[option], *words[1:]])
        assert strategy is not None, "only keys of the strategy are set here"
        return replace(self.config, strategy=strategy)

    def predicted(self, direction: str, words: list[str]) -> Setting:
        """One strategy as predicted, or why it does not apply."""
        config = self.config_of(words)
        name = name_of(config.strategy, self.config.workload.global_batch_size)
        found = Setting(direction, list(words), name, why_not=self._why_not(config.strategy))
        if found.why_not:
            return found
        self.progress(name)
        try:
            p = predict(config, self.data)
        except NothingOffloaded:
            o = config.strategy.offload
            found.why_not = f"offload would move nothing, with no saved tensor of {o.min_tensor_kib:g} KiB or more"
            return found
        except Exception as error:  # a strategy that this model cannot take is told as one that does not apply
            found.why_not = one_line(error)
            return found
        if words == _EXTREME[direction]:
            self.predictions[direction] = p
        return self._filled(found, p, config.strategy)

    def _filled(self, found: Setting, p: Prediction, strategy: StrategyConf) -> Setting:
        limits, b = self.facts.limits, self.config.workload.global_batch_size
        found.allocated_mib, found.reserved_mib = p.allocated_mib, p.reserved_mib
        found.saved_mib = self.facts.peak_mib - p.allocated_mib
        found.peak_phase, found.peak_operator = p.peak_phase, p.peak_operator
        found.room_mib = limits.room_mib(p.allocated_mib, p.reserved_mib)
        found.fits = p.fits and (found.room_mib is None or found.room_mib >= 0)
        found.micro_batch_size = micro_batch_size(strategy, b)
        found.accumulation_steps = accumulation_steps(strategy, b)
        found.recompute_flops_ratio = p.recompute_flops_ratio
        found.moved_mib = p.to_host_mib + p.from_host_mib
        found.transfer_ms = p.transfer_round_trip_ms
        found.host_mib = p.peak.host_peak_mib if p.peak is not None else 0.0
        return found

    def _why_not(self, strategy: StrategyConf) -> str:
        b = self.config.workload.global_batch_size
        if strategy.micro_batch_size is not None and b == 1:
            return "the global batch is one sample already"
        try:
            check_known(replace(self.config, strategy=strategy), self._outline)
            check_blocks(strategy, self.blocks)
        except BadInput as error:
            return f"{error.wrong}; {error.todo}"
        except NotEquivalent as error:
            return str(error)
        return ""

    def mildest(self) -> list[Setting]:
        """In each direction whose extreme fits, the setting that changes least and still fits.

        Without a limit, only the size of micro-batches that one would begin with; several directions at once only where
        none is enough alone.
        """
        if self.facts.fits:
            return []
        if self.facts.fits is None:
            first = [*_EXTREME[MICRO][:1], f"strategy.micro_batch_size={quarter_of(self.facts.global_batch_size)}"]
            usual = self.predicted(MICRO, first)
            return [] if usual.why_not else [usual]
        found = [s for s in map(self._mildest, (MICRO, CHECKPOINT, OFFLOAD)) if s is not None]
        return found or [s for s in map(self._mildest, (MICRO_CHECKPOINT, ALL)) if s is not None]

    def _mildest(self, direction: str) -> Setting | None:
        if direction == CHECKPOINT:
            extreme = self._can_fit(CHECKPOINT) or self._can_fit(SELECTIVE)
            milder = (self.predicted(CHECKPOINT, words) for words in _MILDER) if extreme is not None else ()
            return next((s for s in milder if not s.why_not and s.fits), extreme)
        extreme = self._can_fit(direction)
        if extreme is None:
            return None
        if direction == OFFLOAD:
            usual = self.predicted(OFFLOAD, ["strategy=offload"])
            return usual if not usual.why_not and usual.fits else extreme
        return self._largest_micro_batch(extreme)

    def _can_fit(self, direction: str) -> Setting | None:
        extreme = self.facts.extreme(direction)
        return extreme if extreme is not None and extreme.fits else None

    def _largest_micro_batch(self, extreme: Setting) -> Setting:
        """The largest micro-batch that divides the global batch and fits; peaks grow with it, so it is bisected."""
        b = self.config.workload.global_batch_size
        sizes, best = [n for n in range(2, b) if b % n == 0], extreme
        while sizes:
            middle = len(sizes) // 2
            words = [w for w in extreme.words if not w.startswith("strategy.micro_batch_size=")]
            tried = self.predicted(extreme.direction, [*words, f"strategy.micro_batch_size={sizes[middle]}"])
            if not tried.why_not and tried.fits:
                best, sizes = tried, sizes[middle + 1 :]
            else:
                sizes = sizes[:middle]
        return best


def name_of(strategy: StrategyConf, global_batch_size: int) -> str:
    """A strategy in words: `micro-batch 4 + checkpoint + offload all`."""
    c, o = strategy.checkpoint, strategy.offload
    said = []
    if strategy.micro_batch_size is not None:
        said.append(f"micro-batch {strategy.micro_batch_size}")
    if c.granularity is Granularity.selective:
        said.append("selective checkpoint")
    elif c.granularity is Granularity.blocks:
        said.append("checkpoint" if c.every_k == 1 else f"checkpoint one block in {c.every_k}")
    if o.placement is not Placement.none:
        said.append("offload all" if not o.keep_last else "offload all but the last block")
    return " + ".join(said) or "baseline"
