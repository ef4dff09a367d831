"""Ray's TensorflowTrainer with `model.fit`, as Ray's guide has it.

Follows "Get Started with Distributed Training using TensorFlow/Keras"
(https://docs.ray.io/en/latest/train/distributed-tensorflow-keras.html): the model is built and compiled in the scope of
MultiWorkerMirroredStrategy, batches have the global size, `prepare_dataset_shard` turns sharding off since each worker
reads records of its own, and ReportCheckpointCallback reports at the end of an epoch, of which there is one here. It is
Keras 2 (`tf_keras`), since Ray sets TF_USE_LEGACY_KERAS and Keras 3's `fit` does not run under that strategy. What the
guide leaves open is at its best: `steps_per_execution`, records gathered by batches, threads.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import tyro

from benchmarks.peers import common


def train(settings: dict[str, Any]) -> None:
    """Train on one worker."""
    import ray.train
    import tensorflow as tf
    from ray.train.tensorflow import prepare_dataset_shard
    from ray.train.tensorflow.keras import ReportCheckpointCallback

    from benchmarks import models, turns

    common.set_threads(settings["threads"])
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    follower = turns.Follower(settings["address"], rank)

    class Turns(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not follower.before(common.CALL_STEPS):
                os._exit(0)  # no end of the epoch: a checkpoint that nobody wants

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = models.compiled(tf.keras, settings["model"], steps_per_execution=common.CALL_STEPS)
    batches = common.dataset(settings["model"], rank, workers, settings["batch"])
    model.fit(
        prepare_dataset_shard(batches),
        steps_per_epoch=1_000_000 * common.CALL_STEPS,
        verbose=0,
        callbacks=[Turns(), ReportCheckpointCallback()],
    )


def main(program: common.Program) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before any import of TensorFlow, which Ray's own is not
    ray.init(address="local", num_cpus=max(os.cpu_count() or 1, program.workers), include_dashboard=False)
    TensorflowTrainer(
        train,
        train_loop_config=vars(program),
        scaling_config=ScalingConfig(num_workers=program.workers, use_gpu=program.use_gpu),
        run_config=RunConfig(storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(max_failures=0)),
    ).fit()


if __name__ == "__main__":
    main(tyro.cli(common.Program))
