"""Parts that the peers of the distributed step share: flags, data of MNIST's size in memory, TensorFlow's threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import harness, models
from raytf import testing

#: Of an epoch: MNIST's 60,000, up to a whole number of batches and of calls.
RECORDS = 480 * models.BATCH
#: Steps of one call into TensorFlow, where a guide allows more than one.
CALL_STEPS = 16


@dataclass(frozen=True)
class Program:
    """Flags of a program that trains in turns."""

    address: str
    """Of the conductor; see turns.py."""
    workers: int = 2
    """Processes."""
    model: str = "cnn"
    """Of benchmarks/models.py."""
    batch: int = models.BATCH
    """Examples in one step, over all workers together."""
    threads: int = 1
    """For each worker, within an operation; 0 leaves it to the framework."""
    use_gpu: bool = False
    """One GPU for each worker."""
    places: str = ""
    """NAMESPACE@ADDRESS of each process, comma-separated; by default all are on this host."""
    profile: str | None = None
    """Folder for what TensorFlow's profiler sees of rank 0 in the second turn; see step/profile.py."""


def environment() -> dict[str, str]:
    """Return the environment of all programs: a plain user's, from which they and Ray's workers import `benchmarks`."""
    return testing.environment(PYTHONPATH=str(harness.ROOT), TF_CPP_MIN_LOG_LEVEL="2")


def set_threads(threads: int) -> None:
    """Set TensorFlow's threads as `raytf.training.worker.set_up` does: so many within an operation, and at least two
    between operations."""
    import tensorflow as tf

    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)


def profiled(folder: str | None) -> AbstractContextManager[Any]:
    """Have TensorFlow's profiler look on, where a folder is given."""
    if folder is None:
        return nullcontext()
    import tensorflow as tf

    return tf.profiler.experimental.Profile(folder)


def dataset(name: str, rank: int, workers: int, batch: int) -> Any:
    """Return an endless tf.data.Dataset of one worker's records: shuffled, in batches, prefetched.

    Faster than the tutorials' `from_tensor_slices(...).shuffle(...).batch(...)`: numbers are shuffled, not pictures,
    and a batch is gathered at once.
    """
    import tensorflow as tf

    x, y = models.MODELS[name].data(RECORDS)
    x, y = tf.constant(x[rank::workers]), tf.constant(np.asarray(y[rank::workers], np.int64))
    numbers = tf.data.Dataset.range(len(x)).shuffle(len(x), seed=0).repeat().batch(batch, drop_remainder=True)
    return numbers.map(lambda i: (tf.gather(x, i), tf.gather(y, i))).prefetch(tf.data.AUTOTUNE)
