"""Makes a diagnosis: predicts the baseline, the extreme of every direction, and what else would lower the peak.

About a dozen predictions, each of the real step and strategy code on hollow tensors (sweep.trial.predict): nothing is
run, so any device can be diagnosed on any machine. What follows from the numbers is decided in sweep.diagnosis_*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import psutil
from torch import nn

from sweep.config.device import allocator_capacity, machine_has, resolve_device
from sweep.config.schema import Config, DeviceConf, Dtype, Granularity, Placement, StrategyConf, quarter_of
from sweep.config.strategy_names import strategy_at
from sweep.diagnose.advice import answer, feasible, fit_lines, order
from sweep.diagnose.facts import (
    ALL,
    CHECKPOINT,
    DIRECTIONS,
    HYBRID,
    LASTING,
    MICRO,
    MICRO_CHECKPOINT,
    OFFLOAD,
    SELECTIVE,
    Diagnosis,
    Facts,
    Floor,
    Gates,
    Limits,
    Setting,
)
from sweep.errors import BadInput, NotEquivalent, NothingOffloaded
from sweep.results import MIB, Category, Phase, Prediction
from sweep.strategy import accumulation_steps, check_blocks, micro_batch_size
from sweep.trial.outcomes import one_line
from sweep.trial.predict import predict
from sweep.trial.trial import check_known
from sweep.trial.what_if import what_if
from sweep.workload import Block, DataSource, build_data, build_outline, find_blocks

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


#: Which of a card's rates a workload computes at; torch's default for fp32 does not use TF32.
_RATE = {Dtype.fp32: "fp32", Dtype.bf16: "bf16", Dtype.amp_bf16: "bf16", Dtype.amp_fp16: "fp16"}


def diagnose(config: Config, words: Sequence[str] = (), *, progress: Progress = lambda what: None) -> Diagnosis:
    """Diagnose the baseline of `config`, whatever its strategy is.

    words: of the command line, for the commands to type; those of mode and strategy are left out.
    progress: called with what is predicted next.

    A model that cannot be predicted gives a diagnosis with `answer="not known"` and the cause in `error`. Raises
    BadInput where the workload or the device is wrong.
    """
    started, now = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    config = replace(config, strategy=StrategyConf(name="baseline"), device=resolve_device(config.device))
    data = build_data(config.workload)
    progress("baseline")
    try:
        check_known(config, build_outline(config.workload))
        baseline = predict(config, data)
    except BadInput:
        raise
    except Exception as error:  # such as CannotPredict: the person's model, not this program, decides
        found = Diagnosis(
            "not known", "Not known: the baseline cannot be predicted.", [], None, feasible=False, error=one_line(error)
        )
    else:
        facts = _facts(config, data, baseline, progress)
        facts.words = [w for w in words if not w.lstrip("+~").startswith(("mode=", "strategy", "compare="))]
        kind, sentence = answer(facts)
        found = Diagnosis(kind, sentence, fit_lines(facts), facts, order(facts), feasible(facts), _notes(facts))
    found.workload, found.device, found.started_at = config.workload.name, config.device.name, now
    found.seconds = time.perf_counter() - started
    return found


def _facts(config: Config, data: DataSource, baseline: Prediction, progress: Progress) -> Facts:
    device, w = config.device, config.workload
    outline = build_outline(w)
    blocks = find_blocks(outline, w.blocks)
    here = machine_has(device)
    limits = limits_of(config)
    facts = Facts(
        workload=w.name,
        device=device.name,
        baseline=baseline,
        limits=limits,
        floor=floor_of(baseline, limits),
        gates=Gates(**{name: getattr(config.budget, name) for name in Gates.__dataclass_fields__}),
        global_batch_size=w.global_batch_size,
        blocks=len(blocks),
        parameters=sum(p.numel() for p in outline.parameters()),
        here=here,
        host_free_mib=psutil.virtual_memory().available / MIB if here else None,
        compute_ms=compute_ms(device, w.dtype, baseline.flops_per_step),
    )
    settings = Settings(config, data, facts, outline, blocks, progress)
    facts.extremes = settings.extremes()
    facts.mildest = settings.mildest()
    progress("what else would help")
    facts.what_if = what_if(config, data, baseline)
    lowest = facts.lowest
    if lowest is not None:
        at_lowest, p = settings.config_of(lowest.words), settings.predictions[lowest.direction]
        facts.what_if_lowest = what_if(at_lowest, data, p, at_peak_only=feasible(facts))
    return facts


def limits_of(config: Config) -> Limits:
    """What the budget and the device allow. `config.device` is resolved."""
    usable = allocator_capacity(config.device)
    return Limits(
        budget_mib=config.budget.memory_mib,
        device_mib=None if usable is None else usable / MIB,
        capacity_mib=config.device.capacity_mib,
        context_mib=config.device.context_mib or 0.0,
        reserves=config.device.type == "cuda",
    )


def floor_of(baseline: Prediction, limits: Limits) -> Floor:
    """What is alive at the highest point of the optimizer's step: all of it stays, whatever the strategy.

    The ledger's account, which leaves out what the allocator cannot use of its blocks (about a per mille).
    """
    peak = baseline.peak
    assert peak is not None, "a prediction always has one"
    stays = [*LASTING, Category.temporary]
    alive = peak.at_phase_peak_mib.get(Phase.optimizer.value, {})
    by_category = {c.value: alive[c.value] for c in stays if alive.get(c.value)}
    total = sum(by_category.values())
    how = "the highest point of the optimizer's step, as the ledger of the predicted step has it"
    operator = baseline.peak_operator if baseline.peak_phase == Phase.optimizer.value else ""
    return Floor(total, by_category, operator, how, limits.room_mib(total, total))


def compute_ms(device: DeviceConf, dtype: Dtype, flops: float) -> float | None:
    """Milliseconds that `flops` take at the device's peak rate: theoretical, a real step takes longer."""
    tflops = device.peak_tflops.get(_RATE[dtype])
    return flops / (tflops * 1e9) if tflops and flops else None


def _notes(facts: Facts) -> list[str]:
    notes = []
    if not facts.here:
        notes.append(f"This machine has no {facts.device}: type the commands where it is, or add mode=predict to them.")
    if not facts.blocks:
        notes.append("No repeated blocks were found in the model; name them with workload.blocks='layers.*'.")
    notes += [f"Less sure: {caveat}." for caveat in facts.baseline.caveats]
    return notes
