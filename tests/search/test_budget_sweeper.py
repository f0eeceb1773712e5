"""The plugin in a small Hydra app, made in a temporary folder: as a command of its own where exit codes, kills and
imports matter, and in this process otherwise. The cases are those in which sweepers are known to go wrong."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from sweep.errors import BadInput
from sweep.search.candidate import Answer
from sweep.search.study import Sampler

ROOT = Path(__file__).resolve().parents[2]

APP = """
import json, os, signal, sys, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

HERE = Path(__file__).parent

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    number = OmegaConf.select(HydraConfig.get(), 'job.num') if cfg.do != 'imports' else 0
    with open(HERE / "ran.txt", "a") as f:
        f.write(json.dumps([number, cfg.x, cfg.y, os.getcwd()]) + "\\n")
    if cfg.at is not None and number == cfg.at:
        if cfg.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if cfg.do == "exit":
            sys.exit(7)
        if cfg.do == "ctrl_c":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
    if cfg.do == "oom" and cfg.x > cfg.at:
        raise MemoryError("no memory")
    if cfg.do == "imports":
        print("IMPORTED", sorted({"optuna", "torch", "mlflow"} & set(sys.modules)))
    return float(cfg.x)

if __name__ == "__main__":
    main()
"""

CONFIG = """
defaults:
  - db: mysql
  - _self_
x: 1
y: 0
at: null
do: null
free: {}
extra: 1
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A Hydra app; its folder has a database group with three options."""
    (tmp_path / "app.py").write_text(APP)
    db = tmp_path / "conf" / "db"
    db.mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    for name in ("mysql", "postgres", "sqlite"):
        (db / f"{name}.yaml").write_text(f"name: {name}\nport: 1\n")
    return tmp_path


def command(app: Path, *words: str) -> list[str]:
    return [sys.executable, str(app / "app.py"), *words]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(app: Path, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the app as a user does: `python app.py ...`."""
    said = {"capture_output": True, "text": True, "timeout": 240}
    return subprocess.run(command(app, *words), cwd=cwd or app, env=ENVIRONMENT, **said)


def budget(*words: str) -> list[str]:
    return ["-m", "hydra/sweeper=budget", *words]


def study_of(file: Path, name: str | None = None) -> optuna.Study:
    url = f"sqlite:///{file}"
    (only,) = [name] if name else optuna.get_all_study_names(url)
    return optuna.load_study(study_name=only, storage=url)


def results_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "optimization_results.yaml").read_text())


def sweep(app: Path, job: Callable[[DictConfig], Any], *words: str, **settings: Any) -> Path:
    """Run a sweep of `job` in this process, in the app's config. Returns the sweep's folder."""
    folder = app / "sweep"
    given = {"storage": f"sqlite:///{app}/o.db", "study_name": "s", "max_failures": "null", **settings}
    hydra_words = ["hydra/sweeper=budget", f"hydra.sweep.dir={folder}"]
    hydra_words += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    hydra_words += [f"hydra.sweeper.{k}={v}" for k, v in given.items()]
    with initialize_config_dir(str(app / "conf"), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HYDRA_FULL_ERROR", "1")
            hydra.multirun("config", job, [*hydra_words, *words], with_log_configuration=False)
    return folder


def trials(app: Path) -> list[optuna.trial.FrozenTrial]:
    return study_of(app / "o.db", "s").trials


# --- the twelve cases -----------------------------------------------------------------------------------------------


def test_case_2_every_job_out_of_memory(app):
    done = run(app, *budget("x=range(1,4)", "do=oom", "at=0", "hydra.sweep.dir=out"))
    assert done.returncode == 3, done.stderr
    assert "no feasible trial" in done.stdout
    assert "least violating: trial 0: oom_host, over out_of_memory by 1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    written = results_of(app / "out")
    assert written["best_trial"] is None
    assert written["counts"]["infeasible"] == 3
    assert written["least_violating"]["constraints"] == {"out_of_memory": 1.0}


def test_case_3_what_is_no_objective_fails_its_trial_and_the_rest_goes_on(app):
    answers = {0: float("nan"), 1: None, 2: 1.0, 3: [1.0], 4: "much"}
    folder = sweep(app, lambda cfg: answers[cfg.x], "x=range(0,5)")
    found = {t.params["x"]: t for t in trials(app) if "same_as" not in t.user_attrs}
    assert [found[x].state.name for x in range(5)] == ["FAIL", "FAIL", "COMPLETE", "COMPLETE", "FAIL"]
    assert found[0].user_attrs["reason"] == "value is nan, not a number"
    assert "None" in found[1].user_attrs["reason"]
    assert results_of(folder)["counts"]["failed"] == 3


@pytest.mark.parametrize(("does", "code", "reason"), [("exit", 7, "SystemExit"), ("ctrl_c", 130, "KeyboardInterrupt")])
def test_case_4_a_job_that_exits_or_is_interrupted_ends_its_trial_and_all_is_kept(app, does, code, reason):
    # A shell, since it is the shell that makes 130 of a process ended by SIGINT.
    words = command(app, *budget("x=interval(1,9)", f"do={does}", "at=1", "hydra.sweep.dir=out"))
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(words)}; exit $?"], cwd=app, env=ENVIRONMENT, capture_output=True
    )
    assert done.returncode == code, done.stderr
    found = study_of(app / "mlruns" / "optuna.db").trials
    assert [t.state.name for t in found] == ["COMPLETE", "FAIL"]
    assert reason in found[1].user_attrs["reason"]
    assert results_of(app / "out")["best_trial"]["number"] == 0
    assert results_of(app / "out")["ended_because"] == f"interrupted ({reason})"


