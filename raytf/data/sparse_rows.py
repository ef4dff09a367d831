"""Sparse arrays, whose rows become dense when they are read."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    """Return a sparse batch as a dense array, and other values as they are."""
    return SparseRows.of(value)[:] if is_sparse_tensor(value) or is_scipy(value) else value


class SparseRows:
    """Rows of a sparse array, of which a part is dense at a time. Code that reads rows can use it like a numpy array.

    Args:
        starts: [rows + 1] beginning of each row in `columns`.
        columns: [n] places within a row with flattened dimensions.
        values: [n] numbers at these places.
        shape: of the array.
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


def rows_of(value: Any, path: str) -> SparseRows:
    """Return the rows of a sparse array.

    Args:
        path: of the argument, for the message.

    Raises:
        DataError: it is ragged, or no input: losses of Keras take dense targets and weights.
    """
    if is_ragged(value):
        raise ragged_error(f"{path} is a RaggedTensor", f"{path}.to_tensor()")
    if path.startswith("x"):
        return SparseRows.of(value)
    way = f"{path}.toarray()" if is_scipy(value) else f"tf.sparse.to_dense({path})"
    raise DataError(
        f"{path} is a {type(value).__name__}. Expected dense targets and weights: losses take no others. Make it dense "
        f"first, as with {way}."
    )


def ragged_error(what: str, way: str) -> DataError:
    """Return the error about ragged data.

    Args:
        what: the beginning of the message.
        way: how to pad it.
    """
    return DataError(
        f"{what}, and raytf trains on dense and sparse tensors only. Pad it first, as with {way}, and mask the padding "
        "where a layer should not see it, as with keras.layers.Embedding(mask_zero=True)."
    )


def part(rows: Any, first: int, stop: int) -> Any:
    """Return rows [first, stop) of an array, or of sparse rows, which stay sparse."""
    return rows.part(first, stop) if isinstance(rows, SparseRows) else rows[first:stop]
