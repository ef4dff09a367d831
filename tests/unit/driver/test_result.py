"""The last lines that a person sees of a run."""

from __future__ import annotations

import pytest

from raytf.driver.result import summary

DOCUMENT = {
    "steps": 40,
    "metrics": {"loss": 0.25},
    "samples_per_second": 1234.4,
    "imbalance_seconds": 0.0,
    "restarts": 1,
    "export": {"saved_model": "/runs/a/export/1"},
}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ({}, ""),
        ({"start": 50.0, "train": 2.0}, ""),  # a first run of a minute is mostly start: 4 % would read as a failure
        ({"start": 50.0, "train": 950.0}, "goodput 95%, "),
    ],
)
def test_goodput_is_told_of_runs_that_lasted(seconds: dict[str, float], told: str):
    document = {**DOCUMENT, "seconds": seconds, "goodput": seconds.get("train", 0.0) / (sum(seconds.values()) or 1.0)}
    first, last = summary(document).splitlines()
    assert first == "finished: 40 steps, loss 0.25"
    assert last == f"1,234 samples/s, 1 restart, {told}model in /runs/a/export/1"
