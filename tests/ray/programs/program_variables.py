# shards: any
"""Variables of the program that the step reads and callbacks change: the weight of a loss, a layer's temperature."""

import hashlib
import json

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(6)
x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
y = (x @ np.random.default_rng(1).normal(size=6)).astype("float32")[:, None]
weight = keras.Variable(0.0, trainable=False, name="weight")
temperature = tf.Variable(1.0, trainable=False, name="temperature")


def loss(target, predicted):
    return keras.ops.mean((target - predicted) ** 2, -1) + weight * keras.ops.mean(predicted**2, -1)


class Cooling(keras.layers.Layer):
    def call(self, inputs):
        return inputs / temperature


def anneal(epoch, logs):
    weight.assign(0.5 * (epoch + 1))
    temperature.assign(1.0 + epoch)


model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), Cooling(), keras.layers.Dense(1)])
model.compile("adam", loss)
callback = keras.callbacks.LambdaCallback(on_epoch_end=anneal)
history = model.fit(x, y, batch_size=64, epochs=4, verbose=0, callbacks=[callback]).history
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
values = [float(weight.numpy()), float(temperature.numpy())]
print("OUTCOME", json.dumps({"history": history, "values": values, "weights_sha256": digest}))
