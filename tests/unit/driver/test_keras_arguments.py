"""What `keras.Model.fit` takes, as data and settings of raytf."""

from __future__ import annotations

import numpy as np
import pytest

from raytf.config.train_config import TrainConfig
from raytf.driver import inputs, resolve
from raytf.errors import ConfigError, DataError

X, Y, WEIGHT = np.arange(20.0).reshape(10, 2), np.arange(10), np.ones(10)


class Table:
    """As pandas has them."""

    shape = (10, 2)

    def __array__(self):
        return X

    def to_numpy(self):
        return X


@pytest.mark.parametrize(
    ("flags", "batch_size", "epochs", "is_keras", "expected"),
    [
        (None, None, None, True, (32, None, [])),
        (None, None, None, False, (128, None, [])),
        (None, 50, 3, True, (50, 3, [])),
        ({}, None, None, True, (128, None, [])),
        ({}, 50, 3, True, (50, 3, [])),
        ({"global_batch_size": 64}, 64, None, True, (64, None, [])),
        ({"global_batch_size": 64}, 50, None, True, (64, None, ["batch_size=50", "--global-batch-size 64"])),
        ({"epochs": 2}, None, 3, True, (128, 2, ["epochs=3", "--epochs 2"])),
        ({"epochs": 3}, None, 3, True, (128, 3, [])),
        ({"steps": 5}, None, 3, True, (128, None, ["epochs=3", "--steps 5"])),
    ],
)
def test_a_flag_wins_over_an_argument_and_an_argument_over_a_default(flags, batch_size, epochs, is_keras, expected):
    config = None if flags is None else TrainConfig.of(**flags)
    found, said = resolve.settings(config, {"batch_size": batch_size, "epochs": epochs}, is_keras)
    size, length, words = expected
    assert (found.batch.global_batch_size, found.length.epochs) == (size, length)
    assert bool(said) is bool(words)
    assert all(word in " ".join(said) for word in words)


@pytest.mark.parametrize(
    ("flags", "arguments", "expected", "overruled"),
    [
        (None, {"workers": 2, "exact": True}, {"workers": "2", "exact": True, "global_batch_size": 32}, ""),
        ({}, {"workers": 2, "run": "a"}, {"workers": "2", "run": "a", "global_batch_size": 128}, ""),
        ({"workers": "4"}, {"workers": 2}, {"workers": "4"}, "workers=2 of the program is overruled by --workers 4"),
        ({"workers": "4"}, {"workers": 4}, {"workers": "4"}, ""),
        ({"exact": True}, {"exact": False}, {"exact": True}, "exact=False of the program is overruled by --exact"),
        ({"keep": 3}, {"keep": 5}, {"keep": 5}, ""),
        ({}, {"steps": 7}, {"steps": 7, "epochs": None}, ""),
        ({"epochs": 2}, {"steps": 7}, {"steps": None}, "steps=7 of the program is overruled by --epochs 2"),
        (
            {"steps": 7},
            {"steps": 7, "epochs": 2},
            {"epochs": None},
            "epochs=2 of the program is overruled by --steps 7",
        ),
    ],
)
def test_settings_of_a_call_follow_the_same_rule(flags, arguments, expected, overruled):
    config = None if flags is None else TrainConfig(**flags)
    found, said = resolve.settings(config, arguments, True)
    assert {name: found.values[name] for name in expected} == expected
    assert said == ([overruled] if overruled else [])


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (None, {"batch_size": 0}, "batch_size=0: expected a number, 1 or more."),
        (None, {"batch_size": "8"}, "batch_size='8': expected a whole number."),
        (TrainConfig(epochs=3), {"epochs": 0}, "epochs=0: expected a number, 1 or more."),
        (None, {"exact": "yes"}, "exact='yes': expected True or False."),
        (None, {"epochs": 2, "steps": 7}, "epochs and steps exclude each other: pass one of them."),
        ({}, {}, "config is a dict. Expected a raytf.TrainConfig; or leave it out, and pass settings as keyword "
         "arguments: fit(..., workers=2)."),
    ],
)  # fmt: skip
def test_a_refusal_names_the_argument(config, arguments, message):
    with pytest.raises(ConfigError) as refused:
        resolve.settings(config, arguments, True)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("wrokers", "Did you mean 'workers'?"),
        ("epoch", "Did you mean 'epochs'?"),
        ("global_batch_size", "Did you mean 'batch_size'?"),
        ("settings", "help(raytf.fit) lists its arguments."),
        ("xyzzy", "help(raytf.fit) lists its arguments."),
    ],
)
def test_an_unknown_argument_is_refused_as_by_keras_with_a_suggestion(name, hint):
    own = ["model", "batch_size", "epochs"]
    resolve.refuse_unknown(["workers", "exact"], own)
    with pytest.raises(ConfigError) as refused:
        resolve.refuse_unknown(["workers", name], own)
    assert str(refused.value) == f"fit() got an unexpected keyword argument '{name}'. {hint}"


