"""From a path or URI to the source that reads what is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raytf.data.sources import csv, image_folder
from raytf.data.sources.base import Order, Source
from raytf.data.sources.npz import NpzSource
from raytf.data.sources.parquet import ParquetSource
from raytf.data.sources.schema import UNFINISHED
from raytf.data.sources.tfrecord import TFRecordSource, is_tfrecord
from raytf.errors import DataError

Kind = Literal["idx", "npz", "tfrecord", "parquet", "images", "csv"]
#: Folders that parts of one data set lie in.
SPLITS = ("train", "validation", "val", "test")


@dataclass(frozen=True)
class ReadOptions:
    """How records are to be read, where what is there does not say it.

    Attributes:
        x, y, sample_weight: names; no y with an empty one, None where the format's own are meant.
        size, channels, fit: of images; see ImageFolderSource.
        classes: of labels that are folders of images, or texts in CSV files.
    """

    x: tuple[str, ...] = ()
    y: str | None = None
    sample_weight: str | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None
    fit: Any = "crop"
    classes: Sequence[str] | None = None

    def columns(self) -> dict[str, Any]:
        """As arguments of a source."""
        given: dict[str, Any] = {}
        if self.x:
            given["x"] = self.x[0] if len(self.x) == 1 else list(self.x)
        if self.y is not None:
            given["y"] = self.y or None
        if self.sample_weight:
            given["sample_weight"] = self.sample_weight
        return given


def is_idx(name: str) -> bool:
    """Whether a file's name is one of MNIST's, such as `train-images-idx3-ubyte.gz`; an index of DALI's is `a.idx`."""
    return re.search(r"idx\d-ubyte", name.rpartition("/")[2].lower()) is not None


def kind_of(names: Sequence[str], place: str) -> Kind:
    """What the files of a folder are.

    Raises:
        DataError: nothing that is known.
    """
    bases = [name.rpartition("/")[2].lower() for name in names if not name.rpartition("/")[2].startswith(("_", "."))]
    if any(is_idx(base) for base in bases):
        return "idx"
    if any(is_tfrecord(base) for base in bases):
        return "tfrecord"
    endings: tuple[tuple[Kind, tuple[str, ...]], ...] = (
        ("parquet", (".parquet",)),
        ("npz", (".npz",)),
        ("images", image_folder.ENDINGS),
        ("csv", csv.ENDINGS),
    )
    for kind, wanted in endings:
        if any(base.endswith(wanted) for base in bases):
            return kind
    if any(name.rpartition("/")[2] == UNFINISHED for name in names):
        raise DataError(
            f"{place}: a conversion into this folder has not ended. The same `raytf data convert` command goes on."
        )
    raise DataError(
        f"{place}: there is nothing to read. Expected IDX files (train-images-idx3-ubyte.gz ...), *.tfrecord, "
        f"*.parquet, *.npz, *.csv, or folders with JPEG or PNG images. It has: {', '.join(bases[:6]) or 'nothing'}."
    )


def files_of(uri: str) -> list[str]:
    """Names below a URI, or the one file that it is.

    Raises:
        DataError: there is nothing.
        StorageError: storage refuses.
    """
    from raytf.storage.storage import Storage

    storage = Storage(uri)
    names = [file.name for file in storage.files()]
    if not names and storage.exists(""):
        names = [storage.root.rpartition("/")[2]]
    if not names:
        raise DataError(f"{storage.locate('')}: there is no such file or folder, or nothing in it.")
    return names


def splits_of(names: Sequence[str]) -> list[str]:
    """The parts that a folder has; empty where it has none."""
    tops = {name.partition("/")[0] for name in names if "/" in name}
    return [split for split in SPLITS if split in tops]


def open_source(uri: str, reading: ReadOptions | None = None, order: Order | None = None) -> Source:
    """The source for what lies at a URI.

    Args:
        order: None for that source's own.

    Raises:
        DataError: nothing there that a source reads.
        StorageError: storage refuses.
    """
    reading = reading or ReadOptions()
    kind, columns = kind_of(files_of(uri), uri), reading.columns()
    ordered: dict[str, Any] = {} if order is None else {"order": order}
    pixels: dict[str, Any] = {"size": reading.size, "channels": reading.channels, "fit": reading.fit}
    if kind == "tfrecord":
        return TFRecordSource(uri, **columns, **pixels, **ordered)
    if kind == "parquet":
        return ParquetSource(uri, **columns, **ordered)
    if kind == "npz":
        return NpzSource(uri, **columns, **ordered)
    if kind == "images":
        return image_folder.ImageFolderSource(uri, **pixels, classes=reading.classes)
    if kind == "csv":
        return csv.CsvSource(uri, **columns, **ordered, classes=reading.classes)
    raise DataError(f"{uri}: IDX files lie in one folder, for training and test together. Give that folder.")
