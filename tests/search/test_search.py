"""The search itself, on real studies; a job is a plain function here."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from optuna.trial import TrialState

from sweep.environment import own_process
from sweep.errors import BadInput
from sweep.search.candidate import Answer, Job
from sweep.search.loop import Search, Settings, quiet_optuna
from sweep.search.space import read_space
from sweep.search.study import JOB, Sampler, close, open_storage, open_study, records, stale

quiet_optuna()
ROOT = Path(__file__).resolve().parents[2]


class Jobs:
    """Runs a function of the config, and remembers what was run."""

    def __init__(self, function):
        self.function, self.ran = function, []

    def compose(self, number: int, overrides: list[str]) -> tuple[DictConfig, Path | None]:
        return OmegaConf.from_dotlist([o.lstrip("+") for o in overrides]), Path(f"/nowhere/{number}")

    def launch(self, jobs):
        return [(self._run(job), None) for job in jobs]

    def _run(self, job):
        self.ran.append(job.number)
        try:
            return self.function(job.config)
        except Exception as error:
            return error


def search(
    storage, words, function, *, sampler="random", name="study", extend=None, sampler_args=None, say=None, folder=None,
    enqueue=(), preflight=None, plan=None, fixed="f", **settings,
) -> Search:  # fmt: skip
    settings, say = Settings(**settings), say or (lambda line: None)
    space = read_space({}, words, None, extend, extend_name="extend" if extend else "")
    study = open_study(storage, name, space, settings.directions, {"workload": fixed}, say)
    classes = {"gp": "GP", "nsgaii": "NSGAII", "tpe": "TPE", "brute_force": "BruteForce"}
    target = f"optuna.samplers.{classes.get(sampler, sampler.title())}Sampler"
    conf = {"_target_": target, "seed": 1, **(sampler_args or {})}
    made = Sampler(conf, settings.seed, len(study.get_trials(deepcopy=False)), len(settings.directions))
    return Search(
        study, space, made, settings, Jobs(function), folder=folder, fixed=fixed, enqueue=enqueue, preflight=preflight,
        plan=plan, say=say,
    )  # fmt: skip


@pytest.fixture
def storage(tmp_path):
    """In memory; commands that go on with a study in a file are tested as commands."""
    return open_storage(None, tmp_path, tmp_path)


def square(config):
    return (config.x - 3) ** 2


# --- counting and ending ------------------------------------------------------------------------------------------


def test_n_trials_counts_over_all_runs_and_the_seed_moves_on(storage):
    search(storage, ["x=interval(0,10)"], square, n_trials=4).run()
    again = search(storage, ["x=interval(0,10)"], square, n_trials=9)
    found = again.run()
    assert ([r.number for r in found], again.runner.ran) == (list(range(9)), [4, 5, 6, 7, 8])
    assert len({r.params["x"] for r in found}) == 9  # the same seed would have repeated the first four
    # A walk goes on where it was, and fills a batch.
    search(storage, ["x=range(0,7)"], square, name="walk", sampler="grid", n_trials=2).run()
    found = search(storage, ["x=range(0,7)"], square, name="walk", sampler="grid", n_jobs=4).run()
    assert [(r.params["x"], r.launched) for r in found] == [(x, True) for x in range(7)]


def test_a_point_seen_before_is_answered_from_its_measurement(storage):
    ran = []

    def job(config):
        ran.append(config.x)
        return Answer(values=[config.x], constraints={"memory": config.x - 3.0})

    s = search(storage, ["x=range(1,11)"], job, n_trials=50)
    found = s.run()
    assert sorted(ran) == list(range(1, 11))
    assert s.ended_because == "the space is exhausted: all of its 10 points are known"
    repeats = [r for r in found if r.same_as is not None]
    assert repeats
    for r in repeats:
        original = found[r.same_as]
        assert (r.values, r.constraints, r.params) == (original.values, original.constraints, original.params)
        assert original.launched
        assert not r.launched
    assert [r.params["x"] for r in s.best()] == [1, 2, 3]


def test_a_point_is_not_answered_from_a_trial_with_another_fixed_config(storage):
    search(storage, ["x=1,2"], lambda c: 0.0, n_trials=9, fixed="a").run()
    said = []
    s = search(storage, ["x=1,2"], lambda c: 1.0, n_trials=9, fixed="b", say=said.append)
    s.run()
    assert len(s.runner.ran) == 2
    assert any("workload" in line and line.startswith("warning") for line in said)


@pytest.mark.parametrize("sampler", ["grid", "brute_force"])
def test_an_exhaustive_search_runs_every_point_once(storage, sampler):
    s = search(storage, ["x=range(0,5)", "y=a,b,c", "z=range(0,1,0.5)"], lambda c: c.x, sampler=sampler)
    found = s.run()
    assert len(found) == len(s.runner.ran) == 30
    assert len({tuple(r.overrides) for r in found}) == 30
    in_order = [tuple(r.overrides) for r in found] == [tuple(s.space.overrides(p)) for p in s.points]
    assert in_order == (sampler == "grid")


def test_the_time_is_limited(storage):
    s = search(storage, ["x=interval(0,1)"], lambda c: time.sleep(0.05) or 1.0, n_trials=1000, timeout_s=0.3)
    s.run()
    assert 1 <= len(s.runner.ran) <= 6
    assert "0.3 s" in s.ended_because


def test_candidates_that_never_need_a_run_end_the_search(storage):
    never = lambda job: Answer(values=[1.0], constraints={"memory": 1.0})
    s = search(storage, ["x=interval(0,1)"], square, preflight=never, max_skipped=7)
    assert (len(s.run()), s.runner.ran) == (7, [])


def test_a_batch_holds_no_point_twice(storage):
    s = search(storage, ["x=1,2"], lambda c: 1 / (c.x - 1), n_jobs=3, n_trials=3)
    found = s.run()
    assert sorted((r.params["x"], r.outcome) for r in found if r.launched) == [(1, "failed"), (2, "ok")]
    twins = [r for r in found if r.same_as is not None]
    assert {r.params["x"] for r in twins} == {1, 2}, "told with what the same point beside them came to"
    for r in twins:
        assert (r.outcome, r.values, r.reason) == tuple(
            getattr(found[r.same_as], k) for k in ("outcome", "values", "reason")
        )


# --- failures -----------------------------------------------------------------------------------------------------


def test_failures_are_kept_with_their_reason_and_end_the_search_when_there_are_too_many(storage, tmp_path):
    def job(config):
        raise ValueError(f"no {config.x}")

    s = search(storage, ["x=range(0,100)"], job, n_trials=50, max_failures=3, folder=tmp_path)
    with pytest.raises(BadInput, match=r"hydra.sweeper.max_failures=3: 4 jobs failed, the last with ValueError: no"):
        s.run()
    assert [r.state for r in records(s.study)] == ["FAIL"] * 4
    assert s.study.trials[0].user_attrs["details"].startswith("Traceback")
    assert yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())["counts"]["failed"] == 4


def test_the_share_of_failures_in_a_batch_can_be_limited(storage):
    def job(config):
        if config.x > 1:
            raise ValueError
        return 1.0

    with pytest.raises(BadInput, match="max_failure_rate"):
        search(storage, ["x=range(0,4)"], job, sampler="grid", n_jobs=4, max_failure_rate=0.4).run()


def test_a_failed_point_is_not_run_again_in_the_same_run_but_may_be_in_the_next(storage):
    def job(config):
        if config.x == 2:
            raise ValueError("no")
        return config.x

    s = search(storage, ["x=range(0,4)"], job, sampler="grid")
    s.run()
    assert len(s.runner.ran) == 4
    s = search(storage, ["x=range(0,4)"], lambda c: c.x, sampler="grid")
    s.run()
    assert [r.params["x"] for r in s.records.values() if r.number in s.runner.ran] == [2]


def test_a_custom_search_space_that_raises_leaves_no_trial_running(storage):
    def extend(config, trial):
        trial.suggest_categorical("k", ["a", "b"] if trial.params["x"] < 0.5 else ["c", "d"])

    with pytest.raises(BadInput, match="custom_search_space"):
        search(storage, ["x=interval(0,1)"], square, extend=extend, n_trials=50).run()
    assert not optuna.load_study(study_name="study", storage=storage).get_trials(states=[TrialState.RUNNING])


# --- constraints --------------------------------------------------------------------------------------------------


def out_of_memory_above_2(config):
    if config.x > 2:
        raise MemoryError
    return Answer(values=[config.x], constraints={"loss": -1.0})


@pytest.mark.parametrize("sampler", ["random", "tpe", "gp", "nsgaii"])
def test_out_of_memory_is_complete_infeasible_and_never_best(storage, sampler):
    few = {"n_startup_trials": 5}
    args = {"tpe": few, "gp": few, "nsgaii": {"population_size": 4}}.get(sampler)
    s = search(
        storage, ["x=interval(0,5)"], out_of_memory_above_2, sampler=sampler, sampler_args=args, n_trials=8,
        directions=["maximize"], constraints=["memory", "loss"],
    )  # fmt: skip
    found = s.run()
    assert all(r.state == "COMPLETE" for r in found)
    for r in found:
        assert set(r.constraints) == {"memory", "loss"}
        assert (r.params["x"] > 2) == (r.outcome == "oom_host") == (r.constraints["memory"] > 0)
        assert (r.values is None) == (r.outcome == "oom_host")  # no made-up number passes for a result
    assert 0 < s.best()[0].values[0] <= 2
    assert s.study.best_trial.number == s.best()[0].number


def test_the_gaussian_process_gets_as_many_constraints_in_every_trial(storage):
    def job(config):
        if config.x > 2:
            raise MemoryError
        return config.x

    s = search(
        storage, ["x=interval(0,5)"], job, sampler="gp", sampler_args={"n_startup_trials": 2}, n_trials=6,
        directions=["maximize"],
    )  # fmt: skip
    assert {tuple(r.constraints) for r in s.run()} == {("out_of_memory",)}


def test_several_objectives_give_the_front(storage, tmp_path):
    said = []
    s = search(
        storage, ["x=range(0,5)", "y=0,1"], lambda c: [c.x - c.y, c.x + c.y], sampler="grid", folder=tmp_path,
        directions=["maximize", "minimize"], objectives=["speed", "peak"], say=said.append,
    )  # fmt: skip
    s.progress.end(s.run(), s.best(), "why")
    assert said[-1].startswith("Pareto front of 5 trials:\n  trial 8: ok speed=4 peak=4 | x=4 y=0")
    assert [(r.params["x"], r.params["y"]) for r in s.best()] == [(4, 0), (3, 0), (2, 0), (1, 0), (0, 0)]
    assert {r.number for r in s.best()} == {t.number for t in s.study.best_trials}
    written = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert len(written["solutions"]) == 5


# --- preflight, plan, queue ---------------------------------------------------------------------------------------


class Preflight:
    """Refuses what it expects above 2, and remembers what it was told."""

    def __init__(self):
        self.asked: list[Job] = []
        self.learned = []

    def __call__(self, job):
        self.asked.append(job)
        over = job.config.x - 2.0
        if over > 0:
            return Answer(values=[100.0], constraints={"memory": over}, reason="too large", mlflow_run_id="run")
        return Answer(values=[5.0], constraints={"memory": over})

    def learn(self, record):
        self.learned.append(record.number)


def test_a_preflight_answers_in_place_of_the_job(storage):
    preflight = Preflight()
    s = search(storage, ["x=range(0,6)"], lambda c: c.x, preflight=preflight, sampler="grid", directions=["maximize"])
    found = s.run()
    assert [r.outcome for r in found] == ["ok"] * 3 + ["over_budget"] * 3
    assert s.runner.ran == [0, 1, 2]
    refused = found[3]
    assert (refused.values, refused.estimated_values, refused.reason) == (None, [100.0], "too large")
    assert (refused.constraints, refused.mlflow_run_id, refused.launched) == ({"memory": 1.0}, "run", False)
    assert s.best()[0].params["x"] == 2  # 100 is an estimate
    assert preflight.learned == [0, 1, 2, 3, 4, 5]
    again = Preflight()
    s = search(storage, ["x=range(0,6)"], lambda c: c.x, preflight=again, sampler="grid", directions=["maximize"])
    assert len(s.run()) == 6
    assert again.learned == [0, 1, 2, 3, 4, 5]  # what earlier runs measured corrects this one's predictions
    assert [j.point["x"] for j in again.asked] == [3, 4, 5]  # so that what was refused may be judged anew


class Learning:
    """Expects twice what is true until something has been measured."""

    def __init__(self):
        self.factor = 2.0

    def __call__(self, job):
        return Answer(constraints={"memory": self.factor * job.config.x - 6.0})

    def learn(self, record):
        if record.launched:
            self.factor = 1.0


@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_what_was_refused_is_reconsidered_once_the_preflight_has_learned(storage, sampler):
    """Refused on a wrong prediction, 4 to 6 fit after all, and 6 is the best; 7 never fits."""
    words, job = ["x=range(1,8)"], lambda c: Answer(values=[c.x], constraints={"memory": c.x - 6.0})
    given = {"preflight": Learning(), "directions": ["maximize"], "enqueue": [{"x": x} for x in (7, 6, 5, 4)]}
    s = search(storage, words, job, sampler=sampler, **given)
    found = s.run()
    assert [r.outcome for r in found[:4]] == ["over_budget"] * 4
    assert s.best()[0].params["x"] == 6
    assert sorted(r.params["x"] for r in found if r.launched) == [1, 2, 3, 4, 5, 6]
    assert "exhausted" in s.ended_because
    known = search(storage, words, lambda c: 1 / 0, preflight=Learning(), directions=["maximize"])
    known.run()
    assert known.runner.ran == []


def test_a_preflight_that_breaks_does_not_stop_the_search_but_bad_input_is_an_invalid_candidate(storage):
    said = []

    def preflight(job):
        if job.config.x == 1:
            raise BadInput("x", 1, "is wrong", "give 2")
        raise RuntimeError("cannot predict")

    s = search(storage, ["x=1,2"], lambda c: c.x, preflight=preflight, sampler="grid", say=said.append)
    found = s.run()
    assert [(r.outcome, r.launched) for r in found] == [("invalid", False), ("ok", True)]
    assert found[0].reason == "x=1: is wrong; give 2"
    assert any("cannot predict" in line for line in said)


def test_a_point_that_cannot_be_composed_has_failed_and_the_rest_goes_on(storage):
    s = search(storage, ["x=1,2"], lambda c: c.x, sampler="grid")
    compose = s.runner.compose
    s.runner.compose = lambda number, words: 1 / 0 if words == ["x=1"] else compose(number, words)
    assert [(r.outcome, r.launched) for r in s.run()] == [("failed", False), ("ok", True)]


def test_an_estimate_stands_in_for_a_value_that_an_out_of_memory_trial_lacks(storage):
    def job(config):
        raise MemoryError

    s = search(storage, ["x=0,1"], job, preflight=Preflight(), sampler="grid", constraints=["memory"])
    found = s.run()
    assert [t.value for t in s.study.trials] == [5.0, 5.0]
    assert all(r.values is None and r.estimated_values == [5.0] and r.outcome == "oom_host" for r in found)


def test_points_of_the_queue_and_of_the_plan_come_first_and_only_once(storage):
    def plan(s):
        assert s.points is not None
        return [{"x": 7, "y": "b"}, {"x": 8, "y": "b"}]

    words = ["x=range(0,10)", "y=a,b,interpolated"]
    s = search(storage, words, lambda c: c.x, enqueue=[{"x": 9, "y": "a"}, {"x": 5}], plan=plan, n_trials=3)
    found = s.run()
    assert (found[0].params["x"], found[0].params["y"]) == (9, "a")
    assert found[1].params["x"] == 5
    assert (found[2].params["x"], found[2].params["y"]) == (7, "b")
    s = search(storage, words, lambda c: c.x, enqueue=[{"x": 9, "y": "a"}], plan=plan, n_trials=4)
    assert [r.params["x"] for r in s.run()][3] == 8
    with pytest.raises(BadInput, match="x=99"):
        search(storage, words, lambda c: c.x, enqueue=[{"x": 99}])


# --- studies ------------------------------------------------------------------------------------------------------


def test_a_changed_question_is_refused_before_anything_is_asked(storage):
    search(storage, ["x=1,2", "y=range(0,3)"], lambda c: c.x, n_trials=2).run()
    for words, directions, key in (
        (["x=1,2,3", "y=range(0,3)"], ["minimize"], "x="),
        (["x=1,2", "y=range(0,4)"], ["minimize"], "y="),
        (["x=1,2"], ["minimize"], "y="),
        (["x=1,2", "y=range(0,3)", "z=1,2"], ["minimize"], "z="),
        (["x=1,2", "y=range(0,3)"], ["maximize"], "hydra.sweeper.direction="),
        (["x=1,2", "y=range(0,3)"], ["minimize", "minimize"], "hydra.sweeper.direction="),
    ):
        with pytest.raises(BadInput) as error:
            search(storage, words, lambda c: c.x, directions=directions)
        assert str(error.value).startswith(key)
    assert len(optuna.load_study(study_name="study", storage=storage).trials) == 2


def test_a_study_that_something_else_began_is_checked_by_its_trials(storage):
    study = optuna.create_study(study_name="theirs", storage=storage)
    study.optimize(lambda t: t.suggest_categorical("x", [1, 2]), n_trials=2)
    with pytest.raises(BadInput, match="dynamic value space"):
        search(storage, ["x=1,2,3"], lambda c: c.x, name="theirs").run()
    # What was fixed when its trials ran is not known, so they guide the sampler but answer nothing.
    s = search(storage, ["x=1,2"], lambda c: c.x, name="theirs", n_trials=9)
    s.run()
    assert len(s.runner.ran) == 2


def test_stale_trials_are_closed_and_those_of_living_processes_are_not(storage):
    space = read_space({}, ["x=1,2"], None)
    study = open_study(storage, "s", space, ["minimize"], {})
    mine, dead, unknown = (study.ask(space.distributions) for _ in range(3))
    mine.set_user_attr(JOB, {"owner": own_process()})
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    host, _, created = own_process().rsplit(":", 2)
    dead.set_user_attr(JOB, {"owner": f"{host}:{gone.stdout.strip()}:{created}"})
    assert [t.number for t in stale(study)] == [dead.number, unknown.number]
    close(study, stale(study))
    assert [t.state for t in study.trials] == [TrialState.RUNNING, TrialState.FAIL, TrialState.FAIL]


def test_databases_that_cannot_be_used_are_named(tmp_path):
    mlflow, corrupt, blocked = (tmp_path / name for name in ("mlflow.db", "corrupt.db", "file"))
    with sqlite3.connect(mlflow) as connection:
        connection.execute("create table experiments (id int)")
    corrupt.write_bytes(b"no database" * 1000)
    blocked.write_text("")
    for url, wrong in (
        (f"sqlite:///{mlflow}", "another program"),
        (f"sqlite:///{corrupt}", "no SQLite database"),
        (f"sqlite:///{blocked}/optuna.db", "cannot be made"),
    ):
        with pytest.raises(BadInput, match=wrong) as error:
            open_storage(url, tmp_path, tmp_path)
        assert error.value.key == "hydra.sweeper.storage"
    open_storage("sqlite:///rel/o.db", tmp_path, tmp_path / "cwd")
    assert (tmp_path / "cwd" / "rel" / "o.db").is_file()


OPEN = """
import sys
from pathlib import Path
from sweep.search.study import open_storage
open_storage("auto", Path(sys.argv[1]), Path(sys.argv[1]))
"""


def test_several_processes_may_make_the_database_at_once(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen([sys.executable, "-c", OPEN, str(tmp_path)], env=env) for _ in range(2)]
    assert [p.wait(120) for p in started] == [0] * 2


def test_samplers_that_cannot_serve_are_refused(storage):
    with pytest.raises(BadInput, match="not finite"):
        search(storage, ["x=interval(0,1)"], square, sampler="grid")
    for conf, objectives, wrong in (
        ({}, 1, "is missing"),
        ({"_target_": "optuna.samplers.Nothing"}, 1, "cannot be made"),
        ({"_target_": "optuna.samplers.TPESampler", "speed": 3}, 1, "speed"),
        ({"_target_": "optuna.pruners.MedianPruner"}, 1, "no Optuna sampler"),
        ({"_target_": "optuna.samplers.CmaEsSampler"}, 2, "cannot serve 2 objectives"),
    ):
        with pytest.raises(BadInput, match=wrong):
            Sampler(conf, None, 0, objectives)
