"""Makes a diagnosis: predicts the baseline, the extreme of every direction, and what else would lower the peak.

About a dozen predictions, each of the real step and strategy code on hollow tensors (sweep.trial.predict): nothing is
run, so any device can be diagnosed on any machine. What follows from the numbers is decided in sweep.diagnose.advice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import psutil
from torch import nn

from sweep.config.device import allocator_capacity
from sweep.config.schema import Config, DeviceConf, Dtype, StrategyConf, plain, quarter_of
from sweep.config.strategy_names import describe
from sweep.decide.reasons import LASTING
from sweep.diagnose.advice import (
    ALL,
    CHECKPOINT,
    DIRECTIONS,
    HYBRID,
    MICRO,
    MICRO_CHECKPOINT,
    OFFLOAD,
    SELECTIVE,
    Diagnosis,
    Facts,
    Limits,
    Setting,
    answer,
    feasible,
    order,
)
from sweep.errors import BadInput, NotEquivalent, NothingOffloaded, one_line
from sweep.memory.device import machine_has, resolve_device
from sweep.results import MIB, Category, Finding, Phase, Prediction
from sweep.strategy import accumulation_steps, check_blocks, micro_batch_size
from sweep.trial.check import check_known
from sweep.trial.predict import predict
from sweep.trial.what_if import config_at, what_if
from sweep.workload import Block, DataSource, build_data, build_outline, find_blocks

#: Without the block that offload keeps by default.
_EXTREME = {
    MICRO: ["strategy=micro_batch", "strategy.micro_batch_size=1"],
    SELECTIVE: ["strategy=checkpoint_selective"],
    CHECKPOINT: ["strategy=checkpoint"],
    OFFLOAD: ["strategy=offload", "strategy.offload.keep_last=0"],
    HYBRID: ["strategy=hybrid", "strategy.offload.keep_last=0"],
    MICRO_CHECKPOINT: ["strategy=checkpoint", "strategy.micro_batch_size=1"],
    ALL: ["strategy=hybrid", "strategy.offload.keep_last=0", "strategy.micro_batch_size=1"],
}
#: Milder forms of checkpointing, those that change least first; the extreme comes after them.
_MILDER = (
    ["strategy=checkpoint", "strategy.checkpoint.every_k=4"],
    ["strategy=checkpoint", "strategy.checkpoint.every_k=2"],
    ["strategy=checkpoint_selective"],
)
#: Which of a card's rates a workload computes at; torch's default for fp32 does not use TF32.
_RATE = {Dtype.fp32: "fp32", Dtype.bf16: "bf16", Dtype.amp_bf16: "bf16", Dtype.amp_fp16: "fp16"}

Progress = Callable[[str], None]


def diagnose(config: Config, overrides: Sequence[str] = (), *, progress: Progress = lambda what: None) -> Diagnosis:
    """Diagnose the baseline of `config`, whatever its strategy is.

    overrides: of the command line. progress: called with what is predicted next.

    A model that cannot be predicted gives a diagnosis with `answer="not known"` and the cause in `error`. Raises
    BadInput where the workload or the device is wrong.
    """
    started, now = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    config = replace(config, strategy=StrategyConf(name="baseline"), device=resolve_device(config.device))
    found = Diagnosis("not known", workload=config.workload.name, device=config.device.name, started_at=now)
    found.overrides = list(overrides)
    data = build_data(config.workload)
    progress("baseline")
    try:
        check_known(config, build_outline(config.workload))
        baseline = predict(config, data)
    except BadInput:
        raise
    except Exception as error:  # such as CannotPredict: the person's model, not this program, decides
        found.error = one_line(error)
    else:
        facts = found.facts = _facts(config, data, baseline, progress)
        found.answer, found.because = answer(facts)
        found.order, found.feasible = order(facts), feasible(facts)
    found.seconds = time.perf_counter() - started
    return found


def _facts(config: Config, data: DataSource, baseline: Prediction, progress: Progress) -> Facts:
    device, w = config.device, config.workload
    outline = build_outline(w)
    blocks = find_blocks(outline, w.blocks)
    here = machine_has(device)
    budget = {key: value for key, value in plain(config.budget).items() if key not in ("memory_mib", "min_evidence")}
    facts = Facts(
        baseline=baseline,
        limits=limits_of(config),
        floor=floor_of(baseline),
        gates={key: value for key, value in budget.items() if value is not None},
        global_batch_size=w.global_batch_size,
        blocks=len(blocks),
        here=here,
        host_free_mib=psutil.virtual_memory().available / MIB if here else None,
        compute_ms=compute_ms(device, w.dtype, baseline.flops_per_step),
    )
    settings = Settings(config, data, facts, outline, blocks, progress)
    facts.extremes = [settings.predicted(direction, _EXTREME[direction]) for direction in DIRECTIONS]
    facts.mildest = settings.mildest()
    progress("what else would help")
    facts.what_if = what_if(config, data, baseline)
    lowest = facts.lowest
    if lowest is not None:
        at_lowest, p = config_at(config, lowest.overrides), settings.predictions[lowest.direction]
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


def floor_of(baseline: Prediction) -> dict[str, float]:
    """The ledger's account, which leaves out what the allocator cannot use of its blocks (about a per mille)."""
    assert baseline.peak is not None, "a prediction always has one"
    alive = baseline.peak.at_phase_peak_mib.get(Phase.optimizer.value, {})
    return {c.value: alive[c.value] for c in (*LASTING, Category.temporary) if alive.get(c.value)}


