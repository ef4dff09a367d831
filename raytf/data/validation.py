"""Reads a whole data set, finds damage, and counts records, values and labels on the way."""

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
from raytf.data.sources import CsvSource, Source, csv, images, tfrecord_files
from raytf.data.sources.base import Spec, other_class
from raytf.data.sources.detect import ReadOptions, files_of, kind_of, open_source, splits_of
from raytf.data.sources.file_set import Files
from raytf.data.sources.images import Decoder
from raytf.data.sources.parquet import explained, leaves_of, refuse_others
from raytf.data.sources.schema import Schema, check_files, columns_of, labels_of, read_schema
from raytf.data.sources.tf_example import ExampleReader
from raytf.data.sources.tfrecord import is_tfrecord
from raytf.data.sources.writer import named
from raytf.errors import DataError

#: Records, or images, per read.
_BATCH, _IMAGES = 1024, 64
_PIECE = 8 << 20
#: The most distinct labels that are counted.
_MOST_LABELS = 1000

#: Receives the completed share, in [0, 1].
Progress = Callable[[float], object]


@dataclass
class DataFindings:
    """The contents and the damage of a part of the data.

    Attributes:
        split: name of the part; empty if the data has no parts.
        kind: the format.
        files, bytes, records: how many were read; damaged records do not count.
        specs: spec of each leaf, by name.
        ranges: smallest and largest number of each leaf.
        not_finite: how many NaN and infinite numbers each leaf has, if any.
        labels: number of records with each label, if labels are whole numbers.
        classes: names of the labels, or None.
        problems: (place, reason) of each damage.
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

    def add(self, names: list[str], leaves: list[np.ndarray], label: str | None) -> None:
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

    def blame(self, error: DataError, place: str, file: str | None = None) -> None:
        """Add a problem at a place in a file, without the place or file at the beginning of the error's text."""
        text = str(error)
        for start in (place, file):
            if start is not None and text.startswith((f"{start}:", f"{start} ")):
                text = text[len(start) :].lstrip(": ")
                break
        self.problems.append((place, text))


def check(data: str, reading: ReadOptions | None = None, progress: Progress = lambda share: None) -> list[DataFindings]:
    """Read all records of all parts of the data at a path or URI.

    Raises:
        DataError: there is no readable data at all.
        StorageError: storage refuses a request.
    """
    reading = reading or ReadOptions()
    if data in ("auto", "mnist", "digits"):
        return _check_sources(data, data, reading, progress)
    names = files_of(data)
    kind = kind_of(names, data)
    if kind in ("idx", "npz") and not splits_of(names):
        return _check_sources(data, kind, reading, progress)
    splits = splits_of(names) or [""]
    findings: list[DataFindings] = []
    first = data
    for i, split in enumerate(splits):
        uri = part(data, split) if split else data
        findings.append(_check(uri, split, reading, _share_of(progress, i, len(splits))))
        if reading.classes is None and findings[i].classes:  # other parts number their labels like the first one
            reading, first = replace(reading, classes=findings[i].classes), uri
        elif why := other_class(reading.classes, findings[i].classes, first):
            findings[i].problems.append((uri, why))
    return findings


def _share_of(progress: Progress, i: int, parts: int) -> Progress:
    return lambda share: progress((i + share) / parts)


def _check(uri: str, split: str, reading: ReadOptions, progress: Progress) -> DataFindings:
    checks = {"tfrecord": _check_tfrecords, "parquet": _check_parquet, "csv": _check_csv, "images": _check_images}
    kind = kind_of(files_of(uri), uri)
    findings = DataFindings(split, kind)
    if kind in checks:
        checks[kind](uri, findings, reading, progress)
    else:
        (findings,) = _check_sources(uri, kind, reading, progress)
        findings.split = split
    return findings


def _count_files(files: Files, findings: DataFindings) -> None:
    findings.files, findings.bytes = len(files.names), sum(files.sizes)


