"""A job that does one thing wrong, as users do."""

from dataclasses import dataclass, field

import numpy as np

import raytf


@dataclass(frozen=True)
class Job:
    """Do one thing wrong."""

    fault: str = "none"
    """Which."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def main(job: Job) -> None:
    fault = job.fault
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(512, 8)).astype("float32"), rng.integers(0, 3, 512)
    if fault == "nan":
        x[300] = np.nan

    def build():
        import keras

        if fault == "raises":
            raise KeyError("no such layer")

        class Noise(keras.layers.Layer):
            def call(self, inputs):
                import tensorflow as tf

                return inputs + tf.raw_ops.RandomStandardNormal(shape=tf.shape(inputs), dtype="float32")

        layers = [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
        if fault == "noise":
            layers.insert(1, Noise())
        model = keras.Sequential(layers)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    raytf.fit(build, (x, y), config=job.train)


if __name__ == "__main__":
    raytf.cli(main)
