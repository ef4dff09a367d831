"""Writes folders of TFRecord or Parquet files with a schema. Each file appears only when it is complete."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from raytf.data import tree
from raytf.data.sources import tfrecord_files
from raytf.data.sources.base import Source, Spec, fingerprint, record_bytes
from raytf.data.sources.schema import SCHEMA, UNFINISHED, RecordFile, Schema
from raytf.data.sources.tf_example import encode, feature
from raytf.data.sources.tfrecord_files import INDEX, IndexEntry, entry_of
from raytf.data.sources.tfrecord_files import encode as encode_index
from raytf.errors import ConfigError, DataError

To = Literal["tfrecord", "parquet"]
#: Default sizes in bytes of a file, and of a block, which is read in one piece.
FILE_BYTES, BLOCK_BYTES = 128 << 20, 8 << 20
#: The number of blocks to aim for, and the smallest size in bytes of a block that is worth a request.
_BLOCKS, _LEAST_BLOCK = 256, 256 << 10
#: Bytes of a TFRecord in addition to its numbers: its frame, and the names of its features.
_OVERHEAD = 64


@dataclass(frozen=True)
class FileLayout:
    """The sizes of files and blocks.

    Attributes:
        to: the format of the files.
        file_records, block_records: number of records in each file and block but the last.
    """

    to: To
    file_records: int
    block_records: int

    @classmethod
    def of(cls, to: To, spec: Any, records: int | None, file_bytes: int, block_bytes: int | None) -> FileLayout:
        """Return the layout for records of this spec.

        Args:
            records: number of records; None if it is unknown.
            file_bytes: the approximate size of a file.
            block_bytes: the size of a block; None for 1/256 of the data, from 256 KiB to 8 MiB.
        """
        each = record_bytes(spec) + (_OVERHEAD if to == "tfrecord" else 0)
        if block_bytes is None:
            total = BLOCK_BYTES * _BLOCKS if records is None else records * each
            block_bytes = min(BLOCK_BYTES, max(_LEAST_BLOCK, total // _BLOCKS))
        block = max(1, block_bytes // each)
        return cls(to, max(block, file_bytes // each // block * block), block)

    def name(self, i: int) -> str:
        return f"part-{i:05}.{self.to}"


def named(source: Source) -> tuple[Any, list[str], dict[str, Spec]]:
    """Return names for the leaves of a source: (tree of names, names in order, specs by name).

    Raises:
        DataError: the source nests arrays deeper than the columns of a file can, or two arrays share a name.
    """
    x, y, weight = source.spec
    columns = tree.map_leaves(str, getattr(source, "_columns", None))
    if columns is None or "" in [name for _, name in tree.flatten(columns)]:
        is_image = isinstance(x, Spec) and len(x.shape) == 3
        columns = (_names(x, "image" if is_image else "x"), _names(y, "label"), _names(weight, "sample_weight"))
    names = [name for _, name in tree.flatten(columns)]
    specs = [spec for _, spec in tree.flatten(source.spec)]
    if len(set(names)) < len(names):
        raise DataError(f"{source.name}: two of its arrays are called {max(names, key=names.count)!r}. Rename one.")
    return columns, names, dict(zip(names, specs, strict=True))


def _names(part: Any, name: str) -> Any:
    if part is None or isinstance(part, Spec):
        return None if part is None else name
    if isinstance(part, dict) and all(isinstance(inner, Spec) for inner in part.values()):
        return {key: str(key) for key in part}
    raise DataError(f"{name} holds nested arrays, but files have columns. Pass one array, or a flat dict of arrays.")


class DatasetFolder:
    """A folder of record files that is being written, with a list of the files that are complete.

    Args:
        storage: the folder.
        schema: schema of the records; its `files` are ignored.
        layout: the sizes of files and blocks.

    Raises:
        ConfigError: the folder contains something else.
    """

    def __init__(self, storage: Any, schema: Schema, layout: FileLayout):
        self._storage, self._schema, self._layout = storage, schema, layout
        y, specs = schema.columns[1], schema.specs
        is_label = isinstance(y, str) and y in specs and not specs[y].shape and np.dtype(specs[y].dtype).kind in "iub"
        #: Index of the label among the leaves; None unless the label is a single integer.
        self._label = schema.names().index(y) if is_label else None
        self._files: dict[str, RecordFile] = {}
        self._entries: dict[str, IndexEntry] = {}
        begun = storage.get_or_none(UNFINISHED)
        done = storage.get_or_none(SCHEMA) if begun is None else None
        self.is_finished = done is not None
        if begun is not None:
            before = Schema.decode(begun, storage.locate(UNFINISHED))
            self._refuse_others(before.identity, "an unfinished conversion")
            self._files = dict(before.files)
        elif done is not None:
            self._refuse_others(Schema.decode(done, storage.locate(SCHEMA)).identity, "converted data")
        elif others := [f.name for f in storage.files() if not f.name.rpartition("/")[2].startswith(("_", "."))]:
            raise ConfigError(f"{storage.locate('')} is not empty: it has {others[0]}. Choose an empty folder.")

    @property
    def files(self) -> dict[str, RecordFile]:
        return self._files

    def begin(self) -> None:
        if not self.is_finished:
            self._remember()

    def write(self, name: str, batches: Iterable[list[np.ndarray]]) -> None:
        """Write the records of `batches` to a file, which appears only when it is complete."""
        writer = _Tfrecords(self._schema, self._layout) if self._layout.to == "tfrecord" else None
        out = writer or _Parquet(self._schema, self._layout)
        low, high, records = np.inf, -np.inf, 0
        for leaves in batches:
            records += len(leaves[0])
            if self._label is not None and len(leaves[0]):
                low, high = min(low, leaves[self._label].min()), max(high, leaves[self._label].max())
            out.add(leaves)
        data = out.finish()
        self._storage.put(name, data)
        if writer is not None:
            self._entries[name] = entry_of(data, np.array(writer.lengths, np.uint32))
        labels = (int(low), int(high)) if low <= high else None
        self._files[name] = RecordFile(len(data), _crc32c(data), records, labels)
        self._remember()

    def write_queue(self, queue: BatchQueue, written: Callable[[], object] = lambda: None) -> None:
        """Mark the folder as incomplete, and write all files that are not complete yet.

        Args:
            queue: all records, including those of complete files.
            written: called after each file.
        """
        self.begin()
        for i in itertools.count():
            name = self._layout.name(i)
            if name in self._files:  # written by an earlier start
                queue.skip(self._files[name].records)
            elif queue.is_over():
                break
            else:
                self.write(name, queue.upto(self._layout.file_records))
                written()

    def finish(self) -> None:
        """Write the index and the schema, which make the folder complete."""
        if self._layout.to == "tfrecord":
            for name in self._files:
                if name not in self._entries:
                    self._entries[name] = self._entry_of(name)
            self._storage.put(INDEX, encode_index(self._entries))
        self._storage.put(SCHEMA, self._with_files().encode())
        self._storage.abort_uploads("", lambda name: True)
        if self._storage.is_local:  # files that a killed process had started
            for left in glob.glob(f"{glob.escape(self._storage.root)}/*.tmp-*"):
                with contextlib.suppress(OSError):
                    os.unlink(left)
        self._storage.delete(UNFINISHED)

    def _entry_of(self, name: str) -> IndexEntry:
        data = memoryview(self._storage.get(name))
        if len(data) != self._files[name].bytes or _crc32c(data) != self._files[name].crc32c:
            raise DataError(f"{self._storage.locate(name)} was changed after it was written. Use an empty folder.")
        records = tfrecord_files.scan(lambda at, n: data[at : at + n], len(data))
        return entry_of(bytes(data), np.array([len(r[1]) for r in records if isinstance(r, tuple)], np.uint32))

    def _with_files(self) -> Schema:
        return replace(self._schema, files=dict(sorted(self._files.items())))

    def _remember(self) -> None:
        self._storage.put(UNFINISHED, self._with_files().encode())

    def _refuse_others(self, identity: str, what: str) -> None:
        if identity != self._schema.identity:
            raise ConfigError(
                f"{self._storage.locate('')} holds {what} of other records or settings ({identity}, now "
                f"{self._schema.identity}). Choose another folder, or delete this one."
            )


class BatchQueue:
    """A queue of batches to write.

    Args:
        batches: the leaves of each batch.

    Attributes:
        rows: number of records in each batch taken so far.
    """

    def __init__(self, batches: Iterator[list[np.ndarray]]):
        self._batches, self.rows = batches, list[int]()
        self._head: list[np.ndarray] | None = None

    def is_over(self) -> bool:
        if self._head is None:
            self._head = next(self._batches, None)
        return self._head is None

    def upto(self, records: int) -> Iterator[list[np.ndarray]]:
        """Yield batches until they have at least this many records together, or until none remains."""
        taken = 0
        while taken < records and not self.is_over():
            leaves, self._head = self._head, None
            assert leaves is not None
            self.rows.append(len(leaves[0]))
            taken += len(leaves[0])
            yield leaves

    def skip(self, records: int) -> None:
        for _ in self.upto(records):
            pass


class _Tfrecords:
    def __init__(self, schema: Schema, layout: FileLayout):
        self._features = [feature(name, schema.specs[name]) for name in schema.names()]
        self._data = bytearray()
        self.lengths: list[int] = []

    def add(self, leaves: list[np.ndarray]) -> None:
        records = list(encode(self._features, leaves))
        self.lengths += map(len, records)
        self._data += tfrecord_files.frame(records)

    def finish(self) -> bytes:
        return bytes(self._data)


class _Parquet:
    def __init__(self, schema: Schema, layout: FileLayout):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._names, self._specs, self._block = schema.names(), schema.specs, layout.block_records
        kinds = [_arrow_type(self._specs[name], name) for name in self._names]
        self._schema = pa.schema(list(zip(self._names, kinds, strict=True)))
        self._sink = pa.BufferOutputStream()
        # Parquet stores 8-bit numbers in 32 bits. A dictionary stores them in 8, and takes a third of the time to read.
        small = [n for n in self._names if np.dtype(self._specs[n].dtype).itemsize == 1 and self._specs[n].shape]
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="snappy",
            use_dictionary=[f"{name}.list.element" for name in small] or False,
            write_page_checksum=True,
        )
        self._waiting: list[list[np.ndarray]] = []

    def add(self, leaves: list[np.ndarray]) -> None:
        self._waiting.append(leaves)
        while sum(len(w[0]) for w in self._waiting) >= self._block:
            whole = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
            self._write([leaf[: self._block] for leaf in whole])
            self._waiting = [[leaf[self._block :] for leaf in whole]]

    def finish(self) -> bytes:
        rest = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        if rest and len(rest[0]):
            self._write(rest)
        self._writer.close()
        return self._sink.getvalue().to_pybytes()

    def _write(self, leaves: Sequence[np.ndarray]) -> None:
        import pyarrow as pa

        columns = []
        for leaf, field in zip(leaves, self._schema, strict=True):
            flat = pa.array(np.ascontiguousarray(leaf).reshape(-1))
            width = self._specs[field.name].shape and field.type.list_size
            columns.append(pa.FixedSizeListArray.from_arrays(flat, width) if width else flat)
        self._writer.write_table(pa.table(columns, self._schema), row_group_size=self._block)


def _arrow_type(spec: Spec, name: str) -> Any:
    import pyarrow as pa

    if np.dtype(spec.dtype).kind == "c":
        raise DataError(f"Parquet has no complex numbers, and {name!r} holds {spec.dtype}. Convert --to tfrecord.")
    kind = pa.from_numpy_dtype(np.dtype(spec.dtype))
    return pa.list_(kind, int(np.prod(spec.shape, dtype=np.int64))) if spec.shape else kind


def _crc32c(data: bytes | memoryview) -> int:
    import google_crc32c

    return int(google_crc32c.value(np.frombuffer(data, np.uint8))) if len(data) else 0


def write(
    storage: Any,
    source: Source,
    layout: FileLayout,
    identity: str,
    progress: Callable[[int], object] = lambda records: None,
) -> bool:
    """Write all records of a source into a folder, in order; return False if the folder was already complete.

    If an earlier call was killed, write only the files that are missing.

    Args:
        storage: the folder.
        identity: distinguishes this conversion from others.
        progress: called with the number of records done, after each block and each file.

    Raises:
        ConfigError: the folder contains something else.
        DataError: a record cannot be read.
        StorageError: storage refuses.
    """
    folder = open_folder(storage, source, layout, identity)
    if folder.is_finished:
        return False
    folder.begin()
    reader = source.reader(1) if hasattr(source, "reader") else source

    def batches(first: int, stop: int) -> Iterable[list[np.ndarray]]:
        for start in range(first, stop, layout.block_records):
            end = min(stop, start + layout.block_records)
            yield reader.take(np.arange(start, end))
            progress(end)

    for i, first in enumerate(range(0, source.records, layout.file_records)):
        name, stop = layout.name(i), min(source.records, first + layout.file_records)
        if name not in folder.files:
            folder.write(name, batches(first, stop))
        progress(stop)
    folder.finish()
    return True


def open_folder(storage: Any, source: Source, layout: FileLayout, identity: str) -> DatasetFolder:
    """Return the folder for a source's records, with the complete files that it already has.

    Raises:
        ConfigError: the folder contains something else.
        DataError: the file format cannot store records of this kind.
    """
    columns, _, specs = named(source)
    if layout.to == "parquet":
        for name, spec in specs.items():
            _arrow_type(spec, name)
    return DatasetFolder(storage, Schema(columns, specs, getattr(source, "classes", None), {}, identity), layout)


def identity_of(source: Source, layout: FileLayout) -> str:
    """Return a text that distinguishes a conversion from others."""
    return json.dumps({"records": fingerprint(source), **asdict(layout)})
