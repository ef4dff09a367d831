"""Reads data sets for prediction into Ray Data: the formats of training, JSONL, and the built-in data sets."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.csv as pacsv
import ray
import ray.data

from raytf.data import tree
from raytf.data.image_datasets import load_images
from raytf.data.sources import TFRecordSource, images
from raytf.data.sources.base import by_name, record_bytes
from raytf.data.sources.detect import is_idx
from raytf.data.sources.file_set import Files
from raytf.data.sources.images import Decoder, Fit
from raytf.data.sources.schema import read_schema
from raytf.data.sources.tfrecord import features_of, is_tfrecord
from raytf.errors import ConfigError, DataError, StorageError, one_line
from raytf.inference.batch import columns
from raytf.inference.batch.columns import Options
from raytf.inference.signature import Signature
from raytf.storage.storage import Storage

#: Ending of a file's name -> its format.
_KINDS = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".csv", ".csv.gz"), "csv"),
    **dict.fromkeys((".jsonl", ".json", ".jsonl.gz"), "json"),
    **dict.fromkeys(images.ENDINGS, "images"),
    ".npz": "npz",
}
_NAMED = ("digits", "mnist")
#: The most records and bytes of a block. Each worker should get several, so that the progress bar moves.
_BLOCK, _BLOCK_BYTES = 4096, 32 << 20
#: The most bytes of a CSV file from which the types of its columns are inferred.
_TYPED_BYTES = 128 << 20


def kind_of(names: Sequence[str]) -> str | None:
    """Return the format of most of these files, or None if raytf can read none of them."""
    kinds = Counter(kind for kind in map(_kind, names) if kind is not None)
    if not kinds and any(is_idx(name) for name in names):
        return "idx"
    return kinds.most_common(1)[0][0] if kinds else None


def _kind(name: str) -> str | None:
    if is_tfrecord(name):
        return "tfrecord"
    return next((kind for end, kind in _KINDS.items() if name.lower().endswith(end)), None)


@dataclass(frozen=True)
class Input:
    """A data set to read.

    Attributes:
        uri: as the user passed it.
        kind: parquet, csv, json, npz, tfrecord, images, or idx (also for the built-in data sets).
        folder: the folder of its files.
        names: names of the files of this kind, in the order of their records.
        sizes: bytes of each file.
    """

    uri: str
    kind: str
    folder: str = ""
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


def inspect(uri: str) -> Input:
    """Return the data set at a URI. Does not need Ray.

    Args:
        uri: a file or folder, local or on an object store; or digits or mnist, for their test images.

    Raises:
        ConfigError: there is nothing that raytf can read; the message lists the formats.
        DataError: `raytf data convert` has not finished there.
        StorageError: storage refuses.
    """
    if uri in _NAMED:
        return Input(uri, "idx")
    files = Files(uri, is_wanted=lambda name: True)
    place = Storage(uri).locate("")
    if not files.names:
        raise ConfigError(f"there is nothing in {place}. Expected a file or a folder of files to predict for.")
    kind = kind_of(files.names)
    if kind is None:
        raise ConfigError(
            f"{place}: raytf cannot read files such as {files.names[0]}. Expected .parquet, .csv, .jsonl, "
            ".tfrecord, .npz, JPEG or PNG images, or MNIST's IDX files."
        )
    if kind == "npz" and not files.is_single:
        raise ConfigError(f"{place} is a folder of .npz files. Expected one file.")
    if kind in ("parquet", "tfrecord"):
        read_schema(files.storage)
    chosen = [i for i, name in enumerate(files.names) if _kind(name) == kind]
    return Input(uri, kind, files.uri, tuple(files.names[i] for i in chosen), tuple(files.sizes[i] for i in chosen))


def read(origin: Input, signature: Callable[[], Signature], options: Options, fit: Fit) -> tuple[Any, int | None]:
    """Return a data set of Ray Data, and its number of records if that is cheap to know.

    Args:
        signature: returns the model's signature; called if the data depend on it.
        fit: how to adapt an image of another shape to the model.

    Raises:
        ConfigError, DataError: the data set cannot be read.
        StorageError: storage refuses.
    """
    if origin.kind in ("idx", "npz", "tfrecord", "images"):
        records = by_number(origin, signature, options, fit)
        return _dataset(records), records.count
    filesystem, folder = Storage(origin.folder).arrow()
    # From a folder, Ray would read all files, of any format, and in its own order.
    paths = [f"{folder}/{name}" for name in origin.names]
    if origin.kind == "parquet":
        data = ray.data.read_parquet(paths, filesystem=filesystem, file_extensions=["parquet", "pq"])
        return data, data.count()
    if origin.kind == "csv":
        reading = pacsv.ReadOptions(use_threads=False, block_size=_typed_bytes(origin))
        return ray.data.read_csv(paths, filesystem=filesystem, read_options=reading), None
    return ray.data.read_json(paths, filesystem=filesystem, file_extensions=None), None


@dataclass(frozen=True)
class Records:
    """Records that are read by number.

    Attributes:
        count: number of records.
        bytes: size of one record; 0 if the records are already in memory.
        held: the object to read the records from, which is sent to every process.
        take: returns the columns of some records, from `held` and the numbers of the records.
    """

    count: int
    bytes: int
    held: Any
    take: Callable[[Any, np.ndarray], dict[str, np.ndarray]]


def by_number(origin: Input, signature: Callable[[], Signature], options: Options, fit: Fit) -> Records:
    """Return the records of files that raytf reads by itself: idx, npz, tfrecord and images."""
    if origin.kind == "idx":
        source = load_images(origin.uri).test
        image, label = source.take(np.arange(source.records))
        return _of_arrays({"image": image, "label": label})
    if origin.kind == "npz":
        return _of_arrays(_npz(Storage(origin.uri)))
    if origin.kind == "tfrecord":
        return _of_tfrecords(origin, signature(), options, fit)
    return _of_images(origin, signature(), fit)


def _dataset(records: Records) -> Any:
    stored, take = ray.put(records.held), records.take
    blocks = max(1, -(-records.count // _BLOCK), -(-records.count * records.bytes // _BLOCK_BYTES))
    # With a CPU share of its own, Ray Data does not fuse it with the model's step, whose process may be replaced.
    return ray.data.range(records.count, override_num_blocks=min(blocks, max(1, records.count))).map_batches(
        lambda batch: take(ray.get(stored), batch["id"]), batch_format="numpy", num_cpus=0.5
    )


def _typed_bytes(origin: Input) -> int:
    """Return how many bytes of a CSV file to read as one block, from which its columns' types are inferred."""
    is_plain = all(not name.lower().endswith(".gz") for name in origin.names)
    return min(_TYPED_BYTES, max(1 << 20, *origin.sizes)) if is_plain else _TYPED_BYTES


