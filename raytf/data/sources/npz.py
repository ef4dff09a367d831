"""NumPy archives (.npz). Only the requested rows are read, unless the arrays are compressed."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf.data import tree
from raytf.data.sources.base import Order, Spec, by_name
from raytf.data.sources.block_reader import BlockSource
from raytf.data.sources.file_set import Files
from raytf.errors import DataError, RaytfError, one_line

_BLOCK_BYTES = 4 << 20
#: Errors of zipfile, zlib and numpy for bytes that are not an archive of arrays, or an encrypted or malformed one.
_DAMAGED = (
    ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, SyntaxError, TypeError,
    MemoryError, RecursionError,
)  # fmt: skip
_LOCAL_HEADER = struct.Struct("<26xHH")
#: The most bytes of an array if a file is read as a whole.
_MOST_BYTES = 64 << 30
#: Functions that read a header, by the version of the format.
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class _Member:
    """An array of the archive; its offset in the file is None if it is compressed or in Fortran order."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int | None

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize


class NpzSource(BlockSource):
    """Arrays of an .npz file on local disk, S3, GCS or Azure, all with the same first dimension.

    Files of `numpy.savez` are read in rows. Files of `numpy.savez_compressed` cannot be read in rows, so each worker
    unpacks the whole file into its memory.

    Args:
        uri: the file.
        x: name of the inputs' array, or a list of names (then inputs are a dict by name).
        y: name of the targets' array, or a list of names, or None.
        sample_weight: name of the sample weights' array, or None.
        window: number of records in a shuffle window; by default 8,192, or 64 MiB of them.
        order: `records`, `blocks`, or `auto`: `records` for arrays of up to 256 MiB together.
        block_bytes: bytes of a block.

    Raises:
        DataError: the file is not an .npz file; or an array is missing, is not numeric or has another length.
        StorageError: storage refuses a request.
    """

    def __init__(
        self,
        uri: str,
        x: str | list[str] = "x",
        y: str | list[str] | None = "y",
        sample_weight: str | None = None,
        window: int | None = None,
        order: Order = "auto",
        block_bytes: int = _BLOCK_BYTES,
    ):
        super().__init__(uri, window)
        self._files = Files(uri)
        if len(self._files.names) != 1:
            raise DataError(f"{uri} is a folder. Pass one .npz file.")
        columns = tree.map_leaves(str, (by_name(x), by_name(y), sample_weight))
        members = _members(self._files)
        self._members = [_member(members, name, uri) for _, name in tree.flatten(columns)]
        lengths = {m.name: m.shape[0] for m in self._members}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise DataError(f"{uri}: arrays differ in their number of records: {listed}.")
        rows = self._members[0].shape[0]
        if not rows:
            raise DataError(f"{uri} has no records.")
        size = sum(m.row_bytes for m in self._members)
        step = max(1, block_bytes // max(1, size))
        self._lay_out(np.diff([*range(0, rows, step), rows]))
        self._leaf_specs = [Spec(m.shape[1:], m.dtype.newbyteorder("=").name) for m in self._members]
        self.spec = tree.unflatten(columns, self._leaf_specs)
        self._order_by(order, rows * size)
        self._directory = [(name, info.CRC) for name, (info, _) in sorted(members.items())]
        if not self._by_record:
            self.crc = zlib.crc32(repr((self._directory, step)).encode())

    _own = (*BlockSource._own, "_arrays")

    def _forget(self) -> None:
        super()._forget()
        self._arrays: list[np.ndarray] | None = None

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        if not self._in_memory and not (self._by_record and self._files.is_local):
            return super().take(records)
        if self._arrays is None:
            if self._in_memory:
                self._arrays = _unpacked(self._files, [m.name for m in self._members])
            else:
                self._arrays = [self._rows(m, 0, m.shape[0]) for m in self._members]
            self._rows_read[0] += self.records if self._in_memory else 0
        if not self._in_memory:
            self._rows_read[0] += len(records)
        pairs = zip(self._arrays, self._leaf_specs, strict=True)
        return [np.asarray(array[records], spec.dtype) for array, spec in pairs]

    @property
    def _in_memory(self) -> bool:
        return any(m.offset is None for m in self._members)

    def _read(self, b: int) -> list[np.ndarray]:
        start, n = int(self._starts[b]), int(self._sizes[b])
        pairs = zip(self._members, self._leaf_specs, strict=True)
        return [np.asarray(self._rows(m, start, n), spec.dtype) for m, spec in pairs]

    def _rows(self, member: _Member, start: int, n: int) -> np.ndarray:
        assert member.offset is not None
        begin = member.offset + start * member.row_bytes
        data = self._files.read(0, begin, n * member.row_bytes, whole=False)
        return np.frombuffer(data, member.dtype).reshape(n, *member.shape[1:])


def load_arrays(uri: str, names: Sequence[str]) -> list[np.ndarray]:
    """Return arrays of an .npz file, which is read as a whole.

    Raises:
        DataError: it is not an .npz file, is damaged, or lacks an array.
        StorageError: storage refuses a request.
    """
    files = Files(uri)
    members = _members(files)
    wanted = [_member(members, name, uri).name for name in names]
    if large := [name for name in wanted if members[name][0].file_size > _MOST_BYTES]:
        size = members[large[0]][0].file_size
        raise DataError(f"{uri} is damaged: {large[0]} would have {size:,} bytes; the limit is {_MOST_BYTES:,}.")
    return _unpacked(files, wanted)


def array_names(uri: str) -> list[str]:
    """Return the names of the arrays in an .npz file.

    Raises:
        DataError: it is not an .npz file, or is damaged.
        StorageError: storage refuses a request.
    """
    return list(_members(Files(uri)))


def _unpacked(files: Files, names: Sequence[str]) -> list[np.ndarray]:
    file = files.locate(0) if files.is_local else io.BytesIO(files.read(0, 0, files.sizes[0]))
    try:
        with np.load(file, allow_pickle=False) as archive:
            return [archive[name] for name in names]
    except (OSError, *_DAMAGED) as error:
        raise DataError(f"{files.locate(0)} is damaged: {one_line(error, 200)}. Fetch it again.") from error


def _member(members: dict[str, tuple[zipfile.ZipInfo, _Member]], name: str, uri: str) -> _Member:
    if name not in members:
        raise DataError(f"{uri} has no array {name!r}; its arrays are: {', '.join(sorted(members)) or 'none'}.")
    member = members[name][1]
    if not member.shape:
        raise DataError(f"{uri}: {name} is a single value. Expected an array with one row for each record.")
    if member.dtype.kind not in "biufc":
        raise DataError(f"{uri}: {name} has dtype {member.dtype}, which is not a number. Convert it to numbers first.")
    return member


def _members(files: Files) -> dict[str, tuple[zipfile.ZipInfo, _Member]]:
    """Return the arrays of the archive by name, with a few small reads."""
    members = {}
    try:
        with zipfile.ZipFile(io.BufferedReader(_Ranges(files), 1 << 16)) as archive:
            for info in archive.infolist():
                if not info.filename.endswith(".npy"):  # such as a README
                    continue
                with archive.open(info) as stream:
                    # Other versions of the format raise a KeyError.
                    read = _READ_HEADER[np.lib.format.read_magic(stream)]
                    shape, fortran, dtype = read(stream)
                    header = stream.tell()
                is_plain = info.compress_type == zipfile.ZIP_STORED and not fortran
                name = info.filename.removesuffix(".npy")
                offset = _body(files, info) + header if is_plain else None
                members[name] = info, _Member(name, shape, dtype, offset)
        for info, member in members.values():
            size = math.prod(member.shape) * member.dtype.itemsize
            if size > info.file_size:  # before an array of that size is made
                raise ValueError(
                    f"the header of {member.name} states {size:,} bytes, but the archive has {info.file_size:,}"
                )
            if member.offset is not None and member.offset + size > files.sizes[0]:
                raise ValueError(f"{member.name} is cut off")
    except (OSError, KeyError, struct.error, *_DAMAGED) as error:
        if isinstance(error, RaytfError):
            raise
        text = one_line(error, 200)
        raise DataError(f"{files.locate(0)} is not an .npz file of numbers, or is damaged: {text}") from error
    return members


def _body(files: Files, info: zipfile.ZipInfo) -> int:
    name, extra = _LOCAL_HEADER.unpack(files.read(0, info.header_offset, _LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + name + extra


class _Ranges(io.RawIOBase):
    """The file of a `Files` as a stream for libraries that seek in it."""

    def __init__(self, files: Files):
        self._files, self._at = files, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._files.sizes[0]}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._files.sizes[0] - self._at))
        buffer[:length] = self._files.read(0, self._at, length, whole=False)
        self._at += length
        return length
