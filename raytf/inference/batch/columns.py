"""Decides which columns of a data set are a model's inputs, and which are written with the predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raytf.errors import ConfigError, DataError
from raytf.inference.signature import Signature, TensorSpec

#: Usual names of the column for a model's only input, if no column has the input's name.
_USUAL = ("image", "x", "x_test", "features")
#: Features that are kept by default if not all features of the records are read.
_LABELS = ("label", "id")
SCALARS, ALL, NONE = "scalars", "all", "none"


@dataclass(frozen=True)
class Options:
    """The user's choice of columns.

    Attributes:
        x: columns of the model's only input, or INPUT=COLUMN for several inputs; if empty, raytf chooses.
        keep: columns to write with the predictions: scalars, all, none, or names.
        classes: write only the class with the largest output, and this output, instead of all outputs.
    """

    x: tuple[str, ...] = ()
    keep: str = SCALARS
    classes: bool = False


def sources(signature: Signature, columns: Mapping[str, np.ndarray], x: Sequence[str]) -> dict[str, list[str]]:
    """Return the column for each input, or several columns of numbers that become one vector.

    Args:
        columns: columns of some records.

    Raises:
        ConfigError: `x` names a missing column or input, or there is no obvious column; the message lists them.
    """
    there = ", ".join(sorted(columns)) or "none"
    chosen: dict[str, list[str]] = {}
    if x and all("=" in part for part in x):
        for part in x:
            name, _, column = part.partition("=")
            chosen.setdefault(name, []).append(column)
    elif x and len(signature.inputs) == 1:
        chosen[next(iter(signature.inputs))] = list(x)
    elif x:
        raise ConfigError(
            f"--x {' '.join(x)}: the model has several inputs. Expected INPUT=COLUMN for {', '.join(signature.inputs)}."
        )
    else:
        for name, spec in signature.inputs.items():
            matches = _find(name, spec, columns, alone=len(signature.inputs) == 1)
            if not matches:
                raise ConfigError(
                    f"no column is plainly the model's input {name} ({spec.text()}); there are {there}. Name it: --x "
                    "COLUMN."
                )
            chosen[name] = matches
    for name in chosen:
        if name not in signature.inputs:
            raise ConfigError(f"--x {name}=...: the model has no such input. It has {', '.join(signature.inputs)}.")
    for name in signature.inputs:
        missing = [column for column in chosen.get(name, [name]) if column not in columns]
        if missing or name not in chosen:
            raise ConfigError(
                f"there is no column {missing[0] if missing else name!r} for the input {name}; there are {there}."
            )
    return chosen


def image_of(signature: Signature) -> tuple[int, int, int] | None:
    """Return height, width and channels of a model's only image input, or None."""
    shapes = [spec.shape for spec in signature.inputs.values() if spec.shape is not None and len(spec.shape) == 4]
    if len(shapes) != 1 or None in shapes[0][1:]:
        return None
    _, height, width, channels = shapes[0]
    return int(height or 0), int(width or 0), int(channels or 0)


def features(signature: Signature, options: Options, there: Sequence[str]) -> list[str]:
    """Return the features to read from records without a schema: the model's inputs, and the features to keep.

    Args:
        there: names of all features.

    Raises:
        ConfigError: a feature is missing, or none is obviously the input; the message lists the features.
    """
    wanted = [part.partition("=")[2] or part for part in options.x]
    if not wanted and all(name in there for name in signature.inputs):
        wanted = list(signature.inputs)
    elif not wanted:
        wanted = [name for name in _USUAL if name in there][:1]
    listed = ", ".join(sorted(there)) or "none"
    if not wanted:
        raise ConfigError(
            f"no feature is plainly the model's input {', '.join(signature.inputs)}; there are {listed}. Name it: --x "
            "FEATURE."
        )
    if options.keep == ALL:
        wanted += there
    elif options.keep == SCALARS:
        wanted += [name for name in _LABELS if name in there]
    elif options.keep != NONE:
        wanted += options.keep.split(",")
    for name in wanted:
        if name not in there:
            raise ConfigError(f"there is no feature {name!r}; there are {listed}.")
    return list(dict.fromkeys(wanted))


