"""The verdict of a comparison in words: what to take, why, and what to do next."""

from __future__ import annotations

from sweep.certainty import drift_words
from sweep.checks import verified_words
from sweep.findings import Difference
from sweep.knobs import strategy_of, with_overrides
from sweep.reasons import ONLY_EVIDENCE, REASONS
from sweep.results import Comparison, Decision, Evidence, TrialResult, Verdict
from sweep.words import EVIDENCE_WORDS, count, mib, ms, percent, ratio


def explain_conclusion(comparison: Comparison, results: list[TrialResult], cheapest: int | None) -> None:
    """Fill in `why` and `next_action` of the comparison, and what the other trials make of each trial's next action.

    cheapest: index of the trial that saves most per time lost, None where none saves.
    """
    for result, decision in zip(results, comparison.decisions):
        _name_what_was_run(result, decision, results, comparison.decisions)
    index = comparison.preferred_index
    if index is None:
        _nothing_accepted(comparison, results)
    elif results[index].is_baseline:
        _keep_the_baseline(comparison, results, index, cheapest)
    else:
        _take(comparison, results, index)
        if comparison.baseline_index is not None:
            baseline = comparison.decisions[comparison.baseline_index]
            if baseline.verdict != Verdict.accept.value:
                baseline.next_action = f"use {results[index].name} instead"
    certainty = [drift_words(comparison.drift), _disturbed_words(comparison, results)]
    if index is not None and "uncertain" in comparison.decisions[index].reasons:
        certainty.append("whether it fits is less sure by what the prediction does not count")
    comparison.why = "; ".join(w for w in (comparison.why, *certainty) if w)


def noise_words(step: Difference | None) -> str:
    """Behind a ratio of times: whether it is one."""
    return " (no difference in time beyond the noise)" if step is not None and step.none else ""


def _disturbed_words(comparison: Comparison, results: list[TrialResult]) -> str:
    disturbed = [r.name for r, d in zip(results, comparison.decisions) if d.disturbed]
    if not disturbed:
        return ""
    whose = "all trials" if len(disturbed) == len(results) > 1 else ", ".join(disturbed)
    return f"the times of {whose} were disturbed, so measure again on a quiet machine before relying on them"


def _name_what_was_run(
    result: TrialResult, decision: Decision, results: list[TrialResult], decisions: list[Decision]
) -> None:
    """A next action that was already run beside it is no advice without what came of it."""
    wanted = with_overrides(result, decision.next_action)
    if wanted is None:
        return
    for other, its in zip(results, decisions):
        if other is not result and strategy_of(other) == wanted:
            reasons = f", {', '.join(its.reasons)}" if its.reasons else ""
            decision.next_action += f"; run here already as {other.name}: {its.verdict}{reasons}"
            return


def _keep_the_baseline(comparison: Comparison, results: list[TrialResult], index: int, cheapest: int | None) -> None:
    decision = comparison.decisions[index]
    if comparison.cap_mib is None:
        fit = f"no memory cap is set (budget.memory_mib) and the baseline takes {mib(decision.peak_mib)}"
    else:
        spare = f", {mib(comparison.cap_mib - decision.peak_mib)} to spare" if decision.peak_mib is not None else ""
        fit = f"the baseline takes {mib(decision.peak_mib)} of the {mib(comparison.cap_mib)} allowed{spare}"
    rivals = [r for r in results if not r.is_baseline]
    timed = rivals and results[index].measurement is not None
    rank = f"; it {_rank_words(comparison, results, index)}" if timed else ""
    comparison.why = f"nothing needs to change under this budget: {fit}{rank} ({_where(comparison)})"
    if cheapest is not None:
        saving = _saving(results[cheapest], comparison.decisions[cheapest])
        comparison.next_action = f"keep the baseline; if memory gets short, {saving}"
    elif rivals:
        comparison.next_action = "keep the baseline; none of the trials saves memory"
    else:
        comparison.next_action = "keep the baseline; -m 'strategy=glob(*)' shows what each strategy would save"


def _saving(result: TrialResult, decision: Decision) -> str:
    """`micro_batch saves most per time lost: 120 MiB (38 %) at 0.80x the throughput`."""
    saved = f"{mib(decision.saved_mib)}{_share(decision)}"
    if decision.throughput_ratio is None:
        return f"{result.name} changes least and is predicted to save {saved}; what it costs in time is not known"
    if decision.step is not None and (decision.step.ratio <= 1 or decision.step.none):
        return f"{result.name} saves {saved} without a loss of time beyond the noise"
    return f"{result.name} saves most per time lost: {saved} at {ratio(decision.throughput_ratio)} the throughput"


