"""Makes a diagnosis: predicts the baseline, the extreme of every direction, and what else would lower the peak.

About a dozen predictions, each of the real step and strategy code on hollow tensors (sweep.predict): nothing is run, so
any device can be diagnosed on any machine. What follows from the numbers is decided in sweep.diagnosis_*.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import psutil

from sweep.diagnose_settings import Progress, Settings
from sweep.diagnosis import LASTING, Diagnosis, Facts, Floor, Gates, Limits
from sweep.diagnosis_answer import answer, feasible, fit_lines
from sweep.diagnosis_order import order
from sweep.errors import BadInput
from sweep.memory.device import allocator_capacity, machine_has, resolve_device
from sweep.outcomes import one_line
from sweep.predict import predict
from sweep.results import MIB, Category, Phase, Prediction
from sweep.schema import Config, DeviceConf, Dtype, StrategyConf
from sweep.trial import check_known
from sweep.what_if import what_if
from sweep.workload import DataSource, build_data, build_outline, find_blocks

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