def tensor(names: Sequence[str], columns: Mapping[str, np.ndarray], spec: TensorSpec) -> np.ndarray:
    """Return the input made of some columns, in the shape that the model expects.

    Raises:
        DataError: the columns have other values or shapes.
    """
    parts = [_stacked(name, columns[name]) for name in names]
    array = parts[0] if len(parts) == 1 else np.stack(parts, axis=-1)
    label = ", ".join(names)
    if spec.dtype == "string":
        return array.astype(object)
    if array.dtype.kind not in "biuf":
        raise DataError(f"column {label} holds {array.dtype}, which is not a number. Expected {spec.text()}.")
    dtype = "float32" if spec.dtype == "bfloat16" else spec.dtype
    if spec.shape is not None and not spec.fits(array.shape):
        wanted = spec.shape[1:]
        if None in wanted or math.prod(array.shape[1:]) != math.prod(size or 0 for size in wanted):
            raise DataError(f"column {label} has records of shape {list(array.shape[1:])}. Expected {spec.text()}.")
        array = array.reshape((len(array), *(size or 0 for size in wanted)))
    return array.astype(dtype)


def kept(columns: Mapping[str, np.ndarray], keep: str) -> list[str]:
    """Return the columns to write with the predictions, in order.

    Raises:
        ConfigError: `keep` names a column that does not exist.
    """
    if keep == NONE:
        return []
    if keep == ALL:
        return list(columns)
    if keep == SCALARS:
        return [name for name, column in columns.items() if _is_scalar(column)]
    names = keep.split(",")
    for name in names:
        if name not in columns:
            raise ConfigError(f"--keep {keep}: there is no column {name!r}; there are {', '.join(sorted(columns))}.")
    return names


def named(outputs: Mapping[str, np.ndarray], classes: bool, taken: Sequence[str]) -> dict[str, np.ndarray]:
    """Return outputs as columns: `prediction` (`prediction_NAME` if there are several), or `class` and `score`.

    A name that another column has already gets the suffix `_by_model`.
    """
    named = {}
    for name, value in outputs.items():
        suffix = "" if len(outputs) == 1 else f"_{name}"
        if value.ndim == 2 and value.shape[1] == 1:
            value = value[:, 0]
        if classes and value.ndim == 2:
            named[f"class{suffix}"], named[f"score{suffix}"] = value.argmax(-1), value.max(-1)
        else:
            named[f"prediction{suffix}"] = value
    return {name if name not in taken else f"{name}_by_model": value for name, value in named.items()}


def _find(name: str, spec: TensorSpec, columns: Mapping[str, np.ndarray], alone: bool) -> list[str]:
    if name in columns:
        return [name]
    if not alone:
        return []
    for usual in _USUAL:
        if usual in columns:
            return [usual]
    nested = [column for column, value in columns.items() if not _is_scalar(value)]
    if len(nested) == 1:
        return nested
    numbers = [column for column, value in columns.items() if value.dtype.kind in "biuf" and value.ndim == 1]
    width = spec.shape[-1] if spec.shape is not None and len(spec.shape) == 2 else None
    return numbers if not nested and width == len(numbers) else []


def _is_scalar(column: np.ndarray) -> bool:
    if column.ndim > 1:
        return False
    return not (column.dtype == object and len(column) and isinstance(column[0], (np.ndarray, list, tuple, dict)))


def _stacked(name: str, column: np.ndarray) -> np.ndarray:
    if column.dtype != object or not len(column) or not isinstance(column[0], (np.ndarray, list, tuple)):
        return column
    try:
        return np.stack([_stacked(name, np.asarray(row)) for row in column])
    except ValueError as error:
        raise DataError(f"column {name} holds arrays of different shapes. Pad or resize them to one shape.") from error
