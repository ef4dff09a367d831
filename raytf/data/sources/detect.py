"""Finds the source that reads the files at a path or URI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raytf.data.sources import csv, images
from raytf.data.sources.base import Source
from raytf.data.sources.npz import NpzSource
from raytf.data.sources.parquet import ParquetSource
from raytf.data.sources.schema import UNFINISHED
from raytf.data.sources.tfrecord import TFRecordSource, is_tfrecord
from raytf.errors import DataError
from raytf.storage.storage import Storage

Kind = Literal["idx", "npz", "tfrecord", "parquet", "images", "csv"]
#: Folders of the parts of one data set.
SPLITS = ("train", "validation", "val", "test")


@dataclass(frozen=True)
class ReadOptions:
    """Settings for reading records, which the files themselves do not contain.

    Attributes:
        x, y, sample_weight: names of columns; an empty y for none, None for the format's defaults.
        size, channels, fit: settings for images, as for ImageFolderSource.
        classes: classes of labels that are folders of images, or texts in CSV files.
    """

    x: tuple[str, ...] = ()
    y: str | None = None
    sample_weight: str | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None
    fit: Any = "crop"
    classes: Sequence[str] | None = None

    def columns(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.x:
            arguments["x"] = self.x[0] if len(self.x) == 1 else list(self.x)
        if self.y is not None:
            arguments["y"] = self.y or None
        if self.sample_weight:
            arguments["sample_weight"] = self.sample_weight
        return arguments


def is_idx(name: str) -> bool:
    """Return whether a file is named like MNIST's `train-images-idx3-ubyte.gz`; DALI's index `a.idx` is not."""
    return re.search(r"idx\d-ubyte", name.rpartition("/")[2].lower()) is not None


def kind_of(names: Sequence[str], place: str) -> Kind:
    """Return the format of a folder's files.

    Raises:
        DataError: the format is unknown.
    """
    bases = [name.rpartition("/")[2].lower() for name in names if not name.rpartition("/")[2].startswith(("_", "."))]
    if any(is_idx(base) for base in bases):
        return "idx"
    if any(is_tfrecord(base) for base in bases):
        return "tfrecord"
    endings: tuple[tuple[Kind, tuple[str, ...]], ...] = (
        ("parquet", (".parquet",)),
        ("npz", (".npz",)),
        ("images", images.ENDINGS),
        ("csv", csv.ENDINGS),
    )
    for kind, wanted in endings:
        if any(base.endswith(wanted) for base in bases):
            return kind
    if any(name.rpartition("/")[2] == UNFINISHED for name in names):
        raise DataError(
            f"{place}: a conversion into this folder is not finished. Run the same `raytf data convert` command again."
        )
    raise DataError(
        f"{place}: there is nothing to read. Expected IDX files (train-images-idx3-ubyte.gz ...), *.tfrecord, "
        f"*.parquet, *.npz, *.csv, or folders with JPEG or PNG images. It has: {', '.join(bases[:6]) or 'nothing'}."
    )


def files_of(uri: str) -> list[str]:
    """Return the names of the files below a URI, or of the one file at it.

    Raises:
        DataError: there are no files.
        StorageError: storage refuses a request.
    """
    storage = Storage(uri)
    names = [file.name for file in storage.files()]
    if not names and storage.exists(""):
        names = [storage.root.rpartition("/")[2]]
    if not names:
        raise DataError(f"{storage.locate('')}: there is no such file or folder, or nothing in it.")
    return names


def splits_of(names: Sequence[str]) -> list[str]:
    """Return the parts that a folder has, if any."""
    tops = {name.partition("/")[0] for name in names if "/" in name}
    return [split for split in SPLITS if split in tops]


def open_source(uri: str, reading: ReadOptions | None = None) -> Source:
    """Return the source for the files at a URI.

    Raises:
        DataError: no source can read them.
        StorageError: storage refuses a request.
    """
    reading = reading or ReadOptions()
    kind, columns = kind_of(files_of(uri), uri), reading.columns()
    pixels: dict[str, Any] = {"size": reading.size, "channels": reading.channels, "fit": reading.fit}
    if kind == "tfrecord":
        return TFRecordSource(uri, **columns, **pixels)
    if kind == "parquet":
        return ParquetSource(uri, **columns)
    if kind == "npz":
        return NpzSource(uri, **columns)
    if kind == "images":
        return images.ImageFolderSource(uri, **pixels, classes=reading.classes)
    if kind == "csv":
        return csv.CsvSource(uri, **columns, classes=reading.classes)
    raise DataError(f"{uri}: IDX files for training and test belong in one folder. Pass that folder.")