class Large:
    """Stands for a tensor: is it gone?"""


def test_case_5_a_failed_jobs_locals_are_gone_when_the_next_starts(app):
    alive: list[weakref.ref[Large]] = []
    seen = []

    def job(cfg):
        seen.append(sum(r() is not None for r in alive))
        large = Large()
        alive.append(weakref.ref(large))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    with pytest.raises(SystemExit, match="3"):
        sweep(app, job, "x=range(0,9)", n_trials=3)
    assert seen == [0] * 3
    assert len(alive) == 3


def test_case_6_kill_and_the_same_command_again(app):
    words = budget(
        "x=interval(0,9)", "do=kill", "hydra.sweeper.n_trials=6", "hydra.sweeper.seed=5", "hydra.sweep.dir=out",
        "hydra.sweeper.study_name=s",
    )  # fmt: skip
    killed, file = run(app, *words, "at=3"), app / "mlruns" / "optuna.db"
    assert killed.returncode == -signal.SIGKILL
    assert [t.state.name for t in study_of(file).trials] == ["COMPLETE"] * 3 + ["RUNNING"]
    before = {f: f.stat().st_mtime_ns for f in (app / "out").rglob("*") if f.is_file() and f.parent.name.isdigit()}
    for said in ("closed what a killed command left running: trial 3", "the search ended: 6 trials were run"):
        again = run(app, *words, "at=99")  # the second time there is nothing left to do
        assert again.returncode == 0, again.stderr
        assert said in again.stdout
        found = study_of(file).trials
        assert [t.state.name for t in found] == ["COMPLETE"] * 3 + ["FAIL"] + ["COMPLETE"] * 2
        assert len({t.params["x"] for t in found}) == 6
        assert {f: f.stat().st_mtime_ns for f in before} == before
        assert sorted(p.name for p in (app / "out").iterdir() if p.is_dir()) == ["0", "1", "2", "3", "4", "5"]
        numbers = [line.split(",")[0].strip("[") for line in (app / "ran.txt").read_text().splitlines()]
        assert numbers == ["0", "1", "2", "3", "4", "5"]


def test_case_7_on_the_command_line_it_is_one_line_and_exit_code_2(app):
    words = budget("x=1,2,3", "y=3,4", "hydra.sweeper.n_trials=1")
    assert run(app, *words).returncode == 0
    done = run(app, *words, "x=1,2,4")
    assert done.returncode == 2
    assert done.stderr.startswith("error: x=1,2,4: was 1,2,3 when the study ")
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert len(study_of(app / "mlruns" / "optuna.db").trials) == 1


def test_case_8_values_reach_the_job_as_they_were_written(app):
    seen = []
    words = 'free.v="a,b",\'c,d\',"3",null,true,[1,2],{a: 1},1,1.0,plain,"true"'
    sweep(
        app, lambda cfg: seen.append(cfg.free.v) or 1.0, "+" + words, sampler="{_target_:optuna.samplers.GridSampler}"
    )
    plain = [OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for v in seen]
    wanted = ["a,b", "c,d", "3", None, True, [1, 2], {"a": 1}, 1, 1.0, "plain", "true"]
    assert plain == wanted
    assert [type(v) for v in plain] == [type(v) for v in wanted]


@pytest.mark.slow
def test_case_9_a_grid_has_the_samplers_values_and_runs_them_all(app):
    points: list[set[tuple[Any, ...]]] = []
    for sampler, n_trials in (("Grid", "null"), ("Random", "200")):
        seen: list[tuple[Any, ...]] = []
        given = {"sampler": f"{{_target_:optuna.samplers.{sampler}Sampler}}", "storage": "null", "n_trials": n_trials}
        job = lambda cfg, seen=seen: seen.append((cfg.x, cfg.y, cfg.db.name)) or cfg.x
        sweep(app, job, "x=range(0,2)", "y=range(0,1,0.5)", "db=glob(*)", **given)
        assert len(seen) == 12
        points.append(set(seen))
    assert points[0] == points[1]
    assert {p[:2] for p in points[0]} == {(x, y) for x in (0, 1) for y in (0, 0.5)}


