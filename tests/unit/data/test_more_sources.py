"""CSV, .npz, and mapping-style data: the records that are there, by any number, and one line for each mistake."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.data import ArraySource, CsvSource, MappingSource, NpzSource, Spec
from raytf.data.sources import fingerprint
from raytf.errors import DataError
from raytf.storage.storage import Storage
from tests.support.data_files import put_tree


def refused(call, *words):
    with pytest.raises(DataError) as error:
        call()
    assert [w for w in words if w not in str(error.value)] == []
    assert "\n" not in str(error.value)


def again(source):
    """As it arrives at a worker."""
    return pickle.loads(pickle.dumps(source))


# CSV.


@pytest.fixture
def table(tmp_path):
    """Two files of 30 and 12 lines; a = record, b = record / 2, label = record % 3."""
    for name, records in (("a", range(30)), ("b", range(30, 42))):
        lines = ["a,b,label", *(f"{i},{i / 2},{i % 3}" for i in records)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return str(tmp_path)


@pytest.mark.parametrize("block", [10, 40, 1 << 20])
@pytest.mark.parametrize("order", ["records", "blocks"])
def test_csv(table, block, order):
    source = again(CsvSource(table, order=order, block_bytes=block))
    assert (source.records, source.spec) == (42, (Spec((2,), "float32"), Spec((), "int64"), None))
    assert source.label_range() == (0, 2)
    assert (source.block_sizes is None) == (order == "records")
    ids = np.array([41, 0, 30, 29, 7, 7])
    x, y = source.take(ids)
    assert (x[:, 0].tolist(), x[:, 1].tolist(), y.tolist()) == (ids.tolist(), (ids / 2).tolist(), (ids % 3).tolist())


def test_csv_columns_by_name(table):
    source = CsvSource(table, x=["b", "a"], y=None, sample_weight="label")
    assert source.spec == ({"b": Spec((), "float64"), "a": Spec((), "int64")}, None, Spec((), "int64"))
    assert [leaf.tolist() for leaf in source.take(np.array([3]))] == [[3], [1.5], [0]]


def test_csv_pixels(tmp_path):
    (tmp_path / "a.csv").write_text("label,p0,p1,p2,p3\n1,0,1,2,255\n0,4,5,6,7\n")
    source = CsvSource(str(tmp_path / "a.csv"), shape=(2, 2, 1), dtype="uint8")
    x, y = source.take(np.array([1, 0]))
    assert (x.dtype, x.shape, x[1].ravel().tolist(), y.tolist()) == (np.uint8, (2, 2, 2, 1), [0, 1, 2, 255], [0, 1])
    (tmp_path / "a.csv").write_text("label,p0\n1,256\n")
    refused(lambda: CsvSource(str(tmp_path / "a.csv"), dtype="uint8"), "record 0: p0 is 256, no uint8")


def test_csv_labels_that_are_texts_are_numbered_by_their_names(tmp_path):
    (tmp_path / "a.csv").write_text('x,label\n1,dog\n2,"a ""cat"", or\ntwo"\n3,dog\n')
    source = again(CsvSource(str(tmp_path / "a.csv")))
    assert source.classes == ('a "cat", or\ntwo', "dog")
    assert (source.take(np.arange(3))[1].tolist(), source.label_range()) == ([1, 0, 1], (0, 1))


def test_csv_labels_are_numbered_by_the_classes_that_are_given(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,label\n1,dog\n2,cat\n")
    source = again(CsvSource(str(path), classes=["bird", "cat", "dog"]))
    assert (source.classes, source.take(np.arange(2))[1].tolist()) == (("bird", "cat", "dog"), [2, 1])
    assert source.label_range() == (0, 2)
    path.write_text("x,label\n1,2\n2,10\n")
    assert CsvSource(str(path), classes=["10", "2"]).take(np.arange(2))[1].tolist() == [1, 0]
    path.write_text("x,label\n1,dog\n2,eel\n")
    refused(
        lambda: CsvSource(str(path), classes=["cat", "dog"]), "a.csv: record 1: label is 'eel'", "classes cat, dog."
    )
    for odd, found in ((["dog", "dog"], "'dog' twice"), ([], "none")):
        refused(lambda odd=odd: CsvSource(str(path), classes=odd), "each once", found)
    refused(lambda: CsvSource(str(path), y=None, classes=["dog"]), "one column y", "found y=None")


def test_csv_by_blocks_tells_classes_apart(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,dog\n2,cat\n")
    kinds = [("cat", "dog"), ("cat", "dog", "eel")]
    prints = {fingerprint(CsvSource(str(tmp_path), order="blocks", classes=c)) for c in kinds}
    assert len(prints) == 2


@pytest.mark.parametrize("block", [12, 1 << 20])
def test_csv_columns_of_true_and_false(tmp_path, block):
    rows = ["true,false", "False,TRUE", "true,true", "false,false"]
    (tmp_path / "a.csv").write_text("\n".join(["a,label", *rows]) + "\n")
    source = again(CsvSource(str(tmp_path), x="a", block_bytes=block))
    assert source.spec == (Spec((), "bool"), Spec((), "int64"), None)
    assert [leaf.tolist() for leaf in source.take(np.arange(4))] == [[True, False, True, False], [0, 1, 1, 0]]
    assert (source.label_range(), source.classes) == ((0, 1), None)
    vector = CsvSource(str(tmp_path), dtype="uint8", block_bytes=block)
    assert vector.take(np.arange(4))[0].tolist() == [[1], [0], [1], [0]]


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ("7,7", ["column 'a' holds numbers here and true and false elsewhere"]),
        ("true,7", ["column 'label' holds numbers here and true", "Pass classes=[...]"]),
        ("true,cow", ["column 'label' holds text here and true", "Pass classes=[...]"]),
    ],
)
def test_csv_columns_of_two_kinds(tmp_path, later, words):
    (tmp_path / "a.csv").write_text("a,label\ntrue,true\n")
    (tmp_path / "b.csv").write_text(f"a,label\n{later}\n")
    refused(lambda: CsvSource(str(tmp_path), x="a"), "b.csv", *words)


@given(st.lists(st.text('ab\n,"é', max_size=6), min_size=1, max_size=30), st.integers(8, 60))
def test_csv_lines_are_found_whatever_quotes_hold(tmp_path_factory, texts, block):
    import csv

    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([("n", "label"), *enumerate(texts)])
    source = CsvSource(str(path), x="n", block_bytes=block)
    ids = np.random.default_rng(0).permutation(len(texts))
    n, label = source.take(ids)
    assert n.tolist() == ids.tolist()
    assert [source.classes[i] for i in label] == [texts[i] for i in ids]


def test_csv_a_worker_reads_its_blocks_only(table):
    source = again(CsvSource(table, order="blocks", block_bytes=40))
    reader = source.reader(1)
    reader.take(np.arange(5))
    assert 5 <= source.rows_read < 15


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("a,label\n1,2\n", {"x": "b"}, ["no column 'b'", "a, label"]),
        ("a,b\n1,2\n", {}, ["no column 'label'", "a, b"]),
        ("label\n1\n", {}, ["no column is left for x"]),
        ("a,a,label\n1,2,3\n", {}, ["name the columns, each once"]),
        ("a,label\n", {}, ["no records"]),
        ("a,label\n1,2\n3\n", {}, ["records 0 on", "Expected 2 columns, got 1"]),
        ("a,label\nx,2\n", {}, ["column 'a' holds string", "Expected numbers"]),
        ("a,label\n1,2\n,3\n", {}, ["column 'a' holds string"]),
        ("a,label\n1,2\n", {"shape": (2, 2)}, ["x has 1 columns", "(2, 2) does not fit"]),
    ],
)
def test_csv_mistakes(tmp_path, text, arguments, words):
    (tmp_path / "a.csv").write_text(text)
    refused(
        lambda: CsvSource(str(tmp_path), **arguments),
        "a.csv" if "x has" not in words[0] and "no rec" not in words[0] else "",
        *words,
    )


def test_csv_files_that_differ(table, tmp_path):
    (tmp_path / "c.csv").write_text("a,c,label\n1,2,3\n")
    refused(lambda: CsvSource(table), "c.csv", "columns are not those of", "a.csv")
    (tmp_path / "c.csv").write_bytes("a,b,label\n1,ü,3\n".encode("latin-1"))
    refused(lambda: CsvSource(table), "c.csv")
    (tmp_path / "c.csv").write_bytes("a,ü,label\n1,2,3\n".encode("latin-1"))
    refused(lambda: CsvSource(table), "c.csv", "UTF-8")
    refused(lambda: CsvSource(str(tmp_path / "nowhere")), "nowhere", "no *.csv files")


def test_csv_on_s3(s3, table):
    put_tree(Storage(s3()), table, "d")
    assert again(CsvSource(s3("d"))).take(np.array([41]))[0][0].tolist() == [41, 20.5]


# .npz


def arrays(n=50):
    rng = np.random.default_rng(0)
    return {"x": rng.random((n, 3, 2), np.float32), "y": np.arange(n) % 7, "w": np.ones(n)}


@pytest.mark.parametrize("order", ["records", "blocks"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save, order):
    save(tmp_path / "a.npz", **arrays())
    source = again(NpzSource(str(tmp_path / "a.npz"), sample_weight="w", order=order, block_bytes=400))
    assert source.spec == (Spec((3, 2), "float32"), Spec((), "int64"), Spec((), "float64"))
    assert (source.block_sizes is None) == (order == "records")
    ids = np.array([49, 0, 7, 7, 48])
    for got, wanted in zip(source.take(ids), arrays().values(), strict=True):
        assert got.tobytes() == wanted[ids].tobytes()


def test_npz_rows_are_read_alone_where_they_are_not_packed(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    source = again(NpzSource(str(tmp_path / "a.npz"), order="blocks", block_bytes=400))
    source.reader(1).take(np.arange(10))
    assert source.rows_read < 50
    small = NpzSource(str(tmp_path / "a.npz"))
    assert fingerprint(small) == fingerprint(ArraySource(arrays()["x"], arrays()["y"]))


@pytest.mark.parametrize("array", [np.arange(20.0).reshape(5, 4, order="F"), np.arange(5, dtype=">i4")])
def test_npz_of_unusual_layouts(tmp_path, array):
    np.savez(tmp_path / "a.npz", x=array)
    got = NpzSource(str(tmp_path / "a.npz"), y=None).take(np.array([4, 1]))[0]
    assert (got.tolist(), got.dtype.isnative) == (array[[4, 1]].tolist(), True)


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ({"x": np.zeros(3)}, {}, ["no array 'y'", "its arrays are: x"]),
        ({"x": np.zeros(3), "y": np.zeros(2)}, {}, ["differ", "x has 3, y has 2"]),
        ({"x": np.zeros(0), "y": np.zeros(0)}, {}, ["no records"]),
        ({"x": np.array("a")}, {"y": None}, ["x is a single value"]),
        ({"x": np.array(["a"])}, {"y": None}, ["dtype <U1", "not a number"]),
    ],
)
def test_npz_mistakes(tmp_path, content, arguments, words):
    np.savez(tmp_path / "a.npz", **content)
    refused(lambda: NpzSource(str(tmp_path / "a.npz"), **arguments), "a.npz", *words)


@pytest.mark.parametrize(
    "damage",
    [lambda d: d[: len(d) // 2], lambda d: b"text" * 99, lambda d: b"", lambda d: d[:40] + bytes(60) + d[100:]],
)
def test_npz_damaged(tmp_path, damage):
    np.savez(tmp_path / "a.npz", **arrays())
    path = tmp_path / "a.npz"
    path.write_bytes(damage(path.read_bytes()))
    refused(lambda: NpzSource(str(path)), "a.npz is not an .npz file of numbers, or is damaged")


def test_npz_that_is_not_there(tmp_path):
    refused(lambda: NpzSource(str(tmp_path)), "Pass one .npz file")
    refused(lambda: NpzSource(str(tmp_path / "nowhere.npz")), "nowhere.npz")


def test_npz_on_s3(s3, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    np.savez_compressed(tmp_path / "b.npz", **arrays())
    put_tree(Storage(s3()), str(tmp_path), "d")
    for name in ("a", "b"):
        x, y = again(NpzSource(s3(f"d/{name}.npz"), block_bytes=400)).take(np.array([49, 3]))
        assert (x.tobytes(), y.tolist()) == (arrays()["x"][[49, 3]].tobytes(), [0, 3])


# Mappings.


class Squares:
    """As a data set of PyTorch's."""

    def __init__(self, n=10, **odd):
        self.n, self.odd, self.asked = n, odd, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.asked += 1
        return self.odd.get(f"at{i}") or (np.full(3, i, np.float32), i * i)


