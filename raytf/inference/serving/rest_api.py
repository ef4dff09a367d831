"""The REST API of TensorFlow Serving as pure functions: routes, tensors of requests, and answers.

Paths, fields and kinds of errors are the same as those of TensorFlow Serving's model server
(https://www.tensorflow.org/tfx/serving/api_rest), so its clients need no change.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np

from raytf.errors import one_line
from raytf.inference.serving.json_tensors import (
    excerpt,
    of_columns,
    of_rows,
    take_numbers,
    tensor,
    text_of,
    text_of_rows,
)
from raytf.inference.serving.limits import Refusal, bad
from raytf.inference.signature import DEFAULT, Signature, records, shape_text

_PLACE = r"(?:/versions/(?P<version>[0-9]{1,19})|/labels/(?P<label>[^/:]+))?"
_CALL = re.compile(rf"/v1/models/(?P<model>[^/:]+){_PLACE}:(?P<verb>predict|classify|regress)", re.IGNORECASE)
_STATUS = re.compile(rf"/v1/models/(?P<model>[^/:]+){_PLACE}(?P<verb>/metadata)?", re.IGNORECASE)
HEALTH = "/healthz"
#: The most numbers that an example command spells out.
_SHORT = 8
#: In a body above this size, arrays of numbers are read without a Python object for each number.
_LARGE = 128 << 10


@dataclass(frozen=True)
class RestRoute:
    """A parsed path.

    Attributes:
        verb: predict, classify, regress, status or metadata.
        version: the version in the path; None for the default version.
    """

    verb: str
    model: str
    version: int | None


@dataclass(frozen=True)
class PredictCall:
    """A requested prediction; with `instances` instead of `inputs`, its inputs and its answer are by row."""

    signature: Signature
    inputs: dict[str, np.ndarray]
    is_row: bool

    @property
    def records(self) -> int | None:
        """The number of records, or None if inputs have different numbers of records."""
        return records(self.inputs)


def route(method: str, path: str) -> RestRoute:
    """Return the route of a path.

    Raises:
        Refusal: there is no such path.
    """
    pattern = {"POST": _CALL, "GET": _STATUS}.get(method)
    match = pattern.fullmatch(path) if pattern is not None else None
    if match is None:
        if not path.lower().startswith("/v1/"):
            raise Refusal(HTTPStatus.NOT_FOUND, f"Not found: {path}. Expected /v1/models/MODEL:predict.")
        raise Refusal(HTTPStatus.BAD_REQUEST, f"Malformed request: {method} {path}")
    parts = match.groupdict()
    model = urllib.parse.unquote(parts["model"])
    if parts["label"]:
        raise Refusal(
            HTTPStatus.NOT_FOUND, f"Unrecognized servable version label: {parts['label']}. Name a version instead."
        )
    verb = (parts["verb"] or "status").strip("/").lower()
    return RestRoute(verb, model, None if parts["version"] is None else int(parts["version"]))


def is_allowed(header: str | None, digest: str | None) -> bool:
    """Return whether an Authorization header has the token with this SHA-256; if it is None, allow any header."""
    if digest is None:
        return True
    scheme, _, token = (header or "").partition(" ")
    sent = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).hexdigest()
    # The time of this comparison does not depend on where the two hashes differ.
    return hmac.compare_digest(sent, digest) and scheme.lower() == "bearer"


def check_token(header: str | None, digest: str | None) -> None:
    """Refuse an Authorization header without the right token.

    Raises:
        Refusal: the header has no token or a wrong one.
    """
    if not is_allowed(header, digest):
        raise Refusal(HTTPStatus.UNAUTHORIZED, "Expected the header Authorization: Bearer TOKEN, with the right token.")


def check_model(asked: str, served: str) -> None:
    """Refuse a path that names another model.

    Raises:
        Refusal: another model is served; the message names it.
    """
    if asked != served:
        raise Refusal(HTTPStatus.NOT_FOUND, f"Servable not found for request: Latest({asked}). Served: {served}.")


def check_size(size: int, limit: int) -> None:
    """Refuse a body above the limit.

    Raises:
        Refusal: the body is too large; the message has the limit.
    """
    if size > limit:
        raise Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body is larger than the limit of {limit / 2**20:g} MiB. Send fewer instances at a time, or start the "
            "server with a larger --max-body-mb.",
        )


def parse(body: bytes | bytearray, signatures: Mapping[str, Signature]) -> PredictCall:
    """Return the tensors of a predict request.

    Raises:
        Refusal: the request is wrong; the message says what was expected.
    """
    document = _document(body)
    name = document.get("signature_name", DEFAULT)
    if not isinstance(name, str):
        raise bad("'signature_name' key must be a string value.")
    name = name or DEFAULT
    if name not in signatures:
        known = ", ".join(sorted(signatures))
        raise bad(f'Serving signature name: "{name}" not found in signature def. It has {known}.')
    signature = signatures[name]
    has_rows, has_columns = "instances" in document, "inputs" in document
    if has_rows and has_columns:
        raise bad("Not formatted correctly: expecting only one of 'inputs' or 'instances' keys to exist.")
    if not (has_rows or has_columns):
        raise bad("Missing 'inputs' or 'instances' key")
    values = of_rows(document["instances"], signature) if has_rows else of_columns(document["inputs"], signature)
    inputs = {key: tensor(key, value, signature.inputs[key]) for key, value in values.items()}
    return PredictCall(signature, inputs, has_rows)


def respond(outputs: Mapping[str, np.ndarray], call: PredictCall) -> bytes:
    """Return the answer to a predict request.

    Raises:
        Refusal: the call is by row, and an output does not have one row for each.
    """
    return b"".join(answer(outputs, call))


def answer(outputs: Mapping[str, np.ndarray], call: PredictCall) -> Iterator[bytes]:
    """Yield the answer to a predict request, in parts.

    Raises:
        Refusal: the call is by row, and an output does not have one row for each.
    """
    single = next(iter(outputs)) if len(outputs) == 1 else None
    if not call.is_row:
        yield b'{"outputs": '
        for i, (name, value) in enumerate(outputs.items()):
            if single is None:
                yield f"{', ' if i else '{'}{json.dumps(name)}: ".encode()
            yield from text_of(name, value)
        yield b"}" if single is not None else b"}}"
        return
    rows = call.records
    for name, value in outputs.items():
        if value.ndim == 0 or len(value) != rows:
            raise bad(
                f"Tensor name: {name} does not have one row for each of the {rows} instances: its shape is "
                f"{shape_text(value.shape)}. Use 'inputs' instead of 'instances'."
            )
    yield b'{"predictions": '
    yield from text_of(single, outputs[single]) if single is not None else text_of_rows(outputs)
    yield b"}"


def refuse_examples(verb: str, body: bytes | bytearray, signatures: Mapping[str, Signature]) -> Refusal:
    """Return the answer to a classify or regress request, which needs a model that takes tf.Example."""
    name = _document(body).get("signature_name") or DEFAULT
    signature = signatures.get(name) if isinstance(name, str) else None
    if signature is None:
        return bad(f'Serving signature name: "{name}" not found in signature def.')
    return Refusal(
        HTTPStatus.BAD_REQUEST,
        f"Expected {verb} signature method_name to be tensorflow/serving/{verb}. Was: {signature.method}. "
        "raytf serves :predict only.",
    )


def status(states: Iterable[tuple[int, str, str]]) -> bytes:
    """Return the answer to a status request, from (version, state, problem) of each version, the newest first."""
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
    """Return the answer to a metadata request, which has the model's signatures."""
    return _json(
        {
            "model_spec": {"name": model, "signature_name": "", "version": str(version)},
            "metadata": {"signature_def": {"signature_def": definition}},
        },
        indent=1,
    )


