"""Data that can be read once, data of unknown size, and caches: no batch is lost, and none is trained twice."""

import json

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
Y = (X[:, 0] > 0).astype("float32")


def generated():
    for i in range(0, 96, 8):
        yield X[i : i + 8], Y[i : i + 8]


def trained(data, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    return model.fit(data, verbose=0, **options).history


once = generated()
# With a known size of batches Keras counts the step that finds the end, in its loss and in `optimizer.iterations`.
spec = tf.TensorSpec([None, 6]), tf.TensorSpec([None])
slices = tf.data.Dataset.from_tensor_slices((X, Y))
drawn = slices.shuffle(96).filter(lambda x, y: True).batch(16).cache()
outcome = {
    "generator": trained(generated(), validation_data=(X, Y)),
    "dataset over a generator": trained(tf.data.Dataset.from_generator(lambda: once, output_signature=spec)),
    "cache of unknown size": len(trained(drawn, epochs=2)["loss"]),
}
print("OUTCOME", json.dumps(outcome))
