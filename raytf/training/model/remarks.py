"""Lines that the user should read before training starts, noted in the model by what builds and traces it."""

from __future__ import annotations

import keras

_NOTED = "_raytf_remarks"


def add(model: keras.Model, line: str) -> None:
    """Note a line."""
    vars(model).setdefault(_NOTED, []).append(line)


def take(model: keras.Model) -> list[str]:
    """Return the lines that were noted since the last call."""
    return vars(model).pop(_NOTED, [])
