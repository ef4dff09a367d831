"""The objects that callbacks can reach before training: objects they hold or share, and globals they use.

A program and its workers have copies of the same graph. Each mutable object in it has a label: the path on which a
breadth-first search from the callbacks first finds it. Equal graphs have equal labels, so the label of an object that a
worker has changed identifies the program's own object. Globals, classes and modules have labels of their own, because
several paths lead to them. The search does not enter libraries, models, layers and optimizers.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

#: Values that are written as they are.
SCALARS = (type(None), bool, int, float, str)
#: The search does not enter containers with at least this many items. They are compared and sent as a whole.
_LARGE = 10_000
_IMMUTABLE = frozenset({*SCALARS, complex, bytes, range, slice, type(Ellipsis), type(NotImplemented)})
#: Attributes that Keras itself sets in every callback.
OF_KERAS = frozenset({"_model", "model", "params"})
#: Classes of the standard library whose objects hold values of the program in attributes.
_RECORDS = (types.SimpleNamespace, UserDict, UserList)
#: Folders of Python's own modules, and names of folders that hold installed packages.
_LIBRARIES = tuple(os.path.join(os.path.realpath(sysconfig.get_path(name)), "") for name in ("stdlib", "platstdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


def labelled(callbacks: list[Any]) -> dict[str, Any]:
    """Return the objects that callbacks can reach, by label. Call it before training, which can change the labels."""
    objects: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = deque((f"callbacks[{i}] {type(each).__name__}", each) for i, each in enumerate(callbacks))
    while waiting:
        label, value = waiting.popleft()
        if type(value) in _IMMUTABLE or id(value) in seen:
            continue
        own = _own_label(value)
        label = label if own is None or own in objects else own
        if label in objects:  # a second object with this label, which cannot be distinguished from the first
            continue
        seen.add(id(value))
        objects[label] = value
        waiting.extend(_inner(label, value))
    return objects


def leaves(callbacks: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (label, object) for each object that callbacks can reach and that holds no other objects."""
    for label, value in labelled(callbacks).items():
        if next(_inner(label, value), None) is None:
            yield label, value


def is_keras(value: Any) -> bool:
    """Return whether an object is a model, layer, optimizer or metric: its state is then in variables."""
    return isinstance(value, (keras.Layer, keras.optimizers.Optimizer, keras.Metric))


def is_variable(value: Any) -> bool:
    """Return whether an object is a variable of Keras or TensorFlow."""
    return isinstance(value, (keras.Variable, tf.Variable))


def is_record(value: Any) -> bool:
    """Return whether an object's state is in its attributes: a callback, or an object of a class of the program."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType)) or is_keras(value):
        return False
    if is_variable(value) or isinstance(value, (tf.Module, tf.Tensor)):
        return False
    return isinstance(value, (keras.callbacks.Callback, *_RECORDS)) or is_own(type(value).__module__)


def is_own(module: str | None) -> bool:
    """Return whether a module belongs to the program, and not to Python or an installed package."""
    return module is not None and _is_own(module)


@functools.cache
def _is_own(name: str) -> bool:
    if name == "__main__":
        return True
    root = name.partition(".")[0]
    if root in sys.builtin_module_names or root in sys.stdlib_module_names or root == "raytf":
        return False
    file = getattr(sys.modules.get(name) or sys.modules.get(root), "__file__", None)
    if file is None:
        return True
    path = os.path.realpath(file)
    return not path.startswith(_LIBRARIES) and not _INSTALLED & set(path.split(os.sep))


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a record, including slots, without those that Keras sets in every callback."""
    values = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                values[name] = getattr(value, name)
    if isinstance(value, keras.callbacks.Callback):
        return {name: each for name, each in values.items() if name not in OF_KERAS}
    return values


def data_of(space: type | types.ModuleType) -> dict[str, Any]:
    """Return the attributes of a class or module that are data: neither code nor set by Python itself."""
    return {
        name: value
        for name, value in list(vars(space).items())
        if not (name.startswith("__") and name.endswith("__")) and not _is_code(value)
    }


