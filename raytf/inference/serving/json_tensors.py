"""Reads the tensors of requests from JSON, and writes those of answers, in the formats of TensorFlow Serving.

Python's JSON reader turns each byte of text into 8 to 32 bytes of lists and numbers, and no other thread can run while
it does. A large request consists mostly of arrays of numbers, each of one shape. `take_numbers` finds these arrays,
which are read piece by piece, without a Python object for each number. The rest of the text is small, and is read as
usual. Answers are written piece by piece, too.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import numpy as np

from raytf.errors import one_line
from raytf.inference.serving.limits import Refusal, bad
from raytf.inference.signature import Signature, TensorSpec, shape_text

#: Bytes of text to read at a time.
_PIECE = 64 << 10
#: Bytes to compare or count at a time, so that other threads can run in between.
_BLOCK = 1 << 20
#: Python's reader reads arrays of fewer bytes.
_SMALL = 4 << 10
#: The most values, and the most bytes of text with characters beyond ASCII, for Python's reader.
_MOST_VALUES, _MOST_TEXT = 500_000, 16 << 20
_LONGEST_NUMBER = 4096
_MOST_DEPTH = 32
#: The most arrays to search for; a client with more must send a few at a time.
_MOST_ARRAYS = 256
_START = re.compile(rb"[:\[,]\s*(\[)")
_TOO_DEEP = re.compile(rb"(?:\[\s*){%d}" % (_MOST_DEPTH + 1))
#: Characters of text, objects, true, false and null, which do not occur in arrays of numbers.
_OTHER = re.compile(rb"[\"{}us:]")
_NOT_MARKS = bytes(set(range(256)) - set(b"[],"))
_BRACKETS_TO_SPACES = bytes.maketrans(b"[]", b"  ")
#: Dimensions that a numpy array may have.
_MOST_DIMENSIONS = 64
#: Values of an answer to write at a time.
_SOME = 4096


class Numbers:
    """An array of numbers in a JSON text.

    Args:
        text: the text.
        start: position of the array in the text.
        cuts: positions of commas in the array, and of its end; the numbers up to each are one piece.
        shape: shape of the array.
    """

    def __init__(self, text: bytes | bytearray, start: int, cuts: list[int], shape: tuple[int, ...]):
        self._text, self._start, self._cuts, self.shape = text, start, cuts, shape

    def array(self, convert: Callable[[list], np.ndarray]) -> np.ndarray:
        """Read the array.

        Args:
            convert: turns a list of numbers into an array; called for each piece.

        Raises:
            Refusal: the array is not JSON, or `convert` raised it.
        """
        array: np.ndarray | None = None
        at, done = self._start, 0
        for cut in self._cuts:
            part = convert(_values(self._text[at:cut]))
            if array is None:
                array = np.empty(int(np.prod(self.shape)), part.dtype)
            array[done : done + len(part)] = part
            at, done = cut + 1, done + len(part)
        if array is None or done != len(array):
            raise bad("JSON Parse error: a number is missing in an array")
        return array.reshape(self.shape)

    def values(self) -> np.ndarray:
        """Read the array with the dtype that its numbers have."""
        parts: list[np.ndarray] = []

        def keep(numbers: list) -> np.ndarray:
            parts.append(np.asarray(numbers))
            return np.zeros(len(numbers), np.bool_)

        self.array(keep)
        return np.concatenate(parts).reshape(self.shape)


def take_numbers(body: bytes | bytearray) -> tuple[bytes | bytearray, Callable[[dict], dict]]:
    """Return the text with a word in place of each large array of numbers, and a function that replaces these words
    with `Numbers` in the parsed document.

    Raises:
        Refusal: the remaining text is too large for Python's reader.
    """
    mark = secrets.token_hex(8)
    words: dict[str, Numbers] = {}
    rest: list[bytes | memoryview] = []
    view = memoryview(body)  # its slices are not copies
    done = at = 0
    for _ in range(_MOST_ARRAYS):
        match = _START.search(body, at)
        if match is None:
            break
        start, at = match.start(1), _end_of_numbers(body, match.start(1))
        end = body.rfind(b"]", start, at) + 1
        numbers = _numbers(body, start, end) if end - start >= _SMALL else None
        if numbers is not None:
            word = f"{mark}{len(words)}"
            rest += [view[done:start], f'"{word}"'.encode()]
            words[word] = numbers
            done = end
    text = b"".join([*rest, view[done:]]) if words else body
    _check(text)
    return text, lambda document: {key: _put(value, words, 3) for key, value in document.items()}


def _put(value: Any, words: dict[str, Numbers], depth: int) -> Any:
    """Replace words by their arrays in instances and inputs; elsewhere, words stay and are refused as text."""
    if isinstance(value, str):
        return words.get(value, value)
    if depth and words and isinstance(value, list):
        return [_put(part, words, depth - 1) for part in value]
    if depth and words and isinstance(value, dict):
        return {key: _put(part, words, depth - 1) for key, part in value.items()}
    return value


def _end_of_numbers(body: bytes | bytearray, start: int) -> int:
    """Return the position of the first text, object, true, false or null, or the end of the body."""
    for at in range(start, len(body), _PIECE):
        match = _OTHER.search(body, at, at + _PIECE)
        if match is not None:
            return match.start()
    return len(body)


def _numbers(body: bytes | bytearray, start: int, end: int) -> Numbers | None:
    """Return the array in a part of the text, or None if it has no single shape, or numbers that are too long."""
    if _TOO_DEEP.match(body, start):
        return None
    marks = bytearray()
    for at in range(start, end, _PIECE):  # in pieces, so that other threads can run in between
        marks += body[at : min(at + _PIECE, end)].translate(None, _NOT_MARKS)
    shape = _shape(marks)
    cuts = [start]
    while shape is not None and cuts[-1] < end:
        cut = body.find(b",", cuts[-1] + _PIECE, end)
        cuts.append(end if cut < 0 else cut)
        if cuts[-1] - cuts[-2] > _PIECE + _LONGEST_NUMBER:
            return None
    return None if shape is None else Numbers(body, start, cuts[1:], shape)


def _shape(marks: bytearray) -> tuple[int, ...] | None:
    """Return the shape of an array from its brackets and commas, or None if its lists differ in length or depth."""
    head = marks[:_MOST_DEPTH]
    depth = len(head) - len(head.lstrip(b"["))
    lists = np.frombuffer(marks, np.uint8)
    shape: list[int] = []
    size = 0  # of each item of a list, without the comma after it
    for level in range(1, depth + 1):
        end = marks.find(b"]" * level) if level < depth else len(marks) - level
        items = lists[depth - level + 1 : max(0, end + level - 1)]
        # All items must equal the first one: a list of the level below, or a number, which has no marks.
        is_regular = end >= 0 and (len(items) + 1) % (size + 1) == 0 and items[size : size + 1].tobytes() in (b"", b",")
        if not is_regular or not _repeats(items, size + 1):
            return None
        shape.insert(0, (len(items) + 1) // (size + 1))
        size = len(items) + 2
    return tuple(shape) if marks.endswith(b"]" * depth) and size == len(marks) else None


def _repeats(items: np.ndarray, period: int) -> bool:
    """Return whether each item equals the item one period before."""
    before = items[: max(0, len(items) - period)]
    blocks = range(0, len(before), _BLOCK)  # to compare with little memory
    return all(np.array_equal(before[at : at + _BLOCK], items[period:][at : at + _BLOCK]) for at in blocks)


def _values(piece: bytes | bytearray) -> list:
    try:
        # A bracket without a comma beside it becomes a space between two numbers, which is not JSON either.
        return json.loads(b"[" + piece.translate(_BRACKETS_TO_SPACES) + b"]")
    except ValueError as error:
        raise bad(f"JSON Parse error: in an array of numbers: {str(error)[:200]}") from error


def _check(text: bytes | bytearray) -> None:
    """Refuse a text for which Python's reader would need too much memory.

    Raises:
        Refusal: the text has too many values, or is too long with characters beyond ASCII.
    """
    pieces = (text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))
    values = sum(piece.count(mark) for piece in pieces for mark in (b",", b"[", b"{"))
    if values > _MOST_VALUES:
        raise Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body has more than {_MOST_VALUES:,} values beside arrays of numbers of one shape. Send fewer "
            "instances at a time.",
        )
    if len(text) > _MOST_TEXT and not text.isascii():
        raise Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body has more than {_MOST_TEXT >> 20} MiB of text with characters beyond ASCII. Send fewer instances "
            "at a time, or send bytes as base64.",
        )


def of_rows(instances: Any, signature: Signature) -> dict[str, Any]:
    """Return the values of each input from a list of instances."""
    names = set(signature.inputs)
    if isinstance(instances, Numbers) and len(names) == 1:
        return {next(iter(names)): instances}
    if isinstance(instances, Numbers):
        instances = [[]]  # only their type is checked below
    if not isinstance(instances, list):
        raise bad("Excepting 'instances' to be an list/array")
    if not instances:
        raise bad("No values in 'instances' array")
    if not _is_object(instances[0]):
        if len(names) > 1:
            raise bad(
                "instances is a plain list, but expecting list of objects as multiple input tensors required: "
                f"{', '.join(sorted(names))}"
            )
        for i, row in enumerate(instances):
            if _is_object(row):
                raise bad(f"Expecting value/list but got object at item {i} of input list")
        return {next(iter(names)): instances}
    for i, row in enumerate(instances):
        if not _is_object(row):
            raise bad(f"Expecting object but got list at item {i} of input list")
        if set(row) != names:
            raise bad(
                f"Failed to process element: {i} of 'instances' list. Its keys {', '.join(sorted(row))} must be equal "
                f"to: {','.join(sorted(names))}"
            )
    return {name: [row[name] for row in instances] for name in sorted(names)}


def of_columns(inputs: Any, signature: Signature) -> dict[str, Any]:
    """Return the values of each input from an object of inputs, or from the value of the only input."""
    names = sorted(signature.inputs)
    if not _is_object(inputs):
        if len(names) > 1:
            raise bad(
                "inputs is a plain value/list, but expecting an object as multiple input tensors required: "
                f"{', '.join(names)}"
            )
        return {names[0]: inputs}
    for name in names:
        if name not in inputs:
            raise bad(f"Missing named input: {name} in 'inputs' object.")
    for name in inputs:
        if name not in signature.inputs:
            raise bad(f"JSON object: does not have named input: {name}. Expected {', '.join(names)}.")
    return {name: inputs[name] for name in names}


def tensor(name: str, value: Any, spec: TensorSpec) -> np.ndarray:
    """Return a JSON value as a tensor for a signature's input."""
    if spec.dtype == "string":
        array = _strings(name, value)
    elif isinstance(value, Numbers):
        _check_shape(name, value.shape, spec)  # before allocating memory for it
        array = value.array(lambda some: _as(np.asarray(some), name, some, spec))
    else:
        if isinstance(value, list) and any(isinstance(part, Numbers) for part in value):
            value = [part.values() if isinstance(part, Numbers) else part for part in value]
        try:
            array = np.asarray(value)
        except (ValueError, RecursionError):
            raise bad(f"Input {name}: lists of different lengths. Expected {spec.text()}.") from None
        array = _as(array, name, value, spec)
    _check_shape(name, array.shape, spec)
    return array


