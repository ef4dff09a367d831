"""Stands for keras.io/examples/generative/lstm_character_level_text_generation: fit epoch by epoch, text in between."""

import random

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

LENGTH, STEP = 12, 3

words = ["the", "will", "to", "power", "and", "morals", "of", "masters", "are", "old"]
text = " ".join(random.choice(words) for _ in range(200))[: LENGTH + 240 * STEP]
characters = sorted(set(text))
number_of = {character: n for n, character in enumerate(characters)}

starts = range(0, len(text) - LENGTH, STEP)
x = np.zeros((len(starts), LENGTH, len(characters)), dtype="bool")
y = np.zeros((len(starts), len(characters)), dtype="bool")
for n, start in enumerate(starts):
    for place, character in enumerate(text[start : start + LENGTH]):
        x[n, place, number_of[character]] = True
    y[n, number_of[text[start + LENGTH]]] = True

model = keras.Sequential(
    [
        keras.Input(shape=(LENGTH, len(characters))),
        layers.LSTM(8),
        layers.Dense(len(characters), activation="softmax"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.RMSprop(learning_rate=0.01))


def sample(chances, temperature):
    logits = np.log(np.asarray(chances, "float64")) / temperature
    return np.argmax(np.random.multinomial(1, np.exp(logits) / np.exp(logits).sum(), 1))


histories = []
for _ in range(2):
    histories.append(model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0))
    start = random.randint(0, len(text) - LENGTH - 1)
    for temperature in (0.5, 1.0):
        sentence, generated = text[start : start + LENGTH], ""
        for _ in range(5):
            asked = np.zeros((1, LENGTH, len(characters)))
            for place, character in enumerate(sentence):
                asked[0, place, number_of[character]] = 1.0
            character = characters[sample(model.predict(asked, verbose=0)[0], temperature)]
            sentence, generated = sentence[1:] + character, generated + character
        assert len(generated) == 5

for history in histories:
    print(history.history)
