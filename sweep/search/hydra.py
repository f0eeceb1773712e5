"""The search as a Hydra sweep: composing, launching through Hydra's launcher, exit codes. What the plugin calls."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sweep.config.addresses import conceal_in, without_hydra, words_of
from sweep.environment import PACKAGE, home
from sweep.errors import EXIT_BAD_INPUT, EXIT_NOTHING_FEASIBLE, BadInput
from sweep.search.candidate import Job
from sweep.search.loop import Search, Settings, quiet_optuna
from sweep.search.space import Space, encode, read_space
from sweep.search.study import (
    Record,
    Sampler,
    default_name,
    digest_of,
    first_free,
    fixed_digests,
    free_name,
    open_storage,
    open_study,
)

#: Every choice of a key is composed once before the search starts, up to so many compositions.
MOST_COMPOSITIONS = 64


def run_sweep(
    settings: Mapping[str, Any],
    arguments: list[str],
    context: HydraContext,
    config: DictConfig,
    launcher: Launcher,
    task_function: TaskFunction,
) -> list[Record]:
    """Search, say and write the result.

    Raises BadInput, or Hydra's own errors, for what a person can mend; without HYDRA_FULL_ERROR=1 they are printed
    as one line, and the exit code is 2. Exits with 3 where no trial is feasible.
    """
    conceal_in(config)
    session = next((c.session for c in context.callbacks.callbacks if hasattr(c, "session")), None)
    search: Search | None = None
    try:
        search = make_search(settings, arguments, context, config, launcher, task_function, session=session)
        found = search.run()
    except (BadInput, HydraException, OmegaConfBaseException) as error:
        if os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT) from error
    finally:
        sys.stdout.flush()
        if search is not None and session is not None:
            session.files += search.files()
    best = search.best()
    search.progress.end(found, best, search.ended_because)
    if not best:
        # Hydra would call them after this function, which does not return.
        context.callbacks.on_multirun_end(config=config, config_name=config.hydra.job.config_name)
        raise SystemExit(EXIT_NOTHING_FEASIBLE)
    return found


def make_search(
    given: Mapping[str, Any],
    arguments: list[str],
    context: HydraContext,
    config: DictConfig,
    launcher: Launcher,
    task_function: TaskFunction,
    session: Any = None,
) -> Search:
    """Check everything that can be checked, open the study, and be ready to ask. Raises BadInput."""
    quiet_optuna()
    settings, job_config = read_settings(given), without_hydra(config)
    space = space_of(given, arguments, context.config_loader, job_config)
    if not space.parameters and space.extend is None:
        raise BadInput("command line", " ".join(arguments), "searches nothing", "give a key several values: key=1,2,3")
    runner = HydraRunner(context.config_loader, config, launcher)
    for words in compositions(space):  # what cannot be composed is refused before anything is asked
        runner.loader.load_sweep_config(config, words)
    if settings.n_jobs > 1 and str(config.hydra.launcher.get("_target_", "")).endswith("BasicLauncher"):
        print(
            f"warning: n_jobs={settings.n_jobs}, but the basic launcher runs its jobs serially, one after another; "
            "hydra/launcher=joblib (pip install hydra-joblib-launcher) runs them in parallel"
        )
        settings.n_jobs = 1

    working_folder = Path(config.hydra.runtime.cwd)
    storage = open_storage(given["storage"], app_folder(task_function, working_folder), working_folder)
    fixed = fixed_digests(job_config, space, given["irrelevant"])
    name = given["study_name"] or default_name(str(config.hydra.job.name), fixed, space)
    if not given["resume"]:
        name = free_name(storage, name)
    study = open_study(storage, name, space, settings.directions, fixed)
    known = len(study.get_trials(deepcopy=False))
    sampler = Sampler(given["sampler"] or {}, settings.seed, known, len(settings.directions))

    runner.folder.mkdir(parents=True, exist_ok=True)
    if not (runner.folder / "multirun.yaml").exists():
        OmegaConf.save(config, runner.folder / "multirun.yaml")
    hooks = {name: hook(given[name], name) for name in ("preflight", "plan", "read", "recover", "verdict")}
    points: Any = OmegaConf.to_container(given["enqueue"], resolve=True)
    for point in points:
        if not isinstance(point, Mapping):
            raise BadInput("hydra.sweeper.enqueue", point, "is no point", "give a list of {key: value, ...}")
    return Search(
        study, space, sampler, settings, runner,
        folder=runner.folder, fixed=digest_of(fixed), enqueue=points, session=session, **hooks,
    )  # fmt: skip


def space_of(given: Mapping[str, Any], arguments: list[str], loader: ConfigLoader, job_config: DictConfig) -> Space:
    """What the settings and the command line search."""
    name, params = given["custom_search_space"], OmegaConf.create(given["params"] or {})
    extend: Any = hook(name, "custom_search_space")
    return read_space(OmegaConf.to_container(params), arguments, loader, extend, job_config, name or "")  # type: ignore[arg-type]


def compositions(space: Space) -> list[list[str]]:
    """The words of jobs that together have every choice of every key, as far as MOST_COMPOSITIONS goes."""
    texts = {key: p.texts_to_compose() for key, p in space.parameters.items()}
    first = {key: found[0] for key, found in texts.items()}
    chosen = [first, *({**first, key: text} for key, found in texts.items() for text in found[1:])]
    return [
        [w if isinstance(w, str) else f"{w.key}={each[w.key]}" for w in space.words]
        for each in chosen[:MOST_COMPOSITIONS]
    ]


def study_name(config: DictConfig, app: str, loader: ConfigLoader, root: Path) -> str:
    """The name that the study of a composed command will have, known before it is opened; `app` begins it."""
    given, job_config = config.hydra.sweeper, without_hydra(config)
    space = space_of(given, words_of(config.hydra.overrides.task), loader, job_config)
    name = given.study_name or default_name(app, fixed_digests(job_config, space, given["irrelevant"]), space)
    if given.resume:
        return str(name)
    return free_name(open_storage(given.storage, root, Path(config.hydra.runtime.cwd)), str(name))


def read_settings(given: Mapping[str, Any]) -> Settings:
    """The limits and directions, checked."""
    direction = given["direction"]
    said = [direction] if isinstance(direction, str) else list(direction or [])
    directions = [str(getattr(d, "name", d)).lower() for d in said]
    if not directions or {*directions} - {"minimize", "maximize"}:
        raise BadInput("hydra.sweeper.direction", direction, "is no direction", "give minimize or maximize")
    objectives, constraints = ([str(n) for n in given[key] or []] for key in ("objectives", "constraints"))
    if objectives and len(objectives) != len(directions):
        wrong = f"names {len(objectives)} of {len(directions)} objectives"
        raise BadInput("hydra.sweeper.objectives", objectives, wrong, "give one name per direction")
    for key, least in _LEAST.items():
        if given[key] is not None and not given[key] >= least:
            raise BadInput(f"hydra.sweeper.{key}", given[key], f"is below {least}", f"give {least} or more")
    return Settings(directions, objectives, constraints, **{key: given[key] for key in (*_LEAST, "seed")})


_LEAST = {"n_trials": 1, "timeout_s": 0, "n_jobs": 1, "max_failures": 0, "max_failure_rate": 0, "max_skipped": 1}


def hook(conf: Any, name: str) -> Any:
    """The callable behind an import path or a config with `_target_`: a class is made, a function is bound."""
    if conf is None:
        return None
    key = f"hydra.sweeper.{name}"
    if isinstance(conf, str):
        conf = {"_target_": conf}
    if not isinstance(conf, Mapping) and not OmegaConf.is_dict(conf):
        raise BadInput(key, conf, "is no config with _target_", "give _target_ and its arguments")
    target = conf.get("_target_")
    try:
        is_class = inspect.isclass(get_object(str(target)))
        made = instantiate(conf if is_class else {**conf, "_partial_": True}, _convert_="all")
    except BadInput:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise BadInput(f"{key}._target_", target, f"cannot be made ({first})", "give the import path") from error
    if not callable(made):
        raise BadInput(f"{key}._target_", target, "cannot be called", "give a function or a class with __call__")
    return made


def app_folder(task_function: TaskFunction, working_folder: Path) -> Path:
    """The folder of the app's own file, so that its studies are found from any working directory."""
    try:
        folder = Path(inspect.getfile(inspect.unwrap(task_function))).resolve().parent
    except (TypeError, OSError):
        return working_folder
    return home() if folder == PACKAGE else folder


