"""Views, knobs and colours in real SQLite stores; the page that shows them is tested in test_mlflow_ui."""

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
from mlflow.tracking import MlflowClient

from sweep.results import Comparison, Decision, Difference, Quality
from sweep.tracking import Store, close_sweep, initialise, open_sweep, start_trial, store_location, sweep_page
from sweep.tracking.values import BASELINE_COLOR, color_of, decision_metrics_of, knobs_of, metrics_of
from sweep.tracking.views import KIND, KIND_TAG, NOTE, SWEEPS_KEPT, TAG, save_views, understands_views


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    found = store_location(None, tmp_path_factory.mktemp("project"))
    initialise(found)
    return found


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


def test_a_sweep_leaves_views_that_lead_to_it(store: Store) -> None:
    sweep = open_sweep(store, "gpt_tiny on cpu", tags={"mode": "measure"})
    found = views(store)
    assert {"trials", "sweeps", f"sweep-{sweep[:8]}"} <= set(found)
    view = found[f"sweep-{sweep[:8]}"]
    assert view["name"].startswith("gpt_tiny on cpu, 2")
    assert view["name"] == MlflowClient(store.uri).get_run(sweep).data.tags["sweep"]
    state = view["state"]
    assert state["searchFilter"] == f"tags.`mlflow.parentRunId` = '{sweep}'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`throughput/samples_per_s`", False)
    sections = {section["uuid"] for section in state["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} <= sections
    assert len({chart["uuid"] for chart in state["compareRunCharts"]}) == len(state["compareRunCharts"])
    assert set(state["selectedColumns"]) <= set(state["columnOrder"]) == set(state["columnWidths"])
    experiment = initialise(store)
    expected = f"#/experiments/{experiment}/runs?viewStateShareKey=sweep-{sweep[:8]}&workflowType=machine_learning"
    assert sweep_page(store, sweep) == expected
    assert tags(store)[KIND_TAG] == KIND
    assert expected in tags(store)[NOTE]
    close_sweep(store, sweep)


def test_a_predicted_sweep_is_sorted_by_its_peaks(store: Store) -> None:
    sweep = open_sweep(store, "llama_1b on h100_80gb", tags={"mode": "predict"})
    state = views(store)[f"sweep-{sweep[:8]}"]["state"]
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`memory/peak_mib`", True)
    (parallel,) = [chart for chart in state["compareRunCharts"] if chart["type"] == "PARALLEL"]
    assert parallel["selectedMetrics"] == ["memory/peak_mib"]  # a run without one of them would be left out
    close_sweep(store, sweep)


def test_columns_and_charts_show_what_is_logged() -> None:
    """A name that no trial has would be an empty column or chart."""
    from sweep.tracking.values import result_tags_of
    from sweep.tracking.views import trials_state

    result = made_up.trial("offload", 100.0, measure={"to_host_mib": 5.0, "from_host_mib": 5.0})
    result.prediction = made_up.prediction(101.0, error_ratio=0.01)
    result.decision = Decision("accept", ["no_saving"], "use it", "", 100.0, 40.0, 0.8, 1.0)
    metrics = {name for name, _, _ in metrics_of(result)}
    known = {f"metrics.`{name}`" for name in metrics} | {f"tags.`{name}`" for name in result_tags_of(result)}
    known |= {f"params.`{name}`" for name in knobs_of(result.config)} | {"tags.`sweep`"}
    state = trials_state("", "")
    assert set(state["selectedColumns"]) <= known
    for chart in state["compareRunCharts"]:
        named = chart.get("selectedMetricKeys") or [*chart.get("selectedMetrics", [])]
        named = named or [chart["xaxis"]["key"], chart["yaxis"]["key"]]
        assert set(named) <= metrics, chart
        assert set(chart.get("selectedParams", [])) <= set(knobs_of(result.config))


def test_only_the_latest_sweeps_have_a_view(tmp_path: Path) -> None:
    store = store_location(None, tmp_path)
    initialise(store)
    sweeps = [f"{number:08x}{number:024x}" for number in range(SWEEPS_KEPT + 3)]
    for run_id in sweeps:
        save_views(store, run_id, f"sweep {run_id}", "measure")
    kept = {key for key in views(store) if key.startswith("sweep-")}
    assert kept == {f"sweep-{run_id[:8]}" for run_id in sweeps[-SWEEPS_KEPT:]}
    assert {"trials", "sweeps"} <= set(views(store))
    assert "searchFilter=" in sweep_page(store, sweeps[0])  # no view any more: its trials by a filter


def test_what_a_person_changed_is_left_alone(tmp_path: Path) -> None:
    store = store_location(None, tmp_path)
    experiment, client = initialise(store), MlflowClient(store.uri)
    save_views(store, "1" * 32, "first", "measure")
    # As MLflow's page saves over a view and a description; and a tag that is no view at all.
    changed = json.dumps({"name": "All trials", "createdAt": 1, "updatedAt": 2, "state": "deflate;AAAA"})
    kept = {TAG + "trials": changed, TAG + "sweep-broken": "not JSON", NOTE: "My notes", KIND_TAG: "genai_development"}
    for name, value in kept.items():
        client.set_experiment_tag(experiment, name, value)
    for number in range(2, SWEEPS_KEPT + 4):
        save_views(store, f"{number:08d}" + "0" * 24, "another", "measure")
    found = tags(store)
    assert {name: found[name] for name in kept} == kept


def test_views_that_cannot_be_saved_cost_a_warning_and_no_sweep(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.exceptions import MlflowException

    def refuse(*_: Any) -> None:
        raise MlflowException("experiment tags are read-only here")

    monkeypatch.setattr("mlflow.tracking.MlflowClient.set_experiment_tag", refuse)
    sweep = open_sweep(store, "refused")
    assert "not recorded in MLflow: the views of MLflow's page (experiment tags are read-only here)" in caplog.text
    with start_trial(store, sweep, made_up.trial("baseline", 100.0), system_metrics=False) as run:
        run.log(made_up.trial("baseline", 100.0))
    assert MlflowClient(store.uri).get_run(run.run_id or "").data.params["micro_batch"] == "16"
    close_sweep(store, sweep)


@pytest.fixture
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


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.17.2", True),
        ("3.18.0rc1", True),
        ("4.0.0", True),
        ("3.9.1", False),
        ("2.22.0", False),
        ("", False),
        ("x", False),
    ],
)
def test_older_servers_get_no_views(
    version: str, expected: bool, version_server: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, said = version_server
    said["version"] = version
    assert understands_views(store_location(address, tmp_path)) is expected


def test_a_server_that_does_not_answer_gets_no_views(tmp_path: Path) -> None:
    assert not understands_views(store_location("http://127.0.0.1:9", tmp_path))


def test_every_filter_of_the_docs_is_one_that_mlflow_takes(store: Store) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "mlflow.md").read_text(encoding="utf-8")
    filters = re.findall(r"^\| [^|]+ \| `((?:tags|params|metrics)\.[^`]+)` \|$", page, re.MULTILINE)
    assert len(filters) >= 5
    sweep = open_sweep(store, "filtered")
    result = made_up.trial("checkpoint", 100.0, knobs={"checkpoint__every_k": 2, "offload__placement": "all"})
    result.decision = Decision("accept", ["over_memory"], "", "", 100.0, 40.0, 0.9)
    result.evidence = "measured"
    with start_trial(store, sweep, result, system_metrics=False) as run:
        run.log(result)
    close_sweep(store, sweep)
    client, experiment = MlflowClient(store.uri), initialise(store)
    assert run.run_id is not None
    day = client.get_run(sweep).data.tags["sweep"].split(", ")[1].split()[0]
    for search in filters:
        search = re.sub(r"\d{4}-\d{2}-\d{2}", day, search)
        found = {r.info.run_id for r in client.search_runs([experiment], search)}
        assert (run.run_id in found) == ("outcome" not in search), search


# Knobs, colours, and what is known of a sweep


@pytest.mark.parametrize(
    ("strategy", "knobs", "expected"),
    [
        ("baseline", {}, ("16", "1", "none", "none")),
        ("micro_batch", {"micro_batch_size": 5}, ("5", "4", "none", "none")),
        ("micro_batch", {"micro_batch_size": 64}, ("16", "1", "none", "none")),
        ("checkpoint", {"checkpoint__every_k": 2}, ("16", "1", "blocks/2", "none")),
        ("checkpoint_selective", {}, ("16", "1", "selective", "none")),
        (
            "checkpoint",
            {"checkpoint__granularity": "segments", "checkpoint__segment_size": 3},
            ("16", "1", "segments of 3", "none"),
        ),
        (
            "checkpoint",
            {"checkpoint__granularity": "parts", "checkpoint__parts": ["attn", "mlp"]},
            ("16", "1", "attn+mlp", "none"),
        ),
        ("offload", {}, ("16", "1", "none", "all")),
        ("offload", {"offload__min_tensor_kib": 1.0, "offload__keep_last": 2}, ("16", "1", "none", "all >=1K keep 2")),
        ("offload", {"offload__placement": "blocks", "offload__blocks": "first:2"}, ("16", "1", "none", "first:2")),
        ("offload", {"offload__implementation": "save_on_cpu"}, ("16", "1", "none", "all save_on_cpu")),
        ("hybrid", {"offload__placement": "inputs"}, ("16", "1", "blocks", "inputs")),
    ],
)
def test_knobs(strategy: str, knobs: dict[str, Any], expected: tuple[str, str, str, str]) -> None:
    found = knobs_of(made_up.config(strategy, **knobs))
    assert found.pop("strategy") == strategy
    assert tuple(found.values()) == expected
    assert list(found) == ["micro_batch", "accumulation", "checkpoint", "offload"]


def test_no_strategy_no_knobs() -> None:
    assert knobs_of({}) == knobs_of({"workload": {"name": "x"}}) == {}
    assert knobs_of({"strategy": {"name": "own"}}) == {"strategy": "own", "checkpoint": "none", "offload": "none"}


def test_colours_tell_kinds_apart_and_stay() -> None:
    results = made_up.sweep_of_six()
    colors = {result.strategy: color_of(result) for result in results}
    assert colors["baseline"] == BASELINE_COLOR
    assert len(set(colors.values())) == 6
    assert colors == {result.strategy: color_of(result) for result in made_up.sweep_of_six()}
    sizes = (16, 8, 4, 2, 1)
    shades = [color_of(made_up.trial("checkpoint", 1.0, knobs={"micro_batch_size": size})) for size in sizes]
    assert len(set(shades)) == 5
    assert all(int(shade[1:3], 16) > int(shade[3:5], 16) > int(shade[5:7], 16) for shade in shades)  # orange
    assert shades == sorted(shades, reverse=True)  # darker and darker


def test_a_sweep_has_a_verdict_and_counts(store: Store) -> None:
    decisions = [Decision("accept"), Decision("reject"), Decision("accept")]
    comparison = Comparison("f1", "w", "cpu", "measure", "cpu", "accept", "offload", "", "", "", decisions=decisions)
    sweep = open_sweep(store, "judged")
    close_sweep(store, sweep, comparisons=[comparison])
    run = MlflowClient(store.uri).get_run(sweep)
    assert (run.data.tags["verdict"], run.data.tags["preferred"]) == ("accept", "offload")
    assert run.data.metrics == {"sweep/trials": 3.0, "sweep/accepted": 2.0}


def test_numbers_have_the_digits_that_mean_something() -> None:
    result = made_up.trial("checkpoint", 268.13281251, 131.094599999, measure={"eval_loss": 3.268112349})
    result.verification = made_up.verified(3.123456789e-7)
    logged = {name: value for name, value, _ in metrics_of(result)}
    assert logged["memory/peak_allocated_mib"] == 268.133
    assert (logged["time/step_ms"], logged["time/step_ms_low"]) == (131.095, 128.473)
    assert logged["quality/eval_loss"] == 3.26811
    assert logged["verify/grad_rel_err"] == 3.123456789e-7  # errors are small: all digits


def test_differences_carry_their_intervals() -> None:
    result = made_up.trial("checkpoint", 100.0)
    quality = Quality("equal", 3, 3.2, 3.1, 3.3, 0.01, -0.02, 0.04, 0.0)
    result.decision = Decision("accept", step=Difference(1.2, 1.15, 1.25, False), quality=quality)
    logged = {name: value for name, value, _ in decision_metrics_of(result)}
    assert (logged["time/step_low_ratio"], logged["time/step_high_ratio"]) == (1.15, 1.25)
    assert (logged["quality/loss_difference_low"], logged["quality/loss_difference_high"]) == (-0.02, 0.04)
