"""Hydra's hooks around a command: everything is checked before anything runs, and the report comes at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sweep.addresses import conceal, conceal_in, words_of
from sweep.cli import not_swallowed
from sweep.errors import BadInput
from sweep.schema import Config, Mode, typed

ROOT = Path(__file__).resolve().parent.parent


class SweepCallback(Callback):
    """Opens the session of a command before its jobs and closes it after them."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            conceal_in(config)
            _open(config, [_without_hydra(config)], Path(config.hydra.run.dir), sweep=False)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        _finish()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            conceal_in(config)
            study = _settle_study(config)
            _open(config, _jobs(config), Path(config.hydra.sweep.dir), sweep=True, study=study)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        _finish()


def _open(config: DictConfig, jobs: list[DictConfig] | None, folder: Path, *, sweep: bool, study: str = "") -> None:
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
    overrides = words_of(config.hydra.overrides.task)
    storage = config.hydra.sweeper.storage if study else None
    session = Session.open(
        folder.resolve(),
        first,
        overrides,
        trials=first.search.n_trials if study else len(configs) or None,
        sweep=sweep,
        study=study,
        storage=conceal(storage) if isinstance(storage, str) else None,
    )
    session.checked = checked


def is_search(config: DictConfig) -> bool:
    """Whether the sweeper of a composed command is ours."""
    return str(config.hydra.sweeper._target_).endswith("BudgetSweeper")


def _settle_study(config: DictConfig) -> str:
    """Name a search's study and give it a folder of its own, so that the same command again finds both. "": no search.

    Hydra composes every job anew from the words of the command line, so both are added there, too.
    """
    if not is_search(config):
        return ""
    from sweep.search_hydra import study_name
    from sweep.search_space import encode

    first = typed(_without_hydra(config))
    _check_search(first)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    name = study_name(config, f"{first.search.name or 'search'}-{first.workload.name}", hydra.config_loader, ROOT)
    said = config.hydra.overrides.hydra
    settled: dict[str, Any] = {"hydra.sweeper.study_name": name, "hydra.sweeper.resume": True}
    if config.hydra.sweeper.storage is not None and not any(str(w).startswith("hydra.sweep.dir=") for w in said):
        settled["hydra.sweep.dir"] = str(ROOT / "multirun" / name)
    if first.search.name is not None and not any(str(w).startswith("hydra.sweep.subdir=") for w in said):
        settled["hydra.sweep.subdir"] = "${hydra.job.num}"  # the strategy's name would be the one searched from
    with read_write(config), open_dict(config):
        for key, value in settled.items():
            OmegaConf.update(config, key, value)
            said.append(f"{key}={encode(value)}")
    return name


def _check_search(config: Config) -> None:
    """Raise BadInput for what a search cannot do, before anything runs."""
    if config.mode is not Mode.measure:
        raise BadInput(
            "mode",
            config.mode.value,
            "a search measures",
            "leave it out, or predict without one: -m 'strategy=glob(*)'",
        )
    if not config.measure.ledger and config.device.type != "cuda":
        raise BadInput("measure.ledger", False, "a search needs the peak of every trial", "leave it on")


def _finish() -> None:
    from sweep.session import Session

    if Session.current is not None:
        with not_swallowed():
            Session.current.finish()


def _jobs(config: DictConfig) -> list[DictConfig] | None:
    """The configs of all jobs that Hydra's own sweeper will launch; None for another one, which decides as it goes."""
    if is_search(config):
        return [_without_hydra(config)]
    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return None
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader
    parser = OverridesParser.create(config_loader=loader)
    arguments = words_of(config.hydra.overrides.task)
    params = config.hydra.sweeper.get("params") or {}
    arguments = [*(f"{key}={value}" for key, value in params.items()), *arguments]
    batches = BasicSweeper.split_arguments(parser.parse_overrides(arguments), None)
    return [_without_hydra(loader.load_sweep_config(config, list(job))) for batch in batches for job in batch]


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
