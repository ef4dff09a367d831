"""Converts the data arguments of `fit` into sources, streams of batches, or data sets that are written once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf._tensorflow.datasets import is_dataset
from raytf.config.train_config import TrainConfig
from raytf.data import class_weights, tree
from raytf.data.sources import ArraySource, MappingSource, RayDataSource, Source
from raytf.data.sources import arrays as array_source
from raytf.data.sources.base import refuse_other_classes
from raytf.data.sources.batches import LiveBatches, NotRecordableError, recorded
from raytf.data.sources.ray_dataset import is_ray_dataset
from raytf.data.streams import Stream, from_arrays, from_generator, from_iterable, from_py_dataset, from_tf_dataset
from raytf.errors import ConfigError, DataError
from raytf.runs import notebook
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from raytf.training.job import Sources

#: The batch size of a run for which none was passed.
_USUAL = TrainConfig().batch.global_batch_size
#: Types with `len()` and `[i]` that are not data sets.
_NO_DATA_SETS = (str, bytes, dict, list, tuple, set, np.ndarray)
#: Data of up to this many bytes are recorded by default. Writing that many takes some minutes.
_RECORDED_BYTES = 8 << 30


@dataclass(frozen=True)
class RunData:
    """A run's data by name: sources, streams of batches, Ray Datasets that must still be written, or None."""

    parts: dict[str, Any]

    @property
    def stream(self) -> Stream | None:
        """Return the stream of the training data, if it has batches; otherwise None."""
        train = self.parts["train"]
        return train if isinstance(train, Stream) else None

    @classmethod
    def of(cls, train: Any, validation: Any, test: Any) -> RunData:
        """Create it from arguments of `fit`. Refuse objects that are not data, and sources with different classes."""
        parts = {"train": train, "validation": validation, "test": test}
        parsed: dict[str, Any] = {n: data if is_ray_dataset(data) else source(data, n) for n, data in parts.items()}
        own = [data for data in parsed.values() if getattr(data, "classes", None) is not None]
        for data in own[1:]:
            refuse_other_classes(own[0], data)
        return cls(parsed)

    def sources(
        self, run: Storage, pipeline: str = "auto", validation_steps: int | None = None, verbose: int = 1
    ) -> Sources:
        """Return sources for all parts. Data that must be written goes to the run's folder, under the run's lease."""
        parts = dict(self.parts)
        unread = {name: data for name, data in parts.items() if is_ray_dataset(data) or isinstance(data, Stream)}
        if unread:
            with notebook.display(verbose) as display, Lease(run, display.say):
                for name, data in unread.items():
                    folder = run.child(f"data/{name}")
                    if not isinstance(data, Stream):
                        parts[name] = RayDataSource(data, folder.uri, say=display.say)
                    elif name == "train":
                        parts[name] = training_source(data, pipeline, folder, display.say)
                    else:
                        steps = validation_steps if name == "validation" else None
                        parts[name] = evaluation_source(data, steps, folder, display.say)
        return Sources(parts["train"], parts["validation"], parts["test"])


def source(data: Any, name: str) -> Source | Stream | None:
    """Return the source for an argument of `fit`; refuse an object that is not data."""
    if data is None or isinstance(data, Stream) or (hasattr(data, "take") and hasattr(data, "spec")):
        return data
    if isinstance(data, tuple) and 1 <= len(data) <= 3:
        x, y, weight = (*data, None, None)[:3]
        return ArraySource(x, y, weight, name=name)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, _NO_DATA_SETS):
        return MappingSource(data, name=name)
    raise DataError(
        f"{name} data is a {type(data).__name__}. Expected a Source such as raytf.ArraySource or raytf.ParquetSource, "
        "a tuple (x, y) or (x, y, sample_weight) of arrays, a data set with len() and [i], a Ray Dataset, or batches "
        "(a tf.data.Dataset, a keras.utils.PyDataset or a generator)."
    )


