"""Saved views in real SQLite stores; the page that shows them is tested in test_mlflow_ui."""

from __future__ import annotations

import base64
import http.server
import json
import re
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_up
import pytest
import tracking_parts as parts
from mlflow.tracking import MlflowClient

from sweep.results import Decision
from sweep.tracking import Store, close_sweep, initialise, open_sweep, start_trial, store_location, sweep_page
from sweep.tracking.values import NOTE, decision_tags_of, knobs_of, metrics_of, result_tags_of
from sweep.tracking.views import KIND, KIND_TAG, SWEEPS_KEPT, TAG, save_views, trials_state, understands_views


def tags(store: Store) -> dict[str, str]:
    return dict(MlflowClient(store.uri).get_experiment(initialise(store)).tags)


def views(store: Store) -> dict[str, dict[str, Any]]:
    """By key: the envelope, with the state read as MLflow's page reads it."""
    found = {}
    for name, value in tags(store).items():
        if name.startswith(TAG):
            envelope = json.loads(value)
            packed = envelope["state"].removeprefix("deflate;")
            assert packed != envelope["state"]
            envelope["state"] = json.loads(zlib.decompress(base64.b64decode(packed)))
            found[name.removeprefix(TAG)] = envelope
    return found


def test_a_sweep_leaves_views_that_lead_to_it(local: Store) -> None:
    sweep = open_sweep(local, "gpt_tiny on cpu", tags={"mode": "measure"})
    found = views(local)
    assert {"trials", "sweeps", f"sweep-{sweep[:8]}"} <= set(found)
    view = found[f"sweep-{sweep[:8]}"]
    assert view["name"].startswith("gpt_tiny on cpu, 2")
    assert view["name"] == MlflowClient(local.uri).get_run(sweep).data.tags["sweep"]
    state = view["state"]
    assert state["searchFilter"] == f"tags.`mlflow.parentRunId` = '{sweep}'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`throughput/samples_per_s`", False)
    sections = {section["uuid"] for section in state["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} <= sections
    assert len({chart["uuid"] for chart in state["compareRunCharts"]}) == len(state["compareRunCharts"])
    assert set(state["selectedColumns"]) <= set(state["columnOrder"]) == set(state["columnWidths"])
    experiment = initialise(local)
    expected = f"#/experiments/{experiment}/runs?viewStateShareKey=sweep-{sweep[:8]}&workflowType=machine_learning"
    assert sweep_page(local, sweep) == expected
    assert tags(local)[KIND_TAG] == KIND
    assert expected in tags(local)[NOTE]
    close_sweep(local, sweep)


def test_a_predicted_sweep_is_sorted_by_its_peaks() -> None:
    state = trials_state("", "predict")
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`memory/peak_mib`", True)
    (parallel,) = [chart for chart in state["compareRunCharts"] if chart["type"] == "PARALLEL"]
    assert parallel["selectedMetrics"] == ["memory/peak_mib"]  # a run without one of them would be left out


def test_columns_and_charts_show_what_is_logged() -> None:
    """A name that no trial has would be an empty column or chart."""
    result = parts.finished(decision=parts.accepted())
    metrics, knobs = {name for name, _, _ in metrics_of(result)}, set(knobs_of(result))
    known = {f"metrics.`{name}`" for name in metrics} | {f"tags.`{name}`" for name in result_tags_of(result)}
    known |= {f"tags.`{name}`" for name in decision_tags_of(result, {"preferred": "yes"})}
    known |= {f"params.`{name}`" for name in knobs} | {"tags.`sweep`"}
    state = trials_state("", "")
    assert set(state["selectedColumns"]) <= known
    for chart in state["compareRunCharts"]:
        named = chart.get("selectedMetricKeys") or [*chart.get("selectedMetrics", [])]
        named = named or [chart["xaxis"]["key"], chart["yaxis"]["key"]]
        assert set(named) <= metrics, chart
        assert set(chart.get("selectedParams", [])) <= knobs


def test_the_latest_sweeps_have_a_view_and_what_a_person_changed_is_left_alone(fresh: Store) -> None:
    experiment, client = initialise(fresh), MlflowClient(fresh.uri)
    sweeps = [f"{number:08x}{number:024x}" for number in range(SWEEPS_KEPT + 2)]
    save_views(fresh, sweeps[0], "first", "measure")
    assert "viewStateShareKey=" in sweep_page(fresh, sweeps[0])
    # As MLflow's page saves over a view and a description; and a tag that is no view at all.
    changed = json.dumps({"name": "All trials", "createdAt": 1, "updatedAt": 2, "state": "deflate;AAAA"})
    kept = {TAG + "trials": changed, TAG + "sweep-broken": "not JSON", NOTE: "My notes", KIND_TAG: "genai_development"}
    for name, value in kept.items():
        client.set_experiment_tag(experiment, name, value)
    for run_id in sweeps[1:]:
        save_views(fresh, run_id, f"sweep {run_id}", "measure")
    found = tags(fresh)
    assert {name: found[name] for name in kept} == kept
    own = {name for name in found if name.startswith(TAG + "sweep-")} - set(kept)
    assert own == {f"{TAG}sweep-{run_id[:8]}" for run_id in sweeps[-SWEEPS_KEPT:]}
    assert "searchFilter=" in sweep_page(fresh, sweeps[0])  # no view any more: its trials by a filter


def test_views_that_cannot_be_saved_cost_a_warning_and_no_sweep(
    local: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.exceptions import MlflowException

    def refuse(*_: Any) -> None:
        raise MlflowException("experiment tags are read-only here")

    monkeypatch.setattr("mlflow.tracking.MlflowClient.set_experiment_tag", refuse)
    sweep = open_sweep(local, "refused")
    assert "not recorded in MLflow: the views of MLflow's page (experiment tags are read-only here)" in caplog.text
    assert parts.logged(local, parent=sweep).data.params["micro_batch"] == "16"
    close_sweep(local, sweep)


@pytest.fixture(scope="module")
def version_server() -> Iterator[tuple[str, dict[str, str]]]:
    """Answers /version, as MLflow's server does, with what it is told to."""
    said = {"version": ""}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/version" and said["version"] else 404)
            self.end_headers()
            self.wfile.write(said["version"].encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", said
        server.shutdown()


@pytest.mark.parametrize("version", ["3.17.2", "3.18.0rc1", "4.0.0", "3.9.1", "2.22.0", "", "x"])
def test_older_servers_get_no_views(version: str, version_server: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, said = version_server
    said["version"] = version
    assert understands_views(store_location(address, tmp_path)) is (version in ("3.17.2", "3.18.0rc1", "4.0.0"))


def test_a_server_that_does_not_answer_gets_no_views(tmp_path: Path) -> None:
    assert not understands_views(store_location(f"http://127.0.0.1:{parts.free_port()}", tmp_path))


def test_every_filter_of_the_docs_is_one_that_mlflow_takes(local: Store) -> None:
    page = (parts.ROOT / "docs" / "mlflow.md").read_text(encoding="utf-8")
    filters = re.findall(r"^\| [^|]+ \| `((?:tags|params|metrics)\.[^`]+)` \|$", page, re.MULTILINE)
    assert len(filters) >= 5
    sweep = open_sweep(local, "filtered")
    result = made_up.trial("checkpoint", 100.0, knobs={"checkpoint__every_k": 2, "offload__placement": "all"})
    result.decision = Decision("accept", ["over_memory"], peak_mib=100.0, saved_mib=40.0, throughput_ratio=0.9)
    result.evidence = "measured"
    with start_trial(local, sweep, result, system_metrics=False) as run:
        run.log(result)
    close_sweep(local, sweep)
    client, experiment = MlflowClient(local.uri), initialise(local)
    day = client.get_run(sweep).data.tags["sweep"].split(", ")[1].split()[0]
    for search in filters:
        search = re.sub(r"\d{4}-\d{2}-\d{2}", day, search)
        found = {r.info.run_id for r in client.search_runs([experiment], search)}
        assert (run.run_id in found) == ("outcome" not in search), search
