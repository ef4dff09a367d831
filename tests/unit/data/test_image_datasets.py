"""Data sets by name or path, and one clear message for each that is missing or damaged."""

import gzip
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytf.data import ImageFolderSource, load_images
from raytf.data.image_datasets import open_splits, read_idx
from raytf.data.sources.detect import is_idx
from raytf.data.sources.tfrecord_files import frame
from raytf.data.sources.writer import FileLayout, write
from raytf.errors import DataError
from raytf.storage.storage import Storage
from tests.support.data_files import examples, pictures, put_tree, tfrecords


def idx(array, code=0x08):
    array = np.asarray(array)
    return bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def arrays(n_train=6, n_test=4, side=3):
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (n_train, side, side), np.uint8),
        "y_train": (np.arange(n_train) % 3).astype(np.uint8),
        "x_test": rng.integers(0, 256, (n_test, side, side), np.uint8),
        "y_test": (np.arange(n_test) % 3).astype(np.uint8),
    }


def idx_folder(folder, suffix="", **changed):
    parts = {**arrays(), **changed}
    names = {
        "x_train": "train-images-idx3-ubyte",
        "y_train": "train-labels-idx1-ubyte",
        "x_test": "t10k-images-idx3-ubyte",
        "y_test": "t10k-labels-idx1-ubyte",
    }
    folder.mkdir()
    for key, name in names.items():
        data = idx(parts[key])
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    return folder


def parquet_folder(folder, parts):
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        x = parts[f"x_{split}"]
        table = pa.table({"image": list(x.reshape(len(x), -1)), "label": parts[f"y_{split}"]})
        pq.write_table(table, folder / split / "0.parquet", row_group_size=4)
    return folder


def refused(call, *words):
    with pytest.raises(DataError) as error:
        call()
    message = str(error.value)
    assert [w for w in words if w not in message] == []
    assert "\n" not in message


# IDX.


@pytest.mark.parametrize(
    ("code", "kind"), [(0x08, ">u1"), (0x09, ">i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")]
)
def test_idx_types(tmp_path, code, kind):
    array = np.arange(6, dtype=kind).reshape(2, 3)
    (tmp_path / "a").write_bytes(idx(array, code))
    got = read_idx(tmp_path / "a")
    assert got.dtype == np.dtype(kind).newbyteorder("=")
    assert got.tolist() == array.tolist()


def test_idx_gzip_whatever_its_name(tmp_path):
    (tmp_path / "a").write_bytes(gzip.compress(idx(np.arange(3, dtype=np.uint8))))
    assert read_idx(str(tmp_path / "a")).tolist() == [0, 1, 2]


