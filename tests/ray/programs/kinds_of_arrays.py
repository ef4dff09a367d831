"""Sparse inputs, and weights of classes whose labels are smoothed."""

import json

import keras
import numpy as np
import tensorflow as tf

RNG = np.random.default_rng(0)
X = np.where(RNG.random((64, 6)) > 0.6, RNG.normal(size=(64, 6)), 0).astype("float32")
Y = np.where(X[:, :1] > 0, 0.95, 0.05).astype("float32")


def dense():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, "sigmoid")])


def trained(make, *args, **options):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    return model.fit(*args, epochs=2, shuffle=False, verbose=3, **options).history


sparse = tf.sparse.from_dense(X)
outcome = {
    "class weights": trained(dense, X, Y, class_weight={np.int64(0): 1.0, np.int64(1): np.float64(5)}),
    "sparse": trained(dense, sparse, Y, batch_size=16, validation_split=0.25),
    "sparse dataset": trained(dense, tf.data.Dataset.from_tensor_slices((sparse, Y)).batch(16), batch_size=7),
}
print("OUTCOME", json.dumps(outcome))
