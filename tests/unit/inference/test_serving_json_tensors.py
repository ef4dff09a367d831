"""Large requests: read as small ones are, with little memory, a little at a time."""

from __future__ import annotations

import json
import random
import tracemalloc
from http import HTTPStatus

import numpy as np
import pytest

from raytf.inference.serving import rest_api
from raytf.inference.serving.json_tensors import of_columns, of_rows, plain, tensor
from raytf.inference.serving.limits import Refusal
from raytf.inference.signature import DEFAULT, PREDICT, Signature, TensorSpec


def signature(**inputs: TensorSpec) -> dict[str, Signature]:
    return {DEFAULT: Signature(DEFAULT, PREDICT, inputs, {"y": TensorSpec("float32", (None, 1))})}


IMAGE = signature(x=TensorSpec("float32", (None, 8, 4)))
WHOLE = signature(x=TensorSpec("int32", (None, 8, 4)))
FLAT = signature(x=TensorSpec("float32", (None,)))
TEXT = signature(x=TensorSpec("string", (None,)))
TWO = signature(x=TensorSpec("float32", (None, 8, 4)), name=TensorSpec("string", (None,)))


def by_the_book(body: bytes, signatures: dict[str, Signature]) -> dict[str, np.ndarray] | None:
    """What Python's own reader makes of a request; None where it is to be refused."""
    one = signatures[DEFAULT]
    try:
        document = json.loads(body)
        if not isinstance(document, dict) or not document.keys() & {"instances", "inputs"}:
            return None
        is_row = "instances" in document
        values = of_rows(document["instances"], one) if is_row else of_columns(document["inputs"], one)
        return {name: tensor(name, value, one.inputs[name]) for name, value in values.items()}
    except (ValueError, RecursionError, Refusal):
        return None


def read(body: bytes, signatures: dict[str, Signature]) -> dict[str, np.ndarray] | None:
    assert len(body) > 128 << 10
    try:
        return rest_api.parse(body, signatures).inputs
    except Refusal as refused:
        return None if refused.status == HTTPStatus.BAD_REQUEST else {}


def assert_same(found: dict[str, np.ndarray] | None, expected: dict[str, np.ndarray] | None) -> None:
    assert (found is None) == (expected is None)
    for name in expected or {}:
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name])


def rows(count: int, kind: str = "f", seed: int = 0) -> list:
    chance = np.random.default_rng(seed)
    values = chance.normal(size=(count, 8, 4)) if kind == "f" else chance.integers(0, 256, (count, 8, 4))
    return values.tolist()


@pytest.mark.parametrize("indent", [None, 0, 1])
@pytest.mark.parametrize(
    ("document", "signatures"),
    [
        ({"instances": rows(1000)}, IMAGE),
        ({"instances": rows(1500, "i")}, WHOLE),
        ({"instances": rows(1500, "i")}, IMAGE),
        ({"inputs": rows(1000)}, IMAGE),
        ({"signature_name": DEFAULT, "inputs": {"x": rows(1000)}}, IMAGE),
        ({"instances": [{"x": row, "name": "a"} for row in rows(1000)]}, TWO),
        ({"inputs": {"x": rows(1000), "name": ["[1,2]"] * 1000}}, TWO),
        ({"instances": np.arange(60_000.0).tolist()}, FLAT),
        ({"instances": ["text, [1, 2]" * 10] * 3000}, TEXT),
        ({"instances": [float("nan"), float("inf"), -1e-300] * 20_000}, FLAT),
        ({"instances": rows(1000, "f")}, WHOLE),
        ({"instances": [*rows(1000), [[1]]]}, IMAGE),
        ({"instances": [[], *rows(1000)]}, IMAGE),
        ({"instances": [rows(1000)]}, IMAGE),
        ({"instances": [*rows(1000), None]}, IMAGE),
        ({"instances": [2**31] * 20_000}, signature(x=TensorSpec("int32", (None,)))),
        ({"instances": [1e39] * 40_000}, FLAT),
    ],
)
def test_a_large_request_is_read_as_a_small_one_is(document, signatures, indent):
    body = json.dumps(document, indent=indent).encode()
    assert_same(read(body, signatures), by_the_book(body, signatures))