def test_case_12_known_points_are_answered_and_an_exhausted_space_ends_the_search(app, capsys):
    seen = []
    job = lambda cfg: seen.append((cfg.x, cfg.db.name)) or cfg.x
    words = ["x=1,2", "db=mysql,sqlite"]
    folder = sweep(app, job, *words, n_trials=40, n_jobs=2, sampler="{_target_:optuna.samplers.RandomSampler}")
    assert len(seen) == len(set(seen)) == 4
    said = capsys.readouterr().out
    assert "the space is exhausted: all of its 4 points are known" in said
    assert "serially" in said, "the basic launcher runs one job at a time"
    assert results_of(folder)["counts"]["launched"] == 4
    sweep(app, job, *words, n_trials=40)
    assert len(seen) == 4, "the same command again knows them all"


# --- what the stock plugin's command line does ------------------------------------------------------------------------


def test_words_of_every_kind_reach_the_job(app):
    seen: list[DictConfig] = []
    sweep(
        app, lambda cfg: seen.append(cfg) or cfg.x, "x=int(interval(1,3))", "y=tag(log,interval(0.1,10))",
        "db=mysql,postgres", "+new.key=choice(a,b)", "~extra", "db.port=shuffle(range(1,3))", "++free.z=5", "do=fixed",
        n_trials=4,
    )  # fmt: skip
    assert len(seen) == 4
    for cfg in seen:
        assert 0.1 <= cfg.y <= 10 and "extra" not in cfg
        assert cfg.x in (1, 2, 3) and cfg.db.port in (1, 2)
        assert cfg.db.name in ("mysql", "postgres") and cfg.new.key in ("a", "b")
        assert (cfg.free.z, cfg.do) == (5, "fixed")


def extend(config: DictConfig, trial: optuna.Trial) -> None:
    """A custom search space, found by its import path."""
    assert config.db.name == "mysql"
    if trial.params["x"] == 2:
        trial.suggest_int("y", 10, 11)
        trial.suggest_categorical("+free.mode", ["a", "b"])


def test_a_custom_search_space_with_conditional_keys(app):
    seen = []

    def job(cfg):
        seen.append((cfg.x, cfg.y, cfg.free.get("mode")))
        return cfg.y

    sweep(app, job, "x=1,2", custom_search_space="test_budget_sweeper.extend", n_trials=50)
    assert sorted(seen, key=str) == sorted([(1, 0, None), *((2, y, m) for y in (10, 11) for m in ("a", "b"))], key=str)


def test_params_in_a_config_and_a_sampler_of_the_group(app):
    (app / "conf" / "config.yaml").write_text(
        "defaults:\n- override hydra/sweeper: budget\n- override hydra/sweeper/sampler: grid\n"
        + CONFIG.replace("defaults:\n", "").replace("  - db: mysql\n  - _self_\n", "")
        + "hydra:\n  sweeper:\n    storage: null\n    params:\n      x: range(1,4)\n      y: 3\n  sweep: {dir: out}\n"
    )
    done = run(app, "-m")
    assert done.returncode == 0, done.stderr
    assert len((app / "ran.txt").read_text().splitlines()) == 3
    assert results_of(app / "out")["sampler"] == "GridSampler"
    assert not (app / "mlruns").exists()


def test_every_sampler_of_the_group_can_be_made(app):
    with initialize_config_dir(str(app / "conf"), version_base="1.3"):
        for name in ("tpe", "motpe", "random", "nsgaii", "gp", "grid", "brute_force", "qmc", "cmaes"):
            words = ["hydra/sweeper=budget", f"hydra/sweeper/sampler={name}", "hydra.sweeper.sampler.seed=1"]
            conf = compose("config", words, return_hydra_config=True).hydra.sweeper.sampler
            if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
                with pytest.raises(BadInput, match="pip install cmaes"):
                    Sampler(conf, None, 0, 1)
            else:
                assert Sampler(conf, None, 0, 1).seed == 1


