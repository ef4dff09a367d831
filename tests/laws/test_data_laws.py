"""Any records, converted and read back, are the same records in the same order; changed bytes are noticed."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raytf.data import ArraySource, ParquetSource, TFRecordSource
from raytf.data.sources import fingerprint
from raytf.data.sources.writer import FileLayout, identity_of, write
from raytf.data.validation import check
from raytf.errors import DataError
from raytf.storage.storage import Storage

DTYPES = ["bool", "uint8", "int8", "int32", "uint16", "int64", "uint64", "float16", "float32", "float64"]


@st.composite
def leaves(draw, n):
    shape = draw(st.just(()) | hnp.array_shapes(max_dims=3, max_side=3))
    return draw(hnp.arrays(draw(st.sampled_from(DTYPES)), (n, *shape)))


@st.composite
def sources(draw):
    n = draw(st.integers(1, 40))
    x = draw(leaves(n) | st.dictionaries(st.sampled_from(["a", "b", "ü c"]), leaves(n), min_size=1))
    y = draw(st.none() | leaves(n) | hnp.arrays("int64", n, elements=st.integers(0, 9)))
    return ArraySource(x, y, draw(st.none() | hnp.arrays("float32", n)))


def converted(folder, source, to, file_records, block_records):
    layout = FileLayout(to, file_records, block_records)
    assert write(Storage(folder), source, layout, identity_of(source, layout))
    return TFRecordSource if to == "tfrecord" else ParquetSource


def same(one, other):
    return [a.tobytes() for a in one] == [b.tobytes() for b in other]


@settings(max_examples=25)
@given(
    sources(),
    st.sampled_from(["tfrecord", "parquet"]),
    st.integers(1, 50),
    st.integers(1, 20),
    st.sampled_from(["records", "blocks"]),
    st.data(),
)
def test_any_records_come_back_in_their_order(source, to, files, blocks, order, data):
    with tempfile.TemporaryDirectory() as folder:
        kind = converted(folder, source, to, files, blocks)
        block = {"block_bytes": data.draw(st.integers(1, 3000))} if to == "tfrecord" else {}
        back = kind(folder, order=order, **block)
        assert (back.records, back.spec) == (source.records, source.spec)
        everything = np.arange(source.records)
        assert same(back.take(everything), source.take(everything))
        ids = np.array(data.draw(st.lists(st.integers(0, source.records - 1), max_size=30)), np.int64)
        assert same(back.reader(2).take(ids), source.take(ids))
        if order == "records":
            assert fingerprint(back) == fingerprint(source)
        assert check(folder)[0].problems == []


@settings(max_examples=25)
@given(
    hnp.arrays("uint8", st.tuples(st.integers(1, 30), st.just(5))),
    st.sampled_from(["tfrecord", "parquet"]),
    st.sampled_from(["flip", "cut", "grow"]),
    st.data(),
)
def test_bytes_that_were_changed_are_always_noticed(x, to, how, data):
    with tempfile.TemporaryDirectory() as folder:
        kind = converted(folder, ArraySource(x, np.arange(len(x))), to, 12, 4)
        path = data.draw(st.sampled_from(sorted(Path(folder).glob("part-*"))))
        good = path.read_bytes()
        at = data.draw(st.integers(0, len(good) - 1))
        bit = 1 << data.draw(st.integers(0, 7))
        path.write_bytes(
            {"flip": good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :], "cut": good[:at], "grow": good + b"x"}[how]
        )
        problems = [p for found in check(folder) for p in found.problems]
        assert problems
        assert any(path.name in place + why for place, why in problems)
        if how != "flip" or to == "tfrecord":  # what Parquet does not protect is its footer
            with pytest.raises(DataError, match=path.name.replace(".", r"\.")):
                kind(folder).take(np.arange(len(x)))
