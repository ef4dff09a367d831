# error: call `fit` twice
"""A callback that replaces the optimizer of the model."""

import keras
import numpy as np

x = np.ones((64, 2), "float32")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class Swap(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer = keras.optimizers.Adam(0.1)


model.fit(x, x[:, :1], batch_size=32, epochs=2, verbose=0, callbacks=[Swap()])
