"""Goes through data and finds what is damaged; counts what is there on the way."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c
import numpy as np

from raytf.data import tree
from raytf.data.image_datasets import open_splits, part
from raytf.data.sources import CsvSource, Source, csv, image_folder, tfrecord_frames
from raytf.data.sources.base import Spec, other_class
from raytf.data.sources.detect import Kind, ReadOptions, files_of, kind_of, open_source, splits_of
from raytf.data.sources.file_set import Files
from raytf.data.sources.image_decoder import Decoder
from raytf.data.sources.parquet import explained, leaves_of, refuse_others
from raytf.data.sources.record_index import refuse_compressed
from raytf.data.sources.schema import Schema, check_files, columns_of, read_schema, told_of_labels
from raytf.data.sources.tf_example import Parser, feature, infer
from raytf.data.sources.tfrecord import is_tfrecord
from raytf.errors import DataError

#: Records that are looked at together.
_BATCH = 1024
_PIECE = 8 << 20
#: Labels that are counted one by one.
_MOST_LABELS = 1000

#: Told the share that is done, in [0, 1].
Progress = Callable[[float], object]


@dataclass
class DataFindings:
    """What a part of the data holds.

    Attributes:
        split: its name, empty where the data have no parts.
        kind: the format.
        files, bytes, records: that were read; of damaged records only those that are good count.
        specs: of each leaf, by name.
        ranges: smallest and largest number of each leaf.
        not_finite: NaN and infinite numbers of each leaf that has some.
        labels: records of each label, where it is a whole number.
        classes: names of the labels, or None.
        problems: (place, why) of what is damaged.
    """

    split: str
    kind: str
    files: int = 0
    bytes: int = 0
    records: int = 0
    specs: dict[str, Spec] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    not_finite: Counter[str] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    classes: tuple[str, ...] | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)

    def see(self, names: list[str], leaves: list[np.ndarray], label: str | None) -> None:
        """Count some records."""
        if not len(leaves[0]):
            return
        self.records += len(leaves[0])
        for name, leaf in zip(names, leaves, strict=True):
            self.specs.setdefault(name, Spec.of(leaf))
            if leaf.dtype.kind in "fc":
                good = np.isfinite(leaf)
                if not good.all():
                    self.not_finite[name] += int(leaf.size - good.sum())
                    leaf = leaf[good]
            if leaf.size and leaf.dtype.kind != "c":
                low, high = self.ranges.get(name, (np.inf, -np.inf))
                self.ranges[name] = min(low, float(leaf.min())), max(high, float(leaf.max()))
            if name == label and leaf.ndim == 1 and leaf.dtype.kind in "iub" and len(self.labels) <= _MOST_LABELS:
                values, counts = np.unique(leaf, return_counts=True)
                self.labels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def blame(self, error: DataError, place: str) -> None:
        """Note a problem at a place, which may be what its text begins with."""
        text = str(error)
        self.problems.append((place, text.removeprefix(place).lstrip(": ") if text[len(place) :][:1] in ": " else text))


def check(data: str, reading: ReadOptions | None = None, progress: Progress = lambda share: None) -> list[DataFindings]:
    """Read all records of all parts of what lies at a path or URI.

    Raises:
        DataError: there is nothing that can be read at all.
        StorageError: storage refuses.
    """
    reading = reading or ReadOptions()
    if data in ("auto", "mnist", "digits"):
        return _sources(data, data, reading, progress)
    names = files_of(data)
    kind = kind_of(names, data)
    if kind in ("idx", "npz") and not splits_of(names):
        return _sources(data, kind, reading, progress)
    splits = splits_of(names) or [""]
    found: list[DataFindings] = []
    first = data
    for i, split in enumerate(splits):
        uri = part(data, split) if split else data

        def share(s: float, i: int = i) -> None:
            progress((i + s) / len(splits))

        found.append(_check(uri, split, kind_of(files_of(uri), uri), reading, share))
        if reading.classes is None and found[i].classes:  # other parts number their labels as the first one does
            reading, first = replace(reading, classes=found[i].classes), uri
        elif why := other_class(reading.classes, found[i].classes, first):
            found[i].problems.append((uri, why))
    return found


def _check(uri: str, split: str, kind: Kind, reading: ReadOptions, progress: Progress) -> DataFindings:
    found = DataFindings(split, kind)
    if kind == "tfrecord":
        _tfrecords(uri, found, reading, progress)
    elif kind == "parquet":
        _parquet(uri, found, reading, progress)
    elif kind == "csv":
        _csv(uri, found, reading, progress)
    elif kind == "images":
        _images(uri, found, reading, progress)
    else:
        (inner,) = _sources(uri, kind, reading, progress)
        inner.split = split
        return inner
    return found


def _tfrecords(uri: str, found: DataFindings, reading: ReadOptions, progress: Progress) -> None:
    files = Files(uri, is_wanted=is_tfrecord)
    found.files, found.bytes = len(files.names), sum(files.sizes)
    schema = None
    try:
        schema = read_schema(files.storage)
        if schema is not None:
            check_files(schema, files, whole=not files.is_single)
    except DataError as error:
        found.blame(error, uri)
    given = reading.columns()
    columns = columns_of(schema, given.get("x"), given.get("y", "label"), given.get("sample_weight"), "label")
    found.classes = told_of_labels(schema, columns[1])[1]
    names = [name for _, name in tree.flatten(columns)]
    label = columns[1] if isinstance(columns[1], str) else None
    known = {} if schema is None else schema.specs
    examples = _Examples(found, names, known, label, reading, schema is not None)
    done = 0
    for f in range(len(files.names)):
        place = files.locate(f)

        def read(at: int, n: int, f: int = f, done: int = done) -> memoryview:
            progress((done + at) / max(1, found.bytes))
            return files.read(f, at, n, whole=False)

        waiting: list[tuple[str, bytes]] = []
        for number, item in enumerate(tfrecord_frames.scan(read, files.sizes[f])):
            if isinstance(item, tfrecord_frames.Damage):
                try:
                    if not item.offset:
                        refuse_compressed(files.read(f, 0, min(2, files.sizes[f])), place)
                except DataError as error:
                    found.problems.append((place, str(error).removeprefix(f"{place} ")))
                    break
                found.problems.append((f"{place}: record {item.record} at byte {item.offset}", item.why))
            else:
                waiting.append((f"{place}: record {number} at byte {item[0]}", bytes(item[1])))
            if len(waiting) == _BATCH:
                examples.look(waiting)
                waiting = []
        examples.look(waiting)
        done += files.sizes[f]


class _Examples:
    """Looks into records that are whole."""

    def __init__(
        self, found: DataFindings, names: list[str], known: Any, label: str | None, reading: ReadOptions, by_raytf: bool
    ):
        self._found, self._names, self._known, self._label = found, names, known, label
        self._reading, self._by_raytf = reading, by_raytf
        self._parser: Parser | None = None
        self._decoders: list[Decoder | None] = []

    def look(self, records: list[tuple[str, bytes]]) -> None:
        """Parse records; if one of them cannot be, each by itself."""
        try:
            if records:
                self._parse(records)
        except DataError as error:
            if len(records) == 1:
                self._found.blame(error, records[0][0])
                return
            for record in records:
                self.look([record])

    def _parse(self, records: list[tuple[str, bytes]]) -> None:
        place, data = records[0]
        if self._parser is None:
            features = infer(data, self._known, self._names, place)
            if self._by_raytf:
                features = [f if f.encoded else feature(f.name, f.spec) for f in features]
            self._parser = Parser(features)
        lengths = np.array([len(r) for _, r in records])
        flat = np.frombuffer(b"".join(r for _, r in records), np.uint8)
        leaves = self._parser.parse(flat, np.cumsum(lengths) - lengths, lengths, lambda i: records[i][0])
        if not self._decoders:
            r = self._reading
            self._decoders = [
                Decoder.of(leaf[0], r.size, r.channels, r.fit, place) if f.encoded else None
                for f, leaf in zip(self._parser.features, leaves, strict=True)
            ]
        for k, decoder in enumerate(self._decoders):
            if decoder is not None:
                leaves[k] = np.stack([decoder(e, records[i][0]) for i, e in enumerate(leaves[k])])
        self._found.see(self._names, leaves, self._label)


def _parquet(uri: str, found: DataFindings, reading: ReadOptions, progress: Progress) -> None:
    import pyarrow.parquet as pq

    files = Files(uri, (".parquet",))
    found.files, found.bytes = len(files.names), sum(files.sizes)
    filesystem, base = files.storage.arrow()
    schema = None
    changed: list[tuple[str, str]] = []
    try:
        schema = read_schema(files.storage)
        if schema is not None:
            check_files(schema, files, whole=not files.is_single)
            changed = list(_changed(schema, files))
    except DataError as error:
        found.blame(error, uri)
    found.problems += changed
    given = reading.columns()
    columns = columns_of(schema, given.get("x"), given.get("y", "label"), given.get("sample_weight"), "label")
    found.classes = told_of_labels(schema, columns[1])[1]
    names = [name for _, name in tree.flatten(columns)]
    label = columns[1] if isinstance(columns[1], str) else None
    shapes = {} if schema is None else {name: spec.shape for name, spec in schema.specs.items()}
    first = ""
    for f, name in enumerate(files.names):
        path = f"{base}/{name}"
        try:
            with explained(path):
                file = pq.ParquetFile(path, filesystem=filesystem, page_checksum_verification=True)
                groups = file.metadata.num_row_groups
        except DataError as error:
            found.problems.append((path, str(error).removeprefix(f"{path} ")))
            continue
        for g in range(groups):
            place = f"{path}: row group {g}"
            try:
                with explained(place):
                    table = file.read_row_group(g)
                if table.num_rows:
                    leaves = leaves_of(table, names, shapes, path)
                    refuse_others(names, leaves, [found.specs[n] for n in names if first], path, first)
                    found.see(names, leaves, label)
                    first = first or path
            except DataError as error:
                text = str(error)
                found.problems.append((place, text.removeprefix(f"{place} ").removeprefix(f"{path}: ")))
            progress((f + (g + 1) / groups) / len(files.names))
    if not found.records and not found.problems:
        found.problems.append((uri, "the Parquet files hold no records"))


def _changed(schema: Schema, files: Files) -> Iterator[tuple[str, str]]:
    """Files whose bytes are not those that were written. Parquet protects its pages, not what says where they are."""
    for i, name in enumerate(files.names):
        crc = 0
        for at in range(0, files.sizes[i], _PIECE):
            data = files.read(i, at, min(_PIECE, files.sizes[i] - at), whole=False)
            crc = google_crc32c.extend(crc, bytes(data))
        if crc != schema.files[name].crc32c:
            yield files.locate(i), "its bytes are not those that were written (CRC-32C)"


def _images(uri: str, found: DataFindings, reading: ReadOptions, progress: Progress) -> None:
    files = Files(uri, image_folder.ENDINGS)
    found.files, found.bytes = len(files.names), sum(files.sizes)
    tops = sorted({name.partition("/")[0] for name in files.names if "/" in name})
    found.classes = tuple(reading.classes or tops)
    classes = ", ".join(found.classes[:20])
    number = {name: i for i, name in enumerate(found.classes)}
    decoder: Decoder | None = None

    def look(i: int) -> tuple[int, np.ndarray | DataError]:
        place = files.locate(i)
        try:
            if files.names[i].partition("/")[0] not in number:
                raise DataError(f"{place}: it lies in no folder of a class: {classes}")
            data = files.read(i, 0, files.sizes[i])
            one = decoder or Decoder.of(data, reading.size, reading.channels, reading.fit, place)
            return i, one(data, place)
        except DataError as error:
            return i, error

    for start in range(0, len(files.names), 64):
        stop = min(start + 64, len(files.names))
        for i, image in files.map(look, range(start, stop)) if decoder else map(look, range(start, stop)):
            if isinstance(image, DataError):
                place = files.locate(i)
                found.problems.append((place, str(image).removeprefix(place).lstrip(": ")))
                continue
            if decoder is None:
                data = files.read(i, 0, files.sizes[i])
                decoder = Decoder.of(data, reading.size, reading.channels, reading.fit, files.locate(i))
            label = np.array([number[files.names[i].partition("/")[0]]])
            found.see(["image", "label"], [image[None], label], "label")
        progress(stop / len(files.names))


def _csv(uri: str, found: DataFindings, reading: ReadOptions, progress: Progress) -> None:
    files = Files(uri, csv.ENDINGS)
    found.files, found.bytes = len(files.names), sum(files.sizes)
    try:
        _read(open_source(uri, reading), found, progress)
        return
    except DataError as error:
        if len(files.names) < 2:
            found.blame(error, uri)
            return
    # Each by itself: one that is damaged must not hide the others.
    good: list[tuple[str, CsvSource]] = []
    for f, name in enumerate(files.names):
        try:
            source = CsvSource(part(uri, name), **reading.columns(), classes=reading.classes)
            if good and source.header != good[0][1].header:
                raise DataError(f"{files.locate(f)}: its columns are not those of {good[0][1].name}.")
            good.append((part(uri, name), source))
        except DataError as error:
            found.blame(error, files.locate(f))
    classes = reading.classes or sorted({text for _, source in good for text in source.classes or ()}) or None
    for i, (file, _) in enumerate(good):

        def share(s: float, i: int = i) -> None:
            progress((i + s) / len(good))

        try:
            _read(CsvSource(file, **reading.columns(), classes=classes), found, share)
        except DataError as error:  # its labels are numbers, those of others text
            found.blame(error, file)


def _sources(data: str, kind: str, reading: ReadOptions, progress: Progress) -> list[DataFindings]:
    """Formats whose source tells what is wrong when it is made."""
    try:
        sources = open_splits(data, reading)
    except DataError as error:
        found = DataFindings("", kind)
        found.blame(error, data)
        return [found]
    every = []
    for i, (split, source) in enumerate(sources.items()):
        found = DataFindings(split, kind)
        files = getattr(source, "_files", None)
        if isinstance(files, Files):
            found.files, found.bytes = len(files.names), sum(files.sizes)

        def share(s: float, i: int = i) -> None:
            progress((i + s) / len(sources))

        _read(source, found, share)
        every.append(found)
    return every


def _read(source: Source, found: DataFindings, progress: Progress) -> None:
    """All records of a source, a stretch at a time."""
    from raytf.data.sources.writer import named

    columns, names, _ = named(source)
    label = columns[1] if isinstance(columns[1], str) else None
    found.classes = getattr(source, "classes", None)
    for start, stop in _stretches(source):
        try:
            found.see(names, source.take(np.arange(start, stop)), label)
        except (DataError, zlib.error) as error:
            found.blame(DataError(str(error)), f"{source.name}: records {start} to {stop - 1}")
        progress(stop / source.records)


def _stretches(source: Source) -> Iterator[tuple[int, int]]:
    edges = getattr(source, "edges", None)
    if edges is None:
        edges = [*range(0, source.records, _BATCH), source.records]
    yield from itertools.pairwise(edges)
