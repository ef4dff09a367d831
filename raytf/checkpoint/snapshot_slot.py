"""The memory tier's bytes: one rank's share of a snapshot in a piece of memory that outlives the rank.

    header    magic, step, share, shares, end of the data and of the text, checksum of the data, CRC-32 of the text and
              of the header itself
    data      the tensors, each at a multiple of 64 bytes
    text      three lines of JSON: what changes with each snapshot, where each tensor is, what seldom changes

The header is wiped first and written last, so a process that is killed while it writes leaves nothing that looks
whole. Two slots take turns: the other one still holds the snapshot before. Training waits for the copy alone: the
checksum, and with it the header, may come from another thread while the next steps are made.
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
#: So that a text that grows needs no other mapping each time.
_SPARE_BYTES = 1 << 20


class Slot:
    """A file in memory into which one rank writes its share, again and again.

    Args:
        path: of the file, which exists; it grows as it has to.

    Raises:
        OSError: it cannot be opened.
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
        """Copy what the slot is to hold, which then holds nothing until `seal`; the bytes that it takes.

        Args:
            share: all but its `bytes` is taken.
            tensors: any dtype that numpy or ml_dtypes names; those of a device are fetched one at a time.
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
        """Have what was copied count: add it up, and write the header."""
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
    """Return what a slot, in any buffer, holds by its header and text alone; None if it holds nothing whole."""
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
    """Return a slot's share, tensors (copies), live and slow values, verified.

    Raises:
        CheckpointError: it holds nothing whole, or was damaged.
    """
    share = head(memory)
    if share is None:
        raise CheckpointError("a snapshot in memory is not whole.")
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
    # A sum of words costs a twentieth of a CRC-32, and this is paid every few steps. It sees what can happen to memory
    # that nobody writes: bytes that are missing, torn or flipped; two changes that cancel out it does not see.
    return int(np.add.reduce(np.frombuffer(memory, np.uint64, (end - _DATA) // 8, _DATA), dtype=np.uint64))
