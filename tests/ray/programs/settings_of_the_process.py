# Settings of the whole process count in the training, too, and the next fit sees the next ones.
import hashlib
import json

import keras
import numpy as np
import tensorflow as tf

tf.experimental.numpy.experimental_enable_numpy_behavior()


class Flat(keras.layers.Layer):
    """Uses a method that tensors have with NumPy behavior alone, and what the process has set."""

    def call(self, x):
        scale = 1.0 if keras.config.image_data_format() == "channels_last" else 3.0
        return x.reshape((-1, 12)) * scale

    def compute_output_shape(self, shape):
        return (shape[0], 12)


def fit(epsilon, image_data_format):
    keras.config.set_epsilon(epsilon)
    keras.config.set_image_data_format(image_data_format)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3, 4)), Flat(), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", keras.losses.CategoricalCrossentropy(), metrics=["accuracy"])
    x = np.random.RandomState(0).rand(32, 3, 4).astype("float32")
    y = keras.utils.to_categorical(np.arange(32) % 3)
    history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0).history
    return history, hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()


first, first_digest = fit(0.3, "channels_first")
second, second_digest = fit(1e-7, "channels_last")
outcome = {"first": first, "second": second, "weights_sha256": first_digest + second_digest}
print("OUTCOME", json.dumps(outcome))
