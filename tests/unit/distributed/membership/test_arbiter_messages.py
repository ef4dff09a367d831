"""What a worker and the arbiter tell each other is checked where it is read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.distributed.membership.arbiter_messages import (
    Dismiss,
    Greeting,
    Join,
    Leave,
    MessageError,
    Over,
    Want,
    of_arbiter,
    of_worker,
)
from raytf.distributed.membership.generations import Generation, Place

JOIN = {"address": "h:1", "wanted": 2, "order": 1}
LEAVE = {"number": 1, "address": "[::1]:9", "step": 7, "unreached": ["b"]}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"join": JOIN}, Join(Place("h:1", order=1), 2)),
        ({"leave": LEAVE}, Leave(1, Place("[::1]:9", 7), ("b",))),
        ({"leave": {**LEAVE, "step": -1, "unreached": []}}, Leave(1, Place("[::1]:9", -1), ())),
        ({"dismiss": ["a"], "after": []}, Dismiss(("a",), ())),
        ({"wanted": 3}, Want(3)),
        ({"over": None}, Over(None)),
        ({"over": {"steps": 3}}, Over({"steps": 3})),
    ],
)
def test_what_a_worker_says_is_understood(message: dict[str, Any], expected: Any):
    assert of_worker(json.dumps(message).encode()) == expected


@pytest.mark.parametrize(
    ("message", "text"),
    [
        *(({"wanted": wanted}, "wanted: expected a whole number from 1 to 1000000")
          for wanted in ("2", 0, -1, 1.5, True, None, [], 10**9)),
        ({"join": {**JOIN, "wanted": "2"}}, "wanted"),
        ({"join": {**JOIN, "order": "a"}}, "order"),
        ({"join": {**JOIN, "order": -1}}, "order"),
        ({"join": {**JOIN, "address": "h"}}, "address: expected HOST:PORT"),
        ({"join": {**JOIN, "address": "h:70000"}}, "address: expected HOST:PORT"),
        ({"join": {**JOIN, "address": "h" * 300 + ":1"}}, "address: expected 1 to 256 characters"),
        ({"join": 5}, "expected join, leave"),
        ({"leave": {}}, "address"),
        ({"leave": {**LEAVE, "number": 0}}, "number"),
        ({"leave": {**LEAVE, "step": -2}}, "step"),
        ({"leave": {**LEAVE, "unreached": "b"}}, "unreached: expected a list of names"),
        ({"leave": {**LEAVE, "unreached": [5]}}, "unreached"),
        ({"dismiss": 5}, "dismiss"),
        ({"dismiss": ["a"]}, "after"),
        ({}, "expected join, leave"),
        ([], "expected a JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_message_is_said(message: Any, text: str):
    with pytest.raises(MessageError, match=text):
        of_worker(json.dumps(message).encode())


@pytest.mark.parametrize("line", [b"", b"\n", b"{", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_is_refused(line: bytes):
    for read in (of_worker, Greeting.of_line, lambda line: of_arbiter(line, "a")):
        with pytest.raises(MessageError):
            read(line)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*JOIN, *LEAVE, "a"]), inner),
    max_leaves=8,
)
KINDS = ["join", "leave", "dismiss", "after", "wanted", "over", "generation", "nonce", "end", "pause", "lost", "name"]


@given(st.dictionaries(st.sampled_from(KINDS), ANYTHING))
def test_any_message_is_understood_or_refused(message: dict[str, Any]):
    line = json.dumps(message).encode()
    for read in (of_worker, Greeting.of_line, lambda line: of_arbiter(line, "a")):
        try:
            read(line)
        except MessageError:
            continue


GENERATION = Generation(3, ("a", "b"), ("h:1", "h:2"), (7, -1), lost=1)


def told(**changes: Any) -> bytes:
    return json.dumps({"generation": {**asdict(GENERATION), **changes}, "nonce": "00"}).encode()


def test_what_the_arbiter_says_is_understood():
    assert of_arbiter(told(), "b").answer["generation"] == GENERATION
    assert of_arbiter(b'{"lost": 3, "left": 3}', "a").numbers == {"lost": 3, "left": 3}
    assert of_arbiter(b'{"end": "why"}', "a").answer == {"end": "why", "unreachable": False}
    assert of_arbiter(b'{"over": null}', "a").answer == {"over": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"members": ["b", "c"]},
        {"addresses": ["h:1"]},
        {"steps": [7]},
        {"steps": [7, "8"]},
        {"number": 0},
        {"lost": -1},
    ],
)
def test_a_generation_that_cannot_be_is_refused(changes: dict[str, Any]):
    with pytest.raises(MessageError):
        of_arbiter(told(**changes), "a")