class HydraRunner:
    """Composes with Hydra's loader and launches with its launcher."""

    def __init__(self, loader: ConfigLoader, config: DictConfig, launcher: Launcher) -> None:
        self.loader, self.config, self.launcher = loader, config, launcher
        self.folder = Path(config.hydra.runtime.cwd, str(config.hydra.sweep.dir))

    def compose(self, number: int, overrides: list[str]) -> tuple[DictConfig, Path | None]:
        config = self.loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return without_hydra(config), _folder(config)

    def launch(self, jobs: Sequence[Job]) -> list[tuple[Any, Path | None]]:
        overrides = [self._numbered(job, jobs[0].number + i) for i, job in enumerate(jobs)]
        try:
            returned = self.launcher.launch(overrides, initial_job_idx=jobs[0].number)
        except (HydraException, OmegaConfBaseException, BadInput):
            raise
        except Exception as error:  # a worker died; none of its batch has a result
            return [(error, job.folder) for job in jobs]
        return [_unpack(r, job) for r, job in zip(returned, jobs)]

    def _numbered(self, job: Job, given: int) -> list[str]:
        """The job's words, with a folder of its own where the launcher's number would give another or an old one."""
        folder = job.folder
        if folder is None or (given == job.number and not folder.exists()):
            return job.overrides
        return [*job.overrides, f"hydra.sweep.subdir={encode(os.path.relpath(unused(folder), self.folder))}"]


def unused(folder: Path) -> Path:
    """The folder, or one beside it (name-2, name-3, ...) that is not there yet."""
    return folder.with_name(first_free(folder.name, lambda name: folder.with_name(name).exists()))


def _folder(config: DictConfig) -> Path | None:
    """Where Hydra will put the job's output."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        sweep_dir, subdir = (OmegaConf.select(config, f"hydra.sweep.{k}") for k in ("dir", "subdir"))
        return Path(config.hydra.runtime.cwd, str(sweep_dir), str(subdir))
    except OmegaConfBaseException:
        return None  # needs what only a running job has
    finally:
        HydraConfig.instance().cfg = before


def _unpack(returned: JobReturn, job: Job) -> tuple[Any, Path | None]:
    """What a job returned or raised, and its folder. The JobReturn itself is let go, as it holds the exception."""
    folder = job.folder
    if returned.hydra_cfg is not None:
        said = OmegaConf.select(returned.hydra_cfg, "hydra.runtime.output_dir")
        folder = Path(said) if said else folder
    value, returned._return_value = returned._return_value, None
    if returned.status is JobStatus.UNKNOWN:
        value = RuntimeError("the launcher says nothing of how the job ended")
    return value, folder
