"""The peer of recovery/startup.py on Ray: TensorflowTrainer with one worker, which notes when its first step ended.

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
    """File that gets the time of the end of the first step."""
    steps: int = 40
    """Then it ends."""
    runs: int = 1
    """Runs in this process, one after another; the note is of the last one."""


def train(settings: dict[str, Any]) -> None:
    """What the worker runs."""
    import numpy as np
    import tensorflow as tf
    import tf_keras

    from benchmarks.peers.startup_keras import noting

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = models.compiled(tf_keras, "cnn")
    arrays = np.load(settings["data"])
    data = tf.data.Dataset.from_tensor_slices((arrays["x_train"], arrays["y_train"])).repeat().batch(models.BATCH)
    model.fit(data, steps_per_epoch=settings["steps"], verbose=0, callbacks=[noting(tf_keras, settings["note"])])


def main(program: Program) -> None:
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer

    for _ in range(program.runs):
        began = time.time()
        TensorflowTrainer(
            train,
            train_loop_config=vars(program),
            scaling_config=ray.train.ScalingConfig(num_workers=1, use_gpu=bool(gpus())),
            run_config=ray.train.RunConfig(storage_path=str(program.note.parent / "ray")),
        ).fit()
    print(f"last run began: {began}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Program))
