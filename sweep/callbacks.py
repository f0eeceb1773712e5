"""Hydra's hooks around a command: everything is checked before anything runs, and the report comes at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from sweep.cli import not_swallowed
from sweep.schema import typed


class SweepCallback(Callback):
    """Opens the session of a command before its jobs and closes it after them."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            _open(config, [_without_hydra(config)], Path(config.hydra.run.dir), sweep=False)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        _finish()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            _open(config, _jobs(config), Path(config.hydra.sweep.dir), sweep=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        _finish()


def _open(config: DictConfig, jobs: list[DictConfig] | None, folder: Path, *, sweep: bool) -> None:
    configs = [typed(job) for job in jobs or []]
    # torch comes in here, after whatever is wrong with the words of the command line has been found.
    from sweep.memory.device import resolve_device
    from sweep.session import Session
    from sweep.trial import check_trial

    checked: dict[str, Any] = {}
    for job in configs:
        job.device = resolve_device(job.device)
        check_trial(job, checked)
    first = configs[0] if configs else typed(_without_hydra(config))
    overrides = list(config.hydra.overrides.task)
    session = Session.open(folder.resolve(), first, overrides, trials=len(configs) or None, sweep=sweep)
    session.checked = checked


def _finish() -> None:
    from sweep.session import Session

    if Session.current is not None:
        with not_swallowed():
            Session.current.finish()


def _jobs(config: DictConfig) -> list[DictConfig] | None:
    """The configs of all jobs that Hydra's own sweeper will launch; None for another one, which decides as it goes."""
    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return None
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader
    parser = OverridesParser.create(config_loader=loader)
    arguments = list(config.hydra.overrides.task)
    params = config.hydra.sweeper.get("params") or {}
    arguments = [*(f"{key}={value}" for key, value in params.items()), *arguments]
    batches = BasicSweeper.split_arguments(parser.parse_overrides(arguments), None)
    return [_without_hydra(loader.load_sweep_config(config, list(job))) for batch in batches for job in batch]


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