class Fetched(Squares):
    def __getitems__(self, ids):
        return [(np.full(3, i, np.float32), i * i) for i in ids]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", [Squares, Fetched])
def test_mapping(kind, threads):
    source = again(MappingSource(kind(), threads=threads))
    assert (source.records, source.block_sizes) == (10, None)
    assert source.spec == (Spec((3,), "float32"), Spec((), "int64"), None)
    x, y = source.take(np.array([9, 0, 4]))
    assert (x[:, 0].tolist(), y.tolist(), source.rows_read) == ([9, 0, 4], [81, 0, 16], 3)


def test_a_mapping_asks_for_what_is_wanted_only():
    data = Squares()
    source = MappingSource(data)
    source.take(np.array([3, 5]))
    assert data.asked == 3  # the first record, for its shapes


@pytest.mark.parametrize(
    ("item", "arguments", "spec"),
    [
        (1.5, {}, (Spec((), "float64"), None, None)),
        (
            ({"a": 1, "b": [2.0]}, None, 0.5),
            {},
            ({"a": Spec((), "int64"), "b": [Spec((), "float64")]}, None, Spec((), "float64")),
        ),
        ({"i": 1, "l": 2, "o": "no"}, {"x": "i", "y": "l"}, (Spec((), "int64"), Spec((), "int64"), None)),
        ({"i": 1, "l": 2}, {"x": ["i", "l"]}, ({"i": Spec((), "int64"), "l": Spec((), "int64")}, None, None)),
    ],
)
def test_kinds_of_items(item, arguments, spec):
    source = MappingSource(dict(enumerate([item] * 3)), **arguments)
    assert source.spec == spec
    assert all(len(leaf) == 2 for leaf in source.take(np.array([2, 0])))


