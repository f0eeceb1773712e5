"""What the pictures show: bars that add up, the baseline's band, and names that can be told apart."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from made_up import prediction, runs, sweep_of_six, sweep_over_seeds, trial, verified
from matplotlib.colors import to_hex
from report_parts import section as made_section
from report_parts import written

from sweep.config.schema import BudgetConf
from sweep.report.data import Section
from sweep.report.plots import front, losses, pareto, short
from sweep.results import TrialResult


def section(results: list[TrialResult]) -> Section:
    return made_section(results, BudgetConf(memory_mib=200))


def test_curves_are_drawn_against_the_baselines_band_and_held_out_loss_with_intervals() -> None:
    figure = losses(section(sweep_over_seeds()))
    assert figure is not None
    above, below, right = figure.axes
    assert len(above.collections) == len(below.collections) == 1  # the band over seeds
    assert any("lowest to highest of 3 seeds" in t.get_text() for t in figure.legends[0].get_texts())
    assert len(below.lines) == 1 + 5  # zero, and each candidate less the baseline
    assert len(right.containers) == 6  # an interval each
    names = [t.get_text() for t in right.get_yticklabels()]
    assert names[0] == "baseline"
    assert "on this CPU" in figure.get_suptitle()
    assert "95 % interval" in right.get_xlabel()


def test_with_one_seed_there_is_a_line_and_no_interval() -> None:
    figure = losses(section(sweep_over_seeds(seeds=1)))
    assert figure is not None
    above, _, right = figure.axes
    assert len(above.collections) == 0
    assert len(right.containers) == 0
    assert "1 seed, no interval" in right.get_xlabel()


def test_twelve_candidates_can_be_told_apart() -> None:
    results = sweep_over_seeds()
    for i in range(9):
        more = copy.deepcopy(results[1])
        more.name = f"micro_batch checkpoint.granularity=blocks micro_batch_size={i}"
        assert more.measurement is not None
        more.measurement.runs = runs(120.0 + i, shift=0.002 * (i + 1))
        results.append(more)
    figure = losses(section(results))
    assert figure is not None
    names = [t.get_text() for t in figure.legends[0].get_texts()]
    assert len(names) == 13  # the baseline and twelve
    assert len(set(names)) == 13
    drawn = [line for line in figure.axes[0].lines if line.get_label() in names]
    looks = {(to_hex(line.get_color()), line.get_linestyle(), line.get_linewidth()) for line in drawn}
    assert len(looks) == len(drawn)
    assert "2 more trials not shown" in figure.get_suptitle()
    figure.canvas.draw() if figure.canvas else None
    boxes = [t.get_window_extent() for t in figure.axes[2].get_yticklabels()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def test_losses_without_held_out_data_fill_the_page() -> None:
    results = sweep_of_six()
    for r in results:
        assert r.measurement is not None
        r.measurement.eval_loss = None
    figure = losses(section(results))
    assert figure is not None
    assert len(figure.axes) == 2


def test_long_names_keep_both_ends_and_dollars_are_no_formula() -> None:
    a, b = (short(f"checkpoint checkpoint.parts=[attn,mlp] micro_batch_size={i}") for i in (4, 8))
    assert a != b
    assert len(a) <= 34
    assert a.startswith("checkpoint") and a.endswith("size=4")
    assert short("a$b$") == r"a\$b\$"


# ---- files, and peak against speed


def did_not_run() -> list[TrialResult]:
    lost = prediction(312.4, fits=False, capacity_mib=200.0)
    first = trial("baseline", outcome="oom_device", evidence="measured", prediction=lost)
    ran = trial("checkpoint", 145.5, 152.3, evidence="measured")
    return [first, ran, trial("hybrid", outcome="crashed", evidence="measured")]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (sweep_of_six(), ["pareto", "at_peak", "loss", "budgets"]),
        (
            [trial(r.name, r.peak_mib, mode="predict", evidence="predicted") for r in sweep_of_six()],
            ["at_peak", "budgets"],
        ),
        ([trial("baseline", 312.4, 118.2)], ["pareto", "at_peak"]),
        ([trial(n, outcome="oom_device") for n in ("baseline", "hybrid")], []),
    ],
)
def test_the_pictures_are_drawn_for_what_there_is_data_for(
    results: list[TrialResult], expected: list[str], tmp_path: Path
) -> None:
    report = written(results, tmp_path)
    assert [p.stem for p in report.plots] == expected
    assert all(path.parent == tmp_path and path.read_bytes().startswith(b"\x89PNG") for path in report.plots)


def test_the_pareto_picture_shows_cap_baseline_preferred_and_what_did_not_run() -> None:
    figure = pareto(made_section(sweep_of_six("measured"), BudgetConf(memory_mib=150), 400.0))
    assert figure is not None
    axes = figure.axes[0]
    names = [t.get_text() for t in axes.texts]
    assert {"micro_batch (preferred)", "baseline"} <= set(names)
    assert any(list(line.get_xdata()) == [150.0, 150.0] for line in axes.lines)
    boxes = [t.get_window_extent() for t in axes.texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    figure = pareto(made_section(did_not_run(), BudgetConf(), 200.0))
    assert figure is not None
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert "baseline: oom_device (predicted peak 312.4 MiB)" in words
    assert "hybrid: crashed" in words
    assert figure.axes[0].get_xlim()[1] > 312.4


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    results = sweep_of_six()
    rate = lambda r: r.measured.samples_per_s
    best = [r.name for r in front(made_section(results).rows, rate)]
    assert best == ["hybrid", "micro_batch", "checkpoint_selective", "baseline"]
    results[1].verification = verified(0.3, passed=False)
    assert "micro_batch" not in [r.name for r in front(made_section(results).rows, rate)]


def test_a_picture_that_cannot_be_drawn_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(report: object) -> list[Path]:
        raise RuntimeError("no font")

    monkeypatch.setattr("sweep.report.plots.draw", broken)
    with pytest.warns(RuntimeWarning, match="no font"):
        report = written(sweep_of_six(), tmp_path)
    assert report.json_path.is_file() and report.markdown_path.is_file() and report.html_path.is_file()
