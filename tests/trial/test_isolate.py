"""A trial in its own process: the same result, and whatever ends the process is one, too. Starts real processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from small_workloads import TOKENS, config

import sweep.trial.process as module
from sweep.config.schema import Config
from sweep.errors import BadInput
from sweep.results import read_trial
from sweep.trial.process import run_isolated, run_isolated_repeat
from sweep.trial.trial import run_trial, save

OWN_MODEL = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            print('{"progress": "not a progress report"}')  # what a model prints is no message
            self.tokens = nn.Embedding(32, 16)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(3))

        def forward(self, tokens):
            x = self.tokens(tokens)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x @ self.tokens.weight.t()
"""


def ending(how: str, **measure: float) -> Config:
    model = {"_target_": "small_models.Ending", "how": how}
    return config({"model": model, "data": TOKENS}, "baseline", measure=measure)


def processes_of(folder: Path) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]


def test_an_isolated_trial_is_the_in_process_trial_also_with_a_module_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "trial", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a_model_of_ones_own.py").write_text(textwrap.dedent(OWN_MODEL))
    monkeypatch.syspath_prepend(str(elsewhere))  # and nowhere else: not installed, not in the working directory
    c = config({"model": {"_target_": "a_model_of_ones_own.Model"}, "data": TOKENS}, "hybrid")
    reports: list[tuple[int, int, str]] = []
    isolated = run_isolated(c, "own", folder, progress=lambda *report: reports.append(report))
    here = run_trial(c, "own")
    assert isolated.outcome == here.outcome == "ok", isolated.error + here.error
    assert isolated.measurement is not None
    assert here.measurement is not None
    for name in ("train_loss", "eval_loss", "eval_loss_before", "peak_allocated_mib", "to_host_mib", "from_host_mib"):
        assert getattr(isolated.measurement, name) == getattr(here.measurement, name), name
    assert isolated.measurement.peak == here.measurement.peak
    assert isolated.verification is not None and here.verification is not None
    assert replace(isolated.verification, seconds=0) == replace(here.verification, seconds=0)
    for name in ("name", "strategy", "fixed_id", "strategy_id", "config", "data_version", "is_baseline", "evidence"):
        assert getattr(isolated, name) == getattr(here, name), name
    total = 1 + 2 * 2 + 2
    assert [done for done, _, _ in reports] == list(range(1, total + 1))
    assert {of for _, of, _ in reports} == {total}
    written, runs = read_trial(folder / "result.json"), isolated.measurement.runs
    assert written.measurement is not None and [r.fresh_process for r in runs] == [True]
    assert replace(written, measurement=None) == replace(isolated, measurement=None)


def test_a_process_that_dies_is_a_crashed_trial(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")  # of an earlier trial: must not be taken for this one's
    result = run_isolated(ending("exit"), "ending", tmp_path)
    assert (result.outcome, result.error) == ("crashed", "the process ended with exit code 7 and no result")
    assert "last words" in result.details
    assert (result.name, result.measurement) == ("ending", None)
    assert result.wall_s > 0


def test_a_trial_that_never_ends_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTUP_S", 3.0)
    result = run_isolated(ending("sleep", timeout_s=1.0), "sleeping", tmp_path)
    assert result.outcome == "timeout"
    assert result.error == "measure.timeout_s=1: it did not end in time and was killed"
    assert 4 <= result.wall_s < 30
    assert processes_of(tmp_path) == []


def test_an_interruption_ends_the_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        assert len(processes_of(tmp_path)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_isolated(ending("sleep"), "sleeping", tmp_path)
    assert processes_of(tmp_path) == []


def test_bad_input_crosses_the_border_as_it_is(tmp_path: Path) -> None:
    c = config("gpt", "offload")
    c.workload.model |= {"heads": 5}
    with pytest.raises(BadInput) as here:
        run_trial(c, "bad")
    with pytest.raises(BadInput) as there:
        run_isolated(c, "bad", tmp_path)
    for name in ("key", "value", "wrong", "todo"):
        assert getattr(there.value, name) == getattr(here.value, name)
    assert str(there.value) == str(here.value)
    assert str(here.value).startswith("workload.model.heads=5")


def test_a_repeat_in_a_process_of_its_own_computes_what_the_trial_did(tmp_path: Path) -> None:
    c = config("gpt", "hybrid", measure={"repeats": 2})
    first = run_isolated(c, "own", tmp_path, first_round=True)
    again = run_isolated_repeat(c, 1, tmp_path / "repeat_2")
    assert first.measurement is not None
    (run,) = first.measurement.runs
    assert (run.fresh_process, again.fresh_process, again.error) == (True, True, "")
    assert (again.index, again.seed, again.train_loss) == (1, run.seed, run.train_loss)
    assert (len(again.step_times_ms), again.to_host_mib) == (2, run.to_host_mib)
    assert read_trial(tmp_path / "result.json").started_at == first.started_at  # a repeat leaves these files alone


def test_a_repeat_whose_process_dies_says_so(tmp_path: Path) -> None:
    run = run_isolated_repeat(ending("kill"), 2, tmp_path)
    assert (run.index, run.outcome, run.step_times_ms) == (2, "crashed", [])
    assert run.error == "the process was killed by SIGKILL (often the host's out-of-memory killer)"


def test_bad_input_in_a_repeat_is_an_error_of_the_repeat(tmp_path: Path) -> None:
    c = config("gpt", "offload")
    c.workload.model |= {"heads": 5}
    assert run_isolated_repeat(c, 1, tmp_path).error.startswith("BadInput: workload.model.heads=5")


def test_a_process_that_hangs_after_its_result_loses_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = module.describe(config("gpt"), "done")

    def hang(child: subprocess.Popen[bytes], *_: object) -> None:
        save(done, tmp_path)
        raise subprocess.TimeoutExpired(child.args, 1.0)

    monkeypatch.setattr(module, "_follow", hang)
    assert run_isolated(ending("sleep"), "done", tmp_path).name == "done"
    assert processes_of(tmp_path) == []


def test_the_child_imports_what_the_parent_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "the parent's run")
    env = module._environment()
    assert "MLFLOW_RUN_ID" not in env
    paths = env["PYTHONPATH"].split(":")
    assert paths[0] == str(Path(module.__file__).resolve().parents[2])
    assert set(filter(None, sys.path)) <= set(paths)
    assert len(paths) == len(set(paths))
