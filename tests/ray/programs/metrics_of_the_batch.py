# shards: any
"""Metrics that are no sums over records: a maximum, an F1 score of each batch, a root of a mean; a short last batch."""

import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(3)

x = np.random.normal(size=(52, 6)).astype("float32")
y = (x[:, :2] + np.random.normal(0, 0.5, (52, 2)) > 0).astype("float32")


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest", **options):
        super().__init__(name=name, **options)
        self.most = self.add_variable((), initializer="zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.max(ops.abs(y_true - y_pred))))

    def result(self):
        # A number: Keras's history has a variable's value after the validation, also for the training.
        return self.most + 0.0


def f1(y_true, y_pred):
    chosen = ops.cast(y_pred > 0.5, "float32")
    return 2 * ops.sum(y_true * chosen) / (ops.sum(y_true) + ops.sum(chosen) + 1e-7)


def root(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def dataset(first, last):
    return tf.data.Dataset.from_tensor_slices((x[first:last], y[first:last])).batch(12)


model = keras.Sequential([keras.Input((6,)), layers.Dense(2, activation="sigmoid")])
model.compile(keras.optimizers.SGD(0.3), "binary_crossentropy", metrics=[Largest(), f1, root, error, "mae"])
history = model.fit(dataset(0, 40), validation_data=dataset(40, 52), epochs=3, verbose=0)
print("OUTCOME", json.dumps({"history": history.history}))
