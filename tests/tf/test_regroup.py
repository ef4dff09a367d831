"""The state that a rank is given comes into memory that is ready for it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import TrainingState
from raytf.training import regroup
from raytf.training.regroup import HeldState
from raytf.training.user.callbacks import BatchHooks

LARGE = 1 << 16
KINDS = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")
HELD = HeldState(TrainingState(step=7), StepRows(), {}, -1, None, BatchHooks(), None, False)


class Group:
    """Two ranks, of which this one is given what the other one has, as it is or as a copy."""

    rank = 1

    def __init__(self, theirs: Sequence[np.ndarray], is_copied: bool):
        self._theirs, self._is_copied = theirs, is_copied

    def share(self, data: bytes, giver: int = 0) -> bytes:
        return pickle.dumps(HELD)

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        assert (list(givers), list(takers)) == ([0], [1])
        for mine, other in zip(arrays, self._theirs, strict=True):
            mine[...] = other
        return [array.copy() for array in arrays] if self._is_copied else arrays


def values(kind: str, size: int) -> np.ndarray:
    return (
        np.random.default_rng(3)
        .integers(0, 2 if kind == "bool" else 100, size)
        .astype(tf.as_dtype(kind).as_numpy_dtype)
    )


@pytest.mark.parametrize("is_copied", [False, True])
def test_every_type_arrives_bit_for_bit_and_large_ones_where_there_was_room(is_copied: bool):
    theirs = {f"{kind} {size}": values(kind, size) for kind in KINDS for size in (3, LARGE)}
    named = {name: tf.Variable(np.zeros_like(value)) for name, value in theirs.items()}
    named["keras"] = keras.Variable(np.zeros(LARGE, np.float32))
    named["scalar"] = tf.Variable(0.0)
    theirs |= {"keras": values("float32", LARGE), "scalar": np.float32(5)}
    room = regroup.room_for(named)
    assert sorted(room) == sorted([*(name for name in named if name.endswith(str(LARGE))), "keras"])
    told, is_taken = regroup.hand_over(Group(list(theirs.values()), is_copied), [7, -1], None, named, room)
    assert (told.progress, is_taken) == (HELD.progress, True)
    found = {name: np.asarray(v.value.read_value() if name == "keras" else v.read_value()) for name, v in named.items()}
    for name, value in theirs.items():
        assert found[name].tobytes() == value.tobytes(), name
    for name in (f"float32 {LARGE}", "keras"):
        assert (found[name].ctypes.data == room[name].ctypes.data) is not is_copied

    # The memory is the variable's own: steps change it, and it outlives the room.
    before = theirs["keras"].copy()
    del found, room
    for _ in range(3):
        named["keras"].assign_add(tf.ones([LARGE]))
    np.testing.assert_array_equal(named["keras"].numpy(), before + 3)


def test_without_room_it_arrives_as_well():
    named = {"w": tf.Variable(np.zeros(LARGE, np.float32))}
    regroup.hand_over(Group([values("float32", LARGE)], False), [7, -1], None, named)
    np.testing.assert_array_equal(named["w"].numpy(), values("float32", LARGE))
