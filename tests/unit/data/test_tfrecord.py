"""TFRecord sources: any record by itself, an index that is never believed blindly, damage that is named."""

import gzip
import io
import os
import pickle
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from raytf.data import ArraySource, Spec, TFRecordSource
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import fingerprint, tfrecord_files
from raytf.data.sources.base import SMALL_BYTES, is_by_record
from raytf.data.sources.file_set import Files
from raytf.data.sources.tfrecord import is_tfrecord
from raytf.data.sources.tfrecord_files import INDEX, IndexEntry, frame
from raytf.errors import ConfigError, DataError
from raytf.storage.storage import Storage
from tests.support.data_files import examples, put_tree, tfrecords

SPEC = {"image": Spec((4, 4, 1), "uint8")}


@pytest.fixture
def data(tmp_path):
    return tfrecords(tmp_path / "d")


@pytest.mark.parametrize("order", ["records", "blocks"])
def test_any_order_gives_what_was_written(data, order):
    uri, image, label = data
    source = TFRecordSource(uri, features=SPEC, order=order, block_bytes=400)
    assert (source.records, source.spec) == (13, (SPEC["image"], Spec((), "int64"), None))
    ids = np.array([12, 0, 9, 9, 4, 10])
    x, y = source.take(ids)
    assert (x.tobytes(), y.tolist()) == (image[ids].tobytes(), label[ids].tolist())
    assert [a.tobytes() for a in source.take(np.arange(13))] == [
        np.ascontiguousarray(a).tobytes() for a in (image, label)
    ]
    assert source.take(np.zeros(0, np.int64))[0].shape == (0, 4, 4, 1)


def test_small_data_are_permuted_as_arrays_are_and_large_ones_by_blocks(data):
    assert TFRecordSource(data[0]).block_sizes is None
    assert (is_by_record("auto", SMALL_BYTES), is_by_record("auto", SMALL_BYTES + 1)) == (True, False)
    source = TFRecordSource(data[0], order="blocks", block_bytes=200)
    assert source.block_sizes.sum() == 13
    assert len(source.block_sizes) > 3
    assert source.window == 8192


def test_blocks_lie_within_files_and_are_of_the_size_that_was_asked_for(tmp_path):
    uri, _, _ = tfrecords(tmp_path / "d", files=(10, 0, 3))
    each = os.path.getsize(tmp_path / "d" / "0.tfrecord") // 10
    assert TFRecordSource(uri, order="blocks", block_bytes=4 * each).block_sizes.tolist() == [4, 4, 2, 3]
    assert TFRecordSource(uri, order="blocks", block_bytes=1).block_sizes.tolist() == [1] * 13


def test_the_fingerprint_is_that_of_the_same_arrays(data):
    uri, image, label = data
    source = TFRecordSource(uri, features=SPEC)
    assert fingerprint(source) == fingerprint(ArraySource(image, label))
    by_blocks = TFRecordSource(uri, order="blocks", block_bytes=400)
    assert fingerprint(by_blocks) != fingerprint(TFRecordSource(uri, order="blocks", block_bytes=800))


