"""What a trial leaves in MLflow, as plain names and values: no MLflow here, so this can be read and tested by itself.

MLflow's rules that are kept here: names of letters, digits, `_ - .` and space, with `/` only where it groups; at most
250 characters in a name, 6000 in a parameter, 8000 in a tag; parameters never change; metrics are finite numbers.
"""

from __future__ import annotations

import colorsys
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sweep.config.addresses import without_secrets
from sweep.config.schema import OffloadConf, plain
from sweep.config.strategy_names import CHANGES_LEAST_FIRST, change_rank
from sweep.results import (
    Comparison,
    Decision,
    Measurement,
    Outcome,
    Prediction,
    TrialResult,
    Verdict,
    Verification,
    to_dict,
)

#: Short, for the labels of axes and columns; no key of the config is called so.
STRATEGY: str = "strategy"
MICRO_BATCH: str = "micro_batch"
ACCUMULATION: str = "accumulation"
CHECKPOINT: str = "checkpoint"
OFFLOAD: str = "offload"

#: Hue in degrees of each kind of strategy.
HUES = {"micro_batch": 212, "checkpoint": 28, "checkpoint_selective": 345, "offload": 150, "hybrid": 280}
BASELINE_COLOR = "#3f4650"
#: Lightness by halvings of the batch: the smaller the micro-batch, the darker.
SHADES = (0.68, 0.57, 0.47, 0.38, 0.29)


