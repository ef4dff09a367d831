"""The REST API of TensorFlow Serving: requests of its documentation, answers, and what is refused with which status."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import subprocess
from http import HTTPStatus

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raytf.inference.serving import rest_api
from raytf.inference.serving.limits import Refusal
from raytf.inference.serving.rest_api import RestRoute
from raytf.inference.signature import DEFAULT, PREDICT, Signature, TensorSpec


def signature(name: str = DEFAULT, outputs: dict | None = None, **inputs: TensorSpec) -> dict[str, Signature]:
    return {name: Signature(name, PREDICT, inputs, outputs or {"y": TensorSpec("float32", (None, 1))})}


HALF = signature(x=TensorSpec("float32", (None,)))
IMAGE = signature(x=TensorSpec("float32", (None, 2, 2, 1)))
TEXT = signature(x=TensorSpec("string", (None,)))
# The three named inputs of TensorFlow Serving's documentation.
THREE = signature(
    tag=TensorSpec("string", (None,)), signal=TensorSpec("int32", (None, 5)), sensor=TensorSpec("int64", (None, 2, 2))
)
ROWS = {
    "instances": [
        {"tag": "foo", "signal": [1, 2, 3, 4, 5], "sensor": [[1, 2], [3, 4]]},
        {"tag": "bar", "signal": [3, 4, 1, 2, 5], "sensor": [[4, 5], [6, 8]]},
    ]
}
COLUMNS = {
    "inputs": {
        "tag": ["foo", "bar"],
        "signal": [[1, 2, 3, 4, 5], [3, 4, 1, 2, 5]],
        "sensor": [[[1, 2], [3, 4]], [[4, 5], [6, 8]]],
    }
}


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/v1/models/half_plus_three:predict", RestRoute("predict", "half_plus_three", None)),
        ("POST", "/v1/models/m/versions/123:predict", RestRoute("predict", "m", 123)),
        ("POST", "/v1/models/m:classify", RestRoute("classify", "m", None)),
        ("POST", "/v1/models/a%20b:regress", RestRoute("regress", "a b", None)),
        ("POST", "/V1/Models/m:PREDICT", RestRoute("predict", "m", None)),
        ("GET", "/v1/models/m", RestRoute("status", "m", None)),
        ("GET", "/v1/models/m/versions/2", RestRoute("status", "m", 2)),
        ("GET", "/v1/models/m/metadata", RestRoute("metadata", "m", None)),
        ("GET", "/v1/models/m/versions/2/metadata", RestRoute("metadata", "m", 2)),
    ],
)
def test_paths_are_those_of_tensorflow_serving(method, path, route):
    assert rest_api.route(method, path) == route


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/m:predict", 400),
        ("POST", "/v1/models/m", 400),
        ("POST", "/v1/models/m/versions/x:predict", 400),
        ("DELETE", "/v1/models/m", 400),
        ("POST", "/v1/models/m:explain", 400),
        ("POST", f"/v1/models/m/versions/{'9' * 5000}:predict", 400),
        ("GET", f"/v1/models/m/versions/{'9' * 5000}", 400),
        ("GET", "/v1/models/m/versions/\u0663", 400),
        ("POST", "/v1/models/m/labels/stable:predict", 404),
        ("GET", "/favicon.ico", 404),
    ],
)
def test_other_paths_are_refused(method, path, status):
    with pytest.raises(Refusal) as refused:
        rest_api.route(method, path)
    assert refused.value.status == status


def test_rows_and_columns_of_the_documentation_are_the_same_tensors():
    rows, columns = (rest_api.parse(json.dumps(body).encode(), THREE) for body in (ROWS, COLUMNS))
    assert (rows.is_row, columns.is_row, rows.records) == (True, False, 2)
    for name in THREE[DEFAULT].inputs:
        assert (rows.inputs[name] == columns.inputs[name]).all()
    assert rows.inputs["tag"].tolist() == [b"foo", b"bar"]
    assert (rows.inputs["signal"].dtype, rows.inputs["sensor"].dtype) == (np.int32, np.int64)


@pytest.mark.parametrize(
    ("body", "signatures", "expected"),
    [
        ({"instances": [1.0, 2.0, 5.0]}, HALF, [1, 2, 5]),
        ({"inputs": [1, 2]}, HALF, [1, 2]),
        ({"inputs": {"x": [1, 2]}}, HALF, [1, 2]),
        ({"signature_name": "", "instances": [1]}, HALF, [1]),
        ({"signature_name": DEFAULT, "instances": [{"x": 1}, {"x": 2}]}, HALF, [1, 2]),
        ({"instances": [{"b64": "aW1hZ2UgYnl0ZXM="}, "text"]}, TEXT, [b"image bytes", b"text"]),
        ({"inputs": {"x": [{"b64": "/9j/"}]}}, TEXT, [b"\xff\xd8\xff"]),
        ({"instances": [[[[1], [2]], [[3], [4]]]]}, IMAGE, [[[[1], [2]], [[3], [4]]]]),
    ],
)
def test_tensors_of_a_request(body, signatures, expected):
    assert rest_api.parse(json.dumps(body).encode(), signatures).inputs["x"].tolist() == expected


def test_not_a_number_and_infinity_are_numbers_as_tensorflow_serving_has_it():
    values = rest_api.parse(b'{"instances": [NaN, Infinity, -Infinity, 1e3]}', HALF).inputs["x"]
    np.testing.assert_array_equal(values, np.array([np.nan, np.inf, -np.inf, 1000], np.float32))


@pytest.mark.parametrize(
    ("body", "signatures", "text"),
    [
        (b"", HALF, "The document is empty"),
        (b"{", HALF, "JSON Parse error"),
        (b"\xff\xfe", HALF, "JSON Parse error"),
        (b"[" * 100_000, HALF, "nested too deeply"),
        (b"[1]", HALF, "Is not object"),
        (b"{}", HALF, "Missing 'inputs' or 'instances' key"),
        (b'{"instances": [1], "inputs": [1]}', HALF, "only one of"),
        (b'{"instances": 1}', HALF, "to be an list/array"),
        (b'{"instances": []}', HALF, "No values in 'instances'"),
        (b'{"signature_name": 1, "instances": [1]}', HALF, "must be a string"),
        (b'{"signature_name": "x", "instances": [1]}', HALF, 'name: "x" not found in signature def. It has serving_'),
        (b'{"instances": ["a"]}', HALF, "not of expected type: float32"),
        (b'{"instances": [null]}', HALF, "not of expected type: float32"),
        (b'{"instances": [true]}', HALF, "not of expected type: float32"),
        (b'{"instances": [1e39]}', HALF, "without loss of precision"),
        (b'{"instances": [[1, 2], [3]]}', HALF, "lists of different lengths"),
        (b'{"instances": [[1]]}', HALF, r"has shape \[1,1\]. Expected float32 \[\?\]"),
        (b'{"inputs": 1}', HALF, r"has shape \[\]"),
        (b'{"instances": [1, {"x": 2}]}', HALF, "got object at item 1"),
        (b'{"instances": [{"x": 1}, 2]}', HALF, "got list at item 1"),
        (b'{"instances": [{"z": 1}]}', HALF, "must be equal to: x"),
        (b'{"instances": [1]}', THREE, "expecting list of objects"),
        (b'{"inputs": [1]}', THREE, "expecting an object"),
        (b'{"inputs": {"tag": ["a"]}}', THREE, "Missing named input"),
        (b'{"inputs": {"x": [1], "z": [1]}}', HALF, "does not have named input: z"),
        (b'{"instances": [1]}', TEXT, "not of expected type: string"),
        (b'{"instances": [{"b64": "?"}]}', TEXT, "Unable to base64 decode"),
        (b'{"instances": ["a", ["b"]]}', TEXT, "lists of different"),
        (b'{"instances": ["\\ud800"]}', TEXT, r'"\\ud800" has half of a surrogate pair'),
        (b'{"instances": ["\\ud800"]}', HALF, "not of expected type: float32"),
        (b'{"inputs": ' + b"[" * 65 + b'"a"' + b"]" * 65 + b"}", TEXT, "nested more than 64 deep"),
        (b'{"inputs": ' + b"[" * 900 + b'"a"' + b"]" * 900 + b"}", TEXT, "nested more than 64 deep"),
        (b'{"inputs": ' + b"[" * 64 + b'"a"' + b"]" * 64 + b"}", TEXT, "has shape"),
        (b'{"inputs": ' + b"[" * 65 + b"1" + b"]" * 65 + b"}", HALF, "Expected float32"),
        (b'{"inputs": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}", HALF, "Expected float32|not of expected type"),
        (b'{"instances": [2147483648]}', signature(x=TensorSpec("int32", (None,))), "do not fit int32"),
        (b'{"instances": [1.5]}', signature(x=TensorSpec("int32", (None,))), "not of expected type: int32"),
        (b'{"instances": [123456789012345678901234567890]}', signature(x=TensorSpec("int64", (None,))), "not of expe"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_a_400_that_says_so(body, signatures, text):
    with pytest.raises(Refusal, match=text) as refused:
        rest_api.parse(body, signatures)
    assert refused.value.status == HTTPStatus.BAD_REQUEST


KEYS = st.sampled_from(["x", "b64", "instances", "inputs", "tag", "signature_name"])
#: Halves of surrogate pairs are JSON, too.
TEXTS = st.text(st.characters(), max_size=3)
LEAVES = st.none() | st.booleans() | st.floats() | st.integers() | TEXTS
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


def parsed(body: object, signatures: dict[str, Signature]) -> rest_api.PredictCall | Refusal:
    try:
        return rest_api.parse(json.dumps(body).encode(), signatures)
    except Refusal as refused:
        return refused


@given(JSON, st.sampled_from([HALF, IMAGE, TEXT, THREE]))
def test_any_json_is_parsed_or_refused(document, signatures):
    for found in (parsed(body, signatures) for body in (document, {"instances": document}, {"inputs": document})):
        if isinstance(found, Refusal):
            assert found.status == HTTPStatus.BAD_REQUEST
            assert len(str(found)) < 1000
        else:
            assert all(spec.fits(found.inputs[name].shape) for name, spec in found.signature.inputs.items())


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(body):
    with pytest.raises(Refusal):
        rest_api.parse(body, HALF)


def call_of(body: dict, signatures: dict[str, Signature]) -> rest_api.PredictCall:
    return rest_api.parse(json.dumps(body).encode(), signatures)


@pytest.mark.parametrize(
    ("body", "outputs", "answer"),
    [
        ({"instances": [1, 2]}, {"y": np.float32([[0.2], [1]])}, {"predictions": [[0.2], [1.0]]}),
        ({"inputs": [1, 2]}, {"y": np.float32([[0.2], [1]])}, {"outputs": [[0.2], [1.0]]}),
        (
            {"instances": [1, 2]},
            {"a": np.int64([1, 2]), "b": np.array([True, False])},
            {"predictions": [{"a": 1, "b": True}, {"a": 2, "b": False}]},
        ),
        ({"inputs": [1]}, {"a": np.int64([1]), "b": np.int64(3)}, {"outputs": {"a": [1], "b": 3}}),
        ({"instances": [1]}, {"t": np.array([b"text"], object)}, {"predictions": ["text"]}),
        ({"instances": [1]}, {"t_bytes": np.array([b"text"], object)}, {"predictions": [{"b64": "dGV4dA=="}]}),
    ],
)
def test_answers_are_those_of_tensorflow_serving(body, outputs, answer):
    assert json.loads(rest_api.respond(outputs, call_of(body, HALF))) == answer


def test_rows_that_the_model_does_not_give_are_refused():
    with pytest.raises(Refusal, match="does not have one row for each of the 2 instances"):
        rest_api.respond({"y": np.float32([1])}, call_of({"instances": [1, 2]}, HALF))


@given(hnp.arrays(np.float32, (3, 2), elements=st.floats(width=32)))
def test_numbers_come_back_as_they_were(values):
    text = rest_api.respond({"y": values}, call_of({"instances": [1, 2, 3]}, HALF))
    np.testing.assert_array_equal(np.array(json.loads(text)["predictions"], np.float32), values)


@pytest.mark.parametrize(
    "body", [b'{"examples": [{"x": 1}]}', b'{"signature_name": "serving_default", "examples": []}']
)
def test_models_of_keras_have_no_classify(body):
    refused = rest_api.refuse_examples("classify", body, HALF)
    assert refused.status == HTTPStatus.BAD_REQUEST
    assert (
        "Expected classify signature method_name to be tensorflow/serving/classify. Was: tensorflow/serving/predict"
        in str(refused)
    )


@pytest.mark.parametrize(
    ("header", "is_allowed"),
    [
        ("Bearer secret", True),
        ("bearer secret", True),
        ("Bearer secre", False),
        ("Basic secret", False),
        ("secret", False),
        (None, False),
        ("", False),
        ("Bearer s\udcffx", False),
    ],
)
def test_a_token_is_compared_by_its_digest(header, is_allowed):
    assert rest_api.is_allowed(header, hashlib.sha256(b"secret").hexdigest()) == is_allowed
    assert rest_api.is_allowed(header, None)


def test_a_large_body_is_a_413():
    rest_api.check_size(100, 100)
    with pytest.raises(Refusal, match="larger than the limit") as refused:
        rest_api.check_size(101, 100)
    assert refused.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def test_status_and_errors_have_the_fields_of_tensorflow_serving():
    assert json.loads(rest_api.status([(2, "AVAILABLE", ""), (1, "END", "broken")])) == {
        "model_version_status": [
            {"version": "2", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}},
            {"version": "1", "state": "END", "status": {"error_code": "UNKNOWN", "error_message": "broken"}},
        ]
    }
    assert json.loads(rest_api.failure('a "quoted" text')) == {"error": 'a "quoted" text'}


@pytest.mark.parametrize(
    "signatures", [HALF, IMAGE, TEXT, THREE, signature(x=TensorSpec("float32", (None, 28, 28, 1)))]
)
def test_the_example_is_a_request_that_the_model_takes(signatures):
    command = rest_api.example(signatures[DEFAULT], "http://h/v1/models/m:predict", "Authorization: Bearer T")
    assert "-H 'Authorization: Bearer T'" in command
    if command.startswith("python"):
        first = shlex.split(command.partition(" | ")[0])
        body = subprocess.run(first, capture_output=True, check=True).stdout
    else:
        parts = shlex.split(command)
        body = parts[parts.index("-d") + 1].encode()
    assert rest_api.parse(body, signatures).records == 1


def test_base64_is_the_way_for_bytes_both_ways():
    data = bytes(range(256))
    call = call_of({"instances": [{"b64": base64.b64encode(data).decode()}]}, TEXT)
    assert call.inputs["x"].tolist() == [data]
    assert (
        json.loads(rest_api.respond({"o_bytes": call.inputs["x"]}, call))["predictions"][0]["b64"]
        == base64.b64encode(data).decode()
    )


@pytest.mark.parametrize(
    ("records", "numbers", "batch_size", "expected"),
    [
        (0, 4, 64, []),
        (10, 64, 64, []),
        (1024, 64, 64, []),
        (1025, 64, 64, [(0, 1024), (1024, 1025)]),
        (3000, 64, 2000, [(0, 2000), (2000, 3000)]),
        (2, 1 << 20, 1, [(0, 1), (1, 2)]),
        (1, 1 << 20, 64, []),
    ],
)
def test_a_large_call_goes_through_the_model_in_parts(records, numbers, batch_size, expected):
    from raytf.inference.serving.replica import parts

    one = signature(x=TensorSpec("float32", (None, numbers)))[DEFAULT]
    assert (
        parts(rest_api.PredictCall(one, {"x": np.zeros((records, numbers), np.float32)}, True), batch_size) == expected
    )
