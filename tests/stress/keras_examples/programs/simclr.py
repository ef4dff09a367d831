"""Stands for keras.io/examples/vision/semisupervised_simclr: zipped datasets, a contrastive and a probe optimizer."""
# draws: the augmentations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(1)

CLASSES, WIDTH, TEMPERATURE = 4, 8, 0.1


def dataset(records, batch):
    labels = np.random.randint(0, CLASSES, records)
    images = np.random.randint(0, 100, (records, 12, 12, 3)) + 35 * labels[:, None, None, None]
    return tf.data.Dataset.from_tensor_slices((images.astype("uint8"), labels)).batch(batch)


unlabeled, labeled, test = dataset(160, 16), dataset(80, 8), dataset(48, 16).prefetch(tf.data.AUTOTUNE)
train = tf.data.Dataset.zip((unlabeled, labeled)).prefetch(tf.data.AUTOTUNE)


class RandomColorAffine(layers.Layer):
    def __init__(self, brightness, jitter, **kwargs):
        super().__init__(**kwargs)
        self.brightness, self.jitter = brightness, jitter

    def call(self, images, training=True):
        if not training:
            return images
        count = ops.shape(images)[0]
        scales = 1 + tf.random.uniform((count, 1, 1, 1), -self.brightness, self.brightness)
        jitters = tf.random.uniform((count, 1, 3, 3), -self.jitter, self.jitter)
        return ops.clip(ops.matmul(images, ops.eye(3) * scales + jitters), 0, 1)


def make_augmenter(zoom, brightness, jitter):
    x = [layers.Rescaling(1 / 255), layers.RandomFlip("horizontal"), layers.RandomTranslation(zoom / 2, zoom / 2)]
    return keras.Sequential([*x, layers.RandomZoom((-zoom, 0.0), (-zoom, 0.0)), RandomColorAffine(brightness, jitter)])


def make_encoder():
    x = [layers.Conv2D(6, kernel_size=3, strides=2, activation="relu") for _ in range(2)]
    return keras.Sequential([*x, layers.Flatten(), layers.Dense(WIDTH, activation="relu")])


def fit_classifier(encoder):
    made = keras.Sequential([make_augmenter(0.13, 0.3, 0.1), encoder, layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer="adam", loss=loss, metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")])
    return made.fit(labeled, epochs=2, validation_data=test, verbose=0)


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.strong, self.weak = make_augmenter(0.5, 0.6, 0.2), make_augmenter(0.13, 0.3, 0.1)
        self.encoder, inputs = make_encoder(), keras.Input((WIDTH,))
        self.head = keras.Sequential([inputs, layers.Dense(WIDTH, activation="relu"), layers.Dense(WIDTH)])
        self.probe = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(CLASSES)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.c_loss, self.p_loss = keras.metrics.Mean(name="c_loss"), keras.metrics.Mean(name="p_loss")
        self.c_acc = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.p_acc = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.c_loss, self.c_acc, self.p_loss, self.p_acc]

    def contrastive_loss(self, one, two):
        similar = ops.matmul(ops.normalize(one, axis=1), ops.transpose(ops.normalize(two, axis=1))) / TEMPERATURE
        labels, losses = ops.arange(ops.shape(one)[0]), []
        for logits in (similar, ops.transpose(similar)):
            self.c_acc.update_state(labels, logits)
            losses.append(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        return (losses[0] + losses[1]) / 2

    def probe_loss_of(self, images, labels, training):
        logits = self.probe(self.encoder(self.weak(images, training=training), training=False), training=training)
        loss = self.probe_loss(labels, logits)
        self.p_loss.update_state(loss)
        self.p_acc.update_state(labels, logits)
        return loss

    def train_step(self, data):
        (unlabeled_images, _), (labeled_images, labels) = data
        images = ops.concatenate((unlabeled_images, labeled_images), axis=0)
        views = [self.strong(images, training=True) for _ in range(2)]
        with tf.GradientTape() as tape:
            projected = [self.head(self.encoder(view, training=True), training=True) for view in views]
            loss = self.contrastive_loss(*projected)
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.c_loss.update_state(loss)
        with tf.GradientTape() as tape:
            loss = self.probe_loss_of(labeled_images, labels, training=True)
        weights = self.probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        self.probe_loss_of(*data, training=False)
        return {metric.name: metric.result() for metric in self.metrics[2:]}


baseline = fit_classifier(make_encoder())
model = ContrastiveModel()
model.compile(contrastive_optimizer=keras.optimizers.Adam(), probe_optimizer=keras.optimizers.Adam())
pretraining = model.fit(train, epochs=2, validation_data=test, verbose=0)
finetuning = fit_classifier(model.encoder)
print(baseline.history, pretraining.history, finetuning.history)
