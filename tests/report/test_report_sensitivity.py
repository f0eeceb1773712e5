"""`python -m sweep.report <folder> --memory-mib ...`: what is asked, shown and written, and that sweeps say so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import prediction, sweep_of_six, trial
from matplotlib.patches import Rectangle
from report_parts import printed_blocks

from sweep.config.schema import BudgetConf, plain
from sweep.decide.budgets import LOSS_RATIO, MEMORY, THROUGHPUT_RATIO, Sensitivity
from sweep.decide.verdict import conclude
from sweep.report import judge, write_report
from sweep.report.__main__ import main
from sweep.report.blocks import Table
from sweep.report.budgets import Asked, Survey, parse_values, survey, survey_blocks
from sweep.report.data import build
from sweep.report.markdown import render
from sweep.report.plots import draw_surveys, regions
from sweep.results import Outcome, TrialResult, read_trial, write_json

ROOT = Path(__file__).resolve().parents[2]
ASKED: Asked = {"memory_mib": [60.0, 115.0, 150.0, 250.0, None], "min_throughput_ratio": [None, 0.7, 0.8, 0.95]}


def stored(folder: Path, results: list[TrialResult], budget: BudgetConf | None = None) -> Path:
    """A sweep's folder as a sweep leaves it."""
    for i, result in enumerate(results):
        result.folder, result.mlflow_run_id = str(folder / f"{i}_{result.strategy}"), None
        if budget is not None:
            result.budgets = [plain(budget)]
        write_json(result, folder / f"{i}_{result.strategy}" / "result.json")
    judged = judge(results, budget or BudgetConf(), results[0].capacity_mib)
    write_json(build(judged, folder).data(), folder / "report.json")
    return folder


def surveyed(
    results: list[TrialResult], budget: BudgetConf | None, capacity: float | None, asked: Asked
) -> Survey:
    (found,) = survey(judge(results, budget or BudgetConf(), capacity), asked)
    return found


def shown(found: Survey, width: int = 120, encoding: str = "utf-8") -> str:
    return printed_blocks(survey_blocks(found), width, encoding)


def predicted_sweep() -> list[TrialResult]:
    found = [trial(r.name, 1.0, mode="predict", evidence="predicted") for r in sweep_of_six()]
    for r, like in zip(found, sweep_of_six()):
        r.prediction = prediction(like.peak_mib or 0.0)
    return found


def searched() -> list[TrialResult]:
    """A search under a cap of 120 MiB on a device of 400: two candidates refused by the cap, one out of memory."""
    found = sweep_of_six("measured")
    for name, peak in (("refused a", 140.0), ("refused b", 180.0)):
        p = prediction(peak, fits=False, headroom_mib=400 - peak)
        found.append(trial("offload", outcome="over_budget", evidence="predicted", name=name, prediction=p))
    found.append(trial("micro_batch", outcome="oom_device", evidence="measured", name="too large"))
    found[-1].prediction = prediction(450.0, fits=False)
    for r in found:
        r.config["budget"]["memory_mib"], r.capacity_mib = 120.0, 400.0
    return found


# ---- what is asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8000", [8000.0]),
        ("16000,8000, 12000,8000", [8000.0, 12000.0, 16000.0]),
        ("100:200:50", [100.0, 150.0, 200.0]),
        ("100:190:50", [100.0, 150.0]),
        ("none,100", [100.0, None]),
        ("1e3,100:150:25", [100.0, 125.0, 150.0, 1000.0]),
    ],
)
def test_values_and_ranges_of_a_cap(text: str, expected: list[float | None]) -> None:
    assert parse_values(MEMORY, text) == expected