def one_of(name: str, value: Any, other: str, other_value: Any) -> Any:
    """Return the value of whichever of two arguments was passed; refuse a call with both."""
    if value is not None and other_value is not None:
        raise DataError(f"fit(...) got {name} and {other}, which mean the same. Pass only one of them.")
    return value if other_value is None else other_value


def is_py_dataset(data: Any) -> bool:
    """Return whether an object is a keras.utils.PyDataset, without importing Keras."""
    return any(kind.__name__ == "PyDataset" and "keras" in kind.__module__ for kind in type(data).__mro__)


def are_batches(data: Any) -> bool:
    """Return whether an object yields batches, one after another."""
    return is_dataset(data) or is_py_dataset(data) or _is_iterator(data) or _is_loader(data)


def _is_iterator(data: Any) -> bool:
    return hasattr(data, "__next__") and hasattr(data, "__iter__")


def _is_loader(data: Any) -> bool:
    """Return whether `iter(data)` iterates over batches, as with a `torch.utils.data.DataLoader`."""
    has_items = hasattr(data, "__getitem__") or isinstance(data, (set, frozenset)) or is_ray_dataset(data)
    return hasattr(data, "__iter__") and not has_items and not _is_iterator(data)


def stream_of(
    data: Any, name: str, steps: int | None, config: TrainConfig, epochs: int = 1, shuffle: bool = False
) -> Stream:
    """Return the stream of data for which `are_batches` is true.

    Args:
        data: the batches.
        name: the argument's name, for messages.
        steps: batches per epoch, if the program sets them.
        config: the run's settings.
        epochs: how often the batches are read.
        shuffle: whether a PyDataset's batches have a different order in each epoch.
    """
    seed, asked = config.batch.seed, config.batch.global_batch_size
    is_asked = asked != _USUAL and name == "train"
    if is_dataset(data):
        return from_tf_dataset(data.rebatch(asked) if is_asked else data, name, steps, seed)
    if is_py_dataset(data):
        stream = from_py_dataset(data, name, steps, shuffle and name == "train", seed)
    elif _is_loader(data):
        stream = from_iterable(data, name, steps)
    else:
        stream = from_generator(data, name, steps, epochs)
    rows = rows_of(stream)
    if is_asked and rows != asked:
        raise ConfigError(
            f"--global-batch-size {asked}: {name} data makes batches of {rows} itself. Leave the flag out, or make "
            "batches of this size in the program."
        )
    return stream


def evaluated_of(data: Any, name: str, steps: int | None, config: TrainConfig) -> Stream:
    """Return a stream as `stream_of` does, for an evaluation that may use only the first batches.

    Keras evaluates `steps` batches, or as many as there are.
    """
    if steps is not None and is_dataset(data):
        return stream_of(data.take(steps), name, None, config)
    has_end = _is_loader(data) or (is_py_dataset(data) and data.num_batches is not None)
    return stream_of(data, name, None if has_end else steps, config)


def rows_of(stream: Stream) -> int:
    """Return the number of records in the first batch."""
    return len(next(leaf for _, leaf in tree.flatten(stream.peek())))


def training_source(stream: Stream, how: str, folder: Storage, say: Callable[[str], None]) -> Source:
    """Return a source for training: records in a folder, or batches that are made while the run trains.

    Args:
        stream: the batches.
        how: the value of --pipeline: auto, record or live.
        folder: the folder for records.
        say: called with a line that says what was chosen, and why.
    """
    if how == "record" and stream.batches is not None:
        raise ConfigError(
            f"--pipeline record records the batches of one epoch, but a pass over {stream.name} data has "
            f"{stream.batches} batches and steps_per_epoch is {stream.steps}. Leave out the flag or steps_per_epoch."
        )
    why = _why_live(stream, how)
    if not why:
        try:
            records = recorded(stream, folder, say, most=stream.steps)
            stream.end()
            say(f"{stream.name} data: {len(records.rows)} batches, recorded, {_why_recorded(stream)}")
            return records
        except NotRecordableError as error:
            if how == "record":
                raise ConfigError(f"--pipeline record: {error} Or leave the flag out.") from None
            why = error.why
    if stream.steps is None:
        say(f"{stream.name} data does not report how many batches it has; counting them")
        stream.steps = stream.count()
    say(f"{stream.name} data: {stream.steps} batches per epoch, made by this program while the run trains, since {why}")
    first = [leaf for _, leaf in tree.flatten(stream.peek())]
    return LiveBatches(stream.name, first, stream.spec(), stream.steps, stream.batches)


