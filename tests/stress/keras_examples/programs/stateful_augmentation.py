"""Stands for keras.io/guides/preprocessing_layers: layers that augment inside a tf.data pipeline, and keep a state."""
# draws: the augmentation in the pipeline

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

labels = np.random.randint(0, 3, 192)
images = (np.random.randint(0, 100, (192, 10, 10, 3)) + 50 * labels[:, None, None, None]).astype("uint8")

augment = keras.Sequential([layers.RandomFlip("horizontal"), layers.RandomRotation(0.1), layers.RandomZoom(0.2)])
generator = tf.random.Generator.from_seed(3)


def brightened(image, label):
    shift = generator.uniform((), -20.0, 20.0)
    return tf.cast(image, "float32") + shift, label


dataset = tf.data.Dataset.from_tensor_slices((images, labels)).map(brightened).shuffle(96).batch(16)
dataset = dataset.map(lambda x, y: (augment(x, training=True), y), num_parallel_calls=tf.data.AUTOTUNE)

model = keras.Sequential(
    [
        keras.Input((10, 10, 3)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(6, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3),
    ]
)
model.compile(
    optimizer="adam",
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(dataset.prefetch(tf.data.AUTOTUNE), epochs=2, verbose=0)
print(history.history)
