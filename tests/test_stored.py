"""Results that an earlier version has stored: they are read, and what is concluded from them stays.

tests/stored/ holds the files of a comparison (`strategy=glob(*)`), its prediction and a search (both under 60 MiB) on
gpt_tiny as they were written before results had a version, with the report.json of that time.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sweep.report.__main__ import main

ARCHIVE = Path(__file__).parent / "stored" / "before_the_rooms.tar.xz"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def trials(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in [report["baseline"], *report["candidates"]]}


@pytest.mark.parametrize("what", ["sweep", "predict", "search"])
def test_the_same_is_concluded(what: str, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweep.report.plots.draw", lambda report: [])
    before = json.loads((stored / what / "report.json").read_text())
    assert main([str(stored / what)]) == 0
    now = json.loads((stored / what / "report.json").read_text())
    for key in ("verdict", "preferred", "feasible", "evidence", "cap_mib", "cap_source", "baseline"):
        mine, theirs = (r[key]["name"] if key == "baseline" else r[key] for r in (now, before))
        assert mine == theirs, key
    found = trials(now)
    for name, old in trials(before).items():  # of a search, the best of that time
        new = found[name]
        for key in ("outcome", "evidence", "verdict", "reasons", "strategy", "grad_rel_err", "eval_loss"):
            assert new[key] == old[key], (name, key)
        for key in ("peak_mib", "saved_mib", "step_ms", "throughput_ratio"):
            assert new[key] == pytest.approx(old[key]), (name, key)


def test_a_result_of_a_later_version_is_left_out_with_a_line(
    stored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sweep.results import read_trials

    one = json.loads(next((stored / "sweep").glob("*/result.json")).read_text())
    (tmp_path / "result.json").write_text(json.dumps(one | {"version": 10**6}))
    assert read_trials(tmp_path) == []
    assert "newer program" in caplog.text
