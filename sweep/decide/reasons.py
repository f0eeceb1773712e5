"""Every reason code, and the one advisor: what to do about it. Worded in sweep.report.phrases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sweep.config.schema import Granularity, OffloadImplementation, Placement, StrategyConf
from sweep.config.strategy_names import batch_of, micro_batch_size, strategy_of
from sweep.results import Advice, Category, Evidence, Outcome, Peak, Phase, TrialResult

#: What is on the device all through a step, whichever strategy: the least that any of them can reach.
LASTING = (Category.parameter, Category.buffer, Category.gradient, Category.optimizer_state)
#: From this share of a peak in the optimizer's step on, its temporaries are what to get rid of first.
TEMPORARIES = 0.05


def peak_of(result: TrialResult) -> Peak | None:
    """What was alive at the peak: as run, else as predicted."""
    if result.measurement is not None and result.measurement.peak is not None:
        return result.measurement.peak
    return result.prediction.peak if result.prediction is not None else None


def lasting_mib(peak: Peak) -> float:
    """Parameters, buffers, gradients and optimizer state at the peak: a floor under every strategy, from below."""
    return sum(peak.at_peak_mib.get(c.value, 0.0) for c in LASTING)


@dataclass(frozen=True)
class Case:
    """What advice is chosen from."""

    result: TrialResult
    cap_mib: float | None = None
    inside_noise: bool = False  # the floor is missed by less than the spread of the step times

    @property
    def strategy(self) -> StrategyConf:
        return strategy_of(self.result)

    @property
    def at_once(self) -> int:
        """Samples per micro-batch."""
        return micro_batch_size(self.strategy, batch_of(self.result))

    @property
    def checkpoints(self) -> bool:
        return self.strategy.checkpoint.granularity is not Granularity.none

    @property
    def offloads(self) -> bool:
        return self.strategy.offload.placement is not Placement.none

    def measure(self, key: str, default: float) -> float:
        """A setting of `measure` as the trial was run with it."""
        value = (self.result.config.get("measure") or {}).get(key)
        return default if value is None else float(value)


def _set(code: str, key: str, value: object, **numbers: float) -> Advice:
    """One setting of this strategy to change."""
    return Advice(code, [f"strategy.{key}={value}"], numbers)


# ---- less memory


def lighter(case: Case) -> Advice:
    """Lowers the peak; `own=False` where this strategy's own settings are used up or cannot help."""
    peak = peak_of(case.result)
    if peak is not None and case.cap_mib is not None and lasting_mib(peak) > case.cap_mib:
        return Advice("nothing_fits", numbers={"lasting_mib": lasting_mib(peak)}, own=False)
    if peak is not None and peak.phase == Phase.optimizer.value:
        return _lighter_optimizer(case.result, peak)
    if case.result.is_baseline:
        if batch_of(case.result) > 1:
            half = batch_of(case.result) // 2
            return Advice("half_batch", ["strategy=micro_batch", f"strategy.micro_batch_size={half}"], own=False)
        return Advice("recompute", ["strategy=checkpoint"], own=False)
    return _lighter_checkpoint(case) or _lighter_offload(case) or _lighter_batch(case, peak) or _escalate(case)


def _lighter_optimizer(result: TrialResult, peak: Peak) -> Advice:
    """A change of the optimizer that was predicted for this trial, so that its workload is known to take it."""
    temporary = peak.at_peak_mib.get(Category.temporary.value, 0.0)
    changes = [] if result.prediction is None else result.prediction.what_if
    wanted = "workload.optimizer." + ("implementation=" if temporary > TEMPORARIES * peak.mib else "")
    found = next((w for w in changes if w.override.lstrip("~").startswith(wanted)), None)
    numbers = {"temporary_mib": temporary} if temporary > TEMPORARIES * peak.mib else {}
    if found is None:
        return Advice("optimizer", numbers=numbers, own=False)
    saved = {"saved_mib": found.saved_mib}
    return Advice("optimizer", found.override.split(), numbers | saved, {"change": found.change}, own=False)


