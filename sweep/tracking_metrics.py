"""The numbers of a trial under the names that they have in MLflow: group, slash, number, unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from sweep.results import Decision, Measurement, Prediction, TrialResult, Verification

#: (name, value, step)
MetricValue = tuple[str, float, int]

#: Decimals by a part of the name, first match. MLflow's page shows every digit it is given (268.1328125), and no more
#: of them mean anything: 0.001 MiB is a KiB. The whole numbers are in result.json. Errors and curves stay as they are.
DECIMALS = (("error_ratio", 6), ("ratio", 4), ("_mib", 3), ("_ms", 3), ("_per_s", 3), ("eval_loss", 5))


def metrics_of(result: TrialResult) -> list[MetricValue]:
    """All finite numbers of a result under grouped names, single values at step 0, curves at their steps."""
    # MLflow's page that compares runs begins with the first of them.
    found: list[tuple[str, float | None, int]] = []
    if result.measurement is not None:
        found += _measured(result.measurement)
    if result.verification is not None:
        found += _verified(result.verification)
    if result.prediction is not None:
        found += _predicted(result.prediction)
    if result.decision is not None:
        found += _decided(result.decision)
    found += [("trial/parameters", result.parameters, 0), ("trial/blocks", result.blocks, 0)]
    found.append(("trial/wall_s", result.wall_s, 0))
    return _finite(found)


def decision_metrics_of(result: TrialResult) -> list[MetricValue]:
    """What is known only once all candidates of the comparison have been judged."""
    found = _decided(result.decision) if result.decision is not None else []
    if result.prediction is not None:
        found.append(("predicted/error_ratio", result.prediction.error_ratio, 0))
    return _finite(found)


def _measured(m: Measurement) -> Iterator[tuple[str, float | None, int]]:
    yield from _single(
        {
            "memory/peak_allocated_mib": m.peak_allocated_mib,
            "memory/peak_reserved_mib": m.peak_reserved_mib,
            "time/step_ms": m.step_ms,
            "time/step_ms_low": m.step_ms_low,
            "time/step_ms_high": m.step_ms_high,
            "time/step_ms_ci_low": m.step_ms_ci_low,
            "time/step_ms_ci_high": m.step_ms_ci_high,
            "throughput/samples_per_s": m.samples_per_s,
            "throughput/tokens_per_s": m.tokens_per_s,
            "quality/eval_loss": m.eval_loss,
            "quality/eval_loss_before": m.eval_loss_before,
            "transfer/to_host_mib": m.to_host_mib,
            "transfer/from_host_mib": m.from_host_mib,
            "trial/timed_steps": m.steps,
            "trial/repeats": m.repeats,
        }
    )
    yield from _single({f"time/{_word(phase)}_ms": value for phase, value in m.phases_ms.items()})
    if m.peak is not None:
        yield from _single({"memory/host_peak_mib": m.peak.host_peak_mib})
        yield from _single({f"memory/at_peak/{_word(c)}_mib": value for c, value in m.peak.at_peak_mib.items()})
        yield from _single({f"memory/phase_peak/{_word(p)}_mib": value for p, value in m.peak.phase_peaks_mib.items()})
    yield from (("quality/train_loss", value, step) for step, value in enumerate(m.train_loss))
    yield from (("time/each_step_ms", value, step) for step, value in enumerate(m.step_times_ms))


def _verified(v: Verification) -> Iterator[tuple[str, float | None, int]]:
    yield from _single(
        {
            "verify/passed": v.passed,
            "verify/tolerance": v.tolerance,
            "verify/max_rel_err": v.max_rel_err,
            "verify/loss_rel_err": v.loss_rel_err,
            "verify/output_rel_err": v.output_rel_err,
            "verify/grad_rel_err": v.grad_rel_err,
            "verify/block_input_grad_rel_err": v.block_input_grad_rel_err,
            "verify/buffer_rel_err": v.buffer_rel_err,
            "verify/rng_equal": v.rng_equal,
            "verify/bit_equal": v.bit_equal,
            "verify/steps": v.steps,
            "verify/compared_share": v.compared_share,
            "verify/updates": v.updates,
            "verify/updates_expected": v.updates_expected,
        }
    )


def _predicted(p: Prediction) -> Iterator[tuple[str, float | None, int]]:
    yield from _single(
        {
            "predicted/allocated_mib": p.allocated_mib,
            "predicted/reserved_mib": p.reserved_mib,
            "predicted/fits": p.fits,
            "predicted/headroom_mib": p.headroom_mib,
            "predicted/capacity_mib": p.capacity_mib,
            "predicted/context_mib": p.context_mib,
            "predicted/fragmentation_mib": p.fragmentation_mib,
            "predicted/to_host_mib": p.to_host_mib,
            "predicted/from_host_mib": p.from_host_mib,
            "predicted/transfer_one_way_ms": p.transfer_one_way_ms,
            "predicted/transfer_round_trip_ms": p.transfer_round_trip_ms,
            "predicted/recompute_flops_ratio": p.recompute_flops_ratio,
            "predicted/flops_per_step": p.flops_per_step,
            "predicted/seconds": p.seconds,
            "predicted/error_ratio": p.error_ratio,
        }
    )
    at_peak = p.at_peak_mib or (p.peak.at_peak_mib if p.peak is not None else {})
    yield from _single({f"predicted/at_peak/{_word(c)}_mib": value for c, value in at_peak.items()})
    if p.peak is not None:
        yield from _single({f"predicted/phase_peak/{_word(k)}_mib": v for k, v in p.peak.phase_peaks_mib.items()})


def _decided(d: Decision) -> list[tuple[str, float | None, int]]:
    found: dict[str, float | None] = {
        "memory/peak_mib": d.peak_mib,
        "memory/saved_mib": d.saved_mib,
        "throughput/ratio": d.throughput_ratio,
        "quality/eval_loss_ratio": d.eval_loss_ratio,
    }
    if d.step is not None:  # step time over the baseline's, with its interval
        found |= {
            "time/step_ratio": d.step.ratio,
            "time/step_low_ratio": d.step.low,
            "time/step_high_ratio": d.step.high,
        }
    if d.quality is not None and d.quality.seeds > 1:
        found |= {
            "quality/loss_difference": d.quality.difference,
            "quality/loss_difference_low": d.quality.difference_low,
            "quality/loss_difference_high": d.quality.difference_high,
            "quality/seeds": d.quality.seeds,
        }
    return list(_single(found))


def _finite(values: Iterable[tuple[str, float | None, int]]) -> list[MetricValue]:
    known = [(name, float(value), step) for name, value, step in values if value is not None and math.isfinite(value)]
    return [(name, _readable(name, value), step) for name, value, step in known]


def _readable(name: str, value: float) -> float:
    decimals = next((decimals for part, decimals in DECIMALS if part in name), None)
    return value if decimals is None else round(value, decimals)


def _single(values: dict[str, Any]) -> Iterator[tuple[str, float | None, int]]:
    yield from ((name, value, 0) for name, value in values.items())


def _word(name: object) -> str:
    """A part of a metric's name. Enum members stand for their value."""
    return re.sub(r"[^\w\-]", "_", str(getattr(name, "value", name)))
