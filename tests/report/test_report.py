"""Reports from made-up results: what is written, what a terminal shows, and that it is the same when made again."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import peak, prediction, sweep_of_six, sweep_over_seeds, trial, verified
from report_parts import built, printed, section, written
from rich.console import Console

from sweep.config.schema import BudgetConf, MinEvidence, plain
from sweep.decide.verdict import budget_of
from sweep.environment import home
from sweep.report import judge, markdown, print_report, read_sweep, report_console, single_line, write_report
from sweep.report import plots as report_plots
from sweep.report.__main__ import main
from sweep.report.content import memory_parts, memory_row, where_to_look
from sweep.report.data import Report, build
from sweep.report.html import html
from sweep.results import TrialResult, to_dict, write_json

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
            transfer_round_trip_ms=moved / 12.5,
            recompute_flops_ratio=0.33 if "checkpoint" in r.strategy or r.strategy == "hybrid" else 0.0,
        )
        results.append(trial(r.name, 1.0, mode="predict", evidence="predicted", prediction=found))
    return results


def troubled_sweep() -> list[TrialResult]:
    """One of each outcome, with a name that is long and an error that holds markup."""
    lost = prediction(312.4, fits=False, capacity_mib=200.0)
    long = "checkpoint checkpoint.parts=[attn] micro_batch_size=4"
    gpu = {"evidence": "measured"}
    differs = verified(0.3, passed=False, reason="bn1.running_mean differs")
    return [
        trial("baseline", outcome="oom_device", error="OutOfMemoryError: no", prediction=lost, **gpu),
        trial("micro_batch", outcome="invalid", verification=differs, **gpu),
        trial("checkpoint", 145.5, 152.3, **gpu),
        trial("checkpoint_selective", outcome="over_budget", evidence="predicted", prediction=prediction(214.0, False)),
        trial("offload", outcome="failed", error="NothingOffloaded: [attn] | *0* bytes <b>", **gpu),
        trial("hybrid", outcome="crashed", error="killed by signal 9", **gpu),
        trial("checkpoint", 160.0, 149.0, name=long, measure={"eval_loss": float("nan")}, **gpu),
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
    return built(*SWEEPS[request.param], tmp_path)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a report's time, and these tests ask about its numbers and words."""
    monkeypatch.setattr(report_plots, "draw", lambda report: [])


# ---- report.json


def test_report_json_holds_what_the_design_promises(report: Report) -> None:
    data = json.loads(json.dumps(report.data(), allow_nan=False))
    assert to_dict(report.data()) == report.data()
    assert data.keys() >= TOP | {"against", "budget", "command", "schema_version"}
    rows = data["candidates"] + ([data["baseline"]] if data["baseline"] else [])
    for row in rows:
        assert row.keys() >= CANDIDATE
        assert row["predicted"] is None or row["predicted"].keys() >= PREDICTED
        assert row["verdict"] in ("accept", "tune", "reject")
    assert data["preferred"] is None or data["preferred"] in [r["name"] for r in rows if r["verdict"] == "accept"]
    assert len(rows) == len(report.sections[0].results)


@pytest.mark.usefixtures("without_pictures")
def test_report_json_has_the_numbers_of_the_results(tmp_path: Path) -> None:
    results = sweep_of_six("measured")
    results[1].prediction = prediction(130.0)
    data = json.loads(written(results, tmp_path, BudgetConf(memory_mib=150)).json_path.read_text())
    row = next(r for r in data["candidates"] if r["strategy"] == "micro_batch")
    assert (row["peak_mib"], row["saved_mib"], row["step_ms"]) == (128.0, pytest.approx(184.4), 131.0)
    assert row["throughput_ratio"] == pytest.approx(118.2 / 131.0)
    assert (row["eval_loss"], row["grad_rel_err"], row["mlflow_run_id"]) == (3.21, 3.1e-7, "run-micro_batch")
    assert row["predicted"]["error_ratio"] == pytest.approx(130.0 / 128.0 - 1)
    assert row["predicted"]["evidence"] == "predicted"
    assert sum(row["at_peak_mib"].values()) == pytest.approx(128.0)
    assert (data["preferred"], data["verdict"], data["evidence"]) == ("micro_batch", "accept", "measured")
    assert data["baseline"]["reasons"] == ["over_memory"]


def test_the_baseline_comes_first_wherever_it_ran() -> None:
    made = section([*sweep_of_six()[1:], sweep_of_six()[0]])
    assert [r.name for r in made.rows][:3] == ["baseline", "micro_batch", "checkpoint"]
    assert made.baseline is made.preferred is made.rows[0]


