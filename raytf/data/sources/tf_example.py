"""Reads and writes tf.train.Example without TensorFlow; records with the same layout are parsed together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raytf.data.sources.base import Spec
from raytf.data.sources.images import Decoder, is_image
from raytf.errors import DataError

Kind = Literal["bytes", "float", "int64"]
_KINDS: dict[int, Kind] = {1: "bytes", 2: "float", 3: "int64"}
#: The most record lengths that are parsed as groups; if there are more, records are parsed one by one.
_GROUPS = 16


@dataclass(frozen=True)
class Feature:
    """The encoding of a leaf in an Example.

    Attributes:
        name: name of the feature.
        spec: spec of the leaf.
        kind: the list that holds it; `bytes` has one value, the array's bytes or an encoded image.
        encoded: whether it is an image to be decoded.
    """

    name: str
    spec: Spec
    kind: Kind
    encoded: bool = False

    @property
    def count(self) -> int:
        return int(np.prod(self.spec.shape, dtype=np.int64))


def feature(name: str, spec: Spec) -> Feature:
    """Return the encoding of a leaf: integers and float32 as TensorFlow's readers expect, everything else as bytes."""
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "f" and dtype.itemsize == 4:
        return Feature(name, spec, "float")
    if dtype.kind in "bi" or (dtype.kind == "u" and dtype.itemsize < 8):
        return Feature(name, spec, "bytes" if dtype.itemsize == 1 and spec.shape else "int64")
    return Feature(name, spec, "bytes")


#: tf.train.Example as a file descriptor.
_EXAMPLE = """
name: "raytf/example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.Feature" label: LABEL_OPTIONAL }
  }
  field {
    name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.Features.FeatureEntry" label: LABEL_REPEATED
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.Features" label: LABEL_OPTIONAL }
}
"""


