"""Stands for keras.io/examples/nlp/text_classification_with_transformer: a block of attention as a layer of its own."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

WORDS, LENGTH, WIDTH = 40, 10, 8


class TransformerBlock(layers.Layer):
    def __init__(self, width, heads, hidden, rate=0.0):
        super().__init__()
        self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width)
        self.feed_forward = keras.Sequential([layers.Dense(hidden, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [layers.Dropout(rate) for _ in range(2)]

    def call(self, inputs):
        attended = self.dropouts[0](self.attention(inputs, inputs))
        middle = self.norms[0](inputs + attended)
        return self.norms[1](middle + self.dropouts[1](self.feed_forward(middle)))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, length, words, width):
        super().__init__()
        self.tokens = layers.Embedding(input_dim=words, output_dim=width)
        self.positions = layers.Embedding(input_dim=length, output_dim=width)

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.tokens(x) + self.positions(positions)


def reviews(records):
    texts = [np.random.randint(1, WORDS, np.random.randint(4, 15)).tolist() for _ in range(records)]
    labels = np.array([int(np.mean(text) > WORDS / 2) for text in texts])
    return keras.utils.pad_sequences(texts, maxlen=LENGTH), labels


x_train, y_train = reviews(320)
x_val, y_val = reviews(64)

inputs = layers.Input(shape=(LENGTH,))
x = TokenAndPositionEmbedding(LENGTH, WORDS, WIDTH)(inputs)
x = TransformerBlock(WIDTH, 2, 12)(x)
x = layers.GlobalAveragePooling1D()(x)
x = layers.Dense(6, activation="relu")(x)
outputs = layers.Dense(2, activation="softmax")(x)
model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x_train, y_train, batch_size=32, epochs=2, validation_data=(x_val, y_val), shuffle=False, verbose=0)
print(history.history)
