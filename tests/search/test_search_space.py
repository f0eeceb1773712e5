"""The words of a command line, the space that they span, and the words of a job."""

from __future__ import annotations

import math

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial

from sweep.config.schema import encode
from sweep.errors import BadInput
from sweep.search.space import Space, read_space


def space(*words: str, params: dict[str, object] | None = None, extend=None) -> Space:
    return read_space(params or {}, list(words), None, extend)


def only(s: Space):
    (parameter,) = s.parameters.values()
    return parameter


@pytest.mark.parametrize(
    "value",
    [
        "a,b", "3", "true", "null", "1e-3", "", "it's", 'say "no"', "a b", "x=y", "[1]", "nan", "a\\", "${a.b}",
        "plain", "a-b/c.d", "10kib", " padded ", None, True, False, 0, -1, 1.0, 1e-5, 1e30, [1, 2], ["3", "a,b", None],
        {"a": 1, "b": [True, "x y"]}, [], {}, [[1], {"k": "5"}], math.inf,
    ],
)  # fmt: skip
def test_encoded_values_parse_back_to_the_same_value_and_type(value):
    parsed = OverridesParser.create().parse_override(f"k={encode(value)}").value()
    assert parsed == value
    assert type(parsed) is type(value)


def test_choices_are_known_by_their_own_values_and_written_in_hydras_grammar():
    s = space('x="a,b","3",true,null,[1,2],{a: 1},4')
    p = only(s)
    assert p.distribution == CategoricalDistribution(["a,b", "3", True, None, "[1,2]", "{a:1}", 4])
    assert [p.text(c) for c in p.distribution.choices] == ["'a,b'", "'3'", "true", "null", "[1,2]", "{a:1}", "4"]


def test_choices_that_python_takes_for_equal_stay_apart():
    p = only(space("x=choice(1,1.0,true)"))
    assert [p.text(c) for c in p.distribution.choices] == ["1", "1.0", "true"]
    assert len(set(p.distribution.choices)) == 3


