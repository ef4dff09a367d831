"""Variables and checkpoints: copies that later steps do not change, and what is assigned."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from raytf.checkpoint import variables
from raytf.errors import CheckpointError


@pytest.fixture
def named() -> dict[str, keras.Variable]:
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.int64(7), "c": np.zeros(0, np.float16)}
    return {name: keras.Variable(value, dtype=value.dtype, name=name) for name, value in values.items()}


def test_copies_stay_as_they_were_whatever_the_variables_become(named: dict[str, keras.Variable]):
    copies = variables.Copies(variables.Variables(named, ["b", "a", "c"]))
    first = copies.take()
    named["a"].assign(-np.ones((2, 3)))
    named["b"].assign(8)
    second = copies.take()  # the first ones are still in use
    assert list(first) == ["b", "a", "c"]
    assert (first["a"].tolist(), int(first["b"])) == ([[0, 1, 2], [3, 4, 5]], 7)
    assert (second["a"].tolist(), int(second["b"])) == ([[-1, -1, -1], [-1, -1, -1]], 8)
    assert {name: copy.dtype.name for name, copy in first.items()} == {"a": "float32", "b": "int64", "c": "float16"}


def test_memory_is_used_again_once_it_is_given_back_and_not_before(named: dict[str, keras.Variable]):
    copies = variables.Copies(variables.Variables(named, ["a", "b"]))
    first = copies.take()
    second = copies.take()
    assert second["a"] is not first["a"]
    copies.give_back({**first, "callback/0": np.zeros(1)})
    named["a"].assign(np.full((2, 3), 5.0))
    third = copies.take()
    assert third["a"] is first["a"]
    assert third["a"].tolist() == [[5, 5, 5], [5, 5, 5]]
    assert second["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    copies.give_back({"a": second["a"]})  # not all of a copy: of no use
    assert copies.take()["a"] is not second["a"]


def far(value) -> bool:
    """In the place of a GPU, which there is none of: nothing is in the host's memory."""
    return False


def test_what_a_device_holds_is_copied_while_updates_go_on(named: dict[str, keras.Variable]):
    asked: list[int] = []
    source = variables.Variables(named, ["b", "a", "c"], lambda size: asked.append(size) or True, far)
    values = source.now()
    assert (values.is_held, values.is_here, asked, source.nbytes) == (True, False, [32], 32)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.apply([keras.ops.ones((2, 3))], [named["a"]])  # TensorFlow's own kernel, which updates in place
    named["b"].assign_add(1)
    fetched = {name: tensor.fetch() for name, tensor in values.tensors.items()}
    assert (fetched["a"].tolist(), int(fetched["b"]), fetched["c"].shape) == ([[0, 1, 2], [3, 4, 5]], 7, (0,))
    assert named["a"].numpy().tolist() == [[-1, 0, 1], [2, 3, 4]]
    with pytest.raises(KeyError):  # the device's memory was given back
        values.tensors["a"].fetch()


def test_copies_from_a_device_are_whole_once_they_are_filled(named: dict[str, keras.Variable]):
    copies = variables.Copies(variables.Variables(named, ["a", "b"], is_here=far))
    first = copies.take()
    named["a"].assign(-np.ones((2, 3)))
    copies.filling.result(60)
    assert (first["a"].tolist(), int(first["b"])) == ([[0, 1, 2], [3, 4, 5]], 7)


def test_a_device_without_memory_for_them_has_the_step_wait(named: dict[str, keras.Variable]):
    source = variables.Variables(named, ["a", "b"], lambda size: False, far)
    values = source.now()
    assert (values.is_held, values.is_here) == (False, False)
    named["b"].assign(8)
    assert int(values.tensors["b"].fetch()) == 8, "it is what it is now: who takes it must not wait"
    copies = variables.Copies(source)
    first = copies.take()
    assert copies.filling.done()
    named["a"].assign(-np.ones((2, 3)))
    assert first["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("b"), "it lacks b"),
        (lambda t: t.update(d=np.zeros(1)), "it also has d"),
        (lambda t: t.update(a=np.zeros((3, 2), np.float32)), "it has another shape of a"),
    ],
)
def test_of_a_checkpoint_that_does_not_fit_nothing_is_assigned(named: dict[str, keras.Variable], change, told: str):
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.array(9), "c": np.zeros(0, np.float16)}
    variables.restore(named, tensors)
    assert (named["a"].numpy().sum(), int(named["b"].numpy())) == (6, 9)
    other = {name: tensor * 2 for name, tensor in tensors.items()}
    change(other)
    with pytest.raises(CheckpointError, match=told):
        variables.restore(named, other)
    assert (named["a"].numpy().sum(), int(named["b"].numpy())) == (6, 9)
