"""How many measured runs a search needs, against Optuna's samplers by themselves and the stock Hydra plugin.

    python benchmarks/search_efficiency.py              # replays the table in benchmarks/results/
    python benchmarks/search_efficiency.py --measure    # measures the whole table again (minutes, on an idle machine)

One grid is measured exhaustively on this CPU, with an emulated device on which a part of it does not fit. Every way of
searching is then replayed on that table, without noise, with 20 seeds. The plan of our search is made by the real code
from its own timed micro-steps; neither it nor any sampler sees the table except through the runs that it asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import optuna  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

from benchmarks import search_peers  # noqa: E402
from sweep.config.check import typed  # noqa: E402
from sweep.config.schema import Config  # noqa: E402
from sweep.config.strategy_names import is_baseline, kind_of, strategy_at  # noqa: E402
from sweep.results import Outcome, Prediction, from_dict, to_dict, write_json  # noqa: E402
from sweep.search.candidate import Answer, Job  # noqa: E402
from sweep.search.loop import Search, Settings, quiet_optuna  # noqa: E402
from sweep.search.plan import Candidate, Forecast, Line, Pieces, make_plan, measure_pieces, rank, signature  # noqa: E402  # noqa: E402
from sweep.search.preflight import Preflight, Suggest  # noqa: E402
from sweep.search.space import Space, read_space  # noqa: E402
from sweep.search.study import Sampler, open_storage  # noqa: E402
from sweep.trial.measure import measure, prepared_device  # noqa: E402
from sweep.trial.trial import run_trial  # noqa: E402

TABLE = ROOT / "benchmarks" / "results" / "search_table.json"
RESULT = ROOT / "benchmarks" / "results" / "search_efficiency.json"
SEEDS, HORIZON, WITHIN, AFTER = 20, 120, 0.02, 10
SHARE_TOO_LARGE = 0.4
DATA = Forecast()  # keeps the data source
OVERRIDES = [
    "search=budget",
    "device=cpu",
    "workload.model.layers=4",
    "workload.model.d_model=96",
    "workload.model.d_ff=384",
    "workload.seq_len=64",
    "workload.data.max_mib=1",
    "measure.warmup_steps=1",
    "measure.steps=6",
    "measure.repeats=1",
    "measure.eval_batches=0",
    "measure.verify=false",
    "search.space.micro_batch_sizes=[16,8,4,2]",
    "search.space.first_blocks=[2]",
    "search.space.min_tensor_kib=[16,128]",
    "tracking.enabled=false",
]


# -- the table ------------------------------------------------------------------------------------------------------


class Workbench:
    """The workload, its grid, and what is known of every point."""

    def __init__(self, table: dict[str, Any] | None = None) -> None:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            node = compose("config", OVERRIDES)
        if table is not None:
            OmegaConf.update(node, "device.capacity_mib", table["capacity_mib"])
        self.node: DictConfig = node
        self.config: Config = typed(node)
        self.space: Space = read_space({}, [], None, Suggest(), node, "sweep.search.preflight.Suggest")
        self.points = self.space.points(20_000) or []
        self.rows: dict[str, dict[str, Any]] = {} if table is None else {r["words"]: r for r in table["rows"]}

    def config_at(self, overrides: list[str]) -> Config:
        strategy = strategy_at(self.config, overrides)
        assert strategy is not None
        strategy.name = kind_of(strategy, self.config.workload.global_batch_size)
        return replace(self.config, strategy=strategy)

    def row(self, overrides: Sequence[str]) -> dict[str, Any]:
        return self.rows[" ".join(sorted(overrides))]

    @property
    def best(self) -> float:
        return max(r["samples_per_s"] for r in self.rows.values() if r["outcome"] == Outcome.ok.value)


def measure_table() -> dict[str, Any]:
    """Predict every point, choose the capacity, then really run every computation once."""
    bench, started = Workbench(), time.perf_counter()
    forecast = Forecast()
    rows: list[dict[str, Any]] = []
    for point in bench.points:
        words = bench.space.overrides(point)
        config = bench.config_at(words)
        row: dict[str, Any] = {"words": " ".join(sorted(words)), "point": point}
        try:
            prediction = forecast.predicted(config)
            row |= {"prediction": to_dict(replace(prediction, peak=None, at_peak_mib={})), "computation": ""}
            row["computation"] = signature(forecast.judged(prediction, config), config)
        except Exception as error:
            row |= {"prediction": None, "computation": row["words"], "error": str(error)}
        rows.append(row)
    print(f"{len(rows)} points predicted in {time.perf_counter() - started:.0f} s", flush=True)
    peaks = sorted(r["prediction"]["allocated_mib"] for r in rows if r["prediction"])
    capacity = round(peaks[int(len(peaks) * (1 - SHARE_TOO_LARGE))], 1)
    bench = Workbench({"capacity_mib": capacity, "rows": []})
    bench.config.device = replace(bench.config.device, capacity_mib=capacity)
    measured: dict[str, dict[str, Any]] = {}
    run_trial(bench.config_at([f"{k}={v}" for k, v in rows[-1]["point"].items()]), "warm-up")
    for i, row in enumerate(rows):
        if row["computation"] not in measured:
            config = bench.config_at([f"{k}={v}" for k, v in row["point"].items()])
            result = run_trial(config, row["words"])
            m = result.measurement
            measured[row["computation"]] = {
                "outcome": result.outcome,
                "samples_per_s": None if m is None else m.samples_per_s,
                "peak_mib": None if m is None else m.peak_allocated_mib,
                "prediction": None if result.prediction is None else to_dict(_small(result.prediction)),
            }
        row |= measured[row["computation"]]
        if i % 25 == 24:
            print(f"{i + 1} of {len(rows)} points, {time.perf_counter() - started:.0f} s", flush=True)
    spread = again(bench, rows)
    seconds = time.perf_counter() - started
    whole = bench.config.workload.global_batch_size
    strategies = [bench.config_at([f"{k}={v}" for k, v in r["point"].items()]).strategy for r in rows]
    others = [Candidate(r["point"], s) for r, s in zip(rows, strategies) if not is_baseline(s, whole)]
    with tempfile.TemporaryDirectory() as folder:
        made = make_plan(bench.config, others, Forecast(), bench.config.search.plan_points, Path(folder))
    table = {
        "overrides": OVERRIDES,
        "capacity_mib": capacity,
        "seconds": round(seconds, 1),
        "plan_seconds": round(made.seconds, 1),
        "spread": round(spread, 4),
        "pieces": to_dict(made.pieces),
        "rows": rows,
    }
    write_json(table, TABLE)
    return table


def again(bench: Workbench, rows: list[dict[str, Any]]) -> float:
    """Time every computation that fits once more, and keep the faster of both: what disturbs a step makes it longer.

    Returns the median share by which the two readings differ.
    """
    differ, done = [], {}
    for row in rows:
        if row["outcome"] != Outcome.ok.value:
            continue
        if row["computation"] not in done:
            config = bench.config_at([f"{k}={v}" for k, v in row["point"].items()])
            config.measure = replace(config.measure, ledger=False)
            second = measure(config, prepared_device(config), DATA.data_of(config.workload)).samples_per_s
            differ.append(abs(second / row["samples_per_s"] - 1))
            done[row["computation"]] = max(second, row["samples_per_s"])
        row["samples_per_s"] = done[row["computation"]]
    return statistics.median(differ)


def _small(prediction: Prediction) -> Prediction:
    return replace(prediction, peak=None, at_peak_mib={})


def tightened(table: dict[str, Any], cap: float) -> dict[str, Any]:
    """The same table for a smaller device: what was measured above `cap` MiB counts as out of memory."""
    rows = []
    for row in table["rows"]:
        prediction = row["prediction"]
        if prediction is not None and prediction["headroom_mib"] is not None:
            headroom = prediction["headroom_mib"] + cap - table["capacity_mib"]
            prediction = {**prediction, "headroom_mib": headroom, "fits": headroom >= 0, "capacity_mib": cap}
        row = {**row, "prediction": prediction}
        if row["outcome"] == Outcome.ok.value and row["peak_mib"] > cap:
            row |= {"outcome": Outcome.oom_device.value, "samples_per_s": None}
        rows.append(row)
    tight = {**table, "capacity_mib": cap, "rows": rows}
    bench = Workbench(tight)
    others = [Candidate(p, bench.config_at(bench.space.overrides(p)).strategy) for p in bench.points]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pieces = measure_pieces(bench.config, others, Forecast(), Path(folder))
    return {**tight, "pieces": to_dict(pieces), "plan_seconds": time.perf_counter() - started}


# -- replays --------------------------------------------------------------------------------------------------------


class Done(BaseException):
    """Everything that is counted has been counted."""


class Count:
    """What a way of searching has run so far."""

    def __init__(self, bench: Workbench) -> None:
        self.bench, self.runs, self.out_of_memory, self.best = bench, 0, 0, 0.0
        self.until: int | None = None  # runs until within 2 % of the best feasible point
        self.oom_until: int | None = None
        self.regret: float | None = None  # after 10 runs

    def ran(self, row: dict[str, Any]) -> None:
        self.runs += 1
        self.out_of_memory += row["outcome"] == Outcome.oom_device.value
        self.best = max(self.best, row["samples_per_s"] or 0.0)
        if self.until is None and self.best >= (1 - WITHIN) * self.bench.best:
            self.until, self.oom_until = self.runs, self.out_of_memory
        if self.runs == AFTER:
            self.regret = 1 - self.best / self.bench.best
        if (self.until is not None and self.runs >= AFTER) or self.runs >= HORIZON:
            raise Done

    def data(self) -> dict[str, Any]:
        regret = self.regret if self.regret is not None else 1 - self.best / self.bench.best
        oom = self.oom_until if self.oom_until is not None else self.out_of_memory
        return {"until": self.until, "out_of_memory": oom, "regret": regret, "out_of_memory_all": self.out_of_memory}


class TableRunner:
    """Launches jobs by looking them up."""

    def __init__(self, bench: Workbench, count: Count) -> None:
        self.bench, self.count = bench, count

    def compose(self, number: int, overrides: list[str]) -> tuple[DictConfig, Path | None]:
        return OmegaConf.structured(self.bench.config_at(overrides)), None

    def launch(self, jobs: Sequence[Job]) -> list[tuple[Any, Path | None]]:
        said: list[tuple[Any, Path | None]] = []
        for job in jobs:
            row = self.bench.row(job.overrides)
            self.count.ran(row)
            said.append((answer(row, job, self.bench.config.device.capacity_mib or 0.0), None))
        return said


def answer(row: dict[str, Any], job: Job, cap: float) -> Answer:
    """As `sweep.search.preflight.read` answers."""
    info = dict(job.estimate.info) if job.estimate is not None else {}
    if row["outcome"] == Outcome.ok.value:
        info["measured_mib"] = row["peak_mib"]
        over = {"memory": row["peak_mib"] / cap - 1, "valid": 0.0}
        return Answer(values=[row["samples_per_s"]], constraints=over, info=info)
    known = job.estimate.constraints.get("memory", 0.0) if job.estimate is not None else None
    if row["outcome"] == Outcome.oom_device.value:
        over = {"memory": 1.0 if known is None else max(known, 0.01), "valid": 0.0}
    else:
        over = {"memory": 0.0, "valid": 1.0}
    return Answer(row["outcome"], constraints=over, info=info)


class TableForecast(Forecast):
    """The real judgement on predictions that were made when the table was measured."""

    def __init__(self, bench: Workbench) -> None:
        super().__init__(say=lambda words: None)
        self._by_strategy = {
            _key(bench.config_at([f"{k}={v}" for k, v in r["point"].items()])): r for r in bench.rows.values()
        }

    def predicted(self, config: Config) -> Prediction:
        row = self._by_strategy[_key(config)]
        if row["prediction"] is None:
            from sweep.errors import NothingOffloaded

            raise NothingOffloaded(row.get("error", ""))
        return from_dict(Prediction, row["prediction"])


def _key(config: Config) -> str:
    return json.dumps(to_dict(replace(config.strategy, name="")), sort_keys=True)


def with_search(
    bench: Workbench, seed: int, sampler: dict[str, Any], *, preflight: bool = False, plan: int | None = None
) -> dict[str, Any]:
    """One replay through our search. plan: candidates of the plan behind the baseline; None: not even the baseline."""
    count = Count(bench)
    study = optuna.create_study(direction="maximize", storage=optuna.storages.InMemoryStorage())
    settings = Settings(["maximize"], ["samples_per_s"], ["memory", "valid"], n_trials=HORIZON, max_failures=None)
    hook = Preflight() if preflight else None
    if hook is not None:
        hook.forecast = TableForecast(bench)
    first: list[dict[str, Any]] = []
    if plan is not None:
        first = planned(bench, plan, hook)
    search = Search(
        study, bench.space, Sampler(sampler, seed, 0, 1), settings, TableRunner(bench, count),
        enqueue=first, preflight=hook, say=lambda words: None,
    )  # fmt: skip
    with contextlib.suppress(Done):
        search.run()
    return count.data()


def planned(bench: Workbench, wanted: int, hook: Preflight | None) -> list[dict[str, Any]]:
    """The baseline and the plan's points, as `sweep.search.preflight.plan` gives them, from the stored pieces."""
    whole = bench.config.workload.global_batch_size
    all_ = [Candidate(p, bench.config_at(bench.space.overrides(p)).strategy) for p in bench.points]
    first = [c.point for c in all_ if is_baseline(c.strategy, whole)]
    if not wanted or hook is None:
        return first
    others = [c for c in all_ if not is_baseline(c.strategy, whole)]
    hook.pieces = bench.pieces  # type: ignore[attr-defined]
    ranked, _ = rank(bench.config, others, hook.pieces, hook.forecast, wanted)
    return first + [r.point for r in ranked]


