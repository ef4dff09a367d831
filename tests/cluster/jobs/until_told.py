"""A small network on scikit-learn's digits, a few steps a second, until a file is there."""

import os
import time
from dataclasses import dataclass, field

import raytf


@dataclass(frozen=True)
class Job:
    """Train until told to stop."""

    stop_file: str
    """A file that ends the run once it is there."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def build(shape, classes: int):
    import keras

    layers = [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(classes)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def until_told(path: str):
    import keras

    class UntilTold(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.1)
            if os.path.exists(path):
                self.model.stop_training = True

    return UntilTold()


def main(job: Job) -> None:
    images = raytf.load_images("digits")
    raytf.fit(
        lambda: build(images.image_shape, images.classes),
        images.train,
        config=job.train.lasting(epochs=10_000),
        callbacks=lambda folder: [until_told(job.stop_file)],
    )


if __name__ == "__main__":
    raytf.cli(main)
