"""Where runs are recorded: finding the MLflow store, checking it before anything is launched, and opening it quietly.

Everything a person can get wrong about `tracking.uri` is found here, in the parent and before the first trial, as one
line. MLflow itself is imported inside the functions: it takes seconds, and a sweep that records nothing never pays it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import sqlite3
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.config.addresses import masked, reveal
from sweep.errors import BadInput
from sweep.interrupts import whole
from sweep.tracking.values import one_line

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

KEY = "tracking.uri"
EXPERIMENT = "memory-strategies"
SERVER_SCHEMES = ("http", "https")
DATABASE_SCHEMES = ("postgresql", "mysql", "mssql")
SQLITE_WAIT_S = 20.0  # as long as MLflow itself waits for another writer
SERVER_WAIT_S = 10.0
#: Checking every page reads the whole file; a larger one is checked where it is used.
QUICK_CHECK_LIMIT_BYTES = 512 * 2**20

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

    @property
    def served(self) -> bool:
        """Whether a server of one's own answers there."""
        return self.uri.startswith(SERVER_SCHEMES)


def store_location(uri: str | None, root: Path, experiment: str = EXPERIMENT) -> Store:
    """Where runs go; nothing is opened or made. Raises BadInput for an address of no known kind.

    uri: None for `mlruns/mlflow.db` under `root`; a database (`sqlite:///file.db`, where a relative file is one under
    `root`; `postgresql://...`, `mysql://...`, `mssql://...`) or a server (`http://host:port`, `databricks`).
    """
    root = root.resolve()
    if not experiment.strip():
        raise BadInput("tracking.experiment", repr(experiment), "is empty", "give the experiment a name")
    uri = reveal(f"sqlite:///{root / 'mlruns' / 'mlflow.db'}" if uri is None else uri)
    scheme = uri.partition(":")[0].partition("+")[0].lower()
    if scheme == "sqlite":
        return _sqlite(uri, root, experiment)
    if scheme in DATABASE_SCHEMES:
        return Store(uri, experiment, root, (root / "mlruns" / "artifacts").as_uri())
    if (scheme in SERVER_SCHEMES and urllib.parse.urlsplit(uri).netloc) or scheme == "databricks":
        return Store(uri.rstrip("/"), experiment, root)
    todo = "give null (mlruns/mlflow.db), sqlite:///file.db, postgresql://..., or http://host:port"
    raise BadInput(KEY, masked(uri), "is neither a database nor a server", todo)


def _sqlite(uri: str, root: Path, experiment: str) -> Store:
    name, _, query = uri.partition("///")[2].partition("?")
    if not name or name == ":memory:":
        wrong = "names no file, and runs are read by other processes"
        raise BadInput(KEY, masked(uri), wrong, "give sqlite:///file.db")
    path = Path(os.path.abspath(root / urllib.parse.unquote(name)))
    if set(str(path)) & set("%?"):
        # SQLAlchemy decodes the address and MLflow does not: they would use two different places.
        wrong = "has a % or ? in its path, which MLflow cannot have"
        raise BadInput(KEY, masked(uri), wrong, "give sqlite:///another/path.db")
    address = f"sqlite:///{path}" + (f"?{query}" if query else "")
    return Store(address, experiment, root, (path.parent / "artifacts").as_uri(), path)


@whole()
def initialise(store: Store) -> str:
    """Make the database and the experiment where they are missing; returns the experiment's id.

    Called once, in the parent, before anything is launched: many processes that open a fresh store at once fail.
    Commands that start at the same time wait for each other. Raises BadInput where the store cannot be used; an
    existing file is never replaced.
    """
    experiment_id.cache_clear()
    with _alone(store):
        if store.file is not None:
            check_file(store.file, KEY, store.shown, "MLflow", "experiments")
        elif store.served:
            _check_server(store)
        elif not store.uri.startswith("databricks"):
            _check_database(store)
        with as_bad_input(store):
            return experiment_id(store)


@functools.lru_cache(maxsize=8)
def experiment_id(store: Store) -> str:
    """The id of the store's experiment, looked up once per process."""
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
        _follow_moved_folder(store.file, found.experiment_id, found.artifact_location, store.artifacts)
    return str(found.experiment_id)


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


def artifact(run_id: str, names: Sequence[str], folder: Path, uri: str | None = None) -> Path:
    """The first of `names` that a run has among its artifacts, downloaded into `folder`.

    uri: the store; None: MLFLOW_TRACKING_URI, else MLflow's own default. Raises what MLflow raises, and LookupError.
    """
    if uri is None:
        import mlflow

        uri = mlflow.get_tracking_uri()
    store = client(uri)
    there = {found.path for found in store.list_artifacts(run_id)}
    for name in names:
        if name in there:
            return Path(store.download_artifacts(run_id, name, str(folder)))
    raise LookupError(f"the run {run_id} has no {' and no '.join(names)}")


