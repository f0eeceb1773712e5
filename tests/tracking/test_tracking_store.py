"""Where runs are recorded: addresses, what can be wrong with them, and real stores opened by many processes."""

from __future__ import annotations

import contextlib
import http.server
import multiprocessing
import os
import shutil
import sqlite3
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
from sweep.tracking import initialise, open_sweep, start_trial, store_location
from sweep.tracking import store as tracking_check
from sweep.tracking.store import Store, client
from sweep.tracking.values import knobs_of, one_line, params_of

NOBODY = 65534
FORK = multiprocessing.get_context("fork")  # MLflow is imported already: eight fresh imports would take a minute


@pytest.fixture(scope="module")
def old_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, small MLflow database, made once; tests change copies of it."""
    store = store_location(None, tmp_path_factory.mktemp("old"))
    in_child(initialise, store)
    assert store.file is not None
    return store.file


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
    """The one line that `initialise` raises."""
    with pytest.raises(BadInput) as caught:
        initialise(store)
    text = str(caught.value)
    assert text.startswith("tracking.uri=")
    assert len(text.splitlines()) == 1
    return text


def copied(old_database: Path, root: Path) -> Store:
    store = store_location(None, root)
    assert store.file is not None
    store.file.parent.mkdir(parents=True)
    shutil.copy(old_database, store.file)
    return store


# Addresses


def test_default_is_absolute_whatever_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    first = store_location(None, Path("project"))
    assert first.uri == f"sqlite:///{tmp_path}/project/mlruns/mlflow.db"
    assert first.artifacts == f"file://{tmp_path}/project/mlruns/artifacts"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store_location(None, tmp_path / "project") == first
    assert list((tmp_path / "project").iterdir()) == []  # asking makes nothing


def test_given_addresses(tmp_path: Path) -> None:
    relative = store_location("sqlite:///data/runs.db", tmp_path)
    assert relative.file == tmp_path / "data" / "runs.db"
    assert relative.uri == f"sqlite:///{tmp_path}/data/runs.db"
    assert relative.artifacts == f"file://{tmp_path}/data/artifacts"
    assert store_location("sqlite:////abs/my%20runs.db", tmp_path).file == Path("/abs/my runs.db")
    server = store_location("http://host:5000/", tmp_path)
    assert (server.uri, server.artifacts, server.file) == ("http://host:5000", None, None)
    database = store_location("postgresql+psycopg2://me:secret@host/db", tmp_path)
    assert database.artifacts == f"file://{tmp_path}/mlruns/artifacts"
    assert database.shown == "postgresql+psycopg2://me:***@host/db"


@pytest.mark.parametrize(
    "uri", ["mlruns", "./mlruns", "file:///tmp/mlruns", "http://", "", "sqlite://", "sqlite:///:memory:", "ftp://host"]
)
def test_refused_addresses(uri: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        store_location(uri, tmp_path)
    assert caught.value.key == "tracking.uri"


def test_refused_folder_and_experiment_names(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has a % or"):
        store_location(None, tmp_path / "100%")
    with pytest.raises(BadInput, match=r"tracking\.experiment"):
        store_location(None, tmp_path, "  ")


# Opening


def test_initialise_makes_database_and_experiment_and_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    store = store_location(None, tmp_path / "my project #1")
    experiment = initialise(store)
    assert initialise(store) == experiment  # again is fine
    found = MlflowClient(store.uri).get_experiment(experiment)
    assert (found.name, found.artifact_location) == ("memory-strategies", store.artifacts)
    assert list(elsewhere.iterdir()) == []
    assert [path.name for path in (tmp_path / "my project #1" / "mlruns").iterdir()] == ["mlflow.db"]
    assert capfd.readouterr() == ("", "")  # none of MLflow's or alembic's log lines


def test_a_corrupt_file_is_named_and_left_as_it_is(tmp_path: Path, old_database: Path) -> None:
    garbage = store_location("sqlite:///garbage.db", tmp_path)
    assert garbage.file is not None
    garbage.file.write_bytes(b"not a database at all" * 100)
    before = garbage.file.read_bytes()
    assert "corrupt or no SQLite database" in refusal(garbage)
    assert garbage.file.read_bytes() == before

    torn = copied(old_database, tmp_path)
    assert torn.file is not None
    half = torn.file.read_bytes()[: torn.file.stat().st_size // 2]
    torn.file.write_bytes(half)
    assert "move it away" in refusal(torn)
    assert torn.file.read_bytes() == half


def test_a_damaged_page_in_the_middle_is_found(tmp_path: Path, old_database: Path) -> None:
    store = copied(old_database, tmp_path)
    assert store.file is not None
    content = bytearray(store.file.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 40960] = b"\xab" * 40960
    store.file.write_bytes(content)
    assert "corrupt" in refusal(store)


def test_things_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    assert "is a folder" in refusal(store_location("sqlite:///folder.db", tmp_path))
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refusal(store_location("sqlite:///file/runs.db", tmp_path))
    other = tmp_path / "optuna.db"
    with contextlib.closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE studies (id INTEGER)")
    before = other.read_bytes()
    assert "another program" in refusal(store_location("sqlite:///optuna.db", tmp_path))
    assert other.read_bytes() == before


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    (tmp_path / "runs.db").touch()
    assert initialise(store_location("sqlite:///runs.db", tmp_path))


@pytest.mark.skipif(os.name != "posix", reason="POSIX rights")
@pytest.mark.parametrize("believe_access", [True, False])
@pytest.mark.parametrize("protect", ["file", "folder"])
def test_read_only(
    protect: str, believe_access: bool, old_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an ordinary user, for whom rights count; and where only the write itself tells (as on some network disks)."""
    user = NOBODY if os.geteuid() == 0 else None
    if user is None and protect == "folder" and not believe_access:
        pytest.skip("SQLite tells only with the first real write")
    # Not under tmp_path, which only its owner may enter.
    with open_folder() as folder:
        store = copied(old_database, folder)
        assert store.file is not None
        mode = {"file": (0o444, 0o777), "folder": (0o666, 0o555)}[protect]
        store.file.chmod(mode[0])
        store.file.parent.chmod(mode[1])
        before = store.file.read_bytes()
        if not believe_access:
            monkeypatch.setattr(tracking_check.os, "access", lambda *_: True)
        text = str(in_child(initialise_and_write, store, user=user or os.geteuid()))
        assert text.startswith("tracking.uri=")
        assert len(text.splitlines()) == 1
        assert "read-only" in text or "readonly" in text or "unable to open" in text
        assert store.file.read_bytes() == before


