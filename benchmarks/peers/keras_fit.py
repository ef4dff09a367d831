"""Keras's own `model.fit` in one process, in turns: the peer of benchmarks/step/overhead.py and startup.py.

By TensorFlow's guides "Better performance with the tf.data API" and "Analyze tf.data performance" and Keras's
documentation of `compile`: many steps in one execution, batches made once and kept in memory, shuffled, prefetched.
What is more than a user would do: the same records stay together in a batch in all epochs, so that none is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tyro

from benchmarks import models

#: Steps of one call into TensorFlow.
CALL_STEPS = 32
#: Of an epoch: about MNIST's 60,000, a whole number of calls.
RECORDS = 15 * CALL_STEPS * models.BATCH


@dataclass(frozen=True)
class Program:
    """Train one of the models with Keras's fit."""

    address: str
    """Of the conductor; see turns.py."""
    model: str = "cnn"
    """Of benchmarks/models.py."""
    threads: int = 1
    """TensorFlow's threads within an operation; 0 leaves it to TensorFlow."""
    jit: bool = False
    """Have XLA compile the step; Keras's own choice is to do so wherever the model's layers can be compiled."""


def follower(keras: Any, address: str, base: Any) -> Any:
    """Return a callback that makes training wait for its turns, and reports how much memory its process has.

    Args:
        keras: Keras.
        address: of the conductor.
        base: the callback's class.
    """
    from benchmarks import turns

    class Follower(base):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            super().on_train_begin(logs)  # a History makes its lists there
            self._words: Iterator[tuple[int, dict[str, Any]]] = turns.follow(address, 0)
            self._left = 0
            self._answer: dict[str, Any] = {}

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self._left <= 0:
                found = next(self._words, None)
                if found is None:
                    self.model.stop_training = True
                    return
                self._left, self._answer = found

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._left -= CALL_STEPS
            if self._left <= 0 and self._answer.pop("memory", False):
                self._answer |= memory(self.model)

        def get_state(self) -> dict[str, Any]:  # nothing that a checkpoint could hold
            return {}

    return Follower()


def memory(model: Any) -> dict[str, float]:
    """Return the megabytes of this process, with shared memory divided among its owners, and of the model's state."""
    import psutil

    variables = {id(v): v for v in [*model.variables, *model.optimizer.variables]}
    state = sum(v.numpy().nbytes for v in variables.values())
    return {"memory_mb": psutil.Process().memory_full_info().pss / 1e6, "state_mb": state / 1e6}


def set_threads(threads: int) -> None:
    """Set TensorFlow's threads as `raytf.training.worker.set_up` does."""
    import tensorflow as tf

    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    for device in tf.config.list_physical_devices("GPU"):  # others are there at the same time
        tf.config.experimental.set_memory_growth(device, True)


def dataset(name: str) -> Any:
    """Return endless batches of a model's data."""
    import tensorflow as tf

    x, y = models.MODELS[name].data(RECORDS)
    batches = tuple(a.reshape(-1, models.BATCH, *a.shape[1:]) for a in (x, y))
    data = tf.data.Dataset.from_tensor_slices(batches)
    return data.shuffle(len(batches[0]), seed=0).repeat().prefetch(tf.data.AUTOTUNE)


def main(program: Program) -> None:
    set_threads(program.threads)
    import keras

    model = models.compiled(keras, program.model, steps_per_execution=CALL_STEPS, jit_compile=program.jit)
    model.fit(
        dataset(program.model),
        steps_per_epoch=RECORDS // models.BATCH,
        epochs=1_000_000,
        verbose=0,
        callbacks=[follower(keras, program.address, keras.callbacks.Callback)],
    )


if __name__ == "__main__":
    main(tyro.cli(Program))
