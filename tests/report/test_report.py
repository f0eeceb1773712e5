"""Reports from made-up results: what is written, what is shown, and that it is the same when made again."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up import peak, prediction, sweep_of_six, trial, verified
from rich.console import Console

from sweep.config.schema import BudgetConf, MinEvidence, plain
from sweep.decide.verdict import budget_of
from sweep.report import (
    describe,
    main,
    markdown,
    print_report,
    read_sweep,
    render,
    report_console,
    single_line,
    write_report,
)
from sweep.report import plots as report_plots
from sweep.report.data import Report, build
from sweep.report.html import html
from sweep.report.notes import largest_line, memory_row, memory_shares, mlflow_line
from sweep.results import Holder, Peak, TrialResult, to_dict, write_json

#: What the design promises of report.json; more may be there.
TOP = {"workload", "device", "evidence", "baseline", "candidates", "verdict", "preferred"}
CANDIDATE = {
    *("strategy", "outcome", "evidence", "peak_mib", "saved_mib", "step_ms", "throughput_ratio", "eval_loss"),
    *("grad_rel_err", "verdict", "reasons", "next_action", "mlflow_run_id", "predicted"),
}
PREDICTED = {"allocated_mib", "reserved_mib", "fits", "peak_phase", "peak_operator", "at_peak_mib"}


def predicted_sweep() -> list[TrialResult]:
    results = []
    for r in sweep_of_six():
        moved = 3500.0 if r.strategy in ("offload", "hybrid") else 0.0
        size = (r.peak_mib or 0.0) * 30
        found = prediction(
            size,
            fits=size < 9000,
            capacity_mib=9000.0,
            peak=peak(size, "optimizer" if r.strategy == "hybrid" else "backward"),
            to_host_mib=moved,
            from_host_mib=moved,
            transfer_one_way_ms=moved / 25,
            transfer_round_trip_ms=moved / 12.5,
            recompute_flops_ratio=0.33 if "checkpoint" in r.strategy or r.strategy == "hybrid" else 0.0,
        )
        results.append(trial(r.name, 1.0, mode="predict", evidence="predicted", prediction=found))
    return results


def troubled_sweep() -> list[TrialResult]:
    """One of each outcome, with a name that is long and an error that holds markup."""
    return [
        trial(
            "baseline",
            outcome="oom_device",
            evidence="measured",
            error="OutOfMemoryError: CUDA out of memory",
            prediction=prediction(312.4, fits=False, capacity_mib=200.0),
        ),
        trial(
            "micro_batch",
            outcome="invalid",
            evidence="measured",
            verification=verified(0.3, passed=False, reason="bn1.running_mean differs"),
        ),
        trial("checkpoint", 145.5, 152.3, evidence="measured"),
        trial(
            "checkpoint_selective",
            outcome="over_budget",
            evidence="predicted",
            prediction=prediction(214.0, fits=False),
        ),
        trial("offload", outcome="failed", evidence="measured", error="NothingOffloaded: [attn] | *0* bytes <b>"),
        trial("hybrid", outcome="crashed", evidence="measured", error="killed by signal 9"),
        trial(
            "checkpoint",
            160.0,
            149.0,
            evidence="measured",
            name="checkpoint checkpoint.parts=[attn] micro_batch_size=4",
            measure={"eval_loss": float("nan")},
        ),
    ]


SWEEPS: dict[str, tuple[list[TrialResult], BudgetConf, float | None]] = {
    "cpu": (sweep_of_six(), BudgetConf(), None),
    "gpu with a cap": (sweep_of_six("measured"), BudgetConf(memory_mib=150, min_throughput_ratio=0.75), 400.0),
    "smoke": (sweep_of_six("smoke"), BudgetConf(), 400.0),
    "predicted": (predicted_sweep(), BudgetConf(), 9000.0),
    "troubled": (troubled_sweep(), BudgetConf(), 200.0),
    "all out of memory": ([trial(n, outcome="oom_device") for n in ("baseline", "hybrid")], BudgetConf(), 10.0),
    "no baseline": (sweep_of_six()[1:3], BudgetConf(), None),
    "one trial": ([trial("baseline", 312.4, 118.2)], BudgetConf(), None),
    "two workloads": (
        sweep_of_six() + [dataclasses.replace(r, fixed_id="f2", workload="vit_digits") for r in sweep_of_six()],
        BudgetConf(memory_mib=150),
        None,
    ),
}


@pytest.fixture(params=list(SWEEPS))
def report(request: pytest.FixtureRequest, tmp_path: Path) -> Report:
    results, budget, capacity = SWEEPS[request.param]
    return build(results, budget, capacity, tmp_path, command="python train.py -m 'strategy=glob(*)'")


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a report's time, and these tests ask about its numbers and words."""
    monkeypatch.setattr(report_plots, "draw", lambda report: [])


