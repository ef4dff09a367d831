"""Handwritten digits with a small convolutional network.

    python jobs/mnist.py                                            # here, two CPU workers
    ray job submit --working-dir . -- python jobs/mnist.py          # on a cluster

Copy this page for a model of your own: a function that returns a compiled model, data, one call to `raytf.fit`.
Expect a test accuracy of about 0.99 on MNIST after 3 epochs, and about 0.98 on scikit-learn's digits after 30.
"""

from dataclasses import dataclass, field

import raytf


@dataclass(frozen=True)
class Job:
    """Train a small convolutional network on handwritten digits."""

    data: str = "auto"
    """auto (MNIST where it can be had, else digits), mnist, digits, or a path or URI of IDX, .npz or Parquet files."""
    learning_rate: float = 1e-3
    """Adam's learning rate."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def build(image_shape: tuple[int, ...], classes: int, learning_rate: float):
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(classes, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(job: Job) -> None:
    images = raytf.load_images(job.data)
    print(f"data: {images.name}, {images.train.records} training and {images.test.records} test images", flush=True)
    result = raytf.fit(
        lambda: build(images.image_shape, images.classes, job.learning_rate),
        images.train,
        test=images.test,
        config=job.train.lasting(epochs=3 if images.train.records > 10_000 else 30),
    )
    print(f"test accuracy: {result.metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    raytf.cli(main)
