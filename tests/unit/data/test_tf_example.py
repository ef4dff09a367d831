"""tf.train.Example without TensorFlow: the same as TensorFlow's own, however the records lie."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raytf.data.sources import tf_example
from raytf.data.sources.base import Spec
from raytf.data.sources.tf_example import Feature, Parser, encode, feature, infer
from raytf.errors import DataError
from tests.support.data_files import examples

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]


def laid(records):
    lengths = np.array([len(r) for r in records], np.int64)
    return np.frombuffer(b"".join(records), np.uint8), np.cumsum(lengths) - lengths, lengths


@st.composite
def arrays(draw, n):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.just(()) | hnp.array_shapes(max_dims=3, max_side=4))
    return draw(hnp.arrays(dtype, (n, *shape)))


@given(st.data())
def test_any_numbers_come_back_as_they_were(data):
    n = data.draw(st.integers(1, 6))
    leaves = [data.draw(arrays(n)) for _ in range(data.draw(st.integers(1, 3)))]
    features = [feature(f"f{i}", Spec(a.shape[1:], a.dtype.name)) for i, a in enumerate(leaves)]
    records = list(encode(features, leaves))
    got = Parser(features).parse(*laid(records), str)
    one_by_one = [Parser(features).parse(*laid([r]), str) for r in records]
    for i, leaf in enumerate(leaves):
        assert got[i].dtype == leaf.dtype
        assert got[i].tobytes() == leaf.tobytes()
        assert np.concatenate([o[i] for o in one_by_one]).tobytes() == leaf.tobytes()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=20))
def test_integers_of_any_length_in_records_of_any_length(values):
    got = Parser([feature("a", Spec((), "int64"))]).parse(*laid(examples(a=values)), str)
    assert got[0].tolist() == values


def test_records_that_look_alike_are_read_at_once_and_give_the_same():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (50, 5, 5, 1), np.uint8), rng.integers(0, 300, 50)
    features = [feature("image", Spec((5, 5, 1), "uint8")), feature("label", Spec((), "int64"))]
    place = laid(list(encode(features, [x, y])))
    at_once = Parser(features).parse(*place, str)
    with mock.patch.object(tf_example, "_GROUPS", 0):
        alone = Parser(features).parse(*place, str)
    for a, b, wanted in zip(at_once, alone, (x, y), strict=True):
        assert a.tobytes() == b.tobytes() == wanted.tobytes()


def test_what_is_inferred():
    (record,) = examples(a=[[1, 2]], b=[3], c=np.ones((1, 2), np.float32), d=np.zeros((1, 7), np.uint8))
    found = infer(record, {}, ["a", "b", "c", "d"], "r")
    assert [f.spec for f in found] == [
        Spec((2,), "int64"),
        Spec((), "int64"),
        Spec((2,), "float32"),
        Spec((7,), "uint8"),
    ]
    assert infer(record, {"d": Spec((7, 1), "int8")}, ["d"], "r")[0].spec == Spec((7, 1), "int8")


@pytest.mark.parametrize(
    ("records", "features", "words"),
    [
        ([b"\xff\xff"], ["a"], ["r no", "no tf.train.Example"]),
        (examples(b=[1]), ["a"], ["no feature 'a'", "it has b"]),
        ([b""], ["a"], ["no feature 'a'", "it has none"]),
    ],
    ids=["bytes", "missing", "empty"],
)
def test_what_cannot_be_inferred(records, features, words):
    with pytest.raises(DataError) as error:
        infer(records[0], {}, features, "r no")
    assert [w for w in words if w not in str(error.value)] == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (examples(b=[1]), ["r1", "no feature 'a'"]),
        (examples(a=[1.5]), ["r1", "holds"]),
        (examples(a=[[1, 2, 3]]), ["r1", "has 3 numbers", "takes 2"]),
        (examples(a=[[1, 300]]), ["r1", "holds 300, no uint8"]),
    ],
    ids=["missing", "kind", "length", "range"],
)
def test_records_that_differ_from_the_first(other, words):
    first, as_written = examples(a=[[1, 2]]), Feature("a", Spec((2,), "uint8"), "int64")
    with pytest.raises(DataError) as error:
        Parser([as_written]).parse(*laid(first + other), lambda i: f"r{i}")
    assert [w for w in words if w not in str(error.value)] == []
