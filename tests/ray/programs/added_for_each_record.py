# shards: any
"""A layer adds a loss for each record, one adds a mean, and one adds a sum, beside a compiled loss."""

import hashlib
import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(4)

x = np.random.normal(size=(40, 6)).astype("float32")
y = x[:, :1] * 3


class Endpoint(layers.Layer):
    def call(self, labels, predicted):
        self.add_loss(0.1 * ops.square(labels - predicted)[:, 0])
        return predicted


class Penalties(layers.Layer):
    def call(self, h, training=False):
        self.add_loss([0.5 * ops.mean(ops.square(h)), 0.01 * ops.sum(ops.square(h))])
        if training:
            self.add_loss(0.01 * ops.mean(ops.abs(h), -1))
        return h


inputs, labels = keras.Input((6,)), keras.Input((1,))
hidden = Penalties()(layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs))
model = keras.Model([inputs, labels], Endpoint()(labels, layers.Dense(1)(hidden)))
model.compile(keras.optimizers.SGD(0.002), "mae")
data = tf.data.Dataset.from_tensor_slices(((x, y), y)).batch(16)
history = model.fit(data, validation_data=data, epochs=3, verbose=0)
weights = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
print("OUTCOME", json.dumps({"history": history.history, "weights_sha256": weights}))
