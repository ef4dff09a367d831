"""Stands for keras.io/examples/nlp/text_classification_from_scratch: strings through TextVectorization, Conv1D."""

import re
import string

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

FEATURES, LENGTH = 60, 12
NEUTRAL = ["the", "Film", "a", "story,", "was", "<br />", "actor", "scene.", "and", "it"]
VERDICTS = [["bad", "Boring", "weak!"], ["good", "Great", "fine!"]]


def reviews(records):
    labels = np.random.randint(0, 2, records)
    texts = [" ".join(np.random.choice(NEUTRAL + VERDICTS[label], np.random.randint(6, 15))) for label in labels]
    return tf.data.Dataset.from_tensor_slices((texts, labels)).batch(16)


raw_train_ds, raw_val_ds, raw_test_ds = reviews(240), reviews(48), reviews(48)


def standardized(text):
    text = tf.strings.regex_replace(tf.strings.lower(text), "<br />", " ")
    return tf.strings.regex_replace(text, f"[{re.escape(string.punctuation)}]", "")


vectorize_layer = layers.TextVectorization(
    standardize=standardized, max_tokens=FEATURES, output_mode="int", output_sequence_length=LENGTH
)
vectorize_layer.adapt(raw_train_ds.map(lambda text, label: text))


def vectorized(text, label):
    return vectorize_layer(tf.expand_dims(text, -1)), label


train_ds = raw_train_ds.map(vectorized).cache().prefetch(buffer_size=10)
val_ds = raw_val_ds.map(vectorized).cache().prefetch(buffer_size=10)
test_ds = raw_test_ds.map(vectorized).cache().prefetch(buffer_size=10)

inputs = keras.Input(shape=(None,), dtype="int64")
x = layers.Embedding(FEATURES, 8)(inputs)
x = layers.Dropout(0.0)(x)
x = layers.Conv1D(8, 3, padding="valid", activation="relu", strides=2)(x)
x = layers.Conv1D(8, 3, padding="valid", activation="relu", strides=2)(x)
x = layers.GlobalMaxPooling1D()(x)
x = layers.Dense(8, activation="relu")(x)
predictions = layers.Dense(1, activation="sigmoid", name="predictions")(x)
model = keras.Model(inputs, predictions)
model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
history = model.fit(train_ds, validation_data=val_ds, epochs=2, verbose=0)
of_indices = model.evaluate(test_ds, verbose=0)

texts = keras.Input(shape=(1,), dtype="string")
end_to_end = keras.Model(texts, model(vectorize_layer(texts)))
end_to_end.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
np.testing.assert_allclose(end_to_end.evaluate(raw_test_ds, verbose=0), of_indices, rtol=1e-5)
print(history.history)
