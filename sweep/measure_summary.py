"""From the repeats of a trial to its measurement: medians, spread, intervals, peaks, and what evidence they are."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from sweep.certainty import good_runs, median_interval
from sweep.findings import Run
from sweep.results import Evidence, Measurement, Peak
from sweep.schema import Config

#: A GPU measurement that is shorter than this is `smoke`: it may be warm-up, clocks or luck.
MIN_WARMUP_STEPS, MIN_TIMED_STEPS, MIN_REPEATS = 2, 10, 2


@dataclass
class Seen:
    """What the memory pass saw, in the words of Measurement."""

    peak: Peak | None = None  # None: there was none
    peak_mib: float = math.nan  # in the last of the planned steps
    largest_step: int | None = None
    shapes_differ: bool = False
    growth_mib_per_step: float = 0.0
    evaluation_mib: float | None = None
    caveats: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, m: Measurement) -> Seen:
        """What was seen for an earlier measurement of the trial."""
        return cls(
            m.peak, m.peak_allocated_mib, m.largest_step, m.shapes_differ, m.growth_mib_per_step, m.evaluation_mib,
            list(m.caveats),
        )  # fmt: skip


def summary(config: Config, runs: list[Run], seen: Seen | None = None) -> Measurement:
    """The measurement of a trial whose repeats are `runs`; those with an error are kept in it and do not count.

    config: as it was resolved. seen: by the ledger, in one untimed pass. Raises ValueError without a run that counts.
    """
    seen = Seen() if seen is None else seen
    m, on_cuda = config.measure, config.device.type == "cuda"
    measurement = Measurement(
        evidence="", steps=m.steps, repeats=0, step_ms=0.0, step_ms_low=0.0, step_ms_high=0.0, samples_per_s=0.0,
        tokens_per_s=None, peak_allocated_mib=math.nan, peak_reserved_mib=None, peak=seen.peak, runs=runs,
    )  # fmt: skip
    good = good_runs(measurement)
    if not good:
        raise ValueError("a measurement needs a run that came to its end")
    first, times = good[0], [t for run in good for t in run.step_times_ms]
    measurement.repeats = sum(len(run.step_times_ms) // m.steps for run in good)
    measurement.evidence = evidence_of(on_cuda, m.warmup_steps, len(times), measurement.repeats).value
    measurement.step_times_ms = times
    measurement.step_ms = statistics.median(times)
    measurement.step_ms_low, measurement.step_ms_high = quartiles(times)
    interval = median_interval([run.step_times_ms for run in good])
    measurement.step_ms_ci_low, measurement.step_ms_ci_high = interval if interval is not None else (None, None)
    measurement.samples_per_s = config.workload.global_batch_size / measurement.step_ms * 1000
    if config.workload.seq_len is not None:
        measurement.tokens_per_s = measurement.samples_per_s * config.workload.seq_len
    if on_cuda:
        measurement.peak_allocated_mib = _highest([run.peak_allocated_mib for run in good], math.nan)
        measurement.peak_reserved_mib = _highest([run.peak_reserved_mib for run in good], math.nan)
        measurement.evaluation_mib = max((r.evaluation_mib for r in good if r.evaluation_mib is not None), default=None)
    else:
        measurement.peak_allocated_mib, measurement.evaluation_mib = seen.peak_mib, seen.evaluation_mib
    measurement.largest_step, measurement.shapes_differ = seen.largest_step, seen.shapes_differ
    measurement.growth_mib_per_step = seen.growth_mib_per_step
    measurement.caveats = list(dict.fromkeys([*seen.caveats, *(note for run in good for note in run.notes)]))
    names = sorted({name for run in good for name in run.phases_ms})
    measurement.phases_ms = {n: statistics.median(run.phases_ms.get(n, 0.0) for run in good) for n in names}
    outside = [t for run in good for t in outside_of_phases(run)]
    measurement.outside_ms = statistics.median(outside) if outside else None
    measurement.train_loss = list(first.train_loss)
    measurement.eval_loss_before, measurement.eval_loss = first.eval_loss_before, first.eval_loss
    measurement.to_host_mib, measurement.from_host_mib = first.to_host_mib, first.from_host_mib
    return measurement


def outside_of_phases(run: Run) -> list[float]:
    """For each timed step, the ms that belong to no phase; [] where the phases of each step are not known."""
    if not run.phase_times_ms:
        return []
    return [
        step_ms - sum(times[i] for times in run.phase_times_ms.values()) for i, step_ms in enumerate(run.step_times_ms)
    ]


def evidence_of(on_cuda: bool, warmup_steps: int, timed_steps: int, repeats: int) -> Evidence:
    """What a run is evidence for. timed_steps: over all repeats that were made."""
    if not on_cuda:
        return Evidence.cpu
    enough = warmup_steps >= MIN_WARMUP_STEPS and timed_steps >= MIN_TIMED_STEPS and repeats >= MIN_REPEATS
    return Evidence.measured if enough else Evidence.smoke


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _highest(values: list[float | None], otherwise: float) -> float:
    return max((v for v in values if v is not None), default=otherwise)
