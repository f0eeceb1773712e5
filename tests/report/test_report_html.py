"""The HTML report: one file, nothing from elsewhere, and nothing of a user's that is taken for markup."""

from __future__ import annotations

import base64
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up import sweep_of_six, sweep_over_seeds, trial

from sweep.config.schema import BudgetConf
from sweep.report import write_report
from sweep.report.data import Report, build
from sweep.report.html import html, tiles
from sweep.results import TrialResult

EVIL = "<script>alert('x')</script> <img src=x onerror=alert(1)> [a](javascript:alert(2)) &lt;b&gt; | `c` \"q\""
VOID = {"meta", "img", "br", "hr", "link", "input"}
ALLOWED_ATTRIBUTES = {
    *("charset", "content", "name", "http-equiv", "lang", "class", "style", "src", "alt"),
}


class Page(HTMLParser):
    """Tags that are open in the end or closed out of order, all attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def evil_sweep() -> list[TrialResult]:
    results = sweep_over_seeds()
    for r in results:
        r.workload, r.device = f"work {EVIL}", f"device {EVIL}"
    results[2].name = f"checkpoint {EVIL}"
    results[2].command = f"python train.py {EVIL}"
    return [*results, trial("offload", outcome="failed", name=f"off {EVIL}", error=EVIL, folder=EVIL)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("report")
    return write_report(sweep_over_seeds(), BudgetConf(memory_mib=200), None, folder, command="python train.py -m x")


def test_the_page_is_well_formed_and_needs_nothing_beside_it(written: Report) -> None:
    text = written.html_path.read_text(encoding="utf-8")
    page = Page(text)
    assert (page.open, page.wrong) == ([], [])
    assert not {"script", "link", "iframe", "object", "form"} & set(page.tags)
    assert {name for _, name, _ in page.attributes} <= ALLOWED_ATTRIBUTES
    assert "default-src 'none'" in text
    assert not re.search(r"""\b(?:src|href)=(?!["']data:)""", text)
    assert "url(" not in text and "@import" not in text


def test_every_picture_is_inside_and_in_its_place(written: Report) -> None:
    text = written.html_path.read_text(encoding="utf-8")
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert sorted(base64.b64decode(data) for data in found) == sorted(p.read_bytes() for p in written.plots)
    order = ["What is alive at the peak", "Peak memory against", "Training loss against", "The change of the peak"]
    places = [text.index(f"<figcaption>{words}") for words in [*order, "The change of the step time"]]
    assert places == sorted(places)
    assert places[-1] < text.index("Does it hold?")
    assert "More pictures" not in text


def test_a_picture_without_a_place_is_shown_all_the_same(written: Report, tmp_path: Path) -> None:
    extra = tmp_path / "another.png"
    extra.write_bytes(written.plots[0].read_bytes())
    shown = html(dataclasses.replace(written, plots=[*written.plots, extra, tmp_path / "gone.png"]))
    assert "More pictures" in shown
    assert shown.count("<img ") == len(written.plots) + 1


def test_pictures_of_two_workloads_lie_in_their_own_article(tmp_path: Path) -> None:
    results = sweep_over_seeds() + [dataclasses.replace(r, fixed_id="f2", workload="vit") for r in sweep_over_seeds()]
    report = write_report(results, BudgetConf(), None, tmp_path)
    articles = report.html_path.read_text(encoding="utf-8").split("<article>")[1:]
    assert [a.count("<img ") for a in articles] == [6, 6]


def test_nothing_that_a_user_wrote_becomes_markup(tmp_path: Path) -> None:
    report = write_report(evil_sweep(), BudgetConf(memory_mib=200), None, tmp_path, command=f"python {EVIL}")
    page = Page(report.html_path.read_text(encoding="utf-8"))
    assert (page.open, page.wrong) == ([], [])
    assert "script" not in page.tags and "a" not in page.tags
    assert {name for _, name, _ in page.attributes} <= ALLOWED_ATTRIBUTES
    assert page.tags.count("img") == len(report.plots)
    # It is all there, as it was written.
    assert page.text.count("<script>alert('x')</script>") >= 8
    assert "[a](javascript:alert(2))" in page.text
    assert "&lt;b&gt;" in page.text


def test_long_tables_are_folded_and_bars_are_few(tmp_path: Path) -> None:
    results = [trial("baseline", 300.0, 100.0)]
    results += [trial("micro_batch", 100.0 + i, 150.0 + i, name=f"number_{i}") for i in range(40)]
    text = html(build(results, BudgetConf(), None, tmp_path))
    assert "<summary>All 41 trials</summary>" in text
    assert text.count('<div class="row">') == 12
    assert "29 more in the tables" in text
    short = html(build(sweep_of_six(), BudgetConf(), None, tmp_path))
    assert "All 6 trials" not in short


def test_bars_are_in_proportion_and_the_cap_is_marked(tmp_path: Path) -> None:
    text = html(build(sweep_of_six(), BudgetConf(memory_mib=156.2), None, tmp_path))
    widths = [float(w) for w in re.findall(r'<b class="\w+" style="width:([\d.]+)%"', text)]
    assert widths[1] / widths[0] == pytest.approx(128.0 / 312.4, abs=1e-3)
    (cap, *others) = (float(x) for x in re.findall(r'<i style="left:([\d.]+)%"', text))
    assert cap / widths[0] == pytest.approx(0.5, abs=1e-3)
    assert set(others) == {cap}
    far = html(build(sweep_of_six(), BudgetConf(memory_mib=16000), None, tmp_path))
    assert "<i style" not in far


def test_the_summary_has_peak_saving_time_and_quality_with_their_evidence(written: Report) -> None:
    found = {label: (value, below) for label, value, below in tiles(written.sections[0])}
    assert found["peak of micro_batch"] == ("128.0 MiB", "of 200.0 MiB allowed (64 %), on this CPU")
    assert found["saved"] == ("184.4 MiB", "59 % of the baseline's peak, on this CPU")
    value, below = found["step"]
    assert value.endswith(" ms") and below.startswith("95 % interval ") and below.endswith("on this CPU")
    assert "held-out loss" in found


def test_the_summary_of_a_kept_baseline_says_what_could_be_saved(tmp_path: Path) -> None:
    section = build(sweep_of_six(), BudgetConf(), None, tmp_path).sections[0]
    found = {label: value for label, value, _ in tiles(section)}
    assert found["could be saved"] == "202.6 MiB"


@pytest.mark.parametrize("outcome", ["oom_device", "failed", "over_budget"])
def test_where_nothing_ran_there_is_a_page_too(outcome: str, tmp_path: Path) -> None:
    report = write_report([trial("baseline", outcome=outcome, error="no")], BudgetConf(), 10.0, tmp_path)
    page = Page(report.html_path.read_text(encoding="utf-8"))
    assert (page.open, page.wrong) == ([], [])
    assert "What was the pressure?" in page.text
