"""Turns the arguments of `keras.Model.fit` into raytf's data and settings."""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from raytf.config.keywords import FitSettings
from raytf.config.train_config import TrainConfig, by_name
from raytf.data import class_weights, sparse_rows, tree
from raytf.data.streams import Stream, from_arrays
from raytf.driver import inputs
from raytf.errors import ConfigError, DataError

#: Records of a step where neither the call nor a flag says so, as in Keras.
KERAS_BATCH_SIZE = 32
#: The size of batches of a run for which nobody has passed one.
_USUAL = TrainConfig().batch.global_batch_size
#: Argument of Keras -> the setting that it is.
_SETTINGS = {"batch_size": "global_batch_size"}
#: Settings that say how long a run is: one of them takes the place of the other.
_LENGTHS = ("epochs", "steps")


def refuse_unknown(arguments: Iterable[str], own: Iterable[str]) -> None:
    """Refuse keyword arguments that are neither `fit`'s own nor settings, and name what was probably meant."""
    settings = FitSettings.__optional_keys__
    for name in arguments:
        if name in settings:
            continue
        is_size = name == _SETTINGS["batch_size"]
        near = ["batch_size"] if is_size else difflib.get_close_matches(name, [*own, *settings], n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "help(raytf.fit) lists its arguments."
        raise ConfigError(f"fit() got an unexpected keyword argument {name!r}. {hint}")


def settings(
    config: TrainConfig | None, arguments: Mapping[str, Any], is_keras_call: bool
) -> tuple[TrainConfig, list[str]]:
    """Return the settings of a call, and a line for each argument that a flag has overruled.

    A flag that is not at its default wins over an argument of the call, so that a program can be tried with other
    settings without a change; an argument wins over a default.

    Args:
        config: the settings that were passed, if any.
        arguments: `batch_size`, `epochs` and settings of the call; None where one was not passed.
        is_keras_call: the data came as Keras takes it, so that Keras's own batch size is the default.
    """
    if config is not None and not isinstance(config, TrainConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}. Expected a raytf.TrainConfig; or leave it out, and pass settings as "
            "keyword arguments: fit(..., workers=2)."
        )
    passed = {name: value for name, value in arguments.items() if value is not None}
    if "batch_size" not in passed and config is None and is_keras_call:
        passed["batch_size"] = KERAS_BATCH_SIZE
    values = (config or TrainConfig()).values
    taken: dict[str, Any] = {}
    overruled = []
    for argument, value in passed.items():
        its = by_name(_SETTINGS.get(argument, argument))
        plain = its.from_python(value, argument)
        flags = map(by_name, _LENGTHS if its.name in _LENGTHS else [its.name])
        flag = next((flag for flag in flags if values[flag.name] != flag.default), None)
        if flag is None:
            taken[its.name] = plain
        elif (flag, plain) != (its, values[its.name]):
            overruled.append(f"{argument}={value!r} of the program is overruled by {flag.typed(values[flag.name])}")
    if taken.keys() >= set(_LENGTHS):
        raise ConfigError("epochs and steps exclude each other: pass one of them.")
    return (config or TrainConfig()).replace(**taken), overruled


def verbosity(verbose: Any) -> int:
    """Return `verbose` of a call as 0, 1 or 2. Keras takes any value, and shows no bar but for 1 and "auto"."""
    if not verbose:
        return 0
    return 1 if verbose in ("auto", 1) else 2


def epochs_left(initial_epoch: int, config: TrainConfig) -> int:
    """Return the number of epochs from the first one on; a huge number where a run has a number of steps."""
    epochs = None if config.length.steps else config.length.epochs or 1
    if initial_epoch < 0 or (epochs is not None and initial_epoch >= epochs):
        raise DataError(
            f"initial_epoch is {initial_epoch}, and epochs is {epochs}. Expected 0 or more, and more epochs: they "
            "count from 0 on, and not from initial_epoch."
        )
    return sys.maxsize if epochs is None else epochs - initial_epoch


