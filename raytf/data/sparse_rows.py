"""Sparse and ragged arrays whose rows become dense where they are read, as Keras makes them for a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from raytf import _tensorflow
from raytf.errors import DataError


def is_ragged(value: Any) -> bool:
    """Return whether something is a `tf.RaggedTensor`."""
    return type(value).__name__ == "RaggedTensor" and type(value).__module__.startswith("tensorflow.")


def is_sparse_tensor(value: Any) -> bool:
    """Return whether something is a `tf.SparseTensor`."""
    return type(value).__name__ == "SparseTensor" and type(value).__module__.startswith("tensorflow.")


def is_scipy(value: Any) -> bool:
    """Return whether something is a sparse matrix or array of SciPy."""
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocsr")


def is_compressed(value: Any) -> bool:
    """Return whether something is sparse or ragged."""
    return is_ragged(value) or is_sparse_tensor(value) or is_scipy(value)


def dense(value: Any) -> Any:
    """Return a batch that is sparse or ragged as a dense array, padded with zeros as in Keras; others as they are."""
    if is_ragged(value):
        return value.to_tensor().numpy()
    if is_sparse_tensor(value) or is_scipy(value):
        return SparseRows.of(value)[:]
    return value


class SparseRows:
    """Rows of a sparse array of which a part is dense at a time. It looks like a numpy array to what reads rows.

    Args:
        starts: [rows + 1] where each row begins in `columns`.
        columns: [n] places within a row, whose dimensions are flattened.
        values: [n] at these places.
        shape: of the whole.
    """

    def __init__(self, starts: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, ...]):
        self._starts, self._columns, self._values, self.shape = starts, columns, values, shape
        self.dtype, self.ndim = values.dtype, len(shape)

    @classmethod
    def of(cls, value: Any) -> SparseRows:
        """Of a `tf.SparseTensor`, or of a sparse matrix or array of SciPy."""
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
        """Bytes of the rows when they are dense."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return rows as a dense array; `rows` is a slice or an array of numbers."""
        chosen = np.arange(len(self))[rows]
        counts = self._starts[chosen + 1] - self._starts[chosen]
        out = np.zeros((len(chosen), int(np.prod(self.shape[1:]))), self.dtype)
        # The places of the values of all chosen rows, one row after another.
        places = np.arange(counts.sum()) + np.repeat(self._starts[chosen] - np.cumsum(counts) + counts, counts)
        out[np.repeat(np.arange(len(chosen)), counts), self._columns[places]] = self._values[places]
        return out.reshape(len(chosen), *self.shape[1:])

    def part(self, first: int, stop: int) -> SparseRows:
        """Return rows [first, stop), which stay sparse."""
        low, high = self._starts[first], self._starts[stop]
        starts = self._starts[first : stop + 1] - low
        return SparseRows(starts, self._columns[low:high], self._values[low:high], (stop - first, *self.shape[1:]))


class RaggedRows:
    """Rows of a `tf.RaggedTensor`, of which those that are read together are padded to the longest of them.

    Args:
        ragged: the tensor.

    Attributes:
        free: which lengths of a row differ from batch to batch.
    """

    def __init__(self, ragged: Any):
        self._ragged = ragged
        self.free = [length is None for length in ragged.shape[1:]]

    def __len__(self) -> int:
        return int(self._ragged.nrows())

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return rows as a dense array; `rows` is a slice or an array of numbers."""
        return _tensorflow.padded_rows(self._ragged, np.arange(len(self))[rows])

    def part(self, first: int, stop: int) -> RaggedRows:
        """Return rows [first, stop), which stay ragged."""
        return RaggedRows(self._ragged[first:stop])


def compressed_rows(value: Any, path: str) -> SparseRows | RaggedRows:
    """Return the rows of what is sparse or ragged.

    Args:
        path: of the argument, for the message.

    Raises:
        DataError: it is not an input, and losses of Keras take dense targets and weights.
    """
    if path.startswith("x"):
        return RaggedRows(value) if is_ragged(value) else SparseRows.of(value)
    way = "y.toarray()" if is_scipy(value) else "y.to_tensor()" if is_ragged(value) else "tf.sparse.to_dense(y)"
    raise DataError(
        f"{path} is a {type(value).__name__}. Expected dense targets and weights: losses take no others. Make it dense "
        f"first, as with {way}."
    )


def part(rows: Any, first: int, stop: int) -> Any:
    """Return rows [first, stop) of an array, or of sparse or ragged rows, which stay so."""
    return rows.part(first, stop) if isinstance(rows, (SparseRows, RaggedRows)) else rows[first:stop]
