"""Made-up trial results of a realistic shape, for tests of what is decided and reported from results."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

from sweep.results import (
    Conditions,
    Holder,
    Measurement,
    Outcome,
    Peak,
    Prediction,
    Run,
    Trace,
    TrialResult,
    Verification,
)

#: The strategy part of the config, as conf/strategy/ composes it for a global batch of 16.
STRATEGIES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "micro_batch": {"micro_batch_size": 4},
    "checkpoint": {"checkpoint": {"granularity": "blocks", "every_k": 1}},
    "checkpoint_selective": {"checkpoint": {"granularity": "selective", "every_k": 1}},
    "offload": {"offload": {"placement": "all", "min_tensor_kib": 64, "keep_last": 1, "pin_memory": True}},
    "hybrid": {
        "checkpoint": {"granularity": "blocks", "every_k": 1},
        "offload": {"placement": "all", "min_tensor_kib": 64, "keep_last": 1, "pin_memory": True},
    },
}


def config(strategy: str, **knobs: Any) -> dict[str, Any]:
    """A resolved config; `knobs` are dotted keys of the strategy with `__` for the dot."""
    node: dict[str, Any] = {
        "name": strategy,
        "micro_batch_size": None,
        "checkpoint": {"granularity": "none", "every_k": 1, "segment_size": 1, "parts": []},
        "offload": {
            "placement": "none", "min_tensor_kib": 64, "keep_last": 1, "pin_memory": True,
            "implementation": "hooks",
        },
    }
    for key, value in copy.deepcopy(STRATEGIES.get(strategy, {})).items():
        node[key] = {**node[key], **value} if isinstance(value, dict) else value
    for key, value in knobs.items():
        *path, last = key.split("__")
        target = node
        for part in path:
            target = target[part]
        target[last] = value
    return {
        "workload": {"name": "gpt_tiny", "global_batch_size": 16, "seq_len": 128, "optimizer": {"lr": 1e-3}},
        "strategy": node,
        "measure": {"warmup_steps": 2, "steps": 5, "repeats": 3, "verify": True, "ledger": True, "timeout_s": 600.0},
        "device": {"name": "cpu", "capacity_mib": None}, "tracking": {"enabled": True, "uri": None},
        "budget": {"memory_mib": None, "min_evidence": "auto"},
    }  # fmt: skip


def peak(mib: float, phase: str = "backward", **at_peak: float) -> Peak:
    """A peak: 60 MiB last through the step unless `at_peak` says otherwise, most of the rest are activations."""
    shares = dict(at_peak) or {
        "parameter": 20.0, "gradient": 10.0, "optimizer_state": 30.0, "activation": max(0.0, mib - 70.0),
        "temporary": 8.0, "input": 2.0,
    }  # fmt: skip
    operator = "aten._foreach_sqrt" if phase == "optimizer" else "aten._log_softmax_backward_data"
    largest = [
        Holder("blocks.3.mlp", "activation", shares.get("activation", 0.0) * 0.3, 4),
        Holder("head", "activation", shares.get("activation", 0.0) * 0.2, 1),
        Holder("tok_embed.weight", "parameter", shares.get("parameter", 0.0) * 0.5, 1),
    ]
    return Peak(mib, phase, operator, "head", shares, largest, {"forward": mib * 0.9, phase: mib}, 0.0)


def measurement(
    peak_mib: float, step_ms: float, evidence: str = "cpu", spread: float = 0.02, **changes: Any
) -> Measurement:
    loss = [5.6 - 0.25 * i for i in range(10)]
    values: dict[str, Any] = {
        "evidence": evidence,
        "steps": 5,
        "repeats": 3,
        "step_ms": step_ms,
        "step_ms_low": step_ms * (1 - spread),
        "step_ms_high": step_ms * (1 + spread),
        "samples_per_s": 16000.0 / step_ms,
        "tokens_per_s": 128 * 16000.0 / step_ms,
        "peak_allocated_mib": peak_mib,
        "peak_reserved_mib": peak_mib * 1.05 if evidence in ("measured", "smoke") else None,
        "peak": peak(peak_mib),
        "phases_ms": {
            "data": 0.01 * step_ms, "forward": 0.33 * step_ms, "backward": 0.6 * step_ms,
            "optimizer": 0.06 * step_ms,
        },
        "train_loss": loss,
        "eval_loss_before": 5.62,
        "eval_loss": 3.21,
    }
    return Measurement(**{**values, **changes})


def prediction(
    allocated_mib: float, fits: bool = True, capacity_mib: float | None = 16000.0, **changes: Any
) -> Prediction:
    found = changes.pop("peak", None) or peak(allocated_mib)
    headroom = None if capacity_mib is None else capacity_mib - allocated_mib * 1.04 - 400
    values: dict[str, Any] = {
        "device": "rtx_4090", "allocated_mib": allocated_mib, "reserved_mib": allocated_mib * 1.04, "fits": fits,
        "headroom_mib": headroom, "capacity_mib": capacity_mib, "context_mib": 400.0,
        "peak": found, "peak_phase": found.phase,
        "peak_operator": found.operator, "at_peak_mib": found.at_peak_mib, "flops_per_step": 1e12,
    }  # fmt: skip
    return Prediction(**{**values, **changes})


def verified(grad_rel_err: float = 3.1e-7, passed: bool = True, **changes: Any) -> Verification:
    return Verification(passed, 1e-4, max_rel_err=grad_rel_err, loss_rel_err=1e-8, grad_rel_err=grad_rel_err, **changes)


def trial(
    strategy: str,
    peak_mib: float | None = None,
    step_ms: float = 100.0,
    *,
    evidence: str = "cpu",
    outcome: str = "ok",
    fixed_id: str = "f1",
    mode: str = "measure",
    knobs: dict[str, Any] | None = None,
    measure: dict[str, Any] | None = None,
    **changes: Any,
) -> TrialResult:
    """A trial that ran (`peak_mib` given and outcome ok), or that ended otherwise.

    `measure` changes the measurement, `knobs` the strategy config (`checkpoint__every_k=2`), the rest the result.
    """
    is_baseline = strategy == "baseline"
    ran = outcome == Outcome.ok.value and mode == "measure" and peak_mib is not None
    values: dict[str, Any] = {
        "name": strategy, "strategy": strategy, "workload": "gpt_tiny",
        "device": "cpu" if evidence == "cpu" else "rtx_4090", "outcome": outcome, "evidence": evidence,
        "is_baseline": is_baseline, "fixed_id": fixed_id, "strategy_id": changes.get("name", strategy),
        "mode": mode, "config": config(strategy, **(knobs or {})), "overrides": [f"strategy={strategy}"],
        "command": f"python train.py strategy={strategy}", "blocks": 8, "parameters": 1_640_000,
        "mlflow_run_id": f"run-{strategy}", "started_at": "2025-01-01T00:00:00Z",
    }  # fmt: skip
    if ran and peak_mib is not None:
        values["measurement"] = measurement(peak_mib, step_ms, evidence, **(measure or {}))
        values["verification"] = None if is_baseline else verified()
    if mode == "predict" and peak_mib is not None:
        values["prediction"] = prediction(peak_mib)
    result = TrialResult(**{**values, **changes})
    result.config["mode"] = mode
    return result


def sweep_of_six(evidence: str = "cpu") -> list[TrialResult]:
    """All six strategies on one workload, each as it usually comes out."""
    return [
        trial("baseline", 312.4, 118.2, evidence=evidence), trial("micro_batch", 128.0, 131.0, evidence=evidence),
        trial("checkpoint", 145.5, 152.3, evidence=evidence),
        trial("checkpoint_selective", 214.7, 130.6, evidence=evidence),
        trial("offload", 121.3, 171.9, evidence=evidence, measure={"to_host_mib": 190.0, "from_host_mib": 190.0}),
        trial("hybrid", 109.8, 166.4, evidence=evidence, measure={"to_host_mib": 40.0, "from_host_mib": 40.0}),
    ]  # fmt: skip


#: What each strategy leaves alive at the peak, in MiB by category, and where its peak lies then.
AT_PEAK: dict[str, tuple[str, dict[str, float]]] = {
    "baseline": ("backward", {"parameter": 20.0, "optimizer_state": 40.0, "activation": 230.0, "temporary": 22.4}),
    "micro_batch": ("backward", {"parameter": 20.0, "gradient": 20.0, "optimizer_state": 40.0, "activation": 48.0}),
    "checkpoint": ("optimizer", {"parameter": 20.0, "gradient": 20.0, "optimizer_state": 40.0, "temporary": 65.5}),
    "checkpoint_selective": (
        "backward",
        {"parameter": 20.0, "gradient": 5.0, "optimizer_state": 40.0, "activation": 110.0, "temporary": 39.7},
    ),
    "offload": ("backward", {"parameter": 20.0, "optimizer_state": 40.0, "activation": 20.0, "temporary": 41.3}),
    "hybrid": ("backward", {"parameter": 20.0, "gradient": 9.8, "optimizer_state": 40.0, "temporary": 40.0}),
}
#: Share of the baseline's step time by phase, as it is with each strategy. Sums to the ratio of the step times.
PHASES: dict[str, dict[str, float]] = {
    "baseline": {"data": 0.01, "forward": 0.33, "backward": 0.6, "optimizer": 0.06},
    "micro_batch": {"data": 0.01, "forward": 0.37, "backward": 0.66, "optimizer": 0.06},
    "checkpoint": {"data": 0.01, "forward": 0.33, "recompute": 0.3, "backward": 0.6, "optimizer": 0.06},
    "checkpoint_selective": {"data": 0.01, "forward": 0.34, "recompute": 0.1, "backward": 0.6, "optimizer": 0.06},
    "offload": {"data": 0.01, "forward": 0.35, "transfer": 0.35, "backward": 0.65, "optimizer": 0.06},
    "hybrid": {"data": 0.01, "forward": 0.33, "recompute": 0.3, "transfer": 0.1, "backward": 0.6, "optimizer": 0.06},
}
#: Held-out loss over the baseline's; what computes the same bits has the same loss.
QUALITY = {"micro_batch": 0.004}


def runs(
    step_ms: float, seeds: int = 3, repeats: int = 3, shift: float = 0.0, noise: float = 0.02, loss_noise: float = 0.01
) -> list[Run]:
    """Repeats that are interleaved with those of other trials, over seeds in turn. Deterministic.

    shift: of all losses against the baseline's; loss_noise: how far they scatter about it over seeds.
    """
    draw = random.Random(f"{step_ms} {shift}")
    found = []
    for i in range(repeats):
        seed = i % seeds
        start = 5.6 + 0.1 * math.sin(1 + 7 * seed)
        own = shift + (loss_noise * math.sin(3 + 11 * seed) if shift else 0.0)
        curve = [start * 0.93**k + 0.05 * math.sin(5 * seed + k) + own for k in range(7)]
        times = [step_ms * (1 + noise * draw.gauss(0, 1)) for _ in range(5)]
        conditions = Conditions(cpu_others=0.1)
        found.append(
            Run(
                index=i, seed=seed, started_at=f"2025-01-01T00:0{i}:00Z", step_times_ms=times, train_loss=curve,
                eval_loss_before=5.62, eval_loss=curve[-1] * 0.98 if i < seeds else None, conditions=conditions,
            )
        )
    return found


def sweep_over_seeds(evidence: str = "cpu", seeds: int = 3) -> list[TrialResult]:
    """The six strategies with interleaved repeats over seeds, peaks by category, phases, bytes moved and traces."""
    base_ms, found = 118.2, []
    for strategy, (phase, at_peak) in AT_PEAK.items():
        ratio = sum(PHASES[strategy].values())
        step_ms, moved = base_ms * ratio, {"offload": 190.0, "hybrid": 40.0}.get(strategy, 0.0)
        own = runs(step_ms, seeds, shift=QUALITY.get(strategy, 0.0))
        times = sorted(t for run in own for t in run.step_times_ms)
        of_peak = peak(sum(at_peak.values()), phase, **at_peak)
        of_peak.host_peak_mib = moved
        changes = {
            "peak": of_peak, "step_ms_low": times[3], "step_ms_high": times[11],
            "step_times_ms": [t for run in own for t in run.step_times_ms], "step_ms_ci_low": times[4],
            "step_ms_ci_high": times[10], "runs": own, "train_loss": own[0].train_loss,
            "eval_loss": own[0].eval_loss,
            "phases_ms": {name: share * base_ms for name, share in PHASES[strategy].items()}, "to_host_mib": moved,
            "from_host_mib": moved,
        }  # fmt: skip
        result = trial(strategy, of_peak.mib, times[7], evidence=evidence, measure=changes)
        result.prediction = prediction(of_peak.mib * 1.001, peak=of_peak, capacity_mib=None)
        result.trace = Trace(
            evidence, steps=3, step_ms=step_ms * 1.3,
            ranges_ms={name: share * base_ms * 1.3 for name, share in PHASES[strategy].items() if name != "transfer"},
            operators=2400, files=["trace.json", "memory_timeline.png"],
        )  # fmt: skip
        found.append(result)
    return found
