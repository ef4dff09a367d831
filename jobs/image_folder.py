"""Pictures in folders, one for each class, with augmentation: CIFAR, ImageNet or photographs of your own.

    python jobs/image_folder.py                                     # on shapes that it draws itself
    python jobs/image_folder.py --data ~/cifar10 --size 32          # train/CLASS/*.png and test/CLASS/*.png
    ray job submit --working-dir . -- python jobs/image_folder.py --data s3://bucket/photos --size 96 --workers 1:8

Shows `raytf.ImageFolderSource`, which reads JPEG and PNG files where they lie, and `augment`: flips, shifts and
changes of light are a function of the seed that each micro-batch gets, hence of the step, not of the worker.

Expect a test accuracy above 0.98 on the shapes after 8 epochs. They are drawn once, into `~/.raytf/shapes`; on a
cluster of several machines give `--data` that all of them reach.
"""

from dataclasses import dataclass, field
from pathlib import Path

import raytf

SHAPES = ("circle", "cross", "square", "triangle")


@dataclass(frozen=True)
class Job:
    """Train a small convolutional network on pictures in folders."""

    data: str = "shapes"
    """A folder or URI with train/CLASS/*.png or .jpg and test/CLASS/*, or shapes."""
    size: int = 32
    """Rows and columns that each picture is brought to."""
    augment: bool = True
    """Flip, shift and brighten each training image at random, differently in each epoch."""
    learning_rate: float = 2e-3
    """Adam's learning rate."""
    train: raytf.Flags = field(default_factory=lambda: raytf.TrainConfig.of(global_batch_size=64))


def draw_shapes(folder: Path, train: int = 240, test: int = 60, pixels: int = 32) -> Path:
    """Pictures of shapes, equal wherever they are drawn; this many of each class."""
    import os

    import numpy as np
    from PIL import Image, ImageDraw

    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    for kind, shape in enumerate(SHAPES):
        for i in range(train + test):
            random = np.random.default_rng((kind, i))
            ground, ink = random.integers(0, 110, 3), random.integers(140, 256, 3)
            noise = random.normal(0, 16, (pixels, pixels, 3))
            picture = Image.fromarray(np.clip(ground + noise, 0, 255).astype(np.uint8))
            (x, y), r = random.uniform(12, 20, 2), random.uniform(5, 10)
            pen, box, colour = ImageDraw.Draw(picture), (x - r, y - r, x + r, y + r), tuple(map(int, ink))
            if shape == "circle":
                pen.ellipse(box, fill=colour)
            elif shape == "square":
                pen.rectangle(box, fill=colour)
            elif shape == "triangle":
                pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
            else:
                pen.line((x - r, y, x + r, y), fill=colour, width=3)
                pen.line((x, y - r, x, y + r), fill=colour, width=3)
            place = unfinished / ("train" if i < train else "test") / shape
            place.mkdir(parents=True, exist_ok=True)
            picture.save(place / f"{i:04d}.{'png' if i % 2 else 'jpg'}", quality=90)
    unfinished.replace(folder)
    return folder


def augment(batch, seed):
    """The batch with each picture flipped, shifted by up to an eighth and lit at random; of the seed alone."""
    import tensorflow as tf

    x, y, weight = batch
    size, by = x.shape[1], x.shape[1] // 8
    flip, shift, light = tf.unstack(tf.random.split(seed, 3))
    x = tf.image.stateless_random_flip_left_right(x, flip)
    padded = tf.pad(x, [[0, 0], [by, by], [by, by], [0, 0]], "SYMMETRIC")
    corners = tf.random.stateless_uniform((tf.shape(x)[0], 2), shift, 0, 2 * by + 1, tf.int32)
    rows, columns = (corners[:, i, None] + tf.range(size) for i in range(2))
    x = tf.gather(tf.gather(padded, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1)
    bright = tf.random.stateless_uniform((tf.shape(x)[0], 1, 1, 1), light, 0.8, 1.2)
    return tf.cast(tf.clip_by_value(tf.cast(x, tf.float32) * bright, 0, 255), x.dtype), y, weight


def build(shape: tuple[int, ...], classes: int, learning_rate: float):
    import keras
    from keras import layers

    model = keras.Sequential([keras.Input(shape), layers.Rescaling(1 / 127.5, -1)])
    for filters in (16, 32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(classes, activation="softmax"))
    model.compile(keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(job: Job) -> None:
    if job.size < 8:
        raise raytf.ConfigError(f"--size {job.size}: expected 8 or more.")
    data = str(draw_shapes(Path("~/.raytf/shapes").expanduser())) if job.data == "shapes" else job.data
    base, mark, query = data.partition("?")
    size = (job.size, job.size)
    train = raytf.ImageFolderSource(f"{base.rstrip('/')}/train{mark}{query}", size, channels=3)
    test = raytf.ImageFolderSource(f"{base.rstrip('/')}/test{mark}{query}", size, channels=3, classes=train.classes)
    print(
        f"data: {data}, {train.records} training and {test.records} test pictures of {', '.join(train.classes)}",
        flush=True,
    )
    result = raytf.fit(
        lambda: build((*size, 3), len(train.classes), job.learning_rate),
        train,
        test=test,
        augment=augment if job.augment else None,
        config=job.train.lasting(epochs=8),
    )
    print(f"test accuracy: {result.metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    raytf.cli(main)
