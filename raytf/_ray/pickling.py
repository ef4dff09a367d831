"""Pickles objects as Ray does, including code of the main program."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from ray.cloudpickle import CloudPickler, loads

__all__ = ["dumps", "loads"]


def dumps(value: Any, reducers: Mapping[str, Callable[[Any], Any]]) -> bytes:
    """Pickle a value. `reducers` maps the dotted path of a class to the `reducer_override` of its objects and those of
    derived classes. If that returns NotImplemented, the object's next base class is tried."""

    class Pickler(CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            for kind in () if isinstance(obj, type) else type(obj).__mro__:
                reducer = reducers.get(f"{kind.__module__}.{kind.__qualname__}")
                reduced = NotImplemented if reducer is None else reducer(obj)
                if reduced is not NotImplemented:
                    return reduced
            return super().reducer_override(obj)

    out = io.BytesIO()
    Pickler(out, protocol=5).dump(value)
    return out.getvalue()
