"""A part of the training data that is held out for validation."""

from __future__ import annotations

from typing import Any

import numpy as np

from raytf.data import tree
from raytf.data.sources import ArraySource, Source
from raytf.errors import DataError


class Subset:
    """Some records of another source.

    Args:
        source: one with records that can be read one by one.
        records: their indices, in order.
        name: for messages.
    """

    block_sizes = None

    def __init__(self, source: Source, records: np.ndarray, name: str):
        self._source, self._records = source, records
        self.name, self.records = name, len(records)
        self.window, self.spec = source.window, source.spec

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        return self._source.take(self._records[records])

    def label_range(self) -> tuple[float, float] | None:
        labels: Any = self.spec[1]
        span = self._source.label_range()
        if span is None or labels is None or len(tree.flatten(labels)) != 1:
            return None
        return span  # of all records: the model also has the classes that only the other part has


def hold_out(source: Source | tuple[Any, ...], share: float) -> tuple[Source, Source | None]:
    """Cut a source in two, one part for training and one for validation; (source, None) for a share of 0.

    The records held out are spread evenly and are the same for every seed, so that all trials of a search validate on
    the same records.

    Args:
        source: such as `raytf.ArraySource`, or a tuple (x, y) or (x, y, sample_weight) of arrays; not one that is read
            block by block, of which every epoch would read all.
        share: of the records, from 0 to below 1.

    Raises:
        DataError: the share is invalid, or leaves no records on one side, or the source is read in blocks.
    """
    if not 0 <= share < 1:
        raise DataError(f"a share of {share} cannot be held out. Expected a number from 0 to below 1, such as 0.1.")
    data = ArraySource(*source) if isinstance(source, tuple) and 1 <= len(source) <= 3 else source
    if isinstance(data, tuple) or not hasattr(data, "block_sizes"):
        raise DataError(
            f"a {type(data).__name__} has no part that can be held out. Expected a Source such as raytf.ArraySource, "
            "or a tuple (x, y) or (x, y, sample_weight) of arrays."
        )
    if not share:
        return data, None
    if data.block_sizes is not None:
        raise DataError(
            f"{data.name} is read block by block, and no part of it can be held out. Write the records for "
            "validation to files of their own, or hold out none."
        )
    turns = np.floor(np.arange(data.records + 1) * share + 1e-9)
    held = np.diff(turns) > 0
    if held.all() or not held.any():
        raise DataError(
            f"{data.name}: a share of {share:g} of {data.records} records leaves "
            f"{'none to train on' if held.all() else 'none to validate on'}. Choose another share."
        )
    train, validation = np.flatnonzero(~held), np.flatnonzero(held)
    return Subset(data, train, data.name), Subset(data, validation, f"{data.name} (validation)")
