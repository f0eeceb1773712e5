"""Hydra's hooks around a command: everything is checked before anything runs, and the report comes at the end."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep, Sweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from sweep.config.addresses import ENVIRONMENT, conceal, conceal_in, conceal_word, without_secrets, words_of
from sweep.config.check import check_diagnosis, typed
from sweep.config.schema import Config, Mode
from sweep.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED, BadInput, DoesNotFit
from sweep.interrupts import Terminated, ended_by_signals, whole

FULL_ERROR = "HYDRA_FULL_ERROR"


def guarded(main: Callable[[], Any]) -> int:
    """Run Hydra's main and return the exit code. With HYDRA_FULL_ERROR=1 exceptions keep their traceback.

    Ctrl-C and SIGTERM end it with the report of what was measured so far; a further one changes nothing.
    """
    sys.argv = with_multirun([sys.argv[0], *map(conceal_word, sys.argv[1:])])
    try:
        with ended_by_signals() as came:
            return _run(main, came)
    finally:
        os.environ.pop(ENVIRONMENT, None)


def _run(main: Callable[[], Any], came: Sequence[int]) -> int:
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # Hydra would print its own version of the error and exit with 1
    try:
        main()
        return _exit_code()
    except (Exception, Escaping, KeyboardInterrupt) as caught:
        error = caught.error if isinstance(caught, Escaping) else caught
        terminated = isinstance(error, Terminated) or signal.SIGTERM in came[:1]
        # OmegaConf, interrupted between two of its statements, may raise what it finds in place of the interrupt.
        interrupted = bool(came) or isinstance(error, KeyboardInterrupt)
        bad = None if interrupted else as_bad_input(error)
        with suppress(KeyboardInterrupt), whole():
            _finish("KILLED" if interrupted else "FAILED", error)
            if interrupted:
                how = "terminated" if terminated else "interrupted"
                print(f"{how}; what was measured so far is kept", file=sys.stderr)
        if interrupted:
            return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
        if bad is None or before == "1":
            raise error from error.__cause__
        print(f"error: {without_secrets(str(bad))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    finally:
        os.environ.pop(FULL_ERROR)
        if before is not None:
            os.environ[FULL_ERROR] = before


#: Hydra's flags that say what to do; it takes one of them.
_MODES = ("-m", "--multirun", "-r", "--run", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "-h", "--help",
          "--hydra-help", "--version")  # fmt: skip


def with_multirun(argv: list[str]) -> list[str]:
    """A search is many trials: choosing one (`search=budget`, `hydra/sweeper=budget`) means --multirun."""
    words = argv[1:]
    searches = any(w.lstrip("+").startswith(("search=", "hydra/sweeper=")) for w in words)
    searches &= not any(w.lstrip("+") in ("search=null", "search=") for w in words)
    said = {w.partition("=")[0] for w in words if w.startswith("-")}
    return [argv[0], "--multirun", *words] if searches and not said & set(_MODES) else argv


class Escaping(BaseException):
    """Carries an exception through places that swallow exceptions: Hydra turns those of a callback into warnings."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def not_swallowed() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Escaping(error) from error


def _finish(status: str, error: BaseException) -> None:
    """Close the session of this process, if it got so far as to open one.

    The frames that the error has left keep cursors, and so locks of the store, and whatever else was large in them.
    """
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
    session_module = sys.modules.get("sweep.session")
    if session_module is not None and session_module.Session.current is not None:
        session_module.Session.current.finish(status)


def _exit_code() -> int:
    session_module = sys.modules.get("sweep.session")
    return 0 if session_module is None else session_module.Session.exit_code