def test_it_travels_without_what_is_open_and_finds_its_files_from_elsewhere(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = TFRecordSource("d", features=SPEC)
    source.take(np.arange(13))
    packed = pickle.dumps(source)
    assert len(packed) < 20_000
    monkeypatch.chdir("/")
    again = pickle.loads(packed)
    assert again.rows_read == 0
    assert again.take(np.array([11]))[0].max() == 11


def test_a_worker_reads_its_share(tmp_path):
    """Of blocks, at most those at its ends more; record by record, exactly."""
    uri, _, _ = tfrecords(tmp_path / "d", files=(400, 240), side=2)
    each = os.path.getsize(tmp_path / "d" / "0.tfrecord") // 400
    for order, most in (("records", 160 + 2), ("blocks", 160 + 3 * 8)):
        for worker in range(4):
            source = TFRecordSource(
                uri, features={"image": Spec((2, 2, 1), "uint8")}, order=order, block_bytes=8 * each
            )
            source = pickle.loads(pickle.dumps(source))
            pipeline = Pipeline(source, StepPlan(640, 64, 4), range(worker, worker + 1), seed=1)
            for step in range(10):
                pipeline.submit(step, step + 1).result()
            pipeline.close()
            assert 160 <= source.rows_read <= most


def test_a_single_file(data):
    source = TFRecordSource(f"{data[0]}/1.tfrecord")
    assert source.records == 3
    assert source.take(np.array([2]))[1].tolist() == [2]


def test_columns_and_weights(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(frame(examples(a=[1, 2], b=[[1.5], [2.5]], y=[3, 4], w=np.float32([1, 2]))))
    source = TFRecordSource(
        str(tmp_path), x=["b", "a"], y="y", sample_weight="w", features={"b": Spec((1,), "float64")}
    )
    a, b, y, w = source.take(np.array([1]))
    assert (a.tolist(), b.tolist(), y.tolist(), w.tolist()) == ([2], [[2.5]], [4], [2.0])
    assert TFRecordSource(str(tmp_path), x="a", y=None).spec == (Spec((), "int64"), None, None)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_encoded_images_are_decoded_and_resized(tmp_path, form):
    encoded = []
    for value in (0, 100, 200):
        out = io.BytesIO()
        Image.new("L", (6, 6), value).save(out, form)
        encoded.append(np.frombuffer(out.getvalue(), np.uint8))
    records = [r for i, e in enumerate(encoded) for r in examples(image=e[None], label=[i])]
    (tmp_path / "a.tfrecord").write_bytes(frame(records))
    for source, shape in (
        (TFRecordSource(str(tmp_path)), (6, 6, 1)),
        (TFRecordSource(str(tmp_path), size=(3, 4), channels=3), (3, 4, 3)),
    ):
        x, y = source.take(np.array([2, 0, 1]))
        assert (x.shape, y.tolist()) == ((3, *shape), [2, 0, 1])
        assert abs(x[:, 0, 0, 0].astype(int) - [200, 0, 100]).max() <= 1


# The index.


def unscanned(uri: str) -> int:
    """Records by the index alone."""

    def fail(files: Files, i: int) -> IndexEntry:
        raise AssertionError(f"{files.locate(i)} was gone through")

    with mock.patch.object(tfrecord_files, "_scan", fail):
        return sum(len(entry.lengths) for entry in tfrecord_files.index(Files(uri, is_wanted=is_tfrecord)))


def test_the_index_is_made_once_and_read_afterwards(data, tmp_path):
    with pytest.raises(AssertionError, match="was gone through"):
        unscanned(data[0])
    TFRecordSource(data[0])
    assert (tmp_path / "d" / INDEX).exists()
    assert unscanned(data[0]) == 13


def test_a_damaged_index_is_made_again(data, tmp_path):
    TFRecordSource(data[0])
    path = tmp_path / "d" / INDEX
    good = path.read_bytes()
    for bad in (b"", good[:20], good[:-1] + b"x", b"RAYTFIX1" + b"\xff" * 40):
        path.write_bytes(bad)
        assert TFRecordSource(data[0]).records == 13
        assert path.read_bytes() == good


@pytest.mark.parametrize("change", ["append", "rewrite"])
def test_an_index_that_is_stale_is_noticed(data, tmp_path, change):
    TFRecordSource(data[0])
    path = tmp_path / "d" / "1.tfrecord"
    if change == "append":
        path.write_bytes(path.read_bytes() + frame(examples(image=np.full((1, 4, 4, 1), 99, np.uint8), label=[4])))
    else:  # other lengths in as many bytes: two of three are joined to a longer one
        size = len(path.read_bytes())
        three = examples(image=np.full((2, 4, 4, 1), 99, np.uint8), label=[4, 4])
        rest = size - len(frame(three)) - 16
        pad = next(e for n in range(rest) if len(e := examples(image=np.zeros((1, n), np.uint8), label=[1])[0]) == rest)
        path.write_bytes(frame([*three, pad]))
        assert len(path.read_bytes()) == size
    source = TFRecordSource(data[0])
    assert source.records == (14 if change == "append" else 13)
    assert source.take(np.array([10 if change == "rewrite" else 13]))[0].max() == 99


def test_an_index_of_other_files_is_noticed_when_records_are_read(data, tmp_path):
    """Lengths in the middle changed, the size and the end did not: what the end's CRC cannot tell."""
    big = tmp_path / "b"
    big.mkdir()
    records = [bytes([i]) * n for i, n in enumerate([100, 200, 300] + [9000] * 10)]
    wrapped = [examples(image=np.frombuffer(r, np.uint8)[None], label=[0])[0] for r in records]
    (big / "a.tfrecord").write_bytes(frame(wrapped))
    source = TFRecordSource(str(big), y=None, x="label")
    wrapped[0], wrapped[1] = wrapped[1], wrapped[0]
    (big / "a.tfrecord").write_bytes(frame(wrapped))
    with pytest.raises(DataError, match=r"a\.tfrecord: record 0 at byte 0: its length is not the one"):
        TFRecordSource(str(big), y=None, x="label")
    with pytest.raises(DataError, match=r"record 1 at byte \d+: its length is not the one"):
        pickle.loads(pickle.dumps(source)).take(np.array([1]))


def test_an_index_is_kept_elsewhere_where_nobody_may_write(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "d" / INDEX).mkdir()  # root may write anywhere, but not here
    assert TFRecordSource(data[0]).records == 13
    assert len(list((tmp_path / "cache" / "raytf" / "index").iterdir())) == 1
    assert unscanned(data[0]) == 13


# Damage.


@pytest.mark.parametrize("order", ["records", "blocks"])
def test_damage_after_the_index_was_made_is_named(data, tmp_path, order):
    source = TFRecordSource(data[0], order=order)
    path = tmp_path / "d" / "0.tfrecord"
    each = len(path.read_bytes()) // 10
    changed = bytearray(path.read_bytes())
    changed[3 * each + 30] ^= 1
    path.write_bytes(changed)
    with pytest.raises(DataError, match=rf"0\.tfrecord: record 3 at byte {3 * each}: the data do not match their CRC"):
        source.take(np.array([3]))


def refused(call, *words):
    with pytest.raises((DataError, ConfigError)) as error:
        call()
    assert [w for w in words if w not in str(error.value)] == []
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d[:-5], ["record 9 at byte", "cut off", "raytf data check"]),
        (lambda d: d[:20] + b"x" + d[21:], ["record 0 at byte 0", "CRC-32C"]),
        (lambda d: gzip.compress(d), ["is compressed", "gunzip"]),
        (lambda d: b"<html>" * 50, ["record 0 at byte 0", "length does not match"]),
    ],
    ids=["cut", "flipped", "gzip", "text"],
)
def test_a_damaged_file_is_refused_in_one_line(data, tmp_path, damage, words):
    path = tmp_path / "d" / "0.tfrecord"
    path.write_bytes(damage(path.read_bytes()))
    refused(lambda: TFRecordSource(data[0]), "0.tfrecord", *words)