@contextlib.contextmanager
def as_bad_input(store: Store) -> Iterator[None]:
    """What MLflow says when it cannot use a store, as one line; of an older version's tables it says what to type."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError, sqlite3.Error) as error:
        todo = "check the address and the rights" if store.file is None else "check the file, the disk and the rights"
        raise BadInput(KEY, store.shown, f"cannot be used ({one_line(error)})", f"{todo}, or give another") from error


def check_file(file: Path, key: str, shown: str, program: str, table: str) -> None:
    """Raise BadInput for `key` unless the SQLite file, or a new one in its place, can be read and written.

    table: one that the program always makes: a file with tables but without it is another program's.
    """

    def bad(wrong: str, todo: str) -> BadInput:
        return BadInput(key, shown, wrong, todo)

    folder = file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        wrong = f"its folder {folder} cannot be made ({error.strerror})"
        raise bad(wrong, "give a path that can be written") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise bad(f"the folder {folder} is read-only", "make it writable, or give another path")
    if file.is_dir():
        raise bad("is a folder, not a database", "give the path of a file, such as sqlite:///mlruns/mlflow.db")
    if not file.exists() or file.stat().st_size == 0:
        return
    if not os.access(file, os.R_OK | os.W_OK):
        raise bad("the file is read-only", f"make it writable (chmod u+w {file}), or give another path")
    try:
        tables = _read_tables(file)
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorname", "")
        if code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
            raise bad(f"the file is read-only ({error})", "make it and its folder writable, or give another") from error
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            wrong = f"is locked by another program for more than {SQLITE_WAIT_S:g} s"
            raise bad(wrong, "end that program, or give another path") from error
        todo = f"move it away (mv {file} {file}.broken) or put a copy in its place; it was left as it is"
        raise bad(f"is corrupt or no SQLite database ({error})", todo) from error
    if table not in tables and not tables <= {"alembic_version"}:
        raise bad("is a database of another program", f"give {program} a file of its own")


def _read_tables(file: Path) -> set[str]:
    """Names of the tables, after a real claim to write (given back at once) and a check of the pages."""
    with contextlib.closing(sqlite3.connect(file, timeout=SQLITE_WAIT_S, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        if file.stat().st_size <= QUICK_CHECK_LIMIT_BYTES:
            state = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if state != "ok":
                raise sqlite3.DatabaseError(" ".join(str(state).split()))
        return {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _check_server(store: Store) -> None:
    """Raise BadInput unless something answers there. Whether it is MLflow shows with the first real request."""
    import requests  # as MLflow does: the same proxies, certificates and user names in the address

    try:
        requests.head(store.uri, timeout=SERVER_WAIT_S, allow_redirects=False)
    except requests.exceptions.SSLError:
        pass  # something answers, and MLflow has its own switch for certificates
    except (requests.exceptions.RequestException, ValueError) as error:
        todo = "start it (mlflow server --host ... --port ...), or give another address"
        raise BadInput(KEY, store.shown, f"does not answer ({type(error).__name__})", todo) from error


def _check_database(store: Store) -> None:
    """Raise BadInput unless the database opens. MLflow would try ten times in a minute and a half before it says so."""
    import sqlalchemy

    try:
        engine = sqlalchemy.create_engine(store.uri)
        engine.connect().close()
        engine.dispose()
    except ImportError as error:
        raise BadInput(KEY, store.shown, f"needs a driver ({one_line(error)})", "install it with pip") from error
    except (sqlalchemy.exc.SQLAlchemyError, ValueError) as error:
        reason = "the address is not well-formed" if isinstance(error, ValueError) else one_line(error)
        todo = "check address, name and password (%-encoded where it has / or @), and that the database runs"
        raise BadInput(KEY, store.shown, f"cannot be opened ({reason})", todo) from error


def _follow_moved_folder(file: Path, experiment: str, old: str, new: str | None) -> None:
    """Point the experiment at the artifacts beside its database, after the project's folder was moved or copied.

    MLflow stores absolute addresses and has no command for this. Earlier runs are changed too, but only where their
    artifacts are no longer at the old place.
    """
    if not (old.startswith("file:") and old.endswith("/artifacts")):
        return  # not our layout: a person chose that place
    still_there = os.path.exists(urllib.parse.unquote(urllib.parse.urlsplit(old).path))
    with contextlib.closing(sqlite3.connect(file, timeout=SQLITE_WAIT_S)) as connection, connection:
        connection.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (new, experiment))
        if not still_there:
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?)"
                " WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                (new, len(old) + 1, experiment, len(old) + 1, old + "/"),
            )


@contextlib.contextmanager
def _alone(store: Store) -> Iterator[None]:
    """One process at a time per SQLite file. A lock on the folder leaves no file behind and ends with its process."""
    with contextlib.ExitStack() as held:
        if store.file is not None:
            with contextlib.suppress(OSError):  # a folder whose fault `check_file` names, or one without locks
                store.file.parent.mkdir(parents=True, exist_ok=True)
                folder = os.open(store.file.parent, os.O_RDONLY)
                held.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield
