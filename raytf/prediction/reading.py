"""Data sets to predict for, as Ray Data reads them: Parquet, CSV, JSONL, images, .npz, and what jobs call by name."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.data

from raytf.data.datasets import load_images
from raytf.data.sources.opening import is_idx
from raytf.errors import ConfigError, DataError, one_line
from raytf.storage import Storage

#: Ending of a file's name -> what it holds.
_KINDS = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".csv", ".csv.gz"), "csv"),
    **dict.fromkeys((".jsonl", ".json", ".jsonl.gz"), "json"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".bmp", ".gif"), "images"),
    ".npz": "npz",
}
_NAMED = ("digits", "mnist")
#: Records of a block of arrays in memory; a few for each worker make a bar that moves.
_BLOCK = 4096


def kind_of(names: list[str]) -> str | None:
    """What most of some files hold; None where raytf reads none of them."""
    found = Counter(kind for name in names for end, kind in _KINDS.items() if name.lower().endswith(end))
    if not found and any(is_idx(name) for name in names):
        return "idx"
    return found.most_common(1)[0][0] if found else None


@dataclass(frozen=True)
class Input:
    """Something to read.

    Attributes:
        uri: as it was given.
        kind: parquet, csv, json, npz, images, or idx, for which names of data sets stand, too.
        files: how many are of that kind.
    """

    uri: str
    kind: str
    files: int


def look(uri: str) -> Input:
    """What is there to read; needs no Ray.

    Args:
        uri: a file or folder, local or on an object store, or digits or mnist, whose test images it stands for.

    Raises:
        ConfigError: there is nothing that can be read; it says what can.
        StorageError: storage refuses.
    """
    if uri in _NAMED:
        return Input(uri, "idx", 1)
    place = Storage(uri)
    is_file = place.exists("")
    names = [place.locate("")] if is_file else [file.name for file in place.files()]
    if not names:
        raise ConfigError(
            f"there is nothing in {place.locate('')}. Expected a file or a folder of files to predict for."
        )
    kind = kind_of(names)
    if kind is None:
        raise ConfigError(
            f"{place.locate('')} has no file that is read here, such as {names[0]}. Expected .parquet, .csv, .jsonl, "
            ".npz, images, or MNIST's IDX files."
        )
    if kind == "npz" and not is_file:
        raise ConfigError(f"{place.locate('')} is a folder of .npz files. Expected one file.")
    return Input(uri, kind, sum(kind_of([name]) == kind for name in names))


def read(given: Input, image: Callable[[], tuple[int, int, int]]) -> tuple[Any, int | None]:
    """A data set, and how many records it has where that is cheap to know.

    Args:
        image: height, width and channels that the model takes; asked for images alone.

    Raises:
        ConfigError, DataError: it cannot be read.
        StorageError: storage refuses.
    """
    kind = given.kind
    if kind == "idx":
        return _from_images(given.uri)
    place = Storage(given.uri)
    if kind == "npz":
        return _from_arrays(_npz(place))
    filesystem, path = place.arrow()
    if kind == "images":
        height, width, channels = image()
        modes = {1: "L", 3: "RGB", 4: "RGBA"}
        if channels not in modes:
            raise ConfigError(f"the model takes images of {channels} channels. Expected 1, 3 or 4 to read image files.")
        data = ray.data.read_images(
            path, filesystem=filesystem, size=(height, width), mode=modes[channels], include_paths=True
        )
        return data, given.files
    if kind == "parquet":
        data = ray.data.read_parquet(path, filesystem=filesystem)
        return data, data.count()
    if kind == "csv":
        return ray.data.read_csv(path, filesystem=filesystem), None
    return ray.data.read_json(path, filesystem=filesystem, lines=True), None


def _from_images(uri: str) -> tuple[Any, int]:
    source = load_images(uri).test
    image, label = source.take(np.arange(source.records))
    return _from_arrays({"image": image, "label": label})


def _npz(place: Storage) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(place.get(""))) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, OSError, EOFError, KeyError) as error:
        if hasattr(error, "kind"):
            raise
        raise DataError(f"{place.locate('')} is no .npz file, or a damaged one: {one_line(error, 200)}") from error
    except Exception as error:  # zipfile.BadZipFile and zlib.error, as np.load lets them through
        raise DataError(f"{place.locate('')} is no .npz file, or a damaged one: {one_line(error, 200)}") from error
    if {"x_test", "y_test"} <= set(arrays):
        return {"image": arrays["x_test"], "label": arrays["y_test"]}
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        listed = ", ".join(f"{name} has {count}" for name, count in lengths.items()) or "it is empty"
        raise DataError(f"{place.locate('')}: arrays differ in their number of records: {listed}.")
    return arrays


def _from_arrays(arrays: dict[str, np.ndarray]) -> tuple[Any, int]:
    records = len(next(iter(arrays.values())))
    stored = ray.put(arrays)

    def take(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        held = ray.get(stored)
        return {name: array[batch["id"]] for name, array in held.items()}

    blocks = max(1, -(-records // _BLOCK))
    # A share of a CPU of its own, so that it does not become one step with the model's, whose process may be replaced.
    data = ray.data.range(records, override_num_blocks=blocks).map_batches(take, batch_format="numpy", num_cpus=0.5)
    return data, records
