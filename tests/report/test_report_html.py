"""The HTML report: one file, nothing from elsewhere, and nothing of a user's that is taken for markup."""

from __future__ import annotations

import base64
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up import sweep_of_six, sweep_over_seeds, trial
from report_parts import built
from report_parts import written as write

from sweep.config.schema import BudgetConf
from sweep.report.data import Report
from sweep.report.html import html
from sweep.results import TrialResult

EVIL = "<script>alert('x')</script> <img src=x onerror=alert(1)> [a](javascript:alert(2)) &lt;b&gt; | `c` \"q\""
VOID = {"meta", "img", "br", "hr", "link", "input"}
ALLOWED_ATTRIBUTES = {
    *("charset", "content", "name", "http-equiv", "lang", "class", "style", "src", "alt", "data-label"),
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
    return write(sweep_over_seeds(), folder, BudgetConf(memory_mib=200))


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
    order = ["What is alive at the peak", "Peak memory against", "Training loss against"]
    places = [text.index(f"<figcaption>{words}") for words in order]
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
    results = [*sweep_of_six()[:2], trial("baseline", 200.0, fixed_id="f2", workload="vit")]
    report = write(results, tmp_path)
    articles = report.html_path.read_text(encoding="utf-8").split("<article>")[1:]
    assert [a.count("<img ") for a in articles] == [4, 2]
    assert {p.name for p in report.plots} >= {"pareto_1_gpt_tiny_on_cpu.png", "pareto_2_vit_on_cpu.png"}


def test_nothing_that_a_user_wrote_becomes_markup(tmp_path: Path) -> None:
    report = write(evil_sweep(), tmp_path, BudgetConf(memory_mib=200))
    page = Page(report.html_path.read_text(encoding="utf-8"))
    assert (page.open, page.wrong) == ([], [])
    assert "script" not in page.tags and "a" not in page.tags
    assert {name for _, name, _ in page.attributes} <= ALLOWED_ATTRIBUTES
    assert page.tags.count("img") == len(report.plots)
    # It is all there, as it was written.
    assert page.text.count("<script>alert('x')</script>") >= 8
    assert "[a](javascript:alert(2))" in page.text
    assert "&lt;b&gt;" in page.text


def test_long_tables_are_folded(tmp_path: Path) -> None:
    results = [trial("baseline", 300.0, 100.0)]
    results += [trial("micro_batch", 100.0 + i, 150.0 + i, name=f"number_{i}") for i in range(40)]
    assert "<summary>All 41 rows</summary>" in html(built(results))
    assert "All 6 rows" not in html(built(sweep_of_six()))


def test_the_first_card_has_peak_and_speed_of_every_trial_in_proportion_and_the_cap() -> None:
    text = html(built(sweep_of_six(), BudgetConf(memory_mib=156.2)))
    card = text.split('<div class="card accept">')[1].split("<h3>")[0]
    widths = [float(w) for w in re.findall(r'<b style="width:([\d.]+)%"', card)]
    assert len(widths) == 12
    assert widths[2] / widths[0] == pytest.approx(128.0 / 312.4, abs=2e-3)
    assert widths[3] / widths[1] == pytest.approx(118.2 / 131.0, abs=2e-3)
    caps = {float(x) for x in re.findall(r'<i style="left:([\d.]+)%"', card)}
    assert caps == {50.0}
    assert "<i style" not in html(built(sweep_of_six(), BudgetConf(memory_mib=16000)))


def test_where_nothing_ran_there_is_a_page_too(tmp_path: Path) -> None:
    report = write([trial("baseline", outcome="failed", error="no")], tmp_path, BudgetConf(), 10.0)
    page = Page(report.html_path.read_text(encoding="utf-8"))
    assert (page.open, page.wrong) == ([], [])
    assert "What filled the memory?" in page.text
