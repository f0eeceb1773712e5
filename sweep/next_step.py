"""What to type next: the knobs of a strategy, and the one to turn when a trial is too large or too slow.

Works on the resolved config that a result carries, so that a stored result is advised as a fresh one is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sweep.knobs import Knobs
from sweep.results import Category, Evidence, Peak, Phase, TrialResult

#: What is on the device all through a step, whichever strategy: the least that any of them can reach.
LASTING = (Category.parameter, Category.buffer, Category.gradient, Category.optimizer_state)


@dataclass(frozen=True)
class Step:
    """A change to try: `overrides` as typed behind the trial's own command, and what they do."""

    overrides: str
    words: str
    own: bool = True  # a knob of this strategy; False: another strategy, or another workload

    def __str__(self) -> str:
        return f"try {self.overrides} ({self.words})" if self.overrides else self.words


def peak_of(result: TrialResult) -> Peak | None:
    """What was alive at the peak: as run, else as predicted."""
    if result.measurement is not None and result.measurement.peak is not None:
        return result.measurement.peak
    return result.prediction.peak if result.prediction is not None else None


def lasting_mib(peak: Peak) -> float:
    """Parameters, buffers, gradients and optimizer state at the peak: a floor under every strategy, from below."""
    return sum(peak.at_peak_mib.get(c.value, 0.0) for c in LASTING)


def lighter(result: TrialResult, cap_mib: float | None) -> Step:
    """The next step that lowers the peak; `own=False` where this strategy's own knobs are used up or cannot help."""
    peak, knobs = peak_of(result), Knobs.of(result)
    if peak is not None and cap_mib is not None and lasting_mib(peak) > cap_mib:
        words = (
            f"parameters, gradients and optimizer state alone take {lasting_mib(peak):.0f} MiB, more than the cap: "
            "no strategy here fits; take a smaller model, bf16 parameters (workload.dtype=bf16), or a larger device"
        )
        return Step("", words, own=False)
    if peak is not None and peak.phase == Phase.optimizer.value:
        return _lighter_optimizer(peak)
    if result.is_baseline:
        b = knobs.global_batch_size
        if b is not None and b > 1:
            overrides = f"strategy=micro_batch strategy.micro_batch_size={b // 2}"
            return Step(overrides, "half of the batch at once", own=False)
        return Step("strategy=checkpoint", "recompute activations instead of keeping them", own=False)
    return (
        _lighter_checkpoint(knobs)
        or _lighter_offload(knobs)
        or _lighter_batch(knobs, peak, cap_mib)
        or _escalate(knobs)
    )


def _lighter_optimizer(peak: Peak) -> Step:
    temporary = peak.at_peak_mib.get(Category.temporary.value, 0.0)
    if temporary > 0.05 * peak.mib:
        words = (
            f"the peak is in the optimizer's step, {temporary:.0f} MiB of it temporaries, which no activation strategy "
            "lowers; a fused optimizer takes none; this is another workload, so compare with its own baseline"
        )
        return Step("workload.optimizer.implementation=fused", words, own=False)
    words = (
        "the peak is in the optimizer's step, which no activation strategy lowers; take a smaller model, or an "
        "optimizer with less state (workload.optimizer.name=sgd)"
    )
    return Step("", words, own=False)


def _lighter_checkpoint(knobs: Knobs) -> Step | None:
    if knobs.granularity in ("blocks", "selective") and knobs.every_k > 1:
        k = knobs.every_k // 2
        which = "every block" if k == 1 else f"one block in {k}"
        return Step(f"strategy.checkpoint.every_k={k}", f"recompute {which} instead of one in {knobs.every_k}")
    if knobs.granularity in ("selective", "parts"):
        too = ", matmul and attention too" if knobs.granularity == "selective" else ""
        return Step("strategy.checkpoint.granularity=blocks", f"recompute whole blocks{too}")
    if knobs.granularity == "segments" and knobs.blocks:
        # n blocks in segments of s keep n/s inputs and, while one is recomputed, s blocks: least near s = sqrt(n).
        best = max(1, round(math.sqrt(knobs.blocks)))
        if best != knobs.segment_size:
            words = f"about the square root of {knobs.blocks} blocks keeps least"
            return Step(f"strategy.checkpoint.segment_size={best}", words)
    return None


def _lighter_offload(knobs: Knobs) -> Step | None:
    if knobs.placement in ("inputs", "blocks"):
        return Step("strategy.offload.placement=all", "move everything that is saved, not only a part")
    if knobs.offloads and knobs.keep_last > 0:
        return Step("strategy.offload.keep_last=0", "keep no block's tensors on the device")
    return None


