"""Stands for keras.io/examples/vision/siamese_contrastive: one network on two inputs, a loss made by a function."""

import random

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

CLASSES = 4

labels = np.random.randint(0, CLASSES, 240)
images = np.random.uniform(0, 80, (240, 12, 12)).astype("float32")
for image, label in zip(images, labels, strict=True):
    image[3 * label : 3 * label + 3] += 150


def make_pairs(images, labels):
    of_class = [np.flatnonzero(labels == n) for n in range(CLASSES)]
    pairs, same = [], []
    for image, label in zip(images, labels, strict=True):
        other = random.choice([n for n in range(CLASSES) if n != label])
        for picked, value in ((label, 0), (other, 1)):
            pairs.append([image, images[random.choice(of_class[picked])]])
            same.append(value)
    return np.array(pairs), np.array(same).astype("float32")


(pairs_train, labels_train), (pairs_val, labels_val), (pairs_test, labels_test) = (
    make_pairs(images[part], labels[part]) for part in (slice(160), slice(160, 200), slice(200, 240))
)


class EuclideanDistance(layers.Layer):
    def call(self, vectors):
        one, two = vectors
        squares = ops.sum(ops.square(one - two), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(squares, keras.backend.epsilon()))


inputs = keras.Input((12, 12, 1))
x = layers.BatchNormalization()(inputs)
x = layers.AveragePooling2D(pool_size=(2, 2))(layers.Conv2D(4, (3, 3), activation="tanh")(x))
x = layers.AveragePooling2D(pool_size=(2, 2))(layers.Conv2D(6, (2, 2), activation="tanh")(x))
x = layers.BatchNormalization()(layers.Flatten()(x))
embedding_network = keras.Model(inputs, layers.Dense(6, activation="tanh")(x))

input_1, input_2 = keras.Input((12, 12, 1)), keras.Input((12, 12, 1))
merged = EuclideanDistance()([embedding_network(input_1), embedding_network(input_2)])
output = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(merged))
siamese = keras.Model(inputs=[input_1, input_2], outputs=output)


def loss(margin=1):
    def contrastive_loss(y_true, y_pred):
        beyond = ops.square(ops.maximum(margin - y_pred, 0))
        return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * beyond)

    return contrastive_loss


siamese.compile(loss=loss(margin=1), optimizer="RMSprop", metrics=["accuracy"])
siamese.summary()
fitting = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
validation = ([pairs_val[:, 0], pairs_val[:, 1]], labels_val)
history = siamese.fit([pairs_train[:, 0], pairs_train[:, 1]], labels_train, validation_data=validation, **fitting)
assert len(siamese.evaluate([pairs_test[:, 0], pairs_test[:, 1]], labels_test, verbose=0)) == 2
assert siamese.predict([pairs_test[:, 0], pairs_test[:, 1]], verbose=0).shape == (80, 1)
print(history.history)