def _why_recorded(stream: Stream) -> str:
    if stream.changes:
        return f"since --pipeline record asks for it: all epochs have the batches of the first, though {stream.changes}"
    return "since each pass is the same"


def _why_live(stream: Stream, how: str) -> str:
    """Return why batches are made while the run trains; empty if they are recorded."""
    if how == "live":
        return "--pipeline live asks for it"
    size = sum(leaf.nbytes for _, leaf in tree.flatten(stream.peek())) * (stream.steps or 0)
    if how == "auto" and stream.changes:
        return stream.changes
    if how == "auto" and size > _RECORDED_BYTES:
        return f"it has about {size / 2**30:.0f} GiB"
    return ""


def evaluation_source(stream: Stream, steps: int | None, folder: Storage, say: Callable[[str], None]) -> Source:
    """Return a source for validation or test data, which reads its first `steps` batches once; by default all."""
    records = recorded(stream, folder, say, most=steps)
    stream.end()
    return records


# -- what Keras takes --------------------------------------------------------------------------------------------------


def class_weights_of(class_weight: Any, data: Any, spec: tuple[Any, Any, Any]) -> dict[int, float] | None:
    """Return `class_weight` of a call with plain numbers. Refuse it for data with which Keras accepts none; `data` is
    as `streams` returns it, and `spec` is the spec of a record."""
    weights = class_weights.checked(class_weight)
    if weights is not None:
        is_source = not isinstance(data, (tuple, Stream))  # which Keras does not have
        has_positions = is_source or (isinstance(data, Stream) and data.is_dataset)
        class_weights.refuse(spec, "train", has_positions, is_weighted=is_source)
    return weights


def is_plain(data: Any) -> bool:
    """Return whether data are arrays as Keras accepts them: an array, a dict or list of arrays, a tensor, a pandas
    table, or sparse or ragged data."""
    if isinstance(data, (dict, list)) or array_source.is_compressed(data):
        return True
    return isinstance(data, np.ndarray) or (hasattr(data, "shape") and hasattr(data, "__array__"))


def training_data(x: Any, y: Any, sample_weight: Any, split: float, name: str = "x") -> tuple[Any, Any]:
    """Return (training data, validation data) of a call, for `RunData.of`.

    Args:
        x, y, sample_weight: as in `keras.Model.fit`. Without y, x may be any training data that raytf accepts.
        split: the fraction of the records that is held out, the last ones, as in Keras.

    Raises:
        DataError: two arguments contradict each other.
    """
    has_targets = y is not None and isinstance(x, tuple)  # then x is a tuple of inputs
    if not is_plain(x) and not has_targets:
        if y is not None or sample_weight is not None:
            raise DataError(
                f"{name} is a {type(x).__name__}, which includes its targets and weights. Leave out y and "
                "sample_weight, or pass arrays."
            )
        if split and not isinstance(x, tuple):
            raise DataError(
                f"validation_split={split} needs arrays, but {name} is a {type(x).__name__}. Pass validation_data, or "
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
    """Return a tensor, a pandas table or a sparse array as rows, and any other leaf unchanged. Refuse a leaf that Keras
    does not accept as an array, such as a number from a list."""
    if array_source.is_compressed(leaf):
        return array_source.rows_of(leaf, path)
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
    """Return (x, y, sample_weight) with rows in place of everything that Keras accepts as an array."""
    converted = []
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=False):
        converted.append(tree.unflatten(part, [as_array(path, leaf) for path, leaf in tree.flatten(part, name)]))
    return tuple(converted)


