"""Arrays of numbers in a large JSON text, read without a Python object for each number.

Python's JSON reader makes 8 to 32 bytes of lists and numbers of each byte of text, and nothing else runs in the process
meanwhile. Most of a large request is arrays of numbers, each of one shape. Those are found and read a little at a time;
what is left of the text is small, and is read as usual. Each number is still read by Python's own reader, and what is
no array of that kind is left to it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import numpy as np

from raytf.inference.serving.errors import Refusal, bad

#: Bytes of text that are read at once.
_PIECE = 64 << 10
#: An array of fewer bytes is left to Python's reader.
_SMALL = 4 << 10
#: What Python's reader is given at most: values, bytes of text when there are characters beyond ASCII.
_MOST_VALUES, _MOST_TEXT = 500_000, 16 << 20
_LONGEST_NUMBER = 4096
_MOST_DEPTH = 32
#: Lists that are looked at: whoever sends more of them sends them a few at a time.
_MOST_ARRAYS = 256
_OPEN, _CLOSE, _COMMA = b"[],"
_START = re.compile(rb"[:\[,]\s*(\[)")
#: What no array of numbers has: text, objects, true, false and null.
_OTHER = re.compile(rb"[\"{}us:]")
#: Brackets that no array has where they are: 1[ or ]1, and [1], 2.
_ODD = re.compile(rb"[^\[,\s]\s*\[|\]\s*[^\],\s]|\]\s*,\s*[^\[\s]")
_IN_NUMBERS = np.zeros(256, np.bool_)
_IN_NUMBERS[list(b"0123456789.eE+-")] = True


class Numbers:
    """An array of numbers in a text.

    Attributes:
        shape: of it.
    """

    def __init__(self, text: bytes | bytearray, start: int, cuts: list[int], shape: tuple[int, ...]):
        self._text, self._start, self._cuts, self.shape = text, start, cuts, shape

    def array(self, convert: Callable[[list], np.ndarray]) -> np.ndarray:
        """The array.

        Args:
            convert: makes some of the numbers an array of one dtype.

        Raises:
            Refusal: it is not JSON, or `convert` says so.
        """
        found: np.ndarray | None = None
        at, done = self._start, 0
        for cut in self._cuts:
            values = _values(self._text[at:cut])
            some = convert(values)
            if found is None:
                found = np.empty(int(np.prod(self.shape)), some.dtype)
            if done + len(some) > len(found):
                raise bad("JSON Parse error: an array of numbers has too many commas")
            found[done : done + len(some)] = some
            at, done = cut + 1, done + len(some)
        if found is None or done != len(found):
            raise bad("JSON Parse error: a number is missing in an array")
        return found.reshape(self.shape)

    def values(self) -> np.ndarray:
        """The array in whatever dtype its numbers have."""
        pieces: list[np.ndarray] = []

        def keep(some: list) -> np.ndarray:
            pieces.append(np.asarray(some))
            return np.zeros(len(some), np.bool_)

        self.array(keep)
        return np.concatenate(pieces).reshape(self.shape)


def take_numbers(body: bytes | bytearray) -> tuple[bytes, Callable[[dict], dict]]:
    """A text with a word in the place of each large array of numbers, and what puts `Numbers` there once it is read.

    Raises:
        Refusal: what is left is too much for Python's reader.
    """
    mark = secrets.token_hex(8)
    kept: list[Numbers] = []
    rest: list[bytes | bytearray] = []
    done = at = 0
    for _ in range(_MOST_ARRAYS):
        found = _START.search(body, at)
        if found is None:
            break
        start = found.start(1)
        numbers, at = _numbers(body, start)
        if numbers is not None:
            rest += [body[done:start], f'"{mark}{len(kept)}"'.encode()]
            kept.append(numbers)
            done = at
    rest.append(body[done:])
    text = b"".join(rest)
    _check(text)

    def put_back(document: dict) -> dict:
        words = {f"{mark}{i}": numbers for i, numbers in enumerate(kept)}
        return {key: _put(value, words, 3) for key, value in document.items()}

    return text, put_back


def _put(value: Any, words: dict[str, Numbers], depth: int) -> Any:
    """In instances, inputs, one of them, or one input of an instance; elsewhere a word stays a word, and is refused."""
    if isinstance(value, str):
        return words.get(value, value)
    if depth and words and isinstance(value, list):
        return [_put(part, words, depth - 1) for part in value]
    if depth and words and isinstance(value, dict):
        return {key: _put(part, words, depth - 1) for key, part in value.items()}
    return value


def _numbers(body: bytes | bytearray, start: int) -> tuple[Numbers | None, int]:
    """The array that begins there, and where it ends; None and where to look on where it is none, or small."""
    levels = _Levels()
    cuts: list[int] = []
    at, tail = start, b""
    while at < len(body):
        # What is not an array shows soon, at little cost.
        cut = body.find(b",", at + (_PIECE if cuts else _SMALL))
        is_long = cut < 0 or cut > at + _PIECE + _LONGEST_NUMBER
        piece = bytes(body[at : at + _PIECE + _LONGEST_NUMBER if is_long else cut + 1])
        end = levels.add(piece)
        piece = piece if end is None else piece[: end + 1]
        if levels.is_odd or _OTHER.search(piece) is not None or _ODD.search(tail + piece) is not None:
            return None, at if cuts else start  # whatever is within it may be one
        if end is not None:
            shape, after = levels.shape(), at + end + 1
            if shape is None or after - start < _SMALL:
                return None, after
            return Numbers(body, start, [*cuts, after], shape), after
        if is_long:
            return None, at if cuts else start
        cuts.append(cut)
        tail = piece.rstrip()[-2:]
        at = cut + 1
    return None, at


class _Levels:
    """What the brackets and commas of an array say of its shape, piece by piece."""

    def __init__(self) -> None:
        self.is_odd = False
        self._depth = self._deepest = 0
        #: By depth: lists that have ended, their length, commas in the one that is open.
        self._ended: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._commas: dict[int, int] = {}

    def add(self, piece: bytes) -> int | None:
        """Look at more of the text; where in it the array ends."""
        marks = np.frombuffer(piece, np.uint8)
        places = np.flatnonzero((marks == _OPEN) | (marks == _CLOSE) | (marks == _COMMA))
        kinds = marks[places]
        step = np.where(kinds == _OPEN, 1, np.where(kinds == _CLOSE, -1, 0))
        after = self._depth + np.cumsum(step, dtype=np.int64)
        zero = np.flatnonzero(after <= 0)
        stop = int(zero[0]) + 1 if len(zero) else len(after)
        places, kinds, after = places[:stop], kinds[:stop], after[:stop]
        if not len(after):
            return None
        deepest = max(self._deepest, int(after.max()))
        if (self._ended and deepest > self._deepest) or deepest > _MOST_DEPTH:
            self.is_odd = True
            return None
        self._deepest = deepest
        for depth in range(1, deepest + 1):
            self._level(depth, kinds, after)
        self._depth = int(after[-1])
        return int(places[-1]) if self._depth == 0 else None

    def _level(self, depth: int, kinds: np.ndarray, after: np.ndarray) -> None:
        commas = np.cumsum((kinds == _COMMA) & (after == depth), dtype=np.int64)
        ends = np.flatnonzero((kinds == _CLOSE) & (after == depth - 1))
        before = self._commas.get(depth, 0)
        if not len(ends):
            self._commas[depth] = before + int(commas[-1])
            return
        counts = np.diff(commas[ends], prepend=-before)
        length = self._length.setdefault(depth, int(counts[0]) + 1)
        if (counts + 1 != length).any():
            self.is_odd = True
        self._ended[depth] = self._ended.get(depth, 0) + len(ends)
        self._commas[depth] = int(commas[-1] - commas[ends[-1]])

    def shape(self) -> tuple[int, ...] | None:
        """The shape.

        Returns:
            None where lists have different lengths or depths.
        """
        depths = range(1, self._deepest + 1)
        if self.is_odd or any(depth not in self._ended for depth in depths):
            return None
        for depth in list(depths)[:-1]:
            if self._ended[depth] * self._length[depth] != self._ended[depth + 1]:
                return None
        return tuple(self._length[depth] for depth in depths)


def _values(piece: bytes | bytearray) -> list:
    try:
        return json.loads(b"[" + piece.translate(None, b"[]") + b"]")
    except ValueError as error:
        raise bad(f"JSON Parse error: in an array of numbers: {str(error)[:200]}") from error


def _check(text: bytes) -> None:
    """Refuse what would take Python's reader too much memory, or too long.

    Raises:
        Refusal: says what.
    """
    values, is_ascii = 0, True
    for at in range(0, len(text), 1 << 20):
        piece = text[at : at + (2 << 20)]
        breaks = np.flatnonzero(~_IN_NUMBERS[np.frombuffer(piece, np.uint8)])
        if np.diff(breaks, prepend=-1, append=len(piece)).max() > 1 << 20:
            raise bad("JSON Parse error: a number of more than a million digits")
        piece = piece[: 1 << 20]
        is_ascii = is_ascii and piece.isascii()
        values += sum(piece.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MOST_VALUES:
        raise Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body has more than {_MOST_VALUES:,} values beside arrays of numbers of one shape. Send fewer "
            "instances at a time.",
        )
    if not is_ascii and len(text) > _MOST_TEXT:
        raise Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body has more than {_MOST_TEXT >> 20} MiB of text with characters beyond ASCII. Send fewer instances "
            "at a time, or give bytes as base64.",
        )
