"""Gradients that the optimizer adds up itself, as raytf advises for a `train_step` that adds them up."""

import hashlib
import json

import keras
import numpy as np

keras.utils.set_random_seed(4)
x = np.random.default_rng(0).normal(size=(96, 5)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
print("OUTCOME", json.dumps({"history": history, "weights_sha256": digest}))