def compute_ms(device: DeviceConf, dtype: Dtype, flops: float) -> float | None:
    """Milliseconds that `flops` take at the device's peak rate: theoretical, a real step takes longer."""
    tflops = device.peak_tflops.get(_RATE[dtype])
    return flops / (tflops * 1e9) if tflops and flops else None


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
        self.config, self.data, self.facts, self.progress = config, data, facts, progress
        self.predictions: dict[str, Prediction] = {}  # of the extremes, by direction
        self._outline, self._blocks, self._batch = outline, blocks, config.workload.global_batch_size

    def predicted(self, direction: str, overrides: list[str]) -> Setting:
        """One strategy as predicted, or why it does not apply."""
        config = config_at(self.config, overrides)
        s, b, limits = config.strategy, self._batch, self.facts.limits
        found = Setting(direction, list(overrides), describe(s, b))
        if s.micro_batch_size is not None and b == 1:
            # Described, it would be what it is without micro-batches.
            return replace(found, name=direction, refused=Finding("one_sample"))
        try:
            check_known(config, self._outline)
            check_blocks(s, self._blocks)
            self.progress(found.name)
            p = predict(config, self.data)
        except NothingOffloaded:
            found.refused = Finding("nothing_to_move", {"asked": s.offload.min_tensor_kib})
        except BadInput as error:
            found.refused = Finding("error", names={"error": f"{error.wrong}; {error.todo}"})
        except Exception as error:  # a strategy that this model cannot take is told as one that does not apply
            said = str(error) if isinstance(error, NotEquivalent) else one_line(error)
            found.refused = Finding("error", names={"error": said})
        if found.refused is not None:
            return found
        if overrides == _EXTREME[direction]:
            self.predictions[direction] = p
        room = limits.room_mib(p.allocated_mib, p.reserved_mib)
        return replace(
            found,
            allocated_mib=p.allocated_mib,
            reserved_mib=p.reserved_mib,
            saved_mib=self.facts.peak_mib - p.allocated_mib,
            peak_phase=p.peak_phase,
            fits=p.fits and (room is None or room >= 0),
            room_mib=room,
            micro_batch_size=micro_batch_size(s, b),
            accumulation_steps=accumulation_steps(s, b),
            recompute_flops_ratio=p.recompute_flops_ratio,
            moved_mib=p.to_host_mib + p.from_host_mib,
            transfer_ms=p.transfer_round_trip_ms,
            host_mib=p.peak.host_peak_mib if p.peak is not None else 0.0,
        )

    def mildest(self) -> list[Setting]:
        """In each direction whose extreme fits, the setting that changes least and still fits.

        Without a limit, only the size of micro-batches that one would begin with; several directions at once only where
        none is enough alone.
        """
        if self.facts.fits:
            return []
        if self.facts.fits is None:
            first = ["strategy=micro_batch", f"strategy.micro_batch_size={quarter_of(self._batch)}"]
            usual = self.predicted(MICRO, first)
            return [usual] if usual.refused is None else []
        found = [s for s in map(self._mildest, (MICRO, CHECKPOINT, OFFLOAD)) if s is not None]
        return found or [s for s in map(self._mildest, (MICRO_CHECKPOINT, ALL)) if s is not None]

    def _mildest(self, direction: str) -> Setting | None:
        directions = (CHECKPOINT, SELECTIVE) if direction == CHECKPOINT else (direction,)
        extreme = next((s for s in map(self.facts.extreme, directions) if s is not None and s.fits), None)
        if extreme is None or direction not in (CHECKPOINT, OFFLOAD):
            return None if extreme is None else self._largest_micro_batch(extreme)
        milder = _MILDER if direction == CHECKPOINT else (["strategy=offload"],)
        tried = (self.predicted(direction, overrides) for overrides in milder)
        return next((s for s in tried if s.refused is None and s.fits), extreme)

    def _largest_micro_batch(self, extreme: Setting) -> Setting:
        """The largest micro-batch that divides the global batch and fits; peaks grow with it, so it is bisected."""
        sizes, best = [n for n in range(2, self._batch) if self._batch % n == 0], extreme
        words = [w for w in extreme.overrides if not w.startswith("strategy.micro_batch_size=")]
        while sizes:
            middle = len(sizes) // 2
            tried = self.predicted(extreme.direction, [*words, f"strategy.micro_batch_size={sizes[middle]}"])
            if tried.refused is None and tried.fits:
                best, sizes = tried, sizes[middle + 1 :]
            else:
                sizes = sizes[:middle]
        return best
