"""What a training step would take on a device, without running it.

The workload is built from hollow tensors (sweep.memory.hollow) and two optimizer steps of the real step and strategy
code run on them, on the CPU, with CUDA's behaviour emulated where it differs (sweep.memory.emulate). The ledger's
events are then replayed through CUDA's caching allocator, with the device's capacity. The first step creates the
optimizer's state; the second is what every later one looks like and is what is reported, as a measurement does after
its warm-up (where batches differ in shape, where memory grows and for evaluation see sweep.memory.passes).

Accumulation is cut to two micro-steps: from the second one on, each finds the gradients of the earlier ones in memory.
FLOPs and bytes moved are scaled back to the whole window.

Everything here is theoretical: `predicted` is the weakest evidence, and times are bytes over the link's bandwidth.
"""

from __future__ import annotations

import time

import torch

from sweep.errors import CannotPredict
from sweep.memory.allocator import CachingAllocator, make_allocator
from sweep.memory.blocks import AllocatorOptions
from sweep.memory.device import allocator_capacity, environment_alloc_conf, resolve_device
from sweep.memory.emulate import NAMES
from sweep.memory.emulate_kernels import caveats_of
from sweep.predict_run import HollowRun
from sweep.results import MIB, Phase, Prediction
from sweep.schema import Config, DeviceConf, Granularity, Placement
from sweep.workload import DataSource, build_data


def predict(
    config: Config,
    data: DataSource | None = None,
    *,
    emulations: str = "auto",
    allocator: AllocatorOptions | None = None,
    steps: int | None = None,
    what: str = "train",
    eval_batches: int = 0,
) -> Prediction:
    """Predict the peak of one optimizer step of `config.workload` under `config.strategy` on `config.device`.

    data: the workload's data source, where it has been built already; the shapes of its batches matter, and the values
        of small whole numbers and booleans.
    emulations: "cuda" | "cpu" | "auto" (by the device). On "cpu" nothing is emulated and nothing replayed: the result
        is what the ledger measures on a CPU, to the byte.
    allocator: PYTORCH_CUDA_ALLOC_CONF of the run that is predicted; None: what `device.alloc_conf` says.
    steps: how many are run, the peak being that of the later ones. None: what `config.measure` will run: those with
        the largest batches stand for all, evaluation counts where there is one, and memory that grows is followed.
    what: "train" | "forward_backward" (no optimizer) | "forward" (the model alone, under no_grad).
    eval_batches: evaluations of a micro-batch at the end of each step, under no_grad, while the gradients are there.

    Raises:
        CannotPredict: the model reads values, has shapes that depend on values, is compiled, or uses custom operators
            or sparse gradients; the message names the cause.
        BadInput: the strategy does not fit the model.
    """
    started = time.perf_counter()
    device = resolve_device(config.device)
    if allocator is None:
        allocator = AllocatorOptions.parse(device.alloc_conf, "device.alloc_conf")
    on_cuda = device.type == "cuda" if emulations == "auto" else emulations == "cuda"
    data = data if data is not None else build_data(config.workload)
    run = HollowRun(config, device, on_cuda)
    try:
        run.go(data, steps, what, eval_batches)
    except (RuntimeError, AssertionError) as error:
        if "Cannot access data pointer" in str(error):
            raise CannotPredict("the model hands a tensor's memory to other code (such as numpy)") from error
        asks_for_cuda = any(word in str(error).lower() for word in ("cuda", "accelerator"))
        if asks_for_cuda and not isinstance(error, torch.OutOfMemoryError):
            asks = "the model asks for CUDA in a way that has no answer here" if on_cuda else "the model asks for CUDA"
            raise CannotPredict(f"{asks}: {str(error).splitlines()[0].split('. ')[0]}") from error
        raise
    prediction = _on_cuda(run, device, allocator) if on_cuda else _on_cpu(run, device)
    prediction.seconds = time.perf_counter() - started
    return prediction


def _replayed(run: HollowRun, capacity: int | None, options: AllocatorOptions) -> CachingAllocator:
    """The allocator after all steps, its peaks those from `run.mark` on. Stops at the first out-of-memory."""
    allocator, log = make_allocator(capacity, options), run.ledger.log
    for position, entry in enumerate(log.order):
        if position == run.mark:
            allocator.reset_peaks()
        if entry < 0:
            allocator.free(~entry)
        elif not allocator.malloc(entry, log.bytes[entry]):
            break
    return allocator


