# error: a callback's on_epoch_end raised ValueError: enough
import keras
import numpy as np


class Stopping(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise ValueError("enough")


model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.zeros((8, 2)), np.zeros((8, 1)), verbose=0, callbacks=[Stopping()])
