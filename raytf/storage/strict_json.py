"""Writes JSON that every reader takes: JSON has no NaN and no infinity, which a loss may be."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(document: Any, **options: Any) -> str:
    """Return a document as JSON, with null for a number that is NaN or infinite.

    Args:
        options: of `json.dumps`.
    """
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
