"""A Keras program whose callback changes weights and a variable of the loss in its batch hooks, and kills its process
there: in the middle of a hook, once at each batch that is named by its arguments (`begin:4 end:9`), where a file in the
folder that comes first says that it has not happened yet."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

folder, deaths = Path(sys.argv[1]), sys.argv[2:]
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(192, 6)).astype("float32")
y = (x @ rng.normal(size=6)).astype("float32")[:, None]
penalty = keras.Variable(0.0, trainable=False, name="penalty")


class Steering(keras.callbacks.Callback):
    """Clips the weights before each batch, and raises the penalty after it."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    def die_once(self, place):
        if place in deaths and (folder / place).exists():
            (folder / place).unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)
        for weight in self.model.trainable_weights:
            weight.assign(keras.ops.clip(weight, -0.5, 0.5))
            self.die_once(f"begin:{len(self.begun)}")

    def on_train_batch_end(self, batch, logs=None):
        penalty.assign(penalty + 0.01)
        self.die_once(f"end:{len(self.ended) + 1}")
        self.ended.append(round(float(logs["loss"]), 6))


def loss(target, predicted):
    return keras.ops.mean((target - predicted) ** 2, -1) + penalty * keras.ops.mean(predicted**2, -1)


model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.05), loss)
steering = Steering()
history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[steering]).history
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
kept = {"begun": steering.begun, "ended": steering.ended, "penalty": round(float(penalty.numpy()), 5)}
print("TOLD", json.dumps({"weights": digest, "loss": history["loss"], **kept}))
