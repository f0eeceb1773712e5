"""Sentences and cells over the trials of one comparison: what its numbers rest on and how to read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from sweep.decide.verdict import UNDECIDED
from sweep.format import EVIDENCE_SHORT, NOT_KNOWN, count, error, loss, mib, ms, number, percent, ratio, signed_loss
from sweep.report import phrases
from sweep.report.data import Row, Section
from sweep.report.phrases import CATEGORY_WORDS, capital, sentence
from sweep.results import CONFIDENCE, Drift, Evidence, Holder, Peak, Quality, Verification

#: Half the distance between the quartiles over the median: from here on a step time is called noisy.
NOISY = 0.25
#: A prediction that is further off than this is worth a line of its own.
WELL_PREDICTED = 0.01
#: Held outputs are told from this share of the peak on.
WORTH_A_LINE = 0.01


def says(section: Section, words: str) -> str:
    """A sentence with a capital letter, unless it begins with the name of a trial."""
    return sentence(words, first=not any(words.startswith(row.name) for row in section.rows))


def by_words(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by what is said of them, as what is equal is said once; "" is said of none."""
    found: dict[str, list[str]] = {}
    for words, name in pairs:
        if words:
            found.setdefault(words, []).append(name)
    return found


# -- evidence and verdict ---------------------------------------------------------------------------------------------


def evidence_line(section: Section) -> str:
    """What the numbers of a section are, so that none is taken for more."""
    if section.predicts:
        return "Predicted, not measured. Times and shares of FLOPs are theoretical."
    return {
        Evidence.cpu.value: "Emulated on a CPU: memory counts every tensor; times are this CPU's. Neither was measured "
        "on a GPU.",
        Evidence.smoke.value: "Run on a GPU, but (in part) too short to conclude: nothing too short is accepted.",
        Evidence.measured.value: "Measured on a GPU. Memory is the allocator's peak of allocated bytes.",
    }.get(section.comparison.evidence, "No trial ran to its end.")


def against_line(section: Section) -> str:
    c = section.comparison
    cap = f" Cap: {mib(c.cap_mib)} ({c.cap_source})." if c.cap_mib is not None else ""
    return f"{evidence_line(section)} {sentence(f'Against {phrases.against(c, section.results)}')}{cap}"


def verdict_line(section: Section) -> str:
    c = section.comparison
    return f"{c.verdict} {c.preferred}" if c.preferred is not None else c.verdict


def next_lines(section: Section) -> list[tuple[str, str]]:
    """For each trial that is not accepted: its name, verdict and reasons, what is against it, and what to do."""
    lines = []
    for row in section.rows:
        d = row.decision
        if d.verdict != "accept":
            reasons = f" ({', '.join(d.reasons)})" if d.reasons else ""
            then = f" Next: {sentence(phrases.advice(d.advice), first=False)}" if d.advice is not None else ""
            why = sentence(phrases.why(row.result, d), first=False)
            lines.append((f"{row.name} {d.verdict}{reasons}:", f"{why}{then}"))
    return lines


# -- times ------------------------------------------------------------------------------------------------------------


def spread(row: Row) -> str:
    """`310 (305-316)` with the interval of the median where it is known, else `118.2 ±2.4` with the quartiles."""
    step, half = row.step_ms, row.half_spread_ms
    if step is None or half is None:
        return NOT_KNOWN
    if row.interval_ms is not None:
        low, high = row.interval_ms
        n = _decimals(high - low, step)
        return f"{step:.{n}f} ({low:.{n}f}-{high:.{n}f})"
    shown = number(step)
    return f"{shown} ±{half:.{len(shown.partition('.')[2])}f}"


def _decimals(width: float, size: float) -> int:
    """Decimals that an interval of this width leaves worth showing: one digit of the width, and three of the value."""
    if width <= 0 or size <= 0:
        return len(number(size).partition(".")[2])
    return max(0, min(-math.floor(math.log10(width)), 2 - math.floor(math.log10(size)) + 1, 3))


def speed(row: Row) -> str:
    """Throughput over the baseline's, or that there is no difference beyond the noise."""
    return "none" if row.decision.step is not None and row.decision.step.none else ratio(row.decision.throughput_ratio)


