"""CSV files, scanned once for their lines and types, then read block by block."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from raytf.data import tree
from raytf.data.sources.base import Order, Spec, by_name, crc_of
from raytf.data.sources.block_reader import BlockSource
from raytf.data.sources.file_set import Files
from raytf.errors import DataError, one_line

ENDINGS = (".csv", ".tsv")
_BLOCK_BYTES = 1 << 20
#: The most distinct texts that a label's column may have as classes.
_MOST_CLASSES = 10_000
_NEWLINE, _QUOTE = ord("\n"), ord('"')
#: The contents of columns, for people.
_KINDS = {"whole": "numbers", "real": "numbers", "flag": "true and false", "text": "text"}


@dataclass(frozen=True)
class _Block:
    """Lines of a file.

    Attributes:
        file, offset, bytes: the place of the lines.
        first: number of the first record in its file.
        records: number of records.
    """

    file: int
    offset: int
    bytes: int
    first: int
    records: int


class CsvSource(BlockSource):
    """CSV files with a header line, on local disk, S3, GCS or Azure.

    Making the source scans all files once, to find lines and types. A worker then reads only its own blocks.

    Args:
        uri: a file, or a folder with files `*.csv` or `*.tsv` of the same columns, in the order of their names.
        x: the column, or a list of columns (inputs are then a dict by name). None makes one vector of all columns
            except those of y and sample_weight. A column of true and false is bool, or 1 and 0 in the vector.
        y: the label's column or columns, or None. Texts are numbered in sorted order; true and false are 1 and 0.
        sample_weight: the column of sample weights, or None.
        shape, dtype: shape and dtype of the vector that x=None makes, e.g. (28, 28, 1) and "uint8" for pixels.
        delimiter: separates values; by default a comma, or a tab in .tsv files.
        window: number of records in a shuffle window; by default 8,192, or 64 MiB of them.
        order: `records`, `blocks`, or `auto`: `records` for files of up to 256 MiB together.
        block_bytes: bytes of text in a block.
        classes: the texts of y in the order of their numbers, such as the classes of the training data for test data,
            where some may not occur. y is then read as text, even if it looks like numbers.

    Attributes:
        header: names of all columns.
        classes: the texts of y in the order of their numbers, or None if y holds numbers.

    Raises:
        DataError: no files or records, a missing column or value, a value that is not a number, an unknown class.
        StorageError: storage refuses a request.
    """

    def __init__(
        self,
        uri: str,
        x: str | list[str] | None = None,
        y: str | list[str] | None = "label",
        sample_weight: str | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: str = "float32",
        delimiter: str | None = None,
        window: int | None = None,
        order: Order = "auto",
        block_bytes: int = _BLOCK_BYTES,
        classes: Sequence[str] | None = None,
    ):
        super().__init__(uri, window)
        self._block_bytes = block_bytes
        self._files = Files(uri, ENDINGS)
        if not self._files.names:
            raise DataError(f"{uri}: there are no *.csv files.")
        self._delimiter = delimiter or ("\t" if self._files.names[0].lower().endswith(".tsv") else ",")
        self.header, _ = self._names(0)
        targets = [name for _, name in tree.flatten((by_name(y), sample_weight))]
        self._vector = [name for name in self.header if name not in targets] if x is None else []
        self._columns = tree.map_leaves(str, ("" if x is None else by_name(x), by_name(y), sample_weight))
        self._label = y if isinstance(y, str) else None
        self._wanted = list(dict.fromkeys([*self._vector, *(name for _, name in tree.flatten(self._columns) if name)]))
        missing = [name for name in self._wanted if name not in self.header]
        if missing or (x is None and not self._vector):
            what = f"there is no column {missing[0]!r}" if missing else "no column is left for x"
            raise DataError(f"{self._files.locate(0)}: {what}; it has {', '.join(self.header)}.")
        self._kinds: dict[str, str] = {}
        self.classes: tuple[str, ...] | None = None if classes is None else tuple(classes)
        if self.classes is not None:
            self._refuse_odd_classes(self.classes, y)
        self._labels: tuple[float, float] | None = None
        self._blocks: list[_Block] = []
        self._scan()
        self._lay_out(np.array([b.records for b in self._blocks], np.int64))
        if not self.records:
            raise DataError(f"{uri}: the files hold no records.")
        self._shape = (len(self._vector),) if shape is None else tuple(shape)
        if self._vector and int(np.prod(self._shape, dtype=np.int64)) != len(self._vector):
            raise DataError(f"{uri}: x has {len(self._vector)} columns; shape {self._shape} does not fit.")
        self._dtype = np.dtype(dtype).name
        first = self._read(0)
        self._leaf_specs = [Spec.of(leaf) for leaf in first]
        self.spec = tree.unflatten(self._columns, self._leaf_specs)
        self._order_by(order, sum(self._files.sizes))
        if not self._by_record:
            sizes = np.array(self._files.sizes)
            named = crc32(repr(self.classes).encode()) if self.classes else 0
            self.crc = crc_of([*(leaf[:16] for leaf in first), *(leaf[-16:] for leaf in self._read(-1)), sizes], named)

    def label_range(self) -> tuple[float, float] | None:
        return self._labels

    def _names(self, f: int) -> tuple[list[str], int]:
        """Return the names in a file's first line, and where the second line begins."""
        import csv

        head, length = b"", 1 << 16
        while True:
            length = min(length, self._files.sizes[f])
            head = bytes(self._files.read(f, 0, length))
            ends = _line_ends(np.frombuffer(head, np.uint8), 0)[0]
            if len(ends) or length == self._files.sizes[f]:
                break
            length *= 4
        stop = int(ends[0]) + 1 if len(ends) else len(head)
        try:
            text = head[:stop].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self._files.locate(f)} is not text in UTF-8. Convert it first.") from error
        names = next(csv.reader(io.StringIO(text), delimiter=self._delimiter), [])
        if not names or len(set(names)) < len(names):
            raise DataError(f"{self._files.locate(f)}: the first line must name the columns, each once.")
        return names, stop

    def _scan(self) -> None:
        texts: set[str] = set()
        low, high = np.inf, -np.inf
        for f in range(len(self._files.names)):
            header, begin = self._names(f)
            if header != self.header:
                raise DataError(f"{self._files.locate(f)}: its columns are not those of {self._files.locate(0)}.")
            first = 0
            for offset, data in self._pieces(f, begin):
                block = _Block(f, offset, len(data), first, 0)
                table = self._table(data, block, None)
                for name in self._wanted:
                    column = table.column(name)
                    self._note_kind(name, column, block)
                    if name == self._label and self._kinds[name] == "text":
                        here = set(column.unique().to_pylist())
                        texts |= here
                        self._limit_classes(texts, block)
                        self._refuse_unknown(here, column, block)
                    elif name == self._label and self._kinds[name] in ("whole", "flag"):
                        values = column.to_numpy()
                        low, high = min(low, values.min(initial=0)), max(high, values.max(initial=0))
                if len(table):
                    self._blocks.append(_Block(f, offset, len(data), first, len(table)))
                first += len(table)
        if self._label is not None and self._kinds.get(self._label) == "text":
            self.classes = self.classes or tuple(sorted(map(str, texts)))
            self._labels = 0.0, float(len(self.classes) - 1)
        elif low <= high and self._kinds.get(self._label or "") in ("whole", "flag"):
            self._labels = float(low), float(high)

    def _limit_classes(self, texts: set[str], block: _Block) -> None:
        if len(texts) > _MOST_CLASSES:
            raise DataError(
                f"{self._files.locate(block.file)}: column {self._label!r} has more than {_MOST_CLASSES} distinct "
                "texts, too many for classes. Convert it to numbers first."
            )

    def _refuse_odd_classes(self, classes: tuple[str, ...], y: Any) -> None:
        twice = next((name for name in classes if classes.count(name) > 1), None)
        if self._label is None or not classes or twice is not None:
            what = f"y={y!r}" if self._label is None else f"{twice!r} twice" if twice is not None else "none"
            raise DataError(f"{self.name}: classes must name the texts of one column y, each once; found {what}.")

    def _refuse_unknown(self, texts: set[str], column: Any, block: _Block) -> None:
        unknown = sorted(texts.difference(self.classes)) if self.classes is not None else []
        if unknown:
            import pyarrow.compute as pc

            record = block.first + pc.index(column, unknown[0]).as_py()
            raise DataError(
                f"{self._files.locate(block.file)}: record {record}: {self._label} is {unknown[0]!r}. Expected classes "
                f"{', '.join((self.classes or ())[:20])}."
            )

    def _note_kind(self, name: str, column: Any, block: _Block) -> None:
        import pyarrow as pa

        kind = column.type
        is_text = name == self._label and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        if pa.types.is_null(kind) and not len(column):
            return
        if pa.types.is_boolean(kind):
            now = "flag"
        elif pa.types.is_integer(kind):
            now = "whole"
        elif pa.types.is_floating(kind):
            now = "real"
        elif is_text:
            now = "text"
        else:
            raise DataError(
                f"{self._place(block, len(column))}: column {name!r} holds {kind}. Expected numbers; convert it first."
            )
        before = self._kinds.get(name, now)
        if _KINDS[before] != _KINDS[now]:
            fix = " Pass classes=[...] to read all of it as text." if name == self._label else ""
            raise DataError(
                f"{self._place(block, len(column))}: column {name!r} holds {_KINDS[now]} here and {_KINDS[before]} "
                f"elsewhere.{fix}"
            )
        self._kinds[name] = "real" if "real" in (before, now) else now

    def _pieces(self, f: int, begin: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of blocks of whole lines."""
        size, parity = self._files.sizes[f], 0
        rest, at = b"", begin
        while begin < size:
            length = min(self._block_bytes, size - begin)
            data = bytes(self._files.read(f, begin, length, whole=False))
            ends, parity = _line_ends(np.frombuffer(data, np.uint8), parity)
            begin += length
            if begin == size:
                yield at, rest + data
            elif len(ends):
                cut = int(ends[-1]) + 1
                yield at, rest + data[:cut]
                rest, at = data[cut:], begin - length + cut
            else:
                rest += data

    def _read(self, b: int) -> list[np.ndarray]:
        block = self._blocks[b]
        data = bytes(self._files.read(block.file, block.offset, block.bytes, whole=False))
        table = self._table(data, block, self._kinds)
        if len(table) != block.records:
            raise DataError(f"{self._files.locate(block.file)} was rewritten while it was read.")
        names = [name for _, name in tree.flatten(self._columns)]
        return [self._numbers(table.column(name), name) if name else self._matrix(table, block) for name in names]

    def _matrix(self, table: Any, block: _Block) -> np.ndarray:
        out = np.empty((len(table), len(self._vector)), self._dtype)
        for i, name in enumerate(self._vector):
            values = table.column(name).to_numpy()
            out[:, i] = values
            if np.dtype(self._dtype).kind in "iu" and (out[:, i] != values).any():
                record = block.first + int((out[:, i] != values).argmax())
                value = values[record - block.first]
                raise DataError(
                    f"{self._files.locate(block.file)}: record {record}: {name} is {value}, no {self._dtype}."
                )
        return out.reshape(len(table), *self._shape)

    def _numbers(self, column: Any, name: str) -> np.ndarray:
        if self._kinds[name] != "text":
            values = np.asarray(column.to_numpy())
            return values.astype(np.int64) if self._kinds[name] == "flag" and name == self._label else values
        assert self.classes is not None
        number = {text: i for i, text in enumerate(self.classes)}
        encoded = column.combine_chunks().dictionary_encode()
        parts = [encoded] if not hasattr(encoded, "chunks") else encoded.chunks
        codes = [np.array([number[t] for t in p.dictionary.to_pylist()], np.int64)[p.indices.to_numpy()] for p in parts]
        return np.concatenate(codes) if codes else np.zeros(0, np.int64)

    def _table(self, data: bytes, block: _Block, kinds: dict[str, str] | None) -> Any:
        import pyarrow as pa
        from pyarrow import csv

        types = {"whole": pa.int64(), "real": pa.float64(), "flag": pa.bool_(), "text": pa.string()}
        known = None if kinds is None else {name: types[kinds[name]] for name in self._wanted}
        convert = csv.ConvertOptions(include_columns=self._wanted, column_types=known, strings_can_be_null=False)
        convert.null_values = []  # an empty value is an error, but `nan` is a number
        is_text = self.classes is not None or self._kinds.get(self._label or "") == "text"
        if known is None and self._label is not None and is_text:
            convert.column_types = {self._label: pa.string()}
        parse = csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        reading = csv.ReadOptions(use_threads=False, column_names=self.header, block_size=max(1 << 20, 2 * len(data)))
        if not data.strip():
            return pa.table({name: pa.array([], types[(kinds or {}).get(name, "whole")]) for name in self._wanted})
        try:
            return csv.read_csv(pa.py_buffer(data), reading, parse, convert)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise DataError(f"{self._place(block, None)}: {one_line(error, 240)}") from error

    def _place(self, block: _Block, records: int | None) -> str:
        last = "" if not records else f" to {block.first + records - 1}"
        return f"{self._files.locate(block.file)}: records {block.first}{last or ' on'} (byte {block.offset})"


def _line_ends(data: np.ndarray, parity: int) -> tuple[np.ndarray, int]:
    """Return the line ends outside quotes, and whether the last byte is within quotes."""
    ends = np.flatnonzero(data == _NEWLINE)
    quotes = np.flatnonzero(data == _QUOTE)
    inside = (np.searchsorted(quotes, ends) + parity) % 2
    return ends[inside == 0], (len(quotes) + parity) % 2
