"""A callback that steers in its batch hooks: the rate changes with each batch, weights are clipped, and the training
stops in the middle of an epoch."""

import hashlib
import json

import keras
import numpy as np

keras.utils.set_random_seed(5)
x = np.random.default_rng(0).normal(size=(160, 6)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1, "sigmoid")])
model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])


class Steering(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates, self.losses, self.accuracies, self.tested = [], [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.05 * (1 + len(self.rates) % 4)

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))
        self.losses.append(float(logs["loss"]))
        self.accuracies.append(float(logs["accuracy"]))
        for weight in self.model.layers[0].trainable_weights:
            weight.assign(keras.ops.clip(weight, -0.4, 0.4))
        if len(self.rates) == 26:
            self.model.stop_training = True

    def on_test_batch_end(self, batch, logs=None):
        self.tested.append([batch, float(logs["loss"])])


steering = Steering()
fit = {"batch_size": 16, "epochs": 9, "shuffle": False, "verbose": 0, "validation_data": (x[:40], y[:40])}
history = model.fit(x, y, callbacks=[steering], **fit).history
kept = {name: getattr(steering, name) for name in ("rates", "losses", "accuracies", "tested")}
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
steps = int(model.optimizer.iterations)
print("OUTCOME", json.dumps({"history": history, **kept, "steps": steps, "weights_sha256": digest}))
