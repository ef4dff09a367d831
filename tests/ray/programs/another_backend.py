# error: raytf trains with TensorFlow
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.zeros((8, 2)), np.zeros((8, 1)), verbose=0)