def _records(arrays: tuple[Any, ...]) -> int:
    return len(next(leaf for _, leaf in tree.flatten(arrays)))


def _part(arrays: tuple[Any, ...], first: int, stop: int) -> tuple[Any, ...]:
    """Return rows [first, stop) of all arrays."""
    return tuple(tree.map_leaves(lambda leaf: array_source.part(leaf, first, stop), part) for part in arrays)


def _refuse_servers(config: TrainConfig, why: str) -> None:
    """Refuse batches with parameter servers."""
    if config.strategy.has_servers:
        raise ConfigError(
            f"--strategy parameter-server reads records, but {why}. Leave the strategy out, or pass records: arrays "
            "or files."
        )


def _check_arrays(name: str, steps: int, data: Any) -> None:
    """Refuse a number of steps for data that are neither arrays nor batches."""
    if not isinstance(data, tuple) or steps < 1:
        raise DataError(
            f"{name}={steps} with {type(data).__name__}: expected 1 or more, with arrays or batches (a "
            "tf.data.Dataset, a PyDataset, a generator). Leave it out to make a pass over all records."
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
    """Return (training, validation, test) data for a call of `fit` that trains `epochs` epochs, with streams in place
    of data that yield batches."""
    train, validation, test = parts
    if are_batches(train):  # which have a size of their own, so that batch_size is ignored as in Keras
        _refuse_servers(config, f"x is a {type(train).__name__}, which makes batches")
        train = stream_of(train, "train", steps_per_epoch, config, epochs, bool(shuffle))
    elif steps_per_epoch is not None:
        train = _stream_of_arrays(train, config, batch_size, steps_per_epoch, draws_order(shuffle))
    if isinstance(train, Stream):
        _warn_of_short_epochs(train, epochs)
    if validation_steps is not None and not are_batches(validation):
        _check_arrays("validation_steps", validation_steps, validation)
        records = _records(validation)
        size = validation_batch_size or batch_size or math.ceil(records / validation_steps)
        validation = _part(validation, 0, min(records, validation_steps * size))
    if are_batches(validation):
        validation = evaluated_of(validation, "validation", validation_steps, config)
    return train, validation, evaluated_of(test, "test", None, config) if are_batches(test) else test


def draws_order(shuffle: bool | str) -> bool:
    """Return whether each epoch has its own order of records. Keras's "batch" only reorders the records within each
    batch, which changes nothing."""
    return bool(shuffle) and shuffle != "batch"


def _stream_of_arrays(train: Any, config: TrainConfig, batch_size: int | None, steps: int, draws: bool) -> Any:
    """Return arrays as batches, or unchanged if an epoch is one pass over their records."""
    _check_arrays("steps_per_epoch", steps, train)
    records, size = _records(train), config.batch.global_batch_size
    if batch_size is None and size == _USUAL:
        size = math.ceil(records / steps)
    elif batch_size is not None and steps == math.ceil(records / size):
        return train
    _refuse_servers(config, "steps_per_epoch makes batches of arrays")
    return from_arrays(train, size, steps, config.batch.seed if draws else None)


def _warn_of_short_epochs(stream: Stream, epochs: int) -> None:
    """Warn, as Keras does, if an epoch ends before `steps_per_epoch` because a pass over the data ends."""
    batches, steps = stream.batches, stream.steps
    if batches is not None and steps is not None and batches % steps and epochs >= math.ceil(batches / steps):
        warnings.warn(
            f"Your input ran out of data; interrupting training. A pass over the data has {batches} batches, and "
            f"steps_per_epoch is {steps}, so that some epochs have fewer steps. Make sure that your dataset or "
            "generator can generate at least `steps_per_epoch * epochs` batches. You may need to use the `.repeat()` "
            "function when building your dataset.",
            stacklevel=3,
        )
