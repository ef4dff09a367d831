"""JPEG and PNG images: decoding to arrays of one shape, and folders of images, one for each class."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raytf.data.sources.base import Spec
from raytf.data.sources.file_set import Files
from raytf.errors import DataError, not_installed, one_line

MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_MODES = {1: "L", 3: "RGB"}
#: Endings of the names of images.
ENDINGS = (".jpg", ".jpeg", ".png")

#: How an image of another shape gets the requested size: cropped around its center, or distorted.
Fit = Literal["crop", "stretch"]


@dataclass(frozen=True)
class Decoder:
    """Decodes images to uint8 [height, width, channels].

    Attributes:
        size: (height, width).
        channels: 1 for gray, 3 for colours.
        fit: see `Fit`.
        resizes: whether to resize images of another size; False refuses them.
    """

    size: tuple[int, int]
    channels: int
    fit: Fit
    resizes: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.size, self.channels)

    @classmethod
    def of(
        cls, first: bytes | memoryview, size: tuple[int, int] | None, channels: int | None, fit: Fit, place: str
    ) -> Decoder:
        """Return the decoder with these settings; the first image decides settings that are None.

        Raises:
            DataError: a setting is invalid, or the first image is damaged.
        """
        if fit not in ("crop", "stretch"):
            raise DataError(f"{place}: fit={fit!r} is not known. Expected crop or stretch.")
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise DataError(f"{place}: size={size!r}. Expected (height, width), both at least 1.")
        if channels not in (None, *_MODES):
            raise DataError(f"{place}: channels={channels}. Expected 1 for gray or 3 for colours.")
        image = _open(first, place)
        gray = image.mode == "1" or image.mode[0] in "LI"
        shape = (image.height, image.width) if size is None else (int(size[0]), int(size[1]))
        decoder = cls(shape, channels or (1 if gray else 3), fit, size is not None)
        decoder(first, place)
        return decoder

    def __call__(self, data: bytes | memoryview, place: str) -> np.ndarray:
        """Decode an image.

        Raises:
            DataError: it is damaged, or of another size.
        """
        image = _open(data, place)
        height, width = self.size
        if not self.resizes and (image.height, image.width) != self.size:
            raise DataError(
                f"{place} has {image.height} x {image.width} pixels, the first image {height} x {width}. Pass the size "
                "of all images: size=(HEIGHT, WIDTH)."
            )
        try:
            return _pixels(image, height, width, _MODES[self.channels], self.fit)
        except (OSError, ValueError, SyntaxError, EOFError, zlib.error) as error:  # Pillow's readers raise any of these
            raise DataError(f"{place} is damaged: {one_line(error, 120)}. Fix or remove it.") from error


def is_image(data: bytes | memoryview) -> bool:
    """Return whether bytes begin like a JPEG or PNG file."""
    return bytes(data[:8]).startswith(MAGIC)


def _open(data: bytes | memoryview, place: str) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise not_installed(f"{place}, an image,", "data", error.name) from error
    try:
        return Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{place} is no JPEG or PNG image, or a damaged one. Fix or remove it.") from error


def _pixels(image: Any, height: int, width: int, mode: str, fit: Fit) -> np.ndarray:
    from PIL import Image

    if image.format == "JPEG" and fit == "stretch":
        image.draft(mode, (width, height))  # decodes fewer pixels
    if image.mode.startswith("I"):  # Pillow would keep the lower eight of 16 bits per pixel
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


class ImageFolderSource:
    """Images in a folder for each class, `FOLDER/CLASS/NAME.jpg`, at any depth below it; local, S3, GCS or Azure.

    A record is x, uint8 [height, width, channels], and y, the class as int64; classes are numbered in the order of
    their names. Records are in the order of classes and file names. Each image is read by itself, several concurrently.

    Args:
        uri: the folder.
        size: (height, width) of all images; others are resized. None requires the size of the first image.
        channels: 1 for gray, 3 for colours; None uses those of the first image.
        fit: how an image of another shape gets `size`: `crop` crops around its center, `stretch` distorts it.
        classes: names of the classes, in the order of their numbers, such as the classes of the training data for test
            data; by default the names of the folders.

    Attributes:
        classes: names of the classes.

    Raises:
        DataError: there are no images, or one is damaged or of another size.
        StorageError: storage refuses a request.
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
        self._files = Files(uri, ENDINGS, is_sorted_by=lambda name: name.partition("/")[::2])
        folders = sorted({name.partition("/")[0] for name in self._files.names if "/" in name})
        loose = next((name for name in self._files.names if "/" not in name), None)
        if not self._files.names or loose is not None:
            problem = f"{loose} is not in a folder" if loose else "there are no .jpg, .jpeg or .png files"
            raise DataError(
                f"{uri}: {problem}. Expected a folder for each class, with images in it: FOLDER/CLASS/NAME.jpg."
            )
        self.classes = tuple(classes or folders)
        unknown = sorted(set(folders) - set(self.classes))
        if unknown:
            raise DataError(
                f"{uri}: there is a folder {unknown[0]!r}. Expected classes {', '.join(self.classes[:20])}."
            )
        number = {name: i for i, name in enumerate(self.classes)}
        self._labels = np.array([number[name.partition("/")[0]] for name in self._files.names], np.int64)
        self.records = len(self._files.names)
        #: A checksum of the settings and of the names and sizes of all files.
        self.crc = zlib.crc32(repr((self._files.names, self._files.sizes, self.classes, size, channels, fit)).encode())
        self._decoder = Decoder.of(self._bytes(0), size, channels, fit, self.place(0))
        self.spec: tuple[Any, Any, Any] = (Spec(self._decoder.shape, "uint8"), Spec((), "int64"), None)

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
        return self._files.locate(record)

    def _bytes(self, i: int) -> memoryview:
        return self._files.read(i, 0, self._files.sizes[i])

    def _decode(self, i: int) -> np.ndarray:
        return self._decoder(self._bytes(i), self.place(i))
