"""Gives objects what `object_writer` wrote of their copies in another process."""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.training.later_files import LaterFile
from raytf.training.object_codec import TIMES, VALUES, Content, dtype_of, library, variables_of


class Reader:
    """Gives objects the contents that a `Writer` wrote.

    Args:
        labels: the objects of this process, by label.
        new: the contents of new objects.
        arrays: by name.
        others: as of the writer.

    Raises:
        Exception: the contents are damaged, or made by a program with other classes.
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
        # Attributes first: an item of a set or a key of a dict may be hashed by them.
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
        """Give an object its content in place."""
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
        kind, *rest = written
        return getattr(self, f"_read_{_KINDS[kind]}")(*rest)

    def _read_known(self, label: str) -> Any:
        return self._labels[label]

    def _read_new(self, number: int) -> Any:
        return self._made[number]

    def _read_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(self._value(each) for each in items)

    def _read_frozenset(self, items: list[Any]) -> frozenset[Any]:
        return frozenset(self._value(each) for each in items)

    def _read_bytes(self, text: str) -> bytes:
        return text.encode("latin1")

    def _read_number(self, dtype: str, text: str) -> Any:
        return np.frombuffer(text.encode("latin1"), dtype_of(dtype))[0]

    def _read_dtype(self, name: str) -> np.dtype[Any]:
        return dtype_of(name)

    def _read_value(self, name: str, arguments: list[Any]) -> Any:
        return VALUES[name][0](*arguments)

    def _read_time(self, name: str, text: str) -> Any:
        return TIMES[name].fromisoformat(text)

    def _read_enum(self, kind: Any, name: str) -> Any:
        return self._value(kind)[name]

    def _read_named(self, kind: Any, items: list[Any]) -> Any:
        return tuple.__new__(self._value(kind), self._read_tuple(items))

    def _read_method(self, owner: Any, name: str) -> Any:
        return getattr(self._value(owner), name)

    def _read_tensor(self, array: Any) -> Any:
        return tf.constant(self._value(array))

    def _read_library(self, name: str) -> Any:
        return library(name)


#: The first items of written values -> the methods of `Reader` that read them, but for `_read_`.
_KINDS = {
    **{"=": "known", "#": "new", "tuple": "tuple", "frozenset": "frozenset", "named": "named"},
    **{kind: kind for kind in ("bytes", "number", "dtype", "value", "time", "enum", "method", "tensor", "library")},
}


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
