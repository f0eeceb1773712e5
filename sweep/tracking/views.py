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

from sweep.interrupts import whole
from sweep.tracking.runs import best_effort
from sweep.tracking.store import Store, client, experiment_id
from sweep.tracking.values import CHECKPOINT, MICRO_BATCH, NOTE, OFFLOAD, STRATEGY

if TYPE_CHECKING:
    from mlflow.entities import Experiment

FIRST_VERSION = (3, 17)
ANSWER_WAIT_S = 10.0
TAG = "mlflow.sharedViewState."
#: Only views that carry this are replaced or removed. MLflow drops it when a person saves over one.
OURS = {"made_by": "memory-sweep"}
ALL_TRIALS, ALL_SWEEPS = "trials", "sweeps"
#: The page offers up to 40 views to be saved; most are left to people.
SWEEPS_KEPT = 10
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"  # "Machine learning": runs come first, not traces
NOTE_START = "**Memory strategies**: "

#: Columns in the order shown, and their widths in pixels. MLflow leaves out what no run has.
OF_TRIALS = {
    "attributes.`Run Name`": 300, "runDateAndNestInfo": 152, "tags.`preferred`": 86, "tags.`verdict`": 76,
    "tags.`outcome`": 104,
    "metrics.`memory/peak_mib`": 142, "metrics.`memory/saved_mib`": 148, "metrics.`time/step_ms`": 116,
    "metrics.`throughput/ratio`": 136, "metrics.`quality/eval_loss`": 138, "tags.`evidence`": 92,
    f"params.`{MICRO_BATCH}`": 100, f"params.`{CHECKPOINT}`": 110, f"params.`{OFFLOAD}`": 110, "tags.`reasons`": 170,
    f"params.`{STRATEGY}`": 160, "tags.`sweep`": 250, "duration": 90,
}  # fmt: skip
OF_SWEEPS = {
    "attributes.`Run Name`": 220, "runDateAndNestInfo": 152, "tags.`verdict`": 76, "tags.`preferred`": 260,
    "metrics.`sweep/peak_mib`": 130, "metrics.`sweep/throughput_ratio`": 150, "metrics.`sweep/trials`": 110,
    "metrics.`sweep/accepted`": 126, "tags.`mode`": 90, "params.`overrides`": 520,
    "tags.`git_commit`": 110, "duration": 90,
}  # fmt: skip
#: Shown always; only their place and width are chosen.
FIXED = {"attributes.`Run Name`", "runDateAndNestInfo", "duration"}

PEAK, THROUGHPUT, STARTED = "memory/peak_mib", "throughput/samples_per_s", "attributes.start_time"
MAIN_SECTION = "Memory against speed"
CATEGORIES = ("activation", "temporary", "gradient", "optimizer_state", "parameter", "input")
#: What MLflow draws by itself, one chart for each metric in a section for each prefix, comes after these. Closed.
CLOSED = ("memory/phase_peak", "predicted/at_peak", "predicted/phase_peak", "trial", "System metrics")


@whole()
def sweep_page(store: Store, run_id: str | None) -> str:
    """Where MLflow's page shows a sweep: an address on a server; for a file what follows the address of `mlflow ui`.

    The sweep's saved view where there is one, else its trials by a filter. Empty where the store does not say.
    """
    if run_id is not None:
        with best_effort(f"the page of sweep {run_id}"):
            experiment = client(store.uri).get_experiment(experiment_id(store))
            saved = TAG + _key(run_id) in experiment.tags
            query = {"viewStateShareKey": _key(run_id)} if saved else {"searchFilter": _trials_of(run_id)}
            path = _path(experiment.experiment_id, query)
            return f"{store.shown}/{path}" if store.served else path
    return ""


@best_effort("the views of MLflow's page")
def save_views(store: Store, run_id: str, label: str, mode: str) -> None:
    """Keep views of this sweep, of all trials and of all sweeps with the experiment; its description says where.

    run_id: the sweep's. label: what the sweep is called, unique among the sweeps. mode: as `TrialResult.mode`.
    """
    experiment = client(store.uri).get_experiment(experiment_id(store))
    tags, own = dict(experiment.tags), TAG + _key(run_id)
    wanted = {} if KIND_TAG in tags else {KIND_TAG: KIND}
    if understands_views(store):
        views = {
            TAG + ALL_TRIALS: _view("All trials", trials_state("tags.kind = 'trial'", "")),
            TAG + ALL_SWEEPS: _view("All sweeps", _state("tags.kind = 'sweep'", STARTED, OF_SWEEPS, ascending=False)),
            own: _view(label, trials_state(_trials_of(run_id), mode)),
        }
        wanted |= {key: view for key, view in views.items() if key not in tags or _is_ours(tags[key])}
        if tags.get(NOTE, NOTE_START).startswith(NOTE_START):
            wanted[NOTE] = _note(experiment, run_id, label)
        earlier = [k for k, v in tags.items() if k.startswith(TAG + _key("")) and k != own and _is_ours(v)]
        earlier.sort(key=lambda k: json.loads(tags[k]).get("createdAt", 0), reverse=True)
        for key in earlier[SWEEPS_KEPT - 1 :]:
            client(store.uri).delete_experiment_tag(experiment.experiment_id, key)
    for key, value in wanted.items():
        client(store.uri).set_experiment_tag(experiment.experiment_id, key, value)