def test_a_large_request_with_a_mistake_is_refused_wherever_it_is():
    chance = random.Random(15)
    body = json.dumps({"instances": rows(1000, "i")}).encode().ljust(140 << 10)
    marks = [b"[", b"]", b",", b"-", b"1", b".", b" ", b'"', b"u", b"{", b"}", b"e", b"0", b"", b"],[", b"[]", b"\xff"]
    for _ in range(150):
        at, mark = chance.randrange(len(body.rstrip())), chance.choice(marks)
        changed = body[:at] + mark + body[at + chance.randrange(2) :]
        try:
            assert_same(read(changed, IMAGE), by_the_book(changed, IMAGE))
        except AssertionError:
            raise AssertionError(f"{mark!r} at {at}: ...{changed[max(0, at - 20) : at + 20]!r}...") from None


def test_a_large_array_takes_little_more_memory_than_its_tensor():
    body = b'{"instances":[' + b"0," * (2 << 20) + b"0]}"
    tracemalloc.start()
    try:
        found = rest_api.parse(body, FLAT).inputs["x"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.nbytes == 4 * ((2 << 20) + 1)
    assert peak < found.nbytes + (12 << 20), "Python's own reader takes 40 MiB and more"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b'{"instances":[' + b"[]," * (1 << 20) + b"[]]}", 400, "lists of numbers of input x is not of expected type"),
        (b'{"instances":[' + b'{"a":1},' * (1 << 20) + b"{}]}", 413, "values beside arrays of numbers"),
        (b'{"instances":' + b"[" * (1 << 20), 413, "values beside arrays of numbers"),
        (b'{"instances":' + b"[" * (1 << 18), 400, "nested too deeply"),
        (b'{"instances":[' + b"[{}," * (1 << 20) + b"1]}", 413, "values beside arrays of numbers"),
        (b'{"instances":[' + b"1" * (3 << 20) + b"]}", 400, "Exceeds the limit"),
        (b'{"instances":["' + "é".encode() * (9 << 20) + b'"]}', 413, "beyond ASCII"),
    ],
)  # fmt: skip
def test_what_would_take_much_memory_is_refused(body, status, text):
    with pytest.raises(Refusal, match=text) as refused:
        rest_api.parse(body, TEXT)
    assert refused.value.status == status


@pytest.mark.parametrize("unit", [b"0,", b"[],", b"[", b'{"a":1},'])
def test_a_body_that_is_refused_takes_little_memory(unit):
    body = b'{"instances":[' + unit * ((8 << 20) // len(unit)) + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(Refusal):
            rest_api.parse(body, IMAGE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * len(body)


@pytest.mark.parametrize("shape", [(3000, 10), (3, 4000, 2), (1, 9000), (9000,), (2, 0), (0, 3), (5000, 1, 1, 1)])
@pytest.mark.parametrize("names", [("y",), ("y", "z_bytes")])
@pytest.mark.parametrize("key", ["instances", "inputs"])
def test_a_large_answer_is_written_as_a_small_one_is(shape, names, key):
    call = rest_api.PredictCall(IMAGE[DEFAULT], {"x": np.zeros((shape[0], 8, 4), np.float32)}, key == "instances")
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    outputs = dict(zip(names, (values, values.astype("S") if values.size else values), strict=False))
    found = json.loads(b"".join(rest_api.answer(outputs, call)))
    expected = {name: json.loads(json.dumps(plain(name, value))) for name, value in outputs.items()}
    if key == "inputs":
        assert found == {"outputs": expected if len(expected) > 1 else expected["y"]}
    elif len(expected) == 1:
        assert found == {"predictions": expected["y"]}
    else:
        assert found == {"predictions": [{n: expected[n][i] for n in expected} for i in range(shape[0])]}