def initialise_and_write(store: Store) -> None:
    initialise(store)
    open_sweep(store, "sweep")


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def test_a_file_that_another_program_holds(tmp_path: Path, old_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_check, "SQLITE_WAIT_S", 0.2)
    store = copied(old_database, tmp_path)
    assert store.file is not None
    with contextlib.closing(sqlite3.connect(store.file, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        assert "locked" in refusal(store)
    assert initialise(store)


def test_tables_of_another_version_of_mlflow_are_left_as_they_are(tmp_path: Path, old_database: Path) -> None:
    other = copied(old_database, tmp_path)
    assert other.file is not None
    with contextlib.closing(sqlite3.connect(other.file)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    before = other.file.read_bytes()
    assert "mlflow db upgrade" in refusal(other)
    assert other.file.read_bytes() == before


def test_a_deleted_experiment_is_named(tmp_path: Path, old_database: Path) -> None:
    store = copied(old_database, tmp_path)
    client(store.uri).delete_experiment(initialise(store))
    with pytest.raises(BadInput, match=r"tracking\.experiment=memory-strategies: was deleted"):
        initialise(store)


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "copied"])
def test_the_projects_folder_moves(moved: bool, tmp_path: Path, old_database: Path) -> None:
    old = copied(old_database, tmp_path / "old place")
    in_child(record_one, old)
    (shutil.move if moved else shutil.copytree)(str(tmp_path / "old place"), str(tmp_path / "new place"))
    new = store_location(None, tmp_path / "new place")
    initialise(new)
    record_one(new)
    runs = client(new.uri).search_runs([initialise(new)], order_by=["attributes.start_time ASC"])
    assert len(runs) == 2
    first, second = (run.info.artifact_uri for run in runs)
    assert "new%20place" in second
    assert "new%20place" in first if moved else "old%20place" in first
    for run in runs:
        assert "result.json" in [item.path for item in client(new.uri).list_artifacts(run.info.run_id)]


def record_one(store: Store) -> None:
    initialise(store)
    with start_trial(store, None, parts.planned(), system_metrics=False) as run:
        run.log(parts.finished())


# Servers and other databases


def test_a_server_that_is_not_there_and_a_password_that_is_not_shown(tmp_path: Path) -> None:
    text = refusal(store_location(f"http://me:secret@127.0.0.1:{parts.free_port()}", tmp_path))
    assert "does not answer (Connection refused)" in text
    assert "secret" not in text


def test_a_server_that_is_not_mlflow(tmp_path: Path) -> None:
    handler = type("Handler", (http.server.BaseHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = refusal(store_location(f"http://127.0.0.1:{server.server_port}", tmp_path))
        server.shutdown()
    assert "cannot be used" in text


def test_a_database_that_cannot_be_opened(tmp_path: Path) -> None:
    # Without a driver this says so; with one, that nothing listens. Either way at once, and without the password.
    text = refusal(store_location(f"postgresql://me:secret@127.0.0.1:{parts.free_port()}/db", tmp_path))
    assert "needs a driver" in text or "cannot be opened" in text
    assert "secret" not in text


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


def initialise_fresh(store: Store, index: int) -> None:
    initialise(store)


def write_trials(store: Store, index: int) -> None:
    for number in range(2):
        with start_trial(store, None, parts.planned(name=f"trial {index} {number}"), system_metrics=False) as run:
            run.log(parts.finished(name=f"trial {index} {number}"))
        assert run.run_id is not None


def test_processes_initialise_and_eight_write_at_once(tmp_path: Path) -> None:
    store = store_location(None, tmp_path)
    at_once(initialise_fresh, store, 3)
    at_once(write_trials, store)
    (experiment,) = (e for e in client(store.uri).search_experiments() if e.name == "memory-strategies")
    runs = client(store.uri).search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == sorted(f"trial {i} {n}" for i in range(8) for n in range(2))
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.tags["outcome"] == "ok"
        assert run.data.metrics["time/step_ms"] == 50.0
        assert run.data.params == params_of(parts.config()) | knobs_of(parts.config())