def test_ranges_are_decimal_and_an_unset_floor_comes_first() -> None:
    assert parse_values(THROUGHPUT_RATIO, "0.7:0.9:0.1,none") == [None, 0.7, 0.8, 0.9]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--memory-mib=abc", "is no number; give numbers, such as 8000:16000:2000, or none"),
        ("--memory-mib=100,,200", "is no number"),
        ("--memory-mib=0", "is not above zero"),
        ("--memory-mib=nan", "is not finite"),
        ("--memory-mib=1e999", "is not finite"),
        ("--memory-mib=1:2", "is no range; write START:STOP:STEP"),
        ("--memory-mib=5:1:1", "ends before it starts"),
        ("--memory-mib=1:5:0", "has a step that is not above zero"),
        ("--memory-mib=1:100000:1", "more than 60 values"),
        ("--min-throughput-ratio=-0.5", "is not above zero"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_and_exit_code_2(
    argument: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), argument]) == 2
    said = capsys.readouterr().err
    assert said.startswith(argument.partition("=")[0]) and words in said
    assert said.count("\n") == 1


# ---- what is concluded


def test_every_cell_is_what_conclude_says() -> None:
    results, budget = sweep_of_six(), BudgetConf(memory_mib=150, min_saving_mib=1.0)
    found = surveyed(results, budget, 400.0, {**ASKED, "max_eval_loss_ratio": [1.0, None]})
    assert found.keys == ["memory_mib", "min_throughput_ratio", "max_eval_loss_ratio"]
    assert len(found.cells) == 5 * 4 * 2
    for cell in found.cells:
        expected = conclude(results, replace(budget, **cell.values), 400.0)  # type: ignore[arg-type]
        assert (cell.answer.verdict, cell.answer.preferred) == (expected.verdict, expected.preferred)
        assert cell.cap_mib == expected.cap_mib


def test_cells_say_what_was_never_run_and_what_this_device_does_not_have() -> None:
    asked: Asked = {"memory_mib": [120.0, 150.0, 400.0, 500.0, None]}
    found = surveyed(searched(), BudgetConf(memory_mib=120), 400.0, asked)
    cells = {c.values["memory_mib"]: c for c in found.cells}
    assert cells[120.0].not_known == []
    assert cells[150.0].not_known == ["refused a"]
    assert cells[400.0].not_known == cells[None].not_known == ["refused a", "refused b"]
    assert cells[500.0].not_known == ["refused a", "refused b", "too large"]
    assert [c.beyond_device for c in cells.values()] == [False, False, False, True, False]
    text = shown(found)
    assert re.search(r"^ *150.0 +micro_batch \? ", text, re.M)
    assert re.search(r"^ *500.0 +baseline \? \^ ", text, re.M)
    assert "up to 3 candidates that this cap might admit were never run" in text
    assert "more than the 400.0 MiB of this device" in text
    assert "Not known from a cap of 140.0 MiB on: 2 candidates were predicted not to fit and never run" in text
    assert "Not known for a larger device: 1 candidate does not fit this one; from 450.0 MiB on" in text


def test_two_workloads_each_have_their_own_answer(tmp_path: Path) -> None:
    small = [replace(r, fixed_id="f2", workload="vit_digits") for r in sweep_of_six()]
    for r in small:
        assert r.measurement is not None
        r.measurement.peak_allocated_mib /= 4
    surveys = survey(judge(sweep_of_six() + small, BudgetConf()), {"memory_mib": [70.0]})
    assert [s.title for s in surveys] == ["gpt_tiny on cpu", "vit_digits on cpu"]
    assert [s.cells[0].answer.preferred for s in surveys] == [None, "micro_batch"]
    files = draw_surveys(surveys, tmp_path)
    assert [f.name for f in files] == ["sensitivity_1_gpt_tiny_on_cpu.png", "sensitivity_2_vit_digits_on_cpu.png"]


def test_a_prediction_answers_for_the_memory_cap_alone_and_says_so() -> None:
    found = surveyed(predicted_sweep(), BudgetConf(), 16000.0, {**ASKED, "max_eval_loss_ratio": [1.0]})
    assert found.keys == ["memory_mib"]
    text = shown(found)
    assert "--min-throughput-ratio: nothing was run, so no throughput is known" in text
    assert "--max-eval-loss-ratio: nothing was run, so no held-out loss is known" in text
    assert "predicted, nothing was run" in text
    assert "speed" not in text
    assert len(regions(found).axes) == 1


