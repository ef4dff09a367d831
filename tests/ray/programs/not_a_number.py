# shards: any
"""A search over learning rates, of which the first one is far too large: TerminateOnNaN ends that training alone."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(7)
x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
y = x.sum(1, keepdims=True)
epochs, steps = [], []
for rate in (1e30, 0.01):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    callbacks = [keras.callbacks.TerminateOnNaN()]
    history = model.fit(x, y, batch_size=64, epochs=5, verbose=0, callbacks=callbacks).history
    epochs.append(len(history["loss"]))
    steps.append(int(model.optimizer.iterations))
print("OUTCOME", json.dumps({"epochs": epochs, "steps": steps, "loss": history["loss"]}))