def knobs_of(config: dict[str, Any]) -> dict[str, str]:
    """The knobs of a resolved config; none where it has no strategy.

    `micro_batch`: samples at once. `accumulation`: micro-steps per optimizer step. `checkpoint`: none, blocks, blocks/2
    (every second), selective, segments of 2, or the parts. `offload`: none, inputs, all, first:2.
    """
    config = plain(config) if config else {}
    strategy = config.get("strategy")
    if not isinstance(strategy, dict):
        return {}
    knobs = {STRATEGY: str(strategy.get("name") or "")}
    batch = (config.get("workload") or {}).get("global_batch_size")
    micro = strategy.get("micro_batch_size") or batch
    if micro:
        at_once = min(int(micro), int(batch)) if batch else int(micro)
        knobs[MICRO_BATCH] = str(at_once)
        knobs |= {ACCUMULATION: str(-(-int(batch) // at_once))} if batch else {}
    knobs[CHECKPOINT] = _checkpoint(strategy.get("checkpoint") or {})
    knobs[OFFLOAD] = _offload(strategy.get("offload") or {})
    return {name: value for name, value in knobs.items() if value}


def color_of(result: TrialResult) -> str:
    """#rrggbb: the hue says what kind of strategy it is, the shade how small its micro-batches are."""
    kind, knobs = CHANGES_LEAST_FIRST[change_rank(result)], knobs_of(result.config)
    if kind not in HUES:
        return BASELINE_COLOR
    if kind == "checkpoint" and knobs.get(CHECKPOINT, "").startswith("selective"):
        kind = "checkpoint_selective"
    halvings = round(math.log2(int(knobs.get(ACCUMULATION, 1))))
    shade = SHADES[min(halvings, len(SHADES) - 1)]
    red, green, blue = colorsys.hls_to_rgb(HUES[kind] / 360, shade, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _checkpoint(c: dict[str, Any]) -> str:
    granularity, every_k = str(c.get("granularity", "none")), int(c.get("every_k") or 1)
    if granularity == "parts":
        return "+".join(str(part) for part in c.get("parts") or ()) or granularity
    if granularity == "segments":
        return f"segments of {c.get('segment_size', 1)}"
    return f"{granularity}/{every_k}" if granularity != "none" and every_k > 1 else granularity


def _offload(o: dict[str, Any]) -> str:
    """Where, and what differs from the defaults."""
    placement = str(o.get("placement", "none"))
    if placement == "none":
        return placement
    said = [str(o.get("blocks") or placement) if placement == "blocks" else placement]
    least, usual = float(o.get("min_tensor_kib", OffloadConf.min_tensor_kib)), OffloadConf.min_tensor_kib
    said += [f">={least:g}K"] if least != usual else []
    said += [f"keep {o['keep_last']}"] if o.get("keep_last", OffloadConf.keep_last) != OffloadConf.keep_last else []
    said += ["save_on_cpu"] if o.get("implementation") == "save_on_cpu" else []
    return " ".join(said)


#: (name, value, step)
MetricValue = tuple[str, float, int]

#: Decimals by a part of the name, first match. MLflow's page shows every digit it is given (268.1328125), and no more
#: of them mean anything: 0.001 MiB is a KiB. The whole numbers are in result.json. Errors and curves stay as they are.
DECIMALS = (("error_ratio", 6), ("ratio", 4), ("_mib", 3), ("_ms", 3), ("_per_s", 3), ("eval_loss", 5))


def metrics_of(result: TrialResult) -> list[MetricValue]:
    """All finite numbers of a result under grouped names, single values at step 0, curves at their steps."""
    # MLflow's page that compares runs begins with the first of them.
    found: list[tuple[str, float | None, int]] = []
    if result.measurement is not None:
        found += _measured(result.measurement)
    if result.verification is not None:
        found += _verified(result.verification)
    if result.prediction is not None:
        found += _predicted(result.prediction)
    if result.decision is not None:
        found += _decided(result.decision)
    found += [("trial/parameters", result.parameters, 0), ("trial/blocks", result.blocks, 0)]
    found.append(("trial/wall_s", result.wall_s, 0))
    return _finite(found)


def decision_metrics_of(result: TrialResult) -> list[MetricValue]:
    """What is known only once all candidates of the comparison have been judged."""
    found = _decided(result.decision) if result.decision is not None else []
    if result.prediction is not None:
        found.append(("predicted/error_ratio", result.prediction.error_ratio, 0))
    return _finite(found)


def _measured(m: Measurement) -> Iterator[tuple[str, float | None, int]]:
    yield from _single(
        {
            "memory/peak_allocated_mib": m.peak_allocated_mib,
            "memory/peak_reserved_mib": m.peak_reserved_mib,
            "time/step_ms": m.step_ms,
            "time/step_ms_low": m.step_ms_low,
            "time/step_ms_high": m.step_ms_high,
            "time/step_ms_ci_low": m.step_ms_ci_low,
            "time/step_ms_ci_high": m.step_ms_ci_high,
            "throughput/samples_per_s": m.samples_per_s,
            "throughput/tokens_per_s": m.tokens_per_s,
            "quality/eval_loss": m.eval_loss,
            "quality/eval_loss_before": m.eval_loss_before,
            "transfer/to_host_mib": m.to_host_mib,
            "transfer/from_host_mib": m.from_host_mib,
            "trial/timed_steps": m.steps,
            "trial/repeats": m.repeats,
        }
    )
    yield from _single({f"time/{_word(phase)}_ms": value for phase, value in m.phases_ms.items()})
    if m.peak is not None:
        yield from _single({"memory/host_peak_mib": m.peak.host_peak_mib})
        yield from _single({f"memory/at_peak/{_word(c)}_mib": value for c, value in m.peak.at_peak_mib.items()})
        yield from _single({f"memory/phase_peak/{_word(p)}_mib": value for p, value in m.peak.phase_peaks_mib.items()})
    yield from (("quality/train_loss", value, step) for step, value in enumerate(m.train_loss))
    yield from (("time/each_step_ms", value, step) for step, value in enumerate(m.step_times_ms))


def _verified(v: Verification) -> Iterator[tuple[str, float | None, int]]:
    yield from _single(
        {
            "verify/passed": v.passed,
            "verify/tolerance": v.tolerance,
            "verify/max_rel_err": v.max_rel_err,
            "verify/loss_rel_err": v.loss_rel_err,
            "verify/output_rel_err": v.output_rel_err,
            "verify/grad_rel_err": v.grad_rel_err,
            "verify/block_input_grad_rel_err": v.block_input_grad_rel_err,
            "verify/buffer_rel_err": v.buffer_rel_err,
            "verify/rng_equal": v.rng_equal,
            "verify/bit_equal": v.bit_equal,
            "verify/steps": v.steps,
            "verify/compared_share": v.compared_share,
            "verify/updates": v.updates,
            "verify/updates_expected": v.updates_expected,
        }
    )


def _predicted(p: Prediction) -> Iterator[tuple[str, float | None, int]]:
    yield from _single(
        {
            "predicted/allocated_mib": p.allocated_mib,
            "predicted/reserved_mib": p.reserved_mib,
            "predicted/fits": p.fits,
            "predicted/headroom_mib": p.headroom_mib,
            "predicted/capacity_mib": p.capacity_mib,
            "predicted/context_mib": p.context_mib,
            "predicted/fragmentation_mib": p.fragmentation_mib,
            "predicted/to_host_mib": p.to_host_mib,
            "predicted/from_host_mib": p.from_host_mib,
            "predicted/transfer_one_way_ms": p.transfer_one_way_ms,
            "predicted/transfer_round_trip_ms": p.transfer_round_trip_ms,
            "predicted/recompute_flops_ratio": p.recompute_flops_ratio,
            "predicted/flops_per_step": p.flops_per_step,
            "predicted/seconds": p.seconds,
            "predicted/error_ratio": p.error_ratio,
        }
    )
    at_peak = p.at_peak_mib or (p.peak.at_peak_mib if p.peak is not None else {})
    yield from _single({f"predicted/at_peak/{_word(c)}_mib": value for c, value in at_peak.items()})
    if p.peak is not None:
        yield from _single({f"predicted/phase_peak/{_word(k)}_mib": v for k, v in p.peak.phase_peaks_mib.items()})


def _decided(d: Decision) -> list[tuple[str, float | None, int]]:
    found: dict[str, float | None] = {
        "memory/peak_mib": d.peak_mib,
        "memory/saved_mib": d.saved_mib,
        "throughput/ratio": d.throughput_ratio,
        "quality/eval_loss_ratio": d.eval_loss_ratio,
    }
    if d.step is not None:  # step time over the baseline's, with its interval
        found |= {
            "time/step_ratio": d.step.ratio,
            "time/step_low_ratio": d.step.low,
            "time/step_high_ratio": d.step.high,
        }
    if d.quality is not None and d.quality.seeds > 1:
        found |= {
            "quality/loss_difference": d.quality.difference,
            "quality/loss_difference_low": d.quality.difference_low,
            "quality/loss_difference_high": d.quality.difference_high,
            "quality/seeds": d.quality.seeds,
        }
    return list(_single(found))


def _finite(values: Iterable[tuple[str, float | None, int]]) -> list[MetricValue]:
    known = [(name, float(value), step) for name, value, step in values if value is not None and math.isfinite(value)]
    return [(name, _readable(name, value), step) for name, value, step in known]


def _readable(name: str, value: float) -> float:
    decimals = next((decimals for part, decimals in DECIMALS if part in name), None)
    return value if decimals is None else round(value, decimals)


def _single(values: dict[str, Any]) -> Iterator[tuple[str, float | None, int]]:
    yield from ((name, value, 0) for name, value in values.items())


def _word(name: object) -> str:
    """A part of a metric's name. Enum members stand for their value."""
    return re.sub(r"[^\w\-]", "_", str(getattr(name, "value", name)))


__all__ = [
    "MetricValue",
    "cut",
    "cut_markdown",
    "cut_tags",
    "dataset_of",
    "decision_metrics_of",
    "decision_tags_of",
    "description_of",
    "end_status",
    "metrics_of",
    "one_line",
    "param_name",
    "params_of",
    "plan_tags_of",
    "result_tags_of",
    "sweep_metrics_of",
    "sweep_tags_of",
]

NAME_LIMIT, PARAM_LIMIT, TAG_LIMIT = 250, 6000, 8000
DATASET_NAME_LIMIT, DATASET_DIGEST_LIMIT = 500, 36

#: Outcomes that are a finding about the strategy and not something that went wrong.
FINISHED_OUTCOMES = frozenset({Outcome.ok.value, Outcome.over_budget.value})


def end_status(outcome: str) -> str:
    """MLflow's status for a trial that ended by itself. A trial that was predicted not to fit did what it should."""
    return "FINISHED" if outcome in FINISHED_OUTCOMES else "FAILED"


def params_of(config: dict[str, Any]) -> dict[str, str]:
    """The config as MLflow parameters: dotted keys, values as one would write them on the command line."""
    params: dict[str, str] = {}
    for key, value in _leaves(plain(config), "") if config else ():
        name = _free_name(param_name(key), params)
        params[name] = cut(_text(value), PARAM_LIMIT)
    return params


def param_name(key: str) -> str:
    """A name that MLflow accepts; an over-long one keeps its start and gets a digest, so that it stays unique."""
    name = re.sub(r"[^\w.\- ]", "_", key)
    if name.startswith(".") or not name.strip():
        name = "_" + name  # MLflow refuses names that would be a path to elsewhere
    if len(name) > NAME_LIMIT:
        name = f"{name[: NAME_LIMIT - 9]}_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return name


def cut(text: str, limit: int) -> str:
    """The text itself, or its start and a mark that says that it was cut."""
    mark = " [cut]"
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def cut_tags(tags: dict[str, str]) -> dict[str, str]:
    return {name: cut(str(value), TAG_LIMIT) for name, value in tags.items()}


def one_line(error: BaseException, limit: int = 300) -> str:
    """The gist of an error: its first line that says something, without passwords."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = without_secrets(lines[0]) if lines else type(error).__name__
    return text if len(text) <= limit else text[:limit] + "..."


def cut_markdown(text: str, limit: int = TAG_LIMIT) -> str:
    """As `cut`, but at the end of a line, so that no table row and no link is torn apart."""
    if len(text) <= limit:
        return text
    note = "\n\n*(cut here: the whole text is in the run's artifacts)*"
    kept = text[: limit - len(note)]
    return kept[: kept.rfind("\n")].rstrip() + note if "\n" in kept else kept + note


def plan_tags_of(result: TrialResult) -> dict[str, str]:
    """What is known of a trial before it starts."""
    return _filled(
        {
            "strategy": result.strategy,
            "workload": result.workload,
            "device": result.device,
            "mode": result.mode,
            "is_baseline": str(result.is_baseline).lower(),
            "fixed_id": result.fixed_id,
            "strategy_id": result.strategy_id,
            "data_version": result.data_version,
            "command": result.command,
            "overrides": " ".join(result.overrides),
            "folder": result.folder,
        }
    )


def result_tags_of(result: TrialResult) -> dict[str, str]:
    """What is known of a trial once it has ended. An empty `error` clears what an earlier command wrote there."""
    tags = plan_tags_of(result) | {"outcome": result.outcome, "evidence": result.evidence}
    peak = result.measurement.peak if result.measurement is not None else None
    if peak is None and result.prediction is not None:
        peak = result.prediction.peak
    if peak is not None:
        tags |= {"peak_phase": peak.phase, "peak_operator": peak.operator, "peak_module": peak.module}
    if result.verification is not None:
        scope = result.verification.scope
        tags |= {"verified": str(result.verification.passed).lower(), "verify_scope": scope}
        tags |= {"verify_reason": result.verification.reason} if result.verification.reason else {}
        tags |= {"verify_status": result.verification.status, "verify_cause": result.verification.cause}
    caveats = "; ".join(result.prediction.caveats) if result.prediction is not None else ""
    tags |= {"prediction_error": result.prediction_error, "prediction_caveats": caveats}
    return _filled(tags | decision_tags_of(result)) | {"error": result.error}


def decision_tags_of(result: TrialResult) -> dict[str, str]:
    """Verdict, reason codes and the next action; an accepted candidate has no reasons, and its tag is empty."""
    decision = result.decision
    if decision is None:
        return {}
    tags = {"verdict": decision.verdict, "next_action": decision.next_action, "against": decision.against}
    if decision.quality is not None:
        tags["quality"] = decision.quality.verdict
    tags["disturbed"] = "; ".join(decision.disturbed)
    return _filled(tags) | {"reasons": ", ".join(decision.reasons)}


def sweep_tags_of(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """The verdict on a sweep and the trial that it prefers; of all its comparisons where it has several."""
    verdicts = dict.fromkeys(c.verdict for c in comparisons)
    preferred = [c.preferred for c in comparisons if c.preferred]
    return _filled({"verdict": ", ".join(verdicts), "preferred": ", ".join(preferred)})


def sweep_metrics_of(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """How many trials were judged, and how many accepted; none without a comparison."""
    verdicts = [decision.verdict for c in comparisons for decision in c.decisions]
    accepted = verdicts.count(Verdict.accept.value)
    return {"sweep/trials": len(verdicts), "sweep/accepted": accepted} if comparisons else {}


def description_of(result: TrialResult) -> str:
    """Markdown for the run's page: what happened and how to repeat it."""
    lines = [f"**{result.name}** on `{result.workload}`, {result.device}: {result.outcome} ({result.evidence})"]
    if result.error:
        lines.append(f"Error: {result.error}")
    if result.decision is not None:
        reasons = f" ({', '.join(result.decision.reasons)})" if result.decision.reasons else ""
        lines.append(f"Verdict: **{result.decision.verdict}**{reasons}. {result.decision.why}".rstrip())
        lines += [f"Next: {result.decision.next_action}"] if result.decision.next_action else []
        lines += [f"Disturbed: {'; '.join(result.decision.disturbed)}"] if result.decision.disturbed else []
    if result.command:
        lines.append(f"Repeat with `{result.command}`")
    return cut_markdown("\n\n".join(lines))


def dataset_of(result: TrialResult) -> dict[str, str] | None:
    """Fields of MLflow's data set entity, or None where no data was read. The digest is the data's version."""
    if not result.data_version:
        return None
    conf = result.config.get("workload", {}).get("data", {})
    target = str(conf.get("_target_", "")) if isinstance(conf, dict) else ""
    described = to_dict(result.data)
    name = str(described.get("name") or target.rpartition(".")[2] or result.workload)
    path = described.get("path")
    # The two kinds of source that MLflow's page knows how to show: a place, or code that makes the data.
    source = {"uri": str(path)} if path else {"tags": {"mlflow.source.name": target or result.workload}}
    return {
        "name": cut(name, DATASET_NAME_LIMIT),
        "digest": result.data_version[:DATASET_DIGEST_LIMIT],
        "source_type": "local" if path else "code",
        "source": json.dumps(source),
        "profile": json.dumps(described, default=str),
    }


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or "''"  # MLflow servers read an empty value as a missing one
    return json.dumps(value, default=str)


def _free_name(name: str, taken: dict[str, str]) -> str:
    """Two keys may become the same name; one conflicting name would make MLflow refuse the whole batch."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name[: NAME_LIMIT - 5]}_{number}"
    return free


def _filled(tags: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in tags.items() if value}
