"""No secret of a store's address in anything that is stored or printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import sweep.config.addresses as module
import train
from sweep.cli import guarded
from sweep.config.addresses import conceal_word, masked, reveal, without_secrets
from sweep.config.check import typed

SECRET = "sEcrEt"


@pytest.fixture(autouse=True)
def _none_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.ENVIRONMENT, "{}")


@pytest.mark.parametrize(("address", "shown"), [
    ("http://me:sEcrEt@host:5000/base", "http://me:***@host:5000/base"),
    ("https://sEcrEt@host", "https://***@host"),
    ("http://:sEcrEt@host", "http://:***@host"),
    ("postgresql://me:s/E@c:r?E#t@host/db", "postgresql://me:***@host/db"),
    ("mysql+pymysql://me:s%2FEcr%40Et@host/db?charset=utf8", "mysql+pymysql://me:***@host/db?charset=utf8"),
    ("postgresql://host/db?user=me&password=sEcrEt&sslmode=require", "postgresql://host/db?user=***&password=***&sslmode=require"),
    ("http://host/?token=sEcrEt", "http://host/?token=***"),
    ("http://host?sEcrEt", "http://host?***"),
    ("mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3DsEcrEt", "mssql+pyodbc:///?odbc_connect=***"),
    ("me:sEcrEt@host", "me:***@host"),
    ("postgresql://me@host/db", "postgresql://me@host/db"),
    ("sqlite:////home/me@work/a:b.db?timeout=5", "sqlite:////home/me@work/a:b.db?timeout=5"),
    ("http://host:5000", "http://host:5000"),
])  # fmt: skip
def test_an_address_is_shown_without_its_secrets(address: str, shown: str) -> None:
    assert masked(address) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize("word", [
    "tracking.uri=http://me:sEcrEt@host",
    "++tracking.uri='http://me:s,Ecr Et@host'",
    'tracking.uri="postgresql://host/db?password=sEcrEt"',
    "tracking={uri: 'http://me:sEcrEt@host', enabled: true}",
    "hydra.sweeper.storage=postgresql://me:sEcrEt@host/db",
    "+hydra.sweeper.storage.url=postgresql://me:sEcrEt@host/db",
])  # fmt: skip
def test_a_word_gives_the_masked_address_and_the_store_the_whole(word: str) -> None:
    parser = OverridesParser.create()

    def address(of: str) -> str:
        value = parser.parse_override(of).value()
        return str(value["uri"] if isinstance(value, dict) else getattr(value, "text", value))

    concealed = conceal_word(word)
    assert "s" + "Ec" not in concealed
    assert address(concealed) == masked(address(word)) != address(word)
    assert reveal(address(concealed)) == address(word)
    assert conceal_word(concealed) == concealed


def test_other_words_and_interpolations_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_HOST", "host")
    for word in ("workload.data.path=s3://key:sEcrEt@bucket", "tracking.uri=${oc.env:A_URI}",
                 "tracking.uri='http://me:${oc.env:A_PASSWORD}@host'", "tracking.uri=null"):  # fmt: skip
        assert conceal_word(word) == word
    assert SECRET not in conceal_word("tracking.uri='http://me:sEcrEt@${oc.env:A_HOST}'")
    assert reveal("http://me:***@host") == "http://me:sEcrEt@host"


def test_texts_are_cleared_of_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    conceal_word("tracking.uri='http://me:p q/sEcrEt%21@host'")
    text = "no http://me:p q/sEcrEt%21@host, p q/sEcrEt! refused, and (mysql://you:other@there)"
    assert without_secrets(text) == "no http://me:***@host, *** refused, and (mysql://you:***@there)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    "given", ["word", pytest.param("environment", marks=pytest.mark.slow), pytest.param("file", marks=pytest.mark.slow)]
)
def test_no_file_that_a_command_leaves_has_a_secret(
    given: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = "http://me:sEcrEt@127.0.0.1:9"
    tracking, storage = whole, f"sqlite:///{tmp_path}/optuna.db?token=sEcrEt"
    monkeypatch.setattr("sweep.report.plots.draw", lambda report: [])
    opened = []

    def stand_in(address: str) -> str:
        opened.append(reveal(address))
        return f"sqlite:///{runs}/mlflow.db"

    monkeypatch.setattr("sweep.tracking.store.reveal", stand_in)
    words = [f"tracking.uri={tracking}", f'hydra.sweeper.storage="{storage}"']
    if given == "environment":
        monkeypatch.setenv("A_URI", tracking)
        monkeypatch.setenv("A_STORAGE", storage)
        words = ["tracking.uri=${oc.env:A_URI}", "hydra.sweeper.storage=${oc.env:A_STORAGE}"]
    elif given == "file":
        mine = tmp_path / "conf" / "mine" / "mine.yaml"
        mine.parent.mkdir(parents=True)
        hydra = f"hydra: {{sweeper: {{storage: '{storage}'}}}}"
        mine.write_text(f"# @package _global_\ntracking: {{uri: '{tracking}'}}\n{hydra}\n")
        words = [f"hydra.searchpath=['file://{tmp_path}/conf']", "+mine=mine"]
    small = ["workload.model.layers=2", "workload.model.d_model=32", "workload.seq_len=16", "workload.data.max_mib=1"]
    small += ["measure=quick", "measure.verify=false", "measure.steps=1", "tracking.system_metrics=false"]
    search = ["hydra/sweeper=budget", "strategy.micro_batch_size=choice(8,16)", f"hydra.sweep.dir={tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", ["train.py", *search, *small, *words])
    assert guarded(train.main) == 0
    printed = "".join(capfd.readouterr())
    assert SECRET not in printed
    assert set(opened) == {whole}
    left = [p for p in (*runs.rglob("*"), *tmp_path.rglob("*")) if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert left == ([tmp_path / "conf" / "mine" / "mine.yaml"] if given == "file" else [])
    stored = (tmp_path / "out" / "multirun.yaml").read_text()
    assert ("${oc.env:A_URI}" if given == "environment" else "http://me:***@127.0.0.1:9") in stored
    assert (tmp_path / "optuna.db").exists()


@pytest.mark.parametrize("word", [
    "tracking.uri=ftp://me:sEcrEt@host", "tracking.uri=postgresql://me:sE/cr@Et:x@host/db",
    "tracking.uri=me:sEcrEt@host", "tracking.uri=http://me:sEcrEt@127.0.0.1:9",
    "tracking.uri='http://me:sEcrEt@", "hydra.sweeper.storage=foo://me:sEcrEt@host",
    "hydra.sweeper.storage=postgresql://me:sEcrEt@127.0.0.1:1/x",
])  # fmt: skip
def test_the_line_about_a_bad_address_has_no_secret(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    search = ["search=budget", f"hydra.sweep.dir={tmp_path}"] if "sweeper" in word else [f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *search, word])
    assert guarded(train.main) == 2
    out, err = capfd.readouterr()
    assert "sE" not in out + err
    assert len(err.strip().splitlines()) == 1, err
    assert word.partition("=")[0] in err or "command line" in err


def test_mlflows_own_variables_stand_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {
        "workload": {"name": "w", "model": {"_target_": "m.M"}, "data": {"_target_": "m.D"}},
        "strategy": {"name": "baseline"}, "device": {"name": "cpu"},
    }  # fmt: skip
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hush@host:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    found = typed(base).tracking
    assert found.experiment == "theirs"
    assert found.uri is not None and "host:5000" in found.uri and "hush" not in found.uri
    said = typed({**base, "tracking": {"uri": "sqlite:///own.db", "experiment": "own"}}).tracking
    assert (said.uri, said.experiment) == ("sqlite:///own.db", "own")
