"""Rank 0's arrays on every rank, made from a sum over ranks: in pieces, and without arrays that are zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

#: Bytes that travel at a time: that much memory is needed in addition to the arrays.
PIECE_BYTES = 1 << 26
#: Up to this many bytes it is not worth a separate message to say which arrays are zero.
_SMALL_BYTES = 1 << 16


def broadcast(
    arrays: list[np.ndarray],
    is_first: bool,
    add: Callable[[np.ndarray], np.ndarray],
    piece_bytes: int = PIECE_BYTES,
) -> list[np.ndarray]:
    """Rank 0's arrays, bit for bit; rank 0 itself gets the arrays that it gave.

    Adding integer zeros keeps every bit, NaN payloads included. An array whose bytes are all zero, such as a slot of
    Adam in a new run, does not travel: one number marks it.

    Args:
        arrays: of rank 0; the other ranks give arrays of the same shapes and dtypes, whose values do not matter.
        is_first: whether this is rank 0.
        add: sums a vector of int32 over all ranks.
        piece_bytes: the most bytes that are added at a time; a multiple of 4.

    Returns:
        The arrays. Some may share memory, so do not write to them.
    """
    travels = np.ones(len(arrays), np.int32)
    if sum(a.nbytes for a in arrays) > _SMALL_BYTES:
        mine = [int(_has_bits(a)) if is_first else 0 for a in arrays]
        travels = add(np.array(mine, np.int32))
    sent = [a for a, travel in zip(arrays, travels, strict=True) if travel]
    if is_first:
        for piece in _pieces(sent, piece_bytes):
            add(piece)
        return arrays
    received = iter(_received([a.nbytes for a in sent], add, piece_bytes))
    return [
        (next(received) if travel else np.zeros(a.nbytes, np.uint8)).view(a.dtype).reshape(a.shape)
        for a, travel in zip(arrays, travels, strict=True)
    ]


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _has_bits(array: np.ndarray) -> bool:
    """Whether any bit is set; -0.0 has one."""
    data = _bytes_of(array)
    whole = len(data) - len(data) % 8
    return bool(data[:whole].view(np.uint64).any() or data[whole:].any())


def _pieces(arrays: list[np.ndarray], piece_bytes: int) -> Iterator[np.ndarray]:
    """The arrays' bytes, one after another, as int32 words; the last word is padded with zeros."""
    left = sum(a.nbytes for a in arrays)
    piece, filled = np.zeros(_words(min(left, piece_bytes)), np.int32), 0
    for array in arrays:
        data, begin = _bytes_of(array), 0
        while begin < len(data):
            end = min(len(data), begin + piece.nbytes - filled)
            piece.view(np.uint8)[filled : filled + end - begin] = data[begin:end]
            filled, begin = filled + end - begin, end
            if filled == piece.nbytes:
                yield piece
                left -= filled
                piece, filled = np.zeros(_words(min(left, piece_bytes)), np.int32), 0
    if filled:
        yield piece


def _received(sizes: list[int], add: Callable[[np.ndarray], np.ndarray], piece_bytes: int) -> list[np.ndarray]:
    """Byte arrays of these sizes, as the `_pieces` of another rank arrive."""
    out = [np.empty(size, np.uint8) for size in sizes]
    left, number, begin = sum(sizes), 0, 0
    while left > 0:
        data = add(np.zeros(_words(min(left, piece_bytes)), np.int32)).view(np.uint8)
        left, used = left - len(data), 0
        while number < len(out) and used < len(data):
            end = min(len(out[number]), begin + len(data) - used)
            out[number][begin:end] = data[used : used + end - begin]
            used, begin = used + end - begin, end
            if begin == len(out[number]):
                number, begin = number + 1, 0
    return out


def _words(size: int) -> int:
    return -(-size // 4)
