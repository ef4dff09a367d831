"""TFRecord framing: a length, its masked CRC-32C, the data, their masked CRC-32C."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

#: Bytes before and after a record's data.
HEADER, FOOTER = 12, 4
FRAME = HEADER + FOOTER
_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_CHUNK = 8 << 20
#: Longer records are taken for damage; an index keeps lengths in 32 bits.
_LONGEST = (1 << 32) - 1


@dataclass(frozen=True)
class Damage:
    """What is wrong with a stretch of a file.

    Attributes:
        record: number of the record in its file, from 0.
        offset: byte at which the record begins.
        why: for people.
    """

    record: int
    offset: int
    why: str


def masked_crc(data: bytes | memoryview) -> int:
    """CRC-32C, rotated and shifted as TFRecord wants it."""
    import google_crc32c

    crc = google_crc32c.value(np.frombuffer(data, np.uint8))  # it takes no memoryview
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.lru_cache(4096)
def header(length: int) -> bytes:
    """What goes before data of this many bytes."""
    return _HEAD.pack(length, masked_crc(length.to_bytes(8, "little")))


def frame(records: Iterable[bytes]) -> bytes:
    """Records as they lie in a file."""
    parts: list[bytes] = []
    for data in records:
        parts += header(len(data)), data, _CRC.pack(masked_crc(data))
    return b"".join(parts)


def scan(read: Callable[[int, int], memoryview], size: int) -> Iterator[tuple[int, memoryview] | Damage]:
    """Go through a file: (offset, data) of each good record, and a `Damage` for each stretch that is none.

    Args:
        read: gives bytes [offset, offset + length) of the file.
        size: bytes of the file.
    """
    window, at, offset, record = memoryview(b""), 0, 0, 0

    def get(start: int, length: int) -> memoryview:
        nonlocal window, at
        if start < at or start + length > at + len(window):
            window, at = read(start, min(max(length, _CHUNK), size - start)), start
        return window[start - at : start - at + length]

    while offset < size:
        length = _length(get, offset, size)
        if isinstance(length, str):
            yield Damage(record, offset, length)
            offset = _next_frame(get, offset + 1, size)
            record += 1
            continue
        body = get(offset + HEADER, length + FOOTER)
        if masked_crc(body[:length]) != _CRC.unpack_from(body, length)[0]:
            yield Damage(record, offset, "the data do not match their CRC-32C")
        else:
            yield offset, body[:length]
        offset += length + FRAME
        record += 1


def _length(get: Callable[[int, int], memoryview], offset: int, size: int) -> int | str:
    """The length of the record at an offset, or why there is none."""
    if offset + HEADER > size:
        return f"cut off: {size - offset} bytes are left, fewer than a record's header"
    found = get(offset, HEADER)
    length = _HEAD.unpack(found)[0]
    if length > _LONGEST or bytes(found) != header(length):
        return "the length does not match its CRC-32C"
    if offset + length + FRAME > size:
        return f"cut off: a record of {length} bytes begins here, and {size - offset - HEADER} bytes are left"
    return length


def _next_frame(get: Callable[[int, int], memoryview], start: int, size: int) -> int:
    """Where the next header lies whose length is right; the file's end where there is none."""
    while start + HEADER <= size:
        chunk = np.frombuffer(get(start, min(1 << 18, size - start)), np.uint8)
        lengths = np.lib.stride_tricks.sliding_window_view(chunk, HEADER)
        # A length that fits in the file has zeros at its end: few places are left to look at.
        fits = lengths[:, 4:8].max(1) == 0
        for i in np.flatnonzero(fits).tolist():
            if not isinstance(_length(get, start + i, size), str):
                return start + i
        start += len(lengths)
    return size


def find_damage(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[int, str] | None:
    """The first of some records whose frame is not as it should be: its place in `starts`, and why.

    Args:
        data: uint8, bytes of a file.
        starts: [n] where the data of records begin in it.
        lengths: [n] their bytes, as the index has them.

    Returns:
        None for none.
    """
    import google_crc32c

    if not len(starts):
        return None
    kinds, which = np.unique(lengths, return_inverse=True)
    heads = np.frombuffer(b"".join(header(int(k)) for k in kinds), np.uint8).reshape(-1, HEADER)
    found = np.lib.stride_tricks.sliding_window_view(data, HEADER)[starts - HEADER]
    wrong = (found != heads[which]).any(1)
    if wrong.any():
        return int(wrong.argmax()), "its length is not the one that the index has"
    value = google_crc32c.value
    ends = starts + lengths
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    crcs = np.fromiter((value(data[a:b]) for a, b in pairs), np.uint32, len(starts))
    masked = (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)
    stored = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(data, FOOTER)[ends]).view("<u4")[:, 0]
    if (stored != masked).any():
        return int((stored != masked).argmax()), "the data do not match their CRC-32C"
    return None
