"""Stores that the tests of recording share: made once, and one MLflow server over one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tracking_parts as parts

from sweep.tracking import Store, initialise, store_location


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real MLflow database with our experiment and no run; tests write to copies of it."""
    store = store_location(None, tmp_path_factory.mktemp("empty"))
    initialise(store)
    assert store.file is not None
    return store.file


@pytest.fixture
def fresh(empty_database: Path, tmp_path: Path) -> Store:
    return parts.fresh(empty_database, tmp_path)


@pytest.fixture(scope="module")
def local(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return parts.fresh(empty_database, tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def served(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "server.db").write_bytes(empty_database.read_bytes())
    with parts.mlflow_server(folder) as uri:
        parts.wait_for(uri, folder)
        store = store_location(uri, folder, "served")
        initialise(store)
        yield store


@pytest.fixture(params=["sqlite", "server"])
def store(request: pytest.FixtureRequest) -> Store:
    found = request.getfixturevalue("local" if request.param == "sqlite" else "served")
    assert isinstance(found, Store)
    return found
