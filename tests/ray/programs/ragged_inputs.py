# error: x is a RaggedTensor
"""Models of Keras compute ragged tensors as they are, which raytf does not."""

import keras
import numpy as np
import tensorflow as tf

words = tf.ragged.constant([[1, 2], [3]] * 8, dtype=tf.int32)
layers = [keras.layers.Embedding(10, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((None,), dtype="int32"), *layers])
model.compile("sgd", "mse")
model.fit(words, np.zeros(16), verbose=0)