def printed(report: Report, width: int = 120, terminal: bool = False) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, force_terminal=terminal))
    return out.getvalue()


def section_of(name: str, tmp_path: Path) -> Any:
    results, budget, capacity = SWEEPS[name]
    return build(results, budget, capacity, tmp_path).sections[0]


# ---- report.json


def test_report_json_holds_what_the_design_promises(report: Report) -> None:
    data = json.loads(json.dumps(report.data(), allow_nan=False))
    assert data.keys() >= TOP | {"against", "budget", "command", "schema_version"}
    rows = data["candidates"] + ([data["baseline"]] if data["baseline"] else [])
    for row in rows:
        assert row.keys() >= CANDIDATE
        assert row["predicted"] is None or row["predicted"].keys() >= PREDICTED
        assert row["verdict"] in ("accept", "tune", "reject")
    assert data["preferred"] is None or data["preferred"] in [r["name"] for r in rows if r["verdict"] == "accept"]
    assert len(rows) == len(report.sections[0].results)


def test_report_json_has_the_numbers_of_the_results(tmp_path: Path) -> None:
    results = sweep_of_six("measured")
    results[1].prediction = prediction(130.0)
    report = write_report(results, BudgetConf(memory_mib=150), None, tmp_path)
    data = json.loads(report.json_path.read_text())
    row = next(r for r in data["candidates"] if r["strategy"] == "micro_batch")
    assert (row["peak_mib"], row["saved_mib"], row["step_ms"]) == (128.0, pytest.approx(184.4), 131.0)
    assert row["throughput_ratio"] == pytest.approx(118.2 / 131.0)
    assert (row["eval_loss"], row["grad_rel_err"], row["mlflow_run_id"]) == (3.21, 3.1e-7, "run-micro_batch")
    assert row["predicted"]["error_ratio"] == pytest.approx(130.0 / 128.0 - 1)
    assert row["predicted"]["evidence"] == "predicted"
    assert sum(row["at_peak_mib"].values()) == pytest.approx(128.0)
    assert (data["preferred"], data["verdict"], data["evidence"]) == ("micro_batch", "accept", "measured")
    assert data["plots"] == [
        "pareto.png",
        "at_peak.png",
        "peak_change.png",
        "time_change.png",
        "loss.png",
        "budgets.png",
    ]
    assert data["baseline"]["reasons"] == ["over_memory"]


def test_the_baseline_comes_first_wherever_it_ran(tmp_path: Path) -> None:
    results = [*sweep_of_six()[1:], sweep_of_six()[0]]
    section = build(results, BudgetConf(), None, tmp_path).sections[0]
    assert [r.name for r in section.rows][:3] == ["baseline", "micro_batch", "checkpoint"]
    assert section.baseline is section.rows[0]
    assert section.preferred is section.rows[0]


def test_two_workloads_are_listed_apart(tmp_path: Path) -> None:
    results, budget, capacity = SWEEPS["two workloads"]
    report = write_report(results, budget, capacity, tmp_path)
    data = json.loads(report.json_path.read_text())
    assert [c["workload"] for c in data["comparisons"]] == ["gpt_tiny", "vit_digits"]
    assert data["workload"] == "gpt_tiny"
    assert len(data["candidates"]) == 5
    assert {p.name for p in report.plots} >= {"pareto_1_gpt_tiny_on_cpu.png", "pareto_2_vit_digits_on_cpu.png"}


def test_without_a_result_there_is_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one trial"):
        write_report([], BudgetConf(), None, tmp_path)


