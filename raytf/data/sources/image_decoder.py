"""JPEG and PNG to arrays of one shape."""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raytf.errors import DataError, not_installed, one_line

MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_MODES = {1: "L", 3: "RGB"}

#: How an image of another shape gets the size that is wanted: cut from its middle, or distorted.
Fit = Literal["crop", "stretch"]


@dataclass(frozen=True)
class Decoder:
    """Makes uint8 [height, width, channels] of encoded images.

    Attributes:
        size: (height, width).
        channels: 1 for gray, 3 for colours.
        fit: see `Fit`.
        resizes: False refuses images of another size.
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
        """For images like the first one where nothing else is said.

        Raises:
            DataError: settings that cannot be, or the first image is damaged.
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
                f"{place} has {image.height} x {image.width} pixels, the first image {height} x {width}. Give the size "
                "that all are to have: size=(HEIGHT, WIDTH)."
            )
        try:
            return _pixels(image, height, width, _MODES[self.channels], self.fit)
        except (OSError, ValueError, SyntaxError, EOFError, zlib.error) as error:  # Pillow's readers have each its own
            raise DataError(f"{place} is damaged: {one_line(error, 120)}. Fix or remove it.") from error


def is_image(data: bytes | memoryview) -> bool:
    """Whether bytes begin like a JPEG or PNG file."""
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