def healthy(model: str, version: int) -> str:
    """Return the answer to a health check."""
    return json.dumps({"status": "ok", "model": model, "version": str(version)})


def failure(message: str) -> bytes:
    """Return the body of an error's answer."""
    return _json({"error": message})


def example(signature: Signature, url: str, header: str = "") -> str:
    """Return a shell command that requests a prediction for a record of zeros, with an additional header if given."""
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
    option = f"-H '{header}' " if header else ""
    if short:
        return f"curl -s {option}-d '{{\"instances\": [{row.replace('False', 'false')}]}}' {url}"
    return f"python -c 'import json; print(json.dumps({{\"instances\": [{row}]}}))' | curl -s {option}-d @- {url}"


def _document(body: bytes | bytearray) -> dict[str, Any]:
    if not body:
        raise bad("JSON Parse error: The document is empty")
    text, put_back = take_numbers(body) if len(body) > _LARGE else (body, None)
    try:
        document = json.loads(text)
    except RecursionError:
        raise bad("JSON Parse error: lists are nested too deeply") from None
    except ValueError as error:  # including UnicodeDecodeError
        raise bad(f"JSON Parse error: {one_line(error, 200)}") from error
    if not isinstance(document, dict):
        raise bad(f"JSON Value: {excerpt(document)} Is not object")
    return document if put_back is None else put_back(document)


def _json(document: Any, indent: int | None = None) -> bytes:
    return json.dumps(document, indent=indent).encode()
