"""Data sets by name or path: MNIST, the digits that come with raytf, and every format that a source reads."""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import os
import shutil
import struct
import tempfile
import zlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from raytf import _process
from raytf.data.sources import ArraySource, CsvSource, ParquetSource, Source, Spec, TFRecordSource
from raytf.data.sources.base import refuse_other_classes
from raytf.data.sources.detect import ReadOptions, files_of, is_idx, kind_of, open_source, splits_of
from raytf.data.sources.images import ImageFolderSource
from raytf.data.sources.npz import array_names, load_arrays
from raytf.errors import DataError
from raytf.storage import uris

#: Local copies of MNIST, tried in this order before a download: raytf's own folder, then Keras's cache.
MNIST_HOMES = ("~/.raytf/mnist", "~/.keras/datasets/mnist.npz")
_MNIST_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
_DOWNLOAD_SECONDS = 8.0
#: The largest file that is read as a whole, and the chunks of the read, as a header may promise too many bytes.
_MOST_BYTES, _CHUNK_BYTES = 64 << 30, 1 << 20
#: Labels per read.
_LABELS = 4096
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_SPLITS = {"train": ("train",), "test": ("t10k", "test")}


@dataclass(frozen=True)
class Images:
    """Labelled images.

    Attributes:
        name: name of the data set, for people.
        train, test: sources of (image uint8 [height, width, channels], label int64).
        image_shape: (height, width, channels).
        classes: number of classes.
    """

    name: str
    train: Source
    test: Source
    image_shape: tuple[int, ...]
    classes: int


def load_images(data: str = "auto", size: tuple[int, int] | None = None) -> Images:
    """Load labelled images.

    Args:
        data: `auto` (MNIST from a local copy, else downloaded, else the digits), `mnist`, `digits`, or a path: a
            folder with the published IDX files (.gz or not), an .npz with x_train, y_train, x_test, y_test, or a folder
            or URI with train/ and test/, which contain TFRecord or Parquet files of image and label, or a folder of
            JPEG or PNG files for each class.
        size: (height, width) of all encoded images; by default the size of the first one.

    Raises:
        DataError: there is no data there, or none of these kinds.
    """
    if data == "digits":
        return _digits()
    if data in ("auto", "mnist"):
        for home in MNIST_HOMES:
            path = Path(home).expanduser()
            if path.exists():
                return load_images(str(path))
        try:
            with tempfile.TemporaryDirectory() as folder:
                return _from_npz(_download(_MNIST_URL, folder), "MNIST (downloaded)")
        except OSError as error:
            if data == "auto":
                return _digits()
            raise DataError(
                f"--data mnist: no local copy in {' or '.join(MNIST_HOMES)}, and the download failed ({error}). "
                "Pass --data PATH, or --data digits for the digits that come with raytf."
            ) from error
    return _from_path(data, size)


def _download(url: str, folder: str) -> Path:
    """Download a file into a folder, and keep a copy in Keras's cache."""
    import urllib.request

    with _process.working("downloading MNIST"), urllib.request.urlopen(url, timeout=_DOWNLOAD_SECONDS) as answer:
        path = Path(folder) / "mnist.npz"
        path.write_bytes(answer.read())
    home = Path(MNIST_HOMES[1]).expanduser()
    with contextlib.suppress(OSError):  # without the cache, the next run downloads it again
        home.parent.mkdir(parents=True, exist_ok=True)
        temporary = home.with_suffix(f".{os.getpid()}")
        shutil.copyfile(path, temporary)
        temporary.replace(home)
    return path


def _digits() -> Images:
    # The test part of the Optical Recognition of Handwritten Digits data set (E. Alpaydin and C. Kaynak, 1998, UCI
    # Machine Learning Repository, CC BY 4.0), as in scikit-learn. raytf does without that package: if it is installed,
    # Keras imports it in every process, which adds a fifth to the import time of TensorFlow and Keras.
    with np.load(io.BytesIO(resources.files("raytf.data").joinpath("digits.npz").read_bytes())) as file:
        levels, labels = file["levels"], file["labels"]  # [1797, 8, 8] of 0 to 16, and [1797]
    x = (levels * (255 / 16)).round().astype(np.uint8)
    y = labels.astype(np.int64)
    # The records of a writer are adjacent. Every fifth record is for tests, so that both parts have all writers.
    test = np.arange(len(x)) % 5 == 0
    return _images("handwritten digits of scikit-learn (8x8)", x[~test], y[~test], x[test], y[test])


