"""What a trial leaves in MLflow, as plain names and values: no MLflow here, so this can be read and tested by itself.

MLflow's rules that are kept here: names of letters, digits, `_ - .` and space, with `/` only where it groups; at most
250 characters in a name, 6000 in a parameter, 8000 in a tag; parameters never change; metrics are finite numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sweep.addresses import without_secrets
from sweep.results import Comparison, Outcome, TrialResult, Verdict, to_dict
from sweep.schema import plain
from sweep.tracking_metrics import MetricValue, decision_metrics_of, metrics_of

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
