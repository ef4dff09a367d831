"""A hand-written script for MultiWorkerMirroredStrategy, started with TF_CONFIG, one process for each worker.

Follows TensorFlow's tutorial "Custom training loop with Keras and MultiWorkerMirroredStrategy"
(https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl): model, metric and optimizer in the strategy's
scope, `distribute_datasets_from_function`, a `tf.function` for a step, and the loss reduced in each step. It differs in
what is at least as good for it: records are gathered by batches and prefetched, threads are set so that the workers
of a machine do not fight for its cores, and Keras 3 trains, which the tutorial's loop runs as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from benchmarks import models, turns
from benchmarks.peers import common


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]


def environments(workers: int, use_gpu: bool, addresses: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Yield the environment of each worker's process; by default all are on this host."""
    addresses = addresses or free_addresses(workers)
    for rank in range(workers):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        yield {"TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": str(rank) if use_gpu else "-1"}


class Training:
    """The tutorial's main.py up to its loop.

    Attributes:
        rank: of this process.
        step: takes an iterator, returns the loss over all workers.
    """

    def __init__(self, name: str, threads: int, global_batch_size: int):
        import keras
        import tensorflow as tf

        common.set_threads(threads)
        self.rank: int = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        found = models.MODELS[name]

        def dataset(context: Any) -> Any:
            batch = context.get_per_replica_batch_size(global_batch_size)
            return common.dataset(name, context.input_pipeline_id, context.num_input_pipelines, batch)

        with strategy.scope():
            self._iterator = iter(strategy.distribute_datasets_from_function(dataset))
            model = found.build(keras)
            optimizer = keras.optimizers.Adam(models.LEARNING_RATE)
            optimizer.build(model.trainable_variables)
            accuracy = keras.metrics.SparseCategoricalAccuracy()
            entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=found.from_logits, reduction="none")

        def step(inputs: Any) -> Any:
            x, y = inputs
            with tf.GradientTape() as tape:
                predictions = model(x, training=True)
                loss = tf.nn.compute_average_loss(entropy(y, predictions), global_batch_size=global_batch_size)
            gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, predictions)
            return loss

        @tf.function
        def distributed_step(iterator: Any) -> Any:
            losses = strategy.run(step, args=(next(iterator),))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        self._step = distributed_step

    def run(self, steps: int) -> float:
        """Run the tutorial's loop; return the mean loss."""
        total = 0.0
        for _ in range(steps):
            total += self._step(self._iterator)
        return float(total) / steps


def main(program: common.Program) -> int:
    if "TF_CONFIG" in os.environ:
        training = Training(program.model, program.threads, program.batch)
        for turn, (steps, answer) in enumerate(turns.follow(program.address, training.rank)):
            with common.profiled(program.profile if turn == 1 and training.rank == 0 else None):
                answer["loss"] = training.run(steps)
        os._exit(0)  # freeing TensorFlow's objects takes long
    started = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | more)
        for more in environments(program.workers, program.use_gpu)
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(common.Program)))
