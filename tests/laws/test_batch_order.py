"""Steps of a data set of batches: each has its own batch, whole, whatever the number of logical shards."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytf.data.order import BatchOrder
from raytf.data.plan import BatchPlan

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=12)


@given(sizes=SIZES, shards=st.integers(1, 9))
def test_each_record_is_in_its_batch_s_step_once(sizes: list[int], shards: int):
    plan = BatchPlan.of(sizes, shards)
    order, begin = BatchOrder(plan), 0
    for step, size in enumerate(sizes):
        parts = [order.of_steps(shard, step, step + 1) for shard in range(shards)]
        assert [len(part) for part in parts] == plan.counts(step).tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert np.concatenate(parts).tolist() == list(range(begin, begin + size))
        begin += size
    assert begin == plan.records


@given(sizes=SIZES, shards=st.integers(1, 9), data=st.data())
def test_a_call_has_full_steps_or_one_that_is_not(sizes: list[int], shards: int, data: st.DataObject):
    plan = BatchPlan.of(sizes, shards)
    step = data.draw(st.integers(0, 3 * len(sizes) - 1))
    limit, total = data.draw(st.integers(1, 20)), 3 * len(sizes)
    end = plan.call_end(step, limit, total)
    assert step < end <= min(total, step + limit)
    assert plan.locate(step)[0] == plan.locate(end - 1)[0]
    full = [plan.is_full(plan.locate(s)[1]) for s in range(step, end)]
    assert all(full) or len(full) == 1
    if all(full) and end < min(total, step + limit) and plan.locate(end)[1]:
        assert not plan.is_full(plan.locate(end)[1])


@given(steps=st.integers(1, 9), size=st.integers(1, 40), shards=st.integers(1, 9), rows=st.integers(1, 60))
def test_batches_that_nobody_knows_before_are_one_step_each(steps: int, size: int, shards: int, rows: int):
    plan = BatchPlan(steps * size, size, shards, steps)
    assert all(plan.call_end(step, 16, 2 * steps) == step + 1 for step in range(2 * steps))
    assert plan.parts(rows).sum() == rows
