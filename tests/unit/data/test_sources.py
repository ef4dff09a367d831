"""Sources: any order of records, and one clear message for data that cannot be trained on."""

import pickle
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from raytf.data import ArraySource, ParquetSource, Spec
from raytf.data.sources import fingerprint
from raytf.data.sources.parquet import explained
from raytf.errors import DataError, StorageError
from raytf.storage.storage import Storage
from tests.support.data_files import put_tree

# Arrays.


def test_arrays():
    x, y = np.arange(12).reshape(6, 2), np.arange(6) % 3
    source = ArraySource(x, y)
    assert (source.records, source.block_sizes) == (6, None)
    assert source.spec == (Spec((2,), "int64"), Spec((), "int64"), None)
    got = source.take(np.array([4, 0, 4]))
    assert [g.tolist() for g in got] == [[[8, 9], [0, 1], [8, 9]], [1, 0, 1]]
    assert source.label_range() == (0, 2)


def test_nested_arrays():
    source = ArraySource({"b": np.zeros((3, 2)), "a": (np.ones(3),)}, None, np.full(3, 0.5, np.float32))
    assert source.spec == ({"b": Spec((2,), "float64"), "a": (Spec((), "float64"),)}, None, Spec((), "float32"))
    assert [leaf.shape for leaf in source.take(np.array([0]))] == [(1,), (1, 2), (1,)]


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (None, None),
        (np.zeros(2), None),
        ({"a": np.zeros(2, int)}, None),
        (np.array([3, -1]), (-1, 3)),
        (np.array([[1], [2]]), (1, 2)),
    ],
    ids=["none", "float", "nested", "int", "column"],
)
def test_label_range(y, expected):
    assert ArraySource(np.zeros((2, 1)), y).label_range() == expected


def test_a_memory_map_is_not_read_whole(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(10))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = ArraySource(x)
    assert np.shares_memory(source._leaves[0], x)
    assert source.take(np.array([3]))[0].tolist() == [3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": None}, ["x holds no array"]),
        ({"x": {}}, ["x holds no array"]),
        ({"x": np.zeros((0, 4))}, ["no records"]),
        ({"x": 3.0}, ["x is a single value", "one row for each record"]),
        ({"x": np.array([[1, 2], None], object)}, ["x has dtype object", "neither a number nor text"]),
        ({"x": np.array(["a", None], object)}, ["x has dtype object", "neither a number nor text"]),
        ({"x": np.array(["2020-01-01"], "datetime64[D]")}, ["x has dtype datetime64", "neither a number nor text"]),
        ({"x": np.zeros(3), "y": np.zeros(2)}, ["differ", "x has 3", "y has 2"]),
        ({"x": np.zeros(3), "sample_weight": np.zeros(2)}, ["differ", "x has 3", "sample_weight has 2"]),
        ({"x": {"a": np.zeros(3), "b": np.zeros(4)}}, ["x['a'] has 3", "x['b'] has 4"]),
        ({"x": np.zeros(2), "y": np.array(["cat", "dog"])}, ["y has dtype <U3"]),
    ],
)
def test_bad_arrays(arguments, words):
    with pytest.raises(DataError, match=r"^mine: ") as refused:
        ArraySource(**arguments, name="mine")
    assert [w for w in words if w not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


# Parquet.


def write(folder, file="part-0.parquet", row_group_size=4, **columns):
    folder.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table(columns), folder / file, row_group_size=row_group_size)
    return str(folder)


@pytest.fixture
def data(tmp_path):
    """10 + 3 records in row groups of 4, 4, 2 and 3; pixel = record, label = record % 5."""
    folder = tmp_path / "data"
    write(folder, "a.parquet", image=[[i, i] for i in range(10)], label=[i % 5 for i in range(10)])
    return write(folder, "b.parquet", image=[[i, i] for i in range(10, 13)], label=[i % 5 for i in range(10, 13)])


def test_parquet(data):
    source = ParquetSource(data)
    assert source.records == 13
    assert source.block_sizes.tolist() == [4, 4, 2, 3]
    assert source.spec == (Spec((2,), "int64"), Spec((), "int64"), None)
    assert source.label_range() == (0, 4)


