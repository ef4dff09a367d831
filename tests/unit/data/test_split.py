"""Records that are held out: both parts together are all, none twice, spread evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.data import ArraySource, hold_out
from raytf.data.sources import fingerprint
from raytf.errors import DataError


def source(records: int) -> ArraySource:
    return ArraySource(np.arange(records), np.arange(records) % 3, name="numbers")


@given(st.integers(2, 500), st.floats(0.01, 0.99))
def test_the_parts_are_all_records_and_none_twice(records: int, share: float):
    if not 1 <= int(records * share + 1e-9) < records:
        return
    train, validation = hold_out(source(records), share)
    assert validation is not None
    assert validation.records == int(records * share + 1e-9)
    both = [part.take(np.arange(part.records))[0] for part in (train, validation)]
    assert sorted(np.concatenate(both)) == list(range(records))
    assert np.diff(both[1], prepend=0).max(initial=0) <= np.ceil(1 / share) + 1


def test_a_tenth_is_every_tenth_record():
    _, validation = hold_out(source(40), 0.1)
    assert validation is not None
    assert validation.take(np.arange(4))[0].tolist() == [9, 19, 29, 39]
    assert validation.take(np.array([2, 0]))[1].tolist() == [29 % 3, 0]
    assert (validation.name, validation.label_range()) == ("numbers (validation)", (0.0, 2.0))


def test_without_a_share_the_source_is_as_it_was():
    whole = source(7)
    train, validation = hold_out(whole, 0)
    assert train is whole
    assert validation is None


def test_other_parts_are_other_data():
    whole = source(100)
    assert len({fingerprint(hold_out(whole, share)[0]) for share in (0, 0.1, 0.2)}) == 3


class InBlocks(ArraySource):
    block_sizes = np.array([3, 4])


@pytest.mark.parametrize(
    ("data", "share", "words"),
    [
        (source(7), -0.1, "from 0 to below 1"),
        (source(7), 1.0, "from 0 to below 1"),
        (source(7), float("nan"), "from 0 to below 1"),
        (source(7), 0.01, "none to validate on"),
        (InBlocks(np.arange(7)), 0.5, "block by block"),
    ],
)
def test_what_cannot_be_held_out_is_refused(data, share: float, words: str):
    with pytest.raises(DataError, match=words):
        hold_out(data, share)


def test_arrays_are_held_out_as_their_source_is():
    x, y = np.arange(20).reshape(10, 2), np.arange(10)
    parts, same = hold_out((x, y), 0.2), hold_out(ArraySource(x, y), 0.2)
    for part, other in zip(parts, same, strict=True):
        assert part.take(np.arange(part.records))[1].tolist() == other.take(np.arange(other.records))[1].tolist()
    with pytest.raises(DataError, match="a list has no part that can be held out"):
        hold_out([x, y], 0.2)
