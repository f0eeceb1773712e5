"""Every reason code: its meaning, and what to do about it. Verdicts and reports take both from here alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sweep.config.strategy_names import Knobs
from sweep.format import count
from sweep.results import Category, Evidence, Outcome, Peak, Phase, TrialResult

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


GENERATORS = "torch's, Python's or numpy's global generator, which are set again for each run"
NO_REPEAT = "the baseline does not repeat itself, which is not the strategy's fault: find what differs between two runs"


@dataclass(frozen=True)
class Case:
    """What a next step is chosen from."""

    result: TrialResult
    cap_mib: float | None
    inside_noise: bool = False  # the floor is missed by less than the spread of the step times


@dataclass(frozen=True)
class Reason:
    meaning: str
    next_step: Callable[[Case], Step]
    group: str = ""  # "memory" or "speed": the two pull the knobs in opposite directions


def _lighter(case: Case) -> Step:
    return lighter(case.result, case.cap_mib)


def _save_more(case: Case) -> Step:
    if case.result.is_baseline:
        return Step("strategy=micro_batch", "the baseline cannot save anything against itself", own=False)
    return lighter(case.result, None)


def _faster(case: Case) -> Step:
    if case.inside_noise:
        step = _longer(case)
        return Step(step.overrides, "the floor is missed by less than the spread of the step times")
    return faster(case.result)


def _not_equivalent(case: Case) -> Step:
    """By what makes it differ, where that is known; without a guess where it is not."""
    r, v = case.result, case.result.verification
    cause, where = (r.reason, "") if v is None else (v.cause, v.where)
    if cause == "batch_statistics":
        norm = "; GroupNorm in its place would not" if "BatchNorm" in where + r.error else ""
        words = f"{where or 'a layer'} computes over all samples of a batch, which checkpointing leaves together{norm}"
        return Step("strategy=checkpoint", words, own=False)
    if cause == "loss_is_no_mean_over_samples":
        words = (
            "a loss without `count` is taken for a mean over samples: give it `count(batch)`, what it divides by, or "
            "use sweep.workload.loss.CrossEntropy"
        )
        return Step("", words, own=False)
    if cause == "state":
        words = f"forward changes {where or 'state'} and runs more than once here: change it outside of forward"
        return Step("", words, own=False)
    if cause == "random":
        return Step("", f"draw{' what ' + where + ' draws' if where else ''} from {GENERATORS}", own=False)
    if cause == "baseline_does_not_repeat":
        return Step("", NO_REPEAT, own=False)
    if Knobs.of(r).save_on_cpu:
        words = "ours keeps strides, aliases and parameters as they are"
        return Step("strategy.offload.implementation=hooks", words)
    at = where or (v.grad_worst if v is not None else "")
    folder = f" in {r.folder}/result.json" if r.folder else ""
    return Step("", f"what makes it differ is not known: begin at {at or 'its verification'}{folder}", own=False)


def _quality(case: Case) -> Step:
    words = "keep the baseline; if this strategy was verified as equal, see whether it is chance with another seed"
    return Step("workload.seed=1", words, own=False)


def _recompute_more(case: Case) -> Step:
    # The error ends with what to do, as a bad input does; without it there is nothing to recompute in these blocks.
    _, found, todo = case.result.error.rpartition("; ")
    return Step("", todo if found else "name the modules that forward calls with workload.blocks", own=False)


def _finite(case: Case) -> Step:
    lr = ((case.result.config.get("workload") or {}).get("optimizer") or {}).get("lr")
    overrides = f"workload.optimizer.lr={lr / 10:g}" if isinstance(lr, (int, float)) else "workload.dtype=fp32"
    words = "a smaller learning rate" if "lr" in overrides else "a wider number format"
    return Step(overrides, f"{words}, for the baseline as well", own=False)


def _more_time(case: Case) -> Step:
    limit = (case.result.config.get("measure") or {}).get("timeout_s") or 1800.0
    return Step(f"measure.timeout_s={2 * limit:g}", f"twice the {limit:g} s allowed")


def _look(case: Case) -> Step:
    where = f" in {case.result.folder}/result.json" if case.result.folder else ""
    return Step("", f"read its error and details{where}, and run it alone with HYDRA_FULL_ERROR=1", own=False)


def _as_said(case: Case) -> Step:
    # A bad-input error ends with what to do.
    return Step("", case.result.error.rsplit("; ", 1)[-1] or "correct the setting", own=False)


def _longer(case: Case) -> Step:
    m = case.result.measurement
    steps, repeats = (m.steps, m.repeats) if m is not None else (5, 1)
    warmup = (case.result.config.get("measure") or {}).get("warmup_steps")
    more = " measure.warmup_steps=2" if warmup is not None and warmup < 2 else ""
    overrides = f"measure.steps={max(10, 2 * steps)} measure.repeats={max(3, repeats)}{more}"
    return Step(overrides, "long enough to conclude")


def _too_short(case: Case) -> Step:
    m = case.result.measurement
    planned = (case.result.config.get("measure") or {}).get("repeats") or 1
    if m is not None and m.repeats < planned:  # the command was interrupted
        return Step("", f"run it to its end: {m.repeats} of {count(planned, 'repeat')} came to theirs")
    return _longer(case)


def _repeat_again(case: Case) -> Step:
    m = case.result.measurement
    error = next((run.error for run in m.runs if run.error), "") if m is not None else ""
    if "out of memory" in error.lower() or "outofmemory" in error.lower():
        return lighter(case.result, case.cap_mib)
    if "timeout_s" in error:
        return _more_time(case)
    where = f"; the errors are in {case.result.folder}" if case.result.folder else ""
    return Step("", f"measure it again: the repeats that came to their end count, the others leave a doubt{where}")


def _quieter(case: Case) -> Step:
    repeats = (case.result.config.get("measure") or {}).get("repeats") or 3
    return Step(f"measure.repeats={2 * repeats}", "on a quiet machine; with more repeats single ones weigh less")


def _stronger(case: Case) -> Step:
    if case.result.evidence == Evidence.predicted.value:
        return Step("mode=measure", "run it")
    return Step("device=auto", "the same command on a machine with a GPU")


def _measure(case: Case) -> Step:
    return Step("mode=measure", "run it")


def _memory_pass(case: Case) -> Step:
    return Step("measure.ledger=true", "without the memory pass the peak is not known")


def _throughput_known(case: Case) -> Step:
    return Step("mode=measure compare=true", "run it beside the baseline")


def _quality_known(case: Case) -> Step:
    if case.result.mode == "predict":
        return Step("mode=measure", "run it")
    return Step("measure.eval_batches=2", "the held-out loss was not computed")


def _verify(case: Case) -> Step:
    v = case.result.verification
    if v is None:
        return Step("measure.verify=true", "compare with the baseline before measuring")
    if v.cause == "baseline_does_not_repeat":
        return Step("", NO_REPEAT)
    if v.cause == "random":
        return Step("", f"it can be compared where all random numbers come from {GENERATORS}")
    if v.cause == "does_not_fit":
        return Step("", "verify a smaller model of the same kind, or on a device with more memory")
    return Step(f"measure.verify_steps={2 * v.steps}", "after more steps more of the parameters have gradients")


def _margin(case: Case) -> Step:
    return Step("mode=measure", "run it: what is left is too little for what the prediction does not count")


#: In the order in which they decide: the first that applies gives the next action.
REASONS: dict[str, Reason] = {
    "not_equivalent": Reason("it does not compute what the baseline computes", _not_equivalent),
    "not_finite": Reason("its loss is not finite", _finite),
    "bad_setting": Reason("this setting does not apply here", _as_said),
    "crashed": Reason("its process died", _look),
    "failed": Reason("it ended with an error", _look),
    "quality_lost": Reason("its held-out loss is above the gate", _quality),
    "nothing_offloaded": Reason("offload was asked for and moved nothing", lambda c: offload_more(c.result)),
    "nothing_recomputed": Reason("recomputation was asked for and nothing was computed again", _recompute_more),
    "out_of_memory": Reason("it ran out of device memory", _lighter, "memory"),
    "out_of_host_memory": Reason("it ran out of host memory", lambda c: offload_less(c.result)),
    "over_budget": Reason("it was predicted not to fit and was not run", _lighter, "memory"),
    "over_memory": Reason("its peak is over the memory cap", _lighter, "memory"),
    "below_throughput": Reason("it is slower than the throughput floor", _faster, "speed"),
    "saving_too_small": Reason("it saves less memory than counts", _save_more, "memory"),
    "timed_out": Reason("it took longer than allowed", _more_time),
    "repeat_failed": Reason("not all of its repeats came to their end", _repeat_again),
    "not_predictable": Reason("its peak cannot be predicted", _measure),
    "uncertain": Reason("its prediction does not count everything", _margin),
    "memory_unknown": Reason("its peak is not known", _memory_pass),
    "throughput_unknown": Reason("its throughput is not known, so the floor cannot be checked", _throughput_known),
    "quality_unknown": Reason("its held-out loss is not known, so the gate cannot be checked", _quality_known),
    "not_verified": Reason("it was not compared with the baseline", _verify),
    "evidence_too_short": Reason("it ran too few steps or repeats to conclude", _too_short),
    "evidence_too_weak": Reason("this kind of evidence was not asked for", _stronger),
    "disturbed": Reason("something else was busy on the machine while it was timed", _quieter),
}

#: Codes that say that too little is known, not that the budget is missed.
ONLY_EVIDENCE = frozenset(
    (
        "uncertain",
        "memory_unknown",
        "throughput_unknown",
        "quality_unknown",
        "not_verified",
        "evidence_too_short",
        "evidence_too_weak",
        "repeat_failed",
        "disturbed",
    )
)

#: Codes that no budget makes good.
NEVER = frozenset(
    ("not_equivalent", "not_finite", "quality_lost", "crashed", "failed", "bad_setting", "nothing_recomputed")
)

#: How an error that stands for one reason begins in TrialResult.error.
_BY_ERROR = {
    "NothingOffloaded": "nothing_offloaded",
    "NothingRecomputed": "nothing_recomputed",
    "NotOnDevice": "bad_setting",
    "CannotPredict": "not_predictable",
    "NotEquivalent": "not_equivalent",
    "BadInput": "bad_setting",
}

_BY_OUTCOME = {
    Outcome.over_budget.value: "over_budget",
    Outcome.oom_device.value: "out_of_memory",
    Outcome.oom_host.value: "out_of_host_memory",
    Outcome.nan.value: "not_finite",
    Outcome.timeout.value: "timed_out",
    Outcome.crashed.value: "crashed",
    Outcome.failed.value: "failed",
}


def outcome_reason(result: TrialResult) -> str:
    """The code of an outcome other than ok. What the trial itself gave as its reason comes first."""
    if result.reason in REASONS:
        return result.reason
    if result.outcome in (Outcome.invalid.value, Outcome.failed.value):
        by_error = _BY_ERROR.get(result.error.split(":", 1)[0])
        if by_error is not None:
            return by_error
    if result.outcome == Outcome.invalid.value:
        return "not_predictable" if result.mode == "predict" else "not_equivalent"
    return _BY_OUTCOME.get(result.outcome, "failed")


def next_step(codes: list[str], case: Case) -> tuple[Step, bool]:
    """What to do about `codes` (not empty), and whether this strategy can get there by itself."""
    ordered = [code for code in REASONS if code in codes]
    steps = {code: REASONS[code].next_step(case) for code in ordered}
    groups = {REASONS[code].group for code in ordered} - {""}
    if groups == {"memory", "speed"} and all(steps[c].own for c in ordered):
        words = (
            "too much memory and too slow at once: what helps one hurts the other here; "
            "take another strategy, or a wider budget"
        )
        return Step("", words, own=False), False
    # A step that cannot be taken within this strategy decides, whatever else could be.
    first = next((steps[c] for c in ordered if not steps[c].own), steps[ordered[0]])
    return first, first.own
