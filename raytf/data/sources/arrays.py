"""Arrays as sources, and parts of sources that are held out. Sparse rows become dense when they are read."""

from __future__ import annotations

from typing import Any

import numpy as np

from raytf.data import tree
from raytf.data.sources.base import Source, Spec, as_text
from raytf.errors import DataError


class ArraySource:
    """Numpy arrays in memory, or memory-mapped.

    Args:
        x: inputs, an array (or `SparseRows`) or nested dicts, lists and tuples of them, all with the same first
            dimension.
        y: targets, likewise.
        sample_weight: one number per record, or nested like y for several outputs.

    Raises:
        DataError: there are no records, arrays differ in their number of records, or no tensor can hold a dtype.
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


class Subset:
    """Some records of another source, by their indices, in order."""

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
        return span  # the range of all records, because the model must also know the other part's classes


def hold_out(source: Source | tuple[Any, ...], share: float) -> tuple[Source, Source | None]:
    """Split a source into one part for training and one for validation; (source, None) for a share of 0.

    The records held out are spread evenly and are the same for every seed, so that all trials of a search validate on
    the same records.

    Args:
        source: such as `raytf.ArraySource`, or a tuple (x, y) or (x, y, sample_weight) of arrays; not a source that
            is read block by block, because every epoch would read all its blocks.
        share: share of the records to hold out, from 0 to below 1.

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


def is_ragged(value: Any) -> bool:
    """Return whether a value is a `tf.RaggedTensor`."""
    return type(value).__name__ == "RaggedTensor" and type(value).__module__.startswith("tensorflow.")


def is_sparse_tensor(value: Any) -> bool:
    """Return whether a value is a `tf.SparseTensor`."""
    return type(value).__name__ == "SparseTensor" and type(value).__module__.startswith("tensorflow.")


def is_scipy(value: Any) -> bool:
    """Return whether a value is a sparse matrix or array of SciPy."""
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocsr")


def is_compressed(value: Any) -> bool:
    """Return whether a value is sparse or ragged."""
    return is_ragged(value) or is_sparse_tensor(value) or is_scipy(value)


def dense(value: Any) -> Any:
    """Return a sparse batch as a dense array, and any other value unchanged."""
    return SparseRows.of(value)[:] if is_sparse_tensor(value) or is_scipy(value) else value


class SparseRows:
    """Rows of a sparse array, which become dense when indexed. Code that reads rows can use it like a numpy array.

    Args:
        starts: [rows + 1] beginning of each row in `columns`.
        columns: [n] position of each value in its flattened row.
        values: [n] numbers at these positions.
        shape: shape of the array.
    """

    def __init__(self, starts: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, ...]):
        self._starts, self._columns, self._values, self.shape = starts, columns, values, shape
        self.dtype, self.ndim = values.dtype, len(shape)

    @classmethod
    def of(cls, value: Any) -> SparseRows:
        """Return the rows of a `tf.SparseTensor`, or of a sparse matrix or array of SciPy."""
        if is_scipy(value):
            rows = value.tocsr(copy=True)
            rows.sum_duplicates()
            return cls(rows.indptr.astype(np.int64), rows.indices.astype(np.int64), rows.data, tuple(value.shape))
        indices, shape = np.asarray(value.indices), tuple(int(n) for n in value.dense_shape)
        order = np.argsort(indices[:, 0], kind="stable")
        columns = np.ravel_multi_index(tuple(indices[:, 1:].T), shape[1:]) if len(shape) > 1 else np.zeros(len(order))
        starts = np.concatenate([[0], np.cumsum(np.bincount(indices[:, 0], minlength=shape[0]))])
        return cls(starts, columns[order].astype(np.int64), np.asarray(value.values)[order], shape)

    @property
    def nbytes(self) -> int:
        """The size of the dense rows in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return rows as a dense array; `rows` is a slice or an array of numbers."""
        chosen = np.arange(len(self))[rows]
        counts = self._starts[chosen + 1] - self._starts[chosen]
        out = np.zeros((len(chosen), int(np.prod(self.shape[1:]))), self.dtype)
        # The indexes in `_values` of the chosen rows' values, one row after another.
        places = np.arange(counts.sum()) + np.repeat(self._starts[chosen] - np.cumsum(counts) + counts, counts)
        out[np.repeat(np.arange(len(chosen)), counts), self._columns[places]] = self._values[places]
        return out.reshape(len(chosen), *self.shape[1:])

    def part(self, first: int, stop: int) -> SparseRows:
        """Return rows [first, stop), which stay sparse."""
        low, high = self._starts[first], self._starts[stop]
        starts = self._starts[first : stop + 1] - low
        return SparseRows(starts, self._columns[low:high], self._values[low:high], (stop - first, *self.shape[1:]))


def rows_of(value: Any, path: str) -> SparseRows:
    """Return the rows of a sparse array.

    Args:
        path: the argument's path, for the message.

    Raises:
        DataError: it is ragged, or not an input: Keras's losses need dense targets and weights.
    """
    if is_ragged(value):
        raise ragged_error(f"{path} is a RaggedTensor", f"{path}.to_tensor()")
    if path.startswith("x"):
        return SparseRows.of(value)
    way = f"{path}.toarray()" if is_scipy(value) else f"tf.sparse.to_dense({path})"
    raise DataError(
        f"{path} is a {type(value).__name__}. Expected dense targets and weights, as losses require. Make it dense "
        f"first, as with {way}."
    )


def ragged_error(what: str, way: str) -> DataError:
    """Return the error for ragged data: `what` begins the message, and `way` is code that pads the data."""
    return DataError(
        f"{what}, and raytf trains on dense and sparse tensors only. Pad it first, as with {way}, and mask the padding "
        "where a layer should not see it, as with keras.layers.Embedding(mask_zero=True)."
    )


def part(rows: Any, first: int, stop: int) -> Any:
    """Return rows [first, stop) of an array, or of sparse rows, which stay sparse."""
    return rows.part(first, stop) if isinstance(rows, SparseRows) else rows[first:stop]
