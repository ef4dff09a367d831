"""The peer of `benchmarks/recovery.py`: Ray Train's TensorflowTrainer as it comes, with a loop of its user's own.

As in Ray's tutorial, the state is reported as a checkpoint at the end of each epoch. The loop is written out, since
Keras 3's `fit` does not run under MultiWorkerMirroredStrategy. All of Ray's settings are the defaults, but for the
number of failures, which is without end.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

MNIST_JOB = str(Path(__file__).parents[1] / "jobs" / "mnist.py")


@dataclass(frozen=True)
class Job:
    """Train the network of jobs/mnist.py with TensorflowTrainer, and note when each step was made."""

    notes: str
    """As in recovery_job.py."""
    storage: str
    """Folder for checkpoints."""
    data: str = "auto"
    """As in recovery_job.py."""
    run: str = "stock"
    """Name of the run."""
    workers: int = 2
    """Number of workers."""
    global_batch_size: int = 128
    """Examples in one step, over all workers together."""
    steps: int = 1_000_000
    """At least so many."""


def train(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    import os
    import tempfile
    import time

    import keras
    import numpy as np
    import ray.train
    import tensorflow as tf

    import raytf

    def note(what: str) -> None:
        if rank == 0:
            with open(settings["notes"], "a") as out:
                out.write(f"{what} {time.monotonic()}\n")

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = ray.train.get_context().get_world_rank()
    images = raytf.load_images(settings["data"])
    x, y = images.train.take(np.arange(images.train.records))
    batch = settings["global_batch_size"]
    epoch_steps = len(x) // batch
    with strategy.scope():
        model = settings["build"](images.image_shape, images.classes)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        entropy = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        variables = [*model.variables, *optimizer.variables]
        epoch = 0
        checkpoint = ray.train.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as folder, np.load(os.path.join(folder, "state.npz")) as stored:
                for i, variable in enumerate(variables):
                    variable.assign(stored[str(i)])
                epoch = int(stored["epoch"]) + 1

    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(entropy(labels, model(images, training=True))) / batch
        weights = [v.value for v in model.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_step(images, labels):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(images, labels)), axis=None)

    note("begin")
    while epoch * epoch_steps < settings["steps"]:
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=epoch)
        data = strategy.experimental_distribute_dataset(data.batch(batch, drop_remainder=True).prefetch(2))
        for number, (some_images, labels) in enumerate(data):
            distributed_step(some_images, labels)
            note(str(epoch * epoch_steps + number + 1))
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if rank == 0:
                state = {str(i): v.numpy() for i, v in enumerate(variables)}
                np.savez(os.path.join(folder, "state.npz"), epoch=epoch, **state)
                kept = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch}, checkpoint=kept)
        epoch += 1


def main(job: Job) -> None:
    import ray
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer

    build = runpy.run_path(MNIST_JOB)["build"]
    ray.init()
    TensorflowTrainer(
        train,
        train_loop_config={**vars(job), "build": build},
        scaling_config=ray.train.ScalingConfig(num_workers=job.workers),
        run_config=ray.train.RunConfig(
            name=job.run,
            storage_path=job.storage,
            failure_config=ray.train.FailureConfig(max_failures=-1),
        ),
    ).fit()


if __name__ == "__main__":
    main(tyro.cli(Job))