# ---- terminal


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_terminal_report_fits_its_width_and_cuts_no_cell(report: Report, width: int) -> None:
    text = printed(report, width)
    body, look = text.split("Where to look")
    assert max(len(line) for line in body.splitlines()) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in body
    assert "\x1b" not in text
    for section in report.sections:
        assert f"Verdict: {section.comparison.verdict}" in text
        for row in section.rows:
            assert all(part in body for part in row.name.split())
    assert "python train.py -m 'strategy=glob(*)'" in look


def test_a_terminal_gets_colours_and_a_pipe_gets_120_plain_columns(report: Report) -> None:
    assert "\x1b[" in printed(report, terminal=True)
    console = report_console(io.StringIO())
    assert console.width == 120
    assert not console.is_terminal


def test_an_encoding_without_box_characters_is_served_too(report: Report) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_report(report, Console(file=stream, width=120))
    stream.flush()
    assert b"Where to look" in raw.getvalue()


def test_the_table_shows_each_column_and_marks_the_preferred(tmp_path: Path) -> None:
    results, budget, capacity = SWEEPS["gpu with a cap"]
    text = printed(build(results, budget, capacity, tmp_path))
    line = next(x for x in text.splitlines() if x.startswith("micro_batch *"))
    cells = ["ok", "128.0", "134.4", "184.4", "131.0", "±2.6", "0.90x", "3.210", "3.1e-7", "accept"]
    assert line.split()[2:] == cells
    assert "Cap: 150.0 MiB (budget.memory_mib)" in text
    assert "offload tune (below_throughput): 0.69x the baseline's throughput is under the floor of 0.75x." in text


def test_what_did_not_run_is_told_in_a_narrow_terminal_as_well(tmp_path: Path) -> None:
    results, budget, capacity = SWEEPS["troubled"]
    text = printed(build(results, budget, capacity, tmp_path), 80)
    assert re.search(r"^baseline .* oom_device .* reject", text, re.M)
    assert "the baseline ran out of device memory" in text
    assert "[attn] | *0* bytes <b>" in text.replace("\n  ", " ")  # as it was written, not taken for markup
    assert "What fills the memory at the peak of baseline: 312.4 MiB (predicted)" in text


def test_a_cpu_report_says_so_and_never_speaks_of_a_gpu_gain(tmp_path: Path) -> None:
    results, budget, capacity = SWEEPS["cpu"]
    report = build(results, budget, capacity, tmp_path)
    for text in (printed(report), markdown(report)):
        assert "memory is the ledger's device memory, times are this CPU's" in text
        for sentence in re.findall(r"[^.;]*GPU[^.;]*", text):
            assert re.search(r"No statement about|says nothing about|repeat the sweep", sentence), sentence


def test_a_predicted_report_is_marked_predicted_and_theoretical(tmp_path: Path) -> None:
    results, budget, capacity = SWEEPS["predicted"]
    report = build(results, budget, capacity, tmp_path)
    text = printed(report)
    assert "Predicted: nothing was run. Times and shares of FLOPs are theoretical" in text
    assert re.search(r"^hybrid +3294 +3426 +\+5174 +optimizer _foreach_sq\w* +7000 +280\.0 +33 % +accept", text, re.M)
    assert re.search(r"^baseline +9372 +9747 +-1147 .* reject", text, re.M)
    assert "step ms" not in text
    assert "throughput" not in text.replace("throughput_unknown", "")
    assert "(theoretical)" in markdown(report)


def test_measured_trials_carry_their_prediction_and_its_error(tmp_path: Path) -> None:
    results = sweep_of_six("measured")
    results[2].prediction = prediction(150.0)
    text = printed(build(results, BudgetConf(), None, tmp_path))
    assert "checkpoint: predicted 150.0 MiB, measured 145.5 MiB (+3.09 %)" in text


def test_how_a_trial_was_verified_is_told(tmp_path: Path) -> None:
    results = sweep_of_six()
    results[1].verification = verified(dropout="off")
    results[2].verification = verified(scope="4 of 24 blocks, batch 2")
    text = printed(build(results, BudgetConf(), None, tmp_path))
    assert "Compared: random draws fixed: micro_batch." in text
    assert "Compared: 4 of 24 blocks, batch 2: checkpoint." in text