@pytest.mark.usefixtures("without_pictures")
def test_two_workloads_are_listed_apart(tmp_path: Path) -> None:
    data = json.loads(written(SWEEPS["two workloads"][0], tmp_path).json_path.read_text())
    assert [c["workload"] for c in data["comparisons"]] == ["gpt_tiny", "vit_digits"]
    assert data["workload"] == "gpt_tiny"
    assert len(data["candidates"]) == 5


def test_without_a_result_there_is_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one trial"):
        write_report([], tmp_path)


def test_of_many_trials_the_best_are_shown_and_all_are_stored() -> None:
    results = [trial("baseline", 600.0, 100.0)]
    results += [trial("micro_batch", 500.0 - i, 150.0 + i, name=f"number_{i}") for i in range(80)]
    made = section(results, BudgetConf(memory_mib=490))
    names = [r.name for r in made.rows]
    assert len(names) == 51 and names[0] == "baseline"
    assert made.preferred is not None and made.preferred.name in names
    assert "Shown: the best 51 of 81 trials" in made.notes[0]
    assert {c["name"] for c in made.data()["candidates"]} == {f"number_{i}" for i in range(80)}


# ---- terminal


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_report_fits_its_width_and_cuts_no_cell(report: Report, width: int) -> None:
    text = printed(report, width)
    body, look = text.split("Where to look")
    assert max(len(line) for line in body.splitlines() if "sweep.apply(" not in line) <= width  # code is not wrapped
    assert "\N{HORIZONTAL ELLIPSIS}" not in body
    assert "\x1b" not in text
    for made in report.sections:
        assert f"Verdict: {made.comparison.verdict}" in text
        for row in made.rows:
            assert all(part in body for part in row.name.split())
        row = made.preferred or made.baseline or made.rows[0]
        assert f"{row.name} again: {row.result.command}\n" in look
    assert "python train.py -m 'strategy=glob(*)'" in look


def test_a_terminal_gets_colours_a_pipe_plain_columns_and_any_encoding_is_served() -> None:
    report = built(*SWEEPS["troubled"])
    assert "\x1b[" in printed(report, terminal=True)
    console = report_console(io.StringIO())
    assert console.width == 120 and not console.is_terminal
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_report(report, Console(file=stream, width=120))
    stream.flush()
    assert b"Where to look" in raw.getvalue()


def test_the_table_shows_each_column_and_marks_the_preferred() -> None:
    text = printed(built(*SWEEPS["gpu with a cap"]))
    line = next(x for x in text.splitlines() if x.startswith("micro_batch *"))
    cells = ["128.0", "134.4", "184.4", "131.0", "±2.6", "0.90x", "3.210", "3.1e-7", "accept"]
    assert line.split()[2:] == cells
    assert "Cap: 150.0 MiB (budget.memory_mib)" in text
    assert "offload tune (below_throughput): 0.69x the baseline's throughput is under the floor of 0.75x." in text


def test_what_did_not_run_is_told_in_a_narrow_terminal_as_well() -> None:
    text = printed(built(*SWEEPS["troubled"]), 80)
    assert re.search(r"^baseline .* oom_device .* reject", text, re.M)
    assert "the baseline ran out of device memory" in " ".join(text.split())
    assert "[attn] | *0* bytes <b>" in " ".join(text.split())  # as it was written, not taken for markup
    assert "What fills the memory at the peak of baseline: 312.4 MiB (predicted)" in text


def test_a_cpu_report_says_so_and_never_speaks_of_a_gpu_gain() -> None:
    report = built(*SWEEPS["cpu"])
    for text in (" ".join(printed(report).split()), markdown(report)):
        assert "Emulated on a CPU: memory counts every tensor; times are this CPU's" in text
        for sentence in re.findall(r"[^.;]*GPU[^.;]*", text):
            assert re.search(r"Neither was measured|says nothing about|repeat the sweep", sentence), sentence


def test_a_predicted_report_is_marked_predicted_and_theoretical() -> None:
    report = built(*SWEEPS["predicted"])
    text = printed(report)
    assert "Predicted, not measured. Times and shares of FLOPs are theoretical" in text
    assert re.search(r"^hybrid +3294 +3426 +\+5174 +optimizer +7000 +280\.0 +33 % +accept", text, re.M)
    assert re.search(r"^baseline +9372 +9747 +-1147 .* reject", text, re.M)
    assert "step ms" not in text
    assert "throughput" not in text.replace("throughput_unknown", "")
    assert "Theoretical" in markdown(report)


