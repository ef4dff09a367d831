# error: class_weight and sample_weight cannot be used together
"""Keras refuses class_weight beside sample_weight."""

import keras
import numpy as np

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.zeros((8, 2)), np.zeros(8), sample_weight=np.ones(8), class_weight={0: 2.0}, verbose=0)
