"""Hydra's hooks around a command: everything is checked before anything runs, and the report comes at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep, Sweep
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sweep.addresses import conceal, conceal_in, words_of
from sweep.cli import not_swallowed
from sweep.errors import BadInput, DoesNotFit
from sweep.schema import Config, Mode, typed
from sweep.schema_check import check_diagnosis

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
            _check_sweeps(config)
            study = _settle_study(config) if is_search(config) else ""
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
    misfits: list[DoesNotFit] = []
    for job in configs:
        job.device = resolve_device(job.device)
        try:
            check_trial(job, checked)
        except DoesNotFit as error:
            misfits.append(error)
    if misfits and len(misfits) == len(configs):
        raise misfits[0]
    first = configs[0] if configs else typed(_without_hydra(config))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        key = "hydra.sweep.dir" if sweep else "hydra.run.dir"
        raise BadInput(key, folder, f"cannot be made ({error.strerror})", "give another folder") from error
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
    """Name a search's study and give it a folder of its own, so that the same command again finds both.

    Hydra composes every job anew from the words of the command line, so both are added there, too.
    """
    from sweep.search_hydra import study_name
    from sweep.search_space import encode

    first = typed(_without_hydra(config), whole=False)
    _check_search(first, config.hydra.sweeper)
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


def _check_search(config: Config, sweeper: DictConfig) -> None:
    """Raise BadInput for what a search cannot do, before anything runs."""
    if config.mode is Mode.diagnose:
        check_diagnosis(config)
    if config.mode is not Mode.measure:
        raise BadInput(
            "mode",
            config.mode.value,
            "a search measures",
            "leave it out, or predict without one: -m 'strategy=glob(*)'",
        )
    if not config.measure.ledger and config.device.type != "cuda":
        raise BadInput("measure.ledger", False, "a search needs the peak of every trial", "leave it on")
    from sweep.hooks import CONSTRAINTS, OBJECTIVES

    if OmegaConf.select(sweeper, "read._target_") != "sweep.hooks.read":
        return  # a reader of one's own gives what it likes
    for key, known in (("objectives", OBJECTIVES), ("constraints", CONSTRAINTS)):
        for name in sweeper[key]:
            if name not in known:
                todo = f"give {' or '.join(known)}"
                raise BadInput(f"hydra.sweeper.{key}", name, "no trial gives such a number", todo)


def _finish() -> None:
    from sweep.session import Session

    if Session.current is not None:
        with not_swallowed():
            Session.current.finish()


def _jobs(config: DictConfig) -> list[DictConfig] | None:
    """The configs of all jobs that Hydra's own sweeper will launch; None for another one, which decides as it goes."""
    if is_search(config):
        return _points(config)
    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return None
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader
    batches = BasicSweeper.split_arguments(_overrides(config, loader), None)
    return [_without_hydra(loader.load_sweep_config(config, list(job))) for batch in batches for job in batch]


def _points(config: DictConfig) -> list[DictConfig]:
    """One job of a search, the first that can be, to check what all have in common. Raises what is wrong with all.

    A point that cannot be becomes a trial that says so; the config without the words that are searched is no point.
    """
    from sweep.candidates import choices
    from sweep.memory.device import resolve_device
    from sweep.search_hydra import compositions, space_of
    from sweep.trial import check_trial

    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader, base = hydra.config_loader, _without_hydra(config)
    space = space_of(config.hydra.sweeper, words_of(config.hydra.overrides.task), loader, base)
    wrong: BadInput | None = None
    checked: dict[str, Any] = {}
    for words in compositions(space):
        job = _without_hydra(loader.load_sweep_config(config, words))
        try:
            own = typed(job)
            own.device = resolve_device(own.device)
            check_trial(own, checked)
        except BadInput as error:
            wrong = wrong or error
            continue
        if own.search.name is not None:
            choices(own)
        return [job]
    assert wrong is not None
    raise wrong


def _overrides(config: DictConfig, loader: ConfigLoader) -> list[Override]:
    """The words of a sweep, those of the sweeper's own config first."""
    params = config.hydra.sweeper.get("params") or {}
    words = [*(f"{key}={value}" for key, value in params.items()), *words_of(config.hydra.overrides.task)]
    found: list[Override] = OverridesParser.create(config_loader=loader).parse_overrides(words)
    return found


def _check_sweeps(config: DictConfig) -> None:
    """Raise BadInput for a glob or a range that matches nothing: Hydra would run no job, and say nothing."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader
    for override in _overrides(config, loader):
        if not override.is_sweep_override():
            continue
        key, value = override.key_or_group, override.value()
        inside = value.list if isinstance(value, ChoiceSweep) else []
        for element in [value, *inside]:
            written = override.get_value_string()
            if isinstance(element, Glob):
                options = loader.get_group_options(key)
                if not element.filter(options):
                    todo = f"choose among: {', '.join(options)}" if options else "it is no group; see --help"
                    raise BadInput(key, written, "matches no option", todo)
            elif isinstance(element, RangeSweep) and not list(element.range()):
                raise BadInput(key, written, "is empty", "give a stop beyond the start; a range leaves its stop out")
            if element is not value and isinstance(element, (Glob, Sweep)):
                raise BadInput(key, written, "has a glob or range in a list", "give it alone, such as glob([a*,b])")


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
