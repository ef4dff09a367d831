"""Where the records of TFRecord files lie: kept in a file beside them, checked against their sizes and ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raytf.data.sources import tfrecord_frames
from raytf.data.sources.file_set import Files
from raytf.errors import DamagedFileError, DataError, StorageError
from raytf.storage import local_files

INDEX = "_raytf_index"
_MAGIC = b"RAYTFIX1"
_LENGTHS = struct.Struct("<QI")
#: Bytes at a file's end of which the index keeps a CRC.
_END = 1 << 16
#: Data of more than this many bytes are not gone through without a word.
_SILENT_BYTES = 1 << 30


@dataclass(frozen=True)
class IndexEntry:
    """What the index knows of a file.

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
        """[n] int64, where each record's data begin in the file."""
        sizes = self.lengths.astype(np.int64) + tfrecord_frames.FRAME
        return np.cumsum(sizes) - sizes + tfrecord_frames.HEADER


def encode(entries: dict[str, IndexEntry]) -> bytes:
    """As a file; the same bytes for the same entries."""
    names = sorted(entries)
    about = [[n, entries[n].bytes, entries[n].end_crc, len(entries[n].lengths)] for n in names]
    head = json.dumps(about).encode()
    body = zlib.compress(b"".join(entries[n].lengths.astype("<u4").tobytes() for n in names), 6)
    data = _MAGIC + _LENGTHS.pack(len(head), zlib.crc32(head + body)) + head + body
    return data


def decode(data: bytes) -> dict[str, IndexEntry]:
    """From a file; empty where it is damaged: then the records are looked for again."""
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


def index(
    files: Files, say: Callable[[str], None] | None = None, scan: Callable[[Files, int], IndexEntry] | None = None
) -> list[IndexEntry]:
    """An entry for each file: from the index that there is, or by going through the files, once.

    Args:
        say: told where much has to be read; by default standard error.
        scan: goes through one of the files; by default it reads all of that.

    Raises:
        DataError: a file is damaged, or compressed.
        StorageError: storage refuses.
    """
    known: dict[str, IndexEntry] = {}
    with contextlib.suppress(DamagedFileError):  # it is made again, elsewhere
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
        (say or (lambda line: print(line, file=sys.stderr, flush=True)))(text)
    for i, entry in zip(missing, files.map(lambda i: (scan or _scan)(files, i), missing), strict=True):
        entries[i] = entry
    found = [entry for entry in entries if entry is not None]
    if missing:
        _keep(files, cache, encode(known | dict(zip(files.names, found, strict=True))))
    return found


def entry_of(data: bytes, lengths: np.ndarray) -> IndexEntry:
    """For a file that is at hand."""
    return IndexEntry(len(data), zlib.crc32(data[-_END:]), np.asarray(lengths, np.uint32))


def refuse_compressed(start: bytes | memoryview, place: str) -> None:
    """Raise where a file that is not a TFRecord file begins like a compressed one.

    Raises:
        DataError: it does.
    """
    if bytes(start[:2]) == b"\x1f\x8b" or bytes(start[:2]) in (b"\x78\x01", b"\x78\x9c", b"\x78\xda"):
        raise DataError(
            f"{place} is compressed, so no record of it can be read by itself. Expected plain TFRecords: unpack it "
            "first, with gunzip or zlib-flate; raytf data convert --to parquet makes files that are small, too."
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
    for found in tfrecord_frames.scan(lambda at, n: files.read(i, at, n), files.sizes[i]):
        if isinstance(found, tfrecord_frames.Damage):
            place = files.locate(i)
            if not found.offset:
                refuse_compressed(files.read(i, 0, min(2, files.sizes[i])), place)
            raise DataError(
                f"{place}: record {found.record} at byte {found.offset}: {found.why}. "
                f"`raytf data check` finds all that is damaged."
            )
        lengths.append(len(found[1]))
    return IndexEntry(files.sizes[i], zlib.crc32(_end(files, i)), np.array(lengths, np.uint32))


def _cache(files: Files) -> Path:
    """Where an index is kept whose data lie where nobody may write."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.sha256(files.storage.locate("").encode()).hexdigest()[:24]
    return Path(base).expanduser() / "raytf" / "index" / name


def _keep(files: Files, cache: Path, data: bytes) -> None:
    try:
        files.storage.put(INDEX, data)
    except StorageError:
        with contextlib.suppress(OSError):  # it is made again the next time
            local_files.put(str(cache), data)