def _columns(
    uri: str, files: Files, findings: DataFindings, reading: ReadOptions
) -> tuple[Schema | None, list[str], str | None]:
    """Compare files with the schema beside them. Return the schema, the columns to read, and the label's column."""
    _count_files(files, findings)
    schema = None
    try:
        schema = read_schema(files.storage)
        if schema is not None:
            check_files(schema, files)
            if findings.kind == "parquet":
                findings.problems += list(_changed(schema, files))
    except DataError as error:
        findings.blame(error, uri)
    names = reading.columns()
    columns = columns_of(schema, names.get("x"), names.get("y", "label"), names.get("sample_weight"))
    findings.classes = labels_of(schema, columns[1])[1]
    label = columns[1] if isinstance(columns[1], str) else None
    return schema, [name for _, name in tree.flatten(columns)], label


def _changed(schema: Schema, files: Files) -> Iterator[tuple[str, str]]:
    """Yield a problem for each file whose bytes changed: Parquet's checksums cover its pages, but not its footer."""
    for i, name in enumerate(files.names):
        crc = 0
        for at in range(0, files.sizes[i], _PIECE):
            data = files.read(i, at, min(_PIECE, files.sizes[i] - at), whole=False)
            crc = google_crc32c.extend(crc, bytes(data))
        if crc != schema.files[name].crc32c:
            yield files.locate(i), "its bytes changed after they were written (CRC-32C)"


def _check_tfrecords(uri: str, findings: DataFindings, reading: ReadOptions, progress: Progress) -> None:
    files = Files(uri, is_wanted=is_tfrecord)
    schema, names, label = _columns(uri, files, findings, reading)
    reader: ExampleReader | None = None
    done = 0

    def parse(records: list[tuple[str, bytes]]) -> None:
        """Parse records together or, if one of them cannot be parsed, one by one."""
        nonlocal reader
        try:
            if reader is None:
                known, shape = {} if schema is None else schema.specs, (reading.size, reading.channels, reading.fit)
                reader = ExampleReader(records[0][1], names, known, schema is not None, shape, records[0][0])
            lengths = np.array([len(record) for _, record in records])
            data = np.frombuffer(b"".join(record for _, record in records), np.uint8)
            leaves = reader.read(data, np.cumsum(lengths) - lengths, lengths, lambda i: records[i][0])
            findings.add(names, leaves, label)
        except DataError as error:
            if len(records) == 1:
                findings.blame(error, records[0][0])
                return
            for record in records:
                parse([record])

    for f in range(len(files.names)):
        place = files.locate(f)

        def read(at: int, n: int, f: int = f, done: int = done) -> memoryview:
            progress((done + at) / max(1, findings.bytes))
            return files.read(f, at, n, whole=False)

        waiting: list[tuple[str, bytes]] = []
        for number, item in enumerate(tfrecord_files.scan(read, files.sizes[f])):
            if isinstance(item, tfrecord_files.Damage):
                try:
                    if not item.offset:
                        tfrecord_files.refuse_compressed(files.read(f, 0, min(2, files.sizes[f])), place)
                except DataError as error:
                    findings.blame(error, place)
                    break
                findings.problems.append((f"{place}: record {item.record} at byte {item.offset}", item.why))
            else:
                waiting.append((f"{place}: record {number} at byte {item[0]}", bytes(item[1])))
            if len(waiting) == _BATCH:
                parse(waiting)
                waiting = []
        if waiting:
            parse(waiting)
        done += files.sizes[f]


def _check_parquet(uri: str, findings: DataFindings, reading: ReadOptions, progress: Progress) -> None:
    import pyarrow.parquet as pq

    files = Files(uri, (".parquet",))
    filesystem, base = files.storage.arrow()
    schema, names, label = _columns(uri, files, findings, reading)
    shapes = {} if schema is None else {name: spec.shape for name, spec in schema.specs.items()}
    first = ""
    for f, name in enumerate(files.names):
        path = f"{base}/{name}"
        try:
            with explained(path):
                file = pq.ParquetFile(path, filesystem=filesystem, page_checksum_verification=True)
                groups = file.metadata.num_row_groups
        except DataError as error:
            findings.blame(error, path)
            continue
        for g in range(groups):
            place = f"{path}: row group {g}"
            try:
                with explained(place):
                    table = file.read_row_group(g)
                if table.num_rows:
                    leaves = leaves_of(table, names, shapes, path)
                    refuse_others(names, leaves, [findings.specs[n] for n in names if first], path, first)
                    findings.add(names, leaves, label)
                    first = first or path
            except DataError as error:
                findings.blame(error, place, path)
            progress((f + (g + 1) / groups) / len(files.names))
    if not findings.records and not findings.problems:
        findings.problems.append((uri, "the Parquet files hold no records"))


