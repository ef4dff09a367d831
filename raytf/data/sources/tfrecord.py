"""TFRecord files of tf.train.Example, with random access to records."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import numpy as np

from raytf.data import tree
from raytf.data.sources import tfrecord_files
from raytf.data.sources.base import Order, Spec, crc_of
from raytf.data.sources.block_reader import BlockSource
from raytf.data.sources.file_set import Files
from raytf.data.sources.images import Fit
from raytf.data.sources.schema import check_files, columns_of, labels_of, read_schema
from raytf.data.sources.tf_example import ExampleReader, names_of
from raytf.data.sources.tfrecord_files import index
from raytf.errors import DataError

#: Endings of the names of TFRecord files: `a.tfrecord`, `a.tfrecords`, `a.tfrecord-00000-of-00008`.
ENDINGS = (".tfrecord", ".tfrecords", ".tfrec", ".tfr")
#: Indexes of other libraries beside the files: `a.tfrecord-00000-of-00008.idx`.
_INDEXES = (".idx", ".index")
#: The default size of a block is a 256th of the data, within these bounds.
_LEAST_BLOCK, _LARGEST_BLOCK, _BLOCKS = 256 << 10, 8 << 20, 256


class TFRecordSource(BlockSource):
    """TFRecord files of tf.train.Example on local disk, S3, GCS or Azure.

    The positions of records are found once and stored in `_raytf_index` beside the files, or in ~/.cache/raytf if that
    folder cannot be written. Each read of a record checks its CRC-32C.

    Args:
        uri: a file, or a folder with files `*.tfrecord`, in the order of their names.
        x: the feature, or a list of features (inputs are then a dict by name); None uses the features that `raytf data
            convert` recorded beside the files, else `image`.
        y: the label's feature or features, or None.
        sample_weight: the feature of sample weights, or None.
        features: `Spec(shape, dtype)` by feature, if the first record does not show it: shapes, and the dtype of bytes
            that are packed numbers, which are read as uint8 [length] otherwise.
        size, channels, fit: settings for features that are JPEG or PNG images, as for ImageFolderSource.
        window: number of records in a shuffle window; by default 8,192, or 64 MiB of them.
        order: `records` permutes records as with arrays; `blocks` permutes blocks and shuffles within windows, which
            object stores need for data larger than memory; `auto` is `records` for up to 256 MiB, also after decoding.
        block_bytes: bytes of a block; by default a 256th of the data, 256 KiB to 8 MiB.

    Raises:
        DataError: there are no files or records, a feature is missing, or a file is damaged.
        StorageError: storage refuses a request.
    """

    def __init__(
        self,
        uri: str,
        x: str | list[str] | None = None,
        y: str | list[str] | None = "label",
        sample_weight: str | None = None,
        *,
        features: Mapping[str, Spec] | None = None,
        size: tuple[int, int] | None = None,
        channels: int | None = None,
        fit: Fit = "crop",
        window: int | None = None,
        order: Order = "auto",
        block_bytes: int | None = None,
    ):
        super().__init__(uri, window)
        self._files = Files(uri, is_wanted=is_tfrecord)
        schema = read_schema(self._files.storage)
        if not self._files.names:
            raise DataError(f"{uri}: there are no TFRecord files. Expected names that end in .tfrecord.")
        if schema is not None:
            check_files(schema, self._files)
        self._entries = index(self._files)
        total = sum(self._files.sizes)
        self._cut(block_bytes or min(_LARGEST_BLOCK, max(_LEAST_BLOCK, total // _BLOCKS)))
        if not self.records:
            raise DataError(f"{uri}: the TFRecord files hold no records.")
        columns = columns_of(schema, x, y, sample_weight)
        self._bounds, self.classes = labels_of(schema, columns[1])
        names = [name for _, name in tree.flatten(columns)]
        known = {**({} if schema is None else schema.specs), **(features or {})}
        place = self._place(self._blocks[0][0], 0)
        self._reader = ExampleReader(self._first(), names, known, schema is not None, (size, channels, fit), place)
        self._leaf_specs = self._reader.specs
        self.spec = tree.unflatten(columns, self._leaf_specs)
        self._order_by(order, total)
        some = self.reader(1).take(np.arange(1 if self._by_record else min(16, self.records)))
        if not self._by_record:
            self.crc = crc_of([*some, self._sizes, np.array([e.end_crc for e in self._entries])])
        self._forget()

    def _cut(self, block_bytes: int) -> None:
        self._blocks: list[tuple[int, int, int]] = []
        counts = [len(entry.lengths) for entry in self._entries]
        for f, entry in enumerate(self._entries):
            kinds = (entry.starts - tfrecord_files.HEADER) // block_bytes
            edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), counts[f]] if counts[f] else []
            self._blocks += [(f, a, b) for a, b in itertools.pairwise(edges)]
        self._first_of_file = np.cumsum(counts) - counts
        self._lay_out(np.array([b - a for _, a, b in self._blocks], np.int64))

    def _first(self) -> bytes:
        f, _, _ = self._blocks[0]
        length = int(self._entries[f].lengths[0])
        data = np.frombuffer(self._files.read(f, 0, length + tfrecord_files.FRAME), np.uint8)
        self._check(data, np.array([tfrecord_files.HEADER]), np.array([length]), f, 0)
        return data[tfrecord_files.HEADER : tfrecord_files.HEADER + length].tobytes()

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        if not (self._by_record and self._files.is_local):
            return super().take(records)  # by blocks: a request costs as much as a megabyte
        out = [np.empty((len(records), *spec.shape), spec.dtype) for spec in self._leaf_specs]
        of_file = np.searchsorted(self._first_of_file, records, side="right") - 1
        for f in np.unique(of_file).tolist():
            here = np.flatnonzero(of_file == f)
            inside = records[here] - self._first_of_file[f]
            data = np.frombuffer(self._files.read(f, 0, self._files.sizes[f], whole=False), np.uint8)
            leaves = self._decode(data, self._starts_of(f)[inside], self._entries[f].lengths[inside], f, inside)
            for target, leaf in zip(out, leaves, strict=True):
                target[here] = leaf
        self._rows_read[0] += len(records)
        return out

    def label_range(self) -> tuple[float, float] | None:
        return None if self._bounds is None else (float(self._bounds[0]), float(self._bounds[1]))

    def _forget(self) -> None:
        super()._forget()
        self._where: dict[int, np.ndarray] = {}

    _own = (*BlockSource._own, "_where")
    _reads_beside = True

    def _starts_of(self, f: int) -> np.ndarray:
        if f not in self._where:
            self._where[f] = self._entries[f].starts
        return self._where[f]

    def _read(self, b: int) -> list[np.ndarray]:
        f, first, stop = self._blocks[b]
        lengths = self._entries[f].lengths[first:stop]
        sizes = lengths.astype(np.int64) + tfrecord_files.FRAME
        begin = int(self._starts_of(f)[first]) - tfrecord_files.HEADER
        data = np.frombuffer(self._files.read(f, begin, int(sizes.sum())), np.uint8)
        return self._decode(data, np.cumsum(sizes) - sizes + tfrecord_files.HEADER, lengths, f, np.arange(first, stop))

    def _decode(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, f: int, inside: np.ndarray
    ) -> list[np.ndarray]:
        """Return the leaves of the records with the numbers `inside` in file f."""
        self._check(data, starts, lengths, f, inside)
        return self._reader.read(data, starts, lengths, lambda i: self._place(f, int(inside[i])), self._files.map)

    def _check(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, f: int, inside: np.ndarray | int
    ) -> None:
        damage = tfrecord_files.find_damage(data, starts, lengths.astype(np.int64))
        if damage is not None:
            i, why = damage
            raise DataError(
                f"{self._place(f, int(np.atleast_1d(inside)[i]))}: {why}. The file is damaged, or was changed since "
                "the source was made; `raytf data check` checks all of it."
            )

    def _place(self, f: int, record: int) -> str:
        offset = int(self._starts_of(f)[record]) - tfrecord_files.HEADER if len(self._entries[f].lengths) else 0
        return f"{self._files.locate(f)}: record {record} at byte {offset}"


def is_tfrecord(name: str) -> bool:
    """Return whether a file has the name of a TFRecord file."""
    base = name.rpartition("/")[2].lower()
    is_shard = any(f"{ending}-" in base for ending in ENDINGS) and not base.endswith(_INDEXES)
    return base.endswith(ENDINGS) or is_shard


def features_of(uri: str) -> list[str]:
    """Return the names of the first record's features; none if there is no undamaged record.

    Raises:
        DataError: it is not a tf.train.Example.
        StorageError: storage refuses a request.
    """
    files = Files(uri, is_wanted=is_tfrecord)
    for i, size in enumerate(files.sizes):
        for record in tfrecord_files.scan(functools.partial(files.read, i, whole=False), size):
            return [] if isinstance(record, tfrecord_files.Damage) else names_of(bytes(record[1]), files.locate(i))
    return []
