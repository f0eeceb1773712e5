"""One command: its trials, the baseline before all others, their records, and the report at the end.

Lives in the process that was started; a launcher's other processes attach to it through the sweep's folder.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from sweep import tracking
from sweep.errors import EXIT_NOTHING_FEASIBLE, EXIT_OK
from sweep.isolate import run_isolated
from sweep.memory.device import resolve_device
from sweep.progress import Display
from sweep.report import describe as describe_report
from sweep.report import print_report, report_console, single_line, write_report
from sweep.results import Decision, TrialResult, read_trial, write_json
from sweep.schema import Config, Granularity, Isolate, Mode, Placement, StrategyConf, TrackingConf, typed
from sweep.trial import check_trial, describe, fixed_id, is_baseline, run_trial, save

ROOT = Path(__file__).resolve().parent.parent
STATE = ".session.json"


@dataclass
class State:
    """What other processes of the same sweep have to know."""

    started_at: str
    parent_run_id: str | None
    command: str


class Session:
    """See the module's docstring. `Session.current` is this process's, if there is one."""

    current: Session | None = None
    exit_code = EXIT_OK  # of the command

    def __init__(
        self, folder: Path, state: State, conf: TrackingConf, *, trials: int | None = None, owner: bool = True
    ) -> None:
        self.folder, self.state, self.conf, self.owner = folder, state, conf, owner
        self.display = Display(trials, report_console() if owner else Console(quiet=True))
        self.checked: dict[str, Any] = {}  # what check_trial has built already
        self.closed = False
        self._store = tracking.store_location(conf.uri, ROOT, conf.experiment) if conf.enabled else None

    @classmethod
    def open(
        cls, folder: Path, config: Config, overrides: Sequence[str], *, trials: int | None, sweep: bool
    ) -> Session:
        """Start a session: prepare the store, end what a killed command left, open the parent run."""
        command = shlex.join(["python", "train.py", *(["-m"] if sweep else []), *overrides])
        state = State(_now(), None, command)
        session = cls(folder, state, config.tracking, trials=trials)
        store = session._store
        if store is not None:
            tracking.initialise(store)
            tracking.reconcile(store)
            name = f"{config.workload.name} on {resolve_device(config.device).name}"
            tags = {"workload": config.workload.name, "mode": config.mode.value}
            params = {"overrides": " ".join(overrides)} if overrides else {}
            state.parent_run_id = tracking.open_sweep(
                store, name, tags=tags, params=params, description=f"Running: `{command}`"
            )
        write_json(state, folder / STATE)
        session.display.start()
        cls.current = session
        return session

    @classmethod
    def attach(cls, folder: Path, config: Config) -> Session:
        """The session of a sweep that another process has opened."""
        state = State(**json.loads((folder / STATE).read_text(encoding="utf-8")))
        return cls(folder, state, config.tracking, owner=False)

    def run(self, config: Config, folder: Path, overrides: Sequence[str]) -> TrialResult:
        """Run one trial, the baseline of its comparison before it, and record both."""
        config.device = resolve_device(config.device)
        check_trial(config, self.checked)
        wanted_is_baseline = is_baseline(config.strategy, config.workload.global_batch_size)
        if not wanted_is_baseline:
            if config.compare:
                self._ensure_baseline(config, overrides)
            return self._trial(config, trial_name(config, overrides), folder, overrides)
        with self._baseline_lock(config):
            done = self._known_baseline(config)
            if done is None or done.strategy_id != describe(config, "").strategy_id:
                return self._trial(config, trial_name(config, overrides), folder, overrides)
            save(replace(done), folder)  # measured already, because an earlier candidate needed it
            return done

    def _ensure_baseline(self, config: Config, overrides: Sequence[str]) -> None:
        with self._baseline_lock(config):
            if self._known_baseline(config) is not None:
                return
            self.display.one_more()
            baseline = replace(config, strategy=StrategyConf(name="baseline"))
            others = [o for o in overrides if not o.lstrip("+~").startswith("strategy")]
            folder = self.folder / "baseline"
            if folder.exists():
                folder = self.folder / f"baseline_{fixed_id(config)}"
            self._trial(baseline, trial_name(baseline, others), folder, [*others, "strategy=baseline"])

    def _baseline_lock(self, config: Config) -> FileLock:
        return FileLock(self.folder / f".baseline_{fixed_id(config)}.lock")

    def _known_baseline(self, config: Config) -> TrialResult | None:
        wanted = fixed_id(config)
        return next((r for r in self.results() if r.is_baseline and r.fixed_id == wanted), None)

    def _trial(self, config: Config, name: str, folder: Path, overrides: Sequence[str]) -> TrialResult:
        folder.mkdir(parents=True, exist_ok=True)
        planned = describe(config, name)
        planned.overrides = list(overrides)
        planned.command = shlex.join(["python", "train.py", *overrides])
        with self.display.trial(name):
            if self._store is None:
                result = self._compute(config, planned, folder)
            else:
                with tracking.start_trial(
                    self._store, self.state.parent_run_id, planned, system_metrics=config.tracking.system_metrics
                ) as run:
                    result = self._compute(config, planned, folder)
                    result.mlflow_run_id = run.run_id
                    run.log(result)
        save(result, folder)
        self.display.console.print(single_line(result), markup=False, highlight=False)
        return result

    def _compute(self, config: Config, planned: TrialResult, folder: Path) -> TrialResult:
        if _in_own_process(config):
            result = run_isolated(config, planned.name, folder, progress=self.display.step)
        else:
            result = run_trial(config, planned.name, progress=self.display.step)
        result.overrides, result.command = planned.overrides, planned.command
        save(result, folder)
        return result

    def results(self) -> list[TrialResult]:
        """All trials of this session so far, each once, the inserted baseline first, then in order of their start."""
        found: dict[str, TrialResult] = {}
        for path in self.folder.glob("**/result.json"):
            result = read_trial(path)
            if result.started_at >= self.state.started_at:
                known = found.get(result.mlflow_run_id or result.folder)
                if known is None or path.parent.name.startswith("baseline"):
                    found[result.mlflow_run_id or result.folder] = result
        return sorted(found.values(), key=lambda r: (not r.is_baseline, r.started_at, r.folder))

    def finish(self, status: tracking.Status = "FINISHED") -> None:
        """Judge all trials, write and print the report, and close the parent run. Also for an interrupted sweep."""
        if self.closed:
            return
        self.closed = True
        self.display.stop()
        results = self.results()
        files: list[Path] = []
        markdown = ""
        if results:
            budget = typed(results[0].config).budget
            report = write_report(results, budget, results[0].capacity_mib, self.folder, command=self.state.command)
            for section in report.sections:
                for result, decision in zip(section.results, section.comparison.decisions):
                    self._judged(result, decision)
            print_report(report, self.display.console)
            files = [report.json_path, report.markdown_path, *report.plots]
            markdown = describe_report(report)
            if not report.feasible:
                Session.exit_code = EXIT_NOTHING_FEASIBLE
        if self._store is not None:
            tracking.close_sweep(self._store, self.state.parent_run_id, status, report_markdown=markdown, files=files)
        Session.current = None

    def _judged(self, result: TrialResult, decision: Decision) -> None:
        result.decision = decision
        save(result, Path(result.folder))
        if self._store is not None:
            tracking.update_decision(self._store, result.mlflow_run_id, result)


def run_job(cfg: DictConfig) -> None:
    """What Hydra calls for each job: one trial, and before it the baseline where there is none yet."""
    hydra = HydraConfig.get()
    config = typed(cfg)
    session = Session.current or Session.attach(Path(hydra.sweep.dir).resolve(), config)
    session.run(config, Path(hydra.runtime.output_dir), list(hydra.overrides.task))


def trial_name(config: Config, overrides: Sequence[str]) -> str:
    """What a person calls the trial: its strategy, and what was set beside it and has an effect."""
    s = config.strategy
    idle = [
        *(["checkpoint."] if s.checkpoint.granularity is Granularity.none else []),
        *(["offload."] if s.offload.placement is Placement.none else []),
    ]
    said = [s.name]
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        name = key.removeprefix("strategy.")
        if name != key and not name.startswith(tuple(idle)):
            said.append(f"{name.rsplit('.', 1)[-1]}={value}")
    return " ".join(said)


def _in_own_process(config: Config) -> bool:
    if config.measure.isolate is Isolate.auto:
        return config.device.type == "cuda" and config.mode is Mode.measure
    return config.measure.isolate is Isolate.always


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
