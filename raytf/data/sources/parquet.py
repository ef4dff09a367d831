"""Parquet files on local disk, S3, GCS or Azure, read by row group."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from raytf.data import tree
from raytf.data.sources.base import WINDOW_RECORDS, Order, Spec, crc_of
from raytf.data.sources.block_reader import BlockSource
from raytf.data.sources.file_set import Files
from raytf.data.sources.schema import check_files, columns_of, labels_of, read_schema
from raytf.errors import DataError, StorageError, one_line
from raytf.storage.refusals import classify

#: The most files that a reader keeps open, and the most footers that a source and its readers keep. A footer costs a
#: read of 64 KiB or more from storage.
_OPEN_FILES = 64


class ParquetSource(BlockSource):
    """Parquet files on local disk, S3, GCS or Azure, read a row group at a time.

    Args:
        uri: a file, or a folder whose *.parquet files are read in the order of their names.
        x: the column, or a list of columns (inputs are then a dict by name); None uses the columns that `raytf data
            convert` recorded beside the files, else `image`.
        y: the label's column or columns, or None.
        sample_weight: the column of sample weights, or None.
        shapes: shape of one record for list columns, by column; flat lists keep their length.
        window: number of records in a shuffle window; a larger window needs more memory.
        order: `blocks` permutes row groups; `records` permutes records, as with arrays, and a worker then keeps all
            records that it has read; `auto` is `records` for data of up to 256 MiB.

    A column holds numbers, or lists of numbers of one length.

    Raises:
        DataError: there are no files or records, or a column is missing or holds no numbers.
        StorageError: storage refuses a request.
    """

    _own = (*BlockSource._own, "_opened", "_lock", "_footers")
    _reads_beside = True

    def __init__(
        self,
        uri: str,
        x: str | list[str] | None = None,
        y: str | list[str] | None = "label",
        sample_weight: str | None = None,
        shapes: dict[str, tuple[int, ...]] | None = None,
        window: int = WINDOW_RECORDS,
        order: Order = "blocks",
    ):
        super().__init__(uri, window)
        files = Files(uri, (".parquet",))
        schema = read_schema(files.storage)
        if not files.names:
            raise DataError(f"{uri}: there are no *.parquet files.")
        if schema is not None:
            check_files(schema, files)
        self._columns: tuple[Any, Any, Any] = columns_of(schema, x, y, sample_weight)
        self.classes = labels_of(schema, self._columns[1])[1]
        self._names = [column for _, column in tree.flatten(self._columns)]
        self._shapes = {**({n: s.shape for n, s in schema.specs.items()} if schema else {}), **(shapes or {})}
        filesystem, base = files.storage.arrow()
        self._files = [(filesystem, f"{base}/{name}") for name in files.names]
        self._groups: list[tuple[int, int]] = []
        sizes: list[int] = []
        self._label_bounds: list[tuple[float, float] | None] = []
        self._footers_crc = 0
        for f in range(len(self._files)):
            metadata = self._open(f).metadata
            refuse_missing(self._names, set(metadata.schema.to_arrow_schema().names), self._files[f][1])
            for g in range(metadata.num_row_groups):
                group = metadata.row_group(g)
                if group.num_rows:
                    self._groups.append((f, g))
                    sizes.append(group.num_rows)
                    self._label_bounds.append(self._describe(group))
        self._lay_out(np.array(sizes, np.int64))
        if not self.records:
            raise DataError(f"{uri}: the Parquet files hold no records.")
        first = self._block(0)
        self._leaf_specs = [Spec.of(leaf) for leaf in first]
        self.spec = tree.unflatten(self._columns, self._leaf_specs)
        self._order_by(order, 0)
        # A checksum of the footers' entries about each row group, and of the first records.
        self.crc = None if self._by_record else crc_of([leaf[:16] for leaf in first], self._footers_crc)
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        #: Open files by thread and file: a ParquetFile serves one thread at a time.
        self._opened: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._footers = _Footers()

    def reader(self, shards: int) -> Self:
        reader = super().reader(shards)
        reader._footers = self._footers
        return reader

    def label_range(self) -> tuple[float, float] | None:
        known = [b for b in self._label_bounds if b is not None]
        if len(known) < len(self._label_bounds):
            return None
        return min(b[0] for b in known), max(b[1] for b in known)

    def _read(self, b: int) -> list[np.ndarray]:
        f, g = self._groups[b]
        path = self._files[f][1]
        with explained(f"{path}: row group {g}"):
            table = self._open(f).read_row_group(g, columns=list(dict.fromkeys(self._names)))
        leaves = leaves_of(table, self._names, self._shapes, path)
        refuse_others(self._names, leaves, self._leaf_specs, path, self._files[0][1])
        return leaves

    def _open(self, f: int) -> Any:
        key = threading.get_ident(), f
        with self._lock:
            file = self._opened.get(key)
            if file is not None:
                self._opened.move_to_end(key)
                return file
        file = self._footers.open(*self._files[f])
        with self._lock:
            self._opened[key] = file
            if len(self._opened) > _OPEN_FILES:
                # Do not close it: another thread may be reading it, and it closes with its last reference.
                self._opened.popitem(last=False)
        return file

    def _describe(self, group: Any) -> tuple[float, float] | None:
        """Add a row group's footer to the CRC. Return its smallest and largest label if the footer has them."""
        label, bounds = self._columns[1], None
        about: list[Any] = [group.num_rows]
        for c in range(group.num_columns):
            column = group.column(c)
            if column.path_in_schema.partition(".")[0] not in self._names:
                continue
            about += [column.path_in_schema, column.total_uncompressed_size, column.total_compressed_size]
            statistics = column.statistics if column.is_stats_set else None
            if statistics is not None and statistics.has_min_max:
                about += [statistics.min, statistics.max]
                if column.path_in_schema == label and isinstance(statistics.min, int):
                    bounds = float(statistics.min), float(statistics.max)
        self._footers_crc = zlib.crc32(repr(about).encode(), self._footers_crc)
        return bounds


