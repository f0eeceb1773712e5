"""MLflow's own page in a real browser: real server, real Chromium, forty trials recorded by the tracking code.

What is asserted is what a person sees: names, columns, charts, previews. The trials are made up (made_up_sweep.py).
"""

from __future__ import annotations

import gzip
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import browser
import made_up
import made_up_sweep
import pytest
import tracking_parts as parts
from browser import Page

from sweep.config.schema import BudgetConf
from sweep.results import TrialResult
from sweep.tracking import Store, initialise, store_location, sweep_page
from sweep.tracking.values import knobs_of

RUNS = "#/experiments/{experiment}/runs?workflowType=machine_learning"
IN_REPORTS = "checkpoint_selective"  # in the tables of a report, and nowhere else on a page of artifacts
KNOBS = ["strategy", "micro_batch", "checkpoint", "offload"]


@dataclass
class Recorded:
    page: Page
    store: Store  # what the page shows
    experiment: str
    trials: list[TrialResult]  # of the sweep of forty, judged
    sweep: str  # its run id
    small: list[TrialResult]  # of the second sweep
    small_sweep: str
    served: str  # the run id of a third sweep, recorded through the server in an experiment of its own
    served_store: Store

    @property
    def runs(self) -> str:
        return RUNS.format(experiment=self.experiment)

    def run(self, run_id: str | None, tab: str = "") -> str:
        return f"#/experiments/{self.experiment}/runs/{run_id}{tab}?workflowType=machine_learning"


