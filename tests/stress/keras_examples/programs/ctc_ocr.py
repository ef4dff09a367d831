"""Stands for keras.io/examples/vision/captcha_ocr: a CTC layer that calls add_loss, a model compiled without a loss."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

LETTERS, LENGTH, WIDTH, HEIGHT = "abcde", 3, 16, 8

texts = ["".join(np.random.choice(list(LETTERS), size=LENGTH)) for _ in range(240)]
images = np.random.uniform(0, 0.1, size=(240, HEIGHT, WIDTH, 1)).astype("float32")
for image, text in zip(images, texts, strict=True):
    for place, letter in enumerate(text):
        image[LETTERS.index(letter) : LETTERS.index(letter) + 3, 5 * place : 5 * place + 4] += 0.8

to_number = layers.StringLookup(vocabulary=list(LETTERS), mask_token=None)


def encode(image, text):
    return {"image": tf.transpose(image, [1, 0, 2]), "label": to_number(tf.strings.unicode_split(text, "UTF-8"))}


def dataset(start, end):
    made = tf.data.Dataset.from_tensor_slices((images[start:end], texts[start:end]))
    return made.map(encode, num_parallel_calls=tf.data.AUTOTUNE).batch(16).prefetch(tf.data.AUTOTUNE)


class CTCLayer(layers.Layer):
    def call(self, labels, probabilities):
        sparse = tf.sparse.from_dense(tf.cast(labels, tf.int32))
        scores = tf.math.log(tf.transpose(probabilities, [1, 0, 2]) + 1e-7)
        lengths = tf.fill([tf.shape(scores)[1]], tf.shape(scores)[0])
        self.add_loss(tf.compat.v1.nn.ctc_loss(labels=sparse, inputs=scores, sequence_length=lengths))
        return probabilities


image_input = keras.Input((WIDTH, HEIGHT, 1), name="image")
label_input = keras.Input((None,), name="label")
x = layers.Conv2D(4, 3, activation="relu", padding="same", name="conv")(image_input)
x = layers.MaxPooling2D(2, name="pool")(x)
x = layers.Reshape((WIDTH // 2, HEIGHT // 2 * 4), name="columns")(x)
x = layers.Dense(8, activation="relu", name="narrow")(x)
x = layers.Bidirectional(layers.LSTM(6, return_sequences=True), name="both_ways")(x)
x = layers.Dense(len(to_number.get_vocabulary()) + 1, activation="softmax", name="letters")(x)
model = keras.Model([image_input, label_input], CTCLayer(name="ctc")(label_input, x), name="reader")
model.compile(optimizer=keras.optimizers.Adam())

validation = dataset(192, 240)
stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
history = model.fit(dataset(0, 192), validation_data=validation, epochs=2, callbacks=[stopping], verbose=0)

reader = keras.Model(model.input[0], model.get_layer("letters").output)
for batch in validation.take(1):
    predicted = reader.predict(batch["image"], verbose=0)
    decoded, _ = keras.ops.nn.ctc_decode(np.log(predicted + 1e-7), np.full(16, WIDTH // 2), mask_index=len(LETTERS) + 1)
    assert decoded.shape[1] == 16

print(history.history)