def _of_images(origin: Input, signature: Signature, fit: Fit) -> Records:
    shape = columns.image_of(signature)
    if shape is None or shape[2] not in (1, 3):
        inputs = ", ".join(f"{name} {spec.text()}" for name, spec in signature.inputs.items())
        raise ConfigError(
            f"the model takes {inputs}, which is not an image of fixed size, gray or in color. Expected input of "
            "another kind."
        )
    files = Files(origin.uri, is_wanted=_is_image)
    decoder = Decoder(shape[:2], shape[2], fit, resizes=True)

    def take(held: tuple[Files, Decoder], ids: np.ndarray) -> dict[str, np.ndarray]:
        files, decode = held
        places = [files.locate(i) for i in ids.tolist()]
        pairs = zip(ids.tolist(), places, strict=True)
        shown = files.map(lambda pair: decode(files.read(pair[0], 0, files.sizes[pair[0]]), pair[1]), pairs)
        return {"image": np.stack(list(shown)), "path": np.array(places, object)}

    return Records(len(files.names), int(np.prod(shape)), (files, decoder), take)


def _is_image(name: str) -> bool:
    return _kind(name) == "images"


def _of_tfrecords(origin: Input, signature: Signature, options: Options, fit: Fit) -> Records:
    """Return the records as training reads them: by the schema of `raytf data convert`, or by names of features."""
    shape = columns.image_of(signature)
    pixels: dict[str, Any] = {"size": shape and shape[:2], "channels": shape and shape[2], "fit": fit}
    schema = read_schema(Storage(origin.folder))
    if schema is not None:
        names, source = schema.names(), TFRecordSource(origin.uri, **pixels)
    else:
        wanted = columns.features(signature, options, features_of(origin.uri))
        names = [name for _, name in tree.flatten(by_name(wanted))]
        source = TFRecordSource(origin.uri, wanted, None, **pixels)

    def take(held: TFRecordSource, ids: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(names, held.take(ids), strict=True))

    return Records(source.records, record_bytes(source.spec), source, take)


def _npz(place: Storage) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(place.get(""))) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except StorageError:
        raise
    except Exception as error:  # np.load lets zipfile.BadZipFile and zlib.error through, too
        raise DataError(f"{place.locate('')} is not an .npz file, or a damaged one: {one_line(error, 200)}") from error
    if {"x_test", "y_test"} <= set(arrays):
        return {"image": arrays["x_test"], "label": arrays["y_test"]}
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        listed = ", ".join(f"{name} has {count}" for name, count in lengths.items()) or "it is empty"
        raise DataError(f"{place.locate('')}: arrays differ in their number of records: {listed}.")
    return arrays


def _of_arrays(arrays: dict[str, np.ndarray]) -> Records:
    def take(held: dict[str, np.ndarray], ids: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[ids] for name, array in held.items()}

    return Records(len(next(iter(arrays.values()))), 0, arrays, take)
