"""Ranks that meet again give each other the state of the one that is furthest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import TrainingState
from raytf.distributed import state_transfer
from raytf.distributed.allreduce import control_plane
from raytf.training.regroup import HeldState, hand_over
from raytf.training.user.callbacks import BatchHooks


class Ranks:
    """Threads that add."""

    def __init__(self, size: int):
        self._barrier, self._parts = threading.Barrier(size, timeout=30), [np.zeros(0)] * size
        self.size = size

    def one(self, rank: int) -> One:
        return One(self, rank, self.size)

    def sum(self, rank: int, values: np.ndarray) -> np.ndarray:
        self._parts[rank] = values
        self._barrier.wait()
        total = np.sum(self._parts, 0, dtype=values.dtype)
        self._barrier.wait()
        return total


@dataclass
class One:
    ranks: Ranks
    rank: int
    world_size: int

    def sum(self, values: np.ndarray) -> np.ndarray:
        return self.ranks.sum(self.rank, values)

    def share(self, data: bytes, giver: int = 0) -> bytes:
        length = int(self.sum(np.array([len(data) if self.rank == giver else 0]))[0])
        own = data if self.rank == giver else bytes(length)
        return self.broadcast([np.frombuffer(own, np.uint8)], giver)[0].tobytes()

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        return control_plane.broadcast(arrays, self.rank == giver, self.sum)

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        return state_transfer.hand(self, "127.0.0.1", lambda: False, arrays, givers, takers)


class Value:
    """A variable."""

    def __init__(self, value: np.ndarray):
        self.value = value
        self.dtype, self.shape = str(value.dtype), value.shape

    def assign(self, value: np.ndarray) -> None:
        self.value = np.array(value)


def held(step: int) -> HeldState:
    return HeldState(
        TrainingState(step, durable_step=2),
        StepRows(np.full((1, 4), step), np.zeros((1, 0), np.uint8)),
        {"seed": "0"},
        0,
        None,
        BatchHooks(),
        None,
        False,
    )


def after(steps: Sequence[int]) -> list[tuple[HeldState, bool, dict[str, Value]]]:
    """What ranks that have finished these steps have after they have met."""

    def run(rank: int) -> tuple[HeldState, bool, dict[str, Value]]:
        step = steps[rank]
        named = {
            "weights": Value(np.full((3, 2), step, np.float32)),
            "count": Value(np.array(step, np.int64)),
            "nan": Value(np.array([np.nan, -0.0, step], np.float32)),
            "flag": Value(np.array([step % 2 == 0])),
        }
        return *hand_over(ranks.one(rank), steps, held(step) if step >= 0 else None, named), named

    ranks = Ranks(len(steps))
    with ThreadPoolExecutor(len(steps)) as pool:
        return list(pool.map(run, range(len(steps))))


@pytest.mark.parametrize("steps", [(7, 7), (7, 6), (6, 7, 6), (7, 7, -1), (-1, 6, 7, -1), (0, -1)])
def test_all_have_the_state_of_the_one_that_is_furthest(steps):
    furthest = max(steps)
    for own, (told, is_taken, named) in zip(steps, after(steps), strict=True):
        assert told.progress.step == furthest
        assert told.rows.numbers[0, 0] == furthest
        assert is_taken == (own < furthest)
        np.testing.assert_array_equal(named["weights"].value, np.full((3, 2), furthest, np.float32))
        assert named["count"].value == furthest
        assert named["nan"].value.tobytes() == np.array([np.nan, -0.0, furthest], np.float32).tobytes()
        assert named["flag"].value.tolist() == [furthest % 2 == 0]
