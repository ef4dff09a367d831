"""The peer of recovery/startup.py on Ray: TensorflowTrainer, which notes when its first and its 20th step
ended.

As in Ray's guide "Get Started with Distributed Training using TensorFlow and Keras": the train function builds and
compiles the model in the scope of MultiWorkerMirroredStrategy and calls `model.fit`, with tf_keras, as the guide's
`tf.keras` is. What differs from the guide is the callback: it notes the time, in place of a report to Ray at the end of
each epoch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import models
from benchmarks.harness import gpus


@dataclass(frozen=True)
class Program:
    """Train the MNIST CNN for some steps with TensorflowTrainer."""

    data: Path
    """An .npz with x_train and y_train."""
    note: Path
    """File that gets a line for the first and for the 20th step of the last run: its number, and when it ended."""
    steps: int = 40
    """Then it ends."""
    runs: int = 1
    """Runs in this process, one after another; the note is of the last one."""
    workers: int = 1
    """Of TensorflowTrainer; the first one notes."""


def train(settings: dict[str, Any]) -> None:
    """Train on the worker."""
    import numpy as np
    import ray.train
    import tensorflow as tf
    import tf_keras

    from benchmarks.peers.startup_keras import noting

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = models.compiled(tf_keras, "cnn")
    arrays = np.load(settings["data"])
    data = tf.data.Dataset.from_tensor_slices((arrays["x_train"], arrays["y_train"])).repeat().batch(models.BATCH)
    is_first = ray.train.get_context().get_world_rank() == 0
    callbacks = [noting(tf_keras, settings["note"])] if is_first else []
    model.fit(data, steps_per_epoch=settings["steps"], verbose=0, callbacks=callbacks)


def main(program: Program) -> None:
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer

    for _ in range(program.runs):
        began = time.time()
        program.note.unlink(missing_ok=True)
        TensorflowTrainer(
            train,
            train_loop_config=vars(program),
            scaling_config=ray.train.ScalingConfig(num_workers=program.workers, use_gpu=bool(gpus())),
            run_config=ray.train.RunConfig(storage_path=str(program.note.parent / "ray")),
        ).fit()
    print(f"last run began: {began}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Program))
