"""A data source for Ray Datasets: they are written once as Parquet, then read like any other files."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from raytf.data import tree
from raytf.data.sources.base import WINDOW_RECORDS, Order, Spec, by_name
from raytf.data.sources.parquet import ParquetSource
from raytf.data.sources.schema import UNFINISHED, Schema
from raytf.data.sources.writer import FILE_BYTES, BatchQueue, DatasetFolder, FileLayout
from raytf.errors import DataError, RaytfError, one_line
from raytf.storage.storage import Storage

_BLOCK_BYTES = 1 << 20
_BATCH = 1024


class RayDataSource(ParquetSource):
    """A Ray Dataset, written once as Parquet files that every worker reads, in every epoch and after every restart.

    A Dataset lives only as long as its driver, and its records can differ when they are computed again. The files stay,
    so a run that continues trains on the same records in the same order. All records pass through this process, in the
    order of the Dataset's blocks. If the Dataset only reads files, use the data source for those files instead.

    Args:
        dataset: a ray.data.Dataset.
        uri: a folder for the files, visible to all nodes. If it already holds a Dataset with the same columns, it is
            used unchanged.
        x: the input column, or a list of columns (the inputs are then a dict by name); by default, all columns that are
            neither `y` nor `sample_weight`.
        y: the label column or columns, or None.
        sample_weight: the column of sample weights, or None.
        window, order: as for ParquetSource, but by default small data are permuted record by record.
        say: called with each message; by default, messages go to standard error.

    Raises:
        ConfigError: the folder contains something else.
        DataError: a column is missing or does not hold numbers, or the Dataset failed.
        StorageError: storage refuses a request.
    """

    def __init__(
        self,
        dataset: Any,
        uri: str,
        x: str | list[str] | None = None,
        y: str | list[str] | None = "label",
        sample_weight: str | None = None,
        window: int = WINDOW_RECORDS,
        order: Order = "auto",
        say: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        columns = _columns(dataset, x, y, sample_weight)
        _write(dataset, uri, columns, say)
        super().__init__(uri, window=window, order=order)


def is_ray_dataset(data: Any) -> bool:
    """Return whether `data` is a ray.data.Dataset, without importing Ray."""
    return any(base.__module__ == "ray.data.dataset" and base.__name__ == "Dataset" for base in type(data).__mro__)


def _columns(dataset: Any, x: Any, y: Any, sample_weight: str | None) -> tuple[Any, Any, Any]:
    schema = _asked(dataset.schema)
    names = [] if schema is None else list(schema.names)
    others = [name for _, name in tree.flatten((by_name(y), sample_weight))]
    if x is None:
        inputs = [name for name in names if name not in others]
        x = inputs[0] if len(inputs) == 1 else inputs
    columns = (by_name(x), by_name(y), sample_weight)
    missing = [name for _, name in tree.flatten(columns) if name not in names]
    if missing or not tree.flatten(columns[0]):
        lack = f"no column {missing[0]!r}" if missing else "no column for x"
        raise DataError(
            f"the Ray Dataset has {lack}; it has {', '.join(names) or 'none'}. Name its columns: raytf.RayDataSource("
            "dataset, URI, x=..., y=...)."
        )
    return columns


def _write(dataset: Any, uri: str, columns: tuple[Any, Any, Any], say: Callable[[str], object]) -> None:
    storage = Storage(uri)
    names = [name for _, name in tree.flatten(columns)]
    kinds = _asked(dataset.schema)
    types = dict(zip(kinds.names, map(str, kinds.types), strict=True))
    schema = Schema(columns, {}, None, {}, json.dumps({"ray dataset": {name: types[name] for name in names}}))
    if DatasetFolder(storage, schema, FileLayout("parquet", 1, 1)).is_finished:
        say(f"the Ray Dataset was written to {storage.locate('')} before, and is read from there")
        return
    if storage.exists(UNFINISHED):  # start over: the Dataset may yield other records this time
        for file in storage.files():
            if file.name.startswith("part-"):
                storage.delete(file.name)
        storage.delete(UNFINISHED)
    say(f"the Ray Dataset is written once to {storage.locate('')} as Parquet, and read from there")
    batches = _batches(dataset, names)
    first = next(batches, None)
    if first is None:
        raise DataError("the Ray Dataset holds no records.")
    specs = [Spec.of(leaf) for leaf in first]
    layout = FileLayout.of("parquet", tree.unflatten(columns, specs), None, FILE_BYTES, _BLOCK_BYTES)
    folder = DatasetFolder(storage, replace(schema, specs=dict(zip(names, specs, strict=True))), layout)
    folder.write_queue(BatchQueue(itertools.chain([first], batches)))
    folder.finish()


def _batches(dataset: Any, names: list[str]) -> Iterator[list[np.ndarray]]:
    """Yield the leaves of each batch, in the order of the Dataset's blocks."""
    dataset.context.execution_options.preserve_order = True
    batches = _asked(lambda: iter(dataset.iter_batches(batch_size=_BATCH, batch_format="numpy")))
    before: list[Spec] = []
    while (batch := _asked(lambda: next(batches, None))) is not None:
        leaves = [np.asarray(batch[name]) for name in names]
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.dtype.kind not in "biuf":
                raise DataError(
                    f"the Ray Dataset's column {name!r} has dtype {leaf.dtype}. Expected numbers, or lists of "
                    "numbers of one length. Convert it with Dataset.map first."
                )
        now = [Spec.of(leaf) for leaf in leaves]
        if before and now != before:
            raise DataError(f"the Ray Dataset's records differ: {now} after {before}. Pad or convert them first.")
        before = now
        if len(leaves[0]):
            yield leaves


def _asked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RaytfError:
        raise
    except Exception as error:
        text = [line for line in str(error).splitlines() if line.strip()][-1:]
        raise DataError(f"the Ray Dataset failed: {type(error).__name__}: {one_line(''.join(text), 300)}") from error
