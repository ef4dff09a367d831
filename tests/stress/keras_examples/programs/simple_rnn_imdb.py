"""Stands for keras.io/examples/nlp/bidirectional_lstm_imdb: two bidirectional LSTMs on padded sequences."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

WORDS, LENGTH = 40, 12


def reviews(records):
    """Lists of words of different lengths; one with many high words is a good review."""
    texts = [np.random.randint(1, WORDS, np.random.randint(4, 18)).tolist() for _ in range(records)]
    return texts, np.array([int(np.mean(text) > WORDS / 2) for text in texts])


x_train, y_train = reviews(240)
x_val, y_val = reviews(64)
x_train = keras.utils.pad_sequences(x_train, maxlen=LENGTH)
x_val = keras.utils.pad_sequences(x_val, maxlen=LENGTH)

inputs = keras.Input(shape=(None,), dtype="int32")
x = layers.Embedding(WORDS, 8)(inputs)
x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
x = layers.Bidirectional(layers.LSTM(4))(x)
outputs = layers.Dense(1, activation="sigmoid")(x)
model = keras.Model(inputs, outputs)
model.summary()

model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
history = model.fit(x_train, y_train, batch_size=16, epochs=2, validation_data=(x_val, y_val), shuffle=False, verbose=0)
print(history.history)
