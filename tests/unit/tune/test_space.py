"""Search expressions: what they mean, what is refused, and that a trial's values follow from seed and number alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.errors import ConfigError
from raytf.tune.space import Dimension, SearchSpace, flags, parse, short


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rate=loguniform(1e-4,1e-1)", Dimension("learning_rate", "loguniform", (1e-4, 1e-1))),
        ("--learning-rate = loguniform( 1e-4 , 1e-1 )", Dimension("learning_rate", "loguniform", (1e-4, 1e-1))),
        ("dropout=quniform(0,0.5,0.1)", Dimension("dropout", "quniform", (0, 0.5, 0.1))),
        ("shift=uniform(-1,1)", Dimension("shift", "uniform", (-1, 1))),
        ("seed=randint(0,10)", Dimension("seed", "randint", (0, 10))),
        ("optimizer=choice(adam,sgd)", Dimension("optimizer", "choice", ("adam", "sgd"))),
        ("data=choice('/a b/c',\"x-y\")", Dimension("data", "choice", ("/a b/c", "x-y"))),
        ("batch_norm=grid(True,False)", Dimension("batch_norm", "grid", (True, False))),
        ("steps=grid(None,3)", Dimension("steps", "grid", (None, 3))),
    ],
)
def test_expressions(text: str, expected: Dimension):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate", ["expected FLAG=KIND(VALUES)"]),
        ("=uniform(0,1)", ["expected FLAG=KIND(VALUES)"]),
        ("a b=uniform(0,1)", ["expected FLAG=KIND(VALUES)"]),
        ("x=0.1", ["'0.1' is none of", "loguniform(LOW, HIGH)", "grid(A, B, ...)"]),
        ("x=normal(0,1)", ["'normal(0,1)' is none of"]),
        ("x=uniform(0,1", ["expected uniform(LOW, HIGH)"]),
        ("x=uniform(0,1)+1", ["expected uniform(LOW, HIGH)"]),
        ("x=uniform(low=0,high=1)", ["expected uniform(LOW, HIGH)"]),
        ("x=uniform(0,1,2)", ["takes LOW, HIGH, and there are 3 values"]),
        ("x=quniform(0,1)", ["takes LOW, HIGH, STEP, and there are 2 values"]),
        ("x=uniform(a,b)", ["'a' is not a number"]),
        ("x=uniform(True,2)", ["True is not a number"]),
        ("x=uniform(0,1e999)", ["inf is not a number"]),
        ("x=uniform(1,1)", ["LOW 1 is not below HIGH 1"]),
        ("x=loguniform(0,1)", ["LOW above 0"]),
        ("x=quniform(0,1,0)", ["STEP 0 is not above 0"]),
        ("x=quniform(0,0.5,0.3)", ["HIGH 0.5 is not a multiple of STEP 0.3", "such as quniform(0,0.3,0.3)"]),
        ("x=quniform(0.1,0.7,0.2)", ["LOW 0.1 is not a multiple of STEP 0.2", "such as quniform(0.2,0.6,0.2)"]),
        ("x=quniform(0,1,3)", ["HIGH 1 is not a multiple of STEP 3", "LOW and HIGH that are multiples."]),
        ("x=quniform(0,1e308,1e-308)", ["STEP 1e-308 is too small"]),
        ("x=randint(0,1.5)", ["whole numbers", "1.5"]),
        ("x=choice()", ["choice has no values"]),
        ("x=grid(1,2,1)", ["appears twice"]),
        ("x=choice(/data,b)", ["put others in quotes"]),
        ("x=choice([1,2],3)", ["put others in quotes"]),
        ("x=choice(__import__('os').getcwd(),3)", ["put others in quotes"]),
    ],
)
def test_what_is_no_expression_is_refused_in_one_line(text: str, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("--search ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("steps", ["0,1,0.1", "0,0.3,0.1", "0.01,0.29,0.01", "0.2,0.6,0.2", "-3,9,1.5"])
def test_bounds_that_are_multiples_but_for_the_last_bit_are_taken(steps: str):
    low, high, step = map(float, steps.split(","))
    for number in range(20):
        value = SearchSpace([f"x=quniform({steps})"]).point(0, number)["x"]
        assert low - 1e-9 <= value <= high + 1e-9
        assert math.isclose(value / step, round(value / step), abs_tol=1e-9)


@pytest.mark.parametrize("text", ["x=uniform(-1e308,1e308)", "x=randint(0,1e20)"])
def test_bounds_from_which_nothing_can_be_drawn_are_refused_in_one_line(text: str):
    with pytest.raises(ConfigError, match=r"^--search 'x=.*no value can be drawn .*nearer to 0\.$"):
        SearchSpace([text]).point(0, 0)


def test_each_flag_is_searched_once_and_one_at_least():
    with pytest.raises(ConfigError, match="nothing to search"):
        SearchSpace([])
    with pytest.raises(ConfigError, match="learning_rate appears twice"):
        SearchSpace(["learning_rate=grid(1,2)", "learning-rate=uniform(0,1)"])


KINDS = st.sampled_from(
    ["uniform(0.5,2)", "loguniform(1e-4,1e-1)", "quniform(0,1,0.25)", "randint(3,9)", "choice(a,b)"]
)


@settings(max_examples=25)
@given(KINDS, st.integers(0, 2**32 - 1), st.integers(0, 10_000))
def test_the_values_of_a_trial_follow_from_seed_and_number_alone(kind: str, seed: int, number: int):
    alone = SearchSpace([f"x={kind}"])
    beside = SearchSpace(["z=uniform(0,1)", f"x={kind}", "a=grid(1,2,3)"])
    assert alone.point(seed, number) == alone.point(seed, number)
    assert alone.point(seed, number)["x"] == beside.point(seed, number)["x"]
    assert beside.point(seed, number)["a"] == number % 3 + 1


@settings(max_examples=50)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_values_lie_where_they_shall(seed: int, number: int):
    texts = ["u=uniform(0.5,2)", "l=loguniform(1e-4,1e-1)", "q=quniform(0,1,0.25)", "r=randint(3,9)", "c=choice(a,b)"]
    point = SearchSpace(texts).point(seed, number)
    assert 0.5 <= point["u"] < 2
    assert 1e-4 <= point["l"] < 1e-1 + 1e-9
    assert point["q"] in (0, 0.25, 0.5, 0.75, 1)
    assert point["r"] in range(3, 9)
    assert type(point["r"]) is int
    assert point["c"] in ("a", "b")


def test_other_numbers_and_seeds_give_other_values():
    space = SearchSpace(["x=uniform(0,1)"])
    values = [space.point(0, n)["x"] for n in range(20)] + [space.point(1, 0)["x"]]
    assert len(set(values)) == 21
    logs = [math.log10(SearchSpace(["x=loguniform(1e-4,1)"]).point(0, n)["x"]) for n in range(200)]
    assert -2.3 < sum(logs) / len(logs) < -1.7  # every power of ten as often


def test_a_grid_has_all_its_points_in_order():
    space = SearchSpace(["b=grid(1,2)", "a=grid(x,y)"])
    assert space.grid_points == 4
    assert [space.point(9, n) for n in range(4)] == [
        {"a": "x", "b": 1},
        {"a": "x", "b": 2},
        {"a": "y", "b": 1},
        {"a": "y", "b": 2},
    ]
    assert SearchSpace(["a=grid(1,2)", "b=uniform(0,1)"]).grid_points is None


def test_values_become_flags_with_all_their_digits():
    value = SearchSpace(["learning_rate=loguniform(1e-4,1e-1)"]).point(0, 0)["learning_rate"]
    (flag,) = flags({"learning_rate": value})
    assert float(flag.removeprefix("--learning-rate=")) == value
    assert flags({"batch_norm": True, "jit": False, "data": "a b", "steps": 3, "x": -1.0}) == [
        "--batch-norm",
        "--no-jit",
        "--data=a b",
        "--steps=3",
        "--x=-1.0",
    ]
    assert [short(v) for v in (0.123456, 3, "adam", True)] == ["0.1235", "3", "adam", "True"]