class _Footers:
    """Opens Parquet files, and reuses footers. If several threads need the same footer, only one reads it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        #: Locks by path, each held while its footer is read.
        self._reading: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def open(self, filesystem: Any, path: str) -> Any:
        """Return a ParquetFile that no other thread uses.

        Raises:
            DataError: it is not a Parquet file, or a damaged one.
            StorageError: storage refuses a request.
        """
        with self._lock:
            reading = self._reading[path]
        with reading:
            with self._lock:
                footer = self._kept.pop(path, None)
            file = _parquet_file(filesystem, path, footer)
            with self._lock:
                self._kept[path] = file.metadata
                if len(self._kept) > _OPEN_FILES:
                    self._kept.popitem(last=False)
        return file


def _parquet_file(filesystem: Any, path: str, footer: Any) -> Any:
    import pyarrow.parquet as pq

    with explained(path):
        return pq.ParquetFile(path, filesystem=filesystem, metadata=footer, page_checksum_verification=True)


def leaves_of(table: Any, names: list[str], shapes: dict[str, tuple[int, ...]], path: str) -> list[np.ndarray]:
    """Return columns of a table that was read from a file, each [records, *shape].

    Raises:
        DataError: a column is missing, or holds no numbers.
    """
    present = set(table.column_names)
    refuse_missing(names, present, path)
    return [_array(table.column(name), name, path, shapes) for name in names]


def refuse_missing(names: list[str], present: set[str], path: str) -> None:
    """Raise if a file lacks a column.

    Raises:
        DataError: a column is missing.
    """
    missing = [name for name in names if name not in present]
    if missing:
        raise DataError(f"{path}: there is no column {missing[0]!r}; it has {', '.join(sorted(present))}.")


def refuse_others(names: list[str], leaves: list[np.ndarray], specs: list[Spec], path: str, first: str) -> None:
    """Raise if a column has another shape or dtype than in the first file.

    Raises:
        DataError: a column differs.
    """
    for name, leaf, spec in zip(names, leaves, specs, strict=False):
        if leaf.shape[1:] != spec.shape or leaf.dtype.name != spec.dtype:
            raise DataError(
                f"{path}: column {name!r} has shape {leaf.shape[1:]} and dtype {leaf.dtype}, but {spec.shape} and "
                f"{spec.dtype} in {first}. All files must agree."
            )


def _array(column: Any, name: str, path: str, shapes: dict[str, tuple[int, ...]]) -> np.ndarray:
    import pyarrow as pa

    column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    _refuse_nulls(column, name, path)
    rows, width = len(column), None
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or _is_fixed(column.type):
        inner = column.flatten()
        if len(inner) % rows:
            raise DataError(f"{path}: column {name!r} holds lists of different lengths. Pad them to one length.")
        if not _is_fixed(column.type):
            lengths = column.value_lengths().to_numpy()
            if len(lengths) and (lengths != lengths[0]).any():
                raise DataError(f"{path}: column {name!r} holds lists of different lengths. Pad them to one length.")
        width, column = len(inner) // rows, inner
        _refuse_nulls(column, name, path)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        raise DataError(f"{path}: column {name!r} has type {column.type}. Expected numbers or lists of numbers.")
    values = column.to_numpy(zero_copy_only=False)
    shape = shapes.get(name, () if width is None else (width,))
    if int(np.prod(shape, dtype=np.int64)) != (width or 1):
        raise DataError(f"{path}: column {name!r} holds {width or 1} numbers a record; shape {shape} does not fit.")
    return values.reshape(rows, *shape)


def _refuse_nulls(column: Any, name: str, path: str) -> None:
    if column.null_count:
        raise DataError(f"{path}: column {name!r} has {column.null_count} missing values. Fill or drop them first.")


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise a StorageError for an outage of storage, which may pass, and a DataError for damaged data."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:  # a damaged footer may name unknown types
        text = one_line(error)
        kind = classify(error) if isinstance(error, OSError) else "other"
        if kind != "other":
            raise StorageError(f"{what} cannot be read: {text}", kind) from error
        raise DataError(f"{what} cannot be read; it is not a Parquet file, or a damaged one: {text}") from error


def _is_fixed(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_fixed_size_list(kind)
