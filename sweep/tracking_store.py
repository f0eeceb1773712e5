"""Where runs are recorded: finding the MLflow store, checking it before anything is launched, and opening it quietly.

Everything a person can get wrong about `tracking.uri` is found here, in the parent and before the first trial, as one
line. MLflow itself is imported inside the functions: it takes seconds, and a sweep that records nothing never pays it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sqlite3
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.addresses import masked, reveal
from sweep.errors import BadInput
from sweep.interrupts import whole
from sweep.tracking_check import KEY, check_database, check_file, check_server, follow_moved_folder, migrate
from sweep.tracking_values import one_line

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EXPERIMENT = "memory-strategies"
SERVER_SCHEMES = ("http", "https")
DATABASE_SCHEMES = ("postgresql", "mysql", "mssql")

#: Only where the user has not decided otherwise. Retries: a server that is gone must not stop a sweep for minutes.
ENVIRONMENT = {
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


@dataclass(frozen=True)
class Store:
    """An MLflow store by absolute addresses: it means the same in every process and working directory."""

    uri: str
    experiment: str
    root: Path  # the project's folder
    artifacts: str | None = None  # URI of the artifacts' folder; None: the server decides
    file: Path | None = None  # the SQLite file, where it is one

    @property
    def shown(self) -> str:
        """The address without its password."""
        return masked(self.uri)


def store_location(uri: str | None, root: Path, experiment: str = EXPERIMENT) -> Store:
    """Where runs go.

    uri: None for `mlruns/mlflow.db` under `root`; a database (`sqlite:///file.db`, where a relative file is one under
    `root`; `postgresql://...`, `mysql://...`, `mssql://...`) or a server (`http://host:port`, `databricks`).
    Nothing is opened or made. Raises BadInput for an address of no such kind.
    """
    root = root.resolve()
    if not experiment.strip():
        raise BadInput("tracking.experiment", repr(experiment), "is empty", "give the experiment a name")
    if uri is None:
        uri = f"sqlite:///{root / 'mlruns' / 'mlflow.db'}"
    uri = reveal(uri)
    scheme = uri.partition(":")[0].partition("+")[0].lower()
    if scheme == "sqlite":
        return _sqlite(uri, root, experiment)
    if scheme in DATABASE_SCHEMES:
        return Store(uri, experiment, root, (root / "mlruns" / "artifacts").as_uri())
    if (scheme in SERVER_SCHEMES and urllib.parse.urlsplit(uri).netloc) or scheme == "databricks":
        return Store(uri.rstrip("/"), experiment, root)
    raise BadInput(
        KEY,
        masked(uri),
        "is neither a database nor a server",
        "give null (mlruns/mlflow.db), sqlite:///file.db, postgresql://..., or http://host:port",
    )


@whole()
def initialise(store: Store) -> str:
    """Make or migrate the database and the experiment; returns the experiment's id.

    Called once, in the parent, before anything is launched: many processes that open a fresh store at once fail.
    Commands that start at the same time wait for each other. Raises BadInput where the store cannot be used; an
    existing file is never replaced, and is copied before a migration.
    """
    with _alone(store):
        if store.file is not None:
            check_file(store)
        elif store.uri.startswith(SERVER_SCHEMES):
            check_server(store)
        elif not store.uri.startswith("databricks"):
            check_database(store)
        with as_bad_input(store):
            if store.file is not None:
                migrate(store)
            found = _find_or_make_experiment(store)
    _experiment_ids[store.uri, store.experiment] = found
    return found


_experiment_ids: dict[tuple[str, str], str] = {}


def experiment_id(store: Store) -> str:
    """The id of the store's experiment, looked up once per process."""
    key = (store.uri, store.experiment)
    if key not in _experiment_ids:
        _experiment_ids[key] = _find_or_make_experiment(store)
    return _experiment_ids[key]


@functools.lru_cache(maxsize=8)
def client(uri: str) -> MlflowClient:
    """MLflow's client for one store, without MLflow's log lines, hints and telemetry."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.pop("MLFLOW_RUN_ID", None)  # a run of whoever started us: children would write into it
    import mlflow.tracking

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails is raised as well, and told by us
    return mlflow.tracking.MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def as_bad_input(store: Store) -> Iterator[None]:
    """What MLflow says when it cannot use a store, as one line."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError, sqlite3.Error) as error:
        todo = "check the address and the rights" if store.file is None else "check the file, the disk and the rights"
        raise BadInput(KEY, store.shown, f"cannot be used ({one_line(error)})", f"{todo}, or give another") from error


def _sqlite(uri: str, root: Path, experiment: str) -> Store:
    name, _, query = uri.partition("///")[2].partition("?")
    if not name or name == ":memory:":
        raise BadInput(KEY, masked(uri), "names no file, and runs are read by other processes", "give sqlite:///file.db")
    path = Path(os.path.abspath(root / urllib.parse.unquote(name)))
    if set(str(path)) & set("%?"):
        # SQLAlchemy decodes the address and MLflow does not: they would use two different places.
        raise BadInput(KEY, masked(uri), "has a % or ? in its path, which MLflow cannot have", "give sqlite:///another/path.db")
    address = f"sqlite:///{path}" + (f"?{query}" if query else "")
    return Store(address, experiment, root, (path.parent / "artifacts").as_uri(), path)


def _find_or_make_experiment(store: Store) -> str:
    from mlflow.exceptions import MlflowException

    mlflow_client = client(store.uri)
    found = mlflow_client.get_experiment_by_name(store.experiment)
    if found is None:
        try:
            return str(mlflow_client.create_experiment(store.experiment, artifact_location=store.artifacts))
        except MlflowException:
            found = mlflow_client.get_experiment_by_name(store.experiment)  # another program was faster
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        todo = f"restore it (mlflow experiments restore -x {found.experiment_id}) or give another name"
        raise BadInput("tracking.experiment", store.experiment, "was deleted in MLflow", todo)
    if store.file is not None and store.artifacts not in (None, found.artifact_location):
        follow_moved_folder(store.file, found.experiment_id, found.artifact_location, store.artifacts)
    return str(found.experiment_id)


@contextlib.contextmanager
def _alone(store: Store) -> Iterator[None]:
    """One process at a time per SQLite file. A lock on the folder leaves no file behind and ends with its process."""
    with contextlib.ExitStack() as held:
        if fcntl is not None and store.file is not None:
            with contextlib.suppress(OSError):  # a folder whose fault `check_file` names, or one without locks
                store.file.parent.mkdir(parents=True, exist_ok=True)
                folder = os.open(store.file.parent, os.O_RDONLY)
                held.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield
