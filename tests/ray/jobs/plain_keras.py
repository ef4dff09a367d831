"""A Keras program that knows nothing of raytf: a base that is frozen first and tuned then, layers and a tensor at
module level, a class without get_config, a loss of its own, and the History."""

import hashlib
import json
import sys

import keras
import numpy as np
from keras import layers

epochs = int(sys.argv[1])
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(403, 8)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int64")

activation = layers.LeakyReLU(0.2)
scale = keras.ops.convert_to_tensor([1.0, 2.0])


class Classifier(keras.Model):
    def __init__(self, base, classes):
        super().__init__()
        self.base, self.head = base, layers.Dense(classes)

    def call(self, inputs):
        return self.head(activation(self.base(inputs))) * scale


def loss(labels, scores):
    return keras.losses.sparse_categorical_crossentropy(labels, scores / scale, from_logits=True)


base = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(16)])
model = Classifier(base, 2)
base.trainable = False
model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
first = model.fit(x, y, batch_size=len(x), epochs=6, validation_split=0.25, shuffle=False, verbose=0)
base.trainable = True
model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
second = model.fit(x, y, 50, epochs, verbose=0)

told = {
    "first": first.history,
    "epochs": second.epoch,
    "kind": type(second).__name__,
    "own": second.model is model and model.history is second,
    "iterations": int(model.optimizer.iterations),
    "evaluated": model.evaluate(x, y, verbose=0),
    "weights": hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest(),
}
print("TOLD", json.dumps(told))
