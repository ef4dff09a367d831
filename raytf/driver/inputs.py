"""Turns the data that `fit` was given into sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf.data.sources import ArraySource, MappingSource, RayDataSource, Source
from raytf.data.sources.base import refuse_other_classes
from raytf.data.sources.ray_dataset import is_ray_dataset
from raytf.errors import DataError
from raytf.runs.display import Display
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from raytf.training.job import Sources

#: Types with `len()` and `[i]` that are a mistake where a data set is expected.
_NO_DATA_SETS = (str, bytes, dict, list, tuple, set, np.ndarray)


@dataclass(frozen=True)
class RunData:
    """A run's data by name: sources, Ray Datasets that must still be written, or None."""

    parts: dict[str, Any]

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

    def sources(self, run: Storage) -> Sources:
        """Sources for all of them. Ray Datasets are written once below the run's folder, with the run's lease held.

        Raises:
            DataError: a Dataset failed, or does not contain numbers.
        """
        found = dict(self.parts)
        datasets = {name: data for name, data in found.items() if is_ray_dataset(data)}
        if datasets:
            with Display() as display, Lease(run, display.say):
                for name, data in datasets.items():
                    found[name] = RayDataSource(data, run.child(f"data/{name}").uri, say=display.say)
        return Sources(found["train"], found["validation"], found["test"])


def source(data: Any, name: str) -> Source | None:
    """The source for an argument of `fit`.

    Raises:
        DataError: it is not data.
    """
    if data is None or (hasattr(data, "take") and hasattr(data, "spec")):
        return data
    if isinstance(data, tuple) and 1 <= len(data) <= 3:
        x, y, weight = (*data, None, None)[:3]
        return ArraySource(x, y, weight, name=name)
    if any(kind.__name__ in ("PyDataset", "Sequence") and "keras" in kind.__module__ for kind in type(data).__mro__):
        raise DataError(
            f"{name} data is a PyDataset, whose items are batches, and raytf makes its own batches of records. Give "
            "arrays, or a data set whose items are records."
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, _NO_DATA_SETS):
        return MappingSource(data, name=name)
    raise DataError(
        f"{name} data is a {type(data).__name__}. Expected a Source such as raytf.ArraySource or raytf.ParquetSource, "
        "a tuple (x, y) or (x, y, sample_weight) of arrays, a data set with len() and [i], or a Ray Dataset."
    )