def assigned_globals(function: types.FunctionType) -> dict[str, Any] | None:
    """Return the global variables that a function assigns, with their current values; None if it assigns none."""
    names, space = _names(function.__code__)[1], function.__globals__
    return {name: space[name] for name in names if name in space} if names else None


def _is_code(value: Any) -> bool:
    if isinstance(value, (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType)):
        return True
    return isinstance(value, (staticmethod, classmethod)) or (
        hasattr(type(value), "__get__") and not isinstance(value, SCALARS)
    )


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the global names that code and its nested functions load, and the global names that they assign."""
    loaded: dict[str, None] = {}
    stored: dict[str, None] = {}
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded[step.argval] = None
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            stored[step.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more = _names(inner)
            loaded.update(dict.fromkeys(more[0]))
            stored.update(dict.fromkeys(more[1]))
    return tuple(loaded), tuple(stored)


def _own_label(value: Any) -> str | None:
    """Return the label of a class or module, which does not depend on the path to it."""
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return f"{value.__name__}:" if isinstance(value, types.ModuleType) else None


def _inner(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (label, object) for each object that an object directly holds."""
    if isinstance(value, (list, tuple, deque)):
        if not (has_scalars_only(value) or is_large(value)):
            yield from ((f"{label}[{i}]", each) for i, each in enumerate(value))
    elif isinstance(value, dict) and not is_large(value):
        yield from ((f"{label}[{key!r}]", each) for key, each in list(value.items()) if _is_plain_key(key))
    elif isinstance(value, types.MethodType):
        yield f"{label}.__self__", value.__self__
        yield f"{label}.__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield from ((f"{label}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.FunctionType):
        yield from _inside_function(label, value)
    elif isinstance(value, types.CellType):
        yield from _content(label, value)
    elif isinstance(value, (type, types.ModuleType)):
        name = value.__module__ if isinstance(value, type) else value.__name__
        if is_own(name):
            yield from _inside_space(label, value)
    if is_record(value):
        yield "", type(value)
        yield from ((f"{label}.{name}", each) for name, each in attributes(value).items())


def _inside_function(label: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if not is_own(function.__module__):
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f"{label} {name}", cell) for name, cell in cells)
    yield from ((f"{label}.{name}", getattr(function, name) or ()) for name in ("__defaults__", "__kwdefaults__"))
    space, module = function.__globals__, function.__globals__.get("__name__")
    yield from ((f"{module}:{name}", space[name]) for name in _names(function.__code__)[0] if name in space)


def _inside_space(label: str, space: type | types.ModuleType) -> Iterator[tuple[str, Any]]:
    join = "." if isinstance(space, type) else ""
    yield from ((f"{label}{join}{name}", each) for name, each in data_of(space).items())
    if isinstance(space, type):
        yield from (("", base) for base in space.__bases__)
        for name, each in list(vars(space).items()):
            each = each.__func__ if isinstance(each, (staticmethod, classmethod)) else each
            each = each.fget if isinstance(each, property) else each
            if isinstance(each, types.FunctionType):
                yield f"{label}.{name}", each


def _content(label: str, cell: types.CellType) -> Iterator[tuple[str, Any]]:
    try:
        yield f"{label} =", cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return


def has_scalars_only(values: Any) -> bool:
    """Return whether all items of a container are numbers, texts and the like."""
    return set(map(type, values)) <= _IMMUTABLE


def items_of(container: Any) -> list[Any]:
    """Return the items of a container, or the values of a dict."""
    return list(container.values() if isinstance(container, dict) else container)


def is_large(value: Any) -> bool:
    """Return whether an object is a container of so many objects that they are not inspected one by one."""
    if not isinstance(value, (list, tuple, dict, set, deque)) or len(value) < _LARGE:
        return False
    return not has_scalars_only(items_of(value))


def _is_plain_key(key: Any) -> bool:
    return type(key) in _IMMUTABLE or (isinstance(key, tuple) and all(map(_is_plain_key, key)))


def same_kind(known: Any) -> type | None:
    """Return the container class of which an object is an instance; None if it is no container."""
    kinds = (list, OrderedDict, dict, set, deque, bytearray, np.ndarray)
    return next((kind for kind in kinds if isinstance(known, kind)), None)
