"""A small run, of which one thing at a time can be another."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import raytf


@dataclass(frozen=True)
class Job:
    """Learn a line."""

    other: str = ""
    """What is otherwise: layers, units, activation, rate, schedule, optimizer, loss, body, weights, metrics, code,
    lambda, train, validation, test, augment; gradient or weight, a bit of which is wrong in step 70; or random, named
    and raises."""
    learning_rate: float = 0.05
    """Of the optimizer."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def main(job: Job) -> None:
    other, rate = job.other, job.learning_rate
    sign = -1.0 if other == "body" else 1.0

    def close(true, predicted):
        import keras

        return keras.ops.mean(keras.ops.square(true - predicted), axis=-1) * (1 + (sign < 0))

    def model():
        import keras

        if other == "raises":
            raise ValueError("there is no such model")

        class Twice(keras.layers.Layer):
            if other == "code":

                def call(self, x):
                    return 3 * x
            else:

                def call(self, x):
                    return 2 * x

        if other == "named":  # Keras numbers the layers that follow
            keras.layers.Dense(1)
            keras.layers.Dense(1)
        by = 2.0
        inputs = keras.Input((4,))
        x = keras.layers.Dense(5 if other == "units" else 4, activation="tanh" if other == "activation" else "relu")(
            inputs
        )
        if other == "layers":
            x = keras.layers.Dense(4)(x)
        x = keras.layers.Dropout(0.1)(Twice()(x))
        shift = (lambda t: t - by) if other == "lambda" else (lambda t: t + by)
        x = keras.layers.Lambda(shift, output_shape=tuple(x.shape[1:]))(x)
        outputs = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform())(x)
        if other == "gradient":
            outputs = wrong_once(lambda: made.optimizer.iterations)(outputs)
        made = keras.Model(inputs, outputs)
        step = 2 * rate if other == "rate" else rate
        decay = keras.optimizers.schedules.ExponentialDecay(step, 100, 0.5 if other == "schedule" else 0.9)
        made.compile(
            (keras.optimizers.Adam if other == "optimizer" else keras.optimizers.SGD)(decay),
            loss="mae" if other == "loss" else close,
            loss_weights=0.5 if other == "weights" else None,
            metrics=["mse"] if other == "metrics" else ["mae"],
        )
        return made

    def augment(batch, seed):
        return batch

    draw = np.random.default_rng(0)
    x = draw.normal(size=(320, 4)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    data = {name: (x, y.copy()) for name in ("train", "validation", "test")}
    if other in data:
        data[other][1][33] += 1.0
    train = Random(x, y) if other == "random" else data["train"]
    result = raytf.fit(
        model,
        train,
        validation=data["validation"],
        test=data["test"],
        config=job.train,
        augment=augment if other == "augment" else None,
        callbacks=(lambda files: [flips()]) if other == "weight" else None,
    )
    print("sha:", result.weights_sha256)


def wrong_once(iterations):
    """A layer that hands on its input, and in step 70 a gradient of which a bit is wrong."""
    import keras
    import tensorflow as tf

    class Wrong(keras.layers.Layer):
        def call(self, inputs):
            @tf.custom_gradient
            def same(values):
                def gradient(g):
                    is_now = tf.equal(tf.cast(tf.convert_to_tensor(iterations()), tf.int32), 69)
                    return tf.where(is_now, g * (1 + 1 / 1024), g)

                return tf.identity(values), gradient

            return same(inputs)

    return Wrong()


def flips():
    """A callback that flips a bit of a weight after step 70."""
    import keras

    class Flips(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == 70:
                weight = self.model.weights[0]
                values = weight.numpy().copy()
                values.reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << 20)
                weight.assign(values)

    return Flips()


class Random:
    """Records that are others each time they are read."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + np.random.default_rng().normal(size=4).astype(np.float32), self.y[i]


if __name__ == "__main__":
    raytf.cli(main)
