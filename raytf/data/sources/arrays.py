"""Records in memory, or memory-mapped."""

from __future__ import annotations

from typing import Any

import numpy as np

from raytf.data import tree
from raytf.data.sources.base import Spec, as_text
from raytf.data.sparse_rows import SparseRows
from raytf.errors import DataError


class ArraySource:
    """Numpy arrays in memory, or memory-mapped.

    Args:
        x: inputs, an array (or `SparseRows`) or nested dicts, lists and tuples of them, all with the same first
            dimension.
        y: targets, likewise.
        sample_weight: one number a record, or nested as y for several outputs.

    Raises:
        DataError: there are no records, their numbers differ, or a dtype fits into no tensor.
    """

    block_sizes = None
    window = 1

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, name: str = "arrays"):
        self.name = name
        self._tree = tree.map_leaves(_as_rows, (x, y, sample_weight))
        self._tree = tree.map_leaves(_with_text, self._tree[0]), *self._tree[1:]
        parts = dict(zip(("x", "y", "sample_weight"), self._tree, strict=True))
        leaves = [pair for part, value in parts.items() for pair in tree.flatten(value, part)]
        self._leaves = [leaf for _, leaf in leaves]
        if not tree.flatten(parts["x"]):
            raise DataError(
                f"{name}: x holds no array. Pass an array for each input of the model that is not optional."
            )
        for path, leaf in leaves:
            if leaf.ndim == 0:
                raise DataError(f"{name}: {path} is a single value. Expected an array with one row for each record.")
            if leaf.dtype.kind not in "biufc" and not (leaf.dtype.kind == "S" and path.startswith("x")):
                raise DataError(
                    f"{name}: {path} has dtype {leaf.dtype}, which is neither a number nor text in x. Convert it to "
                    "numbers first."
                )
        lengths = {path: len(leaf) for path, leaf in leaves}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{path} has {n}" for path, n in lengths.items())
            raise DataError(f"{name}: arrays differ in their number of records: {listed}.")
        self.records = len(self._leaves[0])
        if not self.records:
            raise DataError(f"{name}: there are no records.")
        self.spec = tree.map_leaves(Spec.of, self._tree)

    @property
    def leaves(self) -> list[np.ndarray]:
        """All arrays, in the order of `spec`."""
        return self._leaves

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        return [leaf[records] for leaf in self._leaves]

    def label_range(self) -> tuple[float, float] | None:
        y = self._tree[1]
        if not isinstance(y, np.ndarray) or y.dtype.kind not in "iub":
            return None
        return float(y.min()), float(y.max())


def _as_rows(leaf: Any) -> Any:
    return leaf if isinstance(leaf, SparseRows) else np.asarray(leaf)


def _with_text(leaf: Any) -> Any:
    text = None if isinstance(leaf, SparseRows) else as_text(leaf)
    return leaf if text is None else text