def understands_views(store: Store) -> bool:
    """Whether the MLflow that shows this store knows saved views: the server's version, or the one installed here."""
    import mlflow

    if store.uri.startswith("databricks"):
        return False  # its own page
    version = mlflow.__version__
    if store.served:
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
    return json.dumps({"name": name[:200], "createdAt": now_ms, "updatedAt": now_ms, "state": packed, **OURS})


def _is_ours(value: str) -> bool:
    try:
        envelope = json.loads(value)
    except ValueError:
        return False
    return isinstance(envelope, dict) and OURS.items() <= envelope.items()


def _note(experiment: Experiment, run_id: str, label: str) -> str:
    """The experiment's description, of which the page shows one line."""
    keys = {f"latest sweep: {label}": _key(run_id), "all sweeps": ALL_SWEEPS, "all trials": ALL_TRIALS}
    links = (f"[{text}]({_path(experiment.experiment_id, {'viewStateShareKey': key})})" for text, key in keys.items())
    return NOTE_START + " · ".join(links)


def _path(experiment: str, query: dict[str, str]) -> str:
    """MLflow opens on its other half, for applications of language models, unless the address says otherwise."""
    return f"#/experiments/{experiment}/runs?{urllib.parse.urlencode({**query, 'workflowType': 'machine_learning'})}"


# The state of MLflow's page, under the names that the page gives it


def trials_state(search: str, mode: str) -> dict[str, Any]:
    """The page that shows trials.

    search: MLflow's filter of runs. mode: what was done in the trials ("measure", "predict"), or "" for all kinds.
    """
    order = PEAK if mode == "predict" else THROUGHPUT
    state = _state(search, f"metrics.`{order}`", OF_TRIALS, ascending=order == PEAK)
    sections, charts = _sections_and_charts(mode)
    return {**state, "compareRunSections": sections, "compareRunCharts": charts}


def _state(search: str, order: str, columns: dict[str, int], *, ascending: bool) -> dict[str, Any]:
    return {
        "searchFilter": search, "orderByKey": order, "orderByAsc": ascending, "startTime": "ALL",
        "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs",
        "selectedColumns": [column for column in columns if column not in FIXED],
        "columnOrder": list(columns), "columnWidths": columns,
        "runsHiddenMode": "SHOW_ALL",  # MLflow's own choice is the first ten
        "isAccordionReordered": True,  # sections stay in the order given
        "hideEmptyCharts": True, "useGroupedValuesInCharts": True, "groupBy": None,
        "viewMaximized": False, "runListHidden": False,
    }  # fmt: skip


def _sections_and_charts(mode: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Sections are called as MLflow calls its own, so that what it adds by itself joins them."""
    x, y = ({"key": metric, "type": "METRIC"} for metric in (THROUGHPUT, PEAK))
    scatter = {"type": "SCATTER", "xaxis": x, "yaxis": y}
    measured, predicted = [_parallel(PEAK, THROUGHPUT), scatter], [_parallel(PEAK)]
    main = {"measure": measured, "predict": predicted}.get(mode, [*measured, *predicted])
    wanted: list[tuple[str, int, list[dict[str, Any]]]] = [
        (MAIN_SECTION, 1 if mode == "predict" else 2, main),
        ("memory", 2, _bars(PEAK, "memory/saved_mib")),
        ("throughput", 2, _bars(THROUGHPUT, "throughput/ratio")),
        ("time", 3, _bars("time/step_ms")),
        ("quality", 2, [_line("quality/train_loss"), *_bars("quality/eval_loss")]),
        ("verify", 3, _bars("verify/max_rel_err")),
        ("memory/at_peak", 3, _bars(*(f"memory/at_peak/{c}_mib" for c in CATEGORIES))),
        ("transfer", 2, _bars("transfer/to_host_mib", "transfer/from_host_mib")),
        ("predicted", 3, _bars(*(f"predicted/{n}" for n in ("allocated_mib", "reserved_mib", "error_ratio")))),
        *((name, 3, []) for name in CLOSED),
    ]
    sections, charts = [], []
    for number, (name, columns, inner) in enumerate(wanted):
        section = f"memory-sweep-section-{number}"
        sections.append({
            "uuid": section, "name": name, "display": name not in CLOSED, "columns": columns,
            "isReordered": True,  # its charts stay in the order given, what MLflow adds comes after them
            "deleted": False, "isGenerated": False, "cardHeight": 420 if name == MAIN_SECTION else 360,
        })  # fmt: skip
        for place, chart in enumerate(inner):
            common = {"uuid": f"memory-sweep-chart-{number}-{place}", "metricSectionId": section}
            charts.append({**common, "deleted": False, "isGenerated": False, "runsCountToCompare": 100, **chart})
    return sections, charts


def _parallel(*metrics: str) -> dict[str, Any]:
    knobs = [STRATEGY, MICRO_BATCH, CHECKPOINT, OFFLOAD]
    return {"type": "PARALLEL", "selectedParams": knobs, "selectedMetrics": list(metrics), "showAllRuns": True}


def _bars(*metrics: str) -> list[dict[str, Any]]:
    return [{"type": "BAR", "metricKey": m, "selectedMetricKeys": [m], "displayName": m} for m in metrics]


def _line(metric: str) -> dict[str, Any]:
    return {
        "type": "LINE", "metricKey": metric, "selectedMetricKeys": [metric], "displayName": metric,
        "lineSmoothness": 0, "xAxisScaleType": "linear", "scaleType": "linear", "range": {}, "xAxisKey": "step",
        "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [], "ignoreOutliers": False,
        "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True,
    }  # fmt: skip
