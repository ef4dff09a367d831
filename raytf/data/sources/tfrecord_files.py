"""TFRecord files: the frames of their records, and an index of record positions, stored beside the files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raytf.data.sources.file_set import Files
from raytf.errors import DamagedFileError, DataError, StorageError
from raytf.storage import local_files

#: Bytes before and after a record's data.
HEADER, FOOTER = 12, 4
FRAME = HEADER + FOOTER
_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_CHUNK = 8 << 20
#: Longer records count as damage; an index stores lengths in 32 bits.
_LONGEST = (1 << 32) - 1
INDEX = "_raytf_index"
_MAGIC = b"RAYTFIX1"
_LENGTHS = struct.Struct("<QI")
#: Bytes at a file's end whose CRC is in the index.
_END = 1 << 16
#: Scanning more bytes than this prints a message first.
_SILENT_BYTES = 1 << 30


@dataclass(frozen=True)
class Damage:
    """A damaged part of a file.

    Attributes:
        record: number of the record in its file, from 0.
        offset: byte at which the record begins.
        why: the reason, for people.
    """

    record: int
    offset: int
    why: str


def masked_crc(data: bytes | memoryview) -> int:
    """Return the CRC-32C of some bytes, rotated and shifted as in TFRecord files."""
    import google_crc32c

    crc = google_crc32c.value(np.frombuffer(data, np.uint8))  # it does not accept a memoryview
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.lru_cache(4096)
def header(length: int) -> bytes:
    """Return the header of a record with this many bytes."""
    return _HEAD.pack(length, masked_crc(length.to_bytes(8, "little")))


def frame(records: Iterable[bytes]) -> bytes:
    """Return records with their frames, as in a file."""
    parts: list[bytes] = []
    for data in records:
        parts += header(len(data)), data, _CRC.pack(masked_crc(data))
    return b"".join(parts)


def scan(read: Callable[[int, int], memoryview], size: int) -> Iterator[tuple[int, memoryview] | Damage]:
    """Yield (offset, data) of each good record of a file, and a `Damage` for each part without one.

    Args:
        read: (offset, length) -> bytes [offset, offset + length) of the file.
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
    """Return the length of the record at an offset, or the reason why there is none."""
    if offset + HEADER > size:
        return f"cut off: {size - offset} bytes are left, fewer than a record's header"
    start = get(offset, HEADER)
    length = _HEAD.unpack(start)[0]
    if length > _LONGEST or bytes(start) != header(length):
        return "the length does not match its CRC-32C"
    if offset + length + FRAME > size:
        return f"cut off: a record of {length} bytes begins here, and {size - offset - HEADER} bytes are left"
    return length


def _next_frame(get: Callable[[int, int], memoryview], start: int, size: int) -> int:
    """Return the offset of the next header with a valid length; the file's end if there is none."""
    while start + HEADER <= size:
        chunk = np.frombuffer(get(start, min(1 << 18, size - start)), np.uint8)
        lengths = np.lib.stride_tricks.sliding_window_view(chunk, HEADER)
        # A length that fits in the file ends with zeros, so there are few positions to check.
        fits = lengths[:, 4:8].max(1) == 0
        for i in np.flatnonzero(fits).tolist():
            if not isinstance(_length(get, start + i, size), str):
                return start + i
        start += len(lengths)
    return size


def find_damage(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[int, str] | None:
    """Return the first damaged record, as its index in `starts` and the reason; None if all are intact.

    Args:
        data: uint8, bytes of a file.
        starts: [n] offset of each record's data in it.
        lengths: [n] size of each record's data, from the index.
    """
    import google_crc32c

    if not len(starts):
        return None
    kinds, which = np.unique(lengths, return_inverse=True)
    heads = np.frombuffer(b"".join(header(int(k)) for k in kinds), np.uint8).reshape(-1, HEADER)
    present = np.lib.stride_tricks.sliding_window_view(data, HEADER)[starts - HEADER]
    wrong = (present != heads[which]).any(1)
    if wrong.any():
        return int(wrong.argmax()), "its length is not the one in the index"
    value = google_crc32c.value
    ends = starts + lengths
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    crcs = np.fromiter((value(data[a:b]) for a, b in pairs), np.uint32, len(starts))
    masked = (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)
    stored = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(data, FOOTER)[ends]).view("<u4")[:, 0]
    if (stored != masked).any():
        return int((stored != masked).argmax()), "the data do not match their CRC-32C"
    return None


@dataclass(frozen=True)
class IndexEntry:
    """A file in the index.

    Attributes:
        bytes: its size.
        end_crc: CRC-32 of its last 64 KiB.
        lengths: [n] uint32, bytes of each record's data.
    """

    bytes: int
    end_crc: int
    lengths: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """The offsets [n] int64 of each record's data in the file."""
        sizes = self.lengths.astype(np.int64) + FRAME
        return np.cumsum(sizes) - sizes + HEADER


