"""Stands for keras.io/guides/understanding_masking_and_padding: mask_zero, Masking, own layers with masks."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

raw = [list(np.random.randint(1, 20, size=length)) for length in np.random.randint(3, 11, size=240)]
words = keras.utils.pad_sequences(raw, maxlen=10, padding="post")
labels = np.array([float(sum(sequence) / len(sequence) > 10) for sequence in raw], dtype="float32")[:, None]


class Halves(layers.Layer):
    def call(self, inputs):
        return ops.split(inputs, 2, axis=1)

    def compute_mask(self, inputs, mask=None):
        return [None, None] if mask is None else ops.split(mask, 2, axis=1)


class WordVectors(layers.Layer):
    def __init__(self, words, width, **kwargs):
        super().__init__(**kwargs)
        self.words, self.width = words, width

    def build(self, input_shape):
        self.table = self.add_weight(shape=(self.words, self.width), initializer="random_normal")

    def call(self, inputs):
        return ops.take(self.table, ops.cast(inputs, "int32"), axis=0)

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


class Squash(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs):
        return ops.tanh(inputs)


class WeightedMean(layers.Layer):
    def call(self, inputs, mask=None):
        kept = ops.expand_dims(ops.cast(mask, "float32"), -1)
        scores = ops.exp(inputs) * kept
        return ops.sum(inputs * scores / (ops.sum(scores, axis=1, keepdims=True) + 1e-7), axis=1)


inputs = keras.Input((10,), dtype="int32")
vectors = Squash()(layers.Embedding(20, 8, mask_zero=True)(inputs))
early, late = Halves()(vectors)
first = keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.add([layers.LSTM(6)(early), layers.LSTM(6)(late)])))
first.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
first_history = first.fit(words, labels, batch_size=16, epochs=2, shuffle=False, verbose=0)

inputs = keras.Input((10,), dtype="int32")
second = keras.Model(inputs, layers.Dense(1, "sigmoid")(WeightedMean()(Squash()(WordVectors(20, 8)(inputs)))))
second.compile(optimizer="adam", loss="binary_crossentropy")
second_history = second.fit(words, labels, batch_size=16, epochs=2, shuffle=False, verbose=0)
assert second.layers[1].compute_mask(words[:2]).shape == (2, 10)

third = keras.Sequential([keras.Input((10, 1)), layers.Masking(), layers.GRU(6), layers.Dense(1, "sigmoid")])
third.compile(optimizer="adam", loss="binary_crossentropy")
third_history = third.fit(words[..., None] / 20.0, labels, batch_size=16, epochs=2, shuffle=False, verbose=0)

print(first_history.history, second_history.history, third_history.history, sep="\n")
