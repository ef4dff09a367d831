"""Sources: records that can be read in any order, in memory or in Parquet files."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from raytf.data import tree
from raytf.errors import DataError, StorageError, one_line

#: Records within which a source read block by block is shuffled.
WINDOW_RECORDS = 8192
#: Parquet files that stay open with their footers; opening one again reads 64 KiB or more.
_OPEN_FILES = 64


@dataclass(frozen=True)
class Spec:
    """What one record looks like.

    Attributes:
        shape: of one record.
        dtype: a numpy dtype's name.
    """

    shape: tuple[int, ...]
    dtype: str


class Source(Protocol):
    """Anything with random access to records. One record is a tuple (x, y, sample_weight) of nested leaves.

    A source may have `reader(shards)`: then each pipeline takes from a reader of its own, made for so many shards that
    each move forward through windows.

    Attributes:
        name: for messages.
        records: how many there are.
        block_sizes: [B] int64, records in each block that is read as one, or None where a record can be read alone.
        window: records within which the order is shuffled after its blocks were.
        spec: (x, y, sample_weight), nested `Spec`; y and sample_weight may be None.
    """

    name: str
    records: int
    window: int
    spec: tuple[Any, Any, Any]

    @property
    def block_sizes(self) -> np.ndarray | None: ...

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        """Leaves of `spec` in the order of `tree.flatten`, each [len(records), *shape]."""
        ...

    def label_range(self) -> tuple[float, float] | None:
        """Smallest and largest label where y is one integer leaf and that is cheap to know."""
        ...


def fingerprint(source: Source) -> str:
    """Tells data sets of one size apart, from a few records; of Parquet also from its footers, without reading it."""
    if isinstance(source, ParquetSource):
        crc = source.crc
    else:
        some = np.unique(np.linspace(0, source.records - 1, 16).astype(np.int64))
        crc = _crc(source.take(some))
    return f"{source.records} records, sample CRC-32 {crc:08x}"


def _crc(leaves: list[np.ndarray], crc: int = 0) -> int:
    for leaf in leaves:
        crc = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), crc)
    return crc


class ArraySource:
    """Numpy arrays in memory, or memory-mapped.

    Args:
        x: inputs, an array or nested dicts, lists and tuples of them, all with the same first dimension.
        y: targets, likewise.
        sample_weight: one number a record, or nested as y for several outputs.

    Raises:
        DataError: no records, lengths that differ, or dtypes that no tensor can hold.
    """

    block_sizes = None
    window = 1

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, name: str = "arrays"):
        self.name = name
        self._tree = tree.map_leaves(np.asarray, (x, y, sample_weight))
        parts = dict(zip(("x", "y", "sample_weight"), self._tree, strict=True))
        leaves = [pair for part, value in parts.items() for pair in tree.flatten(value, part)]
        self._leaves = [leaf for _, leaf in leaves]
        if not tree.flatten(parts["x"]):
            raise DataError(f"{name}: x holds no array.")
        for path, leaf in leaves:
            if leaf.ndim == 0:
                raise DataError(f"{name}: {path} is a single value. Expected an array with one row for each record.")
            if leaf.dtype.kind not in "biufc":
                raise DataError(
                    f"{name}: {path} has dtype {leaf.dtype}, which is no number. Convert it to numbers first "
                    "(for text, to token ids)."
                )
        lengths = {path: len(leaf) for path, leaf in leaves}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{path} has {n}" for path, n in lengths.items())
            raise DataError(f"{name}: arrays differ in their number of records: {listed}.")
        self.records = len(self._leaves[0])
        if not self.records:
            raise DataError(f"{name}: there are no records.")
        self.spec = tree.map_leaves(lambda a: Spec(a.shape[1:], a.dtype.name), self._tree)

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        return [leaf[records] for leaf in self._leaves]

    def label_range(self) -> tuple[float, float] | None:
        y = self._tree[1]
        if not isinstance(y, np.ndarray) or y.dtype.kind not in "iub":
            return None
        return float(y.min()), float(y.max())


class ParquetSource:
    """Parquet files on local disk, S3 or GCS, read a row group at a time.

    Args:
        uri: a file, or a folder whose *.parquet files are read in the order of their names.
        x: the column, or a list of columns (then inputs are a dict by name).
        y: the label's column or columns, or None.
        sample_weight: the column of sample weights, or None.
        shapes: shape of one record for list columns, by column; flat lists keep their length.
        window: records within which the order is shuffled after row groups were; a larger one needs more memory.

    A column holds numbers, or lists of numbers of one length.

    Raises:
        DataError: no files, no records, a missing column, or a column that holds no numbers.
        StorageError: storage refuses.
    """

    def __init__(
        self,
        uri: str,
        x: str | list[str] = "image",
        y: str | list[str] | None = "label",
        sample_weight: str | None = None,
        shapes: dict[str, tuple[int, ...]] | None = None,
        window: int = WINDOW_RECORDS,
    ):
        self.name, self.window = uri, window
        self._columns: tuple[Any, Any, Any] = tree.map_leaves(str, (_by_name(x), _by_name(y), sample_weight))
        self._names = [column for _, column in tree.flatten(self._columns)]
        self._shapes = dict(shapes or {})
        self._files = _parquet_files(uri)
        self._forget()
        self._groups: list[tuple[int, int]] = []
        sizes: list[int] = []
        self._label_bounds: list[tuple[float, float] | None] = []
        #: Of what the footers tell about each row group, and of the first records.
        self.crc = 0
        for f in range(len(self._files)):
            metadata = self._open(f).metadata
            present = set(metadata.schema.to_arrow_schema().names)
            missing = [c for c in self._names if c not in present]
            if missing:
                raise DataError(
                    f"{self._files[f][1]}: there is no column {missing[0]!r}; it has {', '.join(sorted(present))}."
                )
            for g in range(metadata.num_row_groups):
                group = metadata.row_group(g)
                if group.num_rows:
                    self._groups.append((f, g))
                    sizes.append(group.num_rows)
                    self._label_bounds.append(self._describe(group))
        self.block_sizes = np.array(sizes, np.int64)
        self.records = int(self.block_sizes.sum())
        if not self.records:
            raise DataError(f"{uri}: the Parquet files hold no records.")
        self._starts = np.cumsum(self.block_sizes) - self.block_sizes
        self._shards = 0
        self._leaf_specs: list[Spec] = []
        first = self._block(0)
        self._leaf_specs = [Spec(leaf.shape[1:], leaf.dtype.name) for leaf in first]
        self.spec = tree.unflatten(self._columns, self._leaf_specs)
        self.crc = _crc([leaf[:16] for leaf in first], self.crc)
        self._forget()

    def _forget(self) -> None:
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._cache: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        #: Records of each cached block that were taken, and the blocks of which all were.
        self._taken: dict[int, int] = {}
        self._used_up: OrderedDict[int, None] = OrderedDict()
        self._cached_rows = 0
        self._rows_read = [0]

    def __getstate__(self) -> dict:
        # What was read stays with the process that read it; open files cannot travel.
        own = ("_opened", "_cache", "_taken", "_used_up", "_cached_rows", "_rows_read")
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def reader(self, shards: int) -> ParquetSource:
        """The same records, with a cache for so many logical shards that are read at once. One thread may use it."""
        reader = copy.copy(self)
        reader._shards, reader._rows_read = shards, self._rows_read
        return reader

    @property
    def rows_read(self) -> int:
        """Records read from storage so far by this source and its readers, for measuring."""
        return self._rows_read[0]

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        blocks = np.searchsorted(self._starts, records, side="right") - 1
        wanted, counts = np.unique(blocks, return_counts=True)
        out = [np.empty((len(records), *spec.shape), spec.dtype) for spec in self._leaf_specs]
        # Those at hand first: reading the others may push them out.
        for b, count in sorted(
            zip(wanted.tolist(), counts.tolist(), strict=True), key=lambda b: b[0] not in self._cache
        ):
            here = blocks == b
            inside = records[here] - self._starts[b]
            for target, leaf in zip(out, self._block(b), strict=True):
                target[here] = leaf[inside]
            self._count(b, count)
            self._evict()
        return out

    def label_range(self) -> tuple[float, float] | None:
        known = [b for b in self._label_bounds if b is not None]
        if len(known) < len(self._label_bounds):
            return None
        return min(b[0] for b in known), max(b[1] for b in known)

    def _count(self, b: int, records: int) -> None:
        taken = self._taken[b] + records
        self._taken[b] = taken % int(self.block_sizes[b])
        if taken >= self.block_sizes[b]:
            self._used_up[b] = None
        else:
            self._used_up.pop(b, None)

    def _evict(self) -> None:
        """Drop blocks that exceed what shards need: the row groups of a window each, which overhang it at both ends.

        An epoch takes every record once, so a block of which all were taken goes first.
        """
        capacity = self._shards * (self.window + 2 * int(self.block_sizes.max()))
        while self._cached_rows > capacity and len(self._cache) > 1:
            b = next(iter(self._used_up or self._cache))
            self._cached_rows -= int(self.block_sizes[b])
            del self._cache[b], self._taken[b]
            self._used_up.pop(b, None)

    def _block(self, b: int) -> list[np.ndarray]:
        if b in self._cache:
            self._cache.move_to_end(b)
            return self._cache[b]
        f, g = self._groups[b]
        path = self._files[f][1]
        with _explained(f"{path}: row group {g}"):
            table = self._open(f).read_row_group(g, columns=list(dict.fromkeys(self._names)))
        leaves = [self._array(table.column(c), c, path) for c in self._names]
        for name, leaf, spec in zip(self._names, leaves, self._leaf_specs, strict=False):
            if leaf.shape[1:] != spec.shape or leaf.dtype.name != spec.dtype:
                raise DataError(
                    f"{path}: column {name!r} has shape {leaf.shape[1:]} and dtype {leaf.dtype}, but {spec.shape} and "
                    f"{spec.dtype} in {self._files[0][1]}. All files must agree."
                )
        self._cache[b], self._taken[b] = leaves, 0
        self._cached_rows += len(leaves[0])
        self._rows_read[0] += len(leaves[0])
        return leaves

    def _array(self, column: Any, name: str, path: str) -> np.ndarray:
        import pyarrow as pa

        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        self._refuse_nulls(column, name, path)
        rows, width = len(column), None
        while pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or _is_fixed(column.type):
            inner = column.flatten()
            if len(inner) % rows:
                raise DataError(f"{path}: column {name!r} holds lists of different lengths. Pad them to one length.")
            if not _is_fixed(column.type):
                lengths = column.value_lengths().to_numpy()
                if len(lengths) and (lengths != lengths[0]).any():
                    raise DataError(
                        f"{path}: column {name!r} holds lists of different lengths. Pad them to one length."
                    )
            width, column = len(inner) // rows, inner
            self._refuse_nulls(column, name, path)
        if not (
            pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
        ):
            raise DataError(f"{path}: column {name!r} has type {column.type}. Expected numbers or lists of numbers.")
        values = column.to_numpy(zero_copy_only=False)
        shape = self._shapes.get(name, () if width is None else (width,))
        if int(np.prod(shape, dtype=np.int64)) != (width or 1):
            raise DataError(f"{path}: column {name!r} holds {width or 1} numbers a record; shape {shape} does not fit.")
        return values.reshape(rows, *shape)

    def _refuse_nulls(self, column: Any, name: str, path: str) -> None:
        if column.null_count:
            raise DataError(f"{path}: column {name!r} has {column.null_count} missing values. Fill or drop them first.")

    def _open(self, f: int) -> Any:
        import pyarrow.parquet as pq

        if f not in self._opened:
            filesystem, path = self._files[f]
            with _explained(path):
                self._opened[f] = pq.ParquetFile(path, filesystem=filesystem)
            if len(self._opened) > _OPEN_FILES:
                self._opened.popitem(last=False)[1].close(force=True)
        self._opened.move_to_end(f)
        return self._opened[f]

    def _describe(self, group: Any) -> tuple[float, float] | None:
        """Add a row group's footer to the CRC; its smallest and largest label where the footer tells."""
        label, bounds = self._columns[1], None
        told: list[Any] = [group.num_rows]
        for c in range(group.num_columns):
            column = group.column(c)
            if column.path_in_schema.partition(".")[0] not in self._names:
                continue
            told += [column.path_in_schema, column.total_uncompressed_size, column.total_compressed_size]
            statistics = column.statistics if column.is_stats_set else None
            if statistics is not None and statistics.has_min_max:
                told += [statistics.min, statistics.max]
                if column.path_in_schema == label and isinstance(statistics.min, int):
                    bounds = float(statistics.min), float(statistics.max)
        self.crc = zlib.crc32(repr(told).encode(), self.crc)
        return bounds


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Tell an outage of storage, which may pass, from data that is damaged."""
    from raytf.storage import classify

    try:
        yield
    except (OSError, ValueError) as error:
        text = one_line(error)
        kind = classify(error) if isinstance(error, OSError) else "other"
        if kind != "other":
            raise StorageError(f"{what} cannot be read: {text}", kind) from error
        raise DataError(f"{what} cannot be read; it is no Parquet file, or a damaged one: {text}") from error


def _is_fixed(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_fixed_size_list(kind)


def _by_name(columns: str | list[str] | None) -> Any:
    return {c: c for c in columns} if isinstance(columns, list) else columns


def _parquet_files(uri: str) -> list[tuple[Any, str]]:
    from raytf.storage import Storage

    storage = Storage(uri)
    filesystem, path = storage.arrow()
    if path.endswith(".parquet") and storage.exists(""):
        return [(filesystem, path)]
    names = [n for n in storage.list("", recursive=True) if n.endswith(".parquet")]
    if not names:
        raise DataError(f"{uri}: there are no *.parquet files.")
    return [(filesystem, f"{path}/{name}") for name in names]