def class_weights_of(class_weight: Any, data: Any, spec: tuple[Any, Any, Any]) -> dict[int, float] | None:
    """Return `class_weight` of a call with plain numbers; refuse it with data (as `streams` returns it, with this spec
    of a record) with which Keras takes none."""
    weights = class_weights.checked(class_weight)
    if weights is not None:
        is_source = not isinstance(data, (tuple, Stream))  # which Keras does not have
        has_positions = is_source or (isinstance(data, Stream) and data.is_dataset)
        class_weights.refuse(spec, "train", has_positions, is_weighted=is_source)
    return weights


def is_plain(data: Any) -> bool:
    """Return whether data are arrays as Keras takes them: one, a dict or a list of them, a tensor, a table of pandas,
    or what is sparse or ragged."""
    if isinstance(data, (dict, list)) or sparse_rows.is_compressed(data):
        return True
    return isinstance(data, np.ndarray) or (hasattr(data, "shape") and hasattr(data, "__array__"))


def several(callbacks: Any) -> Any:
    """Return the callbacks of a call as a list, since Keras takes a single one, too; None or a function as it is."""
    if callbacks is None or callable(callbacks):
        return callbacks
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def training_data(x: Any, y: Any, sample_weight: Any, split: float, name: str = "x") -> tuple[Any, Any]:
    """Return (training data, validation data) of a call, for `RunData.of`.

    Args:
        x, y, sample_weight: as `keras.Model.fit` takes them; anything that raytf takes as training data without y.
        split: the part of the records that is held out, the last ones, as in Keras.

    Raises:
        DataError: one argument does not go with another one.
    """
    has_targets = y is not None and isinstance(x, tuple)  # so that it is a tuple of inputs
    if not is_plain(x) and not has_targets:
        if y is not None or sample_weight is not None:
            raise DataError(
                f"{name} is a {type(x).__name__}, which has its targets and weights in it. Leave out y and "
                "sample_weight, or pass arrays."
            )
        if split and not isinstance(x, tuple):
            raise DataError(
                f"validation_split={split} needs arrays, and {name} is a {type(x).__name__}. Pass validation_data, or "
                "split the data with raytf.hold_out."
            )
    is_whole = isinstance(x, tuple) and not has_targets
    parts = x if is_whole else (x, y, sample_weight) if has_targets or is_plain(x) else None
    if parts is None:
        return x, None
    arrays = _arrays(parts)
    if not split:
        return arrays, None
    if not 0 < split < 1:
        raise DataError(f"validation_split={split}: expected a number from 0 to below 1.")
    records = _records(arrays)
    at = math.floor(records * (1 - split))
    if not 0 < at < records:
        raise DataError(f"validation_split={split} of {records} records leaves none on one side.")
    return _part(arrays, 0, at), _part(arrays, at, records)


def validation_data(data: Any) -> Any:
    """Return validation data of a call, for `RunData.of`."""
    if isinstance(data, list) and 1 <= len(data) <= 3:
        data = tuple(data)
    elif is_plain(data):
        data = (data,)
    return training_data(data, None, None, 0.0, "validation_data")[0] if isinstance(data, tuple) else data


def as_array(path: str, leaf: Any) -> Any:
    """Return a tensor, a table of pandas, or a sparse array as rows, and anything else as it is; refuse what Keras does
    not take for an array, such as a list of numbers."""
    if sparse_rows.is_compressed(leaf):
        return sparse_rows.rows_of(leaf, path)
    if hasattr(leaf, "to_numpy"):
        array = leaf.to_numpy()
        is_column = array.ndim == 1 and type(leaf).__module__.partition(".")[0] == "pandas"
        return array[:, None] if is_column else array  # as Keras does
    if isinstance(leaf, (int, float, complex, str, bytes)):
        raise DataError(
            f"{path} is the {type(leaf).__name__} {leaf!r}. Expected an array: in Keras, too, a list is a list of "
            "arrays. Convert lists of numbers with np.array."
        )
    return np.asarray(leaf) if hasattr(leaf, "__array__") else leaf


