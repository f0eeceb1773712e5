"""One trial, in reading order: predict, verify, measure. Whatever goes wrong becomes the trial's outcome.

Deciding needs the baseline and recording needs MLflow; both come after, in `sweep.session`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sweep.config.device import machine_has
from sweep.config.schema import (
    Config,
    DeviceConf,
    Dtype,
    Granularity,
    Mode,
    OffloadImplementation,
    Placement,
    StrategyConf,
    plain,
)
from sweep.environment import environment
from sweep.errors import BadInput, DoesNotFit, NotEquivalent, NotOnDevice, SweepError
from sweep.memory.allocator import AllocatorOptions
from sweep.outcomes import one_line, outcome_of
from sweep.results import Evidence, Outcome, Prediction, Run, Trace, TrialResult, write_json
from sweep.strategy import check_blocks, micro_batch_size, over_the_batch
from sweep.strategy.checkpointing import MATMUL_AND_ATTENTION
from sweep.trial.measure import Progress, Steps, evidence_of, measure, no_progress, repeat
from sweep.trial.predict import predict
from sweep.trial.verify import verify
from sweep.trial.what_if import has_bf16, what_if
from sweep.workload import build_data, build_outline, find_blocks, patterns_of
from sweep.workload.batch import checked


def run_trial(
    config: Config,
    name: str,
    *,
    progress: Progress = no_progress,
    first_round: bool = False,
    shared: Path | None = None,
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


def run_repeat(config: Config, index: int, *, progress: Progress = no_progress) -> Run:
    """Repeat the timed run of a trial that `run_trial` has been through, as round `index`. A failure is in Run.error.

    config: the trial's own, as it was resolved.
    """
    m, device = config.measure, torch_device(config.device)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        if device.type == "cuda":
            limit_memory(config, device)
        run = repeat(config, device, None, index, Steps(config, m.warmup_steps + m.steps, progress))
    except Exception as error:
        seed = config.workload.seed + index % m.seeds
        run = Run(index=index, seed=seed, started_at=started_at, error=one_line(error), outcome=outcome_of(error).value)
    _give_back_memory()
    return run


def run_trace(config: Config, name: str, folder: Path, *, progress: Progress = no_progress) -> Trace:
    """Trace a few steps of a trial that was run, into `folder` (see sweep.trial.profile). Raises what goes wrong."""
    from sweep.trial.profile import trace_trial  # only now: matplotlib takes its time, and few trials are traced

    device = torch_device(config.device)
    try:
        if device.type == "cuda":
            limit_memory(config, device)
        return trace_trial(config, device, build_data(config.workload), folder, name, progress)
    finally:
        _give_back_memory()


def _give_back_memory() -> None:
    """Outside of any handler: an exception's traceback keeps the trial's tensors alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _run(config: Config, result: TrialResult, progress: Progress, first_round: bool, shared: Path | None) -> None:
    data = build_data(config.workload)
    result.data_version, result.data = data.version, data.describe()
    outline = build_outline(config.workload)
    result.parameters = sum(p.numel() for p in outline.parameters())
    blocks = find_blocks(outline, config.workload.blocks)
    result.blocks, result.block_patterns = len(blocks), patterns_of(b.name for b in blocks)

    if config.mode is Mode.predict:
        check_known(config, outline)
        result.prediction = predict(config, data=data)
        result.block_share = result.prediction.block_share if result.is_baseline else None
        result.prediction.what_if = what_if(config, data, result.prediction, at_peak_only=True)
        result.outcome = (Outcome.ok if result.prediction.fits else Outcome.over_budget).value
        return

    device = torch_device(config.device)
    capacity = config.device.capacity_mib if device.type == "cpu" else limit_memory(config, device)
    try:
        result.prediction = predict(config, data=data)
        result.block_share = result.prediction.block_share if result.is_baseline else None
    except Exception as error:  # a trial that cannot be predicted can still be measured
        result.prediction_error = one_line(error)

    if config.measure.verify and not result.is_baseline:
        result.verification = verify(config, device, data, shared)
        if result.verification.status == "not_equal":  # what could not be compared is measured, and never accepted
            raise NotEquivalent(result.verification.reason)

    result.measurement = measure(
        config, device, data, capacity_mib=capacity, progress=progress, first_round=first_round
    )
    result.evidence = result.measurement.evidence
    result.outcome = Outcome.ok.value
    if result.prediction is not None:
        compare_prediction(result.prediction, result.measurement.peak_allocated_mib)


