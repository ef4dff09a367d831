"""What a program sees after `fit` where raytf and Keras differ by design; it prints it as `OUTCOME {...}`."""

import json

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
BITS = (X > 0).astype("float32")


class Enough(Exception):
    pass


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise Enough


class Noise(keras.layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def model(*hidden, units=1, **options):
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((3,)), *hidden, keras.layers.Dense(units, "sigmoid")])
    made.compile("sgd", "mse", **options)
    return made


def losses(made, **options):
    return made.fit(X, Y, verbose=0, **options).history["loss"]


def drawn(seed):
    made = model(Noise())
    tf.random.set_seed(seed)
    return losses(made, batch_size=16)


outcome = {"in the order of the arrays": losses(model(), batch_size=4, epochs=2, shuffle=False)}
outcome["seed decides"] = drawn(1) != drawn(2)
outcome["with BatchNorm"] = losses(model(keras.layers.BatchNormalization()), batch_size=16)
scores = model(units=3, metrics=[keras.metrics.F1Score(threshold=0.5)])
history = scores.fit(X, BITS, batch_size=16, epochs=2, verbose=2).history["f1_score"]
outcome["several numbers"] = [type(value).__name__ for value in history]
stopped = model()
before = stopped.get_weights()
try:
    stopped.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[Stop()])
except Enough:
    pairs = zip(stopped.get_weights(), before, strict=True)
    outcome["as before the exception"] = all(np.array_equal(now, then) for now, then in pairs)
print("OUTCOME", json.dumps(outcome))
