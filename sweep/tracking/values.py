"""What a trial leaves in MLflow, as plain names and values: no MLflow here, so this can be read and tested by itself.

MLflow's rules that are kept here: names of letters, digits, `_ - .` and space, with `/` only where it groups; at most
250 characters in a name, 6000 in a parameter, 8000 in a tag; parameters never change; metrics are finite numbers.
"""

from __future__ import annotations

import colorsys
import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from sweep.config import strategy_names
from sweep.config.addresses import without_secrets
from sweep.config.schema import OffloadConf, Placement, plain
from sweep.results import Comparison, Decision, Measurement, Outcome, Peak, TrialResult, Verdict

NAME_LIMIT, PARAM_LIMIT, TAG_LIMIT = 250, 6000, 8000
#: The tag that MLflow's page shows as a run's description.
NOTE = "mlflow.note.content"

#: Short, for the labels of axes and columns; no key of the config is called so.
STRATEGY, MICRO_BATCH, ACCUMULATION, CHECKPOINT, OFFLOAD = (
    "strategy", "micro_batch", "accumulation", "checkpoint", "offload",
)  # fmt: skip

#: Hue in degrees of each kind of strategy.
HUES = {"micro_batch": 212, "checkpoint": 28, "checkpoint_selective": 345, "offload": 150, "hybrid": 280}
BASELINE_COLOR = "#3f4650"
#: Lightness by halvings of the batch: the smaller the micro-batch, the darker.
SHADES = (0.68, 0.57, 0.47, 0.38, 0.29)

#: (name, value, step)
MetricValue = tuple[str, float, int]
#: Decimals by a part of the name, first match. MLflow's page shows every digit it is given (268.1328125), and no more
#: of them mean anything: 0.001 MiB is a KiB. The whole numbers are in result.json. Errors and curves stay as they are.
DECIMALS = (("error_ratio", 6), ("ratio", 4), ("_mib", 3), ("_ms", 3), ("_per_s", 3), ("eval_loss", 5))
#: Groups of MLflow's page, and the fields of a measurement and of a decision that they show.
MEASURED = {
    "memory": ("peak_allocated_mib", "peak_reserved_mib"),
    "time": ("step_ms", "step_ms_low", "step_ms_high", "step_ms_ci_low", "step_ms_ci_high"),
    "throughput": ("samples_per_s", "tokens_per_s"),
    "quality": ("eval_loss", "eval_loss_before"),
    "transfer": ("to_host_mib", "from_host_mib"),
    "trial": ("repeats",),
}
#: Outcomes that are a finding about the strategy and not something that went wrong.
FINISHED_OUTCOMES = (Outcome.ok.value, Outcome.over_budget.value)


# Parameters


def params_of(config: dict[str, Any]) -> dict[str, str]:
    """The config as MLflow parameters: dotted keys, values as one would write them on the command line."""
    params: dict[str, str] = {}
    for key, value in _leaves(plain(config), "") if config else ():
        name = free = param_name(key)
        number = 1
        while free in params:  # two keys may become one name, for which MLflow would refuse the whole batch
            number += 1
            free = f"{name[: NAME_LIMIT - 5]}_{number}"
        # MLflow servers read an empty value as a missing one.
        params[free] = cut((value or "''") if isinstance(value, str) else json.dumps(value, default=str), PARAM_LIMIT)
    return params


