"""The schema that `raytf data convert` writes beside records: their columns, shapes, dtypes and files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from raytf.data import tree
from raytf.data.sources.base import Spec, by_name
from raytf.data.sources.file_set import Files
from raytf.errors import DataError

SCHEMA = "_raytf_schema.json"
#: A file that exists until a conversion is finished.
UNFINISHED = "_raytf_unfinished.json"
_FORMAT = "raytf-data-1"


@dataclass(frozen=True)
class RecordFile:
    """A file of records.

    Attributes:
        bytes: its size.
        crc32c: CRC-32C of all its bytes.
        records: number of records.
        labels: smallest and largest label, or None.
    """

    bytes: int
    crc32c: int
    records: int
    labels: tuple[int, int] | None


@dataclass(frozen=True)
class Schema:
    """The schema of a folder of records.

    Attributes:
        columns: (x, y, sample_weight), trees of feature names.
        specs: specs of the features, by name.
        classes: names of the classes in the order of their numbers, or None.
        files: the files, by name.
        identity: identifies the records and how they were converted.
    """

    columns: tuple[Any, Any, Any]
    specs: dict[str, Spec]
    classes: tuple[str, ...] | None
    files: dict[str, RecordFile]
    identity: str = ""

    @property
    def labels(self) -> tuple[int, int] | None:
        known = [part.labels for part in self.files.values() if part.labels is not None]
        if not known or len(known) < len(self.files):
            return None
        return min(k[0] for k in known), max(k[1] for k in known)

    def names(self) -> list[str]:
        """Return the names of features in the order of `tree.flatten`."""
        return [name for _, name in tree.flatten(self.columns)]

    def encode(self) -> bytes:
        document = {
            "format": _FORMAT,
            "columns": self.columns,
            "specs": {name: {"shape": list(spec.shape), "dtype": spec.dtype} for name, spec in self.specs.items()},
            "classes": self.classes,
            "identity": self.identity,
            "files": {name: asdict(part) for name, part in self.files.items()},
        }
        return json.dumps(document, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, place: str) -> Schema:
        """Read the schema from a file's bytes.

        Raises:
            DataError: it is not a schema, or is damaged.
        """
        try:
            document = json.loads(data)
            if document["format"] != _FORMAT:
                raise ValueError(f"its format is {document['format']!r}, not {_FORMAT!r}")
            x, y, weight = document["columns"]
            return cls(
                (x, y, weight),
                {n: Spec(tuple(s["shape"]), s["dtype"]) for n, s in document["specs"].items()},
                None if document["classes"] is None else tuple(document["classes"]),
                {
                    n: RecordFile(**{**p, "labels": p["labels"] and tuple(p["labels"])})
                    for n, p in document["files"].items()
                },
                document["identity"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{place} is damaged: {error}. Delete it, or convert the data again.") from error


def read_schema(storage: Any) -> Schema | None:
    """Return the schema in a folder, or None.

    Raises:
        DataError: it is damaged, or a conversion into this folder is not finished.
    """
    if storage.exists(UNFINISHED):
        raise DataError(
            f"{storage.locate('')}: a conversion into this folder is not finished. Run the same `raytf data convert` "
            "command again to continue."
        )
    data = storage.get_or_none(SCHEMA)
    return None if data is None else Schema.decode(data, storage.locate(SCHEMA))


def check_files(schema: Schema, files: Files) -> None:
    """Check that a folder, or a single file of it, has the files of its schema.

    Raises:
        DataError: a file is missing, not in the schema, or of another size.
    """
    sizes = dict(zip(files.names, files.sizes, strict=True))
    for name, part in schema.files.items() if not files.is_single else ():
        if name not in sizes and part.records:
            place = files.storage.locate(name)
            raise DataError(f"{place} is missing. Convert the data again, or delete {SCHEMA} to do without it.")
    for name, size in sizes.items():
        place, known = files.storage.locate(name), schema.files.get(name)
        if known is None:
            raise DataError(f"{place} is not in {SCHEMA} beside it. Move one of them elsewhere.")
        if size != known.bytes:
            raise DataError(
                f"{place} has {size} bytes, but {known.bytes} were written. It is cut off or was changed: convert the "
                "data again."
            )


def labels_of(schema: Schema | None, y: Any) -> tuple[tuple[int, int] | None, tuple[str, ...] | None]:
    """Return (smallest and largest label, classes) from the schema if y is the schema's label."""
    if schema is None or y is None or y != schema.columns[1]:
        return None, None
    return schema.labels, schema.classes


def columns_of(schema: Schema | None, x: Any, y: Any, sample_weight: str | None) -> tuple[Any, Any, Any]:
    """Return the columns (x, y, sample_weight) from the arguments, else from the schema, else `image` and `label`."""
    if x is None and schema is not None and y == "label" and sample_weight is None:
        return schema.columns
    return by_name("image" if x is None else x), by_name(y), sample_weight
