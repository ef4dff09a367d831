"""Batches on their way from the program to a worker, without Ray's processes between them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.data.plan import BatchPlan
from raytf.data.streams import Stream
from raytf.driver import feed
from raytf.driver.feed import Offer
from raytf.errors import DataError
from raytf.training.user import feed_client
from raytf.training.user.feed_client import FeedClient

SIZES = [4, 7, 1, 4]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are what they refer to. A mock: Ray's store stands between processes that are not there."""
    for module in (feed, feed_client):
        monkeypatch.setattr(module, "ray", HERE)


class Here:
    def put(self, value: Any) -> Any:
        return value

    def get(self, value: Any) -> Any:
        return value


HERE = Here()


class Handle:
    """A mailbox whose driver brings what is asked for."""

    def __init__(self, making: feed._Producer):
        self.making, self.asked, self.ask = making, list[int](), self

    def remote(self, step: int) -> Offer:
        self.asked.append(step)
        return self.making._surely_made(step)


def stream(sizes: list[int], steps: int) -> Stream:
    def batch(i: int) -> Any:
        ids = np.arange(sizes[i % len(sizes)]) + 100 * i
        return {"a": np.repeat(ids[:, None], 2, 1)}, ids

    return Stream("train", lambda number, first: (batch(i) for i in itertools.count(first)), steps, continues=True)


@given(most=st.integers(1, 5), shards=st.integers(1, 5), bytes_=st.sampled_from([0, 1 << 20]), ranks=st.integers(1, 3))
def test_each_rank_gets_its_shards_of_each_batch(most: int, shards: int, bytes_: int, ranks: int):
    feed._WHOLE_BYTES, together = bytes_, feed._TOGETHER_SECONDS
    feed._TOGETHER_SECONDS = 600.0  # on a loaded machine a batch may take long
    try:
        total, ranks = 10, min(ranks, shards)
        plan = BatchPlan(7 * total, 7, shards, total)
        bounds = [shards * r // ranks for r in range(ranks + 1)]
        found: list[list[np.ndarray]] = [[] for _ in range(total)]
        for first, stop in itertools.pairwise(bounds):
            handle = Handle(feed._Producer(stream(SIZES, total), plan, total, most, None))
            client = FeedClient(handle, plan)  # type: ignore[arg-type]
            for step in range(total):
                (deep, ids), rows = client(step, range(first, stop))
                assert rows == SIZES[step % 4]
                np.testing.assert_array_equal(deep, np.repeat(ids[:, None], 2, 1))
                found[step].append(ids)
            assert len(handle.asked) <= -(-total // most) or most == 1
        for step, parts in enumerate(found):
            assert np.concatenate(parts).tolist() == [100 * step + i for i in range(SIZES[step % 4])]
    finally:
        feed._WHOLE_BYTES, feed._TOGETHER_SECONDS = 1 << 20, together


def test_what_cannot_be_made_is_told_at_its_step_and_not_before():
    ends = Stream("train", lambda number, first: iter([np.zeros((2, 1))] * (3 - first)), 5)
    plan = BatchPlan(10, 2, 2, 5)
    client = FeedClient(Handle(feed._Producer(ends, plan, 10, 4, None)), plan)  # type: ignore[arg-type]
    for step in range(3):
        assert client(step, range(2))[1] == 2
    with pytest.raises(DataError, match="train data has ended after 3 of 5 batches in epoch 1"):
        client(3, range(2))