def param_name(key: str) -> str:
    """A name that MLflow accepts; an over-long one keeps its start and gets a digest, so that it stays unique."""
    name = re.sub(r"[^\w.\- ]", "_", key)
    if name.startswith(".") or not name.strip():
        name = "_" + name  # MLflow refuses names that would be a path to elsewhere
    if len(name) > NAME_LIMIT:
        name = f"{name[: NAME_LIMIT - 9]}_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return name


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def knobs_of(result: TrialResult) -> dict[str, str]:
    """What a strategy sets, in few short parameters; none without a strategy.

    `micro_batch`: samples at once. `accumulation`: micro-steps per optimizer step. `offload`: where, and what differs
    from the defaults.
    """
    if not result.config.get("strategy"):
        return {}
    s, batch = strategy_names.strategy_of(result), strategy_names.batch_of(result)
    o = s.offload
    offload = [strategy_names.describe_placement(o)]
    if o.placement is not Placement.none:
        offload += [f">={o.min_tensor_kib:g}K"] if o.min_tensor_kib != OffloadConf.min_tensor_kib else []
        offload += [f"keep {o.keep_last}"] if o.keep_last != OffloadConf.keep_last else []
        offload += [o.implementation.name] if o.implementation != OffloadConf.implementation else []
    return {
        STRATEGY: s.name,
        MICRO_BATCH: str(strategy_names.micro_batch_size(s, batch)),
        ACCUMULATION: str(strategy_names.accumulation_steps(s, batch)),
        CHECKPOINT: strategy_names.describe_checkpoint(s.checkpoint),
        OFFLOAD: " ".join(offload),
    }


