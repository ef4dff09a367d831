"""Stands for keras.io/examples/nlp/addition_rnn: sums as sequences of digits, here made without end by a generator."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

CHARACTERS, DIGITS = "0123456789+ ", 2
LENGTH = 2 * DIGITS + 1


def encoded(text, length):
    found = np.zeros((length, len(CHARACTERS)), "float32")
    for place, character in enumerate(text.ljust(length)):
        found[place, CHARACTERS.index(character)] = 1
    return found


def questions(batch):
    random = np.random.default_rng(5)
    while True:
        pairs = random.integers(0, 10**DIGITS, (batch, 2))
        yield (
            np.stack([encoded(f"{a}+{b}"[::-1], LENGTH) for a, b in pairs]),
            np.stack([encoded(str(a + b), DIGITS + 1) for a, b in pairs]),
        )


model = keras.Sequential(
    [
        keras.Input((LENGTH, len(CHARACTERS))),
        layers.LSTM(12),
        layers.RepeatVector(DIGITS + 1),
        layers.LSTM(12, return_sequences=True),
        layers.Dense(len(CHARACTERS), activation="softmax"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
history = model.fit(
    questions(16),
    steps_per_epoch=12,
    epochs=2,
    validation_data=questions(16),
    validation_steps=2,
    verbose=0,
)
print(history.history)
