"""Stands for keras.io/examples/keras_recipes/memory_efficient_embeddings: a table with a row for each of 10^7 items."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

ROWS, RECORDS = 10_000_000, 512

items = np.random.randint(0, ROWS, (RECORDS, 3))
ratings = (items.sum(1) % 7 / 7).astype("float32")

inputs = keras.Input(shape=(3,), dtype="int32")
x = layers.Embedding(ROWS, 2, embeddings_initializer="zeros")(inputs)
x = layers.Dense(8, activation="relu", bias_initializer="ones")(layers.Flatten()(x))
model = keras.Model(inputs, layers.Dense(1)(x))
model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
history = model.fit(items, ratings, batch_size=32, epochs=2, shuffle=False, verbose=0)
print(history.history)
