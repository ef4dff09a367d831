"""Stands for keras.io/examples/nlp/lstm_seq2seq: encoder and decoder trained together, then taken apart."""

import os
import tempfile

import keras
import numpy as np

keras.utils.set_random_seed(1)

LENGTH, UNITS = 6, 8
LETTERS = "abcdef"
SYMBOLS = ["\t", "\n", *LETTERS]

sources = ["".join(np.random.choice(list(LETTERS), size=LENGTH)) for _ in range(200)]
targets = ["\t" + source[::-1] + "\n" for source in sources]


def one_hot(texts):
    return np.eye(len(SYMBOLS), dtype="float32")[[[SYMBOLS.index(letter) for letter in text] for text in texts]]


encoder_data, whole = one_hot(sources), one_hot(targets)
decoder_data, decoder_target = whole[:, :-1], whole[:, 1:]

encoder_inputs = keras.Input((None, len(SYMBOLS)))
_, hidden, carry = keras.layers.LSTM(UNITS, return_state=True, name="encoder")(encoder_inputs)
decoder_inputs = keras.Input((None, len(SYMBOLS)))
decoder_lstm = keras.layers.LSTM(UNITS, return_sequences=True, return_state=True, name="decoder")
decoder_outputs, _, _ = decoder_lstm(decoder_inputs, initial_state=[hidden, carry])
decoder_outputs = keras.layers.Dense(len(SYMBOLS), activation="softmax", name="symbols")(decoder_outputs)
model = keras.Model([encoder_inputs, decoder_inputs], decoder_outputs)

model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    [encoder_data, decoder_data],
    decoder_target,
    batch_size=16,
    epochs=2,
    validation_split=0.2,
    shuffle=False,
    verbose=0,
)
path = os.path.join(tempfile.mkdtemp(), "s2s.keras")
model.save(path)

model = keras.models.load_model(path)
encoder = keras.Model(model.input[0], model.get_layer("encoder").output[1:])
state_inputs = [keras.Input((UNITS,), name="hidden"), keras.Input((UNITS,), name="carry")]
outputs, *states = model.get_layer("decoder")(model.input[1], initial_state=state_inputs)
decoder = keras.Model([model.input[1], *state_inputs], [model.get_layer("symbols")(outputs), *states])


def translate(source):
    values, text = encoder.predict(one_hot([source]), verbose=0), "\t"
    while text[-1] != "\n" and len(text) < LENGTH + 2:
        chances, *values = decoder.predict([one_hot([text[-1]]), *values], verbose=0)
        text += SYMBOLS[int(np.argmax(chances[0, -1]))]
    return text


assert translate(sources[0]).startswith("\t")

print(history.history)
