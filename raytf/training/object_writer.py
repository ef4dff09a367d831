"""Writes what is in objects as JSON values and arrays; see `object_codec` for the form."""

from __future__ import annotations

import collections
import contextlib
import enum
import random
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import google_crc32c
import keras
import numpy as np
import tensorflow as tf

from raytf.training import object_graph
from raytf.training.later_files import LaterFile
from raytf.training.object_codec import CLASSES, NUMBERS, TIMES, VALUES, Content, dtype_name, library, variables_of

#: Tuples inside each other.
DEPTH = 20
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


class CannotTravelError(Exception):
    """A value has no form that a reader could open safely."""


class Writer:
    """Writes contents of objects.

    Args:
        labels: of the objects that a reader has, by their ids.
        others: ids of variables whose values come back by another way: those of the model and its optimizer.
    """

    def __init__(self, labels: Mapping[int, str], others: Collection[int] = ()):
        self._labels, self._others = labels, others
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._depth = 0
        #: New objects, by number, and arrays, by the names that their contents give them.
        self.new: dict[str, Content] = {}
        self.arrays: dict[str, np.ndarray] = {}
        #: Attributes and items that could not be written: where -> kind of the value.
        self.lost: dict[str, str] = {}

    def content(self, label: str, value: Any) -> Content:
        """Return the content of an object; arrays by checksums only, see `take_arrays`."""
        found: Content = {}
        if isinstance(value, keras.callbacks.Callback) and hasattr(value, "get_state"):
            with self._noting(label, value):
                found["state"] = self.value(value.get_state())
            return found
        kind = object_graph.same_kind(value)
        if kind is not None:
            with self._noting(label, value):
                found.update(self._items(kind, value))
        elif object_graph.is_keras(value) or object_graph.is_variable(value):
            found["variables"] = [_mark(_of_variable(each)) for each in variables_of(value, self._others)]
        elif isinstance(value, _GENERATORS):
            found["generator"] = self.value(_frozen(_generator_state(value)))
        elif isinstance(value, LaterFile):
            found["position"] = value.position()
        attributes = _attributes(value)
        if attributes is not None:
            found["attributes"], found["names"] = {}, sorted(attributes)
            for name, each in attributes.items():
                with self._noting(f"{label}.{name}", each):
                    found["attributes"][name] = self.value(each)
        return found

    def take_arrays(self, content: Content, value: Any) -> None:
        """Add the arrays of an object to `arrays`, and their names to its content."""
        if "array" in content:
            content["array"] = [*content["array"], self._named(value)]
        elif "variables" in content:
            arrays = [_of_variable(each) for each in variables_of(value, self._others)]
            content["variables"] = [
                [*mark, self._named(each)] for mark, each in zip(content["variables"], arrays, strict=True)
            ]

    def _named(self, array: np.ndarray) -> str:
        name = f"callback/state/{len(self.arrays):05d}"
        self.arrays[name] = np.array(_as_numbers(array))
        return name

    @contextlib.contextmanager
    def _noting(self, where: str, value: Any) -> Iterator[None]:
        """Note a value that cannot be written, and drop the new objects that were written for it."""
        sizes = len(self._numbers), len(self.new)
        try:
            yield
        except (CannotTravelError, RecursionError) as error:
            self.lost[where] = str(error) if isinstance(error, CannotTravelError) else type(value).__name__
            self._depth = 0
            while len(self._numbers) > sizes[0]:
                self._numbers.popitem()
            while len(self.new) > sizes[1]:
                self.new.popitem()

    def _items(self, kind: type, value: Any) -> Content:
        if kind is np.ndarray:
            return {"array": _mark(value)}
        if kind is bytearray:
            return {"bytes": bytes(value).decode("latin1")}
        if kind in (dict, collections.OrderedDict):
            return {"pairs": [[self.value(k), self.value(v)] for k, v in value.items()]}
        if set(map(type, value)) <= set(object_graph.SCALARS):
            return {"items": list(value)}
        return {"items": [self.value(each) for each in value]}

    def value(self, value: Any) -> Any:
        """Return a value as JSON.

        Raises:
            CannotTravelError: the message says of which kind the value is.
        """
        if type(value) in object_graph.SCALARS:
            return value
        label = self._labels.get(id(value))
        if label is not None:
            return ["=", label]
        written = self._immutable(value)
        return ["#", self._new(value)] if written is None else written

    def _immutable(self, value: Any) -> list[Any] | None:
        kind = type(value)
        if kind in (tuple, frozenset):
            return ["tuple" if kind is tuple else "frozenset", self._inside(value)]
        if kind is bytes:
            return ["bytes", value.decode("latin1")]
        if isinstance(value, np.generic):
            array = np.asarray(value)
            if array.dtype.kind not in NUMBERS:
                raise CannotTravelError(kind.__name__)
            return ["number", dtype_name(array.dtype), array.tobytes().decode("latin1")]
        if isinstance(value, np.dtype):
            return ["dtype", dtype_name(value)]
        if kind.__name__ in VALUES and VALUES[kind.__name__][0] is kind:
            return ["value", kind.__name__, VALUES[kind.__name__][1](value)]
        if kind.__name__ in TIMES and TIMES[kind.__name__] is kind:
            return ["time", kind.__name__, value.isoformat()]
        if isinstance(value, enum.Enum):
            return ["enum", self.value(kind), value.name]
        if isinstance(value, tuple):  # a named one
            return ["named", self.value(kind), self._inside(value)]
        if isinstance(value, types.MethodType):
            return ["method", self.value(value.__self__), value.__name__]
        if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
            return ["tensor", self.value(np.asarray(value.numpy()))]
        name = f"{getattr(value, '__module__', '')}:{getattr(value, '__name__', '')}"
        if library(name) is value:
            return ["library", name]
        if isinstance(value, np.ufunc):
            return ["library", f"numpy:{value.__name__}"]
        return None

    def _inside(self, items: Any) -> list[Any]:
        """Return the items of a tuple, which are written inside each other as JSON, to a depth that readers accept."""
        self._depth += 1
        if self._depth > DEPTH:
            raise CannotTravelError(f"a {type(items).__name__} in more than {DEPTH} others")
        written = [self.value(each) for each in items]
        self._depth -= 1
        return written

    def _new(self, value: Any) -> int:
        """Return the number of an object that a callback has made."""
        if id(value) in self._numbers:
            return self._numbers[id(value)]
        kind = type(value)
        is_own = object_graph.is_record(value) or object_graph.is_own(kind.__module__)
        if not is_own and CLASSES.get(f"{kind.__module__}:{kind.__qualname__}") is not kind:
            raise CannotTravelError(kind.__name__)
        if is_own and isinstance(value, type | types.FunctionType):
            raise CannotTravelError(getattr(value, "__qualname__", kind.__name__))
        class_ = self.value(kind)
        number = self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        content: Content = {"class": class_}
        if isinstance(value, collections.deque):
            content["maxlen"] = value.maxlen
        if isinstance(value, collections.defaultdict):
            content["factory"] = self.value(value.default_factory)
        found = object_graph.same_kind(value)
        content.update({} if found is None else self._items(found, value))
        if object_graph.is_record(value):
            attributes = object_graph.attributes(value)
            content["attributes"] = {name: self.value(each) for name, each in attributes.items()}
        self.take_arrays(content, value)
        self.new[str(number)] = content
        return number


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return what an object holds by name, apart from items; None for objects that hold nothing so."""
    if isinstance(value, types.CellType):
        try:
            return {"cell_contents": value.cell_contents}
        except ValueError:
            return {}
    if isinstance(value, types.FunctionType):
        return object_graph.assigned_globals(value) if object_graph.is_own(value.__module__) else None
    if isinstance(value, type):
        return object_graph.data_of(value) if object_graph.is_own(value.__module__) else None
    if isinstance(value, types.ModuleType):
        return object_graph.data_of(value) if object_graph.is_own(value.__name__) else None
    return object_graph.attributes(value) if object_graph.is_record(value) else None


def _frozen(state: Any) -> Any:
    """Return a state of dicts and arrays as tuples, which are written in one place."""
    if isinstance(state, dict):
        return "dict", tuple((key, _frozen(each)) for key, each in state.items())
    if isinstance(state, np.ndarray):
        return "array", state.dtype.str, tuple(state.tolist())
    return ("tuple", tuple(map(_frozen, state))) if isinstance(state, tuple) else ("value", state)


def _generator_state(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if isinstance(value, np.random.RandomState) else value.getstate()


def _of_variable(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _mark(array: np.ndarray) -> list[Any]:
    """Return checksum, dtype and shape of an array.

    Raises:
        CannotTravelError: it holds Python's objects.
    """
    if array.dtype.hasobject or array.dtype.names or array.dtype.kind not in NUMBERS:
        raise CannotTravelError(f"an array of {array.dtype}")
    data = _as_numbers(array)
    return [google_crc32c.value(data), dtype_name(array.dtype), list(array.shape)]


def _as_numbers(array: np.ndarray) -> np.ndarray:
    """Return an array as the bytes that it consists of, of a dtype that every checkpoint can hold."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