def encode(entries: dict[str, IndexEntry]) -> bytes:
    """Return an index as the bytes of a file; equal entries make equal bytes."""
    names = sorted(entries)
    about = [[n, entries[n].bytes, entries[n].end_crc, len(entries[n].lengths)] for n in names]
    head = json.dumps(about).encode()
    body = zlib.compress(b"".join(entries[n].lengths.astype("<u4").tobytes() for n in names), 6)
    return _MAGIC + _LENGTHS.pack(len(head), zlib.crc32(head + body)) + head + body


def decode(data: bytes) -> dict[str, IndexEntry]:
    """Return the index in a file's bytes; empty if it is damaged, so that the files are scanned again."""
    try:
        size, crc = _LENGTHS.unpack_from(data, len(_MAGIC))
        rest = data[len(_MAGIC) + _LENGTHS.size :]
        if not data.startswith(_MAGIC) or zlib.crc32(rest) != crc:
            return {}
        lengths = np.frombuffer(zlib.decompress(rest[size:]), "<u4")
        entries, at = {}, 0
        for name, bytes_, end_crc, count in json.loads(rest[:size]):
            entries[name] = IndexEntry(bytes_, end_crc, lengths[at : at + count])
            at += count
        return entries
    except (struct.error, zlib.error, ValueError):
        return {}


def index(files: Files) -> list[IndexEntry]:
    """Return an entry for each file: from the index beside them, or by scanning the files once.

    Raises:
        DataError: a file is damaged, or compressed.
        StorageError: storage refuses a request.
    """
    known: dict[str, IndexEntry] = {}
    with contextlib.suppress(DamagedFileError):  # a new index is stored in the cache
        known = decode(files.storage.get_or_none(INDEX) or b"")
    cache = _cache(files)
    if not known:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            known = decode(cache.read_bytes())
    entries = list(files.map(lambda i: _valid(files, i, known.get(files.names[i])), range(len(files.names))))
    missing = [i for i, entry in enumerate(entries) if entry is None]
    size = sum(files.sizes[i] for i in missing)
    if size > _SILENT_BYTES:
        text = f"raytf: reading {size / 2**30:.1f} GiB of {files.storage.locate('')} once, to find its records"
        print(text, file=sys.stderr, flush=True)
    for i, entry in zip(missing, files.map(lambda i: _scan(files, i), missing), strict=True):
        entries[i] = entry
    complete = [entry for entry in entries if entry is not None]
    if missing:
        _keep(files, cache, encode(known | dict(zip(files.names, complete, strict=True))))
    return complete


def entry_of(data: bytes, lengths: np.ndarray) -> IndexEntry:
    """Return the entry of a file with these bytes."""
    return IndexEntry(len(data), zlib.crc32(data[-_END:]), np.asarray(lengths, np.uint32))


def refuse_compressed(start: bytes | memoryview, place: str) -> None:
    """Raise if a file begins like a compressed one.

    Raises:
        DataError: the file is compressed.
    """
    if bytes(start[:2]) == b"\x1f\x8b" or bytes(start[:2]) in (b"\x78\x01", b"\x78\x9c", b"\x78\xda"):
        raise DataError(
            f"{place} is compressed, so its records cannot be read one by one. Expected plain TFRecords: unpack it "
            "first, with gunzip or zlib-flate. For small files, use raytf data convert --to parquet."
        )


def _valid(files: Files, i: int, entry: IndexEntry | None) -> IndexEntry | None:
    if entry is None or entry.bytes != files.sizes[i]:
        return None
    return entry if zlib.crc32(_end(files, i)) == entry.end_crc else None


def _end(files: Files, i: int) -> memoryview:
    size = min(_END, files.sizes[i])
    return files.read(i, files.sizes[i] - size, size)


def _scan(files: Files, i: int) -> IndexEntry:
    lengths = []
    for record in scan(lambda at, n: files.read(i, at, n), files.sizes[i]):
        if isinstance(record, Damage):
            place = files.locate(i)
            if not record.offset:
                refuse_compressed(files.read(i, 0, min(2, files.sizes[i])), place)
            raise DataError(
                f"{place}: record {record.record} at byte {record.offset}: {record.why}. "
                f"`raytf data check` finds all damage."
            )
        lengths.append(len(record[1]))
    return IndexEntry(files.sizes[i], zlib.crc32(_end(files, i)), np.array(lengths, np.uint32))


def _cache(files: Files) -> Path:
    """Return the path of the index if the data's folder cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.sha256(files.storage.locate("").encode()).hexdigest()[:24]
    return Path(base).expanduser() / "raytf" / "index" / name


def _keep(files: Files, cache: Path, data: bytes) -> None:
    try:
        files.storage.put(INDEX, data)
    except StorageError:
        with contextlib.suppress(OSError):  # the next start scans the files again
            local_files.put(str(cache), data)