def test_in_how_much_of_the_parameters_gradients_were_compared_is_told(tmp_path: Path) -> None:
    results = sweep_of_six()
    for r in results[1:]:
        r.verification = verified(compared_share=1.0, steps=2, status="equal")
    results[4].verification = verified(compared_share=0.93, steps=4, dropout="off")
    report = build(results, BudgetConf(), None, tmp_path)
    for text in (printed(report), markdown(report)):
        assert "ompared: gradients in 100 % of the parameters over 2 steps: micro_batch, checkpoint, " in text
        assert "ompared: gradients in 93 % of the parameters over 4 steps, random draws fixed: offload" in text


def test_what_peaks_rest_on_is_told_once_below_the_table_in_every_form(tmp_path: Path) -> None:
    results = predicted_sweep()
    for r, held in zip(results, (400.0, 100.0, 400.0, 400.0, 400.0, 400.0)):
        assert r.prediction is not None and r.prediction.peak is not None
        r.prediction.caveats = ["not counted: workspaces"]
        r.prediction.held_outputs_mib = held
        r.block_patterns, r.block_share = ["encoder.layers.*", "decoder.layers.*"], 0.31
    first, second = results[0].prediction, results[1].prediction
    assert first is not None and second is not None
    first.caveats = [*first.caveats, "the batches differ in shape: the peak is that of step 3"]
    second.caveats = [*second.caveats, "every step leaves 2.5 MiB behind"]
    report = build(results, BudgetConf(), 9000.0, tmp_path)
    section = report.sections[0]
    unbroken = " ".join(printed(report, 300).split())
    for text in (unbroken, markdown(report).replace("\\", ""), html(report)):
        assert text.count("Not counted: workspaces.") == 1
        assert "The batches differ in shape: the peak is that of step 3 (baseline)." in text
        assert "Every step leaves 2.5 MiB behind (micro_batch)." in text
        assert "100.0 MiB (micro_batch)" in text
        assert "encoder.layers." in text and "31 % of the baseline" in text and "WARNING" in text
    assert section.data()["block_share"] == 0.31
    assert "should fit by" in single_line(results[1])
    # Of measured trials they are the predictions' alone.
    measured = sweep_of_six("measured")
    measured[1].prediction = prediction(120.0, caveats=["not counted: workspaces"])
    assert "Not counted: workspaces, of the predictions" in printed(build(measured, BudgetConf(), None, tmp_path))


def test_why_a_measured_trial_has_no_prediction_is_told(tmp_path: Path) -> None:
    results = sweep_of_six("measured")
    results[1].prediction = prediction(120.0)
    results[2].prediction_error = results[3].prediction_error = "CannotPredict: reads a value"
    report = build(results, BudgetConf(), None, tmp_path)
    for text in (printed(report, 200), markdown(report), html(report)):
        assert "checkpoint, checkpoint_selective: not predicted: CannotPredict: reads a value" in text.replace("\\", "")


def test_a_step_time_that_varies_much_is_called_noisy(tmp_path: Path) -> None:
    results = sweep_of_six()
    assert "Noisy" not in printed(build(results, BudgetConf(), None, tmp_path))
    results[2] = trial("checkpoint", 145.5, 152.3, measure={"spread": 0.3})
    assert "Noisy: the steps of checkpoint vary by more than a quarter" in printed(
        build(results, BudgetConf(), None, tmp_path)
    )


# ---- what fills the memory


def test_the_baselines_peak_is_explained_else_the_first_that_is_known(tmp_path: Path) -> None:
    row = memory_row(section_of("cpu", tmp_path))
    assert row is not None
    assert row.is_baseline
    shares = memory_shares(row)
    assert shares[0][0] == "activations"
    assert sum(s for _, _, s in shares) == pytest.approx(1)
    other = memory_row(section_of("no baseline", tmp_path))
    assert other is not None
    assert other.name == "micro_batch"
    assert memory_row(section_of("all out of memory", tmp_path)) is None


def test_like_blocks_are_named_together(tmp_path: Path) -> None:
    row = section_of("cpu", tmp_path).rows[0]
    holders = [Holder(f"blocks.{i}.attn", "activation", 16.0, 7) for i in range(4)] + [Holder("", "temporary", 4.0, 1)]
    row.peak = Peak(100.0, "backward", "aten.mm", "head", {"activation": 100.0}, holders)
    assert (
        largest_line(row) == "4 x blocks.*.attn, 16.0 MiB activations each; (outside of any module) 4.0 MiB temporaries"
    )


# ---- markdown


