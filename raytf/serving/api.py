"""The REST API of TensorFlow Serving as pure functions: what a request asks for, its tensors, and the answer.

Paths, fields and kinds of errors are those of TensorFlow Serving's model server
(https://www.tensorflow.org/tfx/serving/api_rest); its clients need no change.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
import re
import urllib.parse
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np

from raytf.errors import one_line
from raytf.signature import DEFAULT, Signature, TensorSpec, records, shape_text

_PLACE = r"(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
_CALL = re.compile(rf"/v1/models/(?P<model>[^/:]+){_PLACE}:(?P<verb>predict|classify|regress)", re.IGNORECASE)
_LOOK = re.compile(rf"/v1/models/(?P<model>[^/:]+){_PLACE}(?P<verb>/metadata)?", re.IGNORECASE)
HEALTH = "/healthz"
#: An example with more numbers than that is computed, not written out.
_SHORT = 8


class Refusal(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Route:
    """What a path asks for.

    Attributes:
        verb: predict, classify, regress, status or metadata.
        version: that was named; None for the default one.
    """

    verb: str
    model: str
    version: int | None


@dataclass(frozen=True)
class Call:
    """A prediction that was asked for.

    Attributes:
        is_row: `instances`, not `inputs`: the answer is a row for each.
    """

    signature: Signature
    inputs: dict[str, np.ndarray]
    is_row: bool

    @property
    def records(self) -> int | None:
        """Records in it; None where its inputs have different numbers of them."""
        return records(self.inputs)


def route(method: str, path: str) -> Route:
    """What is asked for.

    Raises:
        Refusal: nothing that there is.
    """
    pattern = {"POST": _CALL, "GET": _LOOK}.get(method)
    found = pattern.fullmatch(path) if pattern is not None else None
    if found is None:
        if not path.lower().startswith("/v1/"):
            raise Refusal(HTTPStatus.NOT_FOUND, f"Not found: {path}. Expected /v1/models/MODEL:predict.")
        raise Refusal(HTTPStatus.BAD_REQUEST, f"Malformed request: {method} {path}")
    parts = found.groupdict()
    model = urllib.parse.unquote(parts["model"])
    if parts["label"]:
        raise Refusal(
            HTTPStatus.NOT_FOUND, f"Unrecognized servable version label: {parts['label']}. Name a version instead."
        )
    verb = (parts["verb"] or "status").strip("/").lower()
    return Route(verb, model, None if parts["version"] is None else int(parts["version"]))


def is_allowed(header: str | None, digest: str | None) -> bool:
    """Whether an Authorization header has the token of which only a SHA-256 is known here; None allows everybody."""
    if digest is None:
        return True
    scheme, _, token = (header or "").partition(" ")
    given = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).hexdigest()
    # Compared in a time that does not depend on where they differ.
    return hmac.compare_digest(given, digest) and scheme.lower() == "bearer"


def check_size(size: int, limit: int) -> None:
    """Refuse a body above the limit.

    Raises:
        Refusal: says the limit.
    """
    if size > limit:
        raise Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body is larger than the limit of {limit / 2**20:g} MiB. Send fewer instances at a time, or start the "
            "server with a larger --max-body-mb.",
        )


def unpack(body: bytes, encoding: str | None, limit: int) -> bytes:
    """A body as it was before it was compressed.

    Raises:
        Refusal: it is too large, broken, or compressed in another way than by gzip.
    """
    if encoding in (None, "", "identity"):
        return body
    if encoding != "gzip":
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding} is not known. Expected gzip.")
    unzip = zlib.decompressobj(31)
    try:
        plain = unzip.decompress(body, limit + 1)
    except zlib.error as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"The body is no gzip: {error}") from error
    check_size(len(plain), limit)
    return plain


def parse(body: bytes, signatures: Mapping[str, Signature]) -> Call:
    """The tensors of a predict request.

    Raises:
        Refusal: says what is wrong, and what was expected.
    """
    document = _document(body)
    name = document.get("signature_name", DEFAULT)
    if not isinstance(name, str):
        raise _bad("'signature_name' key must be a string value.")
    name = name or DEFAULT
    if name not in signatures:
        known = ", ".join(sorted(signatures))
        raise _bad(f'Serving signature name: "{name}" not found in signature def. It has {known}.')
    signature = signatures[name]
    has_rows, has_columns = "instances" in document, "inputs" in document
    if has_rows and has_columns:
        raise _bad("Not formatted correctly: expecting only one of 'inputs' or 'instances' keys to exist.")
    if not (has_rows or has_columns):
        raise _bad("Missing 'inputs' or 'instances' key")
    values = _rows(document["instances"], signature) if has_rows else _columns(document["inputs"], signature)
    inputs = {key: _tensor(key, value, signature.inputs[key]) for key, value in values.items()}
    return Call(signature, inputs, has_rows)


def respond(outputs: Mapping[str, np.ndarray], call: Call) -> bytes:
    """The answer to a predict request.

    Raises:
        Refusal: the outputs do not come in rows, as was asked for.
    """
    if not call.is_row:
        columns = {name: _plain(name, value) for name, value in outputs.items()}
        return _json({"outputs": columns if len(columns) > 1 else next(iter(columns.values()))})
    rows = call.records
    for name, value in outputs.items():
        if value.ndim == 0 or len(value) != rows:
            raise _bad(
                f"Tensor name: {name} has no row for each of the {rows} instances, its shape is "
                f"{shape_text(value.shape)}. Use 'inputs' instead of 'instances'."
            )
    columns = {name: _plain(name, value) for name, value in outputs.items()}
    if len(columns) == 1:
        return _json({"predictions": next(iter(columns.values()))})
    return _json({"predictions": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]})


def refuse_examples(verb: str, body: bytes, signatures: Mapping[str, Signature]) -> Refusal:
    """The answer to a classify or regress request, which takes models of tf.Example; those of Keras are none."""
    name = _document(body).get("signature_name") or DEFAULT
    signature = signatures.get(name) if isinstance(name, str) else None
    if signature is None:
        return _bad(f'Serving signature name: "{name}" not found in signature def.')
    return Refusal(
        HTTPStatus.BAD_REQUEST,
        f"Expected {verb} signature method_name to be tensorflow/serving/{verb}. Was: {signature.method}. "
        "raytf serves :predict only.",
    )


def status(states: Iterable[tuple[int, str, str]]) -> bytes:
    """The answer to a question for the model's status.

    Args:
        states: (version, state, what is wrong with it), the newest first.
    """
    rows = [
        {
            "version": str(number),
            "state": state,
            "status": {"error_code": "UNKNOWN" if problem else "OK", "error_message": problem},
        }
        for number, state, problem in states
    ]
    return _json({"model_version_status": rows}, indent=1)


def metadata(model: str, version: int, definition: Mapping[str, Any]) -> bytes:
    """The answer to a question for the model's signatures."""
    return _json(
        {
            "model_spec": {"name": model, "signature_name": "", "version": str(version)},
            "metadata": {"signature_def": {"signature_def": definition}},
        },
        indent=1,
    )