def test_parquet_takes_any_order(data):
    ids = np.array([12, 0, 9, 9, 4, 10])
    image, label = ParquetSource(data).take(ids)
    assert image[:, 0].tolist() == ids.tolist()
    assert label.tolist() == (ids % 5).tolist()


def test_a_single_file(tmp_path):
    write(tmp_path, "one.parquet", image=[[1, 2]], label=[0])
    assert ParquetSource(str(tmp_path / "one.parquet")).records == 1


def test_what_fits_the_cache_is_read_once(data):
    reader = ParquetSource(data).reader(1)
    for _ in range(3):
        reader.take(np.arange(13))
    assert reader.rows_read == 13


def test_the_cache_is_bounded(data):
    reader = ParquetSource(data, window=1).reader(1)
    for _ in range(3):
        reader.take(np.arange(13))
        assert reader._cached_rows <= 1 + 2 * 4
    assert reader.rows_read > 13


def test_a_row_group_read_whole_is_dropped_before_one_still_needed(tmp_path):
    uri = write(tmp_path / "d", image=list(range(20)), label=[0] * 20, row_group_size=4)
    reader = ParquetSource(uri, window=4).reader(1)  # room for three row groups
    for records in ([0, 1], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [2, 3]):
        reader.take(np.array(records))
    assert reader.rows_read == 16


def test_each_row_group_of_a_call_is_read_once_however_many_there_are(tmp_path):
    uri = write(tmp_path / "d", image=list(range(64)), label=[0] * 64, row_group_size=4)
    reader = ParquetSource(uri, window=1).reader(1)
    reader.take(np.array([62, 63]))
    image, _ = reader.take(np.arange(61, -1, -1))
    assert (reader.rows_read, image.tolist()) == (64, list(range(61, -1, -1)))


def test_readers_do_not_share_what_they_read(data):
    source = ParquetSource(data)
    readers = source.reader(1), source.reader(1)
    for reader in readers:
        reader.take(np.arange(13))
    assert source.rows_read == 26
    assert [r._cached_rows for r in (source, *readers)] == [0, 13, 13]


def test_a_source_travels_without_what_it_read(data):
    source = ParquetSource(data)
    source.take(np.arange(13))
    again = pickle.loads(pickle.dumps(source))
    assert (again.rows_read, len(again._cache)) == (0, 0)
    assert again.take(np.array([11]))[0].tolist() == [[11, 11]]


def test_many_files_are_not_all_open(tmp_path):
    for i in range(80):
        uri = write(tmp_path / "d", f"{i:02}.parquet", image=[i], label=[0])
    here = len(list(Path("/proc/self/fd").iterdir()))
    reader = ParquetSource(uri).reader(1)
    assert reader.take(np.arange(79, -1, -1))[0].tolist() == list(range(79, -1, -1))
    assert 0 < len(list(Path("/proc/self/fd").iterdir())) - here <= 64


def test_fingerprints_tell_data_apart_and_read_none_of_it(tmp_path):
    base = {"image": [[i, i] for i in range(40)], "label": [0] * 40}

    def told(**columns):
        source = pickle.loads(pickle.dumps(ParquetSource(write(tmp_path / "d", **{**base, **columns}))))
        assert fingerprint(source).startswith("40 records, sample CRC-32 ")
        assert source.rows_read == 0
        return fingerprint(source)

    whole = told()
    assert told() == whole
    assert told(other=list(range(40))) == whole  # a column that nobody reads
    swapped = [[1, 1], [0, 0], *base["image"][2:]]  # the footers say the same of it
    late = [*base["image"][:-1], [99, 99]]
    assert len({whole, told(image=swapped), told(image=late), told(label=[1] * 40), told(row_group_size=5)}) == 5


def test_fingerprints_of_arrays():
    x = np.arange(40)
    assert fingerprint(ArraySource(x)) == fingerprint(ArraySource(x.copy()))
    assert fingerprint(ArraySource(x)) != fingerprint(ArraySource(x[::-1]))