@pytest.mark.parametrize(
    ("words", "distribution"),
    [
        ("x=range(1,6)", IntDistribution(1, 5)),
        ("x=range(4)", IntDistribution(0, 3)),
        ("x=range(1,10,3)", IntDistribution(1, 7, step=3)),
        ("x=range(5,0,-2)", IntDistribution(1, 5, step=2)),
        ("x=shuffle(range(1,4))", IntDistribution(1, 3)),
        ("x=sort(range(1,4),reverse=true)", IntDistribution(1, 3)),
        ("x=tag(log,range(1,100))", IntDistribution(1, 99, log=True)),
        ("x=range(0,1,0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
        ("x=interval(1,5)", FloatDistribution(1.0, 5.0)),
        ("x=tag(log,interval(0.1,10))", FloatDistribution(0.1, 10.0, log=True)),
        ("x=int(interval(1,5))", IntDistribution(1, 5)),
        ("x=tag(log,int(interval(1,100)))", IntDistribution(1, 100, log=True)),
        ("x=tag(other,interval(1,5))", FloatDistribution(1.0, 5.0)),
        ("x=shuffle(1,2,3)", CategoricalDistribution([1, 2, 3])),
        ("x=sort(3,1,2)", CategoricalDistribution([1, 2, 3])),
        ("x=str(choice(1,2))", CategoricalDistribution(["1", "2"])),
        ("db=mysql,sqlite", CategoricalDistribution(["mysql", "sqlite"])),
        ("db@other=mysql,sqlite", CategoricalDistribution(["mysql", "sqlite"])),
        ("+x=choice(a)", CategoricalDistribution(["a"])),
    ],
)
def test_hydras_grammar_as_distributions(words, distribution):
    assert only(space(words)).distribution == distribution


def test_a_range_of_floats_reaches_the_job_exactly_as_hydras_own_sweeper_would_write_it():
    p = only(space("x=range(0,1,0.1)"))
    hydras = list(OverridesParser.create().parse_override("x=range(0,1,0.1)").sweep_string_iterator())
    assert len(hydras) == 10
    assert [p.text(round(i * 0.1, 1)) for i in range(10)] == hydras
    assert [p.text(v) for v in p.candidates()] == hydras


@pytest.mark.parametrize(
    "words", ["x=range(5,1)", "x=interval(5,1)", "x=tag(log,interval(0,1))", "x=tag(log,range(1,9,2))"]
)
def test_words_that_span_nothing_are_refused(words):
    with pytest.raises(BadInput, match=r"^x="):
        space(words)


def test_the_command_line_wins_over_params_and_a_fixed_override_fixes_a_searched_key():
    params = {"x": "choice(1,2)", "+y": "range(1,4)", "z": "interval(0,1)", "w": 5}
    s = space("x=3", "y=7", "z=1,2", params=params)
    assert list(s.parameters) == ["z"]
    assert s.overrides({"z": 2}) == ["w=5", "x=3", "y=7", "z=2"]


def test_words_keep_their_place_with_additions_and_deletions():
    s = space("~old", "+new=1,2", "a.b=3", "++forced=choice(x)", "~gone=1")
    assert s.overrides({"+new": 2, "++forced": "x"}) == ["~old", "+new=2", "a.b=3", "++forced=x", "~gone=1"]


def test_points_of_a_grid_come_in_the_order_of_hydras_own_sweeper():
    s = space("a=1,2", "b=range(0,3)", "c=x")
    points = s.points(100)
    assert [s.overrides(p) for p in points] == [[f"a={a}", f"b={b}", "c=x"] for a in (1, 2) for b in (0, 1, 2)]
    assert s.points(5) is None
    assert space("a=interval(0,1)").points(100) is None


def conditional(config, trial: BaseTrial) -> None:
    if trial.params["kind"] == "deep":
        depth = trial.suggest_int("depth", 1, 3)
        if depth > 2:
            trial.suggest_categorical("+mode", ["a", "b"])
    trial.suggest_float("rate", 0.5, 1.0, step=0.5)


def test_a_conditional_space_is_walked_to_every_leaf_once():
    s = space("kind=flat,deep", extend=conditional)
    words = [" ".join(s.overrides(p)) for p in s.points(100)]
    deep = [f"kind=deep depth={d}" for d in (1, 2)] + [f"kind=deep depth=3 +mode={m}" for m in "ab"]
    assert sorted(words) == sorted(f"{w} rate={r}" for w in ["kind=flat", *deep] for r in (0.5, 1.0))
    assert s.points(9) is None


def test_a_conditional_space_with_a_continuous_key_is_not_finite():
    s = space("kind=flat,deep", extend=lambda config, trial: trial.suggest_float("rate", 0, 1) and None)
    assert s.points(100) is None


def test_a_fixed_override_fixes_a_conditional_key():
    s = space("kind=flat", "rate=0.7", extend=conditional)
    assert s.overrides({"kind": "flat", "rate": 0.5}) == ["kind=flat", "rate=0.7"]


def test_points_that_a_person_writes_are_found_among_the_choices():
    s = space("x=[1,2],null", "+y=range(1,4)", "z=interval(0,1)")
    assert s.label({"x": [1, 2], "y": 3, "z": 1}) == {"x": "[1,2]", "+y": 3, "z": 1.0}
    for wrong in ({"x": [2, 1]}, {"y": 4}, {"y": 1.5}, {"z": 2.0}, {"unknown": 1}):
        with pytest.raises(BadInput):
            s.label(wrong)


def test_every_choice_and_both_ends_of_a_range_are_composed_beforehand():
    texts = {key: p.texts_to_compose() for key, p in space("x=a,b", "y=range(1,9)").parameters.items()}
    assert texts == {"x": ["a", "b"], "y": ["1", "8"]}


def test_what_must_stay_the_same_tells_spaces_apart():
    same = space("x=1,2", "y=range(1,4)").describe()
    assert same == space("y=range(1,4)", "x=choice(1,2)").describe()
    assert same != space("x=1,3", "y=range(1,4)").describe()
    assert same != space("x=1,2", "y=range(1,5)").describe()
    assert space("x='1',2").describe() != space("x=1,2").describe()
