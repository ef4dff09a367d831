"""Benchmark 3's peer: Ray Data's iter_tf_batches.

After Ray's guides "Data Loading and Preprocessing" (Ray Train), "Iterating over Data" and "Shuffling Data": files or
blocks in a random order, a local shuffle buffer, batches fetched ahead. TFRecords hold images as bytes, which
map_batches turns into numbers, and Parquet lists of numbers, which Ray Data gives as arrays by itself. The dataset is
consumed where it is made, as the only worker would.

    python benchmarks/peers/input_ray_data.py ADDRESS
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import tensorflow as tf

from benchmarks.data.input import deliver
from benchmarks.data.records import BATCH

#: As many records as raytf shuffles within.
BUFFER, PREFETCH = 8192, 8


def dataset(kind: str, place: str) -> ray.data.Dataset:
    if kind == "arrays":
        import pyarrow as pa
        from ray.data.extensions import ArrowTensorArray

        images, labels = np.load(f"{place}/x.npy"), np.load(f"{place}/y.npy")
        tables = [
            pa.table({"image": ArrowTensorArray.from_numpy(x), "label": y})
            for x, y in zip(np.array_split(images, 16), np.array_split(labels, 16), strict=True)
        ]
        return ray.data.from_arrow(tables).randomize_block_order()
    filesystem = None
    if "://" in place:
        import pyarrow.fs as pafs

        filesystem, place = pafs.FileSystem.from_uri(place)
    options: dict[str, Any] = {"filesystem": filesystem, "shuffle": "files", "file_extensions": [kind]}
    if kind == "parquet":
        return ray.data.read_parquet(place, **options)

    def decode(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        pixels = np.frombuffer(b"".join(batch["image"]), np.uint8)
        return {"image": pixels.reshape(-1, 28, 28, 1), "label": batch["label"]}

    return ray.data.read_tfrecords(place, **options).map_batches(decode)


def batches(kind: str, place: str) -> Iterator[int]:
    data = dataset(kind, place)
    while True:
        for _ in data.iter_tf_batches(
            batch_size=BATCH,
            prefetch_batches=PREFETCH,
            local_shuffle_buffer_size=BUFFER,
            drop_last=True,
            dtypes={"image": tf.uint8, "label": tf.int64},
        ):
            yield 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="raytf-ray-") as folder:
        ray.init(num_cpus=os.cpu_count(), object_store_memory=1 << 30, include_dashboard=False, _temp_dir=folder)
        ray.data.DataContext.get_current().enable_progress_bars = False
        deliver(sys.argv[1], batches)
        ray.shutdown()
    os._exit(0)