def test_columns_shapes_and_weights(tmp_path):
    uri = write(tmp_path / "d", a=[1.5, 2.5], b=[[1, 2, 3, 4], [5, 6, 7, 8]], y=[0, 1], w=[1.0, 0.5])
    source = ParquetSource(uri, x=["b", "a"], y="y", sample_weight="w", shapes={"b": (2, 2)})
    assert source.spec == (
        {"b": Spec((2, 2), "int64"), "a": Spec((), "float64")},
        Spec((), "int64"),
        Spec((), "float64"),
    )
    a, b, y, w = source.take(np.array([1]))
    assert (a.tolist(), b.tolist(), y.tolist(), w.tolist()) == ([2.5], [[[5, 6], [7, 8]]], [1], [0.5])


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.uint8()), pa.large_list(pa.uint8()), pa.list_(pa.uint8(), 4), pa.list_(pa.list_(pa.uint8(), 2), 2)],
)
def test_kinds_of_lists(tmp_path, kind):
    values = (
        [[[1, 2], [3, 4]]] if pa.types.is_list(kind.value_type) or kind.value_type != pa.uint8() else [[1, 2, 3, 4]]
    )
    uri = write(tmp_path / "d", image=pa.array(values, kind), label=[0])
    image = ParquetSource(uri).take(np.array([0]))[0]
    assert image.dtype == np.uint8
    assert image.ravel().tolist() == [1, 2, 3, 4]


def test_no_label(tmp_path):
    source = ParquetSource(write(tmp_path / "d", image=[1.0, 2.0]), y=None)
    assert source.spec == (Spec((), "float64"), None, None)
    assert source.label_range() is None


def test_parquet_on_s3(s3, data):
    put_tree(Storage(s3()), data, "data")
    source = ParquetSource(s3("data"))
    assert source.take(np.array([12, 0]))[0][:, 0].tolist() == [12, 0]


def test_a_single_file_on_s3(s3, data):
    put_tree(Storage(s3()), data, "data")
    assert ParquetSource(s3("data/b.parquet")).records == 3


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"picture": [1], "label": [1]}, ["no column 'image'", "label, picture"]),
        ({"image": [1]}, ["no column 'label'"]),
        ({"image": [[1, 2], [3]], "label": [0, 1]}, ["'image'", "different lengths"]),
        ({"image": [[1, 2], [3], [4, 5, 6]], "label": [0, 1, 2]}, ["'image'", "different lengths"]),
        ({"image": [[[1], [2, 3]], [[4, 5], [6]]], "label": [0, 1]}, ["'image'", "different lengths"]),
        ({"image": [[1, 2], None], "label": [0, 1]}, ["'image'", "1 missing values"]),
        ({"image": [[1, 2], [3, None]], "label": [0, 1]}, ["'image'", "1 missing values"]),
        ({"image": [1, 2], "label": [0, None]}, ["'label'", "1 missing values"]),
        ({"image": ["a", "b"], "label": [0, 1]}, ["'image'", "string", "Expected numbers"]),
        ({"image": [b"png", b"png"], "label": [0, 1]}, ["'image'", "binary", "Expected numbers"]),
        ({"image": [["a"], ["b"]], "label": [0, 1]}, ["'image'", "string", "Expected numbers"]),
        ({"image": pa.array([], pa.int64()), "label": pa.array([], pa.int64())}, ["no records"]),
    ],
    ids=[
        "x",
        "y",
        "ragged",
        "ragged-even",
        "ragged-inner",
        "null",
        "null-in-list",
        "null-label",
        "text",
        "bytes",
        "texts",
        "none",
    ],
)
def test_bad_parquet(tmp_path, columns, words):
    uri = write(tmp_path / "d", **columns)
    with pytest.raises(DataError) as refused:
        ParquetSource(uri)
    assert [w for w in words if w not in str(refused.value)] == []
    assert "\n" not in str(refused.value)
    assert "/d" in str(refused.value)


def test_a_shape_that_does_not_fit(tmp_path):
    uri = write(tmp_path / "d", image=[[1, 2, 3]], label=[0])
    with pytest.raises(DataError, match=r"'image' holds 3 numbers a record; shape \(2, 2\) does not fit"):
        ParquetSource(uri, shapes={"image": (2, 2)})


