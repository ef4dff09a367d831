"""Handwritten digits, by one of the three networks of the classic guides.

    python jobs/mnist.py                                            # here, two CPU workers
    ray job submit --working-dir . -- python jobs/mnist.py          # on a cluster
    python jobs/mnist.py --model mlp --ema 0.99 --l2 1e-4           # moving averages and L2, as the cookbooks have them

Copy this page for a model of your own: a function that returns a compiled model, data, one call to `raytf.fit`.
Expect a test accuracy of about 0.99 on MNIST after 3 epochs, and about 0.98 on scikit-learn's digits after 30; with
`--model mlp` about 0.98 and 0.97, with `--model softmax` about 0.92 and 0.86, or 0.96 with `--learning-rate 0.02`.
"""

from dataclasses import dataclass, field
from typing import Literal

import raytf


@dataclass(frozen=True)
class Job:
    """Train a small network on handwritten digits."""

    data: str = "auto"
    """auto (MNIST, else digits), mnist, digits, or a path or URI of IDX, .npz, TFRecord, Parquet or image files."""
    model: Literal["softmax", "mlp", "cnn"] = "cnn"
    """softmax: one layer; mlp: a hidden layer of 500 units; cnn: two convolutions and a hidden layer."""
    learning_rate: float = 1e-3
    """Adam's learning rate."""
    batch_norm: bool = False
    """Normalize after each convolution, or after the hidden layer of an mlp."""
    dropout: float = 0.0
    """Share of the hidden units that each step leaves out."""
    ema: float = 0.0
    """Momentum of moving averages of the weights, such as 0.99; test and export use the averages. 0 makes none."""
    l2: float = 0.0
    """Factor of the sum of squared weights in the loss, such as 1e-4."""
    validation_share: float = 0.0
    """Share of the training images that is held out and evaluated after each epoch."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def build(image_shape: tuple[int, ...], classes: int, job: Job | None = None):
    import keras
    from keras import layers

    job = job or Job()
    l2 = keras.regularizers.L2(job.l2) if job.l2 else None
    model = keras.Sequential([keras.Input(image_shape), layers.Rescaling(1 / 255)])
    for filters in (32, 64) if job.model == "cnn" else ():
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_regularizer=l2))
        if job.batch_norm:
            model.add(layers.BatchNormalization())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    if job.model != "softmax":
        model.add(layers.Dense(128 if job.model == "cnn" else 500, activation="relu", kernel_regularizer=l2))
        if job.batch_norm and job.model == "mlp":
            model.add(layers.BatchNormalization())
        if job.dropout:
            model.add(layers.Dropout(job.dropout))
    model.add(layers.Dense(classes, activation="softmax", kernel_regularizer=l2))
    average = {"use_ema": True, "ema_momentum": job.ema} if job.ema else {}
    optimizer = keras.optimizers.Adam(job.learning_rate, **average)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(job: Job) -> None:
    if not 0 <= job.dropout < 1:
        raise raytf.ConfigError(f"--dropout {job.dropout}: expected a number from 0 to below 1.")
    if not 0 <= job.ema < 1:
        raise raytf.ConfigError(f"--ema {job.ema}: expected a number from 0 to below 1.")
    if not job.l2 >= 0:
        raise raytf.ConfigError(f"--l2 {job.l2}: expected 0 or more.")
    if job.model == "softmax" and (job.batch_norm or job.dropout):
        raise raytf.ConfigError("--model softmax has no hidden layer for --batch-norm and --dropout. Use --model mlp.")
    images = raytf.load_images(job.data)
    train, validation = raytf.hold_out(images.train, job.validation_share)
    print(f"data: {images.name}, {images.train.records} training and {images.test.records} test images", flush=True)
    result = raytf.fit(
        lambda: build(images.image_shape, images.classes, job),
        train,
        validation=validation,
        test=images.test,
        config=job.train.lasting(epochs=3 if images.train.records > 10_000 else 30),
    )
    print(f"weights_sha256: {result.weights_sha256}")
    print(f"test accuracy: {result.metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    raytf.cli(main)