def change_cell(row: Row) -> str:
    """The step time against the baseline's: `+65 % (+58 to +71)`, `none (-1 to +3 %)`."""
    d, rate = row.decision.step, row.decision.throughput_ratio
    if row.is_baseline or (d is None and not rate):
        return NOT_KNOWN
    if d is None:
        return percent(1 / (rate or 1.0) - 1, sign=True)
    digits = 1 if d.high - d.low < 0.02 else 0
    low, high = (percent(x - 1, digits, sign=True).removesuffix(" %") for x in (d.low, d.high))
    return f"none ({low} to {high} %)" if d.none else f"{percent(d.ratio - 1, digits, sign=True)} ({low} to {high})"


def time_words(section: Section, row: Row) -> str:
    """The step time with its interval and its change against the baseline's."""
    words, m, base = f"{ms(row.step_ms)} per step", row.measured, section.baseline
    if row.interval_ms is not None:
        low, high = row.interval_ms
        n = _decimals((high - low) / 10, row.step_ms or 0.0)
        words += f" (95 % interval {low:.{n}f} to {high:.{n}f} ms)"
    elif row.half_spread_ms is not None:
        words += f" (± {ms(row.half_spread_ms)}, half the distance between the quartiles)"
    words += f", {number(m.samples_per_s if m is not None else None)} samples/s"
    d, rate = row.decision.step, row.decision.throughput_ratio
    if row.is_baseline or base is None or base.step_ms is None or (d is None and rate is None):
        return f"{words}."
    against_base = f"against the baseline's {ms(base.step_ms)}"
    if d is None:
        change = percent(1 / (rate or 1.0) - 1, 1, sign=True)
        return f"{words}; {change} {against_base}, and whether that is noise is not known."
    change = percent(d.ratio - 1, 1, sign=True)
    interval = f"95 % interval {percent(d.low - 1, 1, sign=True)} to {percent(d.high - 1, 1, sign=True)}"
    if d.none:
        return f"{words}; {none_words(section)} {against_base} ({change}, {interval})."
    return f"{words}; {change} {against_base} ({interval})."


def none_words(section: Section) -> str:
    """What a difference that is called none is not beyond: the noise, and the machine's drift where there was one."""
    drift = section.comparison.drift
    return "no difference beyond the noise" + (" and the drift" if drift and not drift.difference.none else "")


def noisy_words(section: Section) -> str:
    """Whose steps vary so much that differences may be chance; "" where none do."""
    noisy = [r.name for r in section.rows if r.step_ms and (r.half_spread_ms or 0.0) > NOISY * r.step_ms]
    if not noisy:
        return ""
    return (
        f"Noisy: the steps of {', '.join(noisy)} vary by more than a quarter, so differences in speed may be chance; "
        "measure again on a quiet machine, or with more measure.steps."
    )


def noise_words(section: Section) -> str:
    timed = [r for r in section.rows if r.step_ms]
    if not timed:
        return "not known: 0 trials were timed"
    widths = [((i[1] - i[0]) / 2 / (r.step_ms or 1.0), r.name) for r in timed if (i := r.interval_ms) is not None]
    if widths:
        widest, name = max(widths)
        words = f"95 % bootstrap intervals of the median step times, the widest ± {percent(widest, 1)} ({name})"
    else:
        half = max((r.half_spread_ms or 0.0) / (r.step_ms or 1.0) for r in timed)
        words = f"half the distance between the quartiles is at most {percent(half, 1)} of the step time"
    same = [r.name for r in section.candidates if r.decision.step is not None and r.decision.step.none]
    words += f"; no difference in time beyond the noise: {', '.join(same)}" if same else ""
    noisy = noisy_words(section)
    return f"{words}. {noisy}" if noisy else words


def drift_words(drift: Drift | None) -> str:
    """What the machine itself did between the first and the last repeat of the baseline."""
    if drift is None:
        return "not known: the baseline was not repeated at the end (0 repeats; measure.drift=true repeats it)"
    d = drift.difference
    interval = f"95 % interval {percent(d.low - 1, 1, sign=True)} to {percent(d.high - 1, 1, sign=True)}"
    beyond = "none beyond the noise" if d.none else "beyond the noise, so differences of this size may be the machine's"
    return (
        f"the baseline took {ms(drift.first_ms)} per step at first and {ms(drift.last_ms)} in the end, "
        f"{number(drift.minutes)} minutes later: {percent(d.ratio - 1, 1, sign=True)} ({interval}), {beyond}"
    )