@functools.cache
def _example() -> Any:
    """Return a class for tf.train.Example, in a separate pool that neither imports nor affects TensorFlow's class."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def encode(features: Sequence[Feature], leaves: Sequence[np.ndarray]) -> Iterator[bytes]:
    """Yield the Examples of a batch; equal numbers make equal bytes."""
    example = _example()
    columns: list[Any] = []
    for f, leaf in zip(features, leaves, strict=True):
        if f.kind == "bytes":
            little = np.ascontiguousarray(leaf, np.dtype(f.spec.dtype).newbyteorder("<"))
            columns.append([row.tobytes() for row in little])
        else:
            flat = leaf.reshape(len(leaf), f.count)
            columns.append(np.ascontiguousarray(flat, "<f4") if f.kind == "float" else flat.astype(np.int64))
    for i in range(len(leaves[0])):
        message = example()
        table = message.features.feature
        for f, column in zip(features, columns, strict=True):
            if f.kind == "bytes":
                table[f.name].bytes_list.value.append(column[i])
            elif f.kind == "float":
                # Copy the bytes, because Python's floats would change the bits of a NaN.
                data = column[i].tobytes()
                table[f.name].float_list.MergeFromString(b"\x0a" + _encoded(len(data)) + data if data else b"")
            else:
                table[f.name].int64_list.value.extend(column[i].tolist())
        yield message.SerializeToString(deterministic=True)


def infer(data: bytes, known: Mapping[str, Spec], names: Sequence[str], place: str) -> list[Feature]:
    """Return the features with these names, inferred from a record.

    Args:
        data: the record.
        known: specs by feature, which are not inferred.
        place: the record's name in messages.

    Raises:
        DataError: it is not an Example, or lacks one of the features.
    """
    table = _table(data, place)
    features = []
    for name in names:
        if name not in table:
            raise DataError(
                f"{place} has no feature {name!r}; it has {', '.join(sorted(table)) or 'none'}. Name those to train "
                "with: x=..., y=..."
            )
        kind = _kind(table[name])
        if kind is None:
            raise DataError(f"{place}: feature {name!r} is empty. Add a value to every record.")
        values = getattr(table[name], f"{kind}_list").value
        if name in known:
            features.append(Feature(name, known[name], kind))
        elif kind == "bytes" and len(values) == 1:
            is_encoded = is_image(values[0])
            features.append(Feature(name, Spec(() if is_encoded else (len(values[0]),), "uint8"), kind, is_encoded))
        elif kind == "bytes":
            raise DataError(f"{place}: feature {name!r} has {len(values)} values of bytes. Expected one.")
        else:
            shape = () if len(values) == 1 else (len(values),)
            features.append(Feature(name, Spec(shape, "int64" if kind == "int64" else "float32"), kind))
    return features


def names_of(data: bytes, place: str) -> list[str]:
    """Return the names of a record's features.

    Raises:
        DataError: it is not an Example.
    """
    return sorted(_table(data, place))


def _table(data: bytes, place: str) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return _example().FromString(data).features.feature
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{place} is no tf.train.Example. Records of other kinds are not read.") from error


def _kind(value: Any) -> Kind | None:
    name = value.WhichOneof("kind")
    return None if name is None else name.removesuffix("_list")


class Parser:
    """Extracts features from records; an encoded image stays bytes."""

    def __init__(self, features: Sequence[Feature]):
        self.features = list(features)

    def parse(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, place: Callable[[int], str]
    ) -> list[Any]:
        """Return the leaves of records: an array [n, *shape] for each feature, or a list of n bytes if it is encoded.

        Args:
            data: uint8, bytes of a file.
            starts, lengths: [n] offsets and sizes of the records in it.
            place: (i) -> name of the i-th record, for messages.

        Raises:
            DataError: a record lacks a feature, or has one of another kind or length.
        """
        n = len(starts)
        out: list[Any] = [[b""] * n if f.encoded else np.empty((n, *f.spec.shape), f.spec.dtype) for f in self.features]
        kinds = np.unique(lengths)
        rest: Sequence[int] = range(n)
        if len(kinds) <= _GROUPS and not any(f.encoded for f in self.features):
            left = [self._parse_alike(data, starts, np.flatnonzero(lengths == k), int(k), out) for k in kinds]
            rest = np.sort(np.concatenate(left)).tolist() if left else []
        view: Any = memoryview(data)  # type: ignore[arg-type]
        for i in rest:
            start = int(starts[i])
            self._parse_one(view[start : start + int(lengths[i])], i, out, place)
        return out

    def _parse_alike(
        self, data: np.ndarray, starts: np.ndarray, which: np.ndarray, length: int, out: list[Any]
    ) -> np.ndarray:
        """Parse the records (all of one length) that are laid out like the first one. Return the others."""
        if len(which) < 2 or not length:
            return which
        rows = np.lib.stride_tricks.sliding_window_view(data, length)[starts[which]]
        layout = _layout(rows[0].tobytes())
        spans = [_usable(layout, f, rows[0]) for f in self.features] if layout else [None]
        if layout is None or None in spans:
            return which
        fixed = np.ones(length, bool)
        for _, a, b in layout.values():
            fixed[a:b] = False
        alike = (rows[:, fixed] == rows[0, fixed]).all(1)
        for f, span in zip(self.features, spans, strict=True):
            if f.kind == "int64":
                a, b = span  # type: ignore[misc]
                alike &= ((rows[:, a:b] ^ rows[0, a:b]) < 0x80).all(1)
        good = which[alike]
        for f, span, target in zip(self.features, spans, out, strict=True):
            a, b = span  # type: ignore[misc]
            values = np.ascontiguousarray(rows[alike, a:b])
            if f.kind == "int64":
                numbers = _varints(values)
            else:
                numbers = values.view("<f4" if f.kind == "float" else np.dtype(f.spec.dtype).newbyteorder("<"))
            if not _fits(numbers, f.spec.dtype).all():
                return which  # parsing one by one finds the record for the message
            target[good] = numbers.reshape(len(good), *f.spec.shape)
        return which[~alike]

    def _parse_one(self, data: memoryview, i: int, out: list[Any], place: Callable[[int], str]) -> None:
        table = _table(bytes(data), place(i))
        for f, target in zip(self.features, out, strict=True):
            if f.name not in table:
                raise DataError(f"{place(i)} has no feature {f.name!r}, which the first record has.")
            value, kind = table[f.name], _kind(table[f.name])
            if kind != f.kind:
                raise DataError(f"{place(i)}: feature {f.name!r} holds {kind or 'nothing'}. Expected {f.kind}.")
            values = getattr(value, f"{kind}_list").value
            size, expected = len(values), f.count
            if f.kind == "bytes":
                expected = f.spec.bytes
                size = len(values[0]) if len(values) == 1 else -1
            if f.encoded and size >= 0:
                target[i] = values[0]
                continue
            if size != expected:
                unit = "bytes" if f.kind == "bytes" else "numbers"
                has = f"{size} {unit}" if size >= 0 else f"{len(values)} values"
                raise DataError(
                    f"{place(i)}: feature {f.name!r} has {has}, and shape {f.spec.shape} of {f.spec.dtype} takes "
                    f"{expected} {unit}. Pass features={{{f.name!r}: Spec(shape, dtype)}}, or write records of one "
                    "length."
                )
            if f.kind == "bytes":
                flat = np.frombuffer(values[0], np.dtype(f.spec.dtype).newbyteorder("<"))
            elif f.kind == "float":
                flat = np.frombuffer(value.float_list.SerializeToString()[-4 * expected :], "<f4")
            else:
                flat = np.array(values, np.int64)
            if not _fits(flat, f.spec.dtype).all():
                raise DataError(
                    f"{place(i)}: feature {f.name!r} holds {flat[~_fits(flat, f.spec.dtype)][0]}, no {f.spec.dtype}."
                )
            target[i] = flat.reshape(f.spec.shape)


class ExampleReader:
    """Converts records to arrays: parses their features, and decodes images.

    Args:
        first: the first record, which represents all others.
        names: names of the features.
        known: specs by feature, which are not inferred.
        is_own: whether raytf wrote the records.
        images: (size, channels, fit) as for `Decoder.of`.
        place: the record's name in messages.

    Raises:
        DataError: as `infer` and `Parser.parse`, or an image is damaged.
    """

    def __init__(
        self, first: bytes, names: Sequence[str], known: Mapping[str, Spec], is_own: bool, images: Any, place: str
    ):
        features = infer(first, known, names, place)
        if is_own:  # another writer may use another kind of list
            features = [f if f.encoded else feature(f.name, f.spec) for f in features]
        self._parser = Parser(features)
        start, length = np.array([0]), np.array([len(first)])
        leaves = self._parser.parse(np.frombuffer(first, np.uint8), start, length, lambda _: place)
        pairs = list(zip(features, leaves, strict=True))
        size, channels, fit = images
        self._decoders = [Decoder.of(leaf[0], size, channels, fit, place) if f.encoded else None for f, leaf in pairs]
        decoded = zip(features, self._decoders, strict=True)
        self.specs = [f.spec if decoder is None else Spec(decoder.shape, "uint8") for f, decoder in decoded]

    def read(
        self,
        data: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        place: Callable[[int], str],
        each: Callable[..., Iterable[np.ndarray]] = map,
    ) -> list[np.ndarray]:
        """Return the leaves of records, each [n, *shape], as `Parser.parse`; `each` is `map`, perhaps with threads."""
        leaves = self._parser.parse(data, starts, lengths, place)
        for k, decoder in enumerate(self._decoders):
            if decoder is not None:
                leaves[k] = _decoded(decoder, leaves[k], place, each)
        return leaves


def _decoded(decoder: Decoder, encoded: list[bytes], place: Callable[[int], str], each: Any) -> np.ndarray:
    out = np.empty((len(encoded), *decoder.shape), np.uint8)
    for i, image in enumerate(each(lambda i: decoder(encoded[i], place(i)), range(len(encoded)))):
        out[i] = image
    return out


def _fits(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Return, for each number, whether an integer dtype can hold it; other dtypes round any number."""
    kind = np.dtype(dtype)
    if kind.kind not in "iub" or numbers.dtype == kind:
        return np.ones(numbers.shape, bool)
    with np.errstate(invalid="ignore"):
        return np.asarray(numbers.astype(kind) == numbers)


