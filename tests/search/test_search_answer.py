"""Every form in which a job or a preflight may answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy
import pytest

from sweep.search.candidate import (
    LARGEST,
    OOM_CONSTRAINT,
    NoAnswer,
    read_answer,
    read_exception,
    read_preflight,
)


class Kind(str, Enum):
    ok = "ok"
    oom = "oom_device"


@dataclass
class Told:
    value: float | None = 1.5
    constraints: dict[str, float] = field(default_factory=dict)
    outcome: Kind = Kind.ok
    mlflow_run_id: str = "r1"


@pytest.mark.parametrize("returned", [2, 2.0, "2", numpy.float32(2), numpy.array(2.0), numpy.array([2.0]), [2], (2,)])
def test_one_number_is_the_objective(returned):
    assert read_answer(returned, ["value"]).values == [2.0]


@pytest.mark.parametrize(
    "returned", [[1, 2], (1, 2), numpy.array([1, 2]), {"values": [1, 2]}, {"values": {"b": 2, "a": 1}}]
)
def test_several_numbers_are_the_objectives(returned):
    assert read_answer(returned, ["a", "b"]).values == [1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "None"),
        (float("nan"), "value is nan"),
        ("much", "'much'"),
        ([1], "1 objective.* of 2"),
        ([1, None], "b is None"),
        ({"values": {"a": 1}}, "no b"),
        ({"loss": 1}, "none of value"),
        ({"values": [1, float("nan")]}, "b is nan"),
        ({"values": [1, 2], "constraints": {"memory": float("nan")}}, "memory is nan"),
        ({"values": [1, 2], "constraints": {"memory": None}}, "memory is None"),
        (object(), "not a number"),
        ({"constraints": {"memory": -1.0}}, "no a and no b"),
    ],
)
def test_what_is_no_answer_says_why(returned, reason):
    names = ["a", "b"] if returned is not None and not isinstance(returned, (float, str)) else ["value"]
    with pytest.raises(NoAnswer, match=reason):
        read_answer(returned, names)


def test_a_mapping_and_an_object_say_the_same():
    for told in ({"value": 1.5, "mlflow_run_id": "r1", "outcome": "ok"}, Told()):
        answer = read_answer(told, ["value"])
        assert (answer.values, answer.outcome, answer.mlflow_run_id, answer.failed) == ([1.5], "ok", "r1", False)


def test_a_violation_is_infeasible_and_needs_no_value():
    answer = read_answer({"constraints": {"memory": 5, "loss": -1}}, ["value"])
    assert (answer.outcome, answer.values, answer.violation, answer.failed) == ("infeasible", None, 5.0, False)
    answer = read_answer({"value": float("nan"), "constraints": {"memory": 5}}, ["value"])
    assert (answer.values, answer.failed) == (None, False)


def test_out_of_memory_without_a_number_gets_a_violation():
    answer = read_answer(Told(value=None, outcome=Kind.oom), ["value"])
    assert (answer.outcome, answer.constraints, answer.failed) == ("oom_device", {OOM_CONSTRAINT: 1.0}, False)
    answer = read_answer({"outcome": "oom_device", "constraints": {"memory": 7.0}}, ["value"])
    assert answer.constraints == {"memory": 7.0}


def test_an_outcome_that_went_wrong_takes_its_number_back():
    answer = read_answer({"value": 3.0, "outcome": "invalid"}, ["value"])
    assert (answer.values, answer.failed, answer.reason) == (None, True, "invalid")


def test_infinite_violations_become_finite():
    assert read_answer({"value": 1, "constraints": {"m": float("inf")}}, ["value"]).constraints == {"m": LARGEST}


def test_exceptions():
    class OutOfMemoryError(RuntimeError): ...

    for error in (MemoryError(), OutOfMemoryError("no"), RuntimeError("CUDA error: out of memory")):
        answer = read_exception(error, "memory")
        assert (answer.outcome, answer.constraints, answer.failed) == ("oom_device", {"memory": 1.0}, False)
    answer = read_exception(ValueError("first line\nsecond"))
    assert (answer.outcome, answer.reason, answer.failed) == ("failed", "ValueError: first line", True)


def test_a_preflight_lets_run_or_refuses():
    assert read_preflight(None, ["value"]).run
    assert read_preflight(True, ["value"]).run
    assert not read_preflight(False, ["value"]).run
    assert read_preflight({"value": 3.0, "constraints": {"memory": -1}}, ["value"]).run
    over = read_preflight({"value": 3.0, "constraints": {"memory": 2}}, ["value"])
    assert (over.run, over.outcome, over.values) == (False, "over_budget", [3.0])
    assert over.estimated
    assert not over.failed
    still = read_preflight({"run": True, "constraints": {"memory": 2}}, ["value"])
    assert still.run
    # An estimate without a violation must never pass for a result.
    refused = read_preflight({"run": False, "value": 3.0, "outcome": "invalid"}, ["value"])
    assert (refused.run, refused.values, refused.failed, refused.outcome) == (False, None, True, "invalid")
    with pytest.raises(NoAnswer):
        read_preflight(3.0, ["value"])