def disturbed_words(section: Section) -> str:
    """Whose times are unreliable."""
    disturbed, of = [r for r in section.rows if r.decision.disturbed], count(len(section.rows), "trial")
    if disturbed:
        told = [f"{r.name} ({phrases.disturbances(r.decision.disturbed)})" for r in disturbed]
        return f"{len(disturbed)} of {of}: {', '.join(told)}"
    runs = [run for r in section.rows if r.measured is not None for run in r.measured.runs]
    observed = sum(run.conditions is not None for run in runs)
    if not observed:
        return "not known: the machine was not observed (0 readings)"
    return f"0 of {of}, by {count(observed, 'reading')} of the machine while steps were timed"


def repeats_words(section: Section) -> str:
    """How many trials ran, how often and how."""
    of = count(len(section.results), "trial")
    measured = [r.measurement for r in section.results if r.measurement is not None]
    if not measured:
        return f"0 of {of} ran."
    # The baseline has one repeat more, for the drift.
    m = min(measured, key=lambda m: len(m.runs) or m.repeats)
    runs, how = [run for run in m.runs if not run.error], ""
    if runs:
        how = ", each in a fresh process" if all(run.fresh_process for run in runs) else ", in one process"
        how += ", in turn over the trials" if len({run.index for run in runs}) > 1 else ""
    failed = sum(bool(run.error) for other in measured for run in other.runs)
    lost = f" {count(failed, 'repeat')} did not come to an end and do not count." if failed else ""
    least = min(len(x.step_times_ms) or x.steps * x.repeats for x in measured)
    steps = f"{count(len(runs) or m.repeats, 'repeat')} of {count(m.steps, 'timed step')}{how}"
    return f"{len(measured)} of {of} ran; {steps}: at least {count(least, 'step time')} per trial.{lost}"


# -- quality and equality ---------------------------------------------------------------------------------------------


def quality_cell(row: Row) -> str:
    """`equal, 0`, `worse, +0.04 (+0.02 to +0.06)`, `not known, +0.04 (1 seed)`."""
    q = row.decision.quality
    if q is None or row.is_baseline:
        return NOT_KNOWN
    if q.verdict == "unknown":
        return f"not known, {signed_loss(q.difference)} (1 seed)"
    return "equal, 0" if q.difference == 0 else f"{q.verdict}, {signed_loss(q.difference)}{_interval(q)}"


def _interval(q: Quality) -> str:
    if q.difference_low is None or q.difference_high is None:
        return ""
    return f" ({signed_loss(q.difference_low)} to {signed_loss(q.difference_high)})"


def quality_words(row: Row) -> str:
    q = row.decision.quality
    if q is None and row.eval_loss is None:
        return "held-out loss was not evaluated (measure.eval_batches=0)."
    if row.is_baseline or q is None:
        return f"held-out loss {loss(row.eval_loss)}."
    words = {"equal": "equal to the baseline's", "unknown": "not known"}
    verdict = words.get(q.verdict, f"{q.verdict} than the baseline's")
    interval = "" if q.loss_low is None else f" (95 % interval {loss(q.loss_low)} to {loss(q.loss_high)})"
    return f"held-out loss {loss(q.loss)}{interval}, {verdict}: {phrases.quality_why(q)}."


def quality_lines(section: Section) -> list[str]:
    """Which candidates' held-out losses are worse, better, equal, or not known."""
    judged = [(r.name, q) for r in section.candidates if (q := r.decision.quality) is not None]
    exact = [name for name, q in judged if q.verdict == "equal" and q.difference == 0]
    lines = [f"equal to the last bit: {', '.join(exact)}"] if exact else []
    heads = {"worse": "worse", "better": "better", "equal": "equal within the noise"}
    for verdict, head in [*heads.items(), ("unknown", "not known with 1 seed (measure.seeds=3 would tell)")]:
        of_it = [(n, q) for n, q in judged if q.verdict == verdict and n not in exact]
        told = [f"{n} {signed_loss(q.difference)}{_interval(q)}" for n, q in of_it]
        lines += [f"{head}: {', '.join(told)}"] if told else []
    return lines