def test_predictions_that_are_off_or_missing_are_told_in_every_form() -> None:
    results = sweep_of_six("measured")
    results[1].prediction = prediction(150.0)
    results[2].prediction_error = results[3].prediction_error = "CannotPredict: reads a value"
    report = built(results)
    for text in (printed(report, 200), markdown(report).replace("\\", ""), html(report)):
        assert "icro_batch: predicted 150.0 MiB, measured 128.0 MiB (+17.19 %)" in text
        assert "checkpoint, checkpoint_selective: not predicted: CannotPredict: reads a value" in text


def test_how_a_trial_was_verified_is_told_in_every_form() -> None:
    results = sweep_of_six()
    for r in results[1:]:
        r.verification = verified(compared_share=1.0, steps=2, status="equal")
    results[4].verification = verified(compared_share=0.93, steps=4, dropout="off")
    results[5].verification = verified(scope="4 of 24 blocks, batch 2")
    report = built(results)
    for text in (printed(report, 200), markdown(report)):
        assert "ompared: gradients in 100 % of the parameters over 2 steps: micro_batch, checkpoint, " in text
        assert "ompared: gradients in 93 % of the parameters over 4 steps, random draws fixed: offload" in text
        assert "ompared: 4 of 24 blocks, batch 2: hybrid" in text


def test_what_peaks_rest_on_is_told_once_below_the_table_in_every_form() -> None:
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
    report = built(results, BudgetConf(), 9000.0)
    for text in (printed(report, 300), markdown(report).replace("\\", ""), html(report)):
        assert text.count("Not counted: workspaces.") == 1
        assert "The batches differ in shape: the peak is that of step 3 (baseline)." in text
        assert "Every step leaves 2.5 MiB behind (micro_batch)." in text
        assert "100.0 MiB (micro_batch)" in text
        assert "encoder.layers." in text and "31 % of the baseline" in text and "WARNING" in text
    assert report.data()["block_share"] == 0.31
    assert "should fit by" in single_line(results[1])
    # Of measured trials they are the predictions' alone.
    measured = sweep_of_six("measured")
    measured[1].prediction = prediction(120.0, caveats=["not counted: workspaces"])
    assert "Not counted: workspaces, of the predictions" in printed(built(measured))


def test_a_step_time_that_varies_much_is_called_noisy() -> None:
    results = sweep_of_six()
    assert "Noisy" not in printed(built(results))
    results[2] = trial("checkpoint", 145.5, 152.3, measure={"spread": 0.3})
    assert "Noisy: the steps of checkpoint vary by more than a quarter" in printed(built(results))


def test_the_baselines_peak_is_explained_else_the_first_that_is_known() -> None:
    row = memory_row(section(*SWEEPS["cpu"]))
    assert row is not None and row.is_baseline and row.peak is not None
    parts = memory_parts(row.peak)
    assert parts[0][0] == "activations"
    assert sum(share for _, _, share in parts) == pytest.approx(1)
    other = memory_row(section(*SWEEPS["no baseline"]))
    assert other is not None and other.name == "micro_batch"
    assert memory_row(section(*SWEEPS["all out of memory"])) is None


def test_recomputed_activations_are_no_temporaries() -> None:
    results = sweep_over_seeds()
    of_peak = results[3].measurement.peak if results[3].measurement else None
    assert of_peak is not None
    of_peak.temporary_mib = {"recompute": 30.0, "backward": 9.7}
    parts = {name: size for name, size, _ in memory_parts(of_peak)}
    assert (parts["recomputed activations"], parts["temporaries"]) == (30.0, pytest.approx(9.7))
    figure = report_plots.at_peak(section(results))
    assert figure is not None
    assert "recomputed activations" in [t.get_text() for t in figure.legends[0].get_texts()]


# ---- made again from stored results


def stored(results: list[TrialResult], folder: Path) -> None:
    for i, result in enumerate(results):
        write_json(
            dataclasses.replace(result, started_at=f"2025-01-01T00:00:{i:02d}Z"), folder / str(i) / "result.json"
        )


