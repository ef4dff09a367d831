"""Pickles as Ray makes them: code of the main program goes along."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from ray.cloudpickle import CloudPickler
from ray.cloudpickle import loads as loads

SEEN = {"ray.cloudpickle.CloudPickler.reducer_override": "2.60.0"}


def dumps(value: Any, reducers: Sequence[Callable[[Any], Any]]) -> bytes:
    """Pickle a value.

    Args:
        reducers: asked about each object first, as a pickler's `reducer_override`; the first answer that is not
            NotImplemented counts.
    """

    class Pickler(CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            for reduced in reducers:
                found = reduced(obj)
                if found is not NotImplemented:
                    return found
            return super().reducer_override(obj)

    out = io.BytesIO()
    Pickler(out, protocol=5).dump(value)
    return out.getvalue()