def _lighter_checkpoint(case: Case) -> Advice | None:
    c, blocks = case.strategy.checkpoint, case.result.blocks
    if c.granularity in (Granularity.blocks, Granularity.selective) and c.every_k > 1:
        return _set("recompute_more_blocks", "checkpoint.every_k", c.every_k // 2, k=c.every_k // 2, now=c.every_k)
    if c.granularity in (Granularity.selective, Granularity.parts):
        return _set("recompute_whole_blocks", "checkpoint.granularity", "blocks")
    if c.granularity is Granularity.segments and blocks:
        # n blocks in segments of s keep n/s inputs and, while one is recomputed, s blocks: least near s = sqrt(n).
        best = max(1, round(math.sqrt(blocks)))
        if best != c.segment_size:
            return _set("segment_size", "checkpoint.segment_size", best, blocks=blocks)
    return None


def _lighter_offload(case: Case) -> Advice | None:
    o = case.strategy.offload
    if o.placement in (Placement.inputs, Placement.blocks):
        return _set("offload_all", "offload.placement", "all")
    return _set("keep_none", "offload.keep_last", 0, now=o.keep_last) if case.offloads and o.keep_last > 0 else None


def _lighter_batch(case: Case, peak: Peak | None) -> Advice | None:
    now = case.at_once
    if now <= 1:
        return None
    m = now // 2
    if peak is not None and case.cap_mib is not None:
        # What does not last is about proportional to the samples at once.
        while m > 1 and lasting_mib(peak) + (peak.mib - lasting_mib(peak)) * m / now > case.cap_mib:
            m //= 2
    return _set("fewer_samples", "micro_batch_size", m, samples=m, now=now)


def _escalate(case: Case) -> Advice:
    at_one = ["strategy.micro_batch_size=1"] if case.at_once == 1 and batch_of(case.result) > 1 else []
    if case.checkpoints and case.offloads:
        return Advice("used_up", own=False)
    if case.checkpoints or case.offloads:
        return Advice("both", ["strategy=hybrid", *at_one], own=False)
    return Advice("recompute_too", ["strategy=checkpoint", *at_one], own=False)


def _offload_less(case: Case) -> Advice:
    if not case.offloads:
        return Advice("free_host", own=False)
    if case.strategy.offload.placement in (Placement.all, Placement.blocks):
        return _set("inputs_only", "offload.placement", "inputs")
    if case.at_once > 1:
        return _set("fewer_copies", "micro_batch_size", case.at_once // 2)
    return Advice("recompute_instead", ["strategy=checkpoint"], own=False)


def _offload_more(case: Case) -> Advice:
    o = case.strategy.offload
    if o.min_tensor_kib > 0:
        return _set("small_tensors", "offload.min_tensor_kib", 0, now_kib=o.min_tensor_kib)
    if o.keep_last > 0:
        return _set("keep_none", "offload.keep_last", 0, now=o.keep_last)
    if o.placement in (Placement.inputs, Placement.blocks):
        return _set("offload_all", "offload.placement", "all")
    return Advice("nothing_to_move", ["strategy=checkpoint"], own=False)


# ---- more speed


def _faster(case: Case) -> Advice:
    """Gives memory back for speed; `own=False` where none of this strategy is left."""
    if case.inside_noise:
        return Advice("noise", _longer(case).overrides)
    if case.result.is_baseline:
        return Advice("baseline_too_slow", own=False)
    on_gpu = case.result.evidence in (Evidence.smoke.value, Evidence.measured.value)
    if on_gpu and case.offloads and not case.strategy.offload.pin_memory:
        return _set("pin_memory", "offload.pin_memory", "true")
    return _faster_batch(case) or _faster_offload(case) or _faster_checkpoint(case) or Advice("no_faster", own=False)


def _faster_batch(case: Case) -> Advice | None:
    m, b = case.at_once, batch_of(case.result)
    larger = min(2 * m, b)
    if m >= b or (larger == b and not (case.checkpoints or case.offloads)):
        return None  # the whole batch at once is the baseline
    return _set("more_samples", "micro_batch_size", larger, samples=larger, now=m)


def _faster_offload(case: Case) -> Advice | None:
    o = case.strategy.offload
    if not case.offloads:
        return None
    keep = max(2, 2 * o.keep_last)
    if case.result.blocks is not None and keep < case.result.blocks:
        return _set("keep_more", "offload.keep_last", keep, keep=keep, now=o.keep_last)
    if o.placement in (Placement.all, Placement.blocks):
        return _set("inputs_only", "offload.placement", "inputs")
    return None


def _faster_checkpoint(case: Case) -> Advice | None:
    c, blocks = case.strategy.checkpoint, case.result.blocks
    if c.granularity in (Granularity.blocks, Granularity.selective) and (blocks is None or 2 * c.every_k <= blocks):
        return _set("recompute_fewer_blocks", "checkpoint.every_k", 2 * c.every_k, k=2 * c.every_k, now=c.every_k)
    kept = (Granularity.none, Granularity.selective)
    if c.granularity not in kept and not case.offloads:
        return _set("selective", "checkpoint.granularity", "selective")
    return None


# ---- what is wrong, and what is not known


def _not_equivalent(case: Case) -> Advice:
    """By what makes it differ, where that is known; without a guess where it is not."""
    r, v = case.result, case.result.verification
    cause, where = (r.reason, "") if v is None else (v.cause, v.where)
    if cause == "batch_statistics":
        return Advice(cause, ["strategy=checkpoint"], names={"where": where}, own=False)
    if cause in ("loss_is_no_mean_over_samples", "state", "random", "baseline_does_not_repeat"):
        return Advice(cause, names={"where": where}, own=False)
    if case.strategy.offload.implementation is OffloadImplementation.save_on_cpu:
        return _set("hooks", "offload.implementation", "hooks")
    return Advice("cause_unknown", names={"where": where or (v.grad_worst if v else ""), "folder": r.folder}, own=False)


def _finite(case: Case) -> Advice:
    lr = ((case.result.config.get("workload") or {}).get("optimizer") or {}).get("lr", 3e-4)
    return Advice("smaller_lr", [f"workload.optimizer.lr={lr / 10:g}"], own=False)


def _save_more(case: Case) -> Advice:
    if case.result.is_baseline:
        return Advice("baseline_saves_nothing", ["strategy=micro_batch"], own=False)
    return lighter(Case(case.result))


def _more_time(case: Case) -> Advice:
    limit = case.measure("timeout_s", 1800.0)
    return Advice("more_time", [f"measure.timeout_s={2 * limit:g}"], {"timeout_s": limit})


def _longer(case: Case) -> Advice:
    m = case.result.measurement
    steps, repeats = (m.steps, m.repeats) if m is not None else (5, 1)
    more = ["measure.warmup_steps=2"] if case.measure("warmup_steps", 2) < 2 else []
    words = [f"measure.steps={max(10, 2 * steps)}", f"measure.repeats={max(3, repeats)}", *more]
    return Advice("longer", words)


def _too_short(case: Case) -> Advice:
    m, planned = case.result.measurement, case.measure("repeats", 1)
    if m is not None and m.repeats < planned:  # the command was interrupted
        return Advice("to_its_end", numbers={"ended": m.repeats, "repeats": planned})
    return _longer(case)


def _repeat_again(case: Case) -> Advice:
    m = case.result.measurement
    outcome = next((run.outcome for run in m.runs if run.error), "") if m is not None else ""
    if outcome == Outcome.oom_device.value:
        return lighter(case)
    if outcome == Outcome.timeout.value:
        return _more_time(case)
    return Advice("repeat_again", names={"folder": case.result.folder})


def _verify(case: Case) -> Advice:
    v = case.result.verification
    if v is None:
        return Advice("verify", ["measure.verify=true"])
    if v.cause in ("baseline_does_not_repeat", "random", "does_not_fit"):
        return Advice(f"verify_{v.cause}")
    return Advice("verify_longer", [f"measure.verify_steps={2 * v.steps}"])


def _run_it_or(code: str, word: str) -> Callable[[Case], Advice]:
    """Running what was only predicted; of what ran, another setting."""
    return lambda c: Advice("run_it", ["mode=measure"]) if c.result.mode == "predict" else Advice(code, [word])


def _quieter(case: Case) -> Advice:
    return Advice("quieter", [f"measure.repeats={2 * case.measure('repeats', 3):g}"])


def _at_folder(case: Case) -> Advice:
    return Advice("read_error", names={"folder": case.result.folder}, own=False)


def _always(code: str, *words: str, own: bool = True) -> Callable[[Case], Advice]:
    return lambda case: Advice(code, list(words), own=own)


#: Codes of two kinds that pull the settings in opposite directions.
MEMORY = frozenset(("out_of_memory", "over_budget", "over_memory", "saving_too_small"))
SPEED = frozenset(("below_throughput",))

#: In the order in which they decide: the first that applies gives the advice.
REASONS: dict[str, Callable[[Case], Advice]] = {
    "not_equivalent": _not_equivalent,
    "not_finite": _finite,
    "bad_setting": _always("as_said", own=False),
    "crashed": _at_folder,
    "failed": _at_folder,
    "quality_lost": _always("another_seed", "workload.seed=1", own=False),
    "nothing_offloaded": _offload_more,
    "nothing_recomputed": _always("name_blocks", own=False),
    "out_of_memory": lighter,
    "out_of_host_memory": _offload_less,
    "over_budget": lighter,
    "over_memory": lighter,
    "below_throughput": _faster,
    "saving_too_small": _save_more,
    "timed_out": _more_time,
    "repeat_failed": _repeat_again,
    "not_predictable": _always("run_it", "mode=measure"),
    "uncertain": _always("run_uncertain", "mode=measure"),
    "memory_unknown": _always("memory_pass", "measure.ledger=true"),
    "throughput_unknown": _always("run_beside", "mode=measure", "compare=true"),
    "quality_unknown": _run_it_or("evaluate", "measure.eval_batches=2"),
    "not_verified": _verify,
    "evidence_too_short": _too_short,
    "evidence_too_weak": _run_it_or("on_gpu", "device=auto"),
    "disturbed": _quieter,
}
#: Codes that say that too little is known, not that the budget is missed.
ONLY_EVIDENCE = frozenset(
    ("uncertain", "memory_unknown", "throughput_unknown", "quality_unknown", "not_verified", "evidence_too_short",
     "evidence_too_weak", "repeat_failed", "disturbed")
)  # fmt: skip