def color_of(result: TrialResult) -> str:
    """#rrggbb: the hue says what kind of strategy it is, the shade how small its micro-batches are."""
    s, batch = strategy_names.strategy_of(result), strategy_names.batch_of(result)
    kind = strategy_names.kind_of(s, batch)
    if result.is_baseline or kind not in HUES:
        return BASELINE_COLOR
    halvings = round(math.log2(strategy_names.accumulation_steps(s, batch)))
    shade = SHADES[min(halvings, len(SHADES) - 1)]
    red, green, blue = colorsys.hls_to_rgb(HUES[kind] / 360, shade, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


# Metrics


def metrics_of(result: TrialResult) -> list[MetricValue]:
    """All finite numbers of a result under grouped names, single values at step 0, curves at their steps."""
    # MLflow's page that compares runs begins with the first of them.
    found: list[tuple[str, Any, int]] = []
    if result.measurement is not None:
        found += _measured(result.measurement)
    if result.verification is not None:
        found += _numbers("verify", result.verification)
    if result.prediction is not None:
        found += _numbers("predicted", result.prediction)
        if result.prediction.peak is not None:
            found += _shares("predicted", result.prediction.peak)
    if result.decision is not None:
        found += _decided(result.decision)
    found += [(f"trial/{name}", getattr(result, name), 0) for name in ("parameters", "blocks", "wall_s")]
    return finite(found)


def decision_metrics_of(result: TrialResult) -> list[MetricValue]:
    """What is known only once all candidates of the comparison have been judged."""
    found = [] if result.decision is None else list(_decided(result.decision))
    if result.prediction is not None:
        found.append(("predicted/error_ratio", result.prediction.error_ratio, 0))
    return finite(found)


def _measured(m: Measurement) -> Iterator[tuple[str, Any, int]]:
    yield from ((f"{group}/{name}", getattr(m, name), 0) for group, names in MEASURED.items() for name in names)
    yield "trial/timed_steps", m.steps, 0
    yield from ((f"time/{_word(phase)}_ms", value, 0) for phase, value in m.phases_ms.items())
    if m.peak is not None:
        yield "memory/host_peak_mib", m.peak.host_peak_mib, 0
        yield from _shares("memory", m.peak)
    yield from (("quality/train_loss", value, step) for step, value in enumerate(m.train_loss))
    yield from (("time/each_step_ms", value, step) for step, value in enumerate(m.step_times_ms))


def _numbers(group: str, found: Any) -> Iterator[tuple[str, Any, int]]:
    """The fields of a dataclass that are numbers, or yes or no."""
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if isinstance(value, (bool, int, float)):
            yield f"{group}/{field.name}", value, 0


def _shares(group: str, peak: Peak) -> Iterator[tuple[str, Any, int]]:
    yield from ((f"{group}/at_peak/{_word(category)}_mib", mib, 0) for category, mib in peak.at_peak_mib.items())
    yield from ((f"{group}/phase_peak/{_word(phase)}_mib", mib, 0) for phase, mib in peak.phase_peaks_mib.items())


def _decided(d: Decision) -> Iterator[tuple[str, Any, int]]:
    yield "memory/peak_mib", d.peak_mib, 0
    yield "memory/saved_mib", d.saved_mib, 0
    yield "throughput/ratio", d.throughput_ratio, 0
    yield "quality/eval_loss_ratio", d.eval_loss_ratio, 0
    if d.step is not None:  # step time over the baseline's, with its interval
        yield "time/step_ratio", d.step.ratio, 0
        yield "time/step_low_ratio", d.step.low, 0
        yield "time/step_high_ratio", d.step.high, 0
    if d.quality is not None and d.quality.seeds > 1:
        yield "quality/loss_difference", d.quality.difference, 0
        yield "quality/loss_difference_low", d.quality.difference_low, 0
        yield "quality/loss_difference_high", d.quality.difference_high, 0
        yield "quality/seeds", d.quality.seeds, 0


def finite(values: Iterable[tuple[str, Any, int]]) -> list[MetricValue]:
    """The values that are known and finite, without digits that mean nothing."""
    known = [(name, float(value), step) for name, value, step in values if value is not None and math.isfinite(value)]
    return [(name, _readable(name, value), step) for name, value, step in known]


def _readable(name: str, value: float) -> float:
    decimals = next((decimals for part, decimals in DECIMALS if part in name), None)
    return value if decimals is None else round(value, decimals)


def _word(name: object) -> str:
    """A part of a metric's name. Enum members stand for their value."""
    return re.sub(r"[^\w\-]", "_", str(getattr(name, "value", name)))


def repeat_metrics_of(measurement: Measurement | None) -> list[MetricValue]:
    """Each repeat's median step time, held-out loss and peaks, at the step that is its round."""
    found: list[tuple[str, Any, int]] = []
    for run in measurement.runs if measurement is not None else ():
        if not run.error and run.step_times_ms:
            found.append(("repeat/step_ms", statistics.median(run.step_times_ms), run.index))
            names = ("eval_loss", "peak_allocated_mib", "peak_reserved_mib")
            found += [(f"repeat/{name}", getattr(run, name), run.index) for name in names]
    return finite(found)


def sweep_metrics_of(comparisons: Sequence[Comparison]) -> list[MetricValue]:
    """How many trials were judged and how many accepted, and the preferred one's peak and speed (of the first
    comparison that has one); none without a comparison."""
    verdicts = [decision.verdict for c in comparisons for decision in c.decisions]
    found: dict[str, float | None] = {"trials": len(verdicts), "accepted": verdicts.count(Verdict.accept.value)}
    best = next((c.decisions[c.preferred_index] for c in comparisons if c.preferred_index is not None), None)
    if best is not None:
        found |= {"peak_mib": best.peak_mib, "throughput_ratio": best.throughput_ratio}
    return [(f"sweep/{k}", v, 0) for k, v in found.items() if v is not None] if comparisons else []


# Tags


def plan_tags_of(result: TrialResult) -> dict[str, str]:
    """What is known of a trial before it starts."""
    names = ("strategy", "workload", "device", "mode", "fixed_id", "strategy_id", "data_version", "command", "folder")
    tags = {name: getattr(result, name) for name in names}
    return _filled({**tags, "is_baseline": str(result.is_baseline).lower(), "overrides": " ".join(result.overrides)})


def result_tags_of(result: TrialResult) -> dict[str, str]:
    """What is known of a trial once it has ended. An empty `error` clears what an earlier command wrote there."""
    tags = plan_tags_of(result) | {"outcome": result.outcome, "evidence": result.evidence}
    tags["prediction_error"] = result.prediction_error
    measured, predicted, v = result.measurement, result.prediction, result.verification
    peak = (measured and measured.peak) or (predicted and predicted.peak)
    if peak:
        tags |= {"peak_phase": peak.phase, "peak_operator": peak.operator, "peak_module": peak.module}
    if predicted is not None:
        tags["prediction_caveats"] = "; ".join(predicted.caveats)
    if v is not None:
        tags |= {"verified": str(v.passed).lower(), "verify_scope": v.scope, "verify_reason": v.reason}
        tags |= {"verify_status": v.status, "verify_cause": v.cause}
    return _filled(tags) | decision_tags_of(result) | {"error": result.error} | note_tags(description_of(result))


def decision_tags_of(result: TrialResult, said: Mapping[str, str] | None = None) -> dict[str, str]:
    """Verdict and reason codes; an accepted candidate has no reasons, and its tag is empty. said: the same in words."""
    decision = result.decision
    if decision is None:
        return {}
    quality = decision.quality.verdict if decision.quality is not None else ""
    words = {name: text for name, text in (said or {}).items() if name != "why"}  # that one is in the description
    tags = _filled({**words, "verdict": decision.verdict, "quality": quality})
    # Empty ones clear what an earlier command wrote there.
    cleared = {"reasons": ", ".join(decision.reasons)} | ({"preferred": words.get("preferred", "")} if said else {})
    return tags | cleared | note_tags(description_of(result, said))


def sweep_tags_of(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """The verdict on a sweep and the trial that it prefers; of all its comparisons where it has several."""
    verdicts = dict.fromkeys(c.verdict for c in comparisons)
    preferred = [c.preferred for c in comparisons if c.preferred]
    return _filled({"verdict": ", ".join(verdicts), "preferred": ", ".join(preferred)})


def note_tags(markdown: str) -> dict[str, str]:
    """Markdown as a run's description."""
    return {NOTE: cut_markdown(markdown)} if markdown else {}


def description_of(result: TrialResult, said: Mapping[str, str] | None = None) -> str:
    """Markdown for the run's page: what happened and how to repeat it. said: its decision in words."""
    said = said or {}
    lines = [f"**{result.name}** on `{result.workload}`, {result.device}: {result.outcome} ({result.evidence})"]
    lines += [f"Error: {result.error}"] if result.error else []
    if result.decision is not None:
        reasons = f" ({', '.join(result.decision.reasons)})" if result.decision.reasons else ""
        lines.append(f"Verdict: **{result.decision.verdict}**{reasons}. {said.get('why', '')}".rstrip())
    lines += [f"Next: {said['next_action']}"] if said.get("next_action") else []
    lines += [f"Disturbed: {said['disturbed']}"] if said.get("disturbed") else []
    lines += [f"Repeat with `{result.command}`"] if result.command else []
    return "\n\n".join(lines)


def end_status(outcome: str) -> Literal["FINISHED", "FAILED"]:
    """MLflow's status for a trial that ended by itself. A trial that was predicted not to fit did what it should."""
    return "FINISHED" if outcome in FINISHED_OUTCOMES else "FAILED"


def _filled(tags: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in tags.items() if value}


# Texts within MLflow's limits


def cut(text: str, limit: int) -> str:
    """The text itself, or its start and a mark that says that it was cut."""
    mark = " [cut]"
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def cut_tags(tags: dict[str, str]) -> dict[str, str]:
    return {name: cut(str(value), TAG_LIMIT) for name, value in tags.items()}


def cut_markdown(text: str, limit: int = TAG_LIMIT) -> str:
    """As `cut`, but at the end of a line, so that no table row and no link is torn apart."""
    if len(text) <= limit:
        return text
    note = "\n\n*(cut here: the whole text is in the run's artifacts)*"
    kept = text[: limit - len(note)]
    return kept[: kept.rfind("\n")].rstrip() + note if "\n" in kept else kept + note


def one_line(error: BaseException, limit: int = 300) -> str:
    """The gist of an error: its first line that says something, without passwords."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = without_secrets(lines[0]) if lines else type(error).__name__
    return text if len(text) <= limit else text[:limit] + "..."