@pytest.mark.parametrize("other", [{"image": [[1, 2, 3]]}, {"image": [[1.5, 2.5]]}], ids=["width", "dtype"])
def test_files_that_differ_from_each_other(tmp_path, other):
    write(tmp_path / "d", "a.parquet", image=[[1, 2]], label=[0])
    uri = write(tmp_path / "d", "b.parquet", **other, label=[0])
    with pytest.raises(DataError, match=r"b\.parquet.*'image'"):
        ParquetSource(uri).take(np.array([0, 1]))


def test_a_missing_folder(tmp_path):
    with pytest.raises(DataError, match=r"there are no \*\.parquet files"):
        ParquetSource(str(tmp_path / "nowhere"))


def test_a_missing_file(tmp_path):
    with pytest.raises((DataError, StorageError), match=r"nowhere\.parquet"):
        ParquetSource(str(tmp_path / "nowhere.parquet"))


@pytest.mark.parametrize(
    "damage",
    [lambda d: b"", lambda d: b"PAR1", lambda d: b"text" * 99, lambda d: d[: len(d) // 2]],
    ids=["empty", "short", "text", "cut"],
)
def test_a_damaged_file(tmp_path, damage):
    uri = write(tmp_path / "d", image=[[1, 2]] * 9, label=[0] * 9)
    path = tmp_path / "d" / "part-0.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"part-0\.parquet cannot be read; it is not a Parquet file") as refused:
        ParquetSource(uri)
    assert "\n" not in str(refused.value)


def test_a_footer_of_types_that_do_not_exist_is_damaged():
    """As a bit that flipped makes them: 90 of 16,832 did."""
    words = r"^a\.parquet cannot be read; it is .* a damaged one: Integers with less than 8"
    with pytest.raises(DataError, match=words), explained("a.parquet"):
        raise pa.ArrowNotImplementedError("Integers with less than 8 bits not implemented")


def test_damaged_pages(tmp_path):
    uri = write(tmp_path / "d", image=[[i, i] for i in range(500)], label=[0] * 500, row_group_size=500)
    path = tmp_path / "d" / "part-0.parquet"
    good = path.read_bytes()
    path.write_bytes(good[:4] + b"\xff" * 200 + good[204:])
    with pytest.raises(DataError, match=r"part-0\.parquet: row group 0 cannot be read"):
        ParquetSource(uri)


def test_an_outage_while_reading_is_no_fault_of_the_data(data, s3_endpoint):
    """A StorageError may be retried by a fresh worker group; a DataError ends the run."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="outage")
        uri = f"s3://outage/data?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        put_tree(Storage(uri), data, "part")
        source = ParquetSource(uri)
    finally:
        server.stop()
    with pytest.raises(StorageError) as outage:
        source.take(np.array([12]))
    assert outage.value.kind == "unreachable"
    assert outage.value.retryable


def test_no_records_are_as_good_as_any(tmp_path):
    source = ParquetSource(write(tmp_path / "d", image=[[1, 2]] * 9, label=[0] * 9))
    image, label = source.take(np.zeros(0, np.int64))
    assert (image.shape, label.shape) == ((0, 2), (0,))


@pytest.mark.parametrize("dtype", ["U", object])
def test_text_is_bytes_of_one_width(dtype: Any):
    texts = np.array([["a", "\u00e4\u00f6"], ["", "abc"]], dtype)
    source = ArraySource({"words": texts, "n": np.arange(2)})
    assert source.spec[0]["words"] == Spec((2,), "string")
    assert source.spec[0]["words"].bytes > 0
    _, words = source.take(np.array([1, 0]))
    assert words.tolist() == [[b"", b"abc"], [b"a", "\u00e4\u00f6".encode()]]
    assert fingerprint(source) == fingerprint(ArraySource({"words": texts.astype("U"), "n": np.arange(2)}))
    assert Spec((2,), "string").zeros([1, 2]).tolist() == [[b"", b""]]
