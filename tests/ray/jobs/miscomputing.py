"""A job in which one machine computes gradients that are a little wrong, from a step on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

import raytf


@dataclass(frozen=True)
class Job:
    """Train, and compute wrongly on one node."""

    mark: Path | None = None
    """File that has the wrong node's id: that of rank 1, when it is first built. None computes wrongly without one."""
    after: int = 30
    """Steps before that."""
    how: Literal["always", "now and then"] = "always"
    """Whether the machine is wrong in each step after that, or for one shard of four, as its records are."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def is_wrong(mark: Path | None) -> bool:
    """Whether this process is on the wrong machine, which is chosen here."""
    import ray

    if mark is None:
        return False
    node = ray.get_runtime_context().get_node_id()
    if raytf.rank() == 1 and not mark.exists():
        mark.write_text(node)
    return mark.exists() and mark.read_text() == node


def main(job: Job) -> None:
    mark, after, how = None if job.mark is None else job.mark.absolute(), job.after, job.how
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(480, 8)).astype("float32"), rng.integers(0, 3, 480)

    def build():
        import keras
        import tensorflow as tf

        optimizer = keras.optimizers.Adam(1e-3)

        class Wrong(keras.layers.Layer):
            """The same, with a gradient that may be off by a 256th."""

            def call(self, inputs):
                wrong, step = is_wrong(mark), tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int32)
                is_now = tf.reduce_all([wrong, step >= after])
                if wrong and how == "now and then":
                    is_now = is_now & (tf.bitcast(tf.reduce_sum(inputs), tf.int32) % 4 == 0)

                @tf.custom_gradient
                def same(values):
                    return tf.identity(values), lambda g: g * (1.0 + tf.cast(is_now, g.dtype) / 256.0)

                return same(inputs)

        parts = [keras.layers.Dense(16, activation="relu"), Wrong(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *parts])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    raytf.fit(build, (x, y), config=job.train)


if __name__ == "__main__":
    raytf.cli(main)
