"""Tensors as bytes: which rank writes which tensors, and how they are copied and fetched from a device, with numpy."""

from __future__ import annotations

import functools
import heapq
import json
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import safetensors.numpy

from raytf.errors import CheckpointError


def shares(sizes: dict[str, int], world_size: int) -> list[list[str]]:
    """Return the names of the tensors that each rank writes.
    From the largest on, each tensor is assigned to the rank with the smallest sum of sizes so far (Graham's LPT)."""
    split: list[list[str]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]  # a heap, which orders ranks with equal loads by number
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        load, rank = loads[0]
        split[rank].append(name)
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return split


#: safetensors' names of dtypes.
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_KINDS = {short: name for name, short in _DTYPES.items()}
#: Bytes of a piece, which fits into the CPU's cache while it is processed.
_PIECE = 4 << 20
#: Bytes from which two threads copy, and bytes that each of them copies at a time.
_MANY, _COPIED = 16 << 20, 8 << 20


def parts(tensors: Mapping[str, np.ndarray]) -> list[memoryview]:
    """Return a safetensors file as pieces that are views of the tensors, without copying them."""
    arrays = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    if not all(array.dtype.name in _DTYPES and array.dtype.isnative for array in arrays.values()):
        return [memoryview(encode(arrays))]
    header: dict[str, dict[str, object]] = {}
    end, pieces = 0, []
    # The widest dtypes first, so that each tensor is aligned to its width.
    for name in sorted(arrays, key=lambda n: (-arrays[n].dtype.itemsize, n)):
        array, begin = arrays[name], end
        end += array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        flat = array.reshape(-1).view(np.uint8)
        pieces += [flat[a : a + _PIECE].data for a in range(0, len(flat), _PIECE)]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *pieces]


def broken(tensors: Mapping[str, np.ndarray], names: Iterator[str]) -> str | None:
    """Return the name of the first of these tensors that has a NaN or an infinity; None if there is none."""
    return next((name for name in names if not _is_finite(tensors[name])), None)


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype.kind in "fc":
        # A sum is fast, and keeps a NaN or an infinity. Check each number only if the sum is not finite.
        with np.errstate(all="ignore"):
            if np.isfinite(np.add.reduce(array, axis=None)):
                return True
    return bool(np.isfinite(array).all())


def checksum(pieces: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32C of a share. Processors have an instruction for it; zlib's CRC-32 takes five times longer."""
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, np.frombuffer(piece, np.uint8))  # it does not accept a memoryview
    return crc


def readable(stated: int) -> int:
    """Return the maximum bytes to read of a share: the size in its manifest, at most this machine's memory."""
    return min(stated, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def is_intact(data: bytes, share: Mapping[str, Any]) -> bool:
    """Return whether a share's bytes match the checksum in its manifest, which is a CRC-32 in version 1."""
    return checksum([data]) == share["crc32c"] if "crc32c" in share else zlib.crc32(data) == share["crc32"]


def encode(tensors: dict[str, np.ndarray]) -> bytes:
    """Return the tensors as a safetensors file."""
    return safetensors.numpy.save({name: np.asarray(value, order="C") for name, value in tensors.items()})


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of this name in numpy or ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def decode(data: bytes) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: the bytes are not a safetensors file.
    """
    try:
        entries = safetensors.deserialize(data)
        if any(tensor["dtype"] not in _KINDS for _, tensor in entries):
            return safetensors.numpy.load(data)
        # safetensors.numpy writes bfloat16 but cannot read it.
        return {
            name: np.frombuffer(tensor["data"], dtype_of(_KINDS[tensor["dtype"]])).reshape(tensor["shape"])
            for name, tensor in entries
        }
    except Exception as error:  # safetensors' own error class is not public
        raise CheckpointError(f"not a safetensors file, or a damaged one: {error}") from error


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor that is not in the host's memory.

    Attributes:
        dtype, shape: those of the fetched array.
        fetch: returns the tensor's values as a new array in the host's memory.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


#: A tensor, wherever it is.
Tensor = np.ndarray | DeviceTensor
#: Lets only one thread of a process fetch at a time, since copies to memory and to a file may be made concurrently.
_TURN = threading.Lock()


def copy_all(targets: Sequence[np.ndarray], sources: Sequence[Tensor]) -> None:
    """Copy tensors, with several threads if they are large.

    Tensors on a device are fetched one at a time, each while the previous one is copied. So at most two of them are in
    the host's memory, whatever other threads do.
    """
    pairs = list(zip(targets, sources, strict=True))
    here = [(target, source) for target, source in pairs if not isinstance(source, DeviceTensor)]
    _copy_arrays(here, sum(source.nbytes for _, source in here) >= _MANY)
    remote = [(target, source) for target, source in pairs if isinstance(source, DeviceTensor)]
    if not remote:
        return
    with _TURN:
        # A future holds its result, so drop it before another tensor is fetched.
        coming = deque([_fetcher().submit(remote[0][1].fetch)])
        for k, (target, _) in enumerate(remote):
            value = coming.popleft().result()
            if k + 1 < len(remote):
                coming.append(_fetcher().submit(remote[k + 1][1].fetch))
            _copy_arrays([(target, value)], value.nbytes >= _MANY)
            del value


def _copy_arrays(pairs: Sequence[tuple[np.ndarray, np.ndarray]], shared: bool) -> None:
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    for target, source in pairs:
        if not shared or source.nbytes < _COPIED or not source.flags.c_contiguous:
            np.copyto(target, source)
            continue
        to, of = (array.reshape(-1).view(np.uint8) for array in (target, source))
        pieces += [(to[a : a + _COPIED], of[a : a + _COPIED]) for a in range(0, len(of), _COPIED)]
    if pieces:
        list(_copiers().map(lambda pair: np.copyto(*pair), pieces))


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    # Two threads reach the memory's full speed, and other ranks share the node.
    return ThreadPoolExecutor(2, thread_name_prefix="raytf-copy")


@functools.cache
def _fetcher() -> ThreadPoolExecutor:
    # Always the same thread: the allocator keeps some memory of each thread that has freed any.
    return ThreadPoolExecutor(1, thread_name_prefix="raytf-fetch")
