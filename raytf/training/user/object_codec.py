"""The JSON form of values in an object graph, which a `Writer` writes and a `Reader` reads.

A scalar is written as it is. Any other value is a list whose first item names its kind. An object that the program had
before training is referenced by its label, so a reader changes the program's own object, and everything that shares the
object sees the change. Objects that a callback has created since are numbered. They are containers, arrays, values of
the standard library, or objects of the program's classes. Reading runs none of the program's constructors, and imports
nothing.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import math
import operator
import pathlib
import random
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import google_crc32c
import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from raytf.training.user import object_graph
from raytf.training.user.later_files import LaterFile

#: JSON values of one object.
Content = dict[str, Any]
#: Library classes of new objects that a reader creates, in addition to the program's classes.
CLASSES = {
    f"{kind.__module__}:{kind.__qualname__}": kind
    for kind in (
        *(list, dict, set, tuple, frozenset, bytearray, int, float, bool, str, bytes, complex, np.ndarray),
        *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
        types.SimpleNamespace,
    )
}
#: Classes of the standard library whose values are written as the arguments of their constructors.
VALUES: dict[str, tuple[type, Callable[[Any], list[Any]]]] = {
    "complex": (complex, lambda v: [v.real, v.imag]),
    "range": (range, lambda v: [v.start, v.stop, v.step]),
    "slice": (slice, lambda v: [v.start, v.stop, v.step]),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds]),
    "Decimal": (decimal.Decimal, lambda v: [str(v)]),
    "Fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator]),
    "PosixPath": (pathlib.PosixPath, lambda v: [str(v)]),
}
TIMES: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}
#: Kinds of NumPy dtypes whose values are bytes without references.
NUMBERS = "biufcMmSUV"
#: The deepest nesting of tuples.
DEPTH = 20
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def library(name: str) -> Any:
    """Return the library class or function of a name, such as `keras.ops.less`; None if callbacks may not hold it."""
    module, _, own = name.partition(":")
    if name in CLASSES:
        return CLASSES[name]
    if module == "numpy":
        function = getattr(np, own, None)
        return function if isinstance(function, np.ufunc) else None
    if module.startswith("keras.src.ops."):
        return getattr(keras.ops, own, None)
    spaces: dict[str, Any] = {"_operator": operator, "math": math}
    if module == "builtins" and own in ("min", "max", "abs", "sum", "len"):
        return getattr(builtins, own)
    return getattr(spaces[module], own, None) if module in spaces else None


def variables_of(value: Any, others: Collection[int]) -> list[Any]:
    """Return the variables of a Keras object, or a variable itself, without those whose ids are in `others`."""
    own = [value] if object_graph.is_variable(value) else list(value.variables)
    return [variable for variable in own if id(variable) not in others]


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, as `dtype_of` expects it."""
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, including dtypes that NumPy itself lacks, such as bfloat16."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


# -- objects to content ------------------------------------------------------------------------------------------------


class CannotTravelError(Exception):
    """The value has no form that a reader can open safely."""


class Writer:
    """Writes the contents of objects. `labels` maps the id of each object that the reader has, too, to its label.
    `others` are the ids of the model's and optimizer's variables, which are left out: they return with the model."""

    def __init__(self, labels: Mapping[int, str], others: Collection[int] = ()):
        self._labels, self._others = labels, others
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._depth = 0
        #: Contents of new objects, by number, and arrays, by the names that the contents use.
        self.new: dict[str, Content] = {}
        self.arrays: dict[str, np.ndarray] = {}
        #: Attributes and items that could not be written: where -> kind of the value.
        self.lost: dict[str, str] = {}

    def content(self, label: str, value: Any) -> Content:
        """Return the content of an object, with checksums in place of its arrays; see `take_arrays`."""
        content: Content = {}
        if isinstance(value, keras.callbacks.Callback) and hasattr(value, "get_state"):
            with self._noting(label, value):
                content["state"] = self.value(value.get_state())
            return content
        kind = object_graph.same_kind(value)
        if kind is not None:
            with self._noting(label, value):
                content.update(self._items(kind, value))
        elif object_graph.is_keras(value) or object_graph.is_variable(value):
            content["variables"] = [_mark(_of_variable(each)) for each in variables_of(value, self._others)]
        elif isinstance(value, _GENERATORS):
            content["generator"] = self.value(_frozen(_generator_state(value)))
        elif isinstance(value, LaterFile):
            content["position"] = value.position()
        attributes = _attributes(value)
        if attributes is not None:
            content["attributes"], content["names"] = {}, sorted(attributes)
            for name, each in attributes.items():
                with self._noting(f"{label}.{name}", each):
                    content["attributes"][name] = self.value(each)
        return content

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
        """Record a value that cannot be written in `lost`, and drop the new objects that were written for it."""
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
            CannotTravelError: the value cannot be written; the message names its kind.
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
        if isinstance(value, tuple):  # a named tuple
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
        """Return the items of a tuple or frozenset as JSON; nesting is limited to a depth that readers accept."""
        self._depth += 1
        if self._depth > DEPTH:
            raise CannotTravelError(f"a {type(items).__name__} nested in more than {DEPTH} others")
        written = [self.value(each) for each in items]
        self._depth -= 1
        return written

    def _new(self, value: Any) -> int:
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
        base = object_graph.same_kind(value)
        content.update({} if base is None else self._items(base, value))
        if object_graph.is_record(value):
            attributes = object_graph.attributes(value)
            content["attributes"] = {name: self.value(each) for name, each in attributes.items()}
        self.take_arrays(content, value)
        self.new[str(number)] = content
        return number


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return an object's named values, such as attributes; None for kinds of objects that have none."""
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
    """Return a state of dicts and arrays as nested tuples, which are written as one value."""
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
    """Return the checksum, dtype and shape of an array.

    Raises:
        CannotTravelError: the array holds Python objects or records with named fields.
    """
    if array.dtype.hasobject or array.dtype.names or array.dtype.kind not in NUMBERS:
        raise CannotTravelError(f"an array of {array.dtype}")
    data = _as_numbers(array)
    return [google_crc32c.value(data), dtype_name(array.dtype), list(array.shape)]


