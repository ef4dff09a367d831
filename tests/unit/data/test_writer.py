"""Conversions: the layout, what goes on after a kill, what is refused."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from raytf.data import ArraySource, ParquetSource, Spec, TFRecordSource, load_images
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources.schema import SCHEMA, UNFINISHED
from raytf.data.sources.tfrecord_files import INDEX
from raytf.data.sources.writer import FileLayout, identity_of, named, write
from raytf.errors import ConfigError, DataError, StorageError
from raytf.storage.storage import Storage
from raytf.testing import StorageProxy
from tests.support.data_files import pictures
from tests.unit.data.test_image_datasets import idx_folder

ROOT = Path(__file__).parents[3]
RAYTF = (sys.executable, "-c", "from raytf.commands.main import main; main()", "data")


def source(n=100):
    rng = np.random.default_rng(0)
    return ArraySource(rng.integers(0, 256, (n, 4, 4, 1), np.uint8), np.arange(n) % 7)


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


SPEC = (Spec((28, 28, 1), "uint8"), Spec((), "int64"), None)


@pytest.mark.parametrize(
    ("records", "file_mb", "block_kb", "expected"),
    [
        (60_000, 128, None, (152_520, 306)),  # 49 MiB: blocks of 256 KiB, one file
        (10**7, 128, None, (152_000, 9_500)),  # 8 GB: blocks of 8 MiB, files of 128 MiB
        (10**7, 1, 8_192, (9_799, 9_799)),  # a block is in one file
        (10, 128, 1, (156_588, 1)),
    ],
)
def test_sizes_of_files_and_blocks(records, file_mb, block_kb, expected):
    layout = FileLayout.of("tfrecord", SPEC, records, file_mb << 20, block_kb and block_kb << 10)
    assert layout.block_records == pytest.approx(expected[1], rel=0.04)
    assert layout.file_records == pytest.approx(expected[0], rel=0.04)
    assert layout.file_records % layout.block_records == 0


def test_row_groups_are_blocks(tmp_path):
    write(Storage(str(tmp_path)), source(), FileLayout("parquet", 60, 20), "me")
    found = [pq.ParquetFile(p).metadata for p in sorted(tmp_path.glob("*.parquet"))]
    assert [[m.row_group(g).num_rows for g in range(m.num_row_groups)] for m in found] == [[20, 20, 20], [20, 20]]


def test_what_tensorflow_reads(tmp_path):
    """tf.data parses what was written, in a process of its own: TensorFlow stays out of this one."""
    write(Storage(str(tmp_path)), source(10), FileLayout("tfrecord", 100, 10), "me")
    code = f"""
