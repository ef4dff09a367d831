"""An answer's tensors as JSON, as TensorFlow Serving has them, a little at a time: other threads run in between."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: Values that are written at once.
_SOME = 4096


def text_of(name: str, value: np.ndarray) -> Iterator[bytes]:
    """A tensor."""
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
    """Tensors with equally many rows: an object for each row."""
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
    """A tensor as JSON values."""
    if value.dtype.kind in "OSU":
        plain = np.empty(value.shape, object)
        for index in np.ndindex(value.shape):
            plain[index] = _string(name, value[index])
        return plain.tolist()
    if value.dtype.kind == "V" or value.dtype.name in ("bfloat16", "float16"):
        value = value.astype(np.float32)
    if value.dtype == np.float32:
        # The shortest number that is this float32, not all digits of the same number as a double.
        value = value.astype("U").astype(np.float64)
    return value.tolist()


def _string(name: str, value: Any) -> Any:
    data = value if isinstance(value, bytes) else str(value).encode()
    if not name.endswith("_bytes"):
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass  # no text: as binary, then
    return {"b64": base64.b64encode(data).decode()}
