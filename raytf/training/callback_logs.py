"""Logs of callbacks: as Keras passes them to hooks, and as a run's history keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

#: What an entry of the history says beside its logs.
_OWN = ("epoch", "step")


class LogsReader(keras.callbacks.Callback):
    """The last callback: it sees the logs of an epoch with what the others have added to them.

    Attributes:
        logs: of the newest epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.logs = dict(logs or {})


def for_hooks(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs for hooks: as in Keras, a metric with several numbers is an array."""
    return {name: np.asarray(each, np.float32) if isinstance(each, list) else each for name, each in logs.items()}


def for_history(logs: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return logs as JSON values: numbers, texts, and lists and dicts of them.

    Args:
        say: called with a line about values that cannot be kept.
    """
    kept = {}
    for name, value in logs.items():
        try:
            if not isinstance(name, str) or name in _OWN:
                raise TypeError("expected a text that is neither 'epoch' nor 'step'")
            kept[name] = _plain(value)
        except TypeError as error:
            say(f"WARNING: the history leaves out {name!r}, which a callback has added to the logs: {error}")
    return kept


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (np.generic, np.ndarray)) or keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        plain = np.asarray(keras.ops.convert_to_numpy(value)).tolist()
        return _plain(plain)
    raise TypeError(f"its value is a {type(value).__name__}")
