"""The objective of `--keep-best`: which of two values of a metric is better."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytf.errors import ConfigError

#: Parts of the names of metrics and losses, from Keras and from common custom ones.
_SMALL = ("loss", "err", "mse", "mae", "mape", "msle", "entropy", "diverg", "perplex", "hinge", "false_")
_LARGE = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "dice", "score", "true_", "similarity", "r2")


def flat(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in logs by name; number i of a metric with several numbers is `NAME_i`."""
    numbers: dict[str, float] = {}
    for name, value in logs.items():
        if isinstance(value, list):
            numbers |= flat({f"{name}_{i}": item for i, item in enumerate(value)})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[name] = value
    return numbers


@dataclass(frozen=True)
class MetricObjective:
    """A metric, and whether its largest value is the best."""

    metric: str
    is_largest: bool

    @classmethod
    def of(cls, text: str) -> MetricObjective:
        """Parse `max:METRIC`, `min:METRIC`, or a METRIC whose name says whether large values are good.

        Raises:
            ConfigError: the name does not say it.
        """
        direction, colon, metric = text.partition(":")
        if colon and direction in ("max", "min") and metric:
            return cls(metric, direction == "max")
        name = text.lower()
        small, large = (any(part in name for part in parts) for parts in (_SMALL, _LARGE))
        if colon or not text or small == large:
            raise ConfigError(
                f"--keep-best {text}: cannot tell whether large or small values are good. Expected max:METRIC or "
                "min:METRIC, or the name of a loss, an error or an accuracy, such as val_accuracy."
            )
        return cls(text, large)

    def value(self, logs: Mapping[str, Any]) -> float | None:
        """Return the metric's value in the logs of an epoch, or None if it is missing or not a finite number."""
        value = flat(logs).get(self.metric)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > sys.float_info.max:
            return None
        return None if math.isnan(value) else float(value)

    def value_at(self, step: int, history: list[dict[str, Any]]) -> float | None:
        """Return the metric's value of the last epoch in `history`, or None if the epoch did not end at this step."""
        return self.value(history[-1]) if history and history[-1].get("step") == step else None

    def is_better(self, value: float | None, than: float | None) -> bool:
        """Return whether a value is better than another one. Any value is better than None; equal values are not
        better."""
        if value is None or than is None:
            return value is not None and than is None
        return value > than if self.is_largest else value < than

    def best(self, values: Mapping[str, float | None]) -> str | None:
        """Return the name with the best value; among equal values, the first name in alphabetical order."""
        chosen = None
        for name in sorted(values):
            if self.is_better(values[name], None if chosen is None else values[chosen]):
                chosen = name
        return chosen
