"""What raytf writes is JSON, of which NaN and infinity are no part."""

from __future__ import annotations

import json
import math

import pytest

from raytf.storage.strict_json import dumps


def strictly(text: str) -> object:
    def refuse(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(value: float):
    document = {
        "metrics": {"loss": value, "accuracy": 0.5},
        "history": [{"step": 1, "loss": value}],
        "pair": (value, 1),
    }
    expected = {"metrics": {"loss": None, "accuracy": 0.5}, "history": [{"step": 1, "loss": None}], "pair": [None, 1]}
    assert strictly(dumps(document)) == expected
    assert strictly(dumps(value)) is None


def test_the_rest_is_as_it_was():
    document = {"step": 3, "loss": 0.1, "why": "NaN", "none": None, "flag": True}
    assert dumps(document, indent=1) == json.dumps(document, indent=1)
    assert dumps({"path": object}, default=str) == json.dumps({"path": object}, default=str)