def _check_images(uri: str, findings: DataFindings, reading: ReadOptions, progress: Progress) -> None:
    files = Files(uri, images.ENDINGS)
    _count_files(files, findings)
    folders = sorted({name.partition("/")[0] for name in files.names if "/" in name})
    findings.classes = tuple(reading.classes or folders)
    classes = ", ".join(findings.classes[:20])
    number = {name: i for i, name in enumerate(findings.classes)}
    decoder: Decoder | None = None

    def decode(i: int) -> tuple[int, np.ndarray | DataError]:
        nonlocal decoder
        place = files.locate(i)
        try:
            if files.names[i].partition("/")[0] not in number:
                raise DataError(f"{place}: it is not in the folder of a class: {classes}")
            data = files.read(i, 0, files.sizes[i])
            decoder = decoder or Decoder.of(data, reading.size, reading.channels, reading.fit, place)
            return i, decoder(data, place)
        except DataError as error:
            return i, error

    for start in range(0, len(files.names), _IMAGES):
        batch = range(start, min(start + _IMAGES, len(files.names)))
        for i, image in files.map(decode, batch) if decoder else map(decode, batch):
            if isinstance(image, DataError):
                findings.blame(image, files.locate(i))
            else:
                label = np.array([number[files.names[i].partition("/")[0]]])
                findings.add(["image", "label"], [image[None], label], "label")
        progress(batch.stop / len(files.names))


def _check_csv(uri: str, findings: DataFindings, reading: ReadOptions, progress: Progress) -> None:
    files = Files(uri, csv.ENDINGS)
    _count_files(files, findings)
    try:
        _read(open_source(uri, reading), findings, progress)
        return
    except DataError as error:
        if len(files.names) < 2:
            findings.blame(error, uri)
            return
    # Check each file by itself, so that a damaged one does not hide the others.
    good: list[tuple[str, CsvSource]] = []
    for f, name in enumerate(files.names):
        try:
            source = CsvSource(part(uri, name), **reading.columns(), classes=reading.classes)
            if good and source.header != good[0][1].header:
                raise DataError(f"{files.locate(f)}: its columns are not those of {good[0][1].name}.")
            good.append((part(uri, name), source))
        except DataError as error:
            findings.blame(error, files.locate(f))
    classes = reading.classes or sorted({text for _, source in good for text in source.classes or ()}) or None
    for i, (file, _) in enumerate(good):
        try:
            source = CsvSource(file, **reading.columns(), classes=classes)
            _read(source, findings, _share_of(progress, i, len(good)))
        except DataError as error:  # its labels are numbers, but those of other files are text
            findings.blame(error, file)


def _check_sources(data: str, kind: str, reading: ReadOptions, progress: Progress) -> list[DataFindings]:
    """Check formats whose source reports all damage when it is made."""
    try:
        sources = open_splits(data, reading)
    except DataError as error:
        findings = DataFindings("", kind)
        findings.blame(error, data)
        return [findings]
    parts = []
    for i, (split, source) in enumerate(sources.items()):
        findings = DataFindings(split, kind)
        files = getattr(source, "_files", None)
        if isinstance(files, Files):
            _count_files(files, findings)
        _read(source, findings, _share_of(progress, i, len(sources)))
        parts.append(findings)
    return parts


def _read(source: Source, findings: DataFindings, progress: Progress) -> None:
    columns, names, _ = named(source)
    label = columns[1] if isinstance(columns[1], str) else None
    findings.classes = getattr(source, "classes", None)
    edges: Any = getattr(source, "edges", None) or [*range(0, source.records, _BATCH), source.records]
    for start, stop in itertools.pairwise(edges):
        try:
            findings.add(names, source.take(np.arange(start, stop)), label)
        except (DataError, zlib.error) as error:
            findings.blame(DataError(str(error)), f"{source.name}: records {start} to {stop - 1}")
        progress(stop / source.records)
