"""The peer of `recovery.py` and `goodput.py`: Ray Train's TensorflowTrainer, with the loop that its user writes.

It follows Ray's guides "Get Started with Distributed Training using TensorFlow/Keras", "Saving and Loading Checkpoints"
and "Handling Failures and Node Preemption", and TensorFlow's "Custom training loop with Keras and
MultiWorkerMirroredStrategy", since Keras 3's `fit` does not run under that strategy. All of Ray's settings are the
defaults, but for the number of failures, which is without end, the checkpoints kept, and what the flags say.

Better than the guides: data is shuffled by index, and each worker takes only its own part of a batch, so nothing is
read in vain and a shuffle buffer is not filled again after each failure; a run goes on in the middle of an epoch.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

MODELS = str(Path(__file__).parents[1] / "models.py")
#: Steps to the first checkpoint, and from there to the second, where their cost is to be found out.
_TRIAL_STEPS = 50


@dataclass(frozen=True)
class Job:
    """Train the CNN with TensorflowTrainer, and note when each step was made."""

    notes: str
    """File that gets `begin SECONDS WORKERS` for each start of a group, `STEP SECONDS` for each step, and marks."""
    storage: str
    """Folder for checkpoints."""
    data: str
    """.npz with x_train and y_train."""
    run: str = "stock"
    """Name of the run."""
    workers: str = "2"
    """Number of workers, or fewest and most of an elastic run, such as 1:3."""
    global_batch_size: int = 128
    """Examples in one step, over all workers together."""
    steps: int = 1_000_000
    """At least so many."""
    save_every_steps: int = 0
    """Steps between two checkpoints; 0 makes one at the end of each epoch, as in Ray's guide."""
    fault_seconds: float = 0.0
    """Mean time between two faults: two trial checkpoints are timed, and the best interval, the square root of twice
    the cost of one times this (Young, Daly), is used instead. 0 does nothing."""
    ask_every_steps: int = 0
    """Ask Ray for notices of preemption so often, and save where there is one; 0 never does."""
    resize_every_seconds: float = 60.0
    """Least time between two changes of the number of workers."""
    use_gpu: bool = False
    """A GPU for each worker."""


def train(settings: dict[str, Any]) -> None:
    """Train on one worker."""
    import os
    import tempfile
    import time

    import keras
    import numpy as np
    import ray.train
    import tensorflow as tf
    from ray.train.collective import broadcast_from_rank_zero

    def note(what: str, more: str = "") -> None:
        if rank == 0:
            with open(settings["notes"], "a") as out:
                out.write(f"{what} {time.monotonic()}{more}\n")

    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    note("mark:processes")
    # One core each, as raytf's workers have: else each would have as many threads as the machine has cores.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    note("mark:rendezvous")
    with np.load(settings["data"]) as data:
        x, y = data["x_train"], data["y_train"].astype(np.int32)
    batch = settings["global_batch_size"]
    epoch_steps = len(x) // batch
    every, done = settings["save_every_steps"] or epoch_steps, 0
    trial = settings["fault_seconds"] > 0
    with strategy.scope():
        model = settings["build"](keras)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        entropy = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        variables = [*model.variables, *optimizer.variables]
        checkpoint = ray.train.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as folder, np.load(os.path.join(folder, "state.npz")) as stored:
                for i, variable in enumerate(variables):
                    variable.assign(stored[str(i)])
                done, every, trial = int(stored["step"]), int(stored["every"]), bool(stored["trial"])
    saved = done

    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(entropy(labels, model(images, training=True))) / batch
        weights = [v.value for v in model.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_step(images, labels):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(images, labels)), axis=None)

    def save() -> float:
        """Save a checkpoint, and return the seconds that it took."""
        nonlocal saved
        began, saved = time.monotonic(), done
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if rank == 0:
                state = {str(i): v.numpy() for i, v in enumerate(variables)}
                np.savez(os.path.join(folder, "state.npz"), step=done, every=every, trial=trial, **state)
                kept = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": done}, checkpoint=kept)
        return time.monotonic() - began

    images, labels = tf.constant(x), tf.constant(y)

    def batches(epoch: int, first: int):
        order = np.random.default_rng(epoch).permutation(len(x))[: epoch_steps * batch].reshape(epoch_steps, batch)
        mine = tf.data.Dataset.from_tensor_slices(order[first:, rank::workers])
        mine = mine.map(lambda rows: (tf.gather(images, rows), tf.gather(labels, rows)), tf.data.AUTOTUNE)
        return strategy.distribute_datasets_from_function(lambda context: mine.prefetch(tf.data.AUTOTUNE))

    note("begin", f" {workers}")
    began, has_notice = time.monotonic(), False
    while done < settings["steps"]:
        for some_images, some_labels in batches(done // epoch_steps, done % epoch_steps):
            distributed_step(some_images, some_labels)
            done += 1
            note(str(done))
            if trial and done % _TRIAL_STEPS == 0:
                each = (time.monotonic() - began) / _TRIAL_STEPS
                if done // _TRIAL_STEPS == 2:
                    trial = False
                    cost = save()
                    best = (2 * cost * settings["fault_seconds"]) ** 0.5
                    every = broadcast_from_rank_zero(max(1, round(best / each)))
                    note(f"mark:every={every},cost={cost:.3f}")
                save()
                began = time.monotonic()
            elif done - saved >= every:
                save()
            if settings["ask_every_steps"] and done % settings["ask_every_steps"] == 0 and not has_notice:
                has_notice = ray.train.get_preemption_info() is not None
                if has_notice:
                    save()


def main(job: Job) -> None:
    import ray
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer

    build = runpy.run_path(MODELS)["cnn"]
    low, _, high = job.workers.partition(":")
    ray.init()
    TensorflowTrainer(
        train,
        train_loop_config={**vars(job), "build": build},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(int(low), int(high)) if high else int(low),
            use_gpu=job.use_gpu,
            elastic_resize_monitor_interval_s=job.resize_every_seconds,
        ),
        run_config=ray.train.RunConfig(
            name=job.run,
            storage_path=job.storage,
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main(tyro.cli(Job))