def _lighter_batch(knobs: Knobs, peak: Peak | None, cap_mib: float | None) -> Step | None:
    now = knobs.samples_at_once
    if now is None or now <= 1:
        return None
    m = now // 2
    if peak is not None and cap_mib is not None:
        # What does not last is about proportional to the samples at once.
        while m > 1 and lasting_mib(peak) + (peak.mib - lasting_mib(peak)) * m / now > cap_mib:
            m //= 2
    return Step(f"strategy.micro_batch_size={m}", f"{m} instead of {now} samples at once")


def _escalate(knobs: Knobs) -> Step:
    at_one = " strategy.micro_batch_size=1" if knobs.samples_at_once == 1 else ""
    if knobs.checkpoints and knobs.offloads:
        words = (
            "every knob here is at its end: take a smaller model, a shorter workload.seq_len, workload.dtype=bf16, "
            "or a larger device"
        )
        return Step("", words, own=False)
    if knobs.checkpoints or knobs.offloads:
        return Step(f"strategy=hybrid{at_one}", "recompute, and move what that leaves", own=False)
    words = "this strategy has no smaller size; recompute activations as well"
    return Step(f"strategy=checkpoint{at_one}", words, own=False)


def faster(result: TrialResult) -> Step:
    """The next step that gives memory back for speed; `own=False` where none of this strategy is left."""
    knobs = Knobs.of(result)
    if result.is_baseline:
        return Step("", "the baseline itself is too slow for this floor: lower it, or take a faster device", own=False)
    return (
        _faster_transfer(knobs, result.evidence)
        or _faster_batch(knobs)
        or _faster_offload(knobs)
        or _faster_checkpoint(knobs)
        or Step("", "this strategy has no faster setting: take another one, or lower the floor", own=False)
    )


def _faster_transfer(knobs: Knobs, evidence: str) -> Step | None:
    on_gpu = evidence in (Evidence.smoke.value, Evidence.measured.value)
    if on_gpu and knobs.offloads and not knobs.pin_memory:
        return Step("strategy.offload.pin_memory=true", "page-locked host memory is copied while the device computes")
    return None


def _faster_batch(knobs: Knobs) -> Step | None:
    m, b = knobs.micro_batch_size, knobs.global_batch_size
    if m is None or not knobs.splits:
        return None
    larger = m * 2 if b is None else min(m * 2, b)
    if larger == b and not (knobs.checkpoints or knobs.offloads):
        return None  # the whole batch at once is the baseline
    return Step(f"strategy.micro_batch_size={larger}", f"{larger} instead of {m} samples at once")


def _faster_offload(knobs: Knobs) -> Step | None:
    if not knobs.offloads:
        return None
    keep = max(2, 2 * knobs.keep_last)
    if knobs.blocks is not None and keep < knobs.blocks:
        words = f"keep the tensors of the last {keep} blocks on the device, not of {knobs.keep_last}"
        return Step(f"strategy.offload.keep_last={keep}", words)
    if knobs.placement in ("all", "blocks"):
        return Step("strategy.offload.placement=inputs", "move the inputs of blocks only")
    return None


def _faster_checkpoint(knobs: Knobs) -> Step | None:
    if knobs.granularity in ("blocks", "selective"):
        k = knobs.every_k * 2
        if knobs.blocks is None or k <= knobs.blocks:
            now = "every block" if knobs.every_k == 1 else f"one in {knobs.every_k}"
            return Step(f"strategy.checkpoint.every_k={k}", f"recompute one block in {k} instead of {now}")
    if knobs.granularity in ("blocks", "segments", "parts") and not knobs.offloads:
        words = "keep what matmul and attention gave, recompute the rest"
        return Step("strategy.checkpoint.granularity=selective", words)
    return None


def offload_less(result: TrialResult) -> Step:
    """The next step that takes less host memory."""
    knobs = Knobs.of(result)
    if not knobs.offloads:
        return Step("", "nothing is offloaded here: free host memory, or take a smaller data set or model", own=False)
    if knobs.placement in ("all", "blocks"):
        return Step("strategy.offload.placement=inputs", "move the inputs of blocks only")
    now = knobs.samples_at_once
    if now is not None and now > 1:
        return Step(f"strategy.micro_batch_size={now // 2}", "fewer samples at once leave fewer host copies")
    return Step("strategy=checkpoint", "recompute instead of moving", own=False)


def offload_more(result: TrialResult) -> Step:
    """The next step where an offload moved nothing."""
    knobs = Knobs.of(result)
    if knobs.min_tensor_kib > 0:
        words = f"tensors under {knobs.min_tensor_kib:g} KiB stay on the device now"
        return Step("strategy.offload.min_tensor_kib=0", words)
    if knobs.keep_last > 0:
        return Step("strategy.offload.keep_last=0", f"the last {knobs.keep_last} blocks stay on the device now")
    if knobs.placement in ("inputs", "blocks"):
        return Step("strategy.offload.placement=all", "move everything that is saved, not only a part")
    return Step("strategy=checkpoint", "this model leaves nothing that could be moved", own=False)