def test_other_mistakes_are_refused_in_one_line(data, tmp_path):
    refused(lambda: TFRecordSource(str(tmp_path / "nowhere")), "nowhere", "no TFRecord files")
    refused(lambda: TFRecordSource(data[0], x="picture"), "no feature 'picture'", "image, label", "x=...")
    refused(lambda: TFRecordSource(data[0], order="random"), "order='random'", "auto, records or blocks")
    refused(lambda: TFRecordSource(data[0], features={"image": Spec((5, 5), "uint8")}), "has 16 bytes", "takes 25")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.tfrecord").write_bytes(b"")
    refused(lambda: TFRecordSource(str(tmp_path / "empty")), "hold no records")


# Object stores.


@pytest.mark.parametrize("order", ["records", "blocks"])
def test_s3(s3, data, order):
    uri, image, label = data
    put_tree(Storage(s3()), uri, "d")
    source = TFRecordSource(s3("d"), features=SPEC, order=order, block_bytes=400)
    ids = np.array([12, 0, 9, 4])
    x, y = pickle.loads(pickle.dumps(source)).take(ids)
    assert (x.tobytes(), y.tolist()) == (image[ids].tobytes(), label[ids].tolist())
    assert Storage(s3("d")).exists(INDEX)


def test_a_single_file_on_s3(s3, data):
    put_tree(Storage(s3()), data[0], "d")
    assert TFRecordSource(s3("d/1.tfrecord")).records == 3


def test_what_is_requested_of_an_object_store(s3, data):
    """Blocks, and not records: a request costs as much as a megabyte."""
    put_tree(Storage(s3()), data[0], "d")
    source = pickle.loads(pickle.dumps(TFRecordSource(s3("d"), features=SPEC)))
    reader = source.reader(4)
    for i in range(13):
        reader.take(np.array([i]))
    assert reader.rows_read == 13
    assert source._files.reads == 2  # a block each file


def test_gcs(gcs, data):
    uri, image, _ = data
    put_tree(Storage(gcs), uri, "d")
    base, mark, query = gcs.partition("?")
    source = TFRecordSource(f"{base}/d{mark}{query}", features=SPEC, order="blocks", block_bytes=400)
    assert source.take(np.array([12, 3]))[0].tobytes() == image[[12, 3]].tobytes()


def test_large_images_have_blocks_and_small_windows_even_in_small_files(tmp_path):
    """What they take when they are decoded counts: a worker holds windows of that."""
    out = io.BytesIO()
    Image.new("L", (2000, 2000)).save(out, "PNG")
    encoded = np.frombuffer(out.getvalue(), np.uint8)
    (tmp_path / "a.tfrecord").write_bytes(frame(examples(image=np.stack([encoded] * 70), label=np.arange(70))))
    source = TFRecordSource(str(tmp_path))
    assert source.block_sizes.sum() == 70
    assert source.window == (64 << 20) // (4_000_000 + 8)
    assert TFRecordSource(str(tmp_path), size=(28, 28)).block_sizes is None
