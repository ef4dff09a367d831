"""Rank 0's arrays arrive bit for bit, in pieces, and what is zero does not travel."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.distributed.allreduce.control_plane import broadcast


class Sum:
    """Over threads; keeps the bytes of each sum."""

    def __init__(self, ranks: int):
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._parts: list = [None] * ranks
        self.sizes: list[int] = []

    def of(self, rank: int):
        def add(words: np.ndarray) -> np.ndarray:
            assert words.dtype == np.int32
            self._parts[rank] = words
            self._barrier.wait()
            total = np.sum(self._parts, 0, dtype=np.int32)
            self._barrier.wait()
            if rank == 0:
                self.sizes.append(words.nbytes)
            return total

        return add


def sent(states: list[list[np.ndarray]], piece_bytes: int) -> tuple[list[list[np.ndarray]], list[int]]:
    """What each rank has afterwards, and the bytes of each sum."""
    add = Sum(len(states))
    with ThreadPoolExecutor(len(states)) as pool:
        ranks = range(len(states))
        found = list(pool.map(lambda rank: broadcast(states[rank], rank == 0, add.of(rank), piece_bytes), ranks))
    return found, add.sizes


def bits(arrays: list[np.ndarray]) -> list[tuple]:
    return [(a.dtype, a.shape, a.tobytes()) for a in arrays]


def test_a_large_state_goes_in_pieces_and_zeros_do_not_go():
    weights = np.random.default_rng(0).normal(size=(123, 457)).astype("float32")
    mine = [weights, np.zeros_like(weights), np.zeros_like(weights), np.int64(7), np.full(3, -0.0, "float32")]
    other = [np.ones_like(a) for a in mine]
    found, sizes = sent([mine, other, other], piece_bytes=1 << 16)
    assert [bits(each) for each in found] == [bits(mine)] * 3
    flags, *pieces = sizes
    assert flags == 4 * len(mine)
    assert max(pieces) == 1 << 16
    assert sum(pieces) == weights.nbytes + 8 + 12  # -0.0 has a bit
    assert found[0][0] is weights  # rank 0 needs no copy of what it has


def test_what_is_small_goes_at_once():
    mine = [np.zeros(100, "float32"), np.arange(5, dtype="int8")]
    found, sizes = sent([mine, [np.ones_like(a) for a in mine]], piece_bytes=1 << 26)
    assert [bits(each) for each in found] == [bits(mine)] * 2
    assert sizes == [408]


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex64", "uint8", ml_dtypes.bfloat16])
def test_every_dtype_keeps_its_bits(dtype):
    raw = np.random.default_rng(0).integers(0, 2, size=(70_000, 2)).astype(dtype)
    found, _ = sent([[raw.T, raw[::2]], [np.zeros_like(raw.T), raw[::2]]], piece_bytes=1 << 12)
    assert bits(found[1]) == bits([raw.T, raw[::2]])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_lengths_arrive(data):
    dtypes = st.sampled_from([np.int8, np.int16, np.int32, np.float64])
    one = st.builds(lambda n, d, z: np.arange(z, n + z).astype(d) * z, st.integers(0, 40_000), dtypes, st.booleans())
    mine = data.draw(st.lists(one, max_size=5))
    piece = 4 * data.draw(st.integers(1 << 10, 1 << 15))
    found, sizes = sent([mine, [np.full_like(a, 3) for a in mine]], piece)
    assert bits(found[1]) == bits(mine)
    large = sum(a.nbytes for a in mine) > 1 << 16
    assert sum(sizes) <= large * 4 * len(mine) + sum(a.nbytes for a in mine if a.any() or not large) + 3
