"""Stands for keras.io/examples/vision/mixup: two shuffled datasets zipped and mixed, then the same without mixing."""
# draws: the shuffles of both datasets and the mixing rates

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

CLASSES = 4

classes = np.random.randint(CLASSES, size=320)
images = np.random.uniform(size=(320, 8, 8, 1)).astype("float32") + classes[:, None, None, None] / CLASSES
images = images.astype("float32")
labels = tf.one_hot(classes, CLASSES)


def shuffled():
    return tf.data.Dataset.from_tensor_slices((images[:240], labels[:240])).shuffle(240).batch(16)


def beta_samples(size, alpha, beta):
    first, second = tf.random.gamma([size], alpha), tf.random.gamma([size], beta)
    return first / (first + second)


def mix(one, two, alpha=0.2):
    (images_one, labels_one), (images_two, labels_two) = one, two
    rates = beta_samples(tf.shape(images_one)[0], alpha, alpha)
    for_images, for_labels = tf.reshape(rates, [-1, 1, 1, 1]), tf.reshape(rates, [-1, 1])
    mixed_images = images_one * for_images + images_two * (1 - for_images)
    return mixed_images, labels_one * for_labels + labels_two * (1 - for_labels)


plain = shuffled()
mixed = tf.data.Dataset.zip((plain, shuffled())).map(mix, num_parallel_calls=tf.data.AUTOTUNE)
validation = tf.data.Dataset.from_tensor_slices((images[240:280], labels[240:280])).batch(16)
test = tf.data.Dataset.from_tensor_slices((images[280:], labels[280:])).batch(16)


def make_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(8, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


initial = os.path.join(tempfile.mkdtemp(), "initial.weights.h5")
make_model().save_weights(initial)
histories = []
for training in (mixed, plain):
    model = make_model()
    model.load_weights(initial)
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    histories.append(model.fit(training, validation_data=validation, epochs=2, verbose=0))
    model.evaluate(test, verbose=0)

for history in histories:
    print(history.history)
