# shards: any
"""A model that is compiled with `run_eagerly=True`, as tutorials do to look into a step."""

import hashlib
import json

import keras
import numpy as np

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(40, 5)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
model.compile("adam", "mse", run_eagerly=True)
history = model.fit(x, y, batch_size=40, epochs=3, verbose=0).history
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
found = {"history": history, "eager": model.run_eagerly, "evaluated": model.evaluate(x, y, verbose=0)}
print("OUTCOME", json.dumps({**found, "weights_sha256": digest}))
