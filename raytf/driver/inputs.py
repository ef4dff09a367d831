"""Turns the data that `fit` was given into sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf.data.sources import ArraySource, MappingSource, RayDataSource, Source
from raytf.data.sources.base import refuse_other_classes
from raytf.data.sources.ray_dataset import is_ray_dataset
from raytf.data.streams import Stream
from raytf.driver.feed import given
from raytf.errors import DataError
from raytf.runs import notebook
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from raytf.training.job import Sources

#: Types with `len()` and `[i]` that are a mistake where a data set is expected.
_NO_DATA_SETS = (str, bytes, dict, list, tuple, set, np.ndarray)


@dataclass(frozen=True)
class RunData:
    """A run's data.

    Attributes:
        parts: by name: sources, streams of batches, Ray Datasets that must still be written, or None.
    """

    parts: dict[str, Any]

    @property
    def stream(self) -> Stream | None:
        """The batches of the training data, if it has batches."""
        train = self.parts["train"]
        return train if isinstance(train, Stream) else None

    @classmethod
    def of(cls, train: Any, validation: Any, test: Any) -> RunData:
        """From the arguments of `fit`.

        Raises:
            DataError: one of them is not data, or is empty, or their labels are numbered by different classes.
        """
        parts = {"train": train, "validation": validation, "test": test}
        found: dict[str, Any] = {n: data if is_ray_dataset(data) else source(data, n) for n, data in parts.items()}
        own = [data for data in found.values() if getattr(data, "classes", None) is not None]
        for data in own[1:]:
            refuse_other_classes(own[0], data)
        return cls(found)

    def sources(
        self, run: Storage, pipeline: str = "auto", validation_steps: int | None = None, verbose: int = 1
    ) -> Sources:
        """Sources for all of them. What must be written goes below the run's folder, with the run's lease held.

        Args:
            run: its folder.
            pipeline: --pipeline.
            validation_steps: batches of the validation data, if not all.
            verbose: as of Keras's `fit`.

        Raises:
            DataError: a data set failed, or does not contain numbers.
        """
        found = dict(self.parts)
        unread = {name: data for name, data in found.items() if is_ray_dataset(data) or isinstance(data, Stream)}
        if unread:
            with notebook.display(verbose) as display, Lease(run, display.say):
                for name, data in unread.items():
                    folder = run.child(f"data/{name}")
                    if not isinstance(data, Stream):
                        found[name] = RayDataSource(data, folder.uri, say=display.say)
                    elif name == "train":
                        found[name] = given.training_source(data, pipeline, folder, display.say)
                    else:
                        steps = validation_steps if name == "validation" else None
                        found[name] = given.evaluation_source(data, steps, folder, display.say)
        return Sources(found["train"], found["validation"], found["test"])


def source(data: Any, name: str) -> Source | Stream | None:
    """The source for an argument of `fit`.

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
    """The value of two arguments of which at most one may be given.

    Raises:
        DataError: both are.
    """
    if value is not None and other_value is not None:
        raise DataError(f"fit(...) got {name} and {other}, which are the same. Give one of them.")
    return value if other_value is None else other_value
