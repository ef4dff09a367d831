# error: is a stateful RNN (stateful=True)
"""An LSTM that keeps its state from batch to batch, which has no place in a batch that is divided over workers."""

import keras
import numpy as np

keras.utils.set_random_seed(2)
x = np.random.default_rng(0).normal(size=(48, 4, 2)).astype("float32")
model = keras.Sequential(
    [keras.Input(batch_shape=(12, 4, 2)), keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)]
)
model.compile("sgd", "mse")
model.fit(x, x.sum((1, 2)), batch_size=12, epochs=2, shuffle=False, verbose=0)
