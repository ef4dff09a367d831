"""Stands for keras.io/guides/transfer_learning: a trained base, frozen under a new head, then tuned with it."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)


def pictures(records, classes):
    labels = np.random.randint(0, classes, records)
    return np.random.randint(0, 156, (records, 12, 12, 3)) + labels[:, None, None, None] * 99 // classes, labels


def batches(records):
    images, labels = pictures(records, 2)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.map(lambda x, y: (tf.image.resize(x, (8, 8)), y))
    return dataset.cache().batch(16).prefetch(buffer_size=10)


base_inputs = keras.Input(shape=(8, 8, 3))
x = layers.Conv2D(4, 3, use_bias=False)(base_inputs)
x = layers.BatchNormalization()(x)
x = layers.Activation("relu")(x)
x = layers.Conv2D(6, 3, activation="relu")(x)
base_model = keras.Model(base_inputs, x, name="base")

# What the weights of ImageNet are in the guide: those of another task.
old_head = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling2D()(base_model.output))
old_model = keras.Model(base_model.input, old_head)
old_model.compile("adam", "sparse_categorical_crossentropy")
old_images, old_labels = pictures(192, 3)
first = old_model.fit(
    old_images[:, 2:-2, 2:-2] / 127.5 - 1, old_labels, batch_size=16, epochs=2, shuffle=False, verbose=0
)

train_ds, validation_ds, test_ds = batches(192), batches(48), batches(48)

base_model.trainable = False
inputs = keras.Input(shape=(8, 8, 3))
x = layers.Rescaling(scale=1 / 127.5, offset=-1)(inputs)
x = base_model(x, training=False)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.0)(x)
model = keras.Model(inputs, layers.Dense(1)(x))


def fit(rate):
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    return model.fit(train_ds, epochs=2, validation_data=validation_ds, verbose=0)


frozen = [weight.copy() for weight in base_model.get_weights()]
head = fit(1e-3)
assert all(np.array_equal(a, b) for a, b in zip(frozen, base_model.get_weights(), strict=True))
base_model.trainable = True
tuned = fit(1e-5)
assert not np.array_equal(frozen[0], base_model.get_weights()[0])
model.evaluate(test_ds, verbose=0)
print(first.history, head.history, tuned.history)
