"""Image folders: a folder for each class, with JPEG and PNG files in it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from raytf.data.sources.base import Spec
from raytf.data.sources.files import Files
from raytf.errors import DataError, one_line

#: What is taken for an image, by the end of its name.
ENDINGS = (".jpg", ".jpeg", ".png")
_MODES = {1: "L", 3: "RGB"}


class ImageFolderSource:
    """Images in a folder for each class, `FOLDER/CLASS/NAME.jpg`, at any depth below it; local, S3 or GCS.

    Records are x, uint8 [height, width, channels], and y, the class as int64: classes are numbered in the order of
    their names. Records lie in the order of classes and file names. Each image is read by itself, several at a time.

    Args:
        uri: the folder.
        size: (height, width) of all images; others are resized. None takes that of the first image, and refuses others.
        channels: 1 for gray, 3 for colours; None takes what the first image has.
        fit: how an image of another shape gets `size`: `crop` cuts from its middle, `stretch` distorts it.
        classes: names of the classes, in the order of their numbers; by default the folders that there are.

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
        fit: str = "crop",
        classes: Sequence[str] | None = None,
    ):
        if fit not in ("crop", "stretch"):
            raise DataError(f"{uri}: fit={fit!r} is not known. Expected crop or stretch.")
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise DataError(f"{uri}: size={size!r}. Expected (height, width), both at least 1.")
        if channels not in (None, *_MODES):
            raise DataError(f"{uri}: channels={channels}. Expected 1 for gray or 3 for colours.")
        self.name = uri
        self._fit, self._resizes = fit, size is not None
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
        self.crc = zlib.crc32(repr((self._files.names, self._files.sizes, self.classes, size, fit)).encode())
        first = self._open(0)
        self._channels = channels or (1 if first.mode in ("1", "L", "I", "I;16") else 3)
        self._size = (size[0], size[1]) if size is not None else (first.height, first.width)
        self.spec: tuple[Any, Any, Any] = (
            Spec((*self._size, self._channels), "uint8"),
            Spec((), "int64"),
            None,
        )
        self._decode(0)

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

    def _open(self, i: int) -> Any:
        from PIL import Image, UnidentifiedImageError

        data = bytes(self._files.read(i, 0, self._files.sizes[i]))
        try:
            return Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{self.place(i)} is no JPEG or PNG image, or a damaged one. Mend or remove it.") from error

    def _decode(self, i: int) -> np.ndarray:
        image = self._open(i)
        height, width = self._size
        if not self._resizes and (image.height, image.width) != self._size:
            raise DataError(
                f"{self.place(i)} has {image.height} x {image.width} pixels, the first image {height} x {width}. Give "
                "the size that all are to have: ImageFolderSource(..., size=(HEIGHT, WIDTH))."
            )
        try:
            return _pixels(image, height, width, _MODES[self._channels], self._fit)
        except (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            zlib.error,
        ) as error:  # each of Pillow's readers has its own
            raise DataError(f"{self.place(i)} is damaged: {one_line(error, 120)}. Mend or remove it.") from error


def _class_and_name(name: str) -> tuple[str, str]:
    label, _, rest = name.partition("/")
    return label, rest


def _pixels(image: Any, height: int, width: int, mode: str, fit: str) -> np.ndarray:
    from PIL import Image

    if image.format == "JPEG" and fit == "stretch":
        image.draft(mode, (width, height))
    if image.mode.startswith("I"):  # 16 bits a pixel, of which Pillow would keep the lower eight
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    image = image.convert(mode)
    if image.size != (width, height):
        box = None
        if fit == "crop":
            scale = min(image.width / width, image.height / height)
            left, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
            box = (left, top, left + width * scale, top + height * scale)
        image = image.resize((width, height), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
    return np.asarray(image).reshape(height, width, len(mode))
