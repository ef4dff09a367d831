# shards: any
"""A model all of whose weights are frozen: `fit` changes none of them, and shows loss and metrics as ever."""

import hashlib
import json

import keras
import numpy as np

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential(
    [keras.Input((5,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
)
model.trainable = False
model.compile("adam", "mse", metrics=["mae"])
before = [weight.copy() for weight in model.get_weights()]
history = model.fit(x, y, batch_size=60, epochs=2, validation_data=(x, y), verbose=0).history
kept = all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
steps = int(model.optimizer.iterations)
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
print("OUTCOME", json.dumps({"history": history, "kept": kept, "steps": steps, "weights_sha256": digest}))
