"""An LSTM that keeps its state from batch to batch, and a callback that resets it at the end of each epoch."""

import hashlib
import json

import keras
import numpy as np

keras.utils.set_random_seed(2)
x = np.random.default_rng(0).normal(size=(48, 4, 2)).astype("float32")
y = x.sum((1, 2))[:, None]
model = keras.Sequential(
    [keras.Input(batch_shape=(12, 4, 2)), keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)]
)
model.compile(keras.optimizers.SGD(0.1), "mse")
reset = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.layers[0].reset_states())
first = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history
history = model.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=0, callbacks=[reset]).history
weights = [np.asarray(v).tobytes() for v in model.variables]
evaluated = model.evaluate(x, y, batch_size=12, verbose=0)
found = {"first": first, "history": history, "evaluated": evaluated}
print("OUTCOME", json.dumps({**found, "weights_sha256": hashlib.sha256(b"".join(weights)).hexdigest()}))
