"""Image folders: classes by name, images of one shape, and the file that is damaged."""

import pickle

import numpy as np
import pytest
from PIL import Image

from raytf.data import ImageFolderSource, Spec
from raytf.data.sources import fingerprint
from raytf.errors import DataError
from raytf.storage.storage import Storage
from tests.support.data_files import pictures, put_tree


def refused(call, *words):
    with pytest.raises(DataError) as error:
        call()
    assert [w for w in words if w not in str(error.value)] == []
    assert "\n" not in str(error.value)


def test_records_lie_in_the_order_of_classes_and_names(tmp_path):
    source = ImageFolderSource(pictures(tmp_path))
    assert (source.records, source.classes, source.block_sizes) == (6, ("cat", "dog"), None)
    assert source.spec == (Spec((6, 5, 3), "uint8"), Spec((), "int64"), None)
    assert source.label_range() == (0, 1)
    x, y = source.take(np.array([5, 0, 3, 3]))
    assert x[:, 0, 0, 0].tolist() == [50, 0, 30, 30]
    assert y.tolist() == [1, 0, 1, 1]
    assert source.place(3).endswith("dog/0.png")
    assert source.take(np.zeros(0, np.int64))[0].shape == (0, 6, 5, 3)


@pytest.mark.parametrize(
    ("mode", "channels", "expected"), [("L", None, 1), ("RGB", None, 3), ("RGB", 1, 1), ("L", 3, 3), ("RGBA", None, 3)]
)
def test_channels(tmp_path, mode, channels, expected):
    (tmp_path / "a").mkdir()
    Image.new(mode, (4, 4), 100 if mode == "L" else (100,) * len(mode)).save(tmp_path / "a" / "0.png")
    x, _ = ImageFolderSource(str(tmp_path), channels=channels).take(np.array([0]))
    assert x.shape == (1, 4, 4, expected)
    assert (x == 100).all()


@pytest.mark.parametrize(("fit", "row"), [("crop", [255] * 4), ("stretch", [0, 255, 255, 0])])
def test_an_image_of_another_shape_is_cut_or_distorted(tmp_path, fit, row):
    (tmp_path / "a").mkdir()
    wide = np.zeros((400, 1200), np.uint8)
    wide[:, 300:900] = 255
    Image.fromarray(wide).save(tmp_path / "a" / "0.png")
    x, _ = ImageFolderSource(str(tmp_path), size=(4, 4), fit=fit).take(np.array([0]))
    assert abs(x[0, 1, :, 0].astype(int) - row).max() < 80  # neighbours are blended


def test_sixteen_bits_a_pixel_keep_their_upper_eight(tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((2, 2), 0x8000, np.uint16)).save(tmp_path / "a" / "0.png")
    assert (ImageFolderSource(str(tmp_path)).take(np.array([0]))[0] == 0x80).all()


def test_jpeg_at_any_depth_and_hidden_files(tmp_path):
    pictures(tmp_path, per_class=1, ending="jpg")
    (tmp_path / "cat" / "old").mkdir()
    (tmp_path / "cat" / "0.jpg").rename(tmp_path / "cat" / "old" / "0.JPEG")
    (tmp_path / "cat" / ".hidden.jpg").write_bytes(b"no")
    (tmp_path / "notes.txt").write_text("hello")
    assert ImageFolderSource(str(tmp_path)).records == 2


def test_classes_of_another_folder(tmp_path):
    uri = pictures(tmp_path, classes=("dog",))
    source = ImageFolderSource(uri, classes=("cat", "dog"))
    assert source.take(np.array([0]))[1].tolist() == [1]
    refused(lambda: ImageFolderSource(uri, classes=("cat",)), "a folder 'dog'", "cat")


def test_it_travels_and_is_told_from_others(tmp_path, monkeypatch):
    uri = pictures(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    source = ImageFolderSource("d")
    source.take(np.arange(6))
    monkeypatch.chdir("/")
    again = pickle.loads(pickle.dumps(source))
    assert again.rows_read == 0
    assert again.take(np.array([5]))[0][0, 0, 0, 0] == 50
    first = fingerprint(again)
    assert again.rows_read == 1
    (tmp_path / "d" / "cat" / "9.png").write_bytes((tmp_path / "d" / "cat" / "0.png").read_bytes())
    assert fingerprint(ImageFolderSource(uri)) != first


@pytest.mark.parametrize(
    "damage", [lambda d: d[:40], lambda d: b"", lambda d: b"text" * 30, lambda d: d[:60] + b"\0" + d[61:]]
)
def test_a_damaged_image_is_named(tmp_path, damage):
    uri = pictures(tmp_path, size=(30, 30))
    path = tmp_path / "dog" / "1.png"
    path.write_bytes(damage(path.read_bytes()))
    refused(lambda: ImageFolderSource(uri).take(np.arange(6)), "dog/1.png", "damaged", "Fix or remove it")


def test_mistakes(tmp_path):
    uri = pictures(tmp_path / "d")
    refused(lambda: ImageFolderSource(str(tmp_path / "nowhere")), "nowhere", "no .jpg", "FOLDER/CLASS/NAME.jpg")
    refused(lambda: ImageFolderSource(f"{uri}/cat"), "0.png is not in a folder")
    refused(lambda: ImageFolderSource(uri, size=(0, 4)), "size=(0, 4)", "at least 1")
    refused(lambda: ImageFolderSource(uri, channels=2), "channels=2", "1 for gray or 3")
    refused(lambda: ImageFolderSource(uri, fit="pad"), "fit='pad'", "crop or stretch")
    pictures(tmp_path / "d", classes=("eel",), size=(9, 9))
    refused(lambda: ImageFolderSource(uri).take(np.arange(9)), "eel/0.png has 9 x 9 pixels", "size=(HEIGHT, WIDTH)")
    assert ImageFolderSource(uri, size=(6, 5)).take(np.arange(9))[0].shape == (9, 6, 5, 3)


def test_s3(s3, tmp_path):
    put_tree(Storage(s3()), pictures(tmp_path), "d")
    source = pickle.loads(pickle.dumps(ImageFolderSource(s3("d"))))
    x, y = source.take(np.array([5, 0, 3]))
    assert (x[:, 0, 0, 0].tolist(), y.tolist(), source.rows_read) == ([50, 0, 30], [1, 0, 1], 3)
