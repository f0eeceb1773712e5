"""Saved views of MLflow's page: columns, charts and filters, kept with the experiment.

MLflow keeps a view that somebody saved on its page in a tag of the experiment and offers it under "Views". The form of
these tags is not documented; what is written here was read from MLflow 3.17 and tried there in a browser. So all of it
is best effort: an older server gets none, a newer one that does not understand them ignores them, and a view that a
person has changed on the page is left alone.
"""

from __future__ import annotations

import base64
import json
import re
import time
import urllib.parse
import zlib
from typing import TYPE_CHECKING, Any

from sweep.tracking.store import SERVER_SCHEMES, Store, client, experiment_id
from sweep.tracking.values import CHECKPOINT, MICRO_BATCH, OFFLOAD, STRATEGY

#: Columns in the order shown, and their widths in pixels. MLflow leaves out what no run has.
OF_TRIALS: dict[str, int] = {
    "attributes.`Run Name`": 300,
    "runDateAndNestInfo": 152,
    "tags.`verdict`": 76,
    "tags.`outcome`": 104,
    "metrics.`memory/peak_mib`": 142,
    "metrics.`memory/saved_mib`": 148,
    "metrics.`time/step_ms`": 116,
    "metrics.`throughput/ratio`": 136,
    "metrics.`quality/eval_loss`": 138,
    "tags.`evidence`": 92,
    f"params.`{MICRO_BATCH}`": 100,
    f"params.`{CHECKPOINT}`": 110,
    f"params.`{OFFLOAD}`": 110,
    "tags.`reasons`": 170,
    f"params.`{STRATEGY}`": 160,
    "tags.`sweep`": 250,
    "duration": 90,
}
OF_SWEEPS: dict[str, int] = {
    "attributes.`Run Name`": 220,
    "runDateAndNestInfo": 152,
    "tags.`verdict`": 76,
    "tags.`preferred`": 260,
    "metrics.`sweep/trials`": 110,
    "metrics.`sweep/accepted`": 126,
    "tags.`mode`": 90,
    "params.`overrides`": 520,
    "tags.`git_commit`": 110,
    "duration": 90,
}
#: Shown always; only their place and width are chosen.
FIXED = {"attributes.`Run Name`", "runDateAndNestInfo", "duration"}

PEAK, THROUGHPUT, STARTED = "memory/peak_mib", "throughput/samples_per_s", "attributes.start_time"
MAIN_SECTION = "Memory against speed"
KNOBS = (STRATEGY, MICRO_BATCH, CHECKPOINT, OFFLOAD)
CATEGORIES = ("activation", "temporary", "gradient", "optimizer_state", "parameter", "input")

#: What MLflow draws by itself, one chart for each metric in a section for each prefix, comes after these. Closed.
CLOSED = ("memory/phase_peak", "predicted/at_peak", "predicted/phase_peak", "trial", "System metrics")


def trials_state(search: str, mode: str) -> dict[str, Any]:
    """The state of the page that shows trials, under the names that MLflow's page gives it.

    search: MLflow's filter of runs. mode: what was done in the trials ("measure", "predict"), or "" for all kinds.
    """
    order = PEAK if mode == "predict" else THROUGHPUT
    state = _state(search, f"metrics.`{order}`", OF_TRIALS, ascending=order == PEAK)
    sections, charts = _sections_and_charts(mode)
    return {**state, "compareRunSections": sections, "compareRunCharts": charts}


def sweeps_state(search: str) -> dict[str, Any]:
    """The state of the page that lists sweeps, newest first."""
    return _state(search, STARTED, OF_SWEEPS, ascending=False)


def _state(search: str, order: str, columns: dict[str, int], *, ascending: bool) -> dict[str, Any]:
    return {
        "searchFilter": search,
        "orderByKey": order,
        "orderByAsc": ascending,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [column for column in columns if column not in FIXED],
        "columnOrder": list(columns),
        "columnWidths": dict(columns),
        "runsHiddenMode": "SHOW_ALL",  # MLflow's own choice is the first ten
        "isAccordionReordered": True,  # sections stay in the order given
        "hideEmptyCharts": True,
        "useGroupedValuesInCharts": True,
        "groupBy": None,
        "viewMaximized": False,
        "runListHidden": False,
    }


