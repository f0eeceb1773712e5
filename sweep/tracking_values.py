"""What a trial leaves in MLflow, as plain names and values: no MLflow here, so this can be read and tested by itself.

MLflow's rules that are kept here: names of letters, digits, `_ - .` and space, with `/` only where it groups; at most
250 characters in a name, 6000 in a parameter, 8000 in a tag; parameters never change; metrics are finite numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from sweep.results import Decision, Measurement, Outcome, Prediction, TrialResult, Verification, to_dict
from sweep.schema import plain

NAME_LIMIT, PARAM_LIMIT, TAG_LIMIT = 250, 6000, 8000
DATASET_NAME_LIMIT, DATASET_DIGEST_LIMIT = 500, 36

#: (name, value, step)
MetricValue = tuple[str, float, int]

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
    text = without_password(lines[0]) if lines else type(error).__name__
    return text if len(text) <= limit else text[:limit] + "..."


def without_password(text: str) -> str:
    return re.sub(r"(://[^:@/\s]*):[^@/\s]*@", r"\1:***@", text)


def cut_markdown(text: str, limit: int = TAG_LIMIT) -> str:
    """As `cut`, but at the end of a line, so that no table row and no link is torn apart."""
    if len(text) <= limit:
        return text
    note = "\n\n*(cut here: the whole text is in the run's artifacts)*"
    kept = text[: limit - len(note)]
    return kept[: kept.rfind("\n")].rstrip() + note if "\n" in kept else kept + note


def metrics_of(result: TrialResult) -> list[MetricValue]:
    """All finite numbers of a result under grouped names, single values at step 0, curves at their steps."""
    found: list[tuple[str, float | None, int]] = [("trial/wall_s", result.wall_s, 0)]
    found += [("trial/parameters", result.parameters, 0), ("trial/blocks", result.blocks, 0)]
    if result.measurement is not None:
        found += _measured(result.measurement)
    if result.verification is not None:
        found += _verified(result.verification)
    if result.prediction is not None:
        found += _predicted(result.prediction)
    if result.decision is not None:
        found += _decided(result.decision)
    return [(name, float(value), step) for name, value, step in found if value is not None and math.isfinite(value)]


def decision_metrics_of(result: TrialResult) -> list[MetricValue]:
    """What is known only once all candidates of the comparison have been judged."""
    found = _decided(result.decision) if result.decision is not None else []
    if result.prediction is not None:
        found.append(("predicted/error_ratio", result.prediction.error_ratio, 0))
    return [(name, float(value), step) for name, value, step in found if value is not None and math.isfinite(value)]


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
    return _filled(tags | decision_tags_of(result)) | {"error": result.error}


def decision_tags_of(result: TrialResult) -> dict[str, str]:
    """Verdict, reason codes and the next action; an accepted candidate has no reasons, and its tag is empty."""
    decision = result.decision
    if decision is None:
        return {}
    tags = {"verdict": decision.verdict, "next_action": decision.next_action, "against": decision.against}
    return _filled(tags) | {"reasons": ", ".join(decision.reasons)}


def description_of(result: TrialResult) -> str:
    """Markdown for the run's page: what happened and how to repeat it."""
    lines = [f"**{result.name}** on `{result.workload}`, {result.device}: {result.outcome} ({result.evidence})"]
    if result.error:
        lines.append(f"Error: {result.error}")
    if result.decision is not None:
        reasons = f" ({', '.join(result.decision.reasons)})" if result.decision.reasons else ""
        lines.append(f"Verdict: **{result.decision.verdict}**{reasons}. {result.decision.next_action}".rstrip())
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


def _measured(m: Measurement) -> Iterator[tuple[str, float | None, int]]:
    yield from _single(
        {
            "memory/peak_allocated_mib": m.peak_allocated_mib,
            "memory/peak_reserved_mib": m.peak_reserved_mib,
            "time/step_ms": m.step_ms,
            "time/step_ms_low": m.step_ms_low,
            "time/step_ms_high": m.step_ms_high,
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
    return list(
        _single(
            {
                "memory/peak_mib": d.peak_mib,
                "memory/saved_mib": d.saved_mib,
                "throughput/ratio": d.throughput_ratio,
                "quality/eval_loss_ratio": d.eval_loss_ratio,
            }
        )
    )


def _single(values: dict[str, Any]) -> Iterator[tuple[str, float | None, int]]:
    yield from ((name, value, 0) for name, value in values.items())


def _word(name: object) -> str:
    """A part of a metric's name. Enum members stand for their value."""
    return re.sub(r"[^\w\-]", "_", str(getattr(name, "value", name)))


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
