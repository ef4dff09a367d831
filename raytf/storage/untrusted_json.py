"""Reads untrusted JSON from a run's folder: limits its size and depth, and checks its shape.

A run's folder may be damaged or malicious. Whatever it contains, a reader gets either a document of the requested
shape or a `DamagedFileError` with file and reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raytf.errors import DamagedFileError, StorageError, one_line
from raytf.storage.storage import Storage

#: Returns the problem with a value; None if there is none.
Shape = Callable[[Any], str | None]

#: Size limits in bytes: of small files, and of files that grow with the run or with the model.
SMALL, LARGE = 1 << 20, 64 << 20
#: The most levels of nested lists and objects.
DEPTH = 100
#: The most digits of a whole number (a callback may keep long ones), and the most characters of a float.
_DIGITS, _CHARACTERS = 4000, 400
#: Whole numbers up to here are exact as floats, too.
MOST = 2**53
_KINDS = {dict: "an object", list: "a list", str: "a text", type(None): "null"}


def read(run: Storage, name: str, shape: Shape, most: int = SMALL, depth: int = DEPTH) -> Any:
    """Return the document in a JSON file, or None if the file is missing.

    Args:
        run: the run's folder.
        shape: the shape that the document must have.
        most: the largest size of the file in bytes.

    Raises:
        DamagedFileError: it is too large, not JSON, nested too deeply or of another shape.
        StorageError: storage refuses a request.
    """
    data = run.get_or_none(name, most)
    return None if data is None else parse(data, run.locate(name), shape, depth)


def parse(data: bytes, where: str, shape: Shape, depth: int = DEPTH) -> Any:
    """Return the JSON document in `data`.

    Args:
        where: the place it comes from, as shown to people.

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
    """Return a JSON document of any shape.

    Raises:
        ValueError: describes, for people, the problem with it.
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
    """Return the value that was read, or the reason it could not be, for callers that can continue without it.

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
        level = [inner for value in level for inner in _children(value)]
        if not level:
            return False
    return any(isinstance(value, (dict, list)) for value in level)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# -- shapes ------------------------------------------------------------------------------------------------------------


def expect(expected: str, is_valid: Callable[[Any], bool]) -> Shape:
    """Return the shape of values that satisfy `is_valid`; `expected` describes them."""
    return lambda value: None if is_valid(value) else f"is {_shown(value)}, expected {expected}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and -MOST <= value <= MOST  # false for NaN


#: Any value.
anything: Shape = expect("anything", lambda value: True)
#: A string.
text: Shape = expect("a text", lambda value: isinstance(value, str))
#: True or false.
flag: Shape = expect("true or false", lambda value: isinstance(value, bool))
#: A whole number that counts something.
whole: Shape = expect(
    "a whole number, 0 or more", lambda value: _is_number(value) and isinstance(value, int) and 0 <= value <= MOST
)
#: Any number that a float holds; a loss may be NaN or infinite.
number: Shape = expect(
    "a number", lambda value: _is_number(value) and (isinstance(value, float) or abs(value) <= 10**300)
)
#: A finite number, at most `MOST` in size.
finite: Shape = expect("a finite number", _is_finite)
#: Seconds since the epoch, up to the year 9999.
when: Shape = expect("seconds since 1970", lambda value: _is_finite(value) and 0 <= value < 253_402_300_800)


def optional(shape: Shape) -> Shape:
    """Return the shape of a value that may also be null."""
    return lambda value: None if value is None else shape(value)


def each(shape: Shape) -> Shape:
    """Return the shape of a list whose values have this shape."""

    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return f"is {_shown(value)}, expected a list"
        return _first((f"[{i}]", shape(inner)) for i, inner in enumerate(value))

    return check


def values(shape: Shape) -> Shape:
    """Return the shape of an object whose values have this shape."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"is {_shown(value)}, expected an object"
        return _first((key, shape(inner)) for key, inner in value.items())

    return check


def record(required: Mapping[str, Shape], known: Mapping[str, Shape] | None = None) -> Shape:
    """Return the shape of an object with the required fields. Known fields may be missing; other fields are ignored."""
    fields = {**required, **(known or {})}

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"it is {_shown(value)}, expected an object"
        missing = next((key for key in required if key not in value), None)
        if missing is not None:
            return f"it has no {missing!r}"
        return _first((key, shape(value[key])) for key, shape in fields.items() if key in value)

    return check


def _first(checks: Iterable[tuple[str, str | None]]) -> str | None:
    for key, wrong in checks:
        if wrong is not None:
            return f"{key[:40]!r} {wrong.removeprefix('it ')}"
    return None


def _shown(value: Any) -> str:
    """Return a value's text for a message: its kind, or the value itself if it is short."""
    if type(value) in _KINDS:
        return _KINDS[type(value)]
    shown = json.dumps(value)
    return shown if len(shown) <= 24 else "a number"