def _from_path(data: str, size: tuple[int, int] | None) -> Images:
    if uris.is_folder(data):
        path = Path(data).expanduser()
        if not path.exists():
            raise DataError(f"--data {data}: there is no such file or folder. Expected auto, digits, mnist or a path.")
        if path.is_file():
            if path.suffix != ".npz":
                raise DataError(f"--data {data}: expected an .npz file, or a folder of IDX, TFRecord or other files.")
            return _from_npz(path, str(path))
        names = sorted(p.name for p in path.iterdir())
        if any(is_idx(n) for n in names):
            return _from_idx(path)
        if not {"train", "test"} & set(names) and not any(n.endswith(".parquet") for n in names):
            raise DataError(
                f"--data {data}: the folder holds neither IDX files (train-images-idx3-ubyte.gz ...) nor train/ and "
                f"test/ with TFRecord, Parquet or image files. It has: {', '.join(names[:6]) or 'nothing'}."
            )
    names = files_of(data)
    kind, folders = kind_of(names, data), (part(data, "train"), part(data, "test"))
    if kind == "tfrecord":
        return _from_sources(f"TFRecord files in {data}", *(_tfrecord_images(folder, size) for folder in folders))
    if kind == "images":
        return _from_sources(f"image files in {data}", *_folders_of_images(data, size))
    return _from_sources(f"Parquet files in {data}", *map(_parquet_images, folders))


def open_splits(data: str, reading: ReadOptions | None = None) -> dict[str, Source]:
    """Return part name -> source for a path or URI; data without parts is one source with an empty name.

    Args:
        data: as for `load_images`, or any format that a source reads, also in folders train/, validation/ and test/.

    Raises:
        DataError: there is no readable data there.
        StorageError: storage refuses a request.
    """
    reading = reading or ReadOptions()
    if data in ("auto", "mnist", "digits"):
        images = load_images(data)
        return {"train": images.train, "test": images.test}
    names = files_of(data)
    kind = kind_of(names, data)
    is_archive = kind == "npz" and Path(data).expanduser().is_file()
    if kind == "idx" or (is_archive and not reading.columns() and "x_train" in array_names(data)):
        images = load_images(data)
        return {"train": images.train, "test": images.test}
    splits = splits_of(names)
    if not splits:
        return {"": open_source(data, reading)}
    sources: dict[str, Source] = {}
    for split in splits:
        source = sources[split] = open_source(part(data, split), reading)
        if reading.classes is None:
            reading = replace(reading, classes=getattr(source, "classes", None))
        first = sources[splits[0]]
        refuse_other_classes(first, source)
        if isinstance(source, CsvSource) and isinstance(first, CsvSource) and source.classes and not first.classes:
            raise DataError(
                f"{source.name}: labels are text here and numbers in {first.name}. Use labels of one kind in all parts."
            )
    return sources


def part(data: str, name: str) -> str:
    """Return the URI of a subfolder."""
    base, mark, query = (data, "", "") if uris.is_folder(data) else data.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def _from_idx(folder: Path) -> Images:
    parts = [read_idx(_find(folder, split, kind)) for split in ("train", "test") for kind in ("images", "labels")]
    return _images(f"IDX files in {folder}", *parts)


def _find(folder: Path, split: str, kind: str) -> Path:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(_SPLITS[split]) and kind in path.name and is_idx(path.name):
            return path
    raise DataError(f"{folder}: the {split} {kind} are missing (expected {_SPLITS[split][0]}-{kind}-idx*-ubyte[.gz]).")


