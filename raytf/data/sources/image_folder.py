"""Image folders: a folder for each class, with JPEG and PNG files in it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from raytf.data.sources.base import Spec
from raytf.data.sources.file_set import Files
from raytf.data.sources.image_decoder import Decoder, Fit
from raytf.errors import DataError

#: What is taken for an image, by the end of its name.
ENDINGS = (".jpg", ".jpeg", ".png")


class ImageFolderSource:
    """Images in a folder for each class, `FOLDER/CLASS/NAME.jpg`, at any depth below it; local, S3, GCS or Azure.

    Records are x, uint8 [height, width, channels], and y, the class as int64: classes are numbered in the order of
    their names. Records lie in the order of classes and file names. Each image is read by itself, several at a time.

    Args:
        uri: the folder.
        size: (height, width) of all images; others are resized. None takes that of the first image, and refuses others.
        channels: 1 for gray, 3 for colours; None takes what the first image has.
        fit: how an image of another shape gets `size`: `crop` cuts from its middle, `stretch` distorts it.
        classes: names of the classes, in the order of their numbers, such as those of the training data for the test
            data; by default the folders that there are.

    Attributes:
        classes: names of the classes.

    Raises:
        DataError: no images, or one that is damaged or of another size.
        StorageError: storage refuses.
    """

    block_sizes = None
    window = 1

    def __init__(
        self,
        uri: str,
        size: tuple[int, int] | None = None,
        channels: int | None = None,
        fit: Fit = "crop",
        classes: Sequence[str] | None = None,
    ):
        self.name = uri
        self._files = Files(uri, ENDINGS, is_sorted_by=_class_and_name)
        found = sorted({name.partition("/")[0] for name in self._files.names if "/" in name})
        loose = next((name for name in self._files.names if "/" not in name), None)
        if not self._files.names or loose is not None:
            there = f"{loose} lies in no folder" if loose else "there are no .jpg, .jpeg or .png files"
            raise DataError(
                f"{uri}: {there}. Expected a folder for each class, with images in it: FOLDER/CLASS/NAME.jpg."
            )
        self.classes = tuple(classes or found)
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DataError(
                f"{uri}: there is a folder {unknown[0]!r}. Expected classes {', '.join(self.classes[:20])}."
            )
        number = {name: i for i, name in enumerate(self.classes)}
        self._labels = np.array([number[name.partition("/")[0]] for name in self._files.names], np.int64)
        self.records = len(self._files.names)
        #: Names and sizes of all files.
        self.crc = zlib.crc32(repr((self._files.names, self._files.sizes, self.classes, size, channels, fit)).encode())
        self._decoder = Decoder.of(self._bytes(0), size, channels, fit, self.place(0))
        self.spec: tuple[Any, Any, Any] = (
            Spec(self._decoder.shape, "uint8"),
            Spec((), "int64"),
            None,
        )

    @property
    def rows_read(self) -> int:
        """Images read from storage so far, for measuring."""
        return self._files.reads

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        out = np.empty((len(records), *self.spec[0].shape), np.uint8)
        for i, image in enumerate(self._files.map(self._decode, records.tolist())):
            out[i] = image
        return [out, self._labels[records]]

    def label_range(self) -> tuple[float, float]:
        return float(self._labels.min()), float(self._labels.max())

    def place(self, record: int) -> str:
        """The file of a record, for messages."""
        return self._files.locate(record)

    def _bytes(self, i: int) -> memoryview:
        return self._files.read(i, 0, self._files.sizes[i])

    def _decode(self, i: int) -> np.ndarray:
        return self._decoder(self._bytes(i), self.place(i))


def _class_and_name(name: str) -> tuple[str, str]:
    label, _, rest = name.partition("/")
    return label, rest
