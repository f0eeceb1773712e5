"""One trial, in reading order: predict, verify, measure. Whatever goes wrong becomes the trial's outcome.

Deciding needs the baseline and recording needs MLflow; both come after, in `sweep.session`.
"""

from __future__ import annotations

import gc
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import torch

from sweep.config.schema import Config, Mode, plain
from sweep.config.strategy_names import fixed_id, is_baseline, strategy_id
from sweep.environment import environment
from sweep.errors import BadInput, NotEquivalent, SweepError, one_line, outcome_of
from sweep.results import Evidence, Outcome, Prediction, Run, Trace, TrialResult, write_json
from sweep.trial.check import check_known
from sweep.trial.measure import Progress, Steps, evidence_of, measure, no_progress, prepared_device, repeat
from sweep.trial.predict import predict
from sweep.trial.verify import verify
from sweep.trial.what_if import what_if
from sweep.workload import build_data, build_outline, find_blocks, patterns_of


def run_trial(
    config: Config,
    name: str,
    *,
    progress: Progress = no_progress,
    first_round: bool = False,
    shared: Path | str | None = None,
) -> TrialResult:
    """Run one trial in this process. Raises BadInput only; any other failure is in the result.

    shared: see sweep.trial.verify.verify.
    first_round: make the first of its repeats only; the others are made by `run_repeat`, in turn with other trials'.
    """
    started = time.perf_counter()
    result = describe(config, name)
    try:
        _run(config, result, progress, first_round, shared)
    except BadInput:
        raise
    except Exception as error:
        result.outcome, result.error = outcome_of(error).value, one_line(error)
        result.reason = error.reason if isinstance(error, SweepError) else ""
        result.details = traceback.format_exc()
    _give_back_memory()
    result.wall_s = time.perf_counter() - started
    return result


def _run(config: Config, result: TrialResult, progress: Progress, first_round: bool, shared: Path | str | None) -> None:
    data = build_data(config.workload)
    result.data_version, result.data = data.version, data.describe()
    outline = build_outline(config.workload)
    result.parameters = sum(p.numel() for p in outline.parameters())
    blocks = find_blocks(outline, config.workload.blocks)
    result.blocks, result.block_patterns = len(blocks), patterns_of(b.name for b in blocks)

    if config.mode is Mode.predict:
        check_known(config, outline)
        _add_prediction(result, predict(config, data=data))
        assert result.prediction is not None
        result.prediction.what_if = what_if(config, data, result.prediction, at_peak_only=True)
        result.outcome = (Outcome.ok if result.prediction.fits else Outcome.over_budget).value
        return

    device = prepared_device(config)
    try:
        _add_prediction(result, predict(config, data=data))
    except Exception as error:  # a trial that cannot be predicted can still be measured
        result.prediction_error = one_line(error)

    if config.measure.verify and not result.is_baseline:
        result.verification = verify(config, device, data, shared)
        if result.verification.status == "not_equal":  # what could not be compared is measured, and never accepted
            raise NotEquivalent(result.verification.reason)

    result.measurement = measure(config, device, data, progress=progress, first_round=first_round)
    result.evidence = result.measurement.evidence
    result.outcome = Outcome.ok.value
    if result.prediction is not None:
        compare_prediction(result.prediction, result.measurement.peak_allocated_mib)


def _add_prediction(result: TrialResult, prediction: Prediction) -> None:
    result.prediction = prediction
    result.block_share = prediction.block_share if result.is_baseline else None


def compare_prediction(prediction: Prediction, measured_mib: float) -> None:
    """Note the prediction's error once the peak is known."""
    if measured_mib > 0:
        prediction.error_ratio = prediction.allocated_mib / measured_mib - 1.0


def run_repeat(config: Config, index: int, *, progress: Progress = no_progress) -> Run:
    """Repeat the timed run of a trial that `run_trial` has been through, as round `index`. A failure is in Run.error.

    config: the trial's own, as it was resolved.
    """
    m, started_at = config.measure, _now()
    try:
        run = repeat(config, prepared_device(config), None, index, Steps(config, m.warmup_steps + m.steps, progress))
    except Exception as error:
        seed = config.workload.seed + index % m.seeds
        run = Run(index=index, seed=seed, started_at=started_at, error=one_line(error), outcome=outcome_of(error).value)
    _give_back_memory()
    return run


def run_trace(config: Config, name: str, into: Path | str, *, progress: Progress = no_progress) -> Trace:
    """Trace a few steps of a trial that was run, `into` a folder (see sweep.trial.profile). Raises what goes wrong."""
    from sweep.trial.profile import trace_trial  # only now: matplotlib takes its time, and few trials are traced

    try:
        device = prepared_device(config)
        return trace_trial(config, device, build_data(config.workload), Path(into), name, progress)
    finally:
        _give_back_memory()


def _give_back_memory() -> None:
    """Outside of any handler: an exception's traceback keeps the trial's tensors alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(config: Config, name: str) -> TrialResult:
    """The trial's result before anything has happened."""
    m, on_cuda = config.measure, config.device.type == "cuda"
    planned = evidence_of(on_cuda, m.warmup_steps, m.steps * m.repeats, m.repeats)
    return TrialResult(
        name=name,
        strategy=config.strategy.name,
        workload=config.workload.name,
        device=config.device.name,
        outcome=Outcome.failed.value,
        evidence=(Evidence.predicted if config.mode is Mode.predict else planned).value,
        is_baseline=is_baseline(config.strategy, config.workload.global_batch_size),
        fixed_id=fixed_id(config),
        strategy_id=strategy_id(config),
        mode=config.mode.value,
        config=plain(config),
        budgets=[plain(config.budget)],
        capacity_mib=config.device.capacity_mib,
        environment=environment(),
        started_at=_now(),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def save(result: TrialResult, folder: Path) -> None:
    """Write result.json into the trial's folder."""
    result.folder = str(folder)
    write_json(result, folder / "result.json")
