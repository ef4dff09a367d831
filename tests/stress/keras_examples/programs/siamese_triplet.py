"""Stands for keras.io/examples/vision/siamese_network: triples of image files, a layer of distances, a triplet loss."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from keras.applications import resnet

keras.utils.set_random_seed(1)

SIZE, COUNT = (12, 12), 240

folder = Path(tempfile.mkdtemp())
images = np.random.randint(0, 200, (COUNT, *SIZE, 3))
for side in ("left", "right"):
    (folder / side).mkdir()
    for n, image in enumerate(images + np.random.randint(0, 55, images.shape)):
        keras.utils.save_img(folder / side / f"{n:03}.jpg", image, scale=False)


def read(name):
    image = tf.io.decode_jpeg(tf.io.read_file(name), channels=3)
    return tf.image.resize(tf.image.convert_image_dtype(image, tf.float32), SIZE)


# The negatives are shuffled once, and not anew each epoch as on the page, so that nothing is drawn in training.
anchors, positives = (sorted(map(str, (folder / side).iterdir())) for side in ("left", "right"))
negatives = anchors + positives
np.random.RandomState(seed=3).shuffle(negatives)
names = tuple(tf.data.Dataset.from_tensor_slices(part) for part in (anchors, positives, negatives))
dataset = tf.data.Dataset.zip(names).map(lambda *triple: tuple(map(read, triple)))
parts = (dataset.take(round(COUNT * 0.8)), dataset.skip(round(COUNT * 0.8)))
train, validation = (part.batch(16, drop_remainder=False).prefetch(tf.data.AUTOTUNE) for part in parts)

inputs = keras.Input((*SIZE, 3))
x = layers.Conv2D(4, 3, strides=2, activation="relu", name="block1")(inputs)
base = keras.Model(inputs, layers.Conv2D(6, 3, activation="relu", name="block2")(x))
x = layers.BatchNormalization()(layers.Dense(12, activation="relu")(layers.Flatten()(base.output)))
embedding = keras.Model(base.input, layers.Dense(8)(x), name="embedding")
trainable = False
for layer in base.layers:
    trainable = trainable or layer.name == "block2"
    layer.trainable = trainable


class Distances(layers.Layer):
    def call(self, anchor, positive, negative):
        return ops.sum((anchor - positive) ** 2, axis=-1), ops.sum((anchor - negative) ** 2, axis=-1)


triple = [layers.Input((*SIZE, 3), name=name) for name in ("anchor", "positive", "negative")]
distances = Distances()(*(embedding(resnet.preprocess_input(part)) for part in triple))
network = keras.Model(inputs=triple, outputs=distances)


class Siamese(keras.Model):
    def __init__(self, network, margin=0.5):
        super().__init__()
        self.network, self.margin = network, margin
        self.mean_loss = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}

    def test_step(self, data):
        self.mean_loss.update_state(self._compute_loss(data))
        return {"loss": self.mean_loss.result()}

    # As on the page, in place of Keras's own method of this name.
    def _compute_loss(self, data):
        near, far = self.network(data)
        return ops.maximum(near - far + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.mean_loss]


siamese = Siamese(network)
siamese.compile(optimizer=keras.optimizers.Adam(0.0001))
history = siamese.fit(train, epochs=2, validation_data=validation, verbose=0)

embedded = [embedding(resnet.preprocess_input(part)) for part in next(iter(train))]
similarity = keras.metrics.CosineSimilarity()
assert all(-1.0 <= similarity(embedded[0], other).numpy() <= 1.0 for other in embedded[1:])
print(history.history)