def _on_cuda(run: HollowRun, device: DeviceConf, options: AllocatorOptions) -> Prediction:
    capacity = allocator_capacity(device)
    allocator = _replayed(run, None, options)
    fits = True
    if capacity is not None:
        bounded = _replayed(run, capacity, options)
        fits = bounded.oom is None
        allocator = bounded if fits else allocator
    prediction = _prediction(run, device)
    grown = prediction.allocated_mib - prediction.peak.mib if prediction.peak is not None else 0.0
    prediction.allocated_mib = allocator.allocated_peak / MIB + grown
    prediction.reserved_mib = allocator.reserved_peak / MIB + grown
    fits = fits and (capacity is None or prediction.reserved_mib <= capacity / MIB)
    prediction.fragmentation_mib = allocator.fragmentation / MIB
    prediction.fits = fits
    prediction.headroom_mib = None if capacity is None else capacity / MIB - prediction.reserved_mib
    prediction.context_mib = device.context_mib or 0.0
    prediction.emulations = list(NAMES)
    prediction.caveats += run.answers.caveats if run.answers is not None else []
    prediction.caveats += caveats_of(op.name for op in run.ledger.operators)
    unread = environment_alloc_conf()[1]
    if unread:
        prediction.caveats.append(f"not replayed: {unread} of PYTORCH_CUDA_ALLOC_CONF")
    if device.link_bandwidth_gb_s is not None:
        per_ms = device.link_bandwidth_gb_s * 1e9 / 1e3
        prediction.transfer_one_way_ms = prediction.to_host_mib * MIB / per_ms
        prediction.transfer_round_trip_ms = (prediction.to_host_mib + prediction.from_host_mib) * MIB / per_ms
    return prediction


# -- results --------------------------------------------------------------------------------------------------------


def _on_cpu(run: HollowRun, device: DeviceConf) -> Prediction:
    """What the ledger measures: no allocator between it and the memory."""
    prediction = _prediction(run, device)
    highest = max(run.found.first, run.found.bytes) / MIB
    if device.capacity_mib is not None:
        prediction.headroom_mib = device.capacity_mib - highest
        prediction.fits = prediction.headroom_mib >= 0
    return prediction


def _prediction(run: HollowRun, device: DeviceConf) -> Prediction:
    found, peak = run.found, run.found.peak
    recomputed = run.flops.get(Phase.recompute.value, 0.0)
    s = run.config.strategy
    untouched = s.checkpoint.granularity is Granularity.none and s.offload.placement is Placement.none
    total = sum(run.flops.values())
    caveats = [*run.notes, *found.caveats(run.plan)]
    if run.not_evaluated:
        caveats.append(f"evaluation is not counted: {run.not_evaluated}")
    if run.plan.differ and run.on_cuda:
        caveats.append("what batches of changing shapes leave unused in the allocator's blocks is counted in part only")
    return Prediction(
        device=device.name,
        allocated_mib=found.bytes / MIB,
        reserved_mib=found.bytes / MIB,
        fits=True,
        headroom_mib=None,
        capacity_mib=device.capacity_mib,
        context_mib=0.0,
        fragmentation_mib=0.0,
        peak=peak,
        to_host_mib=run.to_host * run.scale / MIB,
        from_host_mib=run.from_host * run.scale / MIB,
        recompute_flops_ratio=recomputed / (total - recomputed) if total > recomputed else 0.0,
        flops_per_step=total * run.scale,
        peak_phase=peak.phase,
        peak_operator=peak.operator,
        at_peak_mib=dict(peak.at_peak_mib),
        block_share=run.block_share if untouched else None,
        caveats=caveats,
        largest_step=found.step,
        shapes_differ=run.plan.differ,
        growth_mib_per_step=found.growth / MIB,
        evaluation_mib=None if found.evaluation is None else found.evaluation / MIB,
        held_outputs_mib=0.0 if peak.phase == Phase.evaluation.value else run.held_outputs / MIB,
    )