def test_a_named_hook_is_a_class_or_a_function(app):
    folder = sweep(
        app, lambda cfg: {"speed": cfg.x}, "x=range(0,4)", n_trials=4,
        preflight="{_target_:test_budget_sweeper.AtMost,most:1}", read="test_budget_sweeper.speed",
        plan="{_target_:test_budget_sweeper.largest_first}", direction="maximize",
    )  # fmt: skip
    written = results_of(folder)
    assert [t["params"]["x"] for t in written["trials"]][:2] == [3, 1]
    assert written["counts"]["not_run"] == 2
    assert written["best_value"] == 1
    assert written["trials"][0]["outcome"] == "over_budget"
    assert not (folder / "0").exists()  # its job was never started
    assert written["trials"][1]["mlflow_run_id"] == "run-1"
    assert written["trials"][1]["folder"] == str(folder / "1")


class AtMost:
    """A preflight with an argument."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, job):
        return Answer(constraints={"memory": job.config.x - self.most})


def speed(job, returned):
    return Answer(values=[returned["speed"]], mlflow_run_id=f"run-{job.number}")


def largest_first(search):
    return [{"x": 3}, {"x": 1}]


# --- around it ------------------------------------------------------------------------------------------


def test_the_plugin_is_thin_and_the_study_lies_beside_the_app(app, tmp_path):
    single = run(app, "do=imports")
    assert "IMPORTED []" in single.stdout, single.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(app, *budget("x=1,2", "hydra.job.chdir=true"), cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert (app / "mlruns" / "optuna.db").is_file()
    assert len(study_of(app / "mlruns" / "optuna.db").trials) >= 2
    (folder,) = elsewhere.glob("multirun/*/*")
    assert results_of(folder)["best_trial"]["folder"] == str(folder / str(results_of(folder)["best_trial"]["number"]))


def test_another_question_gets_another_study_and_resume_false_a_fresh_one(app):
    given = {"study_name": "null", "n_trials": 1}
    sweep(app, lambda cfg: 1.0, "x=1,2", **given)
    sweep(app, lambda cfg: 1.0, "x=1,2", **given)
    names = optuna.get_all_study_names(f"sqlite:///{app}/o.db")
    assert len(names) == 1
    sweep(app, lambda cfg: 1.0, "x=1,2", "do=other", **given)
    sweep(app, lambda cfg: 1.0, "y=1,2", **given)
    assert len(optuna.get_all_study_names(f"sqlite:///{app}/o.db")) == 3
    sweep(app, lambda cfg: 1.0, "x=1,2", resume="false", **given)
    assert f"{names[0]}-2" in optuna.get_all_study_names(f"sqlite:///{app}/o.db")


def test_a_folder_that_is_there_already_is_left_alone(app):
    old = app / "sweep" / "0"
    old.mkdir(parents=True)
    (old / "precious.txt").write_text("mine")
    folders = []
    job = lambda cfg: folders.append(HydraConfig.get().runtime.output_dir) or 1.0
    sweep(app, job, "x=1,2", "hydra/sweeper/sampler=grid")
    assert folders == [str(app / "sweep" / "0-2"), str(app / "sweep" / "1")]
    assert [p.name for p in old.iterdir()] == ["precious.txt"]
    assert trials(app)[0].user_attrs["folder"] == str(app / "sweep" / "0-2")


def test_what_cannot_be_composed_is_refused_before_anything_is_asked(app):
    for word in ("nothere=1,2", "db=choice(mysql,nosuchdb)"):
        with pytest.raises(HydraException, match="nothere|nosuchdb"):
            sweep(app, lambda cfg: 1.0, word)
    assert not (app / "o.db").exists()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("hydra.sweeper.direction=up", "hydra.sweeper.direction=up: is no direction"),
        ("hydra.sweeper.n_trials=0", "hydra.sweeper.n_trials=0: is below 1"),
        ("hydra.sweeper.sampler._target_=optuna.Best", "hydra.sweeper.sampler._target_=optuna.Best: "),
        ("+hydra.sweeper.sampler.speed=2", "hydra.sweeper.sampler._target_=optuna.samplers.TPESampler: cannot be made"),
        ("hydra.sweeper.preflight=nowhere.f", "hydra.sweeper.preflight._target_=nowhere.f: cannot be made"),
        ("hydra.sweeper.enqueue=[{x: 9}]", "x=9: is not in the search space"),
        ("hydra.sweeper.enqueue=[{z: 9}]", "hydra.sweeper.enqueue=z: is not searched"),
        ("db=glob(nothing*)", "db=glob(nothing*): matches no option"),
        ("x=1", "command line=x=1: searches nothing"),
    ],
)
def test_bad_input_is_named_before_anything_is_asked(app, word, line):
    with pytest.raises(BadInput) as error:
        sweep(app, lambda cfg: 1.0, *(["x=1,2"] if word != "x=1" else []), word)
    assert str(error.value).startswith(line)
    assert not (app / "o.db").exists() or not optuna.get_all_study_names(f"sqlite:///{app}/o.db") or not trials(app)
