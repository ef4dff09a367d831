"""Stands for keras.io/guides/writing_your_own_callbacks: stopping that restores weights, rates by epoch."""

import keras
import numpy as np

keras.utils.set_random_seed(1)

x = np.random.normal(size=(320, 12)).astype("float32")
y = (x @ np.random.normal(size=(12, 1)) + 0.1 * np.random.normal(size=(320, 1))).astype("float32")


class Recorder(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, logs["loss"]))

    def on_test_end(self, logs=None):
        self.seen.append(("test", sorted(logs)))


class StopAtLowest(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.lowest, self.best_weights = np.inf, None

    def on_epoch_end(self, epoch, logs=None):
        if logs["loss"] < self.lowest:
            self.lowest, self.best_weights = logs["loss"], self.model.get_weights()
        else:
            self.model.stop_training = True
            self.model.set_weights(self.best_weights)


class RateByEpoch(keras.callbacks.Callback):
    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule

    def on_epoch_begin(self, epoch, logs=None):
        rate = float(self.model.optimizer.learning_rate)
        self.model.optimizer.learning_rate = self.schedule(epoch, rate)


def make_model(rate):
    made = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
    made.compile(optimizer=keras.optimizers.SGD(learning_rate=rate), loss="mse", metrics=["mae"])
    return made


recorder = Recorder()
model = make_model(0.02)
options = {"batch_size": 16, "verbose": 0, "callbacks": [recorder]}
first = model.fit(x, y, epochs=2, shuffle=False, validation_split=0.25, **options)
model.evaluate(x, y, **options)

# So high a rate that the loss rises in the second epoch.
model = make_model(0.68)
second = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[Recorder(), StopAtLowest()])

model = make_model(0.05)
scheduler = RateByEpoch(lambda epoch, rate: rate if epoch < 1 else rate / 5)
third = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[scheduler])

print(first.history)
print(second.history)
print(third.history)