def by_itself(bench: Workbench, seed: int, sampler: optuna.samplers.BaseSampler) -> dict[str, Any]:
    """A plain Optuna loop, as a person writes it: out of memory is told as zero throughput."""
    count = Count(bench)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    try:
        while True:
            trial = study.ask()
            bench.space.suggest_rest(trial)
            row = bench.row(bench.space.overrides(trial.params))
            count.ran(row)
            study.tell(trial, row["samples_per_s"] or 0.0)
    except Done:
        return count.data()


def replay_all(bench: Workbench) -> dict[str, list[dict[str, Any]] | str]:
    tpe, nsga = ({"_target_": f"optuna.samplers.{n}Sampler"} for n in ("TPE", "NSGAII"))
    gp = {"_target_": "optuna.samplers.GPSampler", "warn_independent_sampling": False}
    ways: dict[str, Any] = {
        "random": lambda s: by_itself(bench, s, optuna.samplers.RandomSampler(seed=s)),
        "Optuna TPE, penalty": lambda s: by_itself(bench, s, optuna.samplers.TPESampler(seed=s)),
        "TPE, constraints": lambda s: with_search(bench, s, tpe),
        "GP, constraints": lambda s: with_search(bench, s, gp),
        "NSGA-II, constraints": lambda s: with_search(bench, s, nsga),
        "ours without the plan": lambda s: with_search(bench, s, tpe, preflight=True, plan=0),
        "ours": lambda s: with_search(bench, s, tpe, preflight=True, plan=bench.config.search.plan_points),
    }
    found: dict[str, list[dict[str, Any]] | str] = {}
    for name, way in ways.items():
        started = time.perf_counter()
        found[name] = [way(seed) for seed in range(SEEDS)]
        print(f"{name}: {SEEDS} seeds in {time.perf_counter() - started:.0f} s", flush=True)
    found["stock plugin 1.3.0 TPE"] = search_peers.stock(
        bench.points, [r["samples_per_s"] or 0.0 for r in map(bench.row, map(bench.space.overrides, bench.points))],
        seeds=SEEDS, runs=HORIZON, count=lambda order: _counted(bench, order),
    )  # fmt: skip
    return found