@pytest.fixture(scope="module")
def ui(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    browser.programs_or_skip()
    folder, root = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("project")
    (folder / "server.db").write_bytes(empty_database.read_bytes())
    with parts.mlflow_server(folder) as address:
        # While the server starts: what is recorded in its file.
        store = store_location(f"sqlite:///{folder / 'server.db'}", root, "page")
        experiment = initialise(store)
        trace, report = root / "trace.json.gz", root / "report" / "report.md"
        trace.write_bytes(gzip.compress(b'{"traceEvents": []}'))
        trials, small = made_up_sweep.grid(), made_up.sweep_of_six()
        budget = BudgetConf(memory_mib=150.0, min_throughput_ratio=0.7)
        sweep = made_up_sweep.record(store, trials, budget=budget)
        budget = BudgetConf(memory_mib=200.0)
        small_sweep = made_up_sweep.record(store, small, report.parent, budget=budget, more=[trace])
        parts.wait_for(address, folder)
        served_store = store_location(address, root, "served")
        initialise(served_store)
        served = made_up_sweep.record(served_store, small[:2], budget=budget, more=[report])
        with browser.open_page(address) as page:
            yield Recorded(page, store, experiment, trials, sweep, small, small_sweep, served, served_store)


# The table


def test_trials_lie_under_their_sweep_and_the_experiment_says_where_its_views_are(ui: Recorded) -> None:
    page = ui.page
    page.open(ui.runs)
    page.until("two sweeps", lambda: [name(row) for row in page.rows()] == ["gpt_tiny on cpu"] * 2)
    page.click(".ag-row[row-index='0'] [col-id='attributes.`Run Name`'] button")
    names = page.until("the trials below", lambda: len(page.rows()) >= 8 and [name(row) for row in page.rows()])
    assert set(names[1:7]) == {trial.name for trial in ui.small}

    page.shows("Memory strategies", "latest sweep: gpt_tiny on cpu, ")
    link = "return [...document.links].find(link => link.innerText === 'all sweeps').getAttribute('href')"
    page.open(page.run(link))  # a click opens it in another tab
    rows = page.until_rows(2)
    assert page.columns()[:6] == [
        *("Run Name", "Created", "verdict", "preferred", "sweep/peak_mib", "sweep/throughput_ratio"),
    ]
    accepted = [t.name for t in ui.trials if t.decision is not None and t.decision.verdict == "accept"]
    counts = (rows[1]["metrics.`sweep/trials`"], rows[1]["metrics.`sweep/accepted`"])
    assert counts == (str(len(ui.trials)), str(len(accepted)))
    assert rows[1]["tags.`verdict`"] == "accept"
    assert rows[1]["tags.`preferred`"] in accepted
    assert rows[1]["params.`overrides`"] == "strategy=glob(*)"


def test_the_view_of_a_sweep_has_the_columns_that_decide(ui: Recorded) -> None:
    page = ui.page
    page.open(sweep_page(ui.store, ui.sweep))
    rows = page.until_rows(len(ui.trials))
    shown = page.columns()
    assert shown[:10] == [
        *("Run Name", "Created", "preferred", "verdict", "outcome", "memory/peak_mib", "memory/saved_mib"),
        *("time/step_ms", "throughput/ratio", "quality/eval_loss"),
    ]
    assert set(shown) >= {"evidence", "micro_batch", "checkpoint", "offload"}
    by_speed = sorted(ui.trials, key=lambda t: t.measurement.step_ms if t.measurement else 1e9)
    assert [name(row) for row in rows[:10]] == [trial.name for trial in by_speed[:10]]
    for row, trial in zip(rows[:10], by_speed):
        assert trial.decision is not None
        assert row["tags.`verdict`"] == trial.decision.verdict
        assert row["metrics.`memory/peak_mib`"] == f"{round(trial.peak_mib or 0.0, 3):g}"
        assert row["tags.`evidence`"] == "cpu"
    assert [row["tags.`preferred`"] for row in rows if row["tags.`preferred`"] not in ("", "-")] == ["yes"]
    assert (rows[0]["params.`micro_batch`"], rows[0]["params.`checkpoint`"]) == ("16", "none")  # null: the whole batch
    colors = {kind: {color(row) for row in rows if name(row).startswith(kind)} for kind in ("micro_batch", "offload")}
    assert not colors["micro_batch"] & colors["offload"]


def test_two_sweeps_are_told_apart(ui: Recorded) -> None:
    page = ui.page
    page.open(sweep_page(ui.store, ui.small_sweep))
    assert {name(row) for row in page.until_rows(6)} == {trial.name for trial in ui.small}
    page.click("[data-testid='saved-views-trigger']")
    page.shows("All trials", "All sweeps")
    assert page.text().count("gpt_tiny on cpu, ") >= 3  # the button, and an entry for each sweep
    page.open(f"#/experiments/{ui.experiment}/runs?viewStateShareKey=trials&workflowType=machine_learning")
    page.until_rows(len(ui.trials) + 6)


def test_filters_that_the_docs_name(ui: Recorded) -> None:
    def fits(trial: TrialResult) -> bool:
        decision, knobs = trial.decision, knobs_of(trial)
        small = decision is not None and (decision.peak_mib or 1e9) < 150 and (decision.throughput_ratio or 0.0) > 0.8
        return small and knobs["checkpoint"] != "blocks" and knobs["offload"] == "none"

    search = 'metrics."memory/peak_mib" < 150 and metrics."throughput/ratio" > 0.8'
    search += ' and params.checkpoint != "blocks" and params.offload = "none"'
    expected = {trial.name for trial in ui.trials if fits(trial)}
    query = {"searchFilter": f"tags.`mlflow.parentRunId` = '{ui.sweep}' and {search}"}
    query |= {"orderByKey": "metrics.`memory/peak_mib`", "orderByAsc": "true"}  # by time their sweep is listed, too
    ui.page.open(f"{ui.runs}&{urllib.parse.urlencode(query)}")
    assert {name(row) for row in ui.page.until_rows(len(expected))} == expected
    assert 0 < len(expected) < len(ui.trials)


# The charts


def test_charts_are_grouped_and_lead_from_the_knobs_to_peak_and_throughput(ui: Recorded) -> None:
    page, count = ui.page, len(ui.trials)
    page.open(sweep_page(ui.store, ui.sweep) + "&compareRunsMode=CHART")
    page.until("a point for each", lambda: points(page, "throughput/samples_per_s vs. memory/peak_mib") == count)
    page.until("a bar for each trial", lambda: points(page, "memory/peak_mib") == count)
    page.until("saved by all but the baseline", lambda: points(page, "memory/saved_mib") == count - 1)
    script = """
    return [...document.querySelectorAll('[data-testid="experiment-view-compare-runs-section-header"]')]
      .map(e => e.innerText.split('\\n')[0].trim())
    """
    assert page.run(script)[:9] == [
        *("Memory against speed", "memory", "throughput", "time", "quality", "verify"),
        *("memory/at_peak", "transfer", "predicted"),
    ]
    page.run("window.scrollTo(0, 0)")
    page.shows("Parallel Coordinates")
    script = """
    const chart = document.querySelector('.parcoords');
    if (!chart) return null;
    const colored = canvas => canvas.width && canvas.height &&
      canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value);
    const texts = [...chart.querySelectorAll('text')].map(e => e.textContent);
    return [texts, [...chart.querySelectorAll('canvas')].some(colored)];
    """
    found = page.until("lines from axis to axis", lambda: (page.run(script) or [0, 0])[1] and page.run(script))
    assert set(found[0]) >= {*KNOBS, "memory/peak_mib", "throughput/samples_per_s", "hybrid", "blocks/2", "inputs"}


def test_the_page_that_compares_runs_begins_with_the_knobs(ui: Recorded) -> None:
    page = ui.page
    chosen = json.dumps([trial.mlflow_run_id for trial in ui.trials[:24]])
    query = urllib.parse.urlencode({"runs": chosen, "experiments": json.dumps([ui.experiment])})
    page.open(f"#/compare-runs?{query}&workflowType=machine_learning")
    page.shows("Comparing 24 Runs", "Parallel Coordinates Plot", "memory/peak_allocated_mib")
    script = "return [...document.querySelectorAll('.parcoords .axis-title')].map(title => title.textContent)"
    titles = page.until("the axes", lambda: page.run(script))
    assert {"checkpoint", "micro_batch", "memory/peak_allocated_mib"} <= set(titles)


# One run


def test_descriptions_of_a_sweep_and_of_a_trial(ui: Recorded) -> None:
    page = ui.page
    page.open(ui.run(ui.small_sweep))
    page.shows("Child runs", "sweep/trials")
    assert "**" not in page.text()  # markdown is rendered
    page.click("button", "Show more")
    page.until("a table in it", lambda: page.run("return document.querySelectorAll('table').length"))

    trial = next(t for t in ui.trials if t.name == "hybrid micro_batch_size=4 every_k=2 placement=inputs")
    assert trial.decision is not None
    page.open(ui.run(trial.mlflow_run_id))
    page.shows(trial.name, f"Verdict: {trial.decision.verdict}", "Parent run", "memory/peak_mib", "time/step_ms")
    assert "error" not in page.text().split("Tags")[1].split("Registered models")[0].split()


def test_reports_and_pictures_preview(ui: Recorded) -> None:
    page = ui.page
    page.open(ui.run(ui.small_sweep, "/artifacts"))
    page.click("div, span", "report.md")
    page.shows(IN_REPORTS)
    page.click("div, span", "report.html")
    page.until("the HTML report in a frame", lambda: IN_REPORTS in frame_text(page))
    page.click("div, span", "pareto.png")
    drawn = "return Math.max(0, ...[...document.images].map(image => image.naturalWidth))"
    page.until("the picture", lambda: page.run(drawn) > 500)
    page.click("div, span", "report.json")
    page.shows('"preferred": "')
    page.click("div, span", "trace.json.gz")  # the docs say so: it is to be downloaded
    page.shows("Select a file to preview")


def test_a_sweep_that_was_recorded_on_the_server(ui: Recorded) -> None:
    page = ui.page
    where = sweep_page(ui.served_store, ui.served)
    assert where.startswith(f"{ui.served_store.uri}/#/experiments/")
    page.open(where.removeprefix(f"{ui.served_store.uri}/"))
    assert {name(row) for row in page.until_rows(2)} == {"baseline", "micro_batch"}
    experiment = where.split("/experiments/")[1].split("/")[0]
    page.open(f"#/experiments/{experiment}/runs/{ui.served}/artifacts?workflowType=machine_learning")
    page.click("div, span", "report.md")
    page.shows(IN_REPORTS)


def name(row: dict[str, str]) -> str:
    """Beside the name the cell has the run's colour, for readers of screens."""
    return row["attributes.`Run Name`"].split("\n")[-1]


def color(row: dict[str, str]) -> str:
    return row["attributes.`Run Name`"].split("\n")[0]


def points(page: Page, title: str) -> int:
    """Points or bars of the chart with this title; 0 while it is not drawn."""
    script = """
    const titles = [...document.querySelectorAll('[data-testid="draggable-chart-cards-grid"] *')]
      .filter(e => !e.children.length && e.textContent.trim() === arguments[0]);
    for (let card of titles) {
      while (card && !card.querySelector('.js-plotly-plot')) card = card.parentElement;
      if (card && card.querySelectorAll('.js-plotly-plot').length === 1)
        return card.querySelectorAll('.scatterlayer .point, .barlayer .point').length;
    }
    return 0;
    """
    return int(page.run(script, title))


def frame_text(page: Page) -> str:
    """The text of the first frame, whether or not scripts of the page may look into it."""
    frames = page.driver.find_elements("css selector", "iframe")
    if not frames:
        return ""
    page.driver.switch_to.frame(frames[0])
    try:
        return str(page.run("return document.body ? document.body.innerText : ''"))
    finally:
        page.driver.switch_to.default_content()