def healthy(model: str, version: int) -> bytes:
    """The answer to a health check."""
    return _json({"status": "ok", "model": model, "version": str(version)})


def failure(message: str) -> bytes:
    """The body of any error."""
    return _json({"error": message})


def example(signature: Signature, url: str, header: str = "") -> str:
    """A command that asks for a prediction of one record of zeros, for people to copy.

    Args:
        header: that the request needs, beside those of curl.
    """
    rows = {}
    short = True
    for name, spec in signature.inputs.items():
        shape = [1 if size is None else size for size in (spec.shape or (None,))[1:]]
        zero = '"text"' if spec.dtype == "string" else "False" if spec.dtype == "bool" else "0"
        short = short and math.prod(shape) <= _SHORT
        for size in reversed(shape):
            zero = f"[{', '.join([zero] * size)}]" if math.prod(shape) <= _SHORT else f"[{zero}]*{size}"
        rows[name] = zero
    row = "{" + ", ".join(f'"{name}": {value}' for name, value in rows.items()) + "}"
    row = row if len(rows) > 1 else next(iter(rows.values()), "0")
    given = f"-H '{header}' " if header else ""
    if short:
        return f"curl -s {given}-d '{{\"instances\": [{row.replace('False', 'false')}]}}' {url}"
    return f"python -c 'import json; print(json.dumps({{\"instances\": [{row}]}}))' | curl -s {given}-d @- {url}"


