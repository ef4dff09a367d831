"""A job that uses much at once: two named inputs, BatchNorm, Dropout, augmentation, class weights, a cosine schedule,
regularization, validation, and the callbacks of Keras. No image in it: a small problem that is learned in seconds."""

from dataclasses import dataclass, field

import numpy as np

import raytf


@dataclass(frozen=True)
class Job:
    """Train a model with everything in it."""

    patience: int = 3
    """Of EarlyStopping."""
    units: int = 24
    """Of the hidden layer."""
    fail_after: int = 0
    """Raise in a callback after this many epochs, to test what users see."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def data(records: int, seed: int):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(records, 6)), rng.normal(size=(records, 4))
    score = left[:, 0] * right[:, 0] + left[:, 1] - right[:, 1]
    label = np.digitize(score, [-1.0, 1.0])
    return {"left": left.astype("float32"), "right": right.astype("float32")}, label.astype("int64")


def build(units: int):
    import keras
    from keras import layers

    left, right = keras.Input((6,), name="left"), keras.Input((4,), name="right")
    x = layers.Concatenate()([layers.Dense(units)(left), layers.Dense(units)(right)])
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    x = layers.Dropout(0.2)(x)
    x = layers.Dense(units, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-4))(x)
    model = keras.Model({"left": left, "right": right}, layers.Dense(3, activation="softmax")(x))
    schedule = keras.optimizers.schedules.CosineDecay(3e-3, 400)
    optimizer = keras.optimizers.AdamW(schedule, global_clipnorm=5.0, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def augment(batch, seed):
    import tensorflow as tf

    x, y, weight = batch
    noise = tf.random.stateless_normal(tf.shape(x["left"]), seed, stddev=0.05)
    return {**x, "left": x["left"] + noise}, y, weight


def main(job: Job) -> None:
    def callbacks(files: str):
        import keras

        def fail(epoch, logs):
            print(f"callback: epoch {epoch}")
            if job.fail_after and epoch + 1 >= job.fail_after:
                raise RuntimeError("the callback broke")

        return [
            keras.callbacks.EarlyStopping("val_loss", patience=job.patience, restore_best_weights=True),
            keras.callbacks.CSVLogger(f"{files}/log.csv"),
            keras.callbacks.TensorBoard(f"{files}/tb"),
            keras.callbacks.ModelCheckpoint(f"{files}/best.keras", save_best_only=True, monitor="val_loss"),
            keras.callbacks.LambdaCallback(on_epoch_end=fail),
        ]

    result = raytf.fit(
        lambda: build(job.units),
        data(1003, 1),
        validation=data(300, 2),
        config=job.train.lasting(epochs=6),
        callbacks=callbacks,
        class_weight={0: 1.0, 1: 2.0, 2: 1.5},
        augment=augment,
    )
    print(f"done: {result.steps} steps")


if __name__ == "__main__":
    raytf.cli(main)
