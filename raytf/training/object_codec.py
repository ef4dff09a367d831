"""The JSON form of values in a graph of objects, which `object_writer` writes and `object_reader` reads.

Scalars stand for themselves; any other value is a list whose first item says what it is. An object that the program had
before training is named by its label, so that a reader changes the program's own object and everything that shares it
sees the change. Objects that a callback has made since are numbered. They are containers, arrays, values of the
standard library, or objects of classes that the program has. Nothing that is read runs code: no constructors, no
imports.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import math
import operator
import pathlib
import types
from collections.abc import Callable, Collection
from typing import Any

import keras
import ml_dtypes
import numpy as np

from raytf.training import object_graph

#: JSON values of one object.
Content = dict[str, Any]
#: Classes of new objects that a reader makes, beside those of the program.
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
#: Kinds of NumPy's dtypes whose values are bytes without references.
NUMBERS = "biufcMmSUV"


def library(name: str) -> Any:
    """Return a class or function of a library that a callback may hold, such as `keras.ops.less`; else None."""
    module, _, own = name.partition(":")
    if name in CLASSES:
        return CLASSES[name]
    if module == "numpy":
        found = getattr(np, own, None)
        return found if isinstance(found, np.ufunc) else None
    if module.startswith("keras.src.ops."):
        return getattr(keras.ops, own, None)
    spaces: dict[str, Any] = {"_operator": operator, "math": math}
    if module == "builtins" and own in ("min", "max", "abs", "sum", "len"):
        return getattr(builtins, own)
    return getattr(spaces[module], own, None) if module in spaces else None


def variables_of(value: Any, others: Collection[int]) -> list[Any]:
    """Return the variables of an object of Keras, or a variable itself, without others."""
    own = [value] if object_graph.is_variable(value) else list(value.variables)
    return [variable for variable in own if id(variable) not in others]


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name by which `dtype_of` finds a dtype."""
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, also of those that NumPy itself lacks, such as bfloat16."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