def seeds_words(section: Section) -> str:
    """How many seeds stand behind the losses, and what their intervals do not say."""
    compared = [q for r in section.candidates if (q := r.decision.quality) is not None]
    if not compared:
        return "no held-out loss was compared."
    seeds = max(q.seeds for q in compared)
    if seeds == 1:
        return (
            "1 seed, so losses that are not equal to the last bit cannot be told from chance; measure.seeds=3 repeats "
            "with others."
        )
    outside = [q.curve_outside_ratio for q in compared if q.curve_outside_ratio is not None]
    band = ""
    if outside:
        steps = f"At most {percent(max(outside))} of the steps of a mean training curve"
        band = f" {steps} lie outside of the baseline's band."
    return (
        f"{count(seeds, 'seed')}, compared in pairs.{band} Each interval stands for itself: among "
        f"{count(len(compared), 'comparison')} about {(1 - CONFIDENCE) * len(compared):.2g} would be called different "
        "by chance alone."
    )


def compared_lines(section: Section) -> list[str]:
    """`compared: gradients in 100 % of the parameters over 2 steps, random draws fixed: micro_batch, offload`"""
    pairs = [(_how(v), r.name) for r in section.rows if (v := r.result.verification) is not None]
    return [f"compared: {words}: {', '.join(names)}" for words, names in by_words(pairs).items()]


def _how(v: Verification) -> str:
    steps, said = count(v.steps, "step"), []
    if v.compared_share is not None:
        said.append(f"gradients in {percent(v.compared_share)} of the parameters over {steps}")
    said += ["quickly"] if v.mode == "quick" else []
    said += ["random draws fixed"] if v.dropout != "on" else []
    return ", ".join(said + ([v.scope] if v.scope != "full" else []))


def equality_words(section: Section) -> str:
    """Whether what was compared computes the same."""
    checked = [(r.name, v) for r in section.candidates if (v := r.result.verification) is not None]
    if not checked:
        return "0 trials were verified against the baseline"
    unknown = [name for name, v in checked if v.status in UNDECIDED]
    bad = [name for name, v in checked if not v.passed and v.status not in UNDECIDED]
    worst = max((v.grad_rel_err for _, v in checked if v.grad_rel_err is not None and v.passed), default=None)
    equal = f"{len(checked) - len(bad) - len(unknown)} of {count(len(checked), 'trial')}"
    words = [
        f"loss, gradients, buffers and updates of {equal} equal the baseline's",
        f"largest relative error of a gradient {error(worst)} (allowed {error(max(v.tolerance for _, v in checked))})",
        *compared_lines(section),
        *([f"not known: {', '.join(unknown)}"] if unknown else []),
        *([f"not equal: {', '.join(bad)}"] if bad else []),
    ]
    return "; ".join(words)


# -- memory -----------------------------------------------------------------------------------------------------------


def largest_line(peak: Peak, most: int = 5) -> str:
    """The largest single holders of memory at a peak, in one line; those of like blocks together."""
    alike: dict[tuple[str, str], list[Holder]] = {}
    for holder in peak.largest:
        alike.setdefault((re.sub(r"\d+", "*", holder.name), holder.category), []).append(holder)
    shown = []
    for (pattern, category), group in list(alike.items())[:most]:
        words, first = CATEGORY_WORDS.get(category, category), group[0]
        if len(group) == 1:
            tensors = f" in {first.count} tensors" if first.count > 1 else ""
            shown.append(f"{first.name or '(outside of any module)'} {mib(first.mib)} {words}{tensors}")
        else:
            upto = "" if len({number(h.mib) for h in group}) == 1 else "up to "
            shown.append(f"{len(group)} x {pattern}, {upto}{mib(max(h.mib for h in group))} {words} each")
    return "; ".join(shown)


def prediction_lines(section: Section) -> list[str]:
    """Measured against predicted peaks: in one line where they agree, and one for each trial where they do not."""
    if section.predicts:
        return []
    close, lines = [], []
    for row in section.rows:
        p, off = row.predicted, row.error_ratio
        if p is not None and off is None:
            fits = "fits" if p.fits else "does not fit"
            lines.append(f"{row.name}: predicted {mib(p.allocated_mib)} ({fits}), not measured ({row.result.outcome})")
        elif p is not None and off is not None and abs(off) > WELL_PREDICTED:
            sizes = f"predicted {mib(p.allocated_mib)}, measured {mib(row.peak_mib)}"
            lines.append(f"{row.name}: {sizes} ({percent(off, 2, sign=True)})")
        elif off is not None:
            close.append(abs(off))
    if close:
        trials = count(len(close), "trial")
        lines.insert(0, f"within {percent(max(1e-4, *close), 2)} of the measured peak for {trials}")
    errors = by_words((row.result.prediction_error, row.name) for row in section.rows)
    return lines + [f"{', '.join(names)}: not predicted: {words}" for words, names in errors.items()]