def test_markdown_is_made_of_whole_tables(report: Report) -> None:
    text = markdown(report)
    assert "![" not in text  # a run's description shows no picture that lies beside it
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.M)
    assert len(tables) >= len(report.sections)
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
    of_trials = [table for table in tables if table.startswith("| strategy | outcome |")]
    assert [table.count("\n") for table in of_trials] == [len(section.rows) + 2 for section in report.sections]


def test_markdown_escapes_what_would_be_markup(tmp_path: Path) -> None:
    results, budget, capacity = SWEEPS["troubled"]
    text = markdown(build(results, budget, capacity, tmp_path))
    assert r"\[attn] \| \*0\* bytes \<b>" in text


def test_a_description_of_a_hundred_trials_fits_mlflow_and_keeps_what_matters(tmp_path: Path) -> None:
    results = [trial("baseline", 300.0, 100.0)]
    results += [
        trial("micro_batch", 100.0 + i, 200.0 - i / 2, name=f"micro_batch number_{i}", measure={"spread": 0.0})
        for i in range(100)
    ]
    report = build(results, BudgetConf(memory_mib=250), None, tmp_path)
    assert len(markdown(report)) > 8000
    text = describe(report)
    assert len(text) <= 7900
    assert "| baseline |" in text
    assert "| **micro_batch number_99** |" in text
    assert "more trials are in `report.json`" in text
    assert "Which command repeats it?" in text


def test_a_description_of_very_long_words_is_cut_with_a_note(tmp_path: Path) -> None:
    report = build([trial("offload", outcome="failed", error="x" * 9000)], BudgetConf(), None, tmp_path)
    assert len(describe(report)) <= 7900
    assert "the whole is in report.md" in describe(report)


# ---- pictures


def test_the_pictures_are_drawn_for_what_there_is_data_for(tmp_path: Path) -> None:
    drawn = {}
    for name in ("cpu", "predicted", "one trial", "all out of memory", "troubled"):
        results, budget, capacity = SWEEPS[name]
        folder = tmp_path / name
        report = write_report(results, budget, capacity, folder)
        drawn[name] = [p.name for p in report.plots]
        for path in report.plots:
            assert path.parent == folder
            assert path.read_bytes().startswith(b"\x89PNG")
    assert drawn["cpu"] == [
        "pareto.png",
        "at_peak.png",
        "peak_change.png",
        "time_change.png",
        "loss.png",
        "budgets.png",
    ]
    assert drawn["predicted"] == ["at_peak.png", "peak_change.png", "budgets.png"]
    assert drawn["one trial"] == ["pareto.png", "at_peak.png"]
    assert drawn["all out of memory"] == []


def test_the_pareto_picture_shows_cap_baseline_preferred_and_what_did_not_run(tmp_path: Path) -> None:
    figure = report_plots.pareto(section_of("gpu with a cap", tmp_path))
    assert figure is not None
    axes = figure.axes[0]
    names = [t.get_text() for t in axes.texts]
    assert "micro_batch (preferred)" in names
    assert "baseline" in names
    assert any(list(line.get_xdata()) == [150.0, 150.0] for line in axes.lines)
    figure = report_plots.pareto(section_of("troubled", tmp_path))
    assert figure is not None
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert "baseline: oom_device (predicted peak 312.4 MiB)" in words
    assert "hybrid: crashed" in words
    assert figure.axes[0].get_xlim()[1] > 312.4


