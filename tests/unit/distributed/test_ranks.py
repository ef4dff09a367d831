"""`raytf.rank()` and its like, in a worker and outside of one."""

from __future__ import annotations

import pytest

import raytf
from raytf.distributed import ranks

NAMES = ("rank", "size", "local_rank", "local_size")


@pytest.mark.parametrize("name", NAMES)
def test_outside_of_a_worker_is_an_error_that_says_where_to_call_it(name):
    with pytest.raises(raytf.RaytfError, match=rf"raytf\.{name}\(\) was called outside of a worker.* model function"):
        getattr(raytf, name)()


def test_in_a_worker_they_tell_its_place():
    ranks.take(ranks.RankInfo(3, 4, 1, 2))
    try:
        assert [getattr(raytf, name)() for name in NAMES] == [3, 4, 1, 2]
    finally:
        ranks.take(None)
