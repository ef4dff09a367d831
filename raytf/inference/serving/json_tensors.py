"""Tensors of a request from its JSON values, as TensorFlow Serving has them."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from raytf.inference.serving.errors import bad, excerpt
from raytf.inference.serving.json_numbers import Numbers
from raytf.inference.signature import Signature, TensorSpec, shape_text

#: That a numpy array may have.
_MOST_DIMENSIONS = 64


def of_rows(instances: Any, signature: Signature) -> dict[str, Any]:
    """Values of each input, of a list of instances."""
    names = set(signature.inputs)
    if isinstance(instances, Numbers) and len(names) == 1:
        return {next(iter(names)): instances}
    if isinstance(instances, Numbers):
        instances = [[]]  # lists, whatever is in them
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
    """Values of each input, of what a request has under its name, or of the only one."""
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
    """A JSON value as the tensor that a signature wants."""
    if spec.dtype == "string":
        array = _strings(name, value)
    elif isinstance(value, Numbers):
        array = value.array(lambda some: _as(np.asarray(some), name, some, spec))
    else:
        if isinstance(value, list) and any(isinstance(part, Numbers) for part in value):
            value = [part.values() if isinstance(part, Numbers) else part for part in value]
        try:
            array = np.asarray(value)
        except (ValueError, RecursionError):
            raise bad(f"Input {name}: lists of different lengths. Expected {spec.text()}.") from None
        array = _as(array, name, value, spec)
    if not spec.fits(array.shape):
        raise bad(f"Input {name} has shape {shape_text(array.shape)}. Expected {spec.text()}.")
    return array


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
    shape: list[int] = []
    at = value
    while isinstance(at, list):
        if len(shape) == _MOST_DIMENSIONS:
            raise bad(f"Input {name}: lists are nested more than {_MOST_DIMENSIONS} deep.")
        shape.append(len(at))
        at = at[0] if at else None
    flat: list[bytes] = []

    def walk(part: Any, level: int) -> None:
        if isinstance(part, list):
            if level >= len(shape) or len(part) != shape[level]:
                raise bad(f"Input {name}: lists of different lengths. Expected one shape for all.")
            for inner in part:
                walk(inner, level + 1)
        elif level != len(shape):
            raise bad(f"Input {name}: lists of different depths. Expected one shape for all.")
        else:
            flat.append(_text(name, part))

    walk(value, 0)
    array = np.empty(len(flat), object)
    array[:] = flat
    return array.reshape(shape)


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