def test_no_name_in_the_pareto_picture_covers_another(tmp_path: Path) -> None:
    figure = report_plots.pareto(section_of("gpu with a cap", tmp_path))
    assert figure is not None
    boxes = [t.get_window_extent() for t in figure.axes[0].texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def test_the_front_holds_what_nothing_beats_in_both(tmp_path: Path) -> None:
    rows = section_of("cpu", tmp_path).rows
    found = report_plots.front(rows, lambda r: r.samples_per_s or 0.0)
    assert [r.name for r in found] == ["hybrid", "micro_batch", "checkpoint_selective", "baseline"]
    rows[1].verified = False
    found = report_plots.front(rows, lambda r: r.samples_per_s or 0.0)
    assert "micro_batch" not in [r.name for r in found]


def test_a_picture_that_cannot_be_drawn_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(report: Report) -> list[Path]:
        raise RuntimeError("no font")

    monkeypatch.setattr(report_plots, "draw", broken)
    with pytest.warns(RuntimeWarning, match="no font"):
        report = write_report(sweep_of_six(), BudgetConf(), None, tmp_path)
    assert report.json_path.is_file()
    assert report.markdown_path.is_file()


# ---- made again from stored results


def stored(results: list[TrialResult], folder: Path) -> None:
    for i, result in enumerate(results):
        write_json(
            dataclasses.replace(result, started_at=f"2025-01-01T00:00:{i:02d}Z"), folder / str(i) / "result.json"
        )


@pytest.mark.usefixtures("without_pictures")
def test_a_report_made_again_has_the_same_verdicts(report: Report) -> None:
    results = [r for section in report.sections for r in section.results]
    results = [dataclasses.replace(r, mlflow_run_id=f"run-{i}") for i, r in enumerate(results)]
    section = report.sections[0]
    assert section.sensitivity is not None
    for result in results:
        result.budgets, result.capacity_mib = [plain(section.budget)], section.sensitivity.capacity_mib
    stored(results, report.folder)
    written = write_report(results, None, None, report.folder, command=report.command)
    first, text = json.loads(written.json_path.read_text()), written.markdown_path.read_text()
    again = render(report.folder)
    assert json.loads(again.json_path.read_text()) == first
    assert again.markdown_path.read_text() == text


@pytest.mark.usefixtures("without_pictures")
def test_without_an_earlier_report_the_budget_comes_from_the_trials(tmp_path: Path) -> None:
    results = sweep_of_six()
    for r in results:
        r.config["budget"] = plain(BudgetConf(min_throughput_ratio=0.8, min_evidence=MinEvidence.cpu))
        r.config["device"]["capacity_mib"] = 150.0
    stored(results, tmp_path)
    (section,) = render(tmp_path).sections
    assert section.budget == BudgetConf(min_throughput_ratio=0.8, min_evidence=MinEvidence.cpu)
    assert (section.comparison.cap_mib, section.comparison.preferred) == (150.0, "micro_batch")


@pytest.mark.usefixtures("without_pictures")
def test_the_capacity_that_a_trial_found_comes_first(tmp_path: Path) -> None:
    results = [dataclasses.replace(r, capacity_mib=130.0) for r in sweep_of_six("measured")]
    stored(results, tmp_path)
    assert render(tmp_path).sections[0].comparison.cap_mib == 130.0


def test_a_trial_that_lies_in_two_folders_is_read_once(tmp_path: Path) -> None:
    stored(sweep_of_six(), tmp_path)
    write_json(sweep_of_six()[0], tmp_path / "baseline" / "result.json")
    assert [r.name for r in read_sweep(tmp_path)].count("baseline") == 1


def test_trials_are_read_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    for i in (10, 9, 2):
        write_json(trial("checkpoint", 150.0 + i, name=f"c{i}", mlflow_run_id=None), tmp_path / str(i) / "result.json")
    assert [r.name for r in read_sweep(tmp_path)] == ["c2", "c9", "c10"]


@pytest.mark.usefixtures("without_pictures")
def test_a_broken_earlier_report_is_no_obstacle(tmp_path: Path) -> None:
    stored(sweep_of_six(), tmp_path)
    (tmp_path / "report.json").write_text("{")
    assert render(tmp_path).sections[0].comparison.preferred == "baseline"


def test_what_is_no_result_of_a_trial_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(sweep_of_six(), tmp_path)
    whole = json.loads((tmp_path / "3" / "result.json").read_text())
    foreign = ["", "{", "[]", "7", "null", '{"accuracy": 0.9}', "[" * 100_000]
    changed = [{"name": 5}, {"started_at": None}, {"outcome": "splendid"}, {"config": []}, {"measurement": "fast"}]
    changed += [{"measurement": whole["measurement"] | {"step_ms": "1"}}, {"overrides": "strategy=offload"}]
    broken = [*(text.encode() for text in foreign), *(json.dumps(whole | c).encode() for c in changed), b"\xff\xfe{"]
    for i, content in enumerate(broken):
        path = tmp_path / "others" / str(i) / "result.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    (tmp_path / "others" / "folder" / "result.json").mkdir(parents=True)
    assert len(read_sweep(tmp_path)) == 6
    left_out = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert len(left_out) == len(broken) + 1
    assert str(tmp_path / "others" / "1" / "result.json") in " ".join(left_out)


@pytest.mark.usefixtures("without_pictures")
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "missing")]) == 2
    assert "is no folder; give the output folder of a sweep" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "holds no result.json" in capsys.readouterr().err
    stored(sweep_of_six(), tmp_path)
    assert main([str(tmp_path)]) == 0
    assert "Verdict: accept baseline" in capsys.readouterr().out


