"""Writes JSON that every reader accepts. JSON has neither NaN nor infinity, but a loss may be either."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(document: Any, **options: Any) -> str:
    """Return a document as JSON, like `json.dumps` with the same options, but with null for NaN and infinity."""
    try:
        return json.dumps(document, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(document), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
