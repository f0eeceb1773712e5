"""Hydra's hooks around a command: everything is checked before anything runs, and the report comes at the end."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep, Sweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from sweep.config.addresses import (
    ENVIRONMENT,
    conceal,
    conceal_in,
    conceal_word,
    without_hydra,
    without_secrets,
    words_of,
)
from sweep.config.check import typed
from sweep.config.schema import Mode
from sweep.environment import CONF, home
from sweep.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, BadInput, DoesNotFit
from sweep.interrupts import Terminated, ended_by_signals, whole

if TYPE_CHECKING:
    from sweep.diagnose.advice import Diagnosis
    from sweep.results import TrialResult
    from sweep.session import Session

FULL_ERROR = "HYDRA_FULL_ERROR"


@dataclass
class Command:
    """What `guarded` and the callback, which Hydra makes by itself inside of it, know of each other."""

    session: Session | None = None


#: The command that runs. Hydra hands nothing from its caller to its callbacks.
_running: ContextVar[Command] = ContextVar("command")


def guarded(main: Callable[[], Any]) -> int:
    """Run Hydra's main and return the exit code. With HYDRA_FULL_ERROR=1 exceptions keep their traceback.

    Ctrl-C and SIGTERM end it with the report of what was measured so far; a further one changes nothing.
    """
    sys.argv = with_multirun(flags_first([sys.argv[0], *map(conceal_word, sys.argv[1:])]))
    command = Command()
    token = _running.set(command)
    try:
        with ended_by_signals() as came:
            return _run(main, command, came)
    finally:
        _running.reset(token)
        os.environ.pop(ENVIRONMENT, None)


def _run(main: Callable[[], Any], command: Command, came: Sequence[int]) -> int:
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # Hydra would print its own version of the error and exit with 1
    try:
        main()
        return command.session.exit_code if command.session is not None else EXIT_OK
    except (Exception, Escaping, KeyboardInterrupt) as caught:
        error = caught.error if isinstance(caught, Escaping) else caught
        terminated = isinstance(error, Terminated) or signal.SIGTERM in came[:1]
        # OmegaConf, interrupted between two of its statements, may raise what it finds in place of the interrupt.
        interrupted = bool(came) or isinstance(error, KeyboardInterrupt)
        bad = None if interrupted else as_bad_input(error)
        with suppress(KeyboardInterrupt), whole():
            # The frames that the error has left keep cursors, and so locks of the store, and whatever else is large.
            for each in _chain(error):
                traceback.clear_frames(each.__traceback__)
            if command.session is not None:
                command.session.finish("KILLED" if interrupted else "FAILED")
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


#: Hydra's flags that are followed by a value.
_WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--cfg", "-c", "--package", "-p",
               "--experimental-rerun")  # fmt: skip


def flags_first(argv: list[str]) -> list[str]:
    """Flags before overrides, each in its order: argparse takes no overrides on both sides of a flag."""
    flags: list[str] = []
    overrides: list[str] = []
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in _WITH_VALUE:
            flags += [value for value in [next(words, None)] if value is not None]
    return [argv[0], *flags, *overrides]


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


class SweepCallback(Callback):
    """Opens the session of a command before its jobs and closes it after them."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"session": None}  # a launcher's other processes attach to it by themselves

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            conceal_in(config)
            self._open(config, [without_hydra(config)], Path(config.hydra.run.dir), sweep=False)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            if self.session is not None:
                self.session.finish()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with not_swallowed():
            conceal_in(config)
            _check_sweeps(config)
            if is_search(config):
                from sweep.search.preflight import first_job, settle_study

                study = settle_study(config, home())
                self._open(config, [first_job(config)], Path(config.hydra.sweep.dir), sweep=True, study=study)
            else:
                self._open(config, _jobs(config), Path(config.hydra.sweep.dir), sweep=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        self.on_run_end(config)

    def _open(
        self, config: DictConfig, jobs: list[DictConfig] | None, folder: Path, *, sweep: bool, study: str = ""
    ) -> None:
        configs = [typed(job) for job in jobs or []]
        # torch comes in here, after whatever is wrong with the words of the command line has been found.
        from sweep.memory.device import resolve_device
        from sweep.session import Session
        from sweep.trial.check import check_trial

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
        first = configs[0] if configs else typed(without_hydra(config))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            key = "hydra.sweep.dir" if sweep else "hydra.run.dir"
            raise BadInput(key, folder, f"cannot be made ({error.strerror})", "give another folder") from error
        overrides = words_of(config.hydra.overrides.task)
        storage = config.hydra.sweeper.storage if study else None
        self.session = Session.open(
            folder.resolve(),
            first,
            overrides,
            trials=first.search.n_trials if study else len(configs) or None,
            sweep=sweep,
            study=study,
            storage=conceal(storage) if isinstance(storage, str) else None,
            checked=checked,
        )
        _running.get(Command()).session = self.session


def _jobs(config: DictConfig) -> list[DictConfig] | None:
    """The configs of all jobs that Hydra's own sweeper will launch; None for another one, which decides as it goes."""
    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return None
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader
    batches = BasicSweeper.split_arguments(_overrides(config, loader), None)
    return [without_hydra(loader.load_sweep_config(config, list(job))) for batch in batches for job in batch]


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


def is_search(config: DictConfig) -> bool:
    """Whether the sweeper of a composed command is ours."""
    return str(config.hydra.sweeper._target_).endswith("BudgetSweeper")


def main() -> int:
    """The console command `memory-sweep`: train.py, with modules and configs of the working directory."""
    import hydra

    import sweep.config.schema  # noqa: F401  registers the typed config

    sys.path.insert(0, os.getcwd())

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def memory_sweep(cfg: DictConfig) -> Any:
        return run_job(cfg)

    return guarded(memory_sweep)


def run_job(cfg: DictConfig) -> TrialResult | Diagnosis:
    """What Hydra calls for each job: one trial, and before it the baseline where there is none yet; or a diagnosis."""
    from sweep.session import Session

    hydra = HydraConfig.get()
    config = typed(cfg)
    command = _running.get(Command())
    session = command.session or Session.attach(Path(hydra.sweep.dir).resolve(), config)
    folder, overrides = Path(hydra.runtime.output_dir), words_of(hydra.overrides.task)
    if config.mode is Mode.diagnose:
        return session.diagnose(config, folder, overrides)
    return session.run(config, folder, overrides)