def _counted(bench: Workbench, order: list[int]) -> dict[str, Any]:
    count = Count(bench)
    try:
        for index in order:
            count.ran(bench.row(bench.space.overrides(bench.points[index])))
    except Done:
        pass
    return count.data()


# -- the sweeper's own time -----------------------------------------------------------------------------------------


def overhead(bench: Workbench, trials: int = 20) -> dict[str, float]:
    """Seconds per candidate that the search itself takes, with real predictions and a database, jobs looked up."""
    with tempfile.TemporaryDirectory() as folder:
        storage = open_storage(f"sqlite:///{folder}/optuna.db", Path(folder), Path(folder))
        study = optuna.create_study(direction="maximize", storage=storage)
        settings = Settings(["maximize"], ["samples_per_s"], ["memory", "valid"], n_trials=trials, max_failures=None)
        hook = Preflight()
        predicting = 0.0
        real = hook.forecast.predicted

        def timed(config: Config) -> Prediction:
            nonlocal predicting
            begun = time.perf_counter()
            try:
                return real(config)
            finally:
                predicting += time.perf_counter() - begun

        hook.forecast.predicted = timed  # type: ignore[method-assign]
        runner = TableRunner(bench, Count(bench))
        runner.count.ran = lambda row: None  # type: ignore[method-assign]
        hook.forecast.judge(bench.config)  # the first prediction loads what all share
        predicting = 0.0
        sampler = Sampler({"_target_": "optuna.samplers.TPESampler"}, 0, 0, 1)
        search = Search(
            study, bench.space, sampler, settings, runner, folder=Path(folder), preflight=hook, say=lambda words: None
        )
        started = time.perf_counter()
        search.run()
        seconds = time.perf_counter() - started
        asked = len(search.records)
    return {"candidates": asked, "s_per_candidate": seconds / asked, "predict_s_per_candidate": predicting / asked}