def _check_shape(name: str, shape: tuple[int, ...], spec: TensorSpec) -> None:
    if not spec.fits(shape):
        raise bad(f"Input {name} has shape {shape_text(shape)}. Expected {spec.text()}.")


def _as(array: np.ndarray, name: str, value: Any, spec: TensorSpec) -> np.ndarray:
    dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
    takes = {"f": "fiu", "c": "fiu", "i": "iu", "u": "iu", "b": "b"}.get(dtype.kind, "")
    if array.dtype.kind not in takes and array.size:
        raise bad(f"JSON Value: {excerpt(value)} of input {name} is not of expected type: {spec.dtype}")
    if dtype.kind in "iu" and array.size:
        bounds = np.iinfo(dtype)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise bad(f"Input {name}: numbers from {array.min()} to {array.max()} do not fit {spec.dtype}.")
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f" and np.isinf(cast).any() and not np.isinf(array).any():
        raise bad(f"Cannot convert JSON value of input {name} to {spec.dtype} without loss of precision.")
    return cast


def _strings(name: str, value: Any) -> np.ndarray:
    array = np.array(value, object)
    flat = array.ravel()
    if any(isinstance(part, list) for part in flat):
        raise bad(
            f"Input {name}: lists of different lengths or depths, or nested more than {_MOST_DIMENSIONS} deep. "
            "Expected one shape for all."
        )
    flat[:] = [_text(name, part) for part in flat]
    return flat.reshape(array.shape)