@pytest.mark.usefixtures("without_pictures")
def test_a_report_made_again_has_the_same_verdicts(report: Report) -> None:
    results = [r for made in report.sections for r in made.results]
    results = [dataclasses.replace(r, mlflow_run_id=f"run-{i}") for i, r in enumerate(results)]
    budget, folder = report.sections[0].group.budget, report.folder
    for r in results:
        r.config["budget"] = plain(budget)
    stored(results, folder)
    first = write_report(judge(read_sweep(folder)), folder, command=report.command)
    before, text = first.json_path.read_text(), first.markdown_path.read_text()
    assert main([str(folder)]) == 0
    assert (first.json_path.read_text(), first.markdown_path.read_text()) == (before, text)


def test_the_budget_comes_from_the_trials_and_the_capacity_that_one_found_first() -> None:
    results = sweep_of_six()
    for r in results:
        r.config["budget"] = plain(BudgetConf(min_throughput_ratio=0.8, min_evidence=MinEvidence.cpu))
        r.config["device"]["capacity_mib"] = 150.0
    (made,) = build(judge(results), Path()).sections
    assert made.group.budget == BudgetConf(min_throughput_ratio=0.8, min_evidence=MinEvidence.cpu)
    assert (made.comparison.cap_mib, made.comparison.preferred) == (150.0, "micro_batch")
    found = [dataclasses.replace(r, capacity_mib=130.0) for r in results]
    assert build(judge(found), Path()).sections[0].comparison.cap_mib == 130.0
    budget = BudgetConf(memory_mib=10.0, min_evidence=MinEvidence.smoke)
    assert budget_of(plain(budget) | {"a_newer_key": 1}) == budget
    assert budget_of({}) == BudgetConf()


def test_trials_are_read_once_each_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    stored(sweep_of_six(), tmp_path)
    write_json(dataclasses.replace(read_sweep(tmp_path)[0]), tmp_path / "baseline" / "result.json")
    assert [r.name for r in read_sweep(tmp_path)] == [r.name for r in sweep_of_six()]
    for i in (10, 9, 2):
        again = trial("checkpoint", 150.0 + i, name=f"c{i}", mlflow_run_id=None)
        write_json(again, tmp_path / "more" / str(i) / "result.json")
    assert [r.name for r in read_sweep(tmp_path / "more")] == ["c2", "c9", "c10"]


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
    assert main([str(tmp_path), "--memory-mib", "100"]) == 2
    assert "holds no result.json" in capsys.readouterr().err
    stored(sweep_of_six(), tmp_path)
    (tmp_path / "report.json").write_text("{")  # a broken earlier report is no obstacle
    assert main([str(tmp_path)]) == 0
    assert "Verdict: accept baseline" in capsys.readouterr().out


def test_reporting_in_a_process_of_its_own_loads_no_torch(tmp_path: Path) -> None:
    stored(sweep_of_six()[:2], tmp_path)
    code = (
        "import sys, sweep.report.__main__ as command\n"
        "assert not {'matplotlib', 'jinja2'} & set(sys.modules)\n"
        f"assert command.main([{str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'mlflow', 'optuna'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "Where to look" in done.stdout


# ---- single lines, where to look


def decided(result: TrialResult) -> TrialResult:
    comparison = section([trial("baseline", 300.0, 100.0), result]).comparison
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


@pytest.mark.parametrize(
    ("tracking", "page", "expected"),
    [
        ({}, "", [f"mlflow ui --backend-store-uri sqlite:///{home()}/mlruns/mlflow.db"]),
        ({"uri": "sqlite:////data/a b.db"}, "", ["mlflow ui --backend-store-uri 'sqlite:////data/a b.db'"]),
        ({"uri": "http://localhost:5000"}, "", ["open http://localhost:5000"]),
        ({"uri": "http://localhost:5000"}, "http://localhost:5000/#/x", ["open http://localhost:5000/#/x"]),
        ({"uri": "sqlite:///a"}, "#/x", ["mlflow ui --backend-store-uri sqlite:///a", "http://127.0.0.1:5000/#/x"]),
        ({"uri": "postgresql://me:secret@h/db"}, "", ["mlflow ui --backend-store-uri 'postgresql://me:***@h/db'"]),
        ({"enabled": False}, "#/x", []),
    ],
)
def test_where_the_runs_are(tracking: dict[str, object], page: str, expected: list[str], tmp_path: Path) -> None:
    write_json({"page": page}, tmp_path / ".session.json")
    lines = [line for b in where_to_look(Report([], tmp_path, tracking=tracking)) for line in getattr(b, "lines", [])]
    assert [line for label, line in lines if label in ("mlflow", "this sweep there")] == expected
