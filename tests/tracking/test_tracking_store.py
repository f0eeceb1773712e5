"""Where runs are recorded: addresses, what can be wrong with them, and real stores opened by many processes."""

from __future__ import annotations

import contextlib
import http.server
import multiprocessing
import os
import shutil
import sqlite3
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  imported here, so that the forks below need not
import pytest
import tracking_parts as parts
from mlflow.tracking import MlflowClient

from sweep.errors import BadInput
from sweep.tracking import initialise, open_sweep, store_location
from sweep.tracking import store as module
from sweep.tracking.store import Store, client
from sweep.tracking.values import one_line

NOBODY = 65534
FORK = multiprocessing.get_context("fork")  # MLflow is imported already: eight fresh imports would take a minute


def in_child(action: Callable[..., Any], *arguments: Any, user: int | None = None) -> Any:
    """Run `action` in a forked process, as another user if asked; its result, or its error as one line."""
    receive, send = FORK.Pipe(duplex=False)

    def run() -> None:
        try:
            if user is not None:
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            send.send((True, action(*arguments)))
        except BaseException as error:
            traceback.print_exc()
            send.send((False, str(error)))

    process = FORK.Process(target=run)
    process.start()
    send.close()
    good, value = receive.recv()
    process.join()
    assert good or user is not None, value
    return value


def refusal(store: Store) -> str:
    """The one line that `initialise` raises. An existing file is left as it is."""
    before = store.file.read_bytes() if store.file is not None and store.file.is_file() else None
    with pytest.raises(BadInput) as caught:
        initialise(store)
    text = str(caught.value)
    assert text.startswith("tracking.uri=")
    assert len(text.splitlines()) == 1
    assert before is None or (store.file is not None and store.file.read_bytes() == before)
    return text


# Addresses


def test_default_is_absolute_whatever_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    first = store_location(None, Path("project"))
    assert first.uri == f"sqlite:///{tmp_path}/project/mlruns/mlflow.db"
    assert first.artifacts == f"file://{tmp_path}/project/mlruns/artifacts"
    monkeypatch.chdir("/")
    assert store_location(None, tmp_path / "project") == first
    assert list((tmp_path / "project").iterdir()) == []  # asking makes nothing


def test_given_addresses(tmp_path: Path) -> None:
    relative = store_location("sqlite:///data/runs.db", tmp_path)
    assert relative.file == tmp_path / "data" / "runs.db"
    assert (relative.uri, relative.artifacts) == (f"sqlite:///{relative.file}", f"file://{tmp_path}/data/artifacts")
    assert store_location("sqlite:////abs/my%20runs.db", tmp_path).file == Path("/abs/my runs.db")
    server = store_location("http://host:5000/", tmp_path)
    assert (server.uri, server.artifacts, server.file) == ("http://host:5000", None, None)
    database = store_location("postgresql+psycopg2://me:secret@host/db", tmp_path)
    assert database.artifacts == f"file://{tmp_path}/mlruns/artifacts"
    assert database.shown == "postgresql+psycopg2://me:***@host/db"


