"""Opening a study: where it is kept, whether it asks the same as before, and what a killed command left in it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import psutil
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from sweep.addresses import masked, reveal, revealed, without_secrets
from sweep.errors import BadInput
from sweep.interrupts import whole
from sweep.search_record import JOB
from sweep.search_space import Space

KEY = "hydra.sweeper.storage"
AUTO = "auto"
#: Tables that only MLflow makes.
_MLFLOW_TABLES = {"experiments", "runs", "latest_metrics"}
#: How long a writer waits for another one.
_BUSY_TIMEOUT_S = 60
#: User attributes of a study: its search space, and a digest of what is fixed, key by key.
SPACE, FIXED = "search_space", "fixed_digests"


@whole()
def open_storage(conf: Any, root: Path, working_folder: Path) -> BaseStorage:
    """The storage of `hydra.sweeper.storage`: "auto" (root/mlruns/optuna.db), null (in memory), a URL or a `_target_`.

    Raises BadInput for a database that is MLflow's, no database, not writable or of another Optuna version.
    """
    if conf is None:
        return InMemoryStorage()
    if isinstance(conf, DictConfig):
        from hydra.utils import instantiate

        return instantiate(revealed(OmegaConf.to_container(conf, resolve=True)), _convert_="all")
    url = f"sqlite:///{root / 'mlruns' / 'optuna.db'}" if conf == AUTO else reveal(str(conf))
    shown = masked(url)
    if not url.startswith("sqlite:///") or ":memory:" in url:
        try:
            return optuna.storages.get_storage(url)
        except Exception as error:  # whatever the database's driver raises
            first = without_secrets((str(error).strip().splitlines() or [type(error).__name__])[0])
            todo = "check the address, that the database runs and its driver is there; null: keep the study in memory"
            raise BadInput(KEY, shown, f"cannot be used ({first})", todo) from error
    file = (working_folder / url.removeprefix("sqlite:///").partition("?")[0]).resolve()
    _check_file(file, shown)
    try:
        # Several sweeps that make a fresh database at the same time would break each other.
        with FileLock(f"{file}.lock"):
            return RDBStorage(f"sqlite:///{file}", engine_kwargs={"connect_args": {"timeout": _BUSY_TIMEOUT_S}})
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise BadInput(KEY, shown, f"cannot be used ({first})", "give another file, or move this one away") from error


def _check_file(file: Path, url: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(KEY, url, f"its folder cannot be made ({error.strerror})", "give another file") from error
    target = file if file.exists() else file.parent
    if not os.access(target, os.W_OK):
        raise BadInput(KEY, url, f"{target.name} cannot be written", "give another file or make it writable")
    if not file.exists() or file.stat().st_size == 0:
        return
    try:
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            tables = {row[0] for row in connection.execute("select name from sqlite_master where type='table'")}
    except sqlite3.DatabaseError as error:
        raise BadInput(KEY, url, f"is no SQLite database ({error})", "give another file") from error
    if tables & _MLFLOW_TABLES and "studies" not in tables:
        raise BadInput(KEY, url, "is MLflow's database, which Optuna would break", "give a file of its own")


def fixed_digests(config: DictConfig, searched: Sequence[str], irrelevant: Sequence[str] = ()) -> dict[str, str]:
    """A short digest per key of all that is not searched: tells what changed without storing any value.

    irrelevant: keys, or whole nodes, that change no result.
    """
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    left_out = tuple(f"{key}." for key in (*searched, *irrelevant))
    return {k: digest_of(v) for k, v in sorted(_flat(plain, "").items()) if not f"{k}.".startswith(left_out)}


def _flat(node: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        found |= _flat(value, name + ".") if isinstance(value, Mapping) and value else {name: value}
    return found


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


def default_name(app: str, fixed: Mapping[str, str], space: Space) -> str:
    """Equal for commands that ask the same question: the same fixed config and the same searched keys."""
    return f"{app}-{digest_of([fixed, sorted(space.parameters), space.extend_name])}"


def free_name(storage: BaseStorage, name: str) -> str:
    """The name, or name-2, name-3, ... where there is such a study already."""
    taken = set(optuna.get_all_study_names(storage))
    return next(n for n in itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2))) if n not in taken)


@whole()
def open_study(
    storage: BaseStorage,
    name: str,
    space: Space,
    directions: Sequence[str],
    fixed: Mapping[str, str],
    say: Callable[[str], None] = print,
) -> optuna.Study:
    """The study of this name, made if there is none.

    Raises BadInput, before anything is asked, where it was begun with another space or direction.
    """
    if name not in optuna.get_all_study_names(storage):
        wanted = [optuna.study.StudyDirection[d.upper()] for d in directions]
        study = optuna.create_study(study_name=name, storage=storage, directions=wanted)
        study.set_user_attr(SPACE, space.describe())
        study.set_user_attr(FIXED, dict(fixed))
        return study
    study = optuna.load_study(study_name=name, storage=storage)
    _check_directions(study, directions)
    _check_space(study, space)
    changed = changed_keys(study.user_attrs.get(FIXED), fixed)
    if changed:
        say(
            f"warning: the study {name} was begun with other values of {', '.join(changed)}; "
            "its earlier trials guide the sampler but answer no candidate"
        )
    return study


def _check_directions(study: optuna.Study, directions: Sequence[str]) -> None:
    before = [d.name.lower() for d in study.directions]
    if before != list(directions):
        raise BadInput(
            "hydra.sweeper.direction",
            ",".join(directions),
            f"the study {study.study_name} was begun with {','.join(before)}",
            "go on with that, or give hydra.sweeper.study_name=NAME or hydra.sweeper.resume=false for a new study",
        )


def _check_space(study: optuna.Study, space: Space) -> None:
    before, now = study.user_attrs.get(SPACE), space.describe()
    if before is None:
        before, now = _space_of_trials(study, space)
    for key in sorted(set(before) | set(now)):
        if before.get(key) != now.get(key):
            was = f"was searched as {before[key]}" if key in before else "was not searched"
            raise BadInput(
                key,
                now.get(key, "(not searched)"),
                f"{was} when the study {study.study_name} was begun",
                "go on with the same space, or give hydra.sweeper.study_name=NAME or hydra.sweeper.resume=false "
                "for a new study",
            )


def _space_of_trials(study: optuna.Study, space: Space) -> tuple[dict[str, Any], dict[str, Any]]:
    """For a study that something else has begun: the choices that its trials had, and ours of the same keys."""
    before: dict[str, Any] = {}
    for trial in study.get_trials(deepcopy=False):
        for key, d in trial.distributions.items():
            if isinstance(d, optuna.distributions.CategoricalDistribution):
                before[key] = list(d.choices)
    ours = {k: list(getattr(d, "choices", ())) for k, d in space.distributions.items() if k in before}
    return {k: v for k, v in before.items() if k in ours}, ours


def changed_keys(before: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    if before is None:
        return []
    return sorted(k for k in set(before) | set(now) if before.get(k) != now.get(k))


def owner() -> str:
    """This process, recognisable after a reboot and when its number has been given to another one."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.0f}"


def is_alive(name: str | None) -> bool:
    """Whether the process that runs a trial may still be there. One on another machine may."""
    if not name:
        return False
    host, pid, created = name.rsplit(":", 2)
    if host != socket.gethostname():
        return True
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(created)) <= 1
    except psutil.Error:
        return False


@whole()
def stale(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that a killed command left running; not those of a living process."""
    running = study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
    return [trial for trial in running if not is_alive(trial.user_attrs.get(JOB, {}).get("owner"))]


@whole()
def close(study: optuna.Study, trials: Iterable[FrozenTrial]) -> None:
    """End them as failed."""
    for trial in trials:
        optuna.Trial(study, trial._trial_id).set_user_attr("reason", "the command that ran it was killed")
        study.tell(trial.number, state=TrialState.FAIL)