def _as_numbers(array: np.ndarray) -> np.ndarray:
    """Return an array's bytes as a uint8 array, which every checkpoint can hold."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# -- content to objects ------------------------------------------------------------------------------------------------


class Reader:
    """Restores the contents of objects that a `Writer` wrote.

    Args:
        labels: the objects of this process, by label.
        new: the contents of new objects, by number.
        arrays: the arrays of all contents, by name.
        others: as in `Writer`.

    Raises:
        Exception: the contents are damaged, or were written by a program with other classes.
    """

    def __init__(
        self,
        labels: Mapping[str, Any],
        new: Mapping[str, Content],
        arrays: Mapping[str, np.ndarray],
        others: Collection[int] = (),
    ):
        self._labels, self._arrays, self._others = labels, arrays, others
        self._made: dict[int, Any] = {}
        for number, content in new.items():
            self._made[int(number)] = self._shell(content)
        # Attributes first: the hash of a set's item or a dict's key may depend on them.
        for part in (("attributes",), ("items", "pairs", "bytes")):
            for number, content in new.items():
                self.fill(self._made[int(number)], {k: v for k, v in content.items() if k in part})

    def _shell(self, content: Content) -> Any:
        kind = self._value(content["class"])
        if not isinstance(kind, type):
            raise ValueError(f"{content['class']} is not a class")
        if issubclass(kind, np.ndarray):
            return self._array(content["array"]).copy()
        if issubclass(kind, collections.deque):
            return collections.deque(maxlen=content["maxlen"])
        made: Any = kind.__new__(kind)
        if "factory" in content:
            made.default_factory = self._value(content["factory"])
        return made

    def fill(self, value: Any, content: Content) -> None:
        """Restore the content of an object in place."""
        if "state" in content:
            if hasattr(value, "set_state"):
                value.set_state(self._value(content["state"]))
            else:
                vars(value).update(self._value(content["state"]))
        if "items" in content:
            items = [self._value(each) for each in content["items"]]
            if isinstance(value, list):
                list.__setitem__(value, slice(None), items)
            else:
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(items)
        if "pairs" in content:
            pairs = [(self._value(k), self._value(v)) for k, v in content["pairs"]]
            kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            kind.clear(value)
            for key, each in pairs:
                kind.__setitem__(value, key, each)
        if "bytes" in content:
            value[:] = content["bytes"].encode("latin1")
        if "array" in content:
            value[...] = self._array(content["array"])
        if "variables" in content:
            for variable, mark in zip(variables_of(value, self._others), content["variables"], strict=True):
                variable.assign(self._array(mark))
        if "generator" in content:
            _set_generator(value, _thawed(self._value(content["generator"])))
        if "position" in content and isinstance(value, LaterFile):
            value.cut(content["position"])
        for name, each in content.get("attributes", {}).items():
            _set_attribute(value, name, self._value(each))
        for name in content.get("gone", ()):
            _delete_attribute(value, name)

    def _array(self, mark: list[Any]) -> np.ndarray:
        _, dtype, shape, name = mark
        return self._arrays[name].view(dtype_of(dtype)).reshape(shape)

    def _value(self, written: Any) -> Any:
        if not isinstance(written, list):
            return written
        match written:
            case ["=", label]:
                return self._labels[label]
            case ["#", number]:
                return self._made[number]
            case ["tuple", items]:
                return tuple(self._value(each) for each in items)
            case ["frozenset", items]:
                return frozenset(self._value(each) for each in items)
            case ["bytes", text]:
                return text.encode("latin1")
            case ["number", dtype, text]:
                return np.frombuffer(text.encode("latin1"), dtype_of(dtype))[0]
            case ["dtype", name]:
                return dtype_of(name)
            case ["value", name, arguments]:
                return VALUES[name][0](*arguments)
            case ["time", name, text]:
                return TIMES[name].fromisoformat(text)
            case ["enum", kind, name]:
                return self._value(kind)[name]
            case ["named", kind, items]:
                return tuple.__new__(self._value(kind), (self._value(each) for each in items))
            case ["method", owner, name]:
                return getattr(self._value(owner), name)
            case ["tensor", array]:
                return tf.constant(self._value(array))
            case ["library", name]:
                return library(name)
        raise ValueError(f"{written[:1]} is not a known kind of value")


def _set_attribute(value: Any, name: str, each: Any) -> None:
    if isinstance(value, types.FunctionType):
        value.__globals__[name] = each
    elif isinstance(value, type | types.ModuleType | types.CellType):
        setattr(value, name, each)
    elif hasattr(value, "__dict__") and not hasattr(getattr(type(value), name, None), "__set__"):
        vars(value)[name] = each
    else:
        object.__setattr__(value, name, each)


def _delete_attribute(value: Any, name: str) -> None:
    if isinstance(value, types.FunctionType):
        value.__globals__.pop(name, None)
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        vars(value).pop(name, None)
    else:
        with contextlib.suppress(AttributeError):
            delattr(value, name)


def _thawed(frozen: Any) -> Any:
    kind, *rest = frozen
    if kind == "dict":
        return {key: _thawed(each) for key, each in rest[0]}
    if kind == "array":
        return np.array(rest[1], rest[0])
    return tuple(map(_thawed, rest[0])) if kind == "tuple" else rest[0]


def _set_generator(value: Any, state: Any) -> None:
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value.setstate(state)