def _usable(layout: dict[str, tuple[Kind, int, int]], f: Feature, row: np.ndarray) -> tuple[int, int] | None:
    """Return the range of a feature's value in a record, or None if it has another kind or length."""
    kind, a, b = layout.get(f.name, ("bytes", 0, -1))
    if kind != f.kind or b < a:
        return None
    if kind == "int64":
        return (a, b) if int((row[a:b] < 0x80).sum()) == f.count else None
    return (a, b) if b - a == (4 * f.count if kind == "float" else f.spec.bytes) else None


def _varints(rows: np.ndarray) -> np.ndarray:
    """Return the numbers in packed varints [n, bytes], whose rows all have the same boundaries."""
    ends = np.flatnonzero(rows[0] < 0x80)
    out = np.zeros((len(rows), len(ends)), np.uint64)
    begin = 0
    for column, end in enumerate(ends.tolist()):
        for shift, at in enumerate(range(begin, end + 1)):
            out[:, column] |= (rows[:, at] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * shift)
        begin = end + 1
    return out.view(np.int64)


def _layout(record: bytes) -> dict[str, tuple[Kind, int, int]] | None:
    """Return the kind and range of each feature's value in a record, or None if it has an unexpected layout."""
    try:
        layout: dict[str, tuple[Kind, int, int]] = {}
        ((number, a, b),) = _fields(record, 0, len(record))
        for entry, c, d in _fields(record, a, b):
            (one, key_a, key_b), (two, value_a, value_b) = _fields(record, c, d)
            ((kind, e, f),) = _fields(record, value_a, value_b)
            ((value, g, h),) = _fields(record, e, f)
            name = record[key_a:key_b].decode()
            if (number, entry, one, two, value) != (1, 1, 1, 2, 1) or kind not in _KINDS or name in layout:
                return None
            layout[name] = _KINDS[kind], g, h
        return layout
    except (ValueError, IndexError, UnicodeDecodeError):
        return None


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, stop) of a message's fields.

    Raises:
        ValueError: a field has no length, or exceeds its message.
    """
    while at < end:
        key, at = _varint(data, at)
        if key & 7 != 2:
            raise ValueError("a field without a length")
        length, at = _varint(data, at)
        if at + length > end:
            raise ValueError("a field beyond its message")
        yield key >> 3, at, at + length
        at += length


def _encoded(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return out + bytes((value,))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