def _text(name: str, part: Any) -> bytes:
    if isinstance(part, str):
        try:
            return part.encode()
        except UnicodeEncodeError:
            raise bad(f"Input {name}: {excerpt(part)} has half of a surrogate pair, which is not text.") from None
    if _is_base64(part):
        try:
            return base64.b64decode(part["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise bad(f"Unable to base64 decode input {name}: {error}") from error
    raise bad(f'JSON Value: {excerpt(part)} of input {name} is not of expected type: string or {{"b64": "..."}}')


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not _is_base64(value)


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str)


def excerpt(value: Any, limit: int = 80) -> str:
    """Return a value as JSON, cut to this many characters."""
    try:
        text = one_line(json.dumps(value))
    except RecursionError:
        text = "lists that are nested too deeply"
    except TypeError:
        text = "lists of numbers"  # already read into arrays
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def text_of(name: str, value: np.ndarray) -> Iterator[bytes]:
    """Yield a tensor as JSON text, in parts."""
    if value.ndim == 0 or value.size <= _SOME:
        yield json.dumps(plain(name, value)).encode()
        return
    rows = max(1, _SOME * len(value) // value.size)
    for at in range(0, len(value), rows):
        yield b", " if at else b"["
        if rows > 1:
            yield json.dumps(plain(name, value[at : at + rows]))[1:-1].encode()
        else:
            yield from text_of(name, value[at])
    yield b"]"


def text_of_rows(outputs: Mapping[str, np.ndarray]) -> Iterator[bytes]:
    """Yield tensors with the same number of rows as JSON text, in parts: one object for each row."""
    count = len(next(iter(outputs.values())))
    size = sum(value.size for value in outputs.values())
    rows = max(1, _SOME * count // max(1, size))
    yield b"["
    for at in range(0, count, rows):
        if at:
            yield b", "
        columns = {name: plain(name, value[at : at + rows]) for name, value in outputs.items()}
        some = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        yield json.dumps(some)[1:-1].encode()
    yield b"]"


def plain(name: str, value: np.ndarray) -> Any:
    """Return a tensor as JSON values."""
    if value.dtype.kind in "OSU":
        plain = np.empty(value.shape, object)
        for index in np.ndindex(value.shape):
            plain[index] = _string_of(name, value[index])
        return plain.tolist()
    if value.dtype.kind == "V" or value.dtype.name in ("bfloat16", "float16"):
        value = value.astype(np.float32)
    if value.dtype == np.float32:
        # Written as the shortest text for this float32, not with all digits of the double.
        value = value.astype("U").astype(np.float64)
    return value.tolist()


def _string_of(name: str, value: Any) -> Any:
    data = value if isinstance(value, bytes) else str(value).encode()
    if not name.endswith("_bytes"):
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass  # not text, so written as base64
    return {"b64": base64.b64encode(data).decode()}
