"""Whether an MLflow store can be used, found out before anything is launched: each fault is one line with what to do.

Nothing here changes a person's data, but for a migration, which copies the file first.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.addresses import without_secrets
from sweep.errors import BadInput
from sweep.tracking_values import one_line

if TYPE_CHECKING:
    from sweep.tracking_store import Store

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
