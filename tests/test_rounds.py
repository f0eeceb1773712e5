"""Repeats in turn: their order, what becomes of them, and what is left when one fails or somebody interrupts."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_workloads import config

import sweep.repeats as module
from sweep import tracking
from sweep.config.schema import Config
from sweep.config.strategy_names import fixed_id
from sweep.decide.verdict import conclude
from sweep.errors import DeviceOutOfMemory
from sweep.memory.device import resolve_device
from sweep.progress import Display
from sweep.repeats import repeat_in_turn
from sweep.report import read_sweep
from sweep.results import Conditions, Run, TrialResult, read_trial, to_dict
from sweep.session import Session
from sweep.tracking.values import repeat_metrics_of
from sweep.trial.process import run_isolated_repeat
from sweep.trial.trial import run_repeat, run_trial, save

BUSY = Conditions(cpu_others=1.4, disturbed=["other processes kept 1.4 of 2 cores busy"])
SHORT = {"warmup_steps": 1, "steps": 2, "repeats": 3, "eval_batches": 1}


def conf(strategy: str = "baseline", workload: str = "vit", **measure: Any) -> Config:
    found = config(workload, strategy, measure=SHORT | measure)
    found.device = resolve_device(found.device)
    return found


def first_rounds(folder: Path, *configs: Config) -> list[TrialResult]:
    """Each trial as the command leaves it before the rounds."""
    results = []
    for i, c in enumerate(configs):
        key = str(c)
        if key not in _trials:
            _trials[key] = run_trial(c, c.strategy.name, first_round=True)
        result = copy.deepcopy(_trials[key])
        assert result.outcome == "ok", result.error
        save(result, folder / f"{i}_{c.strategy.name}")
        results.append(result)
    return results


_trials: dict[str, TrialResult] = {}  # each is run once: what becomes of it differs, not what it was


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each run, with MLflow loaded, it takes longer than the run itself does here."""
    monkeypatch.setattr("sweep.trial.trial.gc.collect", lambda: 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The repeats that are made, in order, by strategy and round."""
    order: list[tuple[str, int]] = []

    def noted(c: Config, index: int, **more: Any) -> Run:
        order.append((c.strategy.name, index))
        return run_repeat(c, index, **more)

    monkeypatch.setattr(module, "run_repeat", noted)
    return order


def failing(monkeypatch: pytest.MonkeyPatch, strategy: str, index: int, error: Callable[[], BaseException]) -> None:
    """Let one repeat fail inside of its run; those before and after it are real."""

    def broken(c: Config, i: int, **more: Any) -> Run:
        if (c.strategy.name, i) != (strategy, index):
            return run_repeat(c, i, **more)
        found = error()
        if isinstance(found, KeyboardInterrupt):
            raise found
        with pytest.MonkeyPatch.context() as inside:

            def fail(*_: Any, **__: Any) -> None:
                raise found

            inside.setattr("sweep.strategy.run_step", fail)
            return run_repeat(c, i, **more)

    monkeypatch.setattr(module, "run_repeat", broken)


# -- order -----------------------------------------------------------------------------------------------------------


def test_trials_are_repeated_in_turn_and_the_baseline_once_more_at_the_end(
    tmp_path: Path, made: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    results = first_rounds(tmp_path, conf(), conf("micro_batch"), conf("checkpoint"))
    repeat_in_turn(results, Display(None), None)
    in_turn = [(name, i) for i in (1, 2) for name in ("baseline", "micro_batch", "checkpoint")]
    assert made == [*in_turn, ("baseline", 3)]
    assert "Repeating 3 trials in turn: 7 more runs, the last of them the baseline's" in capsys.readouterr().out
    made.clear()
    repeat_in_turn(results, Display(None), None)
    assert made == []  # all are there


@pytest.mark.parametrize(("measure", "expected"), [
    ({"drift": False}, [("baseline", 1), ("micro_batch", 1), ("baseline", 2), ("micro_batch", 2)]),
    ({"repeats": 1}, []),  # a first look
    ({"repeats": 1, "seeds": 2}, [("baseline", 1), ("micro_batch", 1), ("baseline", 2)]),
])  # fmt: skip
def test_what_is_asked_for_is_made(
    measure: dict[str, Any], expected: list[tuple[str, int]], tmp_path: Path, made: list[tuple[str, int]]
) -> None:
    repeat_in_turn(first_rounds(tmp_path, conf(**measure), conf("micro_batch", **measure)), Display(None), None)
    assert made == expected


def test_a_baseline_alone_has_nothing_to_drift_against(tmp_path: Path, made: list[tuple[str, int]]) -> None:
    (result,) = first_rounds(tmp_path, conf())
    repeat_in_turn([result], Display(None), None)
    assert made == [("baseline", 1), ("baseline", 2)]


def test_each_comparison_is_repeated_by_itself(tmp_path: Path, made: list[tuple[str, int]]) -> None:
    quick = {"repeats": 2, "steps": 1, "ledger": False}
    configs = [conf("baseline", "vit", **quick), conf("baseline", "gpt", **quick), conf("checkpoint", "vit", **quick)]
    repeat_in_turn(first_rounds(tmp_path, *configs), Display(None), None)
    assert made == [("baseline", 1), ("checkpoint", 1), ("baseline", 2), ("baseline", 1)]


def test_only_trials_that_ran_are_repeated(tmp_path: Path, made: list[tuple[str, int]]) -> None:
    results = first_rounds(tmp_path, conf(repeats=2), conf("micro_batch", repeats=2))
    dead = dataclasses.replace(results[1], outcome="oom_device", measurement=None, folder=str(tmp_path / "dead"))
    predicted = dataclasses.replace(results[1], mode="predict", measurement=None, folder=str(tmp_path / "predicted"))
    repeat_in_turn([results[0], dead, predicted], Display(None), None)
    assert made == [("baseline", 1)]


def test_repeats_made_at_once_are_not_made_again(tmp_path: Path, made: list[tuple[str, int]]) -> None:
    results = [run_trial(c, c.strategy.name) for c in (conf(interleave=False), conf(seeds=3, interleave=False))]
    assert [len(r.measurement.runs) for r in results if r.measurement is not None] == [1, 3]
    assert [r.measurement.repeats for r in results if r.measurement is not None] == [3, 3]
    at_once = run_trial(conf(), "a search's")  # interleave is the default, and a search repeats at once all the same
    repeat_in_turn([*results, at_once], Display(None), None)
    assert made == []


def test_how_repeats_are_ordered_is_not_what_is_compared() -> None:
    assert len({fixed_id(conf(**m)) for m in ({}, {"interleave": False}, {"drift": False})}) == 1
    assert len({fixed_id(conf(**m)) for m in ({}, {"repeats": 4}, {"seeds": 2})}) == 3


# -- what becomes of them --------------------------------------------------------------------------------------------


def test_the_measurement_is_made_of_all_repeats_and_saved(tmp_path: Path) -> None:
    results = first_rounds(tmp_path, conf(steps=5), conf("offload", steps=5))
    before = [dataclasses.replace(r.measurement) for r in results if r.measurement is not None]
    repeat_in_turn(results, Display(None), None)
    for result, first, runs in zip(results, before, (4, 3)):
        m = result.measurement
        assert m is not None
        assert [r.index for r in m.runs] == list(range(runs))
        assert [r.at_end for r in m.runs] == [i == 3 for i in range(runs)]
        assert (m.repeats, m.steps) == (runs, 5)
        assert m.step_times_ms == [t for r in m.runs for t in r.step_times_ms]
        assert m.step_times_ms[:5] == first.step_times_ms
        assert m.step_ms == statistics.median(m.step_times_ms)
        assert m.step_ms_ci_low is not None
        assert m.step_ms_ci_high is not None
        assert m.step_ms_ci_low <= m.step_ms <= m.step_ms_ci_high
        assert (m.eval_loss, m.train_loss, m.peak) == (first.eval_loss, first.train_loss, first.peak)
        assert m.to_host_mib == first.to_host_mib
        assert all(r.train_loss == m.train_loss for r in m.runs)  # one seed: the same computation
        assert [r.eval_loss is None for r in m.runs] == [i > 0 for i in range(runs)]
        assert to_dict(read_trial(Path(result.folder) / "result.json")) == to_dict(result)
    from sweep.config.schema import BudgetConf

    comparison = conclude(results, BudgetConf(), None)
    assert comparison.drift is not None
    base = results[0].measurement
    assert base is not None
    assert comparison.drift.first_ms == statistics.median(base.runs[0].step_times_ms)
    assert comparison.drift.last_ms == statistics.median(base.runs[3].step_times_ms)


def test_each_seed_is_evaluated_once_and_the_quality_is_told_over_them(tmp_path: Path) -> None:
    results = first_rounds(tmp_path, conf(seeds=2), conf("checkpoint", seeds=2))
    repeat_in_turn(results, Display(None), None)
    for result, seeds in zip(results, ([3, 4, 3, 4], [3, 4, 3])):
        m = result.measurement
        assert m is not None
        assert [r.seed for r in m.runs] == seeds
        assert [r.eval_loss is not None for r in m.runs] == [True, True, False, False][: len(seeds)]
        assert m.eval_loss == m.runs[0].eval_loss != m.runs[1].eval_loss
        assert m.runs[2].train_loss == m.runs[0].train_loss != m.runs[1].train_loss
    from sweep.config.schema import BudgetConf

    quality = conclude(results, BudgetConf(), None).decisions[1].quality
    assert quality is not None
    assert (quality.seeds, quality.verdict, quality.difference) == (2, "equal", 0.0)


def test_where_trials_have_their_own_process_so_do_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Path] = []

    def isolated(c: Config, index: int, folder: Path, **more: Any) -> Run:
        used.append(folder)
        return dataclasses.replace(run_repeat(c, index, **more), fresh_process=True)

    monkeypatch.setattr(module, "run_isolated_repeat", isolated)
    results = first_rounds(tmp_path, conf(isolate="always", repeats=2))
    repeat_in_turn(results, Display(None), None)
    assert used == [tmp_path / "0_baseline" / "repeat_2"]
    m = results[0].measurement
    assert m is not None
    assert [r.fresh_process for r in m.runs] == [False, True]
    assert run_isolated_repeat is not isolated


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "words"), [
    (DeviceOutOfMemory("tried to allocate 5 MiB"), "DeviceOutOfMemory: tried to allocate 5 MiB"),
    (RuntimeError("something of a kernel\nand more"), "RuntimeError: something of a kernel"),
])  # fmt: skip
def test_a_repeat_that_fails_is_kept_apart_and_its_trial_not_repeated_again(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, "micro_batch", 1, lambda: error)
    results = first_rounds(tmp_path, conf(), conf("micro_batch"))
    before = results[1].measurement
    repeat_in_turn(results, Display(None), None)
    baseline, other = (r.measurement for r in results)
    assert baseline is not None
    assert other is not None
    assert before is not None
    assert len(baseline.runs) == 4
    assert [(r.index, r.error) for r in other.runs] == [(0, ""), (1, words)]
    assert (other.repeats, other.step_ms, other.eval_loss) == (1, before.step_ms, before.eval_loss)
    assert results[1].outcome == "ok"
    assert f"micro_batch: repeat 2 went wrong: {words}" in capsys.readouterr().out
    from sweep.config.schema import BudgetConf

    decision = conclude(results, BudgetConf(), None).decisions[1]
    assert "repeat_failed" in decision.reasons
    assert decision.verdict == "tune"
    assert read_trial(Path(results[1].folder) / "result.json").measurement == other


def test_a_repeat_that_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = first_rounds(tmp_path, conf())
    result.config["measure"]["timeout_s"] = 1e-9
    repeat_in_turn([result], Display(None), None)
    m = result.measurement
    assert m is not None
    assert len(m.runs) == 2
    assert m.runs[1].error == "TimedOut: measure.timeout_s=1e-09: not done after 1 of 3 steps"


# -- the whole command -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, too."""
    monkeypatch.setattr("sweep.report.plots.draw", lambda report: [])


@pytest.fixture
def session(tmp_path: Path, uri: str, _no_pictures: None) -> Session:
    c = conf()
    c.tracking.uri = uri
    opened = Session.open(tmp_path / "sweep", c, ["strategy=baseline,micro_batch"], trials=2, sweep=True)
    return opened


def trials_of(session: Session, *strategies: str, **measure: Any) -> list[TrialResult]:
    found = []
    for i, name in enumerate(strategies):
        c = conf(name, **measure)
        c.tracking.uri = session.conf.uri
        c.tracking.system_metrics = False
        found.append(session.run(c, session.folder / f"{i}_{name}", [f"strategy={name}"]))
    return found


def test_the_run_in_mlflow_has_the_numbers_of_all_repeats_and_each_ones_own(session: Session) -> None:
    from mlflow import MlflowClient

    firsts = trials_of(session, "micro_batch")
    session.finish()
    client = MlflowClient(session.conf.uri)
    (result,) = [r for r in session.results() if not r.is_baseline]
    run, m = client.get_run(str(result.mlflow_run_id)), result.measurement
    assert m is not None
    assert firsts[0].measurement is not None
    assert m.step_ms != firsts[0].measurement.step_ms
    assert run.info.status == "FINISHED"
    assert run.data.metrics["time/step_ms"] == pytest.approx(m.step_ms, rel=1e-3)
    assert run.data.metrics["trial/repeats"] == 3
    history = client.get_metric_history(run.info.run_id, "repeat/step_ms")
    assert [h.step for h in history] == [0, 1, 2]
    assert [h.value for h in history] == pytest.approx([statistics.median(r.step_times_ms) for r in m.runs], rel=1e-3)
    assert {h.step for h in client.get_metric_history(run.info.run_id, "repeat/eval_loss")} == {0}
    each = client.get_metric_history(run.info.run_id, "time/each_step_ms")
    each.sort(key=lambda h: h.step)
    assert [h.step for h in each] == list(range(6))  # each step once
    assert [h.value for h in each] == pytest.approx(m.step_times_ms, rel=1e-3)
    losses = client.get_metric_history(run.info.run_id, "quality/train_loss")
    assert [h.value for h in losses] == pytest.approx(m.train_loss, rel=1e-3)
    assert run.data.tags["verdict"] == (result.decision.verdict if result.decision is not None else None)
    path = client.download_artifacts(run.info.run_id, "result.json", str(session.folder))
    stored = read_trial(Path(path)).measurement
    assert stored == m


def test_a_baseline_that_lies_in_two_folders_is_repeated_once_and_kept_equal_in_both(
    session: Session, made: list[tuple[str, int]]
) -> None:
    trials_of(session, "micro_batch", "baseline", repeats=2)
    session.finish()
    assert made == [("baseline", 1), ("micro_batch", 1), ("baseline", 2)]
    both = [read_trial(session.folder / name / "result.json") for name in ("baseline", "1_baseline")]
    assert both[0].measurement == both[1].measurement
    assert both[0].measurement is not None
    assert len(both[0].measurement.runs) == 3
    assert sorted(r.strategy for r in read_sweep(session.folder)) == ["baseline", "micro_batch"]
    assert {to_dict(r)["measurement"]["repeats"] for r in read_sweep(session.folder)} == {3, 2}


@pytest.mark.usefixtures("_no_pictures")
def test_without_a_store_a_baseline_in_two_folders_is_one_trial(tmp_path: Path, made: list[tuple[str, int]]) -> None:
    c = conf(repeats=2)
    c.tracking.enabled = False
    session = Session.open(tmp_path / "sweep", c, [], trials=2, sweep=True)
    trials_of(session, "micro_batch", "baseline", repeats=2)
    session.finish()
    assert made == [("baseline", 1), ("micro_batch", 1), ("baseline", 2)]
    assert sorted(r.strategy for r in read_sweep(session.folder)) == ["baseline", "micro_batch"]


def test_an_interruption_keeps_the_repeats_that_were_made_and_reports_them(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    failing(monkeypatch, "micro_batch", 1, KeyboardInterrupt)
    trials_of(session, "micro_batch")
    with pytest.raises(KeyboardInterrupt):
        session.finish()
    assert not session.closed
    session.finish("KILLED")  # as the command does once it was interrupted
    runs = {r.strategy: r.measurement.runs for r in session.results() if r.measurement is not None}
    assert {name: len(made) for name, made in runs.items()} == {"baseline": 2, "micro_batch": 1}
    assert (session.folder / "report.json").is_file()
    assert "Verdict" in (session.folder / "report.md").read_text()
    client = MlflowClient(session.conf.uri)
    baseline = next(r for r in session.results() if r.is_baseline)
    assert len(client.get_metric_history(str(baseline.mlflow_run_id), "repeat/step_ms")) == 2
    assert client.get_run(str(session.state.parent_run_id)).info.status == "KILLED"


def test_an_interrupted_command_makes_no_more_repeats(session: Session, made: list[tuple[str, int]]) -> None:
    trials_of(session, "micro_batch")
    session.finish("KILLED")
    assert made == []
    assert (session.folder / "report.json").is_file()


def test_a_search_repeats_at_once(session: Session, made: list[tuple[str, int]]) -> None:
    session.state.study = "a study"
    (result,) = trials_of(session, "baseline")
    m = result.measurement
    assert m is not None
    assert (len(m.runs), m.repeats, len(m.step_times_ms)) == (1, 3, 6)
    assert made == []


def test_the_numbers_of_each_repeat_leave_out_what_went_wrong_and_what_is_not_known() -> None:
    (result,) = [run_trial(conf(ledger=False), "baseline", first_round=True)]
    m = result.measurement
    assert m is not None
    m.runs.append(Run(1, 3, "", error="crashed"))
    m.runs[0].conditions = BUSY
    assert {(name, step) for name, _, step in repeat_metrics_of(m)} == {("repeat/step_ms", 0), ("repeat/eval_loss", 0)}
    m.runs[0].peak_allocated_mib = 12.0
    assert ("repeat/peak_allocated_mib", 12.0, 0) in repeat_metrics_of(m)
    assert repeat_metrics_of(None) == []


def test_a_store_that_fails_costs_no_repeat(tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    store = tracking.store_location(uri, tmp_path, "x")
    tracking.initialise(store)
    results = first_rounds(tmp_path, conf(repeats=2))
    results[0].mlflow_run_id = "0" * 32
    repeat_in_turn(results, Display(None), store)
    assert results[0].measurement is not None
    assert len(results[0].measurement.runs) == 2
    assert "not recorded in MLflow: the repeats of baseline" in caplog.text
