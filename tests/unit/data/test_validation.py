"""`raytf data check`: every kind of damage is found where it is, and does not hide the rest."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytf.data import ArraySource, ImageFolderSource, Spec
from raytf.data.sources.detect import ReadOptions
from raytf.data.sources.tfrecord_files import frame
from raytf.data.sources.writer import FileLayout, write
from raytf.data.validation import check
from raytf.storage.storage import Storage
from tests.support.data_files import examples, pictures, tfrecords
from tests.unit.data.test_image_datasets import idx_folder, labels

RAYTF = (sys.executable, "-c", "from raytf.commands.main import main; main()", "data", "check")


def change(path: Path, at: int, data: bytes = b"\xff\x01"):
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


def test_what_is_there_is_counted(tmp_path):
    uri, _, _ = tfrecords(tmp_path)
    (found,) = check(uri)
    assert (found.kind, found.files, found.records, found.problems) == ("tfrecord", 2, 13, [])
    assert {n: (s.shape, s.dtype) for n, s in found.specs.items()} == {
        "image": ((16,), "uint8"),
        "label": ((), "int64"),
    }
    assert found.ranges == {"image": (0, 12), "label": (0, 4)}
    assert found.labels == {0: 3, 1: 3, 2: 3, 3: 2, 4: 2}


def test_corrupt_tfrecords_are_named_and_the_others_counted(tmp_path):
    uri, _, _ = tfrecords(tmp_path)
    path = tmp_path / "0.tfrecord"
    each = len(path.read_bytes()) // 10
    change(path, 2 * each + 20)  # data
    change(path, 5 * each)  # a length
    change(path, 9 * each - 3)  # a CRC of data
    other = tmp_path / "1.tfrecord"
    other.write_bytes(other.read_bytes()[:-7])
    (found,) = check(uri)
    assert found.records == 13 - 4
    assert [(place.rpartition("/")[2], why.partition(":")[0]) for place, why in found.problems] == [
        (f"0.tfrecord: record 2 at byte {2 * each}", "the data do not match their CRC-32C"),
        (f"0.tfrecord: record 5 at byte {5 * each}", "the length does not match its CRC-32C"),
        (f"0.tfrecord: record 8 at byte {8 * each}", "the data do not match their CRC-32C"),
        (f"1.tfrecord: record 2 at byte {2 * each}", "cut off"),
    ]


def test_records_that_are_whole_but_wrong_are_named(tmp_path):
    good = examples(image=np.zeros((3, 4), np.uint8), label=[0, 1, 2])
    bad = [*examples(label=[1]), *examples(image=np.zeros((1, 5), np.uint8), label=[1]), b"\xff\xff\xff"]
    (tmp_path / "a.tfrecord").write_bytes(frame([good[0], bad[0], good[1], bad[1], bad[2], good[2]]))
    (found,) = check(str(tmp_path))
    assert (found.records, dict(found.labels)) == (3, {0: 1, 1: 1, 2: 1})
    assert [place.rpartition("record ")[2].split()[0] for place, _ in found.problems] == ["1", "3", "4"]
    reasons = [why for _, why in found.problems]
    assert ["no feature" in r for r in reasons] == [True, False, False]
    assert "has 5 bytes" in reasons[1]
    assert "no tf.train.Example" in reasons[2]


def test_numbers_that_are_not_finite_are_counted(tmp_path):
    x = np.zeros((5, 2), np.float32)
    x[3] = np.nan, np.inf
    write(Storage(str(tmp_path)), ArraySource(x, np.arange(5)), FileLayout("tfrecord", 5, 5), "me")
    (found,) = check(str(tmp_path))
    assert (found.not_finite, found.ranges["x"], found.problems) == ({"x": 2}, (0, 0), [])


def test_damaged_row_groups_and_footers_are_named(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.random((100, 50), np.float32)
    write(Storage(str(tmp_path)), ArraySource(x), FileLayout("parquet", 40, 10), "me")
    second = pq.ParquetFile(tmp_path / "part-00000.parquet").metadata.row_group(1).column(0)
    change(tmp_path / "part-00000.parquet", second.data_page_offset + second.total_compressed_size - 9)
    path = tmp_path / "part-00002.parquet"
    change(path, len(path.read_bytes()) - 4, b"TEXT")
    (found,) = check(str(tmp_path))
    places = [place.rpartition("/")[2] for place, _ in found.problems]
    assert places == [
        "part-00000.parquet",
        "part-00002.parquet",
        "part-00000.parquet: row group 1",
        "part-00002.parquet",
    ]
    assert found.records == 100 - 10 - 20
    assert found.specs == {"x": Spec((50,), "float32")}
    assert found.problems[0][1] == "its bytes changed after they were written (CRC-32C)"


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_parquet_file_hides_none_of_the_others(tmp_path, damaged):
    """Of files that others wrote, too."""
    for i in range(3):
        table = pa.table({"image": [[i, i]] * 5, "label": range(5 * i, 5 * i + 5)})
        pq.write_table(table, tmp_path / f"{i}.parquet")
    (tmp_path / f"{damaged}.parquet").write_bytes(b"PAR1 no more")
    pq.write_table(pa.table({"image": [[1]], "label": [0]}), tmp_path / "3.parquet")
    pq.write_table(pa.table({"image": [[1, 2]]}), tmp_path / "4.parquet")
    (found,) = check(str(tmp_path))
    assert (found.records, found.files, sum(found.labels.values())) == (10, 5, 10)
    assert found.specs == {"image": Spec((2,), "int64"), "label": Spec((), "int64")}
    assert [place.rpartition("/")[2].partition(":")[0] for place, _ in found.problems] == [
        f"{damaged}.parquet",
        "3.parquet",
        "4.parquet",
    ]
    assert "column 'image' has shape (1,)" in found.problems[1][1]
    assert found.problems[2][1].startswith("there is no column 'label'; it has image")


def test_a_damaged_csv_file_hides_none_of_the_others(tmp_path):
    for name, text in {
        "a": "1,dog",
        "b": "not a number,cat",
        "c": "3,cat\n4,eel",
        "d": "1,2,3",
    }.items():
        (tmp_path / f"{name}.csv").write_text(f"a,label\n{text}\n")
    (tmp_path / "e.csv").write_text("b,label\n1,dog\n")
    (found,) = check(str(tmp_path))
    assert (found.records, found.files, found.classes) == (3, 5, ("cat", "dog", "eel"))
    assert dict(found.labels) == {0: 1, 1: 1, 2: 1}
    assert [place for place, _ in found.problems] == [str(tmp_path / f"{name}.csv") for name in "bde"]
    reasons = [why for _, why in found.problems]
    assert "column 'a' holds string" in reasons[0]
    assert "Expected 2 columns, got 3" in reasons[1]
    assert "its columns are not those of" in reasons[2]
    (tmp_path / "f.csv").write_text("a,label\n5,7\n")
    (found,) = check(str(tmp_path))
    assert (found.records, found.problems[-1]) == (
        3,
        (str(tmp_path / "f.csv"), "record 0: label is '7'. Expected classes cat, dog, eel."),
    )


def test_damaged_images_are_named(tmp_path):
    pictures(tmp_path, size=(20, 20))
    for name in ("cat/0.png", "dog/1.png"):
        change(tmp_path / name, 50, b"\0" * 9)
    Image.new("RGB", (3, 3)).save(tmp_path / "dog" / "2.png")
    (found,) = check(str(tmp_path))
    assert (found.records, found.classes, dict(found.labels)) == (3, ("cat", "dog"), {0: 2, 1: 1})
    assert [place.rpartition(str(tmp_path))[2] for place, _ in found.problems] == [
        "/cat/0.png",
        "/dog/1.png",
        "/dog/2.png",
    ]
    assert "3 x 3 pixels" in found.problems[2][1]
    (found,) = check(str(tmp_path), ReadOptions(size=(8, 8)))
    assert (found.records, len(found.problems), found.specs["image"].shape) == (4, 2, (8, 8, 3))


def test_parts_are_counted_by_the_classes_of_the_first(tmp_path):
    animals = {"train": ["bird", "cat", "dog"], "test": ["cat", "dog"]}
    for split, classes in animals.items():
        pictures(tmp_path / "i" / split, classes=classes)
    labels(tmp_path / "c", **animals)
    for folder, each in (("i", 3), ("c", 1)):
        train, test = check(str(tmp_path / folder))
        assert (train.classes, test.classes, test.problems) == (("bird", "cat", "dog"), ("bird", "cat", "dog"), [])
        assert dict(test.labels) == {1: each, 2: each}
    pictures(tmp_path / "i" / "test", per_class=1, classes=["eel"])
    _, test = check(str(tmp_path / "i"))
    assert [why for _, why in test.problems] == ["it is not in the folder of a class: bird, cat, dog"]
    labels(tmp_path / "d", train=["cat"], test=["eel"])
    _, test = check(str(tmp_path / "d"))
    assert ["label is 'eel'. Expected classes cat." in why for _, why in test.problems] == [True]


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_converted_parts_whose_classes_differ_are_named(tmp_path, to):
    for split, classes in {"train": ["bird", "cat"], "test": ["cat"]}.items():
        source = ImageFolderSource(pictures(tmp_path / "i" / split, classes=classes))
        write(Storage(str(tmp_path / "c" / split)), source, FileLayout(to, 9, 3), "me")
    train, test = check(str(tmp_path / "c"))
    assert (train.problems, [place for place, _ in test.problems]) == ([], [str(tmp_path / "c" / "test")])
    assert test.problems[0][1].startswith("label 0 is 'cat' here, but is 'bird' in")


def test_other_formats_tell_what_is_wrong(tmp_path):
    (tmp_path / "a.csv").write_text("a,label\n1,0\n2,1\n3,1\n")
    (found,) = check(str(tmp_path / "a.csv"))
    assert (found.kind, found.records, dict(found.labels)) == ("csv", 3, {0: 1, 1: 2})
    (tmp_path / "a.csv").write_text("a,label\n1,0\nx,1\n")
    (found,) = check(str(tmp_path))
    assert "column 'a' holds string" in found.problems[0][1]
    folder = idx_folder(tmp_path / "idx")
    assert [(f.split, f.records, f.problems) for f in check(str(folder))] == [("train", 6, []), ("test", 4, [])]
    path = folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    (found,) = check(str(folder))
    assert "promises 4 bytes, 3 are there" in found.problems[0][1]
    np.savez(tmp_path / "a.npz", x=np.arange(6.0), y=np.arange(6))
    (found,) = check(str(tmp_path / "a.npz"))
    assert (found.records, found.problems) == (6, [])
    change(tmp_path / "a.npz", 300)
    (found,) = check(str(tmp_path / "a.npz"))
    assert found.problems


def test_a_conversion_that_has_not_ended_is_a_problem(tmp_path):
    from raytf.data.sources.schema import UNFINISHED

    write(Storage(str(tmp_path)), ArraySource(np.arange(5)), FileLayout("tfrecord", 5, 5), "me")
    (tmp_path / UNFINISHED).write_text("{}")
    (found,) = check(str(tmp_path), ReadOptions(x=("x",), y=""))
    assert ["is not finished" in why for _, why in found.problems] == [True]
    assert found.records == 5


def test_the_command_says_it_all_and_its_exit_code_too(tmp_path):
    for split in ("train", "test"):
        tfrecords(tmp_path / split)
    good = subprocess.run([*RAYTF, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert good.returncode == 0, good.stderr
    lines = good.stdout.splitlines()
    assert lines[0] == "train: tfrecord, 13 good records in 2 files, 845 B"
    assert "image" in lines[2]
    assert lines[4] == "labels 0: 3, 1: 3, 2: 3, 3: 2, 4: 2"
    assert lines[-1] == "nothing is damaged"
    change(tmp_path / "test" / "1.tfrecord", 30)
    bad = subprocess.run([*RAYTF, str(tmp_path), "--json"], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1
    train, test = json.loads(bad.stdout)
    assert (train["problems"], len(test["problems"]), test["records"]) == ([], 1, 12)
    assert test["problems"][0]["place"].endswith("1.tfrecord: record 0 at byte 0")