def test_reporting_in_a_process_of_its_own_loads_no_torch(tmp_path: Path) -> None:
    stored(sweep_of_six(), tmp_path)
    code = (
        "import sys, sweep.report\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"assert sweep.report.main([{str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'mlflow', 'optuna'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "Where to look" in done.stdout


def test_a_budget_survives_its_plain_form() -> None:
    budget = BudgetConf(memory_mib=10.0, min_evidence=MinEvidence.smoke)
    assert budget_of(plain(budget) | {"a_newer_key": 1}) == budget
    assert budget_of({}) == BudgetConf()


# ---- single lines


def decided(result: TrialResult) -> TrialResult:
    comparison = build([trial("baseline", 300.0, 100.0), result], BudgetConf(), None, Path()).sections[0].comparison
    return dataclasses.replace(result, decision=comparison.decisions[1])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (
            decided(trial("checkpoint", 150.0, 125.0)),
            "checkpoint | 150.0 MiB (saves 150.0 MiB) | 125.0 ms/step, 0.80x | 128.0 samples/s | eval loss 3.210 "
            "| grad err 3.1e-7 | accept [on this CPU]",
        ),
        (
            trial("baseline", 300.0, 100.0, evidence="measured"),
            "baseline | 300.0 MiB | 100.0 ms/step | 160.0 samples/s | eval loss 3.210 [on this GPU]",
        ),
        (
            trial("hybrid", 9.0, mode="predict", evidence="predicted", prediction=prediction(9000.0, False, 9000.0)),
            "hybrid | allocated 9000 MiB | reserved 9360 MiB | short by 760.0 MiB "
            "| peak in backward aten._log_softmax_backward_data [predicted]",
        ),
        (
            trial("offload", outcome="oom_device", evidence="measured", error="OutOfMemoryError: no"),
            "offload | oom_device: OutOfMemoryError: no [on this GPU]",
        ),
        (
            trial("micro_batch", outcome="invalid", verification=verified(0.3, passed=False, reason="bn differs")),
            "micro_batch | invalid: bn differs [on this CPU]",
        ),
        (
            trial("offload", outcome="over_budget", evidence="predicted", prediction=prediction(9000.0)),
            "offload | over_budget: predicted 9000 MiB allocated, 9360 MiB reserved [predicted]",
        ),
    ],
)
def test_single_line(result: TrialResult, expected: str) -> None:
    assert single_line(result) == expected


# ---- where to look


@pytest.mark.parametrize(
    ("tracking", "expected"),
    [
        ({}, "mlflow ui --backend-store-uri sqlite:///mlruns/mlflow.db"),
        ({"enabled": True, "uri": None}, "mlflow ui --backend-store-uri sqlite:///mlruns/mlflow.db"),
        ({"uri": "sqlite:////data/a b.db"}, "mlflow ui --backend-store-uri 'sqlite:////data/a b.db'"),
        ({"uri": "http://localhost:5000"}, "open http://localhost:5000"),
        ({"uri": "postgresql://me:secret@host/db"}, "mlflow ui --backend-store-uri 'postgresql://me:***@host/db'"),
        ({"enabled": False}, ""),
    ],
)
def test_where_the_runs_are(tracking: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert mlflow_line(Report([], tmp_path, tracking=tracking)) == expected


def test_the_preferred_trial_can_be_repeated_from_the_report(report: Report) -> None:
    look = printed(report).split("Where to look")[1]
    for section in report.sections:
        row = section.preferred or section.baseline or section.rows[0]
        assert f"{row.name} again: {row.command}\n" in look


def test_rows_and_results_run_parallel(report: Report) -> None:
    for section in report.sections:
        assert [r.name for r in section.rows] == [r.name for r in section.results]
        assert [d.verdict for d in section.comparison.decisions] == [r.verdict for r in section.rows]
    assert to_dict(report.data()) == report.data()
