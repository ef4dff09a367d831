"""Which value of a metric is the best."""

import pytest

from raytf.config.objective import MetricObjective
from raytf.errors import ConfigError

HISTORY = [{"epoch": 0, "step": 10, "loss": 2.0}, {"epoch": 1, "step": 20, "loss": 1.0}]


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("val_accuracy", MetricObjective("val_accuracy", True)),
        ("loss", MetricObjective("loss", False)),
        ("val_mean_absolute_error", MetricObjective("val_mean_absolute_error", False)),
        ("val_sparse_categorical_crossentropy", MetricObjective("val_sparse_categorical_crossentropy", False)),
        ("AUC", MetricObjective("AUC", True)),
        ("val_f1_score", MetricObjective("val_f1_score", True)),
        ("max:mine", MetricObjective("mine", True)),
        ("min:accuracy", MetricObjective("accuracy", False)),
    ],
)
def test_direction(text, goal):
    assert MetricObjective.of(text) == goal


@pytest.mark.parametrize("text", ["", "mine", "max:", "most:accuracy", "accuracy_loss", ":loss"])
def test_no_direction(text):
    with pytest.raises(ConfigError, match=r"--keep-best .*Expected max:METRIC or min:METRIC") as refused:
        MetricObjective.of(text)
    assert "\n" not in str(refused.value)


def test_values():
    goal = MetricObjective("loss", False)
    assert goal.value_at(20, HISTORY) == 1.0
    assert goal.value_at(15, HISTORY) is None
    assert goal.value_at(0, []) is None
    assert goal.value({"loss": float("nan")}) is None
    assert goal.value({}) is None


@pytest.mark.parametrize(
    ("value", "than", "better"),
    [
        (1.0, None, True),
        (None, None, False),
        (None, 1.0, False),
        (1.0, 1.0, False),
        (2.0, 1.0, True),
        (0.5, 1.0, False),
    ],
)
def test_better(value, than, better):
    assert MetricObjective("accuracy", True).is_better(value, than) is better
    assert MetricObjective("loss", False).is_better(value, than) is (
        better if value is None or than is None else value < than
    )


def test_of_equal_ones_the_first_is_the_best():
    assert MetricObjective("accuracy", True).best({"b": 0.9, "a": 0.9, "c": None, "d": 0.1}) == "a"
    assert MetricObjective("accuracy", False).best({"b": 0.9, "d": 0.1}) == "d"
    assert MetricObjective("accuracy", True).best({"c": None}) is None
