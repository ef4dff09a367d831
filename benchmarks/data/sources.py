"""Measures how fast each source supplies shuffled records of MNIST's size to one worker.

    python -m benchmarks.data.sources [--records 20000] [--seconds 3]

Prints a table: records per second of wall clock, and per second of CPU time, which other work on the machine does not
change. `numpy` is the array in memory that all of them were made of; `tf.data` reads the TFRecord file from its
beginning to its end and parses it, in order.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from raytf.data import (
    ArraySource,
    CsvSource,
    ImageFolderSource,
    MappingSource,
    NpzSource,
    ParquetSource,
    Source,
    TFRecordSource,
)
from raytf.data.order import EpochOrder
from raytf.data.plan import StepPlan
from raytf.data.sources.writer import FileLayout, write
from raytf.storage.storage import Storage

BATCH = 512


def make(folder: Path, records: int) -> dict[str, Callable[[], Source]]:
    """Write the same records in every format, and return how to open each source."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (records, 28, 28, 1), np.uint8)
    y = rng.integers(0, 10, records)
    arrays = ArraySource(x, y)
    for to in ("tfrecord", "parquet"):
        layout = FileLayout.of(to, arrays.spec, records, 128 << 20, None)  # type: ignore[arg-type]
        write(Storage(str(folder / to)), arrays, layout, "benchmark")
    np.savez(folder / "a.npz", x=x, y=y)
    np.savez_compressed(folder / "b.npz", x=x, y=y)
    with (folder / "a.csv").open("w") as out:
        out.write(",".join(["label", *(f"p{i}" for i in range(784))]) + "\n")
        np.savetxt(out, np.concatenate([y[:, None], x.reshape(records, -1)], 1), fmt="%d", delimiter=",")
    for i in range(min(records, 4000)):
        (folder / "png" / str(y[i])).mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i, ..., 0]).save(folder / "png" / str(y[i]) / f"{i:05}.png")
    tf, pq = str(folder / "tfrecord"), str(folder / "parquet")
    return {
        "numpy": lambda: arrays,
        "TFRecord, by record": lambda: TFRecordSource(tf, order="records"),
        "TFRecord, by blocks": lambda: TFRecordSource(tf, order="blocks"),
        "Parquet, by blocks": lambda: ParquetSource(pq, order="blocks"),
        ".npz": lambda: NpzSource(str(folder / "a.npz")),
        ".npz, compressed": lambda: NpzSource(str(folder / "b.npz")),
        "CSV, by blocks": lambda: CsvSource(str(folder / "a.csv"), shape=(28, 28, 1), dtype="uint8", order="blocks"),
        "image folder (PNG)": lambda: ImageFolderSource(str(folder / "png")),
        "mapping": lambda: MappingSource([(x[i], y[i]) for i in range(records)]),
    }


def epochs(source: Source) -> Iterator[int]:
    """Yield the records of each batch, in the order of epochs, for one worker and four shards."""
    plan = StepPlan(source.records, BATCH, 4)
    epoch = 0
    while True:
        reader = source.reader(4) if hasattr(source, "reader") else source  # one that has read nothing yet
        order = EpochOrder(plan, source.block_sizes, 1, epoch, source.window)
        for step in range(plan.steps_per_epoch):
            b = plan.micro_batch_size
            ids = np.concatenate([order.records(v, step * b, (step + 1) * b) for v in range(4)])
            yield len(reader.take(ids)[0])
        epoch += 1


def tf_data(path: str) -> Iterator[int]:
    """Yield the records of each batch of the file, as TensorFlow reads it."""
    import tensorflow as tf

    kinds = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parse(batch: Any) -> Any:
        parsed = tf.io.parse_example(batch, kinds)
        return tf.io.decode_raw(parsed["image"], tf.uint8), parsed["label"]

    while True:
        for _, label in tf.data.TFRecordDataset(path).batch(BATCH).map(parse):
            yield len(label)


def measure(batches: Iterator[int], seconds: float) -> tuple[float, float]:
    """Return records per second of wall clock and of CPU time, after a first batch."""
    next(batches)
    began, cpu, records = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        records += next(batches)
    return records / (time.perf_counter() - began), records / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'source':<22}{'records/s':>12}{'per CPU s':>12}")
        kinds = make(Path(folder), flags.records)
        runs = [(name, epochs(build())) for name, build in kinds.items()]
        runs.append(("tf.data, in order", tf_data(f"{folder}/tfrecord/part-00000.tfrecord")))
        for name, batches in runs:
            wall, cpu = measure(batches, flags.seconds)
            print(f"{name:<22}{wall:>12,.0f}{cpu:>12,.0f}", flush=True)


if __name__ == "__main__":
    main()
