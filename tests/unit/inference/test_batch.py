"""Columns of a data set that feed a model, and a file of predictions that appears when it is whole."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytf.data.sources import ArraySource, ImageFolderSource
from raytf.data.sources.images import Fit
from raytf.data.sources.schema import UNFINISHED
from raytf.data.sources.writer import FileLayout, write
from raytf.errors import ConfigError, DataError
from raytf.inference.batch import columns
from raytf.inference.batch.columns import Options
from raytf.inference.batch.predict import shortage
from raytf.inference.batch.reader import by_number, inspect, kind_of
from raytf.inference.batch.writer import PredictionWriter
from raytf.inference.signature import DEFAULT, PREDICT, Signature, TensorSpec
from raytf.storage.storage import Storage
from tests.support.data_files import tfrecords

IMAGES = np.zeros((4, 2, 2), np.uint8)
FLAT = np.empty(4, object)
FLAT[:] = [np.arange(4)] * 4
NUMBERS = np.arange(4.0)
NAMES = np.array(list("abcd"), object)


def taking(**inputs: TensorSpec) -> Signature:
    return Signature(DEFAULT, PREDICT, inputs, {"y": TensorSpec("float32", (None, 3))})


IMAGE = taking(pixels=TensorSpec("float32", (None, 2, 2, 1)))
VECTOR = taking(features_in=TensorSpec("float32", (None, 2)))
TWO = taking(a=TensorSpec("float32", (None,)), b=TensorSpec("float32", (None, 2, 2)))


@pytest.mark.parametrize(
    ("signature", "found", "x", "chosen"),
    [
        (IMAGE, {"pixels": IMAGES, "image": IMAGES}, (), {"pixels": ["pixels"]}),
        (IMAGE, {"image": IMAGES, "label": NUMBERS}, (), {"pixels": ["image"]}),
        (IMAGE, {"odd": FLAT, "label": NUMBERS}, (), {"pixels": ["odd"]}),
        (IMAGE, {"odd": FLAT, "other": IMAGES}, ("other",), {"pixels": ["other"]}),
        (VECTOR, {"u": NUMBERS, "v": NUMBERS, "name": NAMES}, (), {"features_in": ["u", "v"]}),
        (VECTOR, {"u": NUMBERS, "v": NUMBERS, "w": NUMBERS}, ("w", "u"), {"features_in": ["w", "u"]}),
        (TWO, {"a": NUMBERS, "b": IMAGES}, (), {"a": ["a"], "b": ["b"]}),
        (TWO, {"u": NUMBERS, "v": IMAGES}, ("a=u", "b=v"), {"a": ["u"], "b": ["v"]}),
    ],
)
def test_the_columns_of_a_model_are_found_or_named(signature, found, x, chosen):
    assert columns.sources(signature, found, x) == chosen


@pytest.mark.parametrize(
    ("signature", "found", "x", "text"),
    [
        (IMAGE, {"u": NUMBERS, "v": NUMBERS}, (), r"pixels \(float32 \[\?,2,2,1\]\); there are u, v. Name it: --x"),
        (IMAGE, {"u": IMAGES, "v": IMAGES}, (), "Name it: --x COLUMN"),
        (IMAGE, {"u": IMAGES}, ("w",), "no column 'w' for the input pixels; there are u"),
        (IMAGE, {"u": IMAGES}, ("z=u",), "the model has no such input. It has pixels"),
        (TWO, {"a": NUMBERS}, ("a",), "Expected INPUT=COLUMN for a, b"),
        (TWO, {"a": NUMBERS}, (), "input b"),
        (TWO, {"a": NUMBERS}, ("a=a",), "there is no column 'b'"),
    ],
)
def test_columns_that_cannot_be_told_are_refused(signature, found, x, text):
    with pytest.raises(ConfigError, match=text):
        columns.sources(signature, found, x)


def test_columns_become_the_tensor_that_the_model_takes():
    spec = IMAGE.inputs["pixels"]
    for column in (IMAGES, FLAT):
        made = columns.tensor(["c"], {"c": column}, spec)
        assert (made.shape, made.dtype) == ((4, 2, 2, 1), np.float32)
    pair = columns.tensor(["u", "v"], {"u": NUMBERS, "v": -NUMBERS}, VECTOR.inputs["features_in"])
    assert pair.tolist() == [[i, -i] for i in range(4)]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (np.zeros((4, 3)), r"records of shape \[3\]. Expected float32 \[\?,2,2,1\]"),
        (NAMES, "not a number"),
        (np.array([np.zeros(4), np.zeros(3)], object), "arrays of different shapes"),
    ],
)
def test_columns_of_another_kind_are_refused(column, text):
    with pytest.raises(DataError, match=text):
        columns.tensor(["c"], {"c": column}, IMAGE.inputs["pixels"])


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        ("scalars", ["label", "name"]),
        ("all", ["label", "image", "flat", "name"]),
        ("none", []),
        ("name,image", ["name", "image"]),
    ],
)
def test_what_is_written_beside_predictions(keep, names):
    assert columns.kept({"label": NUMBERS, "image": IMAGES, "flat": FLAT, "name": NAMES}, keep) == names


def test_a_column_to_keep_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no column 'z'; there are label"):
        columns.kept({"label": NUMBERS}, "z")


def test_outputs_have_names():
    scores = np.float32([[0.1, 0.9], [0.7, 0.3]])
    assert list(columns.named({"o": scores}, False, [])) == ["prediction"]
    assert list(columns.named({"a": scores, "b": scores[:, :1]}, False, [])) == ["prediction_a", "prediction_b"]
    assert columns.named({"o": scores[:, :1]}, True, [])["prediction"].shape == (2,)
    classes = columns.named({"o": scores}, True, ["class"])
    assert (classes["class_by_model"].tolist(), classes["score"].tolist()) == ([1, 0], scores.max(-1).tolist())


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a/b.parquet", "_SUCCESS"], "parquet"),
        (["x.CSV"], "csv"),
        (["a.png", "b.jpg", "notes.json"], "images"),
        (["t10k-images-idx3-ubyte.gz"], "idx"),
        (["a.tfrecord", "b.tfrecord-00000-of-00002", "_raytf_schema.json"], "tfrecord"),
        (["readme.md"], None),
    ],
)
def test_what_files_hold(names, kind):
    assert kind_of(names) == kind


@pytest.mark.parametrize(
    ("files", "kind", "names"),
    [
        (["a.png", "b/c.jpg", "notes.txt"], "images", ["a.png", "b/c.jpg"]),
        (["x.parquet"], "parquet", ["x.parquet"]),
        (["t10k-images-idx3-ubyte"], "idx", []),
        (["b.csv", "a.csv", "a.csv.bak", "_a.csv", ".a.csv", "_old/a.csv"], "csv", ["a.csv", "b.csv"]),
        (["a.tfrecord", "_more.json", "_raytf_index", ".raytf.json"], "tfrecord", ["a.tfrecord"]),
    ],
)
def test_a_folder_is_read_as_what_most_of_it_is(tmp_path: Path, files, kind, names):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    found = inspect(str(tmp_path))
    assert (found.kind, list(found.names)) == (kind, names)


DEFAULTS = Options()


def taken(uri: object, signature: Signature, options: Options = DEFAULTS, fit: Fit = "crop") -> dict[str, np.ndarray]:
    """All records, from what a process of Ray gets."""
    records = by_number(inspect(str(uri)), lambda: signature, options, fit)
    return records.take(pickle.loads(pickle.dumps(records.held)), np.arange(records.count))


def picture(side: tuple[int, int] = (2, 2), channels: int = 1) -> Signature:
    return taking(pixels=TensorSpec("float32", (None, *side, channels)))


@pytest.mark.parametrize("fit", ["crop", "stretch"])
@pytest.mark.parametrize(("ending", "channels"), [("png", 1), ("png", 3), ("jpg", 3)])
def test_images_are_the_pixels_of_training(tmp_path: Path, fit, ending, channels):
    random = np.random.default_rng(0)
    for name in ("a/1", "a/2", "b/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pixels = random.integers(0, 256, (40, 90, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.{ending}")
    (tmp_path / "a" / "notes.txt").touch()
    found = taken(tmp_path, picture((20, 20), channels), fit=fit)
    source = ImageFolderSource(str(tmp_path), (20, 20), channels, fit)
    np.testing.assert_array_equal(found["image"], source.take(np.arange(3))[0])
    assert found["path"].tolist() == [str(tmp_path / f"{name}.{ending}") for name in ("a/1", "a/2", "b/1")]


@pytest.mark.parametrize("signature", [picture(channels=4), VECTOR, taking(x=TensorSpec("uint8", (None, None, 9, 1)))])
def test_a_model_that_takes_no_such_images_is_refused(tmp_path: Path, signature):
    (tmp_path / "a.png").touch()
    with pytest.raises(ConfigError, match="not an image of fixed size, gray or in color"):
        taken(tmp_path, signature)


def test_tfrecords_are_read_as_training_reads_them(tmp_path: Path):
    folder, image, label = tfrecords(tmp_path / "t", side=2)
    found = taken(folder, IMAGE)
    np.testing.assert_array_equal(found["image"].reshape(image.shape), image)
    assert found["label"].tolist() == label.tolist()
    assert list(taken(folder, IMAGE, Options(("image",), "none"))) == ["image"]
    with pytest.raises(ConfigError, match="no feature 'id'; there are image, label"):
        taken(folder, IMAGE, Options(keep="id"))


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_what_is_converted_is_found_and_nothing_beside_it(tmp_path: Path, to):
    source = ArraySource(np.arange(40, dtype=np.uint8).reshape(10, 2, 2), np.arange(10))
    layout = FileLayout.of(to, source.spec, 10, 200, 50)
    assert write(Storage(str(tmp_path)), source, layout, "a test")
    found = inspect(str(tmp_path))
    assert (found.kind, {name.partition(".")[2] for name in found.names}) == (to, {to})
    if to == "tfrecord":
        columns_found = taken(tmp_path, IMAGE)
        np.testing.assert_array_equal(columns_found["x"], source.take(np.arange(10))[0])
        assert columns_found["label"].tolist() == list(range(10))


def test_a_conversion_that_has_not_ended_is_refused(tmp_path: Path):
    (tmp_path / "part-00000.parquet").touch()
    (tmp_path / UNFINISHED).touch()
    with pytest.raises(DataError, match="a conversion into this folder is not finished"):
        inspect(str(tmp_path))


@pytest.mark.parametrize(
    ("signature", "x", "keep", "there", "names"),
    [
        (IMAGE, (), "scalars", ["image", "label", "text"], ["image", "label"]),
        (IMAGE, (), "scalars", ["image", "pixels"], ["pixels"]),
        (IMAGE, ("text",), "none", ["image", "label", "text"], ["text"]),
        (IMAGE, (), "all", ["image", "label"], ["image", "label"]),
        (TWO, ("a=u", "b=v"), "w", ["u", "v", "w"], ["u", "v", "w"]),
    ],
)
def test_features_that_are_read(signature, x, keep, there, names):
    assert columns.features(signature, Options(x, keep), there) == names


@pytest.mark.parametrize(
    ("x", "keep", "text"),
    [
        ((), "scalars", "input pixels; there are u, v. Name it: --x FEATURE"),
        (("w",), "scalars", "no feature 'w'; there are u, v"),
        (("u",), "w", "no feature 'w'; there are u, v"),
    ],
)
def test_features_that_are_not_there_are_refused(x, keep, text):
    with pytest.raises(ConfigError, match=text):
        columns.features(IMAGE, Options(x, keep), ["u", "v"])


@pytest.mark.parametrize(("signature", "shape"), [(IMAGE, (2, 2, 1)), (VECTOR, None), (TWO, None)])
def test_what_image_a_model_takes(signature, shape):
    assert columns.image_of(signature) == shape


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "there is nothing in"),
        (["a.md"], "raytf cannot read files such as"),
        (["a.npz", "b.npz"], "a folder of .npz files"),
    ],
)
def test_inputs_that_are_refused_before_ray_is_started(tmp_path: Path, files, text):
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=text):
        inspect(str(tmp_path))


BATCHES = [
    {"id": np.arange(3), "name": np.array(list("abc"), object), "p": np.arange(6, dtype=np.float32).reshape(3, 2)},
    {"id": np.arange(3, 5), "name": np.array(list("de"), object), "p": np.float32([[6, 7], [8, 9]])},
]


def read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    rows = list(csv.DictReader(path.open()))
    return [{"id": int(r["id"]), "name": r["name"], "p": [float(r["p_0"]), float(r["p_1"])]} for r in rows]


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_a_file_has_all_batches_in_order_and_appears_at_the_end(tmp_path: Path, ending):
    path = tmp_path / "new" / f"p.{ending}"
    with PredictionWriter(str(path)) as sink:
        for batch in BATCHES:
            sink.add(batch)
            assert not path.exists()
    assert read(path) == [{"id": i, "name": "abcde"[i], "p": [2.0 * i, 2.0 * i + 1]} for i in range(5)]
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o077 == 0o044


def test_a_file_on_a_store_is_put_whole(s3, tmp_path: Path):
    with PredictionWriter(s3("out/p.parquet")) as sink:
        for batch in BATCHES:
            sink.add(batch)
        assert Storage(s3("out")).list() == []
    assert Storage(s3("out")).list() == ["p.parquet"]
    (tmp_path / "p.parquet").write_bytes(Storage(s3("out")).get("p.parquet"))
    assert len(read(tmp_path / "p.parquet")) == 5


def test_an_error_leaves_nothing_and_what_was_there(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text("old")

    def write() -> None:
        with PredictionWriter(str(path), overwrite=True) as sink:
            sink.add(BATCHES[0])
            raise RuntimeError("a defect")

    with pytest.raises(RuntimeError):
        write()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["p.jsonl"]


def test_a_batch_of_another_kind_is_an_error_and_no_file(tmp_path: Path):
    def write() -> None:
        with PredictionWriter(str(tmp_path / "p.parquet")) as sink:
            sink.add(BATCHES[0])
            sink.add({"id": np.array(["x"], object)})

    with pytest.raises(DataError, match="other columns or types"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("nodes", "workers", "cpus", "gpus", "text"),
    [
        ([{"CPU": 2}], 1, 1, 0, ""),
        ([{"CPU": 1}], 1, 1, 0, "2 CPU, 1 of them to read the data, and this cluster has 1"),
        ([{"CPU": 2}], 2, 1, 0, "3 CPU, 1 of them to read the data, and this cluster has 2"),
        ([{"CPU": 2}, {"CPU": 2}], 2, 1.5, 0, ""),
        ([{"CPU": 2}, {"CPU": 3}], 1, 4, 0, "1 times 4 CPU and 0 GPU on one node, and this cluster has room for 0"),
        ([{"CPU": 8}], 1, 1, 1, "1 GPU, and this cluster has 0"),
        ([{"CPU": 8, "GPU": 1}, {"memory": 1}], 2, 1, 0.5, ""),
        ([], 1, 1, 0, "2 CPU, 1 of them to read the data, and this cluster has 0"),
    ],
)
def test_what_a_cluster_lacks(nodes, workers, cpus, gpus, text):
    assert shortage(nodes, workers, cpus, gpus) == text


def test_a_batch_without_records_is_nothing(tmp_path: Path):
    with PredictionWriter(str(tmp_path / "p.csv")) as sink:
        for value in ([], [1], [], [2]):
            sink.add({"id": np.array(value, np.int64)})
    assert (tmp_path / "p.csv").read_text().split() == ['"id"', "1", "2"]


NULLS = np.array([None, None], object)
WIDER = [NULLS, np.array([1, 2]), np.array([1.5, 2.5]), np.array([3, 4])]


@pytest.mark.parametrize(
    ("ending", "values"),
    [
        ("parquet", [None, None, 1.0, 2.0, 1.5, 2.5, 3.0, 4.0]),
        ("jsonl", [None, None, 1, 2, 1.5, 2.5, 3, 4]),
        ("csv", ["", "", "1", "2", "1.5", "2.5", "3", "4"]),
    ],
)
def test_a_column_may_be_empty_or_whole_at_first(tmp_path: Path, ending, values):
    path = tmp_path / f"p.{ending}"
    with PredictionWriter(str(path)) as sink:
        for i, value in enumerate(WIDER):
            sink.add({"id": np.array([2 * i, 2 * i + 1]), "v": value})
    if ending == "csv":
        rows = list(csv.DictReader(path.open()))
    else:
        rows = read(path)
    assert [row["v"] for row in rows] == values
    assert [int(row["id"]) for row in rows] == list(range(8))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize(
    "then", [{"v": np.array(["x"], object)}, {"w": np.array([1])}, {"v": np.array([1, "x"], object)}]
)
def test_a_batch_that_no_type_holds_is_an_error_in_every_format(tmp_path: Path, ending, then):
    def write() -> None:
        with PredictionWriter(str(tmp_path / f"p.{ending}")) as sink:
            sink.add({"v": np.array([1])})
            sink.add(then)

    with pytest.raises(DataError, match="other columns or types"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"), [("p.txt", "ends with .parquet, .csv, .jsonl"), ("old.csv", "already exists. Pass --overwrite")]
)
def test_outputs_that_are_refused(tmp_path: Path, name, text):
    (tmp_path / "old.csv").write_text("")
    with pytest.raises(ConfigError, match=text):
        PredictionWriter(str(tmp_path / name))


def test_no_records_are_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="no records"), PredictionWriter(str(tmp_path / "p.csv")):
        pass
    assert list(tmp_path.iterdir()) == []