# -- the page -------------------------------------------------------------------------------------------------------


def summary(name: str, found: list[dict[str, Any]] | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"name": name, "note": found}
    until = [f["until"] if f["until"] is not None else HORIZON + 1 for f in found]
    return {
        "name": name,
        "median_runs": statistics.median(until),
        "worst_runs": max(until),
        "never": sum(f["until"] is None for f in found),
        "median_regret": statistics.median(f["regret"] for f in found),
        "median_out_of_memory": statistics.median(f["out_of_memory"] for f in found),
        "worst_out_of_memory": max(f["out_of_memory_all"] for f in found),
    }


def show(table: dict[str, Any], rows: list[dict[str, Any]], spent: dict[str, float]) -> str:
    outcomes = [r["outcome"] for r in table["rows"]]
    distinct = len({r["computation"] for r in table["rows"]})
    too_large = outcomes.count(Outcome.oom_device.value)
    runnable = outcomes.count(Outcome.ok.value)
    nothing = len(outcomes) - too_large - runnable
    lines = [
        f"{len(outcomes)} points, {distinct} different computations; device.capacity_mib={table['capacity_mib']:g}:",
        f"{too_large} out of memory ({too_large / len(outcomes):.0%}), {nothing} offload nothing, {runnable} run",
        f"measured twice in {table['seconds']:.0f} s (readings differ by {table['spread']:.1%} in the median; the "
        f"faster counts); planned in {table['plan_seconds']:.0f} s",
        f"{SEEDS} seeds, no noise, at most {HORIZON} runs; counted until within {WITHIN:.0%} of the best that fits",
        "",
        f"{'':24} {'runs, median':>12} {'worst seed':>11} {f'regret @{AFTER}':>11} {'OOM, median':>12} {'worst':>6}",
    ]
    for r in rows:
        if "note" in r:
            lines.append(f"{r['name']:24} {r['note']}")
            continue
        worst = f">{HORIZON}" if r["never"] else str(r["worst_runs"])
        median = f">{HORIZON}" if r["median_runs"] > HORIZON else f"{r['median_runs']:g}"
        lines.append(
            f"{r['name']:24} {median:>12} {worst:>11} {r['median_regret']:>10.1%} {r['median_out_of_memory']:>12g} "
            f"{r['worst_out_of_memory']:>6}"
        )
    by = {r["name"]: r for r in rows}
    ours, stock = by["ours"], by["stock plugin 1.3.0 TPE"]
    goals = [
        ("within 2 % after at most 5 runs (median)", ours["median_runs"] <= 5, f"{ours['median_runs']:g}"),
        ("at most 10 runs in the worst seed", ours["worst_runs"] <= 10, f"{ours['worst_runs']}"),
        ("no out-of-memory run", ours["worst_out_of_memory"] == 0, f"{ours['worst_out_of_memory']}"),
    ]
    if "note" not in stock:
        times = stock["median_runs"] / ours["median_runs"]
        goals.append(("8 times fewer runs than the stock plugin", times >= 8, f"{times:.1f} times"))
    each, predicting = spent["s_per_candidate"], spent["predict_s_per_candidate"]
    words = f"{each:.2f} s, {predicting:.2f} s of it predicting"
    goals.append(("the sweeper takes less than 1 s per candidate", each < 1, words))
    lines += ["", *(f"{'met' if met else 'NOT MET':8} {goal}: {value}" for goal, met, value in goals)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the table again")
    parser.add_argument("--cap", type=float, help="replay for a smaller device (MiB); the plan's pieces are timed anew")
    arguments = parser.parse_args()
    quiet_optuna()
    table = measure_table() if arguments.measure or not TABLE.is_file() else json.loads(TABLE.read_text())
    if arguments.cap is not None:
        table = tightened(table, arguments.cap)
    bench = Workbench(table)
    pieces = table["pieces"]
    bench.pieces = Pieces(  # type: ignore[attr-defined]
        **{
            **pieces,
            "plain": _line(pieces["plain"]),
            "recompute": {kind: _line(line) for kind, line in pieces["recompute"].items()},
        }
    )
    found = replay_all(bench)
    rows = [summary(name, f) for name, f in found.items()]
    spent = overhead(bench)
    result = RESULT if arguments.cap is None else RESULT.with_stem(f"{RESULT.stem}_{arguments.cap:g}mib")
    write_json({"seeds": SEEDS, "rows": rows, "overhead": spent, "by_seed": found}, result)
    print()
    print(show(table, rows, spent))
    return 0


def _line(data: dict[str, Any]) -> Line:
    return Line({int(samples): ms for samples, ms in data["points"].items()})


if __name__ == "__main__":
    raise SystemExit(main())