def as_bad_input(error: BaseException) -> BadInput | None:
    """The person's mistake behind an exception, ours, Hydra's or OmegaConf's, or None."""
    chain = _chain(error)
    ours = next((e for e in chain if isinstance(e, BadInput)), None)
    if ours is not None:
        return ours
    # OmegaConf names the key in whatever it runs into.
    node = next((e for e in chain if isinstance(e, OmegaConfBaseException) and e.full_key), None)
    if (missing := next((e for e in chain if isinstance(e, MissingConfigException)), None)) is not None:
        group, _, name = (missing.missing_cfg_file or "config").rpartition("/")
        options = ", ".join(missing.options or ())
        return BadInput(
            group, name, "there is no such option", f"choose one of: {options}" if options else "see --help"
        )
    if node is not None:
        return _from_omegaconf(node)
    if "Config group override must be a string" in str(error):
        nulls = [key for key, _, value in (word.partition("=") for word in sys.argv[1:]) if value in ("", "null")]
        return BadInput(
            nulls[-1] if nulls else "command line", None, "is no option of the group", "choose one; see --help"
        )
    if found := re.search(r"^\s+full_key: (\S+)", str(error), re.M):  # a builtin exception, worded by OmegaConf
        key = found.group(1)
        return BadInput(key, _value_on_command_line(key), "cannot be set so", "see --help for what may be set")
    if not isinstance(error, HydraException):
        return None
    given, flat = " ".join(sys.argv[1:]), " ".join(str(error).split())
    if any(isinstance(e, OverrideParseException) for e in chain):
        return BadInput("command line", given, flat.split(" See ")[0], "quote the override, such as 'strategy=glob(*)'")
    return BadInput("command line", given, flat[:300], "see --help")


def _from_omegaconf(error: OmegaConfBaseException) -> BadInput:
    key = str(error.full_key)
    value = _value_on_command_line(key)
    if isinstance(error, MissingMandatoryValue):
        return BadInput(key, "???", "has to be given", f"add it, such as '+{key}={{_target_: my.module.Name}}'")
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        outer = next(
            (name for name in _known_keys() if key.startswith(f"{name}.") and _value_on_command_line(name) != "?"), ""
        )
        if outer:  # a mapping given whole, with keys that only + adds
            todo = f"write +{outer}=..."
            return BadInput(outer, _value_on_command_line(outer), "has keys that are not there yet", todo)
        return BadInput(key, value, "there is no such key", _near(key))
    wrong = str(error.msg or error).strip().splitlines()[0].rstrip(".")
    return BadInput(key, value, wrong, "give a value of that type; see --help")


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _value_on_command_line(key: str) -> str:
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name.lstrip("+~") == key:
            return value
    return "?"


def _near(key: str) -> str:
    """What the key may have been meant to be."""
    import difflib

    known = _known_keys()
    close = (
        difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        or [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:3]
    )
    return f"did you mean {' or '.join(close)}" if close else "see --help for what may be set"


def _known_keys() -> list[str]:
    """Every key of the typed config, dotted."""
    import dataclasses
    import typing

    from sweep.config import schema

    def keys(cls: Any, prefix: str) -> list[str]:
        found = []
        for name, hint in typing.get_type_hints(cls).items():
            found += keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [f"{prefix}{name}"]
        return found

    return keys(schema.Config, "")


ROOT = Path(__file__).resolve().parent.parent


class SweepCallback(Callback):
    """Opens the session of a command before its jobs and closes it after them."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            conceal_in(config)
            _open(config, [_without_hydra(config)], Path(config.hydra.run.dir), sweep=False)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        _finish_session()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            conceal_in(config)
            _check_sweeps(config)
            study = _settle_study(config) if is_search(config) else ""
            _open(config, _jobs(config), Path(config.hydra.sweep.dir), sweep=True, study=study)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        _finish_session()


def _open(config: DictConfig, jobs: list[DictConfig] | None, folder: Path, *, sweep: bool, study: str = "") -> None:
    configs = [typed(job) for job in jobs or []]
    # torch comes in here, after whatever is wrong with the words of the command line has been found.
    from sweep.config.device import resolve_device
    from sweep.session import Session
    from sweep.trial.trial import check_trial

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
    from sweep.search.hydra import study_name
    from sweep.search.space import encode

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
    from sweep.search.preflight import CONSTRAINTS, OBJECTIVES

    if OmegaConf.select(sweeper, "read._target_") != "sweep.search.preflight.read":
        return  # a reader of one's own gives what it likes
    for key, known in (("objectives", OBJECTIVES), ("constraints", CONSTRAINTS)):
        for name in sweeper[key]:
            if name not in known:
                todo = f"give {' or '.join(known)}"
                raise BadInput(f"hydra.sweeper.{key}", name, "no trial gives such a number", todo)


def _finish_session() -> None:
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
    from sweep.config.device import resolve_device
    from sweep.search.hydra import compositions, space_of
    from sweep.search.preflight import choices
    from sweep.trial.trial import check_trial

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
