"""What a saved view of MLflow's page shows: columns, order, sections and charts, as plain data."""

from __future__ import annotations

from typing import Any

from sweep.tracking_knobs import CHECKPOINT, MICRO_BATCH, OFFLOAD, STRATEGY

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