def compare_prediction(prediction: Prediction, measured_mib: float) -> None:
    """Note the prediction's error once the peak is known."""
    if measured_mib > 0:
        prediction.error_ratio = prediction.allocated_mib / measured_mib - 1.0


def torch_device(conf: DeviceConf) -> torch.device:
    """The torch device of a resolved config; where it is only predicted for, the CPU that does so."""
    return torch.device("cuda", conf.index) if conf.type == "cuda" else torch.device("cpu")


def limit_memory(config: Config, device: torch.device) -> float | None:
    """Make a CUDA device as small as `device.capacity_mib`. It caps the allocator, not the context. Returns MiB."""
    capacity = config.device.capacity_mib
    total = torch.cuda.get_device_properties(device).total_memory
    if capacity is not None and capacity * 2**20 < total:
        torch.cuda.set_per_process_memory_fraction(capacity * 2**20 / total, device)
    return capacity


def describe(config: Config, name: str) -> TrialResult:
    """The trial's result before anything has happened."""
    m, on_cuda = config.measure, config.device.type == "cuda"
    planned = evidence_of(on_cuda, m.warmup_steps, m.steps * m.repeats, m.repeats)
    evidence = Evidence.predicted if config.mode is Mode.predict else planned
    return TrialResult(
        name=name,
        strategy=config.strategy.name,
        workload=config.workload.name,
        device=config.device.name,
        outcome=Outcome.failed.value,
        evidence=evidence.value,
        is_baseline=is_baseline(config.strategy, config.workload.global_batch_size),
        fixed_id=fixed_id(config),
        strategy_id=strategy_id(config),
        mode=config.mode.value,
        config=plain(config),
        budgets=[plain(config.budget)],
        capacity_mib=config.device.capacity_mib,
        environment=environment(),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


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


def check_trial(config: Config, seen: dict[str, Any]) -> None:
    """Raise BadInput for what only the data, the model or this machine can tell. `seen` spares work in a sweep.

    DoesNotFit is raised last: where all else is right and the strategy does not fit the model's blocks.
    """
    w = config.workload
    if config.mode is Mode.measure and not machine_has(config.device):
        raise BadInput(
            "device",
            config.device.name,
            "this machine has no such device",
            "add mode=predict to predict for it, or use device=auto",
        )
    AllocatorOptions.parse(config.device.alloc_conf, "device.alloc_conf")
    if config.mode is Mode.measure:
        _check_dtype(w.dtype, torch_device(config.device))
    data_key, model_key = digest(["data", w.data]), digest(["model", w.model, w.blocks])
    if data_key not in seen:
        source = seen[data_key] = build_data(w)
        checked(source.train_batch(0, w.global_batch_size), w.global_batch_size, source, "train_batch")
    if model_key not in seen:
        seen[model_key] = find_blocks(build_outline(w), w.blocks)
    try:
        check_blocks(config.strategy, seen[model_key])
    except BadInput as error:
        raise DoesNotFit(error.key, error.value, error.wrong, error.todo) from error


def check_known(config: Config, model: nn.Module) -> None:
    """Raise for what is known of a trial without running it.

    model: the workload's outline. Raises NotOnDevice for a number format that the device has not, NotEquivalent for
    micro-batches of a model that computes over the whole batch.
    """
    w, known = config.workload, config.device.type != "cuda" or config.device.compute_capability is not None
    if w.dtype in (Dtype.bf16, Dtype.amp_bf16) and known and not has_bf16(config.device):
        raise NotOnDevice(f"workload.dtype={w.dtype.name}: {config.device.name} has no bfloat16; use fp32 or amp_fp16")
    if micro_batch_size(config.strategy, w.global_batch_size) < w.global_batch_size:
        found = over_the_batch(model.train())  # as it is trained: what keeps its norms frozen says so itself
        if found:
            raise NotEquivalent(f"{found}, so micro-batches would not be equivalent", "batch_statistics")


def _check_dtype(dtype: Dtype, device: torch.device) -> None:
    wants_bf16 = dtype in (Dtype.bf16, Dtype.amp_bf16)
    if device.type == "cuda" and wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise BadInput("workload.dtype", dtype.name, f"{name} has no bfloat16", "use fp32 or amp_fp16")


def save(result: TrialResult, folder: Path) -> Path:
    """Write result.json into the trial's folder."""
    path = folder / "result.json"
    result.folder = str(folder)
    write_json(result, path)
    return path