class Short(Squares):
    def __getitems__(self, ids):
        return [self[i] for i in ids[1:]]


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (np.int8(1), np.int16(-128)),
        (np.uint8(1), True),
        (np.float32(1), 0.1),
        (np.float32(1), np.inf),
        (np.float32(1), np.nan),
        (np.float32(1), 7),
    ],
)
def test_a_mapping_takes_numbers_that_the_first_dtype_can_hold(first, later):
    (x,) = MappingSource({0: first, 1: later}).take(np.array([1]))
    assert (x.dtype, x.tobytes()) == (first.dtype, first.dtype.type(later).tobytes())


class Raises(Squares):
    def __getitem__(self, i):
        if i == 7:
            raise OSError("disk\non fire")
        return super().__getitem__(i)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MappingSource(iter([1])), ["a list_iterator has no records", "len() and [i]"]),
        (lambda: MappingSource(Squares(0)), ["no records"]),
        (lambda: MappingSource({0: "text"}), ["x has dtype <U4"]),
        (lambda: MappingSource({0: {"a": 1}}, x="b"), ["record 0 has no 'b'; it has a"]),
        (lambda: MappingSource({0: 1}, x="b"), ["record 0 has no 'b'; it has no names, but a int"]),
        (lambda: MappingSource({0: (None, 1)}), ["record 0 holds no x"]),
        (lambda: MappingSource(Squares(at4=(np.zeros(4), 1))).take(np.arange(9)), ["record 4: x has shape (4,)"]),
        (
            lambda: MappingSource(Squares(at4=(np.zeros(3, np.float32), 0.5))).take(np.arange(9)),
            ["record 4: y", "float64"],
        ),
        (lambda: MappingSource(Squares(at4=(np.zeros(3), 1, 1))).take(np.arange(9)), ["record 4 has 3 arrays"]),
        (
            lambda: MappingSource({0: np.int8(1), 1: np.int16(200)}).take(np.arange(2)),
            ["record 1: x is int16 and holds numbers that int8, the dtype of the first one, cannot hold"],
        ),
        (lambda: MappingSource({0: np.float32(1), 1: 1e300}).take(np.arange(2)), ["record 1: x is float64", "float32"]),
        (lambda: MappingSource({0: np.float32(1), 1: 2**24 + 1}).take(np.arange(2)), ["record 1: x is int64"]),
        (lambda: MappingSource(Short()).take(np.arange(3)), ["called for 3 records but returned 2", "for each"]),
        (lambda: MappingSource(Raises()).take(np.arange(9)), ["raised at record 7: OSError: disk on fire"]),
    ],
)
def test_mapping_mistakes(call, words):
    refused(call, "mapping", *words)
