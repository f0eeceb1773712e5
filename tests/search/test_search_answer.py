"""What a job or a preflight may say."""

from __future__ import annotations

import numpy
import pytest
import torch

from sweep.search import candidate
from sweep.search.candidate import Answer, NoAnswer, read_answer, read_exception, read_preflight


@pytest.mark.parametrize("returned", [2, 2.0, "2", numpy.float32(2), numpy.array(2.0), numpy.array([2.0]), [2], (2,)])
def test_one_number_is_the_objective(returned):
    assert read_answer(returned, ["value"]).values == [2.0]


@pytest.mark.parametrize("returned", [[1, 2], (1, 2), numpy.array([1, 2]), torch.tensor([1, 2]), Answer(values=[1, 2])])
def test_several_numbers_are_the_objectives(returned):
    assert read_answer(returned, ["a", "b"]).values == [1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "None"),
        (3.0, r"1 objective\(s\) of 2 \(a, b\)"),
        ([1, None], "b is None"),
        ([1, "much"], "b is 'much'"),
        ({"a": 1, "b": 2}, "1 objective"),
        (Answer(values=[1, float("nan")]), "b is nan"),
        (Answer(values=[1, 2], constraints={"memory": float("nan")}), "memory is nan"),
        (Answer(constraints={"memory": -1.0}), "no a and no b"),
    ],
)
def test_what_is_no_answer_says_why(returned, reason):
    with pytest.raises(NoAnswer, match=reason):
        read_answer(returned, ["a", "b"])


def test_a_violation_is_infeasible_and_needs_no_value():
    for values in (None, [float("nan")]):
        answer = read_answer(Answer(values=values, constraints={"memory": 5, "loss": -1}), ["value"])
        assert (answer.outcome, answer.values, answer.violation, answer.failed) == ("infeasible", None, 5.0, False)
    endless = read_answer(Answer(values=[1], constraints={"m": float("inf")}), ["value"])
    assert endless.constraints == {"m": candidate.LARGEST}


def test_an_outcome_that_went_wrong_takes_its_number_back_and_out_of_memory_is_a_violation():
    answer = read_answer(Answer("invalid", values=[3.0]), ["value"])
    assert (answer.values, answer.failed, answer.reason) == (None, True, "invalid")
    answer = read_answer(Answer("oom_device"), ["value"])
    assert (answer.outcome, answer.constraints) == ("oom_device", {candidate.OOM_CONSTRAINT: 1.0})
    assert not answer.failed
    assert read_answer(Answer("oom_device", constraints={"memory": 7.0}), ["value"]).constraints == {"memory": 7.0}


def test_exceptions():
    for error, outcome in ((MemoryError(), "oom_host"), (RuntimeError("CUDA error: out of memory"), "oom_device")):
        answer = read_exception(error, "memory")
        assert (answer.outcome, answer.constraints, answer.failed) == (outcome, {"memory": 1.0}, False)
    answer = read_exception(ValueError("first line\nsecond"))
    assert (answer.outcome, answer.reason, answer.failed) == ("failed", "ValueError: first line", True)


def test_a_preflight_lets_run_or_refuses():
    assert read_preflight(None, ["value"]).run
    assert read_preflight(Answer(values=[3.0], constraints={"memory": -1}), ["value"]).run
    assert read_preflight(Answer(run=True, constraints={"memory": 2}), ["value"]).run
    over = read_preflight(Answer(values=[3.0], constraints={"memory": 2}), ["value"])
    assert (over.run, over.outcome, over.values) == (False, "over_budget", [3.0])
    assert (over.estimated, over.failed) == (True, False)
    # An estimate without a violation must never pass for a result.
    refused = read_preflight(Answer("invalid", values=[3.0], run=False), ["value"])
    assert (refused.run, refused.values, refused.failed, refused.outcome) == (False, None, True, "invalid")
    with pytest.raises(NoAnswer):
        read_preflight(3.0, ["value"])
