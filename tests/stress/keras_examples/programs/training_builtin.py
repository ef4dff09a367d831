"""Stands for keras.io/guides/training_with_built_in_methods: own loss and metric, weights, callbacks."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(1)

labels = np.random.randint(3, size=320)
x = (np.random.normal(size=(320, 10)) + labels[:, None]).astype("float32")
sample_weights = np.where(labels == 2, 2.0, 1.0).astype("float32")


class ConfidenceLoss(keras.losses.Loss):
    def __init__(self, factor=0.1, name="confidence_loss"):
        super().__init__(name=name)
        self.factor = factor

    def call(self, y_true, y_pred):
        crossentropy = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        return crossentropy + self.factor * ops.mean(ops.square(0.5 - y_pred), axis=-1)


class TruePositives(keras.metrics.Metric):
    def __init__(self, name="hits", **kwargs):
        super().__init__(name=name, **kwargs)
        self.hits = self.add_variable(shape=(), initializer="zeros", name="hits")

    def update_state(self, y_true, y_pred, sample_weight=None):
        guesses = ops.argmax(y_pred, axis=1)
        hits = ops.cast(ops.equal(ops.reshape(ops.cast(y_true, "int64"), (-1,)), ops.cast(guesses, "int64")), "float32")
        self.hits.assign_add(ops.sum(hits if sample_weight is None else hits * ops.reshape(sample_weight, (-1,))))

    def result(self):
        # As the guide has it: the variable itself, so that plain Keras logs the validation's count as the epoch's own.
        return self.hits.value

    def reset_state(self):
        self.hits.assign(0.0)


def make_model(rate=0.05):
    inputs = keras.Input((10,), name="numbers")
    hidden = layers.Dense(8, activation="relu")(inputs)
    made = keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))
    made.compile(keras.optimizers.SGD(rate), loss=ConfidenceLoss(), metrics=[TruePositives()], weighted_metrics=["acc"])
    return made


options = {"epochs": 2, "verbose": 0}
arrays = {"batch_size": 16, "shuffle": False, **options}
model = make_model()
plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=10.0)
checkpoint = keras.callbacks.ModelCheckpoint(os.path.join(tempfile.mkdtemp(), "epoch_{epoch}.keras"), "val_loss")
histories = [model.fit(x, labels, validation_split=0.2, callbacks=[plateau, checkpoint], **arrays)]
model.evaluate(x, labels, batch_size=32, verbose=0)

histories.append(make_model().fit(x, labels, class_weight={0: 1.0, 1: 1.0, 2: 2.0}, **arrays))
histories.append(make_model().fit(x, labels, sample_weight=sample_weights, **arrays))

decay = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=10, decay_rate=0.9, staircase=True)
dataset = tf.data.Dataset.from_tensor_slices((x, labels, sample_weights)).batch(16)
histories.append(make_model(decay).fit(dataset, validation_data=dataset.take(4), **options))
for history in histories:
    print(history.history)
