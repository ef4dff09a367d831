"""Stands for keras.io/guides/working_with_rnns: a bidirectional stack, an encoder's state, a custom cell."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

x = np.random.normal(size=(240, 8, 8)).astype("float32")
labels = (x[:, :, 0].sum(axis=1) > 0).astype("int32")
words = np.random.randint(20, size=(240, 6))


class TwoStateCell(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.state_size = [units, units]
        self.output_size = units

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), initializer="uniform", name="kernel")
        self.recurrent = self.add_weight(shape=(self.units, self.units), initializer="orthogonal", name="recurrent")

    def call(self, inputs, states):
        quick, slow = states
        quick = ops.tanh(ops.matmul(inputs, self.kernel) + ops.matmul(quick, self.recurrent))
        slow = 0.9 * slow + 0.1 * quick
        return quick + slow, [quick, slow]

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def train(made, data):
    made.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer="sgd", metrics=["accuracy"]
    )
    held_out = ([part[192:] for part in data] if isinstance(data, list) else data[192:], labels[192:])
    data = [part[:192] for part in data] if isinstance(data, list) else data[:192]
    return made.fit(
        data, labels[:192], validation_data=held_out, batch_size=16, epochs=2, shuffle=False, verbose=0
    ).history


stack = keras.Sequential(
    [
        keras.Input((8, 8)),
        layers.Bidirectional(layers.LSTM(6, return_sequences=True)),
        layers.Bidirectional(layers.LSTM(4, stateful=False)),
        layers.BatchNormalization(),
        layers.Dense(2),
    ]
)
stack_history = train(stack, x)

numbers, tokens = keras.Input((8, 8)), keras.Input((None,))
_, hidden, carry = layers.LSTM(6, return_state=True, name="encoder")(numbers)
decoded = layers.LSTM(6, name="decoder")(layers.Embedding(20, 6)(tokens), initial_state=[hidden, carry])
pair = keras.Model([numbers, tokens], layers.Dense(2)(decoded))
pair_history = train(pair, [x, words])

custom = keras.Sequential([keras.Input((None, 8)), layers.RNN(TwoStateCell(6)), layers.Dense(2)])
custom_history = train(custom, x)
assert custom.predict(x[:1, :5], verbose=0).shape == (1, 2)

print(stack_history, pair_history, custom_history, sep="\n")
