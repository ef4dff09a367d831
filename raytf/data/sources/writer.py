"""Writes folders of TFRecord or Parquet files with a schema: file by file, each whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from raytf.data import tree
from raytf.data.sources import tfrecord_frames
from raytf.data.sources.base import Source, Spec, fingerprint, record_bytes
from raytf.data.sources.record_index import INDEX, IndexEntry, entry_of
from raytf.data.sources.record_index import encode as encode_index
from raytf.data.sources.schema import SCHEMA, UNFINISHED, RecordFile, Schema
from raytf.data.sources.tf_example import encode, feature
from raytf.errors import ConfigError, DataError

To = Literal["tfrecord", "parquet"]
#: Of a file and of what is read as one, by default.
FILE_BYTES, BLOCK_BYTES = 128 << 20, 8 << 20
#: Blocks that data have at the least, where that does not make them smaller than a request is worth.
_BLOCKS, _LEAST_BLOCK = 256, 256 << 10
#: Bytes that a record takes beside its numbers: its frame, and the names of features.
_OVERHEAD = 64


@dataclass(frozen=True)
class FileLayout:
    """How records are cut into files and blocks.

    Attributes:
        to: the format.
        file_records, block_records: of each but the last.
    """

    to: To
    file_records: int
    block_records: int

    @classmethod
    def of(cls, to: To, spec: Any, records: int | None, file_bytes: int, block_bytes: int | None) -> FileLayout:
        """For records of a kind.

        Args:
            records: how many there are, or None.
            file_bytes: of a file, about.
            block_bytes: of a block; None for a 256th of the data, 256 KiB to 8 MiB.
        """
        each = record_bytes(spec) + (_OVERHEAD if to == "tfrecord" else 0)
        if block_bytes is None:
            total = BLOCK_BYTES * _BLOCKS if records is None else records * each
            block_bytes = min(BLOCK_BYTES, max(_LEAST_BLOCK, total // _BLOCKS))
        block = max(1, block_bytes // each)
        return cls(to, max(block, file_bytes // each // block * block), block)

    def name(self, i: int) -> str:
        """Of the i-th file."""
        return f"part-{i:05}.{self.to}"


def named(source: Source) -> tuple[Any, list[str], dict[str, Spec]]:
    """Names for the leaves of a source: (tree of names, in order, specs by name).

    Raises:
        DataError: it nests deeper than files can show.
    """
    x, y, weight = source.spec
    columns = tree.map_leaves(str, getattr(source, "_columns", None))
    if columns is None or "" in [name for _, name in tree.flatten(columns)]:
        shown = isinstance(x, Spec) and len(x.shape) == 3
        columns = (_names(x, "image" if shown else "x"), _names(y, "label"), _names(weight, "sample_weight"))
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
    raise DataError(f"{name} holds nested arrays. Files have columns: give one array, or a flat dict of them.")


class DatasetFolder:
    """A folder that is being written: it takes records in files, and remembers those that are complete.

    Args:
        storage: the folder.
        schema: without files.
        layout: how records are cut.
        labels: place of the label among leaves, or None.

    Raises:
        ConfigError: something else is in the folder.
    """

    def __init__(self, storage: Any, schema: Schema, layout: FileLayout, labels: int | None):
        self._storage, self._schema, self._layout, self._labels = storage, schema, layout, labels
        self._files: dict[str, RecordFile] = {}
        self._entries: dict[str, IndexEntry] = {}
        begun = storage.get_or_none(UNFINISHED)
        done = storage.get_or_none(SCHEMA) if begun is None else None
        self.is_finished = done is not None
        if begun is not None:
            before = Schema.decode(begun, storage.locate(UNFINISHED))
            self._refuse_others(before.identity, "a conversion that has not ended")
            self._files = dict(before.files)
        elif done is not None:
            self._refuse_others(Schema.decode(done, storage.locate(SCHEMA)).identity, "converted data")
        elif found := [f.name for f in storage.files() if not f.name.rpartition("/")[2].startswith(("_", "."))]:
            raise ConfigError(f"{storage.locate('')} is not empty: it has {found[0]}. Give a folder of its own.")

    @property
    def files(self) -> dict[str, RecordFile]:
        """Those that are complete."""
        return self._files

    def begin(self) -> None:
        """Mark the folder as one that is not complete."""
        if not self.is_finished:
            self._remember()

    def write(self, name: str, batches: Iterable[list[np.ndarray]]) -> None:
        """Write a file of the records that batches give; the file appears when all of it is there."""
        writer = _Tfrecords(self._schema, self._layout) if self._layout.to == "tfrecord" else None
        out = writer or _Parquet(self._schema, self._layout)
        low, high, records = np.inf, -np.inf, 0
        for leaves in batches:
            records += len(leaves[0])
            if self._labels is not None and len(leaves[0]):
                low, high = min(low, leaves[self._labels].min()), max(high, leaves[self._labels].max())
            out.add(leaves)
        data = out.finish()
        self._storage.put(name, data)
        if writer is not None:
            self._entries[name] = entry_of(data, np.array(writer.lengths, np.uint32))
        labels = (int(low), int(high)) if low <= high else None
        self._files[name] = RecordFile(len(data), _crc32c(data), records, labels)
        self._remember()

    def finish(self) -> None:
        """Write what makes the files a whole."""
        if self._layout.to == "tfrecord":
            missing = [name for name in self._files if name not in self._entries]
            for name in missing:
                self._entries[name] = self._lengths_of(name)
            self._storage.put(INDEX, encode_index(self._entries))
        self._storage.put(SCHEMA, self._with_files().encode())
        self._storage.abort_uploads("", lambda name: True)
        if self._storage.is_local:  # what a killed process had begun
            for left in glob.glob(f"{glob.escape(self._storage.root)}/*.tmp-*"):
                with contextlib.suppress(OSError):
                    os.unlink(left)
        self._storage.delete(UNFINISHED)

    def _lengths_of(self, name: str) -> IndexEntry:
        data = memoryview(self._storage.get(name))
        if len(data) != self._files[name].bytes or _crc32c(data) != self._files[name].crc32c:
            raise DataError(f"{self._storage.locate(name)} was changed while it was made. Begin with an empty folder.")
        found = list(tfrecord_frames.scan(lambda at, n: data[at : at + n], len(data)))
        return entry_of(bytes(data), np.array([len(f[1]) for f in found if isinstance(f, tuple)], np.uint32))

    def _with_files(self) -> Schema:
        schema = self._schema
        files = dict(sorted(self._files.items()))
        return Schema(schema.columns, schema.specs, schema.classes, files, schema.identity)

    def _remember(self) -> None:
        self._storage.put(UNFINISHED, self._with_files().encode())

    def _refuse_others(self, identity: str, what: str) -> None:
        if identity != self._schema.identity:
            raise ConfigError(
                f"{self._storage.locate('')} holds {what} of other records or settings ({identity}, now "
                f"{self._schema.identity}). Give another folder, or delete this one."
            )


class _Tfrecords:
    def __init__(self, schema: Schema, layout: FileLayout):
        self._features = [feature(name, schema.specs[name]) for name in schema.names()]
        self._data = bytearray()
        self.lengths: list[int] = []

    def add(self, leaves: list[np.ndarray]) -> None:
        records = list(encode(self._features, leaves))
        self.lengths += map(len, records)
        self._data += tfrecord_frames.frame(records)

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
        # Numbers of 8 bits lie in Parquet as 32. Through a dictionary they take 8, and a third of the time to read.
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
    """Write all records of a source into a folder, in their order; goes on where it was killed.

    Args:
        storage: the folder.
        identity: what tells this conversion from others.
        progress: told the number of records done, now and then.

    Returns:
        Whether there was something to do.

    Raises:
        ConfigError: something else is in the folder.
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
    """The folder for a source's records, with what it has of them.

    Raises:
        ConfigError: something else is in it.
        DataError: the records are of a kind that no file can show.
    """
    columns, names, specs = named(source)
    y = source.spec[1]
    is_label = isinstance(y, Spec) and y.shape == () and np.dtype(y.dtype).kind in "iub"
    label = names.index(columns[1]) if is_label else None
    schema = Schema(columns, specs, getattr(source, "classes", None), {}, identity)
    if layout.to == "parquet":
        for name, spec in specs.items():
            _arrow_type(spec, name)
    return DatasetFolder(storage, schema, layout, label)


def identity_of(source: Source, layout: FileLayout, about: str = "") -> str:
    """Tells a conversion from others."""
    return json.dumps({"records": fingerprint(source), **asdict(layout), **({"about": about} if about else {})})
