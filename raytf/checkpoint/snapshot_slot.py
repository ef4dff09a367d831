"""The byte format of the memory tier: one rank's share of a snapshot, in shared memory that outlives the rank.

    header    magic, step, share, shares, end of the data and of the text, checksum of the data, CRC-32 of the text and
              of the header itself
    data      the tensors, each at a multiple of 64 bytes
    text      three lines of JSON: values of this snapshot, the place of each tensor, values that seldom change

The header is wiped first and written last, so a process that is killed while it writes never leaves a slot that
looks complete. Two slots alternate: the other one still holds the previous snapshot. Training waits only for the copy.
Another thread may compute the checksum and write the header during the next steps.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from raytf.checkpoint import codec
from raytf.checkpoint.codec import Tensor
from raytf.checkpoint.slot_ledger import MemoryShare
from raytf.errors import CheckpointError

_HEADER = struct.Struct("<8sQIIQQQI")
_HEADER_CRC = struct.Struct("<I")
_MAGIC = b"raytf s1"
_ALIGN = 64
_DATA = -(-(_HEADER.size + _HEADER_CRC.size) // _ALIGN) * _ALIGN
#: Spare room, so that a growing text does not need a new mapping each time.
_SPARE_BYTES = 1 << 20


class Slot:
    """A file in memory that one rank overwrites with its share of each new snapshot.

    Args:
        path: an existing file; it grows when needed.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str):
        self._fd = os.open(path, os.O_RDWR)
        self._memory: mmap.mmap | None = None
        self._size = 0
        self._copied: tuple[MemoryShare, int, int, int] | None = None

    def write(self, share: MemoryShare, tensors: Mapping[str, Tensor], live: dict[str, Any], slow: bytes) -> int:
        size = self.copy(share, tensors, live, slow)
        self.seal()
        return size

    def copy(self, share: MemoryShare, tensors: Mapping[str, Tensor], live: dict[str, Any], slow: bytes) -> int:
        """Copy a share into the slot and return its size in bytes. The slot counts as empty until `seal`.

        Args:
            share: describes the copy; its `bytes` is ignored.
            tensors: any dtype that numpy or ml_dtypes names; tensors on a device are fetched one by one.
            live: JSON values.
            slow: a line of JSON, already encoded.
        """
        index: dict[str, tuple[str, list[int], int]] = {}
        end = _DATA
        for name, array in tensors.items():
            index[name] = (array.dtype.name, list(array.shape), end)
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        text = b"\n".join([json.dumps({"attempt": share.attempt, **live}).encode(), json.dumps(index).encode(), slow])
        memory = self._map(end + len(text))
        memory[: len(_MAGIC)] = bytes(len(_MAGIC))
        places = [np.frombuffer(memory, a.dtype, a.size, index[n][2]).reshape(a.shape) for n, a in tensors.items()]
        codec.copy_all(places, list(tensors.values()))
        for name, array in tensors.items():
            begin = index[name][2] + array.nbytes
            memory[begin : begin + -array.nbytes % _ALIGN] = bytes(-array.nbytes % _ALIGN)
        memory[end : end + len(text)] = text
        self._copied = share, end, end + len(text), zlib.crc32(text)
        return end + len(text)

    def seal(self) -> None:
        """Make the last copy valid: compute its checksum, and write the header."""
        memory, copied, self._copied = self._memory, self._copied, None
        assert memory is not None
        assert copied is not None
        share, data_end, text_end, text_crc = copied
        checksum = _checksum(memory, data_end)
        header = _HEADER.pack(_MAGIC, share.step, share.share, share.shares, data_end, text_end, checksum, text_crc)
        whole = header + _HEADER_CRC.pack(zlib.crc32(header))
        memory[: len(whole)] = whole

    def close(self) -> None:
        self._memory = None
        os.close(self._fd)

    def _map(self, needed: int) -> mmap.mmap:
        if self._memory is None or needed > self._size:
            self._size = needed + needed // 8 + _SPARE_BYTES
            os.ftruncate(self._fd, self._size)
            self._memory = mmap.mmap(self._fd, self._size)
        return self._memory


def head(memory: Any) -> MemoryShare | None:
    """Return the share in a slot's buffer, by its header and text alone; None if no share in it is complete."""
    if len(memory) < _DATA:
        return None
    magic, step, share, shares, data_end, text_end, _, crc = _HEADER.unpack_from(memory, 0)
    if magic != _MAGIC or _HEADER_CRC.unpack_from(memory, _HEADER.size)[0] != zlib.crc32(memory[: _HEADER.size]):
        return None
    if not _DATA <= data_end <= text_end <= len(memory):
        return None
    text = bytes(memory[data_end:text_end])
    if zlib.crc32(text) != crc:
        return None
    return MemoryShare(step, json.loads(text.partition(b"\n")[0])["attempt"], share, shares, text_end)


def parse(memory: Any) -> tuple[MemoryShare, dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Return a slot's share, tensors (copies), live values and slow values, after verifying its checksum.

    Raises:
        CheckpointError: the slot holds no complete share, or its data is damaged.
    """
    share = head(memory)
    if share is None:
        raise CheckpointError("the snapshot in memory is incomplete.")
    _, step, _, _, data_end, text_end, checksum, _ = _HEADER.unpack_from(memory, 0)
    lines = bytes(memory[data_end:text_end]).split(b"\n", 2)
    live, index, slow = (json.loads(line) if line else {} for line in lines)
    tensors = {
        name: np.array(_view(memory, codec.dtype_of(dtype), shape, begin))
        for name, (dtype, shape, begin) in index.items()
    }
    if _checksum(memory, data_end) != checksum:
        raise CheckpointError(f"the snapshot of step {step} in memory is damaged: its checksum is wrong.")
    return share, tensors, live, slow


def _view(memory: Any, dtype: np.dtype, shape: Any, begin: int) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(memory, np.uint8, count * dtype.itemsize, begin).view(dtype).reshape(shape)


def _checksum(memory: Any, end: int) -> int:
    # A sum of words costs a twentieth of a CRC-32, and runs every few steps. It detects the damage that idle memory can
    # suffer: missing, torn or flipped bytes. It does not detect two changes that cancel each other out.
    return int(np.add.reduce(np.frombuffer(memory, np.uint64, (end - _DATA) // 8, _DATA), dtype=np.uint64))
