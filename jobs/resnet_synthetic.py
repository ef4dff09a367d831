r"""ResNet-50 on synthetic images: how many are trained a second, the table of Horovod and tf_cnn_benchmarks.

    python jobs/resnet_synthetic.py                                 # here: two CPU workers, small images
    python jobs/resnet_synthetic.py --depth 14 --image-size 32      # a smaller network, in a minute
    ray job submit --working-dir . -- python jobs/resnet_synthetic.py --workers 8 --image-size 224 \
        --global-batch-size 512 --mixed-precision float16 --steps-per-row 10 --epochs 11    # as the benchmarks have it

Shows a source of one's own, and what training costs when nothing is read: a few random images come again and again.
The network is ResNet v1.5, as in tf_cnn_benchmarks: of depth 50 it has 25,557,032 weights to train. An epoch is a row
of the table; the first after a start, which compiles, is not counted.

Expect the total to grow with the workers as long as each has a GPU or cores of its own: divide that of N workers by N
times that of one for what is lost on the way. Two cores, busy with other work, made 8 images/s of 64 x 64 pixels.
"""

from dataclasses import dataclass, field

import raytf

#: Blocks of each of the four stages.
STAGES = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@dataclass(frozen=True)
class Job:
    """Time the training of a ResNet on synthetic images."""

    depth: int = 50
    """Layers: 14, 26, 50, 101 or 152."""
    image_size: int = 64
    """Rows and columns of an image; the benchmarks have 224."""
    classes: int = 1000
    """Classes; labels are random."""
    steps_per_row: int = 2
    """Steps of which a row of the table is the mean."""
    learning_rate: float = 0.01
    """Of SGD with momentum."""
    train: raytf.Flags = field(default_factory=lambda: raytf.TrainConfig.of(global_batch_size=16))


class Synthetic:
    """A source: 64 random images, which come again and again."""

    name, block_sizes, window = "synthetic images", None, 1

    def __init__(self, records: int, size: int, classes: int):
        import numpy as np

        from raytf.data import Spec

        random = np.random.default_rng(0)
        self.records = records
        self.spec = Spec((size, size, 3), "uint8"), Spec((), "int64"), None
        self.images = random.integers(0, 256, (64, size, size, 3), np.uint8)
        self.labels = random.integers(0, classes, 64)

    def take(self, records):
        return [self.images[records % 64], self.labels[records % 64]]

    def label_range(self):
        return float(self.labels.min()), float(self.labels.max())


def build(job: Job):
    import keras
    from keras import layers

    def convolution(x, filters: int, size: int, stride: int = 1, active: bool = True):
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
        return layers.ReLU()(x) if active else x

    inputs = keras.Input((job.image_size, job.image_size, 3))
    x = convolution(layers.Rescaling(1 / 127.5, -1)(inputs), 64, 7, 2)
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, blocks in enumerate(STAGES[job.depth]):
        for block in range(blocks):
            filters, stride = 64 << stage, 2 if stage and not block else 1
            shortcut = x if block else convolution(x, 4 * filters, 1, stride, active=False)
            x = convolution(convolution(x, filters, 1), filters, 3, stride)
            x = layers.ReLU()(layers.Add()([convolution(x, 4 * filters, 1, active=False), shortcut]))
    x = layers.Dense(job.classes)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Activation("softmax", dtype="float32")(x))
    model.compile(keras.optimizers.SGD(job.learning_rate, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def table(job: Job):
    import statistics
    import time

    import keras
    import ray.train

    images = job.steps_per_row * job.train.batch.global_batch_size
    began, counts = 0.0, False

    class Table(keras.callbacks.History):  # raytf knows that a History changes nothing, and does not look
        """Prints images a second, by rank 0's clock: a step ends on all workers at once."""

        def on_train_begin(self, logs=None):
            nonlocal counts
            counts, self.rows, self.workers = False, [], ray.train.get_context().get_world_size()
            trained = sum(int(w.numpy().size) for w in self.model.trainable_variables)
            print(f"ResNet-{job.depth}, {trained:,} weights, {job.image_size} x {job.image_size} pixels")
            print(f"{'step':>6}  {'images/s':>9}  {'per worker':>10}  workers")

        def on_epoch_begin(self, epoch, logs=None):
            nonlocal began
            began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            nonlocal counts
            speed, step = images / (time.perf_counter() - began), (epoch + 1) * job.steps_per_row
            note = "" if counts else "  (start, not counted)"
            print(f"{step:>6}  {speed:>9.1f}  {speed / self.workers:>10.1f}  {self.workers:>7}{note}")
            self.rows += [speed] if counts else []
            counts = True

        def on_train_end(self, logs=None):
            if len(self.rows) < 2:
                print("too few rows for a mean; give more --epochs")
                return
            mean, spread = statistics.mean(self.rows), 1.96 * statistics.stdev(self.rows)
            each = f"{mean / self.workers:.1f} +- {spread / self.workers:.1f}"
            print(f"images/s per worker: {each}, total of {self.workers}: {mean:.1f} +- {spread:.1f}")

    return Table()


def main(job: Job) -> None:
    if job.depth not in STAGES:
        raise raytf.ConfigError(f"--depth {job.depth}: expected one of {', '.join(map(str, STAGES))}.")
    if min(job.image_size, job.classes, job.steps_per_row) < 1:
        raise raytf.ConfigError("--image-size, --classes and --steps-per-row: expected 1 or more.")
    raytf.fit(
        lambda: build(job),
        Synthetic(job.steps_per_row * job.train.batch.global_batch_size, job.image_size, job.classes),
        callbacks=lambda files: [table(job)],
        config=job.train.lasting(epochs=6),
    )


if __name__ == "__main__":
    raytf.cli(main)
