"""Epochs that are parts of a pass over the data, or end with it: of a PyDataset, a data set and arrays."""

import json

import keras
import numpy as np
import tensorflow as tf

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


class Batches(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.begun = self.ended = 0

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[index * 10 : index * 10 + 10], Y[index * 10 : index * 10 + 10]

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


def trained(*args, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    history = model.fit(*args, shuffle=False, verbose=0, **options).history
    return {"history": history, "steps": int(model.optimizer.iterations)}


batches = Batches()
outcome = {
    "fewer": trained(batches, steps_per_epoch=2, epochs=5),
    "hooks": [batches.begun, batches.ended],
    "more": trained(tf.data.Dataset.from_tensor_slices((X, Y)).batch(10), steps_per_epoch=8, epochs=2, batch_size=3),
    "arrays": trained(
        X, Y, batch_size=8, steps_per_epoch=4, epochs=4, validation_data=(X, Y), validation_steps=2,
        validation_batch_size=7,
    ),
}  # fmt: skip
print("OUTCOME", json.dumps(outcome))