def _document(body: bytes) -> dict[str, Any]:
    if not body:
        raise _bad("JSON Parse error: The document is empty")
    try:
        document = json.loads(body)
    except RecursionError:
        raise _bad("JSON Parse error: lists are nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise _bad(f"JSON Parse error: {one_line(error, 200)}") from error
    if not isinstance(document, dict):
        raise _bad(f"JSON Value: {_short(document)} Is not object")
    return document


def _rows(instances: Any, signature: Signature) -> dict[str, Any]:
    names = set(signature.inputs)
    if not isinstance(instances, list):
        raise _bad("Excepting 'instances' to be an list/array")
    if not instances:
        raise _bad("No values in 'instances' array")
    if not _is_object(instances[0]):
        if len(names) > 1:
            raise _bad(
                "instances is a plain list, but expecting list of objects as multiple input tensors required: "
                f"{', '.join(sorted(names))}"
            )
        for i, row in enumerate(instances):
            if _is_object(row):
                raise _bad(f"Expecting value/list but got object at item {i} of input list")
        return {next(iter(names)): instances}
    for i, row in enumerate(instances):
        if not _is_object(row):
            raise _bad(f"Expecting object but got list at item {i} of input list")
        if set(row) != names:
            raise _bad(
                f"Failed to process element: {i} of 'instances' list. Its keys {', '.join(sorted(row))} must be equal "
                f"to: {','.join(sorted(names))}"
            )
    return {name: [row[name] for row in instances] for name in sorted(names)}


def _columns(inputs: Any, signature: Signature) -> dict[str, Any]:
    names = sorted(signature.inputs)
    if not _is_object(inputs):
        if len(names) > 1:
            raise _bad(
                "inputs is a plain value/list, but expecting an object as multiple input tensors required: "
                f"{', '.join(names)}"
            )
        return {names[0]: inputs}
    for name in names:
        if name not in inputs:
            raise _bad(f"Missing named input: {name} in 'inputs' object.")
    for name in inputs:
        if name not in signature.inputs:
            raise _bad(f"JSON object: does not have named input: {name}. Expected {', '.join(names)}.")
    return {name: inputs[name] for name in names}


def _tensor(name: str, value: Any, spec: TensorSpec) -> np.ndarray:
    if spec.dtype == "string":
        array = _strings(name, value)
    else:
        try:
            array = np.asarray(value)
        except (ValueError, RecursionError):
            raise _bad(f"Input {name}: lists of different lengths. Expected {spec.text()}.") from None
        array = _as(array, name, value, spec)
    if not spec.fits(array.shape):
        raise _bad(f"Input {name} has shape {shape_text(array.shape)}. Expected {spec.text()}.")
    return array


def _as(array: np.ndarray, name: str, value: Any, spec: TensorSpec) -> np.ndarray:
    dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
    takes = {"f": "fiu", "c": "fiu", "i": "iu", "u": "iu", "b": "b"}.get(dtype.kind, "")
    if array.dtype.kind not in takes and array.size:
        raise _bad(f"JSON Value: {_short(value)} of input {name} is not of expected type: {spec.dtype}")
    if dtype.kind in "iu" and array.size:
        bounds = np.iinfo(dtype)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise _bad(f"Input {name}: numbers from {array.min()} to {array.max()} do not fit {spec.dtype}.")
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f" and np.isinf(cast).any() and not np.isinf(array).any():
        raise _bad(f"Cannot convert JSON value of input {name} to {spec.dtype} without loss of precision.")
    return cast


def _strings(name: str, value: Any) -> np.ndarray:
    shape: list[int] = []
    at = value
    while isinstance(at, list):
        shape.append(len(at))
        at = at[0] if at else None
    flat: list[bytes] = []

    def walk(part: Any, level: int) -> None:
        if isinstance(part, list):
            if level >= len(shape) or len(part) != shape[level]:
                raise _bad(f"Input {name}: lists of different lengths. Expected one shape for all.")
            for inner in part:
                walk(inner, level + 1)
        elif level != len(shape):
            raise _bad(f"Input {name}: lists of different depths. Expected one shape for all.")
        else:
            flat.append(_text(name, part))

    walk(value, 0)
    array = np.empty(len(flat), object)
    array[:] = flat
    return array.reshape(shape)


def _text(name: str, part: Any) -> bytes:
    if isinstance(part, str):
        return part.encode()
    if _is_base64(part):
        try:
            return base64.b64decode(part["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise _bad(f"Unable to base64 decode input {name}: {error}") from error
    raise _bad(f'JSON Value: {_short(part)} of input {name} is not of expected type: string or {{"b64": "..."}}')


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not _is_base64(value)


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str)


def _plain(name: str, value: np.ndarray) -> Any:
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


def _json(document: Any, indent: int | None = None) -> bytes:
    return json.dumps(document, indent=indent).encode()


def _short(value: Any, limit: int = 80) -> str:
    text = one_line(json.dumps(value))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _bad(message: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, message)
