"""Splits arrays into pieces, which `host` and `network` add, and defines the errors that both raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

#: Alignment in bytes of memory that TensorFlow uses without a copy.
_ALIGNMENT = 64

Parts = list[np.ndarray]


class PeerLostError(RuntimeError):
    """Another process is gone.

    The message begins with `Collective`. In a graph, TensorFlow replaces the error with its own and keeps only the
    message, so `raytf.training.worker` recognizes a lost peer by this word.
    """


class OrderError(RuntimeError):
    """Two processes add different arrays, so their sum would be meaningless."""


@contextlib.contextmanager
def all_or_none(whose: str, are_there: bool, close: Callable[[], None]) -> Iterator[None]:
    """Call `close` if a sum with some processes (`whose`) fails, so that no other process waits for this one. Raise a
    PeerLostError if one of the processes is lost, or was lost in an earlier sum."""
    if not are_there:
        raise PeerLostError(f"Collective: a worker of {whose} was lost before")
    try:
        yield
    except OSError as error:
        close()
        raise PeerLostError(f"Collective: a worker of {whose} is gone ({error})") from None
    except BaseException:
        close()
        raise


def empty(like: np.ndarray) -> np.ndarray:
    """Return an uninitialized array like another one, in memory that TensorFlow uses without a copy."""
    memory = np.empty(like.nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + like.nbytes].view(like.dtype).reshape(like.shape)


def pieces(
    values: Sequence[np.ndarray], out: Sequence[np.ndarray], most_bytes: int
) -> Iterator[tuple[Parts, Parts, int]]:
    """Yield parts of the values and of the results, at most `most_bytes` of each, and their count of numbers."""
    room = most_bytes // values[0].itemsize
    mine, total, size = [], [], 0
    for value, result in zip(values, out, strict=True):
        flat, target, begin = value.reshape(-1), result.reshape(-1), 0
        while True:
            end = min(len(flat), begin + room - size)
            mine.append(flat[begin:end])
            total.append(target[begin:end])
            size, begin = size + end - begin, end
            if begin == len(flat):
                break
            yield mine, total, size
            mine, total, size = [], [], 0
    yield mine, total, size


def copy_in(parts: Parts, slot: np.ndarray) -> None:
    """Copy parts one after another into a vector."""
    begin = 0
    for part in parts:
        slot[begin : begin + len(part)] = part
        begin += len(part)


def copy_out(slot: np.ndarray, parts: Parts) -> None:
    """Copy a vector back into its parts."""
    begin = 0
    for part in parts:
        part[:] = slot[begin : begin + len(part)]
        begin += len(part)


def sum_of(parts: list[np.ndarray], out: np.ndarray) -> None:
    """Add at least two vectors in order."""
    np.add(parts[0], parts[1], out=out)
    for other in parts[2:]:
        np.add(out, other, out=out)