GOOD = idx(np.zeros((5, 4, 4), np.uint8))
PACKED = gzip.compress(idx(np.random.default_rng(0).integers(0, 256, 5000, np.uint8)))
BAD_IDX = {
    "empty": (b"", "not an IDX file"),
    "short": (b"\0\0\x08", "not an IDX file"),
    "text": (b"<html>not found</html>", "not an IDX file"),
    "unknown type": (b"\0\0\x07" + GOOD[3:], "not an IDX file"),
    "header cut": (GOOD[:9], "not an IDX file"),
    "no body": (GOOD[:16], "promises 80 bytes, 0 are there"),
    "body cut": (GOOD[:-1], "promises 80 bytes, 79 are there"),
    "too long": (GOOD + b"x", "promises 80 bytes, more are there"),
    "gzip cut": (PACKED[: len(PACKED) // 2], "cannot be read"),
    "gzip header only": (b"\x1f\x8b", "cannot be read"),
    "gzip garbage": (PACKED[:10] + b"\xff" * 50, "cannot be read"),
    "gzip checksum": (PACKED[:-8] + b"\0" * 8, "cannot be read"),
    "gzip flipped": (PACKED[:1000] + bytes(64) + PACKED[1064:], "cannot be read"),
}


@pytest.mark.parametrize("case", BAD_IDX)
def test_bad_idx(tmp_path, case):
    data, words = BAD_IDX[case]
    (tmp_path / "file.gz").write_bytes(data)
    refused(lambda: read_idx(tmp_path / "file.gz"), "file.gz", words)


def test_idx_that_is_not_there(tmp_path):
    refused(lambda: read_idx(tmp_path / "nope"), "nope", "cannot be read")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_folder_of_idx_files(tmp_path, suffix):
    images = load_images(str(idx_folder(tmp_path / "d", suffix)))
    assert (images.image_shape, images.classes) == ((3, 3, 1), 3)
    assert (images.train.records, images.test.records) == (6, 4)
    x, y = images.train.take(np.array([4]))
    assert x[0, ..., 0].tolist() == arrays()["x_train"][4].tolist()
    assert (y.dtype, y.tolist()) == (np.int64, [1])


@pytest.mark.parametrize(
    "name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
)
def test_a_missing_idx_file(tmp_path, name):
    folder = idx_folder(tmp_path / "d")
    (folder / name).unlink()
    refused(lambda: load_images(str(folder)), "missing", name.partition("-idx")[0])


def test_mnist_itself(mnist_dir):
    images = load_images(str(mnist_dir))
    assert (images.train.records, images.test.records) == (60_000, 10_000)
    assert (images.image_shape, images.classes) == ((28, 28, 1), 10)
    x, y = images.train.take(np.arange(5))
    assert x.dtype == np.uint8
    assert y.tolist() == [5, 0, 4, 1, 9]


# .npz


def npz(path, **changed):
    parts = {k: v for k, v in {**arrays(), **changed}.items() if v is not None}
    np.savez(path, **parts)
    return str(path)


def test_npz(tmp_path):
    images = load_images(npz(tmp_path / "a.npz"))
    assert (images.train.records, images.image_shape, images.classes) == (6, (3, 3, 1), 3)


def test_npz_with_channels(tmp_path):
    parts = {k: np.zeros((2, 3, 4, 3), np.uint8) for k in ("x_train", "x_test")}
    labels = {k: np.array([0, 1]) for k in ("y_train", "y_test")}
    assert load_images(npz(tmp_path / "a.npz", **parts, **labels)).image_shape == (3, 4, 3)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"y_test": None}, ["no array 'y_test'", "its arrays are: x_test"]),
        ({"y_train": np.arange(5)}, ["differ", "x has 6", "y has 5"]),
        ({"y_train": np.zeros((6, 1), int)}, ["train images", "(6, 1)", "Expected"]),
        ({"y_train": np.zeros(6)}, ["train labels", "float64", "whole numbers"]),
        ({"x_train": np.zeros((6, 9))}, ["train images", "(6, 9)", "Expected"]),
        ({"x_test": np.zeros((4, 5, 5), np.uint8)}, ["(3, 3, 1)", "(5, 5, 1)"]),
        ({"x_train": np.array([[1], [2, 3]], object)}, ["x_train has dtype object"]),
        ({"x_train": np.zeros((0, 3, 3)), "y_train": np.zeros(0, int)}, ["no records"]),
    ],
    ids=["missing", "lengths", "label-shape", "label-dtype", "image-shape", "sizes", "object", "empty"],
)
def test_bad_npz(tmp_path, changed, words):
    path = npz(tmp_path / "a.npz", **changed)
    refused(lambda: load_images(path), *words)