def test_arrays_stay_together_and_the_last_ones_are_held_out():
    train, held_out = inputs.training_data({"a": X, "b": X}, Y, WEIGHT, 0.25)
    assert [len(train[0]["a"]), len(train[0]["b"]), len(train[1]), len(train[2])] == [7] * 4
    assert held_out[1].tolist() == [7, 8, 9]
    assert inputs.training_data((X, Y), None, None, 0.0)[1] is None


@pytest.mark.parametrize("records", range(2, 12))
@pytest.mark.parametrize("split", [0.1, 0.2, 0.33, 0.5, 0.9])
def test_as_many_are_held_out_as_by_keras(records, split):
    from keras.src.trainers.data_adapters.array_slicing import train_validation_split

    x = np.arange(records)
    try:
        ((expected,), _) = train_validation_split((x,), split)
    except ValueError:
        with pytest.raises(DataError, match="leaves none on one side"):
            inputs.training_data(x, None, None, split)
        return
    assert inputs.training_data(x, None, None, split)[0][0].tolist() == expected.tolist()


def test_tables_become_arrays():
    (x, y, weight), _ = inputs.training_data(Table(), Y, None, 0.0)
    assert isinstance(x, np.ndarray)
    assert (y.tolist(), weight) == (Y.tolist(), None)
    assert isinstance(inputs.validation_data([Table(), Y])[0], np.ndarray)


def test_other_data_are_passed_on():
    source = object()
    assert inputs.training_data(source, None, None, 0.0) == (source, None)
    assert inputs.validation_data(source) is source
    assert inputs.validation_data(None) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((object(), Y, None, 0.0), "includes its targets and weights"),
        ((object(), None, None, 0.2), "validation_split=0.2 needs arrays"),
        ((X, Y, None, 1.5), "validation_split=1.5: expected a number from 0 to below 1"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, words):
    with pytest.raises(DataError, match=words):
        inputs.training_data(*arguments)


@pytest.mark.parametrize(
    ("verbose", "shown"),
    [("auto", 1), (0, 0), (1, 1), (2, 2), (True, 1), (False, 0), (3, 2), (-1, 2), (None, 0), (np.int64(1), 1)],
)
def test_verbose_is_what_it_is_in_keras(verbose, shown):
    assert resolve.verbosity(verbose) == shown


def test_a_tuple_of_inputs_has_targets_beside_it():
    (x, y, weight), _ = inputs.training_data((X, X[:, 0]), Y, None, 0.0)
    assert isinstance(x, tuple)
    assert [len(x), len(y), weight] == [2, 10, None]


@pytest.mark.parametrize("data", [[1, 2, 3], {"a": [1.0, 2.0]}, [["a"]]])
def test_lists_of_numbers_are_refused_as_in_keras(data):
    with pytest.raises(DataError, match=r"Expected an array: .* np\.array"):
        inputs.training_data(data, Y, None, 0.0)
    with pytest.raises(DataError, match=r"^y.* Expected an array: .* np\.array"):
        inputs.training_data(X, data, None, 0.0)


def test_columns_of_pandas_are_matrices_as_in_keras():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": range(10), "b": range(10)})
    (x, y, weight), _ = inputs.training_data({"a": table["a"], "both": table}, table["b"], table["a"], 0.0)
    assert [x["a"].shape, x["both"].shape, y.shape, weight.shape] == [(10, 1), (10, 2), (10, 1), (10, 1)]


def test_validation_data_may_have_inputs_alone():
    assert inputs.validation_data(X)[0] is X
    assert inputs.validation_data({"a": X})[0]["a"] is X


@pytest.mark.parametrize(("initial", "settings", "left"), [(0, {}, 1), (2, {"epochs": 5}, 3)])
def test_epochs_that_are_left(initial, settings, left):
    assert resolve.epochs_left(initial, TrainConfig.of(**settings)) == left
    assert resolve.epochs_left(initial, TrainConfig.of(steps=7)) > 10**9
