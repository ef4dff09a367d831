"""A source of records in any Python object with `__len__` and `__getitem__`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from raytf.data import tree
from raytf.data.sources.base import Spec, by_name
from raytf.errors import DataError, RaytfError, one_line


class MappingSource:
    """Records of a mapping-style data set, such as those of PyTorch, Grain or your own: `len(data)`, `data[i]`.

    The data set is pickled and sent to the workers, so it should open files on first use and not pickle them. If it has
    a method `__getitems__` for a list of numbers, that is used.

    Args:
        data: the data set. `data[i]` is x, or a tuple (x, y) or (x, y, sample_weight), of numbers, arrays, and nested
            dicts, lists and tuples of them; all records have the same shapes.
        x, y, sample_weight: keys, if `data[i]` is a dict; a list of keys makes a dict by name.
        name: the source's name in messages.
        threads: records that are read concurrently; more than 1 only if the data set is thread-safe.

    Raises:
        DataError: there is no length or no record, or a record has no numbers, other shapes than the first record, or
            a number that the first record's dtype cannot hold.
    """

    block_sizes = None
    window = 1

    def __init__(
        self,
        data: Any,
        x: str | list[str] | None = None,
        y: str | list[str] | None = None,
        sample_weight: str | None = None,
        name: str = "mapping",
        threads: int = 1,
    ):
        self.name, self._data, self._threads = name, data, threads
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise DataError(f"{name}: a {type(data).__name__} has no records to read. Expected len() and [i].")
        self._columns = None if x is None else (by_name(x), by_name(y), sample_weight)
        self._forget()
        self.records = len(data)
        if not self.records:
            raise DataError(f"{name}: there are no records.")
        self._template, leaves = self._record(0, self._get(0))
        self._specs = [Spec(leaf.shape, leaf.dtype.name) for _, leaf in leaves]
        for path, leaf in leaves:
            if leaf.dtype.kind not in "biufc":
                raise DataError(f"{name}: {path} has dtype {leaf.dtype}, which is not a number. Convert it to numbers.")
        self.spec = tree.unflatten(self._template, self._specs)

    def _forget(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._rows = 0

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k not in ("_pool", "_rows")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def rows_read(self) -> int:
        """Records read so far, for measuring."""
        return self._rows

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        out = [np.empty((len(records), *spec.shape), spec.dtype) for spec in self._specs]
        for row, (i, item) in enumerate(zip(records.tolist(), self._items(records.tolist()), strict=True)):
            _, leaves = self._record(i, item)
            self._compare(i, leaves)
            for target, (_, leaf) in zip(out, leaves, strict=True):
                target[row] = leaf
        self._rows += len(records)
        return out

    def label_range(self) -> tuple[float, float] | None:
        return None

    def _items(self, records: list[int]) -> Any:
        if hasattr(self._data, "__getitems__"):
            items = self._asked(lambda: list(self._data.__getitems__(records)), records)
            if len(items) != len(records):
                raise DataError(
                    f"{self.name}: __getitems__ was called for {len(records)} records but returned {len(items)}. It "
                    "must return one record for each number, in order."
                )
            return items
        if self._threads == 1:
            return map(self._get, records)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="raytf-read")
        return self._pool.map(self._get, records)

    def _get(self, i: int) -> Any:
        return self._asked(lambda: self._data[i], [i])

    def _asked(self, call: Any, records: list[int]) -> Any:
        try:
            return call()
        except RaytfError:
            raise
        except Exception as error:
            which = f"record {records[0]}" if len(records) == 1 else f"{len(records)} records from {records[0]} on"
            raise DataError(
                f"{self.name}: the data set raised at {which}: {type(error).__name__}: {one_line(error, 300)}"
            ) from error

    def _record(self, i: int, item: Any) -> tuple[Any, list[tuple[str, np.ndarray]]]:
        """Return a record as (x, y, sample_weight), and its leaves by path."""
        if self._columns is not None:
            names = [name for _, name in tree.flatten(self._columns)]
            missing = [n for n in names if not isinstance(item, dict) or n not in item]
            if missing:
                has = ", ".join(map(str, item)) if isinstance(item, dict) else f"no names, but a {type(item).__name__}"
                raise DataError(f"{self.name}: record {i} has no {missing[0]!r}; it has {has}.")
            parts = tree.map_leaves(lambda n: item[n], self._columns)
        elif isinstance(item, (tuple, list)) and 1 <= len(item) <= 3:
            parts = (*item, None, None)[:3]
        else:
            parts = (item, None, None)
        labelled = dict(zip(("x", "y", "sample_weight"), parts, strict=True))
        leaves = [(path, np.asarray(v)) for part, value in labelled.items() for path, v in tree.flatten(value, part)]
        if not tree.flatten(parts[0]):
            raise DataError(f"{self.name}: record {i} holds no x.")
        return parts, leaves

    def _compare(self, i: int, leaves: list[tuple[str, np.ndarray]]) -> None:
        if len(leaves) != len(self._specs):
            raise DataError(f"{self.name}: record {i} has {len(leaves)} arrays, the first one {len(self._specs)}.")
        for (path, leaf), spec in zip(leaves, self._specs, strict=True):
            if leaf.shape != spec.shape or not np.can_cast(leaf.dtype, spec.dtype, "same_kind"):
                raise DataError(
                    f"{self.name}: record {i}: {path} has shape {leaf.shape} and dtype {leaf.dtype}, the first one "
                    f"{spec.shape} and {spec.dtype}. All records must agree: pad or resize them."
                )
            if not _fits(leaf, spec.dtype):
                raise DataError(
                    f"{self.name}: record {i}: {path} is {leaf.dtype} and holds numbers that {spec.dtype}, the dtype "
                    "of the first one, cannot hold. Convert all records to one dtype."
                )


def _fits(leaf: np.ndarray, dtype: str) -> bool:
    """Return whether numbers stay the same in another dtype; real numbers may be rounded."""
    if np.can_cast(leaf.dtype, dtype, "safe"):
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        cast = leaf.astype(dtype)
    if leaf.dtype.kind in "fc":
        return bool((np.isfinite(cast) == np.isfinite(leaf)).all())
    return bool((cast == leaf).all()) and bool(((cast < 0) == (leaf < 0)).all())
