"""Every reason code: its meaning, and what to do about it. Verdicts and reports take both from here alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sweep.knobs import Knobs
from sweep.next_step import Step, faster, lighter, offload_less, offload_more
from sweep.results import Evidence, Outcome, TrialResult
from sweep.words import count

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
