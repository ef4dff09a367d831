"""Keys that callbacks add to the logs, metrics with several numbers, and layers that a callback freezes."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(5)
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 6)).astype("float32")
y = np.eye(3, dtype="float32")[rng.integers(0, 3, 96)]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3, "softmax")])
model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(), "accuracy"])


class Adds(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["twice"] = 2 * logs["loss"]
        logs["classes"] = len(logs["f1_score"])
        self.model.layers[0].trainable = epoch == 0


class Reads(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.names = []

    def on_epoch_end(self, epoch, logs=None):
        self.names.append(list(logs))


reads = Reads()
schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
made = model.fit(
    x,
    y,
    batch_size=32,
    epochs=2,
    shuffle=False,
    verbose=0,
    validation_data=(x[:32], y[:32]),
    callbacks=[Adds(), schedule, reads],
)
history = {name: np.asarray(values, "float64").tolist() for name, values in made.history.items()}
outcome = {
    "names": list(history),
    "history": history,
    "seen": reads.names,
    "trainable": [layer.trainable for layer in model.layers],
    "params": made.params,
    "epochs": made.epoch,
}
print("OUTCOME", json.dumps(outcome))
