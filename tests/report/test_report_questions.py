"""A reader who was not there asks; the report answers each question, in order, with a number and what it rests on."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from made_up import prediction, sweep_of_six, sweep_over_seeds, trial, verified
from report_parts import COMMAND, built, section

from sweep.config.schema import BudgetConf
from sweep.format import EVIDENCE_SHORT
from sweep.report import describe, markdown
from sweep.report.blocks import Points
from sweep.report.content import (
    change_cell,
    drift_words,
    hold,
    page,
    quality_cell,
    quality_lines,
    seeds_words,
    speed,
    spread,
    time_words,
    why,
)
from sweep.report.data import Report, Row, Section
from sweep.report.markdown import describe as describe_blocks
from sweep.report.markdown import escape
from sweep.results import Difference, Drift, Finding, TrialResult, WhatIf

QUESTIONS = [
    "What filled the memory?",
    "What was changed?",
    "What did it save?",
    "What did it cost?",
    "Why?",
    "Does it hold?",
    "What next?",
    "Which command repeats it?",
]


def predicted() -> list[TrialResult]:
    found = []
    for r in sweep_over_seeds():
        assert r.measurement is not None and r.measurement.peak is not None
        p = prediction(r.measurement.peak.mib, peak=r.measurement.peak, capacity_mib=11000.0)
        found.append(trial(r.name, r.measurement.peak.mib, mode="predict", evidence="predicted", prediction=p))
    return found


def out_of_memory() -> list[TrialResult]:
    first = trial("baseline", outcome="oom_device", evidence="measured", prediction=prediction(312.4, fits=False))
    return [first, *sweep_over_seeds("measured")[1:]]


SWEEPS: dict[str, tuple[list[TrialResult], BudgetConf, float | None, str]] = {
    "accept the baseline": (sweep_over_seeds(), BudgetConf(), None, "accept"),
    "accept a candidate": (sweep_over_seeds(), BudgetConf(memory_mib=200), None, "accept"),
    "accept on a GPU": (sweep_over_seeds("measured"), BudgetConf(memory_mib=200), 16000.0, "accept"),
    "the baseline out of memory": (out_of_memory(), BudgetConf(), 200.0, "accept"),
    "tune": (sweep_over_seeds(), BudgetConf(memory_mib=100), None, "tune"),
    "smoke": (sweep_of_six("smoke"), BudgetConf(memory_mib=200), None, "tune"),
    "reject": (
        [trial(n, outcome="invalid", verification=verified(0.3, passed=False)) for n in ("micro_batch", "hybrid")],
        BudgetConf(memory_mib=100),
        None,
        "reject",
    ),
    "predicted": (predicted(), BudgetConf(), 200.0, "accept"),
    "one seed": (sweep_over_seeds(seeds=1), BudgetConf(memory_mib=200), None, "accept"),
}


@pytest.fixture(params=list(SWEEPS))
def report(request: pytest.FixtureRequest, tmp_path: Path) -> Report:
    results, budget, capacity, verdict = SWEEPS[request.param]
    made = built(results, budget, capacity, tmp_path)
    assert made.sections[0].comparison.verdict == verdict
    return made


def asked(text: str) -> dict[str, str]:
    """What the report says to each question."""
    parts = re.split(r"^### (.*)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def made_of(name: str) -> Section:
    return section(*SWEEPS[name][:3])


def of(name: str, question: str) -> str:
    return asked(markdown(built(*SWEEPS[name][:3])))[question]


def test_each_question_is_answered_in_order_with_a_number(report: Report) -> None:
    text = markdown(report)
    found = asked(text)
    way_home = [q for q in found if q not in QUESTIONS]
    assert list(found) == [*QUESTIONS[:-1], *way_home, QUESTIONS[-1]] and way_home in ([], ["Use it"])
    for question in QUESTIONS[:-1]:
        assert re.search(r"\d", found[question]), question
    for question in ("What filled the memory?", "What did it save?"):
        assert "MiB" in found[question]
    assert text.index("**Verdict: ") < text.index(QUESTIONS[0])
    assert COMMAND in found[QUESTIONS[-1]]
    assert "python -m sweep.report " in found[QUESTIONS[-1]]
    row = report.sections[0].preferred
    if row is not None:
        assert row.result.command in found[QUESTIONS[-1]]
        assert row.name in found["What did it cost?"]


def test_what_does_not_rest_on_a_gpu_is_never_worded_as_its_gain(report: Report) -> None:
    text = markdown(report)
    evidence = report.sections[0].comparison.evidence
    assert text.count(EVIDENCE_SHORT[evidence]) >= (1 if report.sections[0].comparison.verdict == "reject" else 2)
    if evidence != "measured":
        assert "on this GPU" not in text


def test_a_description_answers_the_same_questions_and_cuts_no_table(report: Report) -> None:
    text = describe(report)
    assert len(text) <= 7900
    assert [q for q in asked(text) if q != "Use it"] == QUESTIONS
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        lines = table.splitlines()
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
        assert len(lines) > 2


@pytest.mark.parametrize("limit", [7900, 4000, 1500, 700])
def test_a_shorter_description_ends_between_blocks(limit: int) -> None:
    text = describe_blocks(page(made_of("accept a candidate")), limit)
    assert len(text) <= limit
    assert "**Verdict: accept micro_batch.**" in text
    assert text.endswith("(shortened; the whole is in report.md)\n")
    assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))


# ---- the answers


def test_the_pressure_names_the_cap_and_what_strategies_can_lower() -> None:
    words = of("accept a candidate", "What filled the memory?")
    assert "156 % of the cap of 200.0 MiB (budget.memory_mib), 112.4 MiB over it" in words
    assert "230.0 MiB (74 %) are activations" in words
    assert "60.0 MiB (19 %) are parameters, gradients and optimizer state" in words
    assert "No memory cap is set" in of("accept the baseline", "What filled the memory?")
    words = of("the baseline out of memory", "What filled the memory?")
    assert "The baseline ran out of device memory. The baseline's peak is 312.4 MiB (predicted)" in words


def test_what_was_changed_lists_what_is_equal_and_each_strategy() -> None:
    words = of("accept a candidate", "What was changed?")
    assert "1.64 million parameters in 8 blocks, 16 samples per optimizer step, sequences of 128" in words
    assert "computes 4 of 16 samples at once, 4 pieces" in words
    assert "recomputes every block in backward; offloads saved tensors of at least 64 KiB, except those of the" in words


def test_the_saving_where_the_baseline_is_kept_is_what_could_be_saved() -> None:
    words = of("accept the baseline", "What did it save?")
    assert "saves nothing (0 MiB)" in words
    assert "hybrid: 202.6 MiB (65 %), on this CPU" in words
    assert "micro_batch saves 184.4 MiB (59 % of the baseline's peak)" in of("accept a candidate", "What did it save?")


def test_the_cost_has_time_with_interval_quality_host_memory_and_bytes_moved() -> None:
    results = SWEEPS["accept a candidate"][0]
    made = built([results[0], results[4]], BudgetConf(memory_mib=200))
    words = asked(markdown(made))["What did it cost?"]
    assert re.search(r"\*\*Time:\*\* 166\.\d ms per step \(95 % interval 1\d\d\.?\d* to 1\d\d\.?\d* ms\)", words)
    assert "equal to the baseline's: held-out loss equal to the last bit (3 seeds)" in words
    assert re.search(r"held-out loss \S+ \(95 % interval \S+ to \S+\), equal", words)
    assert re.search(r"^\| \*\*offload\*\* \| .* \| 190.0 \| 380.0 \| cpu \|$", words, re.M)


def test_a_predicted_report_does_not_claim_times() -> None:
    words = of("predicted", "What did it cost?")
    assert "are not known: nothing was run" in words
    assert "Theoretical" in words
    assert "ms per step" not in words


def test_the_why_has_the_parts_and_they_add_up() -> None:
    made = made_of("accept a candidate")
    words = of("accept a candidate", "Why?")
    assert "| checkpoint | 312.4 | -230.0 | " in words
    for row in made.candidates:
        assert row.explanation is not None and row.explanation.peak is not None
        change = row.explanation.peak
        assert change.before + sum(p.value for p in change.parts) + change.residual == pytest.approx(change.after)
    assert "trace.json" in words
    assert "Shares of a step under the profiler" in words


def test_findings_that_differ_in_numbers_alone_are_told_once() -> None:
    made = made_of("predicted")
    gone = [Finding("optimizer_peak_now", {"gone_mib": mib, "saved_mib": 3.1}) for mib in (230.0, 120.0)]
    for row, finding in zip(made.candidates, [*gone, Finding("faster_with_more")]):
        assert row.explanation is not None
        row.explanation.findings = [finding]
    for row in made.candidates[3:]:
        if row.explanation is not None:
            row.explanation.findings = []
    items = [item for block in why(made) if isinstance(block, Points) for item in block.items]
    first, second, third = (r.name for r in made.candidates[:3])
    told = {lead: words for lead, words in items if lead.endswith(":")}
    assert told[f"{first} (and {second} alike):"].startswith("of 230.0 MiB activations")
    assert told[f"{third}:"].startswith("a step is shorter")


def test_what_else_would_lower_the_peak_is_no_candidate() -> None:
    results = predicted()
    override = "workload.optimizer.implementation=fused"
    assert results[2].prediction is not None
    results[2].prediction.what_if = [WhatIf(override, 100.0, 104.0, 45.5, "backward", "aten.mm", "fused")]
    words = asked(markdown(built(results, BudgetConf(), 400.0)))["What next?"]
    assert f"| checkpoint | {override} | 100.0 | 45.5 | backward |" in words
    assert f"- **{override}:** the fused optimizer updates in one kernel" in words
    assert "another workload" in words


# ---- does it hold


def test_how_sure_names_repeats_turns_seeds_and_readings() -> None:
    words = of("accept a candidate", "Does it hold?")
    assert "6 of 6 trials ran; 3 repeats of 5 timed steps, in one process, in turn over the trials" in words
    assert "15 step times per trial" in words
    assert "0 of 6 trials, by 18 readings of the machine" in words
    assert "3 seeds, compared in pairs" in words
    assert "among 5 comparisons about 0.25 would be called different by chance alone" in words
    assert "(0 repeats; measure.drift=true repeats it)" in words
    assert "allowed 1.0e-4" in words
    assert "Within 0.10 % of the measured peak for 6 trials" in words
    assert "Memory cap (now 200.0 MiB)" in words


def test_a_repeat_that_failed_is_told_and_does_not_count() -> None:
    results = sweep_over_seeds()
    assert results[1].measurement is not None
    results[1].measurement.runs[0].error = "OutOfMemoryError"
    words = asked(markdown(built(results, BudgetConf(), None)))["Does it hold?"]
    assert "1 repeat did not come to an end" in words


@pytest.mark.parametrize(("none", "said"), [(True, "none beyond the noise"), (False, "may be the machine's")])
def test_the_machines_drift(none: bool, said: str) -> None:
    drift = Drift(100.0, 104.0, Difference(1.04, 1.01, 1.07, none), 3.2)
    words = drift_words(drift)
    assert "100.0 ms per step at first and 104.0 ms in the end, 3.2 minutes later: +4.0 %" in words
    assert "(95 % interval +1.0 % to +7.0 %)" in words
    assert said in words


def test_a_disturbed_trial_is_named() -> None:
    made = made_of("accept a candidate")
    made.rows[2].decision.disturbed = [Finding("cpu_others", {"cores": 1.4, "of_cores": 8.0}), Finding("hot")]
    items = dict(item for block in hold(made) if isinstance(block, Points) for item in block.items if item[0])
    who = made.rows[2].name
    assert items["Disturbed:"] == f"1 of 6 trials: {who} (other processes used 1.4 of 8 cores and 1 more finding)."


# ---- times and quality


def timed(row: Row, step: Difference | None = None, ratio: float | None = None, **changes: float | None) -> Row:
    """The row with other times."""
    assert row.measured is not None
    result = dataclasses.replace(row.result, measurement=dataclasses.replace(row.measured, **changes))  # type: ignore[arg-type]
    return Row(result, dataclasses.replace(row.decision, step=step, throughput_ratio=ratio))


@pytest.mark.parametrize(
    ("step", "low", "high", "expected"),
    [
        (310.23, 305.1, 316.0, "310 (305-316)"),
        (310.23, 310.1, 310.5, "310.2 (310.1-310.5)"),
        (3.2123, 3.05, 3.36, "3.2 (3.0-3.4)"),
        (0.8123, 0.8, 0.83, "0.81 (0.80-0.83)"),
        (310.23, None, None, "310.2 ±5.0"),
    ],
)
def test_step_times_show_no_more_digits_than_their_interval(
    step: float, low: float | None, high: float | None, expected: str
) -> None:
    row = made_of("accept a candidate").rows[1]
    changed = {"step_ms_ci_low": low, "step_ms_ci_high": high, "step_ms_low": 300.0, "step_ms_high": 310.0}
    assert spread(timed(row, step_ms=step, **changed)) == expected


def test_a_difference_inside_of_the_noise_is_called_none() -> None:
    made = made_of("accept a candidate")
    row = timed(made.rows[1], Difference(1.01, 0.98, 1.03, True), 0.99)
    assert (speed(row), change_cell(row)) == ("none", "none (-2 to +3 %)")
    assert "no difference beyond the noise against the baseline's 118.1 ms" in time_words(made, row)
    row = timed(made.rows[1], Difference(1.3, 1.25, 1.34, False), 0.99)
    assert (speed(row), change_cell(row)) == ("0.99x", "+30 % (+25 to +34)")
    assert "+30.0 % against the baseline's 118.1 ms (95 % interval +25.0 % to +34.0 %)" in time_words(made, row)
    row = timed(made.rows[1], None, 0.5)
    assert change_cell(row) == "+100 %"
    assert "whether that is noise is not known" in time_words(made, row)


def test_quality_is_told_by_verdict() -> None:
    three, one = made_of("accept a candidate"), made_of("one seed")
    assert quality_lines(three) == [
        "equal to the last bit: checkpoint, checkpoint_selective, offload, hybrid",
        "equal within the noise: micro_batch +0.0072 (-0.0071 to +0.021)",
    ]
    assert "3 seeds, compared in pairs" in seeds_words(three)
    assert quality_cell(three.rows[2]) == "equal, 0"
    assert "not known with 1 seed (measure.seeds=3 would tell): micro_batch" in quality_lines(one)[-1]
    assert quality_cell(one.rows[1]).startswith("not known, +0.0")
    assert seeds_words(one).startswith("1 seed, so losses")


# ---- markdown


def test_markdown_is_made_of_whole_tables_without_pictures(report: Report) -> None:
    text = markdown(report)
    assert "![" not in text  # a run's description shows no picture that lies beside it
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.M)
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    assert tables[0].count("\n") == len(report.sections[0].rows) + 2


def test_a_description_of_a_hundred_trials_fits_mlflow_and_keeps_what_matters() -> None:
    results = [trial("baseline", 300.0, 100.0)]
    results += [
        trial("micro_batch", 100.0 + i, 200.0 - i / 2, name=f"micro_batch number_{i}", measure={"spread": 0.0})
        for i in range(100)
    ]
    report = built(results, BudgetConf(memory_mib=250))
    assert len(markdown(report)) > 8000
    text = describe(report)
    assert len(text) <= 7900
    assert "| baseline |" in text
    assert "| **micro_batch number_99** |" in text
    assert "more trials are in `report.json`" in text
    assert "Which command repeats it?" in text


def test_a_description_of_very_long_words_is_cut_with_a_note() -> None:
    text = describe(built([trial("offload", outcome="failed", error="x" * 9000)]))
    assert len(text) <= 7900
    assert "the whole is in report.md" in text


# ---- escaping


@pytest.mark.parametrize(
    ("text", "begins", "expected"),
    [
        ("a|b", False, r"a\|b"),
        ("# no heading", True, r"\# no heading"),
        ("- no list", True, r"\- no list"),
        ("1. no list", True, r"1\. no list"),
        ("-12", False, "-12"),
        ("&lt;b&gt;", False, r"\&lt;b\&gt;"),
        ("R&D", False, "R&D"),
        ("<b>[x](y)", False, r"\<b>\[x](y)"),
        ("two\nlines", False, "two lines"),
    ],
)
def test_escape(text: str, begins: bool, expected: str) -> None:
    assert escape(text, begins) == expected
