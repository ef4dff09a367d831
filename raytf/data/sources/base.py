"""The interface of a source, and fingerprints that distinguish data sets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from raytf.data import tree
from raytf.errors import ConfigError, DataError

#: Records in a shuffle window of a source that is read block by block.
WINDOW_RECORDS = 8192
#: The most bytes in a shuffle window by default, for sources with large records.
WINDOW_BYTES = 64 << 20
#: Data of up to this many bytes are permuted record by record under `order="auto"`, as arrays are.
SMALL_BYTES = 256 << 20

#: `records` permutes record by record, `blocks` permutes blocks and shuffles within windows, `auto` is `records` for
#: data of up to `SMALL_BYTES`. The place of the data has no effect, because it must not change what a run learns.
Order = Literal["auto", "records", "blocks"]

#: The dtype of text. In memory, text is bytes of one width, encoded as UTF-8.
TEXT = "string"
#: Assumed size in bytes of a text of unknown length.
_TEXT_BYTES = 16


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of one record.

    Attributes:
        shape: the shape of one record; -1 for a length that varies between batches.
        dtype: a numpy dtype's name, or `TEXT`.
    """

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, rows: np.ndarray) -> Spec:
        """Return the spec of the records in an array's first dimension."""
        return cls(rows.shape[1:], TEXT if rows.dtype.kind in "SUO" else rows.dtype.name)

    @property
    def has_lengths(self) -> bool:
        """Return whether all lengths are known."""
        return -1 not in self.shape

    @property
    def signature(self) -> list[int | None]:
        """The shape as TensorFlow writes it."""
        return [None if n < 0 else n for n in self.shape]

    @property
    def bytes(self) -> int:
        """The size of one record in bytes; a length that varies counts as 1."""
        each = _TEXT_BYTES if self.dtype == TEXT else np.dtype(self.dtype).itemsize
        return int(np.prod([1 if n < 0 else n for n in self.shape], dtype=np.int64)) * each

    def zeros(self, shape: Sequence[int]) -> np.ndarray:
        """Return an array of zeros, or of empty texts, to be filled with records."""
        return np.full(shape, b"", object) if self.dtype == TEXT else np.zeros(shape, self.dtype)


class Source(Protocol):
    """The interface of data with random access to records, each a tuple (x, y, sample_weight) of nested leaves.

    A source may also have:

    - `reader(shards)`: returns a reader for a pipeline of this many shards, each moving forward through windows;
    - `classes`: the names of its labels in the order of their numbers, or None;
    - `identity`: a text that `fingerprint` returns unchanged;
    - `crc`: a checksum of the records and their order, so that `fingerprint` need not read any records.

    Attributes:
        name: the source's name in messages.
        records: the number of records.
        block_sizes: [B] int64, number of records in each block, or None if records can be read one by one.
        window: the number of records in a shuffle window, which applies after blocks are permuted.
        spec: (x, y, sample_weight), nested `Spec`; y and sample_weight may be None.
    """

    name: str
    records: int
    spec: tuple[Any, Any, Any]

    @property
    def window(self) -> int: ...

    @property
    def block_sizes(self) -> np.ndarray | None: ...

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        """Return the leaves of `spec` in the order of `tree.flatten`, each [len(records), *shape]."""
        ...

    def label_range(self) -> tuple[float, float] | None:
        """Return the smallest and the largest label if y is one integer leaf and they are cheap to find; else None."""
        ...


def fingerprint(source: Source) -> str:
    """Return a text that distinguishes data sets of equal size, from the source's `crc` or from a few records."""
    identity = getattr(source, "identity", None)
    if identity is not None:
        return str(identity)
    crc = getattr(source, "crc", None)
    if crc is None:
        some = np.unique(np.linspace(0, source.records - 1, 16).astype(np.int64))
        crc = crc_of(source.take(some))
    return f"{source.records} records, sample CRC-32 {crc:08x}"


def refuse_other_classes(first: Source, other: Source) -> None:
    """Check that two parts of a data set number their labels alike. One part may have fewer classes, or none.

    Raises:
        DataError: the same number means different classes.
    """
    why = other_class(getattr(first, "classes", None), getattr(other, "classes", None), first.name)
    if why:
        raise DataError(f"{other.name}: {why}")


def other_class(ours: Any, theirs: Any, place: str) -> str:
    """Return how the classes of another part differ from those of the part at `place`; empty if they agree."""
    if not isinstance(ours, (tuple, list)) or not isinstance(theirs, (tuple, list)):
        return ""
    for number, name in enumerate(theirs):
        known = ours[number] if number < len(ours) else None
        if name != known:
            there = f"is {known!r}" if known is not None else "does not exist"
            return (
                f"label {number} is {name!r} here, but {there} in {place}. Number both alike: pass classes= of the "
                "training data to the other source, or convert all parts with one command."
            )
    return ""


def crc_of(leaves: Sequence[np.ndarray], crc: int = 0) -> int:
    """Return the CRC-32 of arrays."""
    for leaf in leaves:
        crc = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), crc)
    return crc


def as_text(values: np.ndarray) -> np.ndarray | None:
    """Return texts as bytes of one width; None if the values are not text."""
    if values.dtype.kind == "S":
        return values
    if values.dtype.kind not in "UO":
        return None
    texts = [text.encode() if isinstance(text, str) else text for text in values.ravel().tolist()]
    return np.array(texts, "S").reshape(values.shape) if all(isinstance(text, bytes) for text in texts) else None


def by_name(columns: str | Sequence[str] | None) -> Any:
    """Return one name unchanged, and several names as a dict by name."""
    return {c: c for c in columns} if isinstance(columns, (list, tuple)) else columns


def record_bytes(spec: tuple[Any, Any, Any]) -> int:
    """Return the size of one record in memory."""
    return sum(leaf.bytes for _, leaf in tree.flatten(spec))


def window_of(spec: tuple[Any, Any, Any]) -> int:
    """Return the default number of records in a shuffle window: 8,192, or fewer if they take more than 64 MiB."""
    return max(1, min(WINDOW_RECORDS, WINDOW_BYTES // max(1, record_bytes(spec))))


def is_by_record(order: Order, size: int) -> bool:
    """Return whether data of `size` bytes are permuted record by record.

    Raises:
        ConfigError: the order is not known.
    """
    if order not in ("auto", "records", "blocks"):
        raise ConfigError(f"order={order!r} is not known. Expected auto, records or blocks.")
    return order == "records" or (order == "auto" and size <= SMALL_BYTES)