def _arrays(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return (x, y, sample_weight) with rows for everything that Keras takes as an array."""
    converted = []
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=False):
        converted.append(tree.unflatten(part, [as_array(path, leaf) for path, leaf in tree.flatten(part, name)]))
    return tuple(converted)


def _records(arrays: tuple[Any, ...]) -> int:
    return len(next(leaf for _, leaf in tree.flatten(arrays)))


def _part(arrays: tuple[Any, ...], first: int, stop: int) -> tuple[Any, ...]:
    """Return rows [first, stop) of all arrays."""
    return tuple(tree.map_leaves(lambda leaf: sparse_rows.part(leaf, first, stop), part) for part in arrays)


def _refuse_servers(config: TrainConfig, why: str) -> None:
    """Refuse batches with parameter servers."""
    if config.strategy.has_servers:
        raise ConfigError(
            f"--strategy parameter-server reads records, and {why}. Leave the strategy out, or pass records: arrays "
            "or files."
        )


def _check_arrays(name: str, steps: int, data: Any) -> None:
    """Refuse a number of steps of data that are neither arrays nor batches."""
    if not isinstance(data, tuple) or steps < 1:
        raise DataError(
            f"{name}={steps} with {type(data).__name__}: expected 1 or more, with arrays or batches (a "
            "tf.data.Dataset, a PyDataset, a generator). Leave it out: an epoch is a pass over all records."
        )


def streams(
    parts: tuple[Any, Any, Any],
    config: TrainConfig,
    batch_size: int | None,
    steps_per_epoch: int | None,
    validation_steps: int | None,
    shuffle: bool | str,
    validation_batch_size: int | None = None,
    epochs: int = 1,
) -> tuple[Any, Any, Any]:
    """Return (training, validation, test) data, with streams in place of data that give batches, for a call of `fit`
    that trains so many epochs."""
    train, validation, test = parts
    if inputs.are_batches(train):  # which have a size of their own, so that batch_size is ignored as in Keras
        _refuse_servers(config, f"x is a {type(train).__name__}, which makes batches")
        train = inputs.stream_of(train, "train", steps_per_epoch, config, epochs, bool(shuffle))
    elif steps_per_epoch is not None:
        train = _stream_of_arrays(train, config, batch_size, steps_per_epoch, draws_order(shuffle))
    if isinstance(train, Stream):
        _warn_of_short_epochs(train, epochs)
    if validation_steps is not None and not inputs.are_batches(validation):
        _check_arrays("validation_steps", validation_steps, validation)
        records = _records(validation)
        size = validation_batch_size or batch_size or math.ceil(records / validation_steps)
        validation = _part(validation, 0, min(records, validation_steps * size))
    if inputs.are_batches(validation):
        validation = inputs.evaluated_of(validation, "validation", validation_steps, config)
    return train, validation, inputs.evaluated_of(test, "test", None, config) if inputs.are_batches(test) else test


def draws_order(shuffle: bool | str) -> bool:
    """Return whether records are in another order in each epoch. Keras's "batch" has the same records in each batch, in
    another order within it, which changes nothing."""
    return bool(shuffle) and shuffle != "batch"


def _stream_of_arrays(train: Any, config: TrainConfig, batch_size: int | None, steps: int, draws: bool) -> Any:
    """Return arrays as batches; or unchanged, where an epoch is a pass over their records."""
    _check_arrays("steps_per_epoch", steps, train)
    records, size = _records(train), config.batch.global_batch_size
    if batch_size is None and size == _USUAL:
        size = math.ceil(records / steps)
    elif batch_size is not None and steps == math.ceil(records / size):
        return train
    _refuse_servers(config, "steps_per_epoch makes batches of arrays")
    return from_arrays(train, size, steps, config.batch.seed if draws else None)


def _warn_of_short_epochs(stream: Stream, epochs: int) -> None:
    """Warn as Keras does where an epoch ends before `steps_per_epoch` because a pass over the data ends."""
    batches, steps = stream.batches, stream.steps
    if batches is not None and steps is not None and batches % steps and epochs >= math.ceil(batches / steps):
        warnings.warn(
            f"Your input ran out of data; interrupting training. A pass over the data has {batches} batches, and "
            f"steps_per_epoch is {steps}, so that some epochs have fewer steps. Make sure that your dataset or "
            "generator can generate at least `steps_per_epoch * epochs` batches. You may need to use the `.repeat()` "
            "function when building your dataset.",
            stacklevel=3,
        )
