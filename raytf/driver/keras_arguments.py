"""What `keras.Model.fit` takes, as raytf's data and settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from raytf.config.train_config import TrainConfig
from raytf.data import tree
from raytf.driver.feed import given
from raytf.errors import ConfigError, DataError

#: Records of a step where neither the call nor a flag says so, as in Keras.
KERAS_BATCH_SIZE = 32
#: That of a run whose size of batches nobody has given.
_USUAL = TrainConfig().batch.global_batch_size


def settings(
    config: TrainConfig | None, batch_size: int | None, epochs: int | None, is_keras_call: bool
) -> tuple[TrainConfig, list[str]]:
    """The settings of a call, by one rule: a flag that is not at its default wins over an argument of the call, so that
    a program can be tried with other settings as it is; and an argument wins over a default.

    Args:
        config: the settings that were passed, if any.
        batch_size, epochs: of the call.
        is_keras_call: the data came as Keras takes it, so that Keras's own batch size is the default.

    Returns:
        The settings, and a line for each argument that a flag has overruled.
    """
    given, usual, said = config or TrainConfig(), TrainConfig(), []
    if batch_size is None and config is None and is_keras_call:
        batch_size = KERAS_BATCH_SIZE
    size = given.batch.global_batch_size
    if batch_size is not None and size == usual.batch.global_batch_size:
        given = given.replace(global_batch_size=batch_size)
    elif batch_size not in (None, size):
        said.append(f"batch_size={batch_size} of the program is overruled by --global-batch-size {size}")
    length = given.length
    if epochs is not None and length.epochs is None and length.steps is None:
        given = given.replace(epochs=epochs)
    elif epochs not in (None, length.epochs):
        flag = f"--epochs {length.epochs}" if length.epochs is not None else f"--steps {length.steps}"
        said.append(f"epochs={epochs} of the program is overruled by {flag}")
    return given, said


def verbosity(verbose: Any) -> int:
    """`verbose` of a call as 0, 1 or 2.

    Raises:
        ConfigError: it is something else.
    """
    if verbose == "auto":
        return 1
    if verbose not in (0, 1, 2):
        raise ConfigError(
            f'verbose={verbose!r}: expected "auto" or 1 (a bar), 2 (a line for each epoch) or 0 (no progress).'
        )
    return int(verbose)


def check_epochs(initial_epoch: int, config: TrainConfig) -> None:
    """Refuse a first epoch after the last one.

    Raises:
        DataError: it is.
    """
    epochs = None if config.length.steps else config.length.epochs or 1
    if initial_epoch < 0 or (epochs is not None and initial_epoch >= epochs):
        raise DataError(
            f"initial_epoch is {initial_epoch}, and epochs is {epochs}. Expected 0 or more, and more epochs: they "
            "count from 0 on, and not from initial_epoch."
        )


def is_plain(data: Any) -> bool:
    """Whether data are arrays as Keras takes them: one, a dict or a list of them, a tensor, or a table of pandas."""
    if isinstance(data, (dict, list)):
        return True
    return isinstance(data, np.ndarray) or (hasattr(data, "shape") and hasattr(data, "__array__"))


def several(callbacks: Any) -> list[Any]:
    """The callbacks of a call as a list: Keras takes a single one, too."""
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def training_data(x: Any, y: Any, sample_weight: Any, split: float, name: str = "x") -> tuple[Any, Any]:
    """(training data, validation data) of a call, for `RunData.of`.

    Args:
        x, y, sample_weight: as `keras.Model.fit` takes them; anything that raytf takes as training data without y.
        split: the part of the records that is held out, the last ones, as in Keras.

    Raises:
        DataError: says which argument does not go with which.
    """
    if not is_plain(x):
        if y is not None or sample_weight is not None:
            raise DataError(
                f"{name} is a {type(x).__name__}, which has its targets and weights in it. Leave out y and "
                "sample_weight, or give arrays."
            )
        if split and not isinstance(x, tuple):
            raise DataError(
                f"validation_split={split} needs arrays, and {name} is a {type(x).__name__}. Give validation_data, or "
                "split the data with raytf.hold_out."
            )
    parts = x if isinstance(x, tuple) else (x, y, sample_weight) if is_plain(x) else None
    if parts is None:
        return x, None
    arrays = tuple(None if part is None else tree.map_leaves(as_array, part) for part in parts)
    if not split:
        return arrays, None
    if not 0 < split < 1:
        raise DataError(f"validation_split={split}: expected a number from 0 to below 1.")
    records = _records(arrays)
    at = math.floor(records * (1 - split))
    if not 0 < at < records:
        raise DataError(f"validation_split={split} of {records} records leaves none on one side.")

    return _rows(arrays, slice(None, at)), _rows(arrays, slice(at, None))


def validation_data(given: Any) -> Any:
    """Validation data of a call, for `RunData.of`."""
    if isinstance(given, list) and 1 <= len(given) <= 3:
        given = tuple(given)
    return training_data(given, None, None, 0.0, "validation_data")[0] if isinstance(given, tuple) else given


def as_array(leaf: Any) -> Any:
    """A tensor, or a column or table of pandas, as an array; anything else as it is."""
    if hasattr(leaf, "to_numpy"):
        return leaf.to_numpy()
    return leaf if isinstance(leaf, np.ndarray) or not hasattr(leaf, "__array__") else np.asarray(leaf)


def _records(arrays: tuple[Any, ...]) -> int:
    return len(next(leaf for _, leaf in tree.flatten(arrays)))


def _rows(arrays: tuple[Any, ...], rows: Any) -> tuple[Any, ...]:
    """The same rows of all arrays."""
    return tuple(None if own is None else tree.map_leaves(lambda leaf: leaf[rows], own) for own in arrays)


def _endless(arrays: tuple[Any, ...], size: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
    """Batches of pass after pass; the last one of each pass may be smaller.

    Args:
        arrays: of x, y and sample_weight.
        size: of a batch.
        seed: from which each pass draws an order of its own; None for that of the records.
    """
    records = _records(arrays)
    for number in itertools.count():
        order = np.arange(records) if seed is None else np.random.default_rng((seed, number)).permutation(records)
        for begin in range(0, records, size):
            yield _rows(arrays, order[begin : begin + size])


def _refuse_servers(config: TrainConfig, why: str) -> None:
    """Refuse batches with parameter servers.

    Raises:
        ConfigError: the strategy has some.
    """
    if config.strategy.has_servers:
        raise ConfigError(
            f"--strategy parameter-server reads records, and {why}. Leave the strategy out, or give records alone: "
            "arrays or files."
        )


def _check_arrays(name: str, steps: int, data: Any) -> None:
    """Refuse a number of steps of data whose batches cannot be told.

    Raises:
        DataError: they are no arrays.
    """
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
    shuffle: bool,
) -> tuple[Any, Any, Any]:
    """(training, validation, test) data with streams for those that give batches, and all others as they are.

    Args:
        parts: the data.
        config: the run's settings.
        batch_size, steps_per_epoch, validation_steps, shuffle: of the call.

    Raises:
        DataError: an argument does not go with the data.
    """
    train, validation, test = parts
    if given.are_batches(train):
        if batch_size is not None:
            raise DataError(
                f"batch_size={batch_size} goes with arrays, and x is a {type(train).__name__}, which makes its batches "
                "itself. Leave it out."
            )
        _refuse_servers(config, f"x is a {type(train).__name__}, which makes batches")
        train = given.stream_of(train, "train", steps_per_epoch, config, config.length.epochs or 2, shuffle)
    elif steps_per_epoch is not None:
        _check_arrays("steps_per_epoch", steps_per_epoch, train)
        records, asked = _records(train), config.batch.global_batch_size
        size = math.ceil(records / steps_per_epoch) if batch_size is None and asked == _USUAL else asked
        if batch_size is None or steps_per_epoch != math.ceil(records / size):  # else an epoch is a pass, as without it
            _refuse_servers(config, "steps_per_epoch makes batches of arrays")
            batches = _endless(train, size, config.batch.seed if shuffle else None)
            train = given.stream_of(batches, "train", steps_per_epoch, config, config.length.epochs or 2)
    if given.are_batches(validation):
        validation = given.evaluated_of(validation, "validation", validation_steps, config)
    elif validation_steps is not None:
        _check_arrays("validation_steps", validation_steps, validation)
        validation = _rows(validation, slice(validation_steps * (batch_size or KERAS_BATCH_SIZE)))
    return train, validation, given.evaluated_of(test, "test", None, config) if given.are_batches(test) else test
