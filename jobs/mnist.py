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
    """auto (MNIST, else digits), mnist, digits, or a path or URI of IDX, .npz, TFRecord, Parquet or image files."""
    learning_rate: float = 1e-3
    """Adam's learning rate."""
    batch_norm: bool = False
    """Normalize after each convolution."""
    dropout: float = 0.0
    """Share of the hidden units that each step leaves out."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def build(
    image_shape: tuple[int, ...], classes: int, learning_rate: float, batch_norm: bool = False, dropout: float = 0.0
):
    import keras
    from keras import layers

    model = keras.Sequential([keras.Input(image_shape), layers.Rescaling(1 / 255)])
    for filters in (32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        if batch_norm:
            model.add(layers.BatchNormalization())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(128, activation="relu"))
    if dropout:
        model.add(layers.Dropout(dropout))
    model.add(layers.Dense(classes, activation="softmax"))
    model.compile(keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(job: Job) -> None:
    if not 0 <= job.dropout < 1:
        raise raytf.ConfigError(f"--dropout {job.dropout}: expected a number from 0 to below 1.")
    images = raytf.load_images(job.data)
    print(f"data: {images.name}, {images.train.records} training and {images.test.records} test images", flush=True)
    result = raytf.fit(
        lambda: build(images.image_shape, images.classes, job.learning_rate, job.batch_norm, job.dropout),
        images.train,
        test=images.test,
        config=job.train.lasting(epochs=3 if images.train.records > 10_000 else 30),
    )
    print(f"weights_sha256: {result.weights_sha256}")
    print(f"test accuracy: {result.metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    raytf.cli(main)
