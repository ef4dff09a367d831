# shards: any
"""A layer that counts its calls, in a model that is built by `fit`, and the metrics that the model has afterwards."""

import json

import keras
import numpy as np


class Counting(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.counting = Counting()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(self.counting(inputs))


class Watching(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(int(self.model.counting.calls))


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = (x.sum(1, keepdims=True) > 0).astype("float32")
model = Model()
model.compile("sgd", "mse", metrics=["mae", "accuracy"])
watching = Watching()
model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[watching])
names = [metric.name for group in model.metrics for metric in getattr(group, "metrics", [group])]
print("OUTCOME", json.dumps({"seen": watching.seen, "names": names, "counted": float(model.counting.calls.numpy())}))
