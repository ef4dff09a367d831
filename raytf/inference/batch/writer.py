"""Writes predictions to one Parquet, CSV or JSONL file, which appears only when it is complete."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from raytf.errors import ConfigError, DataError, one_line
from raytf.storage import uris
from raytf.storage.refusals import explain
from raytf.storage.storage import Storage

_ENDINGS = (".parquet", ".csv", ".jsonl")


class PredictionWriter:
    """Writes batches in order; a context manager. The file appears when the context ends without an error.

    Args:
        uri: URI of the file, whose ending determines the format.
        overwrite: replace an existing file.

    Raises:
        ConfigError: the file already exists, or its ending is unknown.
        StorageError: storage refuses.
    """

    def __init__(self, uri: str, overwrite: bool = False):
        plain = uri if uris.is_folder(uri) else uri.partition("?")[0]
        self._ending = next((ending for ending in _ENDINGS if plain.lower().endswith(ending)), "")
        if not self._ending:
            raise ConfigError(f"{plain}: expected an output that ends with {', '.join(_ENDINGS)}.")
        self._place = Storage(uri)
        if not overwrite and self._place.exists(""):
            raise ConfigError(
                f"{self._place.locate('')} already exists. Pass --overwrite to replace it, or choose another name."
            )
        base = plain.rstrip("/").rpartition("/")[0]
        if not self._place.is_local:
            Storage(f"{base}{uri[len(plain) :]}").preflight()
        self.rows = 0
        self._writer: Any = None
        self._schema: Any = None

    def __enter__(self) -> PredictionWriter:
        # A local file is written next to its final place, so that it can be renamed.
        folder = os.path.dirname(self._place.root) if self._place.is_local else None
        try:
            if folder:
                os.makedirs(folder, exist_ok=True)
            name = os.path.basename(self._place.root)
            self._folder = tempfile.TemporaryDirectory(prefix=f"{name}.tmp-", dir=folder)
        except OSError as error:
            raise explain("write", self._place.locate(""), error) from error
        self._path = os.path.join(self._folder.name, name)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
            if kind is None:
                self._appear()
        finally:
            self._folder.cleanup()

    def add(self, batch: Mapping[str, np.ndarray]) -> None:
        """Write records.

        Raises:
            DataError: their columns or types of values do not fit those of earlier records.
        """
        try:
            table = pa.table(_columns(batch, flat=self._ending == ".csv"))
            if not table.num_rows:
                return
            if self._writer is None:
                self._schema = table.schema
                self._writer = self._open()
            elif table.schema != self._schema:
                self._widen(table.schema)
                table = table.cast(self._schema)
            self._write(table)
        except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError) as error:
            raise DataError(
                f"a batch has other columns or types of values than the first: {one_line(error, 200)}"
            ) from error
        except OSError as error:
            raise explain("write", self._path, error) from error
        self.rows += table.num_rows

    def _open(self) -> Any:
        if self._ending == ".parquet":
            return pq.ParquetWriter(self._path, self._schema)
        return open(self._path, "wb")

    def _write(self, table: pa.Table) -> None:
        if self._ending == ".parquet":
            self._writer.write_table(table)
        elif self._ending == ".csv":
            pacsv.write_csv(table, self._writer, pacsv.WriteOptions(include_header=not self.rows))
        else:
            rows = table.to_pylist()
            self._writer.writelines(f"{json.dumps(row, default=_text)}\n".encode() for row in rows)

    def _widen(self, other: pa.Schema) -> None:
        """Choose types for both the earlier and the new rows: a column's first values may be missing or integers.

        Raises:
            pa.ArrowTypeError: no type fits both.
        """
        if other.names != self._schema.names:
            raise pa.ArrowTypeError(f"{', '.join(other.names)} after {', '.join(self._schema.names)}")
        schema = pa.unify_schemas([self._schema, other], promote_options="permissive")
        if schema == self._schema:
            return
        self._schema = schema
        if self._ending != ".parquet":  # in text, both types of numbers may follow each other
            return
        self._writer.close()
        before = f"{self._path}.before"
        os.rename(self._path, before)
        self._writer = self._open()
        with pq.ParquetFile(before) as written:
            for part in written.iter_batches():
                self._writer.write_table(pa.Table.from_batches([part]).cast(schema))
        os.unlink(before)

    def _appear(self) -> None:
        if self._writer is None:
            raise DataError("there are no records to predict for.")
        if not self._place.is_local:
            with open(self._path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                view = memoryview(data)
                try:
                    self._place.put("", view)
                finally:
                    view.release()
            return
        try:
            with open(self._path, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(self._path, self._place.root)
        except OSError as error:
            raise explain("write", self._place.root, error) from error


def _columns(batch: Mapping[str, np.ndarray], flat: bool) -> dict[str, pa.Array]:
    """Return the columns as Arrow arrays; with `flat`, for CSV, each number of a vector is a separate column."""
    columns: dict[str, pa.Array] = {}
    for name, value in batch.items():
        if value.ndim == 1:
            columns[name] = pa.array(value)
        elif flat:
            rows = value.reshape(len(value), -1)
            columns.update({f"{name}_{i}": pa.array(rows[:, i]) for i in range(rows.shape[1])})
        else:
            columns[name] = _nested(value)
    return columns


def _nested(value: np.ndarray) -> pa.Array:
    if value.ndim == 1:
        return pa.array(value)
    return pa.FixedSizeListArray.from_arrays(_nested(value.reshape(-1, *value.shape[2:])), value.shape[1])


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
