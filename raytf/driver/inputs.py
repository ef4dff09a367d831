"""Turn the data that `fit` was given into sources, streams of batches, or data sets that are written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf._tensorflow.datasets import is_dataset
from raytf.config.train_config import TrainConfig
from raytf.data import tree
from raytf.data.sources import ArraySource, MappingSource, RayDataSource, Source
from raytf.data.sources.base import refuse_other_classes
from raytf.data.sources.batches import LiveBatches, NotRecordableError, recorded
from raytf.data.sources.ray_dataset import is_ray_dataset
from raytf.data.streams import Stream, from_generator, from_iterable, from_py_dataset, from_tf_dataset
from raytf.errors import ConfigError, DataError
from raytf.runs import notebook
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from raytf.training.job import Sources

#: Types with `len()` and `[i]` that are a mistake where a data set is expected.
_NO_DATA_SETS = (str, bytes, dict, list, tuple, set, np.ndarray)
#: Data of up to this many bytes are recorded if nothing else is said: about as much as is written in some minutes.
_RECORDED_BYTES = 8 << 30


@dataclass(frozen=True)
class RunData:
    """A run's data.

    Attributes:
        parts: by name: sources, streams of batches, Ray Datasets that must still be written, or None.
    """

    parts: dict[str, Any]

    @property
    def stream(self) -> Stream | None:
        """Return the batches of the training data, if it has batches."""
        train = self.parts["train"]
        return train if isinstance(train, Stream) else None

    @classmethod
    def of(cls, train: Any, validation: Any, test: Any) -> RunData:
        """Make it from the arguments of `fit`.

        Raises:
            DataError: one of them is not data, or is empty, or their labels are numbered by different classes.
        """
        parts = {"train": train, "validation": validation, "test": test}
        parsed: dict[str, Any] = {n: data if is_ray_dataset(data) else source(data, n) for n, data in parts.items()}
        own = [data for data in parsed.values() if getattr(data, "classes", None) is not None]
        for data in own[1:]:
            refuse_other_classes(own[0], data)
        return cls(parsed)

    def sources(
        self, run: Storage, pipeline: str = "auto", validation_steps: int | None = None, verbose: int = 1
    ) -> Sources:
        """Return sources for all parts. What must be written goes below the run's folder, with the run's lease held.

        Args:
            run: its folder.
            pipeline: --pipeline.
            validation_steps: batches of the validation data, if not all.
            verbose: as of Keras's `fit`.

        Raises:
            DataError: a data set failed, or does not contain numbers.
        """
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
    """Return the source for an argument of `fit`.

    Raises:
        DataError: it is not data.
    """
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
    """Return the value of two arguments of which at most one may be given.

    Raises:
        DataError: both are.
    """
    if value is not None and other_value is not None:
        raise DataError(f"fit(...) got {name} and {other}, which are the same. Give one of them.")
    return value if other_value is None else other_value


def is_py_dataset(data: Any) -> bool:
    """Return whether something is a keras.utils.PyDataset; Keras is not imported to know it."""
    return any(kind.__name__ == "PyDataset" and "keras" in kind.__module__ for kind in type(data).__mro__)


def are_batches(data: Any) -> bool:
    """Return whether something gives batches, one after another."""
    return is_dataset(data) or is_py_dataset(data) or _is_iterator(data) or _is_loader(data)


def _is_iterator(data: Any) -> bool:
    return hasattr(data, "__next__") and hasattr(data, "__iter__")


def _is_loader(data: Any) -> bool:
    """Return whether `iter` makes an iterator over batches of something, as of a `torch.utils.data.DataLoader`."""
    has_items = hasattr(data, "__getitem__") or isinstance(data, (set, frozenset)) or is_ray_dataset(data)
    return hasattr(data, "__iter__") and not has_items and not _is_iterator(data)


def stream_of(
    data: Any, name: str, steps: int | None, config: TrainConfig, epochs: int = 1, shuffle: bool = False
) -> Stream:
    """Return the stream of data for which `are_batches` is true.

    Args:
        data: the batches.
        name: of the argument, for people.
        steps: batches of an epoch, as the program says.
        config: the run's settings.
        epochs: how often the batches are read.
        shuffle: whether a PyDataset's batches have another order in each epoch.

    Raises:
        ConfigError: a flag asks for another size of batches than they have.
        DataError: they cannot be read, or nobody says how many there are.
    """
    seed, asked = config.batch.seed, config.batch.global_batch_size
    is_asked = asked != TrainConfig().batch.global_batch_size and name == "train"
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
            f"--global-batch-size {asked}: {name} data makes batches of {rows} itself. Leave the flag out, or have the "
            "program make such batches."
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
    """Return records of the first batch."""
    return len(next(leaf for _, leaf in tree.flatten(stream.peek())))


def training_source(stream: Stream, how: str, folder: Storage, say: Callable[[str], None]) -> Source:
    """Return a source for training: records, or batches that are made while the run trains.

    Args:
        stream: the batches.
        how: --pipeline: auto, record or live.
        folder: for records.
        say: told what was chosen, and why.

    Raises:
        ConfigError: batches cannot be recorded, and --pipeline asks for it.
        DataError: the data fails.
    """
    if how == "record" and stream.batches is not None:
        raise ConfigError(
            f"--pipeline record records the batches of one epoch, and a pass of {stream.name} data has "
            f"{stream.batches} batches where steps_per_epoch is {stream.steps}. Leave the flag or steps_per_epoch out."
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
        say(f"{stream.name} data does not know how many batches it has; they are counted")
        stream.steps = stream.count()
    say(f"{stream.name} data: {stream.steps} batches an epoch, made by this program while the run trains, since {why}")
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
    """Return a source for validation or a test, which reads its batches once.

    Args:
        steps: how many batches, if the program says so.

    Raises:
        DataError: the data fails, or its batches have records of different shapes.
    """
    records = recorded(stream, folder, say, most=steps)
    stream.end()
    return records