def read_idx(path: str | os.PathLike) -> np.ndarray:
    """Read an IDX file (http://yann.lecun.com/exdb/mnist), plain or gzip.

    Raises:
        DataError: the file is not an IDX file, or is cut off.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            return _idx(path, gzip.GzipFile(fileobj=file) if is_packed else file)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Fetch it again.") from error
    except MemoryError:
        raise DataError(f"{path} does not fit into this machine's memory. Convert it on a larger machine.") from None


def _idx(path: Path, file: Any) -> np.ndarray:
    """Return the array in an IDX file; read and unpack no more bytes than its header promises."""
    start = file.read(4)
    rest = file.read(4 * start[3]) if len(start) == 4 else b""
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _IDX_TYPES or len(rest) < 4 * start[3]:
        raise DataError(f"{path} is not an IDX file: it does not begin with an IDX header.")
    shape = struct.unpack(f">{start[3]}I", rest)
    kind = np.dtype(_IDX_TYPES[start[2]])
    expected = math.prod(shape) * kind.itemsize
    if expected > _MOST_BYTES:
        raise DataError(
            f"{path}: its header promises {expected:,} bytes, but at most {_MOST_BYTES:,} are read as a whole. "
            "Convert it to TFRecord or Parquet, which are read in parts."
        )
    chunks, size = [], 0
    while size <= expected and (chunk := file.read(min(_CHUNK_BYTES, expected + 1 - size))):
        chunks.append(chunk)
        size += len(chunk)
    if size != expected:
        has = "more" if size > expected else str(size)
        raise DataError(f"{path} is damaged: its header promises {expected} bytes, {has} are there. Fetch it again.")
    return np.frombuffer(b"".join(chunks), kind).reshape(shape).astype(kind.newbyteorder("="))


def _from_npz(path: Path, name: str) -> Images:
    return _images(name, *load_arrays(str(path), ("x_train", "y_train", "x_test", "y_test")))


def _images(name: str, *parts: np.ndarray) -> Images:
    x_train, y_train, x_test, y_test = parts
    for label, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim not in (3, 4) or y.ndim != 1:
            raise DataError(
                f"{name}: {label} images have shape {x.shape} and labels {y.shape}. Expected [N, height, width] or "
                "[N, height, width, channels], and [N]."
            )
        if y.dtype.kind not in "iu":
            raise DataError(f"{name}: {label} labels have dtype {y.dtype}. Expected whole numbers.")
    x_train, x_test = (x[..., None] if x.ndim == 3 else x for x in (x_train, x_test))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{name}: train images are {x_train.shape[1:]}, test images {x_test.shape[1:]}.")
    train = ArraySource(x_train, y_train.astype(np.int64), name=f"{name}, train")
    test = ArraySource(x_test, y_test.astype(np.int64), name=f"{name}, test")
    return Images(name, train, test, tuple(x_train.shape[1:]), int(y_train.max()) + 1)


def _parquet_images(uri: str) -> Source:
    source = ParquetSource(uri)
    if len(source.spec[0].shape) == 3:
        return source
    return ParquetSource(uri, shapes={"image": _image_shape(source)})


def _tfrecord_images(uri: str, size: tuple[int, int] | None) -> Source:
    source = TFRecordSource(uri, size=size)
    spec = source.spec[0]
    if len(spec.shape) == 3:
        return source
    return TFRecordSource(uri, features={"image": Spec(_image_shape(source), spec.dtype)})


def _folders_of_images(data: str, size: tuple[int, int] | None) -> tuple[Source, Source]:
    train = ImageFolderSource(part(data, "train"), size)
    height, width, channels = train.spec[0].shape
    return train, ImageFolderSource(part(data, "test"), size and (height, width), channels, classes=train.classes)


def _from_sources(name: str, train: Source, test: Source) -> Images:
    shape: tuple[int, ...] = train.spec[0].shape
    if test.spec[0].shape != shape:
        raise DataError(f"{name}: train images are {shape}, test images {test.spec[0].shape}.")
    if train.spec[1] is None or train.spec[1].shape or np.dtype(train.spec[1].dtype).kind not in "iu":
        raise DataError(f"{name}: labels are {train.spec[1]}. Expected one whole number a record.")
    refuse_other_classes(train, test)
    return Images(name, train, test, shape, _highest_label(train) + 1)


def _highest_label(source: Source) -> int:
    labels = source.label_range()
    if labels is not None:
        return int(labels[1])
    starts = range(0, source.records, _LABELS)
    return max(int(source.take(np.arange(n, min(n + _LABELS, source.records)))[1].max()) for n in starts)


def _image_shape(source: Source) -> tuple[int, ...]:
    pixels = int(np.prod(source.spec[0].shape, dtype=np.int64))
    side = round(pixels**0.5)
    if side * side != pixels:
        raise DataError(f"{source.name}: images have {pixels} numbers, which is not a square of gray pixels.")
    return (side, side, 1)
