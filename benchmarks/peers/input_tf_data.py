"""Benchmark 3's peer: tf.data written by hand.

After TensorFlow's guide "Better performance with the tf.data API" (tensorflow.org/guide/data_performance): shuffle,
batch, then what is done to records for a whole batch at once ("vectorizing mapping") and several batches at a time,
prefetch with AUTOTUNE last.

- Arrays: a shuffled range of record numbers, batches of which are gathered. The guide's from_tensor_slices and
  shuffle, which move records one by one, are several times slower.
- TFRecord: TFRecordDataset with parallel reads, a shuffle buffer of 8,192 records, parse_example of whole batches.
- Parquet: TensorFlow reads none. pyarrow reads row groups in a shuffled order, in threads ahead of the generator;
  each is permuted together with those around it in a buffer of 8,192 records or more, and cut into batches by numpy.

    python benchmarks/peers/input_tf_data.py ADDRESS
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from benchmarks.data.input import CALL, deliver
from benchmarks.data.records import BATCH

#: As many records as raytf shuffles within.
BUFFER = 8192
#: As many threads as raytf reads with, and row groups that they are ahead.
READERS, READ_AHEAD = 2, 16


def from_arrays(folder: str) -> tf.data.Dataset:
    images, labels = tf.constant(np.load(f"{folder}/x.npy")), tf.constant(np.load(f"{folder}/y.npy"))
    numbers = tf.data.Dataset.range(len(labels)).shuffle(len(labels)).repeat().batch(BATCH, drop_remainder=True)
    return numbers.map(
        lambda i: (tf.gather(images, i), tf.gather(labels, i)), num_parallel_calls=tf.data.AUTOTUNE
    ).prefetch(tf.data.AUTOTUNE)


def from_tfrecords(folder: str) -> tf.data.Dataset:
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parse(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parsed = tf.io.parse_example(batch, features)
        return tf.reshape(tf.io.decode_raw(parsed["image"], tf.uint8), [-1, 28, 28, 1]), parsed["label"]

    files = tf.data.Dataset.list_files(f"{folder}/*.tfrecord", shuffle=True)
    records = tf.data.TFRecordDataset(files, num_parallel_reads=tf.data.AUTOTUNE)
    batches = records.shuffle(BUFFER).repeat().batch(BATCH, drop_remainder=True)
    return batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def from_parquet(place: str) -> tf.data.Dataset:
    import pyarrow.fs as pafs
    import pyarrow.parquet as pq

    filesystem, folder = pafs.FileSystem.from_uri(place) if "://" in place else (pafs.LocalFileSystem(), place)
    infos = filesystem.get_file_info(pafs.FileSelector(folder))
    paths = [info.path for info in infos if info.path.endswith(".parquet")]
    groups = [(path, g) for path in paths for g in range(pq.read_metadata(path, filesystem=filesystem).num_row_groups)]
    rng, own = np.random.default_rng(1), threading.local()

    def read(group: tuple[str, int]) -> tuple[np.ndarray, np.ndarray]:
        files = own.__dict__  # a ParquetFile serves one thread
        if group[0] not in files:
            files[group[0]] = pq.ParquetFile(group[0], filesystem=filesystem, pre_buffer=True)
        table = files[group[0]].read_row_group(group[1])
        images = table["image"].combine_chunks().flatten().to_numpy()
        return images.reshape(-1, 28, 28, 1), table["label"].to_numpy()

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = itertools.chain.from_iterable(rng.permutation(len(groups)) for _ in itertools.count())
        with ThreadPoolExecutor(READERS) as readers:
            ahead = deque(readers.submit(read, groups[i]) for i in itertools.islice(order, READ_AHEAD))
            parts: list[tuple[np.ndarray, np.ndarray]] = []
            while True:
                parts.append(ahead.popleft().result())
                ahead.append(readers.submit(read, groups[next(order)]))
                if sum(len(labels) for _, labels in parts) < BUFFER:
                    continue
                images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
                chosen = rng.permutation(len(labels))
                for begin in range(0, len(chosen) - BATCH + 1, BATCH):
                    batch = chosen[begin : begin + BATCH]
                    yield images[batch], labels[batch]
                rest = chosen[len(chosen) // BATCH * BATCH :]
                parts = [(images[rest], labels[rest])]

    signature = (tf.TensorSpec([BATCH, 28, 28, 1], tf.uint8), tf.TensorSpec([BATCH], tf.int64))
    return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(tf.data.AUTOTUNE)


def batches(kind: str, place: str) -> Iterator[int]:
    data = {"arrays": from_arrays, "parquet": from_parquet, "tfrecord": from_tfrecords}[kind](place)
    iterator = iter(data)

    @tf.function  # as in training, where Python is asked once for several steps
    def several() -> list[tuple[tf.Tensor, tf.Tensor]]:
        return [next(iterator) for _ in range(CALL)]

    while True:
        several()
        yield CALL


if __name__ == "__main__":
    deliver(sys.argv[1], batches)
    os._exit(0)
