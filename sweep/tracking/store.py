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
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.config.addresses import masked, reveal, without_secrets
from sweep.errors import BadInput
from sweep.interrupts import whole
from sweep.tracking.values import one_line

KEY = "tracking.uri"
SQLITE_WAIT_S = 20.0  # as long as MLflow itself waits for another writer
SERVER_WAIT_S = 10.0
#: Checking every page reads the whole file; a larger one is checked where it is used.
QUICK_CHECK_LIMIT_BYTES = 512 * 2**20


def check_file(store: Store) -> None:
    """Raise BadInput unless the SQLite file, or a new one in its place, can be read and written by MLflow."""
    assert store.file is not None
    path, folder = store.file, store.file.parent

    def bad(wrong: str, todo: str) -> BadInput:
        return BadInput(KEY, store.shown, wrong, todo)

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        wrong = f"its folder {folder} cannot be made ({error.strerror})"
        raise bad(wrong, "give a path that can be written") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise bad(f"the folder {folder} is read-only", "make it writable, or give another path")
    if path.is_dir():
        raise bad("is a folder, not a database", "give the path of a file, such as sqlite:///mlruns/mlflow.db")
    if not path.exists() or path.stat().st_size == 0:
        return
    if not os.access(path, os.R_OK | os.W_OK):
        raise bad("the file is read-only", f"make it writable (chmod u+w {path}), or give another path")
    try:
        tables = _read_tables(path)
    except sqlite3.Error as error:
        words = str(error)
        if "readonly" in words or "unable to open" in words:
            raise bad(f"the file is read-only ({words})", "make it and its folder writable, or give another") from error
        if "locked" in words:
            wrong = f"is locked by another program for more than {SQLITE_WAIT_S:g} s"
            raise bad(wrong, "end that program, or give another path") from error
        todo = f"move it away (mv {path} {path}.broken) or put a copy in its place; it was left as it is"
        raise bad(f"is corrupt or no SQLite database ({words})", todo) from error
    if tables and "experiments" not in tables and not tables <= {"alembic_version"}:
        raise bad("is a database of another program", "give MLflow a file of its own")


def check_server(store: Store) -> None:
    """Raise BadInput unless something answers there. Whether it is MLflow shows with the first real request."""
    import requests  # as MLflow does: the same proxies, certificates and user names in the address

    try:
        requests.head(store.uri, timeout=SERVER_WAIT_S, allow_redirects=False)
    except requests.exceptions.SSLError:
        pass  # something answers, and MLflow has its own switch for certificates
    except (requests.exceptions.RequestException, ValueError) as error:
        said = one_line(error)
        reason = said if store.shown == store.uri else type(error).__name__  # it may hold parts of a secret
        for cause in ("Connection refused", "Name or service not known", "timed out", "No route to host"):
            reason = cause if cause in said else reason
        todo = "start it (mlflow server --host ... --port ...), or give another address"
        raise BadInput(KEY, store.shown, f"does not answer ({reason})", todo) from error


def check_database(store: Store) -> None:
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


def migrate(store: Store) -> None:
    """Bring an older MLflow's file to this version's tables, a copy beside it; refuse a newer one's."""
    assert store.file is not None
    version = _schema_version(store.file)
    if version is None:
        return
    import mlflow
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    scripts = ScriptDirectory(str(Path(mlflow.__file__).parent / "store" / "db_migrations"))
    if version == scripts.get_current_head():
        return
    try:
        scripts.get_revision(version)
    except CommandError as error:
        wrong = f"was written by a newer MLflow than {mlflow.__version__} (schema {version})"
        raise BadInput(KEY, store.shown, wrong, "install that MLflow, or give another path") from error
    copy = store.file.with_name(f"{store.file.name}.{version}.bak")
    if not copy.exists():
        with contextlib.closing(sqlite3.connect(store.file)) as old, contextlib.closing(sqlite3.connect(copy)) as new:
            old.backup(new)
    command = [sys.executable, "-m", "mlflow", "db", "upgrade", store.uri]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        said = without_secrets(said)
        raise BadInput(KEY, store.shown, f"cannot be migrated ({said})", f"give another path; the old file is {copy}")


def follow_moved_folder(path: Path, experiment: str, old: str, new: str) -> None:
    """Point the experiment at the artifacts beside its database, after the project's folder was moved or copied.

    MLflow stores absolute addresses and has no command for this. Earlier runs are changed too, but only where their
    artifacts are no longer at the old place.
    """
    if not (old.startswith("file:") and old.endswith("/artifacts")):
        return  # not our layout: a person chose that place
    still_there = os.path.exists(urllib.parse.unquote(urllib.parse.urlsplit(old).path))
    with contextlib.closing(sqlite3.connect(path, timeout=SQLITE_WAIT_S)) as connection, connection:
        connection.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (new, experiment))
        if not still_there:
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?)"
                " WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                (new, len(old) + 1, experiment, len(old) + 1, old + "/"),
            )


def _read_tables(path: Path) -> set[str]:
    """Names of the tables, after a real claim to write (given back at once) and a check of the pages."""
    connection = sqlite3.connect(path, timeout=SQLITE_WAIT_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        if path.stat().st_size <= QUICK_CHECK_LIMIT_BYTES:
            state = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if state != "ok":
                raise sqlite3.DatabaseError(" ".join(str(state).split()))
        return {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    finally:
        connection.close()


def _schema_version(path: Path) -> str | None:
    if not path.exists():
        return None
    with contextlib.closing(sqlite3.connect(path, timeout=SQLITE_WAIT_S)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError:
            return None
    return str(row[0]) if row else None


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
        raise BadInput(
            KEY, masked(uri), "names no file, and runs are read by other processes", "give sqlite:///file.db"
        )
    path = Path(os.path.abspath(root / urllib.parse.unquote(name)))
    if set(str(path)) & set("%?"):
        # SQLAlchemy decodes the address and MLflow does not: they would use two different places.
        raise BadInput(
            KEY, masked(uri), "has a % or ? in its path, which MLflow cannot have", "give sqlite:///another/path.db"
        )
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