def _take(comparison: Comparison, results: list[TrialResult], index: int) -> None:
    result, decision, m = results[index], comparison.decisions[index], results[index].measurement
    accepted = sum(d.verdict == Verdict.accept.value for d in comparison.decisions)
    words = [_why_not_the_baseline(comparison)]
    if m is None:
        among = count(accepted, "trial")
        words.append(f"{result.name} changes least among {among} predicted to fit; times are not known")
    else:
        among = f"{count(accepted, 'trial')} accepted, {ms(m.step_ms)} per step"
        words.append(f"{result.name} {_rank_words(comparison, results, index)} ({among})")
    numbers = [mib(decision.peak_mib) if decision.peak_mib is not None else "its peak is not known"]
    if comparison.cap_mib is not None:
        numbers[0] += f" of {mib(comparison.cap_mib)} allowed"
    if decision.saved_mib is not None and decision.saved_mib > 0:
        numbers.append(f"saves {mib(decision.saved_mib)}{_share(decision)}")
    if decision.throughput_ratio is not None:
        numbers.append(f"{ratio(decision.throughput_ratio)} the baseline's throughput{noise_words(decision.step)}")
    words.append(", ".join(numbers))
    words.append(verified_words(result.verification))
    if "not_verified" in decision.reasons:
        words.append("it was not verified as equal to the baseline")
    comparison.why = f"{'; '.join(w for w in words if w)} ({_where(comparison)})"
    comparison.next_action = f"use {result.name}{_confirm(comparison)}"


def _why_not_the_baseline(comparison: Comparison) -> str:
    i = comparison.baseline_index
    if i is None:
        return "there is no baseline here"
    decision = comparison.decisions[i]
    return "" if decision.verdict == Verdict.accept.value else f"the baseline is no option: {decision.why}"


def _rank_words(comparison: Comparison, results: list[TrialResult], index: int) -> str:
    own = results[index].measurement
    assert own is not None
    faster = [
        r.name
        for r, d in zip(results, comparison.decisions)
        if d.verdict == Verdict.accept.value and r.measurement is not None and r.measurement.step_ms < own.step_ms
    ]
    if not faster:
        return "is the fastest accepted"
    return f"changes least among those that cannot be told apart in time (faster by the median: {', '.join(faster)})"


def _nothing_accepted(comparison: Comparison, results: list[TrialResult]) -> None:
    """No trial is accepted: say what is nearest to it."""
    decisions = comparison.decisions
    nearest = min(range(len(results)), key=lambda i: _distance(results[i], decisions[i]))
    result, decision = results[nearest], decisions[nearest]
    what = "no trial is accepted yet" if comparison.verdict == Verdict.tune.value else "no trial is accepted"
    comparison.why = f"{what}; nearest is {result.name}: {decision.why} ({_where(comparison)})"
    comparison.next_action = f"{result.name}: {decision.next_action}"


def _distance(result: TrialResult, decision: Decision) -> tuple[float, ...]:
    """How far from acceptance: tunable first, then the fewest and lightest misses of the budget, then the smallest."""
    last = list(REASONS)
    worst = min((last.index(code) for code in decision.reasons if code in REASONS), default=len(last))
    misses = len(set(decision.reasons) - ONLY_EVIDENCE)
    over = max(0.0, (decision.peak_mib or 0.0) - (decision.cap_mib or float("inf")))
    step = result.measurement.step_ms if result.measurement is not None else float("inf")
    return float(decision.verdict != Verdict.tune.value), misses, -worst, over, step


def _share(decision: Decision) -> str:
    if decision.saved_mib is None or decision.peak_mib is None or decision.saved_mib + decision.peak_mib <= 0:
        return ""
    return f" ({percent(decision.saved_mib / (decision.saved_mib + decision.peak_mib))})"


def _confirm(comparison: Comparison) -> str:
    if comparison.evidence == Evidence.predicted.value:
        return "; nothing was run yet: run it with mode=measure"
    if comparison.evidence == Evidence.cpu.value:
        return "; this says nothing about a GPU: repeat the sweep on the one that you train on"
    return ""


def _where(comparison: Comparison) -> str:
    return EVIDENCE_WORDS.get(comparison.evidence, comparison.evidence)