@pytest.mark.parametrize(
    "uri", ["mlruns", "file:///tmp/mlruns", "http://", "", "sqlite://", "sqlite:///:memory:", "sqlite:///100%25/a.db"]
)
def test_refused_addresses(uri: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        store_location(uri, tmp_path)
    assert caught.value.key == "tracking.uri"


def test_a_refused_name_of_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tracking\.experiment"):
        store_location(None, tmp_path, "  ")


# Opening


def test_initialise_makes_database_and_experiment_and_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "my project #1" / "mlruns"
    elsewhere.mkdir()
    place.mkdir(parents=True)
    (place / "mlflow.db").touch()  # an empty file becomes a database
    monkeypatch.chdir(elsewhere)
    store = store_location(None, tmp_path / "my project #1")
    experiment = initialise(store)
    assert initialise(store) == experiment  # again is fine
    found = MlflowClient(store.uri).get_experiment(experiment)
    assert (found.name, found.artifact_location) == ("memory-strategies", store.artifacts)
    assert list(elsewhere.iterdir()) == []
    assert [path.name for path in place.iterdir()] == ["mlflow.db"]
    assert capfd.readouterr() == ("", "")  # none of MLflow's or alembic's log lines


def test_corrupt_files_are_named(fresh: Store, tmp_path: Path) -> None:
    (tmp_path / "garbage.db").write_bytes(b"not a database at all" * 100)
    assert "corrupt or no SQLite database" in refusal(store_location("sqlite:///garbage.db", tmp_path))
    assert fresh.file is not None
    good = fresh.file.read_bytes()
    fresh.file.write_bytes(good[: len(good) // 2])
    assert "move it away" in refusal(fresh)
    middle = len(good) // 2 // 4096 * 4096
    fresh.file.write_bytes(good[:middle] + b"\xab" * 40960 + good[middle + 40960 :])
    assert "corrupt" in refusal(fresh)


def test_things_in_the_way(fresh: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.db").mkdir()
    assert "is a folder" in refusal(store_location("sqlite:///folder.db", tmp_path))
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refusal(store_location("sqlite:///file/runs.db", tmp_path))
    with contextlib.closing(sqlite3.connect(tmp_path / "optuna.db")) as connection, connection:
        connection.execute("CREATE TABLE studies (id INTEGER)")
    assert "another program" in refusal(store_location("sqlite:///optuna.db", tmp_path))

    assert fresh.file is not None
    monkeypatch.setattr(module, "SQLITE_WAIT_S", 0.2)
    with contextlib.closing(sqlite3.connect(fresh.file, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        assert "locked" in refusal(fresh)
    with contextlib.closing(sqlite3.connect(fresh.file)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    assert "mlflow db upgrade" in refusal(fresh)  # MLflow says itself what to type for tables of another version


@pytest.mark.parametrize("believe_access", [True, False])
@pytest.mark.parametrize("protect", ["file", "folder"])
def test_read_only(
    protect: str, believe_access: bool, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an ordinary user, for whom rights count; and where only the write itself tells (as on some network disks)."""
    user = NOBODY if os.geteuid() == 0 else None
    if user is None and protect == "folder" and not believe_access:
        pytest.skip("SQLite tells only with the first real write")
    with tempfile.TemporaryDirectory() as folder:  # not under tmp_path, which only its owner may enter
        os.chmod(folder, 0o777)
        store = parts.fresh(empty_database, Path(folder))
        assert store.file is not None
        of_file, of_folder = {"file": (0o444, 0o777), "folder": (0o666, 0o555)}[protect]
        store.file.chmod(of_file)
        store.file.parent.chmod(of_folder)
        before = store.file.read_bytes()
        if not believe_access:
            monkeypatch.setattr(module.os, "access", lambda *_: True)
        text = str(in_child(initialise_and_write, store, user=user or os.geteuid()))
        assert text.startswith("tracking.uri=")
        assert len(text.splitlines()) == 1
        assert "read-only" in text or "readonly" in text or "unable to open" in text
        assert store.file.read_bytes() == before


def initialise_and_write(store: Store) -> None:
    initialise(store)
    open_sweep(store, "sweep")


def test_a_deleted_experiment_is_named(fresh: Store) -> None:
    client(fresh.uri).delete_experiment(initialise(fresh))
    with pytest.raises(BadInput, match=r"tracking\.experiment=memory-strategies: was deleted"):
        initialise(fresh)


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "copied"])
def test_the_projects_folder_moves(moved: bool, tmp_path: Path, empty_database: Path) -> None:
    old = parts.fresh(empty_database, tmp_path / "old place")
    in_child(record_one, old)
    (shutil.move if moved else shutil.copytree)(str(tmp_path / "old place"), str(tmp_path / "new place"))
    new = store_location(None, tmp_path / "new place")
    record_one(new)
    runs = client(new.uri).search_runs([initialise(new)], order_by=["attributes.start_time ASC"])
    first, second = (run.info.artifact_uri for run in runs)
    assert "new%20place" in second
    assert "new%20place" in first if moved else "old%20place" in first
    for run in runs:
        assert "result.json" in parts.artifacts(new, run.info.run_id)


def record_one(store: Store) -> None:
    initialise(store)
    parts.logged(store)


# Servers and other databases


@contextlib.contextmanager
def other_server() -> Iterator[str]:
    """One that answers, and is not MLflow."""
    handler = type("Handler", (http.server.BaseHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_servers_and_databases_that_cannot_be_used(tmp_path: Path) -> None:
    nowhere = f"me:secret@127.0.0.1:{parts.free_port()}"
    text = refusal(store_location(f"http://{nowhere}", tmp_path))
    assert "does not answer" in text
    assert "secret" not in text
    # Without a driver this says so; with one, that nothing listens. Either way at once, and without the password.
    text = refusal(store_location(f"postgresql://{nowhere}/db", tmp_path))
    assert "needs a driver" in text or "cannot be opened" in text
    assert "secret" not in text
    with other_server() as address:
        assert "cannot be used" in refusal(store_location(address, tmp_path))


# Many processes


def at_once(action: Callable[[Store, int], None], store: Store, number: int = 8) -> None:
    """Run `action` in that many processes that start together; each must end well."""
    barrier, errors = FORK.Barrier(number), FORK.SimpleQueue()

    def run(index: int) -> None:
        barrier.wait(60)
        try:
            action(store, index)
        except BaseException as error:
            errors.put(f"{type(error).__name__}: {one_line(error)}")
            raise

    processes = [FORK.Process(target=run, args=(index,)) for index in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert errors.empty(), errors.get()
    assert [process.exitcode for process in processes] == [0] * number


def test_processes_initialise_and_eight_write_at_once(tmp_path: Path) -> None:
    store = store_location(None, tmp_path)
    at_once(lambda store, _: initialise(store) and None, store, 3)
    at_once(lambda store, index: parts.logged(store, name=f"trial {index}") and None, store)
    (experiment,) = (e for e in client(store.uri).search_experiments() if e.name == "memory-strategies")
    runs = client(store.uri).search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == [f"trial {index}" for index in range(8)]
    for run in runs:
        assert (run.info.status, run.data.tags["outcome"]) == ("FINISHED", "ok")
        assert run.data.metrics["time/step_ms"] == 50.0
        assert run.data.params["strategy.checkpoint.every_k"] == "2"