@pytest.mark.parametrize(
    "damage",
    [lambda d: b"", lambda d: b"text" * 9, lambda d: d[: len(d) // 2], lambda d: d[:200] + b"\xff" * 50 + d[250:]],
    ids=["empty", "text", "cut", "flipped"],
)
def test_damaged_npz(tmp_path, damage):
    path = tmp_path / "a.npz"
    npz(path)
    path.write_bytes(damage(path.read_bytes()))
    refused(lambda: load_images(str(path)), "a.npz", "damaged")


# Parquet.


def test_a_folder_of_parquet_files(tmp_path):
    parts = arrays(10, 5)
    images = load_images(str(parquet_folder(tmp_path / "d", parts)))
    assert (images.train.records, images.test.records, images.image_shape, images.classes) == (10, 5, (3, 3, 1), 3)
    x, y = images.train.take(np.array([7]))
    assert x[0, ..., 0].tolist() == parts["x_train"][7].tolist()
    assert y.tolist() == [1]


def test_parquet_on_s3(s3, tmp_path):
    put_tree(Storage(s3()), str(parquet_folder(tmp_path / "d", arrays())), "images")
    images = load_images(s3("images"))
    assert (images.train.records, images.classes) == (6, 3)


def test_parquet_images_that_are_no_squares(tmp_path):
    parts = {**arrays(), "x_train": np.zeros((6, 2, 3), np.uint8)}
    refused(lambda: load_images(str(parquet_folder(tmp_path / "d", parts))), "6 numbers", "not a square")


def test_parquet_without_test(tmp_path):
    folder = parquet_folder(tmp_path / "d", arrays())
    (folder / "test" / "0.parquet").unlink()
    refused(lambda: load_images(str(folder)), "/test", "no *.parquet files")


# Names and paths.


def test_digits():
    images = load_images("digits")
    assert (images.image_shape, images.classes) == ((8, 8, 1), 10)
    assert images.train.records + images.test.records == 1797
    x, _ = images.train.take(np.arange(100))
    assert (x.dtype, x.min(), x.max()) == (np.uint8, 0, 255)
    assert images.test.label_range() == (0, 9)


def test_a_path_that_is_not_there(tmp_path):
    refused(lambda: load_images(str(tmp_path / "nope")), "nope", "no such file or folder", "digits")


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "a.csv").write_text("1,2")
    refused(lambda: load_images(str(tmp_path / "a.csv")), "a.csv", "expected an .npz")


@pytest.mark.parametrize(("files", "words"), [([], "nothing"), (["notes.txt"], "notes.txt")])
def test_a_folder_of_something_else(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_text("x")
    refused(lambda: load_images(str(tmp_path)), "neither IDX files", words)


def load_in_process(home, data):
    """Load in a process whose home is a folder and that reaches no network."""
    code = """
import sys
import raytf
try:
    print(raytf.load_images(sys.argv[1]).name)
except raytf.DataError as refused:
    print("refused:", refused)
"""
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    environment = {**os.environ, "HOME": str(home), "no_proxy": "", **nowhere}
    done = subprocess.run(
        [sys.executable, "-c", code, data], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("data", ["auto", "mnist"])
def test_a_local_copy_of_mnist_is_found(tmp_path, data):
    (tmp_path / ".raytf").mkdir()
    idx_folder(tmp_path / ".raytf" / "mnist")
    assert load_in_process(tmp_path, data) == f"IDX files in {tmp_path}/.raytf/mnist"


def test_auto_without_a_network_falls_back_to_digits(tmp_path):
    assert load_in_process(tmp_path, "auto").startswith("handwritten digits")


def test_mnist_without_a_network_says_what_to_do(tmp_path):
    said = load_in_process(tmp_path, "mnist")
    assert said.startswith("refused: --data mnist: no local copy")
    assert "--data digits" in said


# TFRecords and image folders.


def test_tfrecords_that_others_wrote(tmp_path):
    """Raw bytes and a label, as the guides write them; a square of gray pixels."""
    for split in ("train", "test"):
        tfrecords(tmp_path / split)
    images = load_images(str(tmp_path))
    assert (images.name, images.image_shape, images.classes) == (f"TFRecord files in {tmp_path}", (4, 4, 1), 5)
    x, y = images.train.take(np.array([7]))
    assert (x.shape, x.max(), y.tolist()) == ((1, 4, 4, 1), 7, [2])


@pytest.mark.parametrize("size", [None, (4, 4)])
def test_image_folders(tmp_path, size):
    pictures(tmp_path / "train", classes=("a", "b", "c"))
    pictures(tmp_path / "test", classes=("c",))
    images = load_images(str(tmp_path), size)
    assert (images.image_shape, images.classes) == ((*(size or (6, 5)), 3), 3)
    assert images.test.take(np.array([0]))[1].tolist() == [2]


def test_tfrecords_and_image_folders_on_s3(s3, tmp_path):
    for split in ("train", "test"):
        tfrecords(tmp_path / "t" / split)
        pictures(tmp_path / "i" / split)
    put_tree(Storage(s3()), str(tmp_path), "d")
    assert load_images(s3("d/t")).train.records == 13
    assert load_images(s3("d/i")).image_shape == (6, 5, 3)


@pytest.mark.parametrize("name", ["{}.tfrecord", "{}.tfrecord-00000-of-00002"])
def test_indexes_of_other_readers_are_no_idx_files(tmp_path, name):
    """DALI's tfrecord2idx writes them beside the files or in a folder of their own."""
    for split in ("train", "test"):
        uri, _, _ = tfrecords(tmp_path / split)
        for path in sorted((tmp_path / split).glob("*.tfrecord")):
            path = path.rename(path.with_name(name.format(path.stem)))
            path.with_name(f"{path.name}.idx").write_text("0 65\n")
            path.with_suffix(".idx").write_text("0 65\n")
    images = load_images(str(tmp_path))
    assert (images.train.records, open_splits(uri)[""].records) == (13, 13)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("train-images-idx3-ubyte.gz", True),
        ("train/t10k-labels.idx1-ubyte", True),
        ("T10K-LABELS-IDX1-UBYTE", True),
        ("a.idx", False),
        ("train-idx.csv", False),
        ("idx3-ubyte/a.tfrecord", False),
    ],
)
def test_names_of_idx_files(name, is_one):
    assert is_idx(name) is is_one


def labels(folder, **texts):
    """A CSV file for each part."""
    for split, column in texts.items():
        (folder / split).mkdir(parents=True)
        (folder / split / "a.csv").write_text("\n".join(["x,label", *(f"{i},{t}" for i, t in enumerate(column))]))
    return str(folder)


ANIMALS = {"train": ["dog", "bird", "cat"], "test": ["dog", "cat"]}


def test_all_parts_number_their_labels_as_the_first_one(tmp_path):
    """A class that is missing in a part moves no numbers."""
    found = open_splits(labels(tmp_path / "c", **ANIMALS, val=["cat"]))
    assert {s: source.take(np.arange(source.records))[1].tolist() for s, source in found.items()} == {
        "train": [2, 0, 1],
        "val": [1],
        "test": [2, 1],
    }
    for split, classes in ANIMALS.items():
        pictures(tmp_path / "i" / split, classes=classes)
    assert open_splits(str(tmp_path / "i"))["test"].label_range() == (1, 2)


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (["cat", "dog"], ["cat", "eel"], ["record 1: label is 'eel'", "Expected classes cat, dog"]),
        ([0, 1], ["cat", "dog"], ["labels are text here and numbers in"]),
        (["cat", "dog"], [0, 1], ["label is '0'", "Expected classes cat, dog"]),
    ],
)
def test_labels_that_the_training_data_do_not_know(tmp_path, train, test, words):
    refused(lambda: open_splits(labels(tmp_path, train=train, test=test)), f"{tmp_path}/test", *words)


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_parts_whose_classes_differ_are_refused(tmp_path, to):
    """Each part converted by itself numbers its own classes."""

    def made(name, **classes):
        for split, names in classes.items():
            source = ImageFolderSource(pictures(tmp_path / "i" / name / split, classes=names, size=(4, 4)))
            write(Storage(str(tmp_path / name / split)), source, FileLayout(to, 9, 3), "me")
        return str(tmp_path / name)

    bad = made("bad", **ANIMALS)
    for call in (lambda: load_images(bad), lambda: open_splits(bad)):
        refused(call, "bad/test: label 0 is 'cat' here, but is 'bird' in", "bad/train", "Number both alike")
    more = made("more", train=["cat"], test=["cat", "dog"])
    refused(lambda: load_images(more), "label 1 is 'dog' here, but")
    fewer = made("fewer", train=["cat", "dog"], test=["cat"])
    assert (load_images(fewer).classes, len(open_splits(fewer))) == (2, 2)


def test_folders_that_lack_a_part_or_a_label(tmp_path):
    tfrecords(tmp_path / "a" / "train")
    refused(lambda: load_images(str(tmp_path / "a")), "a/test", "no TFRecord files")
    for split in ("train", "test"):
        (tmp_path / "b" / split).mkdir(parents=True)
        records = examples(image=np.zeros((2, 4), np.uint8), label=np.float32([0.5, 1.5]))
        (tmp_path / "b" / split / "a.tfrecord").write_bytes(frame(records))
    refused(lambda: load_images(str(tmp_path / "b")), "labels are", "float32", "one whole number")