def premise_lines(section: Section) -> list[str]:
    """What the peaks of a table rest on: what is not counted, whose peak it is, and what lies in the blocks."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in section.rows:
        for what, value in _premises(section, row):
            found.setdefault(what, {}).setdefault(value, []).append(row.name)
    known = sum(row.predicted is not None or row.measured is not None for row in section.rows)
    lines = []
    for what, values in found.items():
        everywhere = len(values) == 1 and len(next(iter(values.values()))) >= known
        whose = {value: "" if everywhere else f"({', '.join(names)})" for value, names in values.items()}
        told = "; ".join(" ".join(filter(None, pair)) for pair in whose.items())
        # Without a number there is nothing to say but whose it is.
        lines.append(capital(f"{what}{': ' if any(values) else ' ' if told else ''}{told}") + ".")
    return lines + _blocks_line(section)


def _premises(section: Section, row: Row) -> list[tuple[str, str]]:
    """What one has to know of a peak, and the number in it, "" for none."""
    m, p = row.measured, row.predicted
    own, of_prediction = (m or p), p.caveats if p is not None else []
    lines = [(caveat, "") for caveat in own.caveats] if own is not None else []
    if m is None and p is not None and p.held_outputs_mib > WORTH_A_LINE * (row.peak_mib or 0.0):
        what = "outputs at the peak that the loop holds until the step ends (workload.hold_outputs=false lets them go)"
        lines.append((what, mib(p.held_outputs_mib)))
    of = "" if section.predicts else ", of the predictions"
    return lines + [(f"{c}{of}", "") for c in of_prediction if own is not None and c not in own.caveats]


def _blocks_line(section: Section) -> list[str]:
    """Which modules were taken as blocks, and what share of the baseline's activations lies in them."""
    first = next((r for r in section.results if r.block_patterns), None)
    if first is None:
        return []
    line, share = f"Blocks: {', '.join(first.block_patterns)}", first.block_share
    if share is None:
        return [f"{line}."]
    line += f", with {percent(share)} of the baseline's activations."
    if share >= 0.5:
        return [line]
    return [f"WARNING: {line} What works on blocks leaves the larger part alone: name others with workload.blocks."]


# -- how to read the tables -------------------------------------------------------------------------------------------


def table_notes(section: Section) -> list[str]:
    if section.predicts:
        unsure = any(r.predicted is not None and r.predicted.unsure for r in section.rows)
        less = " (?: less what is not counted)" if unsure else ""
        return [
            f"allocated, reserved: peaks. headroom: capacity less reserved and context{less}.",
            "would move: to the host and back, per step. transfer: its theoretical time at the link's bandwidth.",
            "recompute: FLOPs computed again, over those of a step that recomputes nothing.",
        ]
    ran, lines = [r.measurement for r in section.results if r.measurement is not None], []
    if ran:
        # The baseline has one repeat more, for the drift.
        step = f"median over {count(min(m.repeats for m in ran), 'repeat')} of {count(ran[0].steps, 'step')}"
        interval = any(r.interval_ms for r in section.rows)
        step += " (its 95 % interval)" if interval else ", ± half the distance between its quartiles"
        none = any(r.decision.step and r.decision.step.none for r in section.rows)
        lines.append(f"step: {step}; speed: against the baseline{f'; none: {none_words(section)}' if none else ''}.")
    lines += [noisy] if (noisy := noisy_words(section)) else []
    if any(r.decision.quality is not None for r in section.candidates):
        lines.append(
            "quality: held-out loss less the baseline's over the same seeds (95 % interval of the mean), after these "
            "steps, not a whole training run; equal: differences inside of the interval are not ruled out."
        )
    verified = [v for r in section.rows if (v := r.result.verification) is not None]
    if verified:
        lines.append(
            "grad err: largest relative error of a parameter's gradient against the baseline's (allowed "
            f"{error(max(v.tolerance for v in verified))}; 0: no difference)."
        )
    return lines + [capital(f"{line}.") for line in compared_lines(section)]


def evidence_of(row: Row) -> str:
    """`on this CPU`"""
    return EVIDENCE_SHORT.get(row.result.evidence, row.result.evidence)