def _sections_and_charts(mode: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Sections are called as MLflow calls its own, so that what it adds by itself joins them."""
    measured = [_parallel(*KNOBS, to=(PEAK, THROUGHPUT)), _scatter(THROUGHPUT, PEAK)]
    predicted = [_parallel(*KNOBS, to=(PEAK,))]
    main = {"measure": measured, "predict": predicted}.get(mode, [*measured, *predicted])
    wanted: list[tuple[str, int, list[dict[str, Any]]]] = [
        (MAIN_SECTION, 1 if mode == "predict" else 2, main),
        ("memory", 2, [_bar(PEAK), _bar("memory/saved_mib")]),
        ("throughput", 2, [_bar(THROUGHPUT), _bar("throughput/ratio")]),
        ("time", 3, [_bar("time/step_ms")]),
        ("quality", 2, [_line("quality/train_loss"), _bar("quality/eval_loss")]),
        ("verify", 3, [_bar("verify/max_rel_err")]),
        ("memory/at_peak", 3, [_bar(f"memory/at_peak/{c}_mib") for c in CATEGORIES]),
        ("transfer", 2, [_bar("transfer/to_host_mib"), _bar("transfer/from_host_mib")]),
        ("predicted", 3, [_bar(f"predicted/{n}") for n in ("allocated_mib", "reserved_mib", "error_ratio")]),
        *((name, 3, []) for name in CLOSED),
    ]
    sections, charts = [], []
    for number, (name, columns, inner) in enumerate(wanted):
        section = f"memory-sweep-section-{number}"
        sections.append(
            {
                "uuid": section,
                "name": name,
                "display": name not in CLOSED,
                "isReordered": True,  # its charts stay in the order given, what MLflow adds comes after them
                "deleted": False,
                "isGenerated": False,
                "columns": columns,
                "cardHeight": 420 if name == MAIN_SECTION else 360,
            }
        )
        for place, chart in enumerate(inner):
            common = {"uuid": f"memory-sweep-chart-{number}-{place}", "metricSectionId": section}
            charts.append({**common, "deleted": False, "isGenerated": False, "runsCountToCompare": 100, **chart})
    return sections, charts


def _bar(metric: str) -> dict[str, Any]:
    return {"type": "BAR", "metricKey": metric, "selectedMetricKeys": [metric], "displayName": metric}


def _scatter(x: str, y: str) -> dict[str, Any]:
    return {"type": "SCATTER", "xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}


def _parallel(*params: str, to: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "PARALLEL", "selectedParams": list(params), "selectedMetrics": list(to), "showAllRuns": True}


def _line(metric: str) -> dict[str, Any]:
    return {
        "type": "LINE",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "displayName": metric,
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


if TYPE_CHECKING:
    from mlflow.entities import Experiment

FIRST_VERSION = (3, 17)
ANSWER_WAIT_S = 10.0
TAG = "mlflow.sharedViewState."
NAME_LIMIT = 200
#: Only views that carry this are replaced or removed. MLflow drops it when a person saves over one.
OURS = {"made_by": "memory-sweep"}
ALL_TRIALS, ALL_SWEEPS = "trials", "sweeps"
#: The page offers up to 40 views to be saved; most are left to people.
SWEEPS_KEPT = 10

KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"  # "Machine learning": runs come first, not traces
NOTE = "mlflow.note.content"
NOTE_START = "**Memory strategies**: "


def save_views(store: Store, run_id: str, label: str, mode: str) -> None:
    """Keep views of this sweep, of all trials and of all sweeps with the experiment; its description says where.

    run_id: the sweep's. label: what the sweep is called, unique among the sweeps. mode: as `TrialResult.mode`. Raises
    what MLflow raises; nothing that was recorded depends on it.
    """
    experiment = client(store.uri).get_experiment(experiment_id(store))
    tags = dict(experiment.tags)
    wanted = {} if KIND_TAG in tags else {KIND_TAG: KIND}
    if understands_views(store):
        wanted[TAG + ALL_TRIALS] = _view("All trials", trials_state("tags.kind = 'trial'", ""))
        wanted[TAG + ALL_SWEEPS] = _view("All sweeps", sweeps_state("tags.kind = 'sweep'"))
        wanted[TAG + _key(run_id)] = _view(label, trials_state(_trials_of(run_id), mode))
        if tags.get(NOTE, NOTE_START).startswith(NOTE_START):
            wanted[NOTE] = _note(experiment, run_id, label)
        for key in _outdated(tags, keep=SWEEPS_KEPT - 1, but=TAG + _key(run_id)):
            client(store.uri).delete_experiment_tag(experiment.experiment_id, key)
    for key, value in wanted.items():
        if not key.startswith(TAG) or (key not in tags or _is_ours(tags[key])):
            client(store.uri).set_experiment_tag(experiment.experiment_id, key, value)


def page_of(store: Store, run_id: str) -> str:
    """Where a sweep is shown: a whole address for a server, else what to add to the address of `mlflow ui`.

    The sweep's saved view where there is one, else its trials by a filter. Raises what MLflow raises.
    """
    experiment = client(store.uri).get_experiment(experiment_id(store))
    if TAG + _key(run_id) in experiment.tags:
        path = _path(experiment.experiment_id, {"viewStateShareKey": _key(run_id)})
    else:
        path = _path(experiment.experiment_id, {"searchFilter": _trials_of(run_id)})
    return f"{store.shown}/{path}" if store.uri.startswith(SERVER_SCHEMES) else path


def understands_views(store: Store) -> bool:
    """Whether the MLflow that shows this store knows saved views: the server's version, or the one installed here."""
    import mlflow

    if store.uri.startswith("databricks"):
        return False  # its own page
    version = mlflow.__version__
    if store.uri.startswith(SERVER_SCHEMES):
        import requests  # as MLflow does: the same proxies, certificates and user names in the address

        try:
            answer = requests.get(f"{store.uri}/version", timeout=ANSWER_WAIT_S)
        except requests.exceptions.RequestException:
            return False
        version = answer.text.strip() if answer.ok else ""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= FIRST_VERSION


def _key(run_id: str) -> str:
    """Short, for the address that a person copies from the terminal; only the latest sweeps have a view."""
    return f"sweep-{run_id[:8]}"


def _trials_of(run_id: str) -> str:
    return f"tags.`mlflow.parentRunId` = '{run_id}'"


def _view(name: str, state: dict[str, Any]) -> str:
    """A view as MLflow's page saves it: an envelope with the state in it, packed. Far below the tag's limit."""
    text = json.dumps(state, separators=(",", ":"))
    packed = "deflate;" + base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    now_ms = int(time.time() * 1000)
    return json.dumps({"name": name[:NAME_LIMIT], "createdAt": now_ms, "updatedAt": now_ms, "state": packed, **OURS})


def _is_ours(value: str) -> bool:
    try:
        envelope = json.loads(value)
    except ValueError:
        return False
    return isinstance(envelope, dict) and OURS.items() <= envelope.items()


def _outdated(tags: dict[str, str], keep: int, but: str) -> list[str]:
    """Views of earlier sweeps beyond the newest `keep`."""
    ours = [k for k, v in tags.items() if k.startswith(TAG + _key("")) and k != but and _is_ours(v)]
    ours.sort(key=lambda k: json.loads(tags[k]).get("createdAt", 0))
    return ours[:-keep] if len(ours) > keep else []


def _note(experiment: Experiment, run_id: str, label: str) -> str:
    """The experiment's description, of which the page shows one line."""
    latest = _path(experiment.experiment_id, {"viewStateShareKey": _key(run_id)})
    trials = _path(experiment.experiment_id, {"viewStateShareKey": ALL_TRIALS})
    sweeps = _path(experiment.experiment_id, {"viewStateShareKey": ALL_SWEEPS})
    return f"{NOTE_START}[latest sweep: {label}]({latest}) · [all sweeps]({sweeps}) · [all trials]({trials})"


def _path(experiment: str, query: dict[str, str]) -> str:
    """MLflow opens on its other half, for applications of language models, unless the address says otherwise."""
    return f"#/experiments/{experiment}/runs?{urllib.parse.urlencode({**query, 'workflowType': 'machine_learning'})}"