import tensorflow as tf
features = {{"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}}
records = tf.data.TFRecordDataset({str(tmp_path / "part-00000.tfrecord")!r})
for r in records:
    e = tf.io.parse_single_example(r, features)
    print(int(e["label"]), int(tf.reduce_sum(tf.cast(tf.io.decode_raw(e["image"], tf.uint8), tf.int64))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    x, y = source(10).take(np.arange(10))
    assert [tuple(map(int, line.split())) for line in done.stdout.splitlines()] == [
        (label, image.sum(dtype=int)) for image, label in zip(x, y.tolist(), strict=True)
    ]


def test_names_of_columns():
    a, b = np.zeros((2, 3, 3, 1)), np.arange(2)
    assert named(ArraySource(a, b))[0] == ("image", "label", None)
    assert named(ArraySource(a[:, 0], None, b))[0] == ("x", None, "sample_weight")
    assert named(ArraySource({"b": a, "a": a}, {"t": a}))[0] == ({"b": "b", "a": "a"}, {"t": "t"}, None)
    with pytest.raises(DataError, match="nested arrays"):
        named(ArraySource({"b": {"c": a}}))
    with pytest.raises(DataError, match="called 'label'"):
        named(ArraySource({"label": a}, b))


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_a_conversion_that_stops_anywhere_goes_on_to_the_same_bytes(tmp_path, to):
    """Stopped after each of the writes to storage in turn."""

    class StopError(Exception):
        pass

    class Stopping(Storage):
        left = 0

        def put(self, name, data):
            if Stopping.left == 0:
                raise StopError
            Stopping.left -= 1
            super().put(name, data)

    layout = FileLayout(to, 30, 10)
    write(Storage(str(tmp_path / "whole")), source(), layout, "me")
    whole = files(tmp_path / "whole")
    assert {SCHEMA, *(layout.name(i) for i in range(4))} <= whole.keys()
    assert UNFINISHED not in whole
    kind = TFRecordSource if to == "tfrecord" else ParquetSource
    for writes in range(1, 30):
        folder = tmp_path / f"stopped-{writes}"
        Stopping.left = writes
        with contextlib.suppress(StopError):
            write(Stopping(str(folder)), source(), layout, "me")
        if UNFINISHED not in files(folder):
            break
        with pytest.raises(DataError, match=r"is not finished\. Run the same `raytf data convert` command"):
            kind(str(folder))
        assert write(Storage(str(folder)), source(), layout, "me")
        assert files(folder) == whole
    assert writes > 8
    assert not write(Storage(str(folder)), source(), layout, "me")


def test_a_folder_of_something_else_is_refused(tmp_path):
    layout = FileLayout("tfrecord", 30, 10)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty: it has notes\.txt"):
        write(Storage(str(tmp_path / "full")), source(), layout, "me")
    write(Storage(str(tmp_path / "done")), source(), layout, identity_of(source(), layout))
    for other in (identity_of(source(99), layout), identity_of(source(), FileLayout("tfrecord", 60, 10))):
        with pytest.raises(ConfigError, match="holds converted data of other records or settings"):
            write(Storage(str(tmp_path / "done")), source(), layout, other)


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.unlink(), "part-00001.* is missing"),
        (lambda p: p.write_bytes(p.read_bytes()[:-9]), "part-00001.* cut off or was changed"),
        (lambda p: p.with_name(f"z{p.suffix}").write_bytes(p.read_bytes()), f"z.* is not in {SCHEMA}"),
    ],
    ids=["missing", "cut", "extra"],
)
def test_files_are_held_against_the_schema(tmp_path, to, change, words):
    write(Storage(str(tmp_path)), source(), FileLayout(to, 30, 10), "me")
    change(tmp_path / f"part-00001.{to}")
    with pytest.raises(DataError, match=words):
        (TFRecordSource if to == "tfrecord" else ParquetSource)(str(tmp_path))


def test_a_damaged_schema_is_refused(tmp_path):
    write(Storage(str(tmp_path)), source(), FileLayout("tfrecord", 30, 10), "me")
    for text in ("{", '{"format": "raytf-data-9"}', "[]", '{"format": "raytf-data-1"}'):
        (tmp_path / SCHEMA).write_text(text)
        with pytest.raises(DataError, match=f"{SCHEMA} is damaged"):
            TFRecordSource(str(tmp_path))


def test_labels_and_classes_are_kept(tmp_path):
    from raytf.data import ImageFolderSource

    write(Storage(str(tmp_path / "t")), source(), FileLayout("tfrecord", 30, 10), "me")
    assert TFRecordSource(str(tmp_path / "t")).label_range() == (0, 6)
    images = ImageFolderSource(pictures(tmp_path / "i"))
    write(Storage(str(tmp_path / "p")), images, FileLayout("parquet", 30, 10), "me")
    assert ParquetSource(str(tmp_path / "p")).classes == ("cat", "dog")


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_a_label_other_than_the_converted_one_has_no_range_or_classes(tmp_path, to):
    animals = ArraySource({"x": np.zeros(9), "other": np.arange(9)}, np.arange(9) % 2)
    animals.classes = ("cat", "dog")
    write(Storage(str(tmp_path)), animals, FileLayout(to, 30, 10), "me")
    kind = TFRecordSource if to == "tfrecord" else ParquetSource
    assert (kind(str(tmp_path)).label_range(), kind(str(tmp_path)).classes) == ((0, 1), ("cat", "dog"))
    assert (kind(str(tmp_path), x="x").label_range(), kind(str(tmp_path), x="x").classes) == ((0, 1), ("cat", "dog"))
    other = kind(str(tmp_path), x="x", y="other")
    assert other.take(np.array([8]))[1].tolist() == [8]
    assert (other.label_range(), other.classes) == (None if to == "tfrecord" else (0, 8), None)


@pytest.mark.parametrize("world_size", [1, 3])
def test_epochs_of_converted_mnist_are_those_of_its_idx_files(tmp_path, mnist_dir, world_size):
    """Every record of two epochs, order included, as each of the workers sees them."""
    images = load_images(str(mnist_dir))
    layout = FileLayout.of("tfrecord", images.test.spec, images.test.records, 3 << 20, None)
    write(Storage(str(tmp_path)), images.test, layout, "me")
    plan = StepPlan(images.test.records, 96, 4)
    for own in assign(4, world_size):
        pair = [Pipeline(source, plan, own, seed=7) for source in (images.test, TFRecordSource(str(tmp_path)))]
        for start in range(0, 2 * plan.steps_per_epoch):
            one, other = (p.submit(start, start + 1).result() for p in pair)
            assert [a.tobytes() for a in one.leaves] == [b.tobytes() for b in other.leaves]
        for pipeline in pair:
            pipeline.close()


# The command.


def raytf(*arguments, code=0, **options):
    done = subprocess.run(
        [*RAYTF, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("to", ["tfrecord", "parquet"])
def test_a_converted_folder_is_one_for_load_images(tmp_path, to):
    folder = idx_folder(tmp_path / "idx", ".gz")
    out = raytf("convert", str(folder), str(tmp_path / "out"), "--to", to)
    assert "train: 6 records in 1 file" in out
    before, after = load_images(str(folder)), load_images(str(tmp_path / "out"))
    assert (before.image_shape, before.classes) == (after.image_shape, after.classes)
    for one, other in ((before.train, after.train), (before.test, after.test)):
        ids = np.arange(one.records)
        assert [a.tobytes() for a in one.take(ids)] == [b.tobytes() for b in other.take(ids)]
    assert "already converted" in raytf("convert", str(folder), str(tmp_path / "out"), "--to", to)


def test_convert_is_killed_and_goes_on_with_the_same_bytes(tmp_path):
    """SIGKILL in the middle, twice; each time the same command goes on."""
    np.savez(
        tmp_path / "big.npz",
        x=np.random.default_rng(0).integers(0, 256, (40_000, 28, 28), np.uint8),
        y=np.arange(40_000) % 10,
    )
    command = [*RAYTF, "convert", str(tmp_path / "big.npz")]
    options = ["--to", "tfrecord", "--file-mb", "2"]
    subprocess.run(
        [*command, str(tmp_path / "whole"), *options], cwd=ROOT, check=True, timeout=120, capture_output=True
    )
    out, before = tmp_path / "killed", 0
    for _ in range(2):
        process = subprocess.Popen([*command, str(out), *options], cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while len(list(out.glob("part-?????.tfrecord"))) < before + 3:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.wait(30)
        before = len(list(out.glob("part-?????.tfrecord")))
        assert (out / UNFINISHED).exists()
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("part-?????.tfrecord")}
    assert len(kept) >= 6
    raytf("convert", str(tmp_path / "big.npz"), str(out), *options)
    assert files(out) == files(tmp_path / "whole")
    done = set(json.loads((out / SCHEMA).read_text())["files"])
    assert len(done) > len(kept)
    # All but the last, which may not have been noted yet, were kept as they were.
    again = [name for name, at in kept.items() if (out / name).stat().st_mtime_ns != at]
    assert len(again) <= 1


def test_convert_from_and_to_s3_that_fails_in_the_middle(s3_endpoint, s3, tmp_path):
    folder = idx_folder(tmp_path / "idx")
    env = {**os.environ}
    uri = s3("out")
    with StorageProxy(s3_endpoint) as proxy:
        proxy.accept_only("nobody", "AccessDenied")
        refused = uri.replace(s3_endpoint, proxy.endpoint)
        out = raytf("convert", str(folder), refused, "--to", "tfrecord", code=2, env=env)
        assert "ACCESS_DENIED" in out
        assert out.count("\n") == 1
    raytf("convert", str(folder), uri, "--to", "tfrecord", env=env)
    raytf("convert", uri, s3("again"), "--to", "parquet", env=env)
    assert Storage(uri).exists(f"train/{INDEX}")
    before, after = load_images(str(folder)), load_images(s3("again"))
    assert before.train.take(np.arange(6))[0].tobytes() == after.train.take(np.arange(6))[0].tobytes()
    assert "nothing is damaged" in raytf("check", s3("again"), env=env)


def test_a_write_that_fails_on_s3_is_gone_on_with(s3_endpoint, s3):
    layout = FileLayout("tfrecord", 30, 10)
    with StorageProxy(s3_endpoint, hold_seconds=3600) as proxy:
        proxy.fail_writes(1, after=4)
        with pytest.raises(StorageError):
            write(Storage(s3("d").replace(s3_endpoint, proxy.endpoint)), source(), layout, "me")
    with pytest.raises(DataError, match="is not finished"):
        TFRecordSource(s3("d"))
    assert write(Storage(s3("d")), source(), layout, "me")
    back = TFRecordSource(s3("d"))
    assert back.take(np.arange(100))[0].tobytes() == source().take(np.arange(100))[0].tobytes()


def test_convert_to_gcs(gcs, tmp_path):
    folder = idx_folder(tmp_path / "idx")
    raytf("convert", str(folder), gcs, "--to", "tfrecord")
    assert "nothing is damaged" in raytf("check", gcs)
    assert load_images(gcs).train.take(np.array([5]))[1].tolist() == [2]


def test_image_folders_of_many_sizes(tmp_path):
    for split in ("train", "test"):
        pictures(tmp_path / "i" / split, size=(8, 8))
        pictures(tmp_path / "i" / split, classes=("eel",), size=(16, 12))
    out = raytf("convert", str(tmp_path / "i"), str(tmp_path / "o"), "--to", "tfrecord", code=2)
    assert "eel/0.png has 16 x 12 pixels" in out
    options = ("--image-size", "4", "4", "--channels", "1")
    raytf("convert", str(tmp_path / "i"), str(tmp_path / "o"), "--to", "tfrecord", *options, code=2)
    raytf("convert", str(tmp_path / "i"), str(tmp_path / "p"), "--to", "tfrecord", *options)
    images = load_images(str(tmp_path / "p"))
    assert (images.image_shape, images.classes, images.train.classes) == ((4, 4, 1), 3, ("cat", "dog", "eel"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("convert", "/nowhere", "OUT", "--to", "parquet"), ["/nowhere", "no such file or folder"]),
        (("convert", "s3://no-such-bucket-1/x", "OUT", "--to", "parquet"), ["no-such-bucket-1"]),
        (("convert", "digits", "OUT", "--to", "tfrecord", "--file-mb", "0"), ["expected a number, 1 or more"]),
        (("convert", "digits", "OUT", "--to", "zip"), ["zip"]),
        (("check", "OUT/none"), ["no such file or folder"]),
        (("check", str(ROOT / "docs")), ["nothing to read", ".md"]),
        ((), ["convert", "check"]),
    ],
)
def test_mistakes_of_the_command(tmp_path, s3_endpoint, arguments, words):
    arguments = [a.replace("OUT", str(tmp_path / "out")) for a in arguments]
    env = {**os.environ, "AWS_ENDPOINT_URL": f"http://{s3_endpoint}"}
    out = raytf(*arguments, code=2, env=env)
    assert [w for w in words if w not in out] == []
    assert "Traceback" not in out
