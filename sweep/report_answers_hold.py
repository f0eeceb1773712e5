"""Whether a verdict holds: evidence, noise, drift, disturbed trials, seeds, other budgets, and prediction errors."""

from __future__ import annotations

from sweep.checks import UNDECIDED
from sweep.findings import Drift
from sweep.report_blocks import USEFUL, Answer, Block, Picture, Points
from sweep.report_data import Section
from sweep.report_quality import seeds_words
from sweep.report_rows import Row
from sweep.report_times import noisy_words
from sweep.report_words import evidence_line, prediction_summary, says
from sweep.words import count, error, ms, number, percent


def hold(section: Section) -> Answer:
    points = [("Evidence:", evidence_words(section))]
    if not section.predicts:
        points.append(("Noise:", noise_words(section)))
        points.append(("Drift:", drift_words(section.comparison.drift)))
        points.append(("Disturbed:", disturbed_words(section)))
        points.append(("Seeds:", seeds_words(section)))
        points.append(("Same computation:", equality_words(section)))
    points.append(("Predicted peaks:", prediction_summary(section)))
    blocks: list[Block] = [Points([(lead, says(section, words)) for lead, words in points])]
    if section.survival:
        items = [("", says(section, line)) for line in section.survival]
        blocks.append(Points(items, USEFUL, "Under other budgets"))
    blocks.append(Picture("budgets", "Which trial is preferred under which budget"))
    return Answer("Does it hold?", blocks)


def evidence_words(section: Section) -> str:
    words = evidence_line(section)
    measured = [r.measurement for r in section.results if r.measurement is not None]
    if not measured:
        return f"{words} 0 of {count(len(section.rows), 'trial')} ran."
    # The baseline has one repeat more, for the drift.
    m = min(measured, key=lambda m: len(m.runs) or m.repeats)
    runs = [run for run in m.runs if not run.error]
    repeats = len(runs) or m.repeats
    how = ""
    if runs:
        fresh = all(run.fresh_process for run in runs)
        turns = len({run.index for run in runs}) > 1
        how = (", each in a fresh process" if fresh else ", in one process") + (
            ", in turn over the trials" if turns else ""
        )
    failed = sum(bool(run.error) for other in measured for run in other.runs)
    lost = f" {count(failed, 'repeat')} did not come to an end and do not count." if failed else ""
    least = min(len(x.step_times_ms) or x.steps * x.repeats for x in measured)
    return (
        f"{words} {len(measured)} of {count(len(section.rows), 'trial')} ran; {count(repeats, 'repeat')} of "
        f"{count(m.steps, 'timed step')}{how}: at least {count(least, 'step time')} per trial.{lost}"
    )


def noise_words(section: Section) -> str:
    timed = [r for r in section.rows if r.step_ms is not None]
    if not timed:
        return "not known: 0 trials were timed"
    with_interval = [r for r in timed if r.step_ms_ci_low is not None and r.step_ms_ci_high is not None and r.step_ms]
    words = []
    if with_interval:
        widest = max(with_interval, key=lambda r: _half_width(r))
        words.append(
            f"95 % bootstrap intervals of the median step times, the widest ± {percent(_half_width(widest), 1)} "
            f"({widest.name})"
        )
    else:
        spread = max((r.step_half_spread_ms or 0.0) / r.step_ms for r in timed if r.step_ms)
        words.append(f"half the distance between the quartiles is at most {percent(spread, 1)} of the step time")
    same = [r.name for r in section.candidates if r.step is not None and r.step.none]
    if same:
        words.append(f"no difference in time beyond the noise: {', '.join(same)}")
    noisy = noisy_words(section)
    return "; ".join(words) + (f". {noisy}" if noisy else "")


def _half_width(row: Row) -> float:
    """Half of the interval as a share of the step time."""
    return ((row.step_ms_ci_high or 0.0) - (row.step_ms_ci_low or 0.0)) / 2 / row.step_ms if row.step_ms else 0.0


def drift_words(drift: Drift | None) -> str:
    """What the machine itself did between the first and the last repeat of the baseline."""
    if drift is None:
        return "not known: the baseline was not repeated at the end (0 repeats; measure.drift=true repeats it)"
    d = drift.difference
    change = f"{percent(d.ratio - 1, 1, sign=True)}"
    interval = f"95 % interval {percent(d.low - 1, 1, sign=True)} to {percent(d.high - 1, 1, sign=True)}"
    said = "none beyond the noise" if d.none else "beyond the noise, so differences of this size may be the machine's"
    return (
        f"the baseline took {ms(drift.first_ms)} per step at first and {ms(drift.last_ms)} in the end, "
        f"{number(drift.minutes)} minutes later: {change} ({interval}), {said}"
    )


def disturbed_words(section: Section) -> str:
    """Whose times may not be their own."""
    disturbed = [r for r in section.rows if r.disturbed]
    if disturbed:
        told = [
            f"{r.name} ({r.disturbed[0]}{f'; and {len(r.disturbed) - 1} more' if len(r.disturbed) > 1 else ''})"
            for r in disturbed
        ]
        return f"{len(disturbed)} of {count(len(section.rows), 'trial')}: {', '.join(told)}"
    observed = sum(run.conditions is not None for r in section.results if r.measurement for run in r.measurement.runs)
    if not observed:
        return "not known: the machine was not observed (0 readings)"
    of = count(len(section.rows), "trial")
    return f"0 of {of}, by {count(observed, 'reading')} of the machine while steps were timed"


def equality_words(section: Section) -> str:
    """Whether what was compared computes the same."""
    checked = [r for r in section.candidates if r.verified is not None]
    if not checked:
        return "0 trials were verified against the baseline"
    unknown = [r.name for r in checked if r.verified_status in UNDECIDED]
    bad = [r.name for r in checked if not r.verified and r.name not in unknown]
    worst = max((r.grad_rel_err for r in checked if r.grad_rel_err is not None and r.verified), default=None)
    allowed = max((r.tolerance for r in checked if r.tolerance is not None), default=None)
    of = f"{len(checked) - len(bad) - len(unknown)} of {count(len(checked), 'trial')}"
    words = (
        f"loss, gradients, buffers and updates of {of} equal the baseline's; "
        f"largest relative error of a gradient {error(worst)} (allowed {error(allowed)})"
    )
    how: dict[str, list[str]] = {}
    for row in checked:
        if row.verified_how:
            how.setdefault(row.verified_how, []).append(row.name)
    words += "".join(f"; compared: {said}: {', '.join(names)}" for said, names in how.items())
    words += f"; not known: {', '.join(unknown)}" if unknown else ""
    return words + (f"; not equal: {', '.join(bad)}" if bad else "")