def test_without_a_baseline_that_ran_a_ratio_has_no_answer() -> None:
    results = [trial("baseline", outcome=Outcome.oom_device.value, capacity_mib=200.0), *sweep_of_six()[1:]]
    found = surveyed(results, BudgetConf(), 200.0, ASKED)
    assert found.keys == ["memory_mib"]
    assert "there is no baseline that ran to its end" in shown(found)


# ---- what is shown


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_fits_its_width_and_cuts_no_name(width: int) -> None:
    results = searched()
    results[1].name = "micro_batch checkpoint.parts=[attn] micro_batch_size=4"
    asked: Asked = {**ASKED, "max_eval_loss_ratio": [1.0, 1.02, 1.05]}
    text = shown(surveyed(results, BudgetConf(memory_mib=150), 400.0, asked), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for name in ("baseline", "hybrid", "micro_batch_size=4", "checkpoint.parts=[attn]"):
        assert name in text


def test_an_encoding_without_box_characters_is_served_too() -> None:
    results = sweep_of_six()
    results[1].name = "micro_batch \N{GREEK SMALL LETTER MU}"
    assert "micro_batch ?" in shown(surveyed(results, BudgetConf(memory_mib=150), None, ASKED), encoding="ascii")


def test_the_present_budget_is_marked_and_the_changes_come_first() -> None:
    found = surveyed(sweep_of_six(), BudgetConf(memory_mib=150), None, ASKED)
    text = shown(found)
    assert re.search(r"^150.0 \* +none \* +micro_batch +accept +128.0 +0.90x +3.210$", text, re.M)
    assert "*: the sweep's own budget." in text
    changes = "micro_batch stays the choice from 128.0 up to 312.4 MiB; with 312.4 MiB or more, baseline"
    assert text.index("Now: accept micro_batch") < text.index(changes) < text.index("The choice under each")
    (table,) = (b for b in survey_blocks(found) if isinstance(b, Table))
    assert render([table]).count("\n") == 5 * 4 + 2


# ---- the picture


def test_the_picture_is_made_of_the_exact_areas_and_marks_what_was_asked() -> None:
    results = sweep_of_six()
    assert results[1].measurement is not None
    results[1].measurement.eval_loss = 3.3
    asked: Asked = {**ASKED, "max_eval_loss_ratio": [1.0, 1.05]}
    found = surveyed(results, BudgetConf(memory_mib=150), None, asked)
    figure = regions(found)
    panels = [a for a in figure.axes if a.get_ylabel()]
    assert [a.get_ylabel().split(",")[0] for a in panels] == ["throughput floor", "quality gate"]
    for axes, y in zip(panels, (THROUGHPUT_RATIO, LOSS_RATIO)):
        areas = found.sensitivity.areas(MEMORY, y)
        drawn = [p for p in axes.patches if isinstance(p, Rectangle)]
        edges = {p.get_x() for p in drawn} | {p.get_x() + p.get_width() for p in drawn}
        assert {a.x_low for a in areas if a.x_low > 0} == {e for e in edges if e in {a.x_low for a in areas}}
        left, right = axes.get_xlim()
        bottom, top = axes.get_ylim()
        # Nothing is left blank and nothing lies on anything else.
        assert sum(p.get_width() * p.get_height() for p in drawn) == pytest.approx((right - left) * (top - bottom))
        points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"]
        assert len(points) == 5 * len(asked[y.key])
        assert sum(line.get_marker() == "*" for line in axes.lines) == 1
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    used = {"baseline", "micro_batch", "checkpoint", "checkpoint_selective", "hybrid"}
    assert used | {"nothing is accepted", "the sweep's own budget"} <= set(labels)


def test_the_picture_shows_the_devices_end_and_what_was_never_run() -> None:
    found = surveyed(searched(), BudgetConf(), 400.0, {"memory_mib": [100.0, 500.0]})
    labels = [text.get_text() for text in regions(found).legends[0].get_texts()]
    assert "this device has 400.0 MiB; paler: it would take another" in labels
    assert "right of it: 3 candidates never run, so not known" in labels


def test_twenty_choices_can_still_be_told_apart() -> None:
    results = [trial("baseline", 400.0, 100.0)]
    results += [trial("micro_batch", 380.0 - 15 * i, 110.0 + 9 * i, name=f"trial {i}") for i in range(20)]
    found = surveyed(results, BudgetConf(), None, {})
    drawn = {(p.get_facecolor(), p.get_hatch()) for p in regions(found).axes[0].patches if isinstance(p, Rectangle)}
    assert len(drawn) == 22  # the baseline, twenty, and nothing


# ---- files and the whole command


def test_asking_about_another_budget_leaves_the_sweeps_own_report_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = sweep_of_six()
    folder = stored(tmp_path, results, BudgetConf(memory_mib=150))
    write_report(judge(results), folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert main([str(folder), "--memory-mib", "100,115,130", "--min-throughput-ratio", "0.7"]) == 0
    text = capsys.readouterr().out
    assert "Under another budget than the sweep's own" not in text  # a range has no one report
    new = {"sensitivity.json", "sensitivity.md", "sensitivity.png"}
    assert {p.name for p in folder.rglob("*") if p.is_file() and p not in before} == new
    assert {p: p.read_bytes() for p in before} == before
    data = json.loads((folder / "sensitivity.json").read_text())
    assert data["asked"] == {"memory_mib": [100.0, 115.0, 130.0], "min_throughput_ratio": [0.7]}
    assert data["command"].endswith("--memory-mib 100,115,130 --min-throughput-ratio 0.7")
    (only,) = data["comparisons"]
    assert only["budget"]["memory_mib"] == 150
    assert [c["preferred"] for c in only["cells"]] == [None, "hybrid", "micro_batch"]
    assert only["present"] == {"verdict": "accept", "preferred": "micro_batch", "cap_mib": 150}
    assert only["changes"]["memory_mib"][-1] == {
        "low": 312.4, "high": None, "includes": "low", "verdict": "accept", "preferred": "baseline",
    }  # fmt: skip


def test_one_value_each_shows_the_whole_report_under_that_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(tmp_path, sweep_of_six(), BudgetConf(memory_mib=150))
    assert main([str(folder), "--memory-mib", "115", "--min-throughput-ratio", "0.7"]) == 0
    text = capsys.readouterr().out
    note = "Under another budget than the sweep's own: budget.memory_mib=115, budget.min_throughput_ratio=0.7."
    assert note in text
    assert "Cap: 115.0 MiB (budget.memory_mib)" in text
    assert "Verdict: accept hybrid" in text
    assert "the report under the sweep's own budget" in text
    assert re.search(
        r"this report again: python -m sweep.report .* --memory-mib 115 --min-throughput-ratio 0.7\n", text
    )
    assert json.loads((folder / "report.json").read_text())["preferred"] == "micro_batch"


def test_a_search_shows_its_best_trials_again_and_answers_from_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [trial("baseline", 400.0, 100.0)]
    results += [trial("micro_batch", 300.0 - 10 * i, 110.0 + 5 * i, name=f"trial {i}") for i in range(12)]
    for r in results:
        r.config["search"] = {"name": None, "report_best": 3}
    folder = stored(tmp_path, results, BudgetConf(memory_mib=350))
    (folder / ".session.json").write_text(json.dumps({"study": "a study"}))
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^trial 2 +280", text, re.M) and not re.search(r"^trial 3 +2", text, re.M)
    assert "Shown: the best 4 of 13 trials" in text
    assert "below 190.0 MiB nothing is accepted" in " ".join(text.split())
    assert main([str(folder), "--memory-mib", "200"]) == 0
    text = capsys.readouterr().out
    assert "Verdict: accept trial 11" in text
    # The same trials are shown under the budget asked about: the best under that one.
    assert re.search(r"^trial 11 \* +190", text, re.M)
    assert not re.search(r"^trial 3 +270", text, re.M)


def test_trials_of_several_budgets_have_a_section_each_and_are_asked_about_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = sweep_of_six()
    for r in results:
        r.budgets = [{"memory_mib": 115.0}, {"memory_mib": 150.0}]
    strict, loose = build(judge(results), tmp_path / "sweep").sections
    assert (strict.title, loose.title) == (
        "gpt_tiny on cpu, budget.memory_mib=115",
        "gpt_tiny on cpu, budget.memory_mib=150",
    )
    assert [s.comparison.cap_mib for s in (strict, loose)] == [115.0, 150.0]
    assert [None if s.sensitivity is None else s.sensitivity.budget.memory_mib for s in (strict, loose)] == [115, 150]
    # Under a third budget they are one again.
    assert main([str(stored(tmp_path / "sweep", results)), "--memory-mib", "200"]) == 0
    assert capsys.readouterr().out.count("Verdict:") == 1


def test_a_hundred_trials_over_a_plane_take_seconds(tmp_path: Path) -> None:
    results = [trial("baseline", 400.0, 100.0)]
    results += [trial("micro_batch", 400.0 - 3 * i, 101.0 + i, name=f"trial {i}") for i in range(1, 100)]
    asked: Asked = {"memory_mib": [100.0 + 30 * i for i in range(10)], "min_throughput_ratio": [0.5, 0.6, 0.7, 0.8]}
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, where names take the room of the picture
        draw_surveys([surveyed(results, BudgetConf(), None, asked)], tmp_path)
    assert time.process_time() - started < 20.0


# ---- against real sweeps

#: Small enough for a few whole sweeps; on a CPU the peaks are the ledger's and repeat exactly.
TINY = [
    "measure=quick",
    "workload.model.layers=2",
    "workload.model.d_model=32",
    "workload.model.d_ff=64",
    "workload.seq_len=16",
    "workload.data.max_mib=1",
    "workload.global_batch_size=4",
    "tracking.enabled=false",
]
#: Reasons that come from how busy the machine was.
OF_THE_MACHINE = {"disturbed", "repeat_failed"}


def real_sweep(folder: Path, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "train.py", "-m", "strategy=baseline,micro_batch,checkpoint", *TINY, *overrides]
    done = subprocess.run(
        [*command, f"hydra.sweep.dir={folder}"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stdout + done.stderr
    return json.loads((folder / "report.json").read_text())


def stored_results(folder: Path) -> list[TrialResult]:
    found = [read_trial(p) for p in sorted(folder.glob("*_*/result.json"))]
    return sorted(found, key=lambda r: not r.is_baseline)


def told(report: dict[str, Any]) -> dict[str, tuple[str, set[str]]]:
    rows = [report["baseline"], *report["candidates"]]
    return {row["name"]: (row["verdict"], set(row["reasons"]) - OF_THE_MACHINE) for row in rows}


@pytest.mark.slow
def test_another_cap_over_a_real_sweep_is_what_a_fresh_sweep_with_it_says(tmp_path: Path) -> None:
    """The cap is the smallest peak exactly: one trial fits, by nothing to spare, so that no time decides."""
    real_sweep(tmp_path / "free")
    free = stored_results(tmp_path / "free")
    cap = min(r.peak_mib or 0.0 for r in free)
    assert len({r.peak_mib for r in free}) == 3
    fresh = real_sweep(tmp_path / "fresh", f"budget.memory_mib={cap!r}")
    answer = Sensitivity(free, BudgetConf(), None).answer({"memory_mib": cap})
    assert (answer.verdict, answer.preferred) == (fresh["verdict"], fresh["preferred"])
    assert told(build(judge(free, BudgetConf(memory_mib=cap)), tmp_path).data()) == told(fresh)
    assert any(verdict != "accept" for verdict, _ in told(fresh).values())
