"""Reads what others may have written: JSON of a run's folder, bounded in size and depth, and of the shape expected.

A run's folder may be damaged, or made by somebody who wants harm. Whatever is in it, a reader gets either a document of
the shape that it asked for or one `DamagedFileError` with file and reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raytf.errors import DamagedFileError, StorageError, one_line
from raytf.storage.storage import Storage

#: What is wrong with a value; None where nothing is.
Shape = Callable[[Any], str | None]

#: Bytes of files: of small notes, and of those that grow with the run or with the model.
SMALL, LARGE = 1 << 20, 64 << 20
#: Lists and objects within each other.
DEPTH = 100
#: Digits of a whole number, of which a callback may keep long ones; a float has fewer characters, whoever writes it.
_DIGITS, _CHARACTERS = 4000, 400
#: Numbers up to here are exact as floats, too.
MOST = 2**53


def read(run: Storage, name: str, shape: Shape, most: int = SMALL, depth: int = DEPTH) -> Any:
    """A JSON file.

    Args:
        run: the run's folder.
        shape: that the document must have.
        most: bytes that it may have.

    Returns:
        None where it is missing.

    Raises:
        DamagedFileError: it is too large, no JSON, nested too deeply or of another shape.
        StorageError: storage refuses.
    """
    data = run.get_or_none(name, most)
    return None if data is None else parse(data, run.locate(name), shape, depth)


def parse(data: bytes, where: str, shape: Shape, depth: int = DEPTH) -> Any:
    """A JSON document.

    Args:
        where: it comes from, as a person would look for it.

    Raises:
        DamagedFileError: it is not JSON, nested too deeply or of another shape.
    """
    try:
        document = decode(data, depth)
    except ValueError as error:
        raise DamagedFileError(where, str(error)) from None
    wrong = shape(document)
    if wrong:
        raise DamagedFileError(where, wrong)
    return document


def decode(data: bytes, depth: int = DEPTH) -> Any:
    """A JSON document of any shape.

    Raises:
        ValueError: what is wrong with it, for people.
    """
    if not data:
        raise ValueError("it is empty")
    try:
        document = json.loads(data.decode(), parse_int=_whole, parse_float=_float)
    except RecursionError:
        raise ValueError(f"it is nested in more than {depth} levels") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON, or cut off ({one_line(error, 100)})") from None
    if data.count(b"[") + data.count(b"{") > depth and _is_deeper(document, depth):
        raise ValueError(f"it is nested in more than {depth} levels")
    return document


def attempt(read: Callable[[], Any]) -> tuple[Any, DamagedFileError | None]:
    """What a reader finds, or why that cannot be read; for those who go on without it.

    Raises:
        StorageError: storage cannot be reached.
    """
    try:
        return read(), None
    except DamagedFileError as error:
        return None, error
    except StorageError as error:
        if error.kind != "denied":
            raise
        return None, DamagedFileError("a file", str(error).rstrip("."))


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"it has a number of {len(text):,} digits")
    return int(text)


def _float(text: str) -> float:
    if len(text) > _CHARACTERS:
        raise ValueError(f"it has a number of {len(text):,} characters")
    return float(text)


def _is_deeper(document: Any, depth: int) -> bool:
    level = [document]
    for _ in range(depth):
        level = [inner for value in level for inner in _inner(value)]
        if not level:
            return False
    return any(isinstance(value, (dict, list)) for value in level)


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


# -- shapes ------------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def anything(value: Any) -> str | None:
    """Any value."""
    return None


def whole(value: Any) -> str | None:
    """A whole number that counts something."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST
    return None if is_whole else f"is {_said(value)}, expected a whole number, 0 or more"


def number(value: Any) -> str | None:
    """Any number that a float holds; a loss may be NaN or infinite."""
    is_float = _is_number(value) and (isinstance(value, float) or abs(value) <= 10**300)
    return None if is_float else f"is {_said(value)}, expected a number"


def finite(value: Any) -> str | None:
    """A finite number, and not beyond all that is measured here."""
    is_finite = _is_number(value) and -MOST <= value <= MOST  # false for NaN
    return None if is_finite else f"is {_said(value)}, expected a finite number"


def when(value: Any) -> str | None:
    """Seconds of the epoch, of years with four digits."""
    is_time = finite(value) is None and 0 <= value < 253_402_300_800
    return None if is_time else f"is {_said(value)}, expected seconds since 1970"


def text(value: Any) -> str | None:
    """A string."""
    return None if isinstance(value, str) else f"is {_said(value)}, expected a text"


def flag(value: Any) -> str | None:
    """True or false."""
    return None if isinstance(value, bool) else f"is {_said(value)}, expected true or false"


def optional(shape: Shape) -> Shape:
    """That, or null."""
    return lambda value: None if value is None else shape(value)


def either(*shapes: Shape) -> Shape:
    """Any of several."""

    def check(value: Any) -> str | None:
        wrong = [shape(value) for shape in shapes]
        return None if None in wrong else wrong[0]

    return check


def each(shape: Shape) -> Shape:
    """A list of such values."""

    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return f"is {_said(value)}, expected a list"
        return _first((f"[{i}]", shape(inner)) for i, inner in enumerate(value))

    return check


def values(shape: Shape) -> Shape:
    """An object whose values are such."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"is {_said(value)}, expected an object"
        return _first((key, shape(inner)) for key, inner in value.items())

    return check


def record(wanted: Mapping[str, Shape], known: Mapping[str, Shape] | None = None) -> Shape:
    """An object with these fields; of those that are known, but may be missing, the shape; others may be there."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"is {_said(value)}, expected an object"
        missing = next((key for key in wanted if key not in value), None)
        if missing is not None:
            return f"has no {missing!r}"
        fields = {**wanted, **(known or {})}
        return _first((key, shape(value[key])) for key, shape in fields.items() if key in value)

    return lambda value: _as_sentence(check(value))


def _as_sentence(wrong: str | None) -> str | None:
    return wrong if wrong is None or not wrong.startswith(("is ", "has ")) else f"it {wrong}"


def _first(found: Iterator[tuple[str, str | None]]) -> str | None:
    for key, wrong in found:
        if wrong is not None:
            return f"{key[:40]!r} {wrong.removeprefix('it ')}"
    return None


def _said(value: Any) -> str:
    """A value as part of a message: its kind, where it is not short."""
    kinds = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    if type(value) in kinds:
        return kinds[type(value)]
    said = json.dumps(value)
    return said if len(said) <= 24 else "a number"
