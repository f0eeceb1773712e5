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

from sweep.tracking_store import SERVER_SCHEMES, Store, client, experiment_id
from sweep.tracking_view_state import sweeps_state, trials_state

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
