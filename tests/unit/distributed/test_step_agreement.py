"""Whether replicas are equal, and who is right where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.distributed.step_agreement import (
    DEVICE_BIT,
    ReplicaVerdict,
    StepFlag,
    agree,
    all_equal,
    bits_of,
    judge,
    vector,
)

HASH = st.integers(0, 2**64 - 1)


@given(HASH)
def test_a_hash_is_its_bits(value):
    assert int("".join(f"{bit:.0f}" for bit in bits_of(value)), 2) == value


@given(st.lists(HASH, min_size=1, max_size=9), st.booleans())
def test_sums_of_bits_tell_whether_all_are_equal(hashes, equal):
    hashes = [(h | DEVICE_BIT) for h in (hashes[:1] * len(hashes) if equal else hashes)]
    sums = np.sum([bits_of(h) for h in hashes], axis=0)
    assert all_equal(sums, len(hashes)) == (len(set(hashes)) == 1)


@given(st.integers(2, 2**20), HASH, st.integers(1, 63))
def test_one_bit_of_one_rank_among_many_is_seen(world_size, value, bit):
    sums = world_size * bits_of(value)
    assert all_equal(sums, world_size)
    sums[bit] += 1 - 2 * bits_of(value)[bit]
    assert not all_equal(sums, world_size)


def test_hashes_of_cpus_and_of_devices_are_not_compared():
    assert all_equal(bits_of(5) + bits_of(7 | DEVICE_BIT), 2)
    assert not all_equal(bits_of(5) + bits_of(7), 2)


@given(st.lists(HASH, min_size=1, max_size=4))
def test_flags_carry_the_hash(hashes):
    told = [vector({StepFlag.COPY: 1, StepFlag.CALL_STEPS: 32}, h & ~DEVICE_BIT) for h in hashes]
    total = np.sum(told, axis=0, dtype=np.float32)
    assert (total[StepFlag.COPY], total[StepFlag.CALL_STEPS]) == (len(hashes), 32 * len(hashes))
    assert agree(total, len(hashes)) == (len({h & ~DEVICE_BIT for h in hashes}) == 1)


@pytest.mark.parametrize(
    ("hashes", "verdict"),
    [
        ([7], None),
        ([7, 7, 7], None),
        ([7, 8], ReplicaVerdict((0, 1), None)),
        ([7, 8, 7], ReplicaVerdict((1,), 0)),
        ([8, 7, 7], ReplicaVerdict((0,), 1)),
        ([7, 8, 9], ReplicaVerdict((0, 1, 2), None)),
        ([7, 7, 8, 8], ReplicaVerdict((0, 1, 2, 3), None)),
        ([9, 7, 8, 7, 7], ReplicaVerdict((0, 2), 1)),
        ([7, 7, 8, 9], ReplicaVerdict((0, 1, 2, 3), None)),  # half is not most
    ],
)
def test_more_than_half_are_right(hashes, verdict):
    assert judge(hashes) == verdict
