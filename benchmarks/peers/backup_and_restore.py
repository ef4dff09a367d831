"""The peer of `recovery.py` without Ray: a script for MultiWorkerMirroredStrategy, restarted by a loop when it fails.

It follows TensorFlow's tutorial "Multi-worker training with Keras": TF_CONFIG, one process for each worker, `fit` with
`BackupAndRestore`. A supervisor starts all of them again when one has died, as the tutorial leaves to its reader. As
Keras 3's `fit` does not run under that strategy, it is that of `tf_keras`, for which the tutorial was written.

Better than the tutorial: data is shuffled by index, so that a buffer of images is not filled again after each failure,
and a backup is made every this many steps, not at the end of an epoch only.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

MODELS = str(Path(__file__).parents[1] / "models.py")


@dataclass(frozen=True)
class Job:
    """Train the CNN with a process for each worker, and note when each step was made."""

    notes: str
    """As in stock_ray.py."""
    storage: str
    """Folder for backups."""
    data: str
    """.npz with x_train and y_train."""
    run: str = "script"
    """Name of the run."""
    workers: int = 2
    """Number of workers."""
    global_batch_size: int = 128
    """Examples in one step, over all workers together."""
    steps: int = 1_000_000
    """At least so many."""
    save_every_steps: int = 0
    """Steps between two backups; 0 makes one at the end of each epoch."""
    use_gpu: bool = False
    """A GPU for each worker."""
    rank: int | None = None
    """Of the worker that this process is; without it, it starts and watches all."""


def note(job: Job, what: str, more: str = "") -> None:
    with open(job.notes, "a") as out:
        out.write(f"{what} {time.monotonic()}{more}\n")


def supervise(job: Job) -> int:
    """Start all workers, and all again when one has failed."""
    from raytf.testing.processes import free_port

    while True:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(job.workers)]
        workers = []
        for rank in range(job.workers):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(config), "TF_USE_LEGACY_KERAS": "1"}
            environment["CUDA_VISIBLE_DEVICES"] = str(rank) if job.use_gpu else "-1"
            workers.append(subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)], env=environment))
        while all(worker.poll() is None for worker in workers):
            time.sleep(0.02)
        ended = [worker.poll() for worker in workers]
        note(job, "mark:notice")
        for worker in workers:
            if any(ended):
                worker.kill()
            worker.wait()
        if not any(ended):
            return 0


def work(job: Job) -> None:
    """Train on one worker."""
    import numpy as np
    import tensorflow as tf
    import tf_keras as keras

    def tell(what: str, more: str = "") -> None:
        if job.rank == 0:
            note(job, what, more)

    tell("mark:processes")
    # One core each, as raytf's workers have: else each would have as many threads as the machine has cores.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tell("mark:rendezvous")
    with np.load(job.data) as data:
        x, y = data["x_train"], data["y_train"].astype(np.int32)
    images, labels = tf.constant(x), tf.constant(y)
    epoch_steps = len(x) // job.global_batch_size
    indices = tf.data.Dataset.range(len(x)).shuffle(len(x), seed=job.rank).repeat().batch(job.global_batch_size)
    batches = indices.map(lambda rows: (tf.gather(images, rows), tf.gather(labels, rows)), tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    with strategy.scope():
        model = runpy.run_path(MODELS)["cnn"](keras)
        model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")

    class Noting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self._supports_tf_logs = True  # numbers of the logs are not fetched for this

        def on_epoch_begin(self, epoch, logs=None):
            self._epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            tell(str(self._epoch * epoch_steps + batch + 1))

    backup = keras.callbacks.BackupAndRestore(
        os.path.join(job.storage, job.run), save_freq=job.save_every_steps or "epoch"
    )
    tell("begin", f" {job.workers}")
    model.fit(
        batches.prefetch(tf.data.AUTOTUNE).with_options(options),
        epochs=-(-job.steps // epoch_steps),
        steps_per_epoch=epoch_steps,
        callbacks=[backup, Noting()],
        verbose=0,
    )


def main(job: Job) -> int:
    if job.rank is None:
        return supervise(job)
    work(job)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Job)))
