"""Stands for keras.io/guides/custom_train_step_in_tensorflow: a train_step with compute_loss, one with own metrics."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)

x = np.random.normal(size=(240, 12)).astype("float32")
y = (x[:, :1] - 0.5 * x[:, 1:2] + 0.2).astype("float32")
weights = np.random.uniform(0.5, 1.5, size=(240, 1)).astype("float32")


class PlainStep(keras.Model):
    def train_step(self, data):
        features, target = data
        with tf.GradientTape() as tape:
            predicted = self(features, training=True)
            loss = self.compute_loss(y=target, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [target, predicted]))
        return {metric.name: metric.result() for metric in self.metrics}


class OwnMetrics(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mean_loss = keras.metrics.Mean(name="loss")
        self.absolute = keras.metrics.MeanAbsoluteError(name="mae")
        self.squared = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.mean_loss, self.absolute]

    def train_step(self, data):
        features, target, weight = data if len(data) == 3 else (*data, None)
        with tf.GradientTape() as tape:
            predicted = self(features, training=True)
            loss = self.squared(target, predicted, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.mean_loss.update_state(loss)
        self.absolute.update_state(target, predicted, sample_weight=weight)
        return {"loss": self.mean_loss.result(), "mae": self.absolute.result()}

    def test_step(self, data):
        features, target = data
        predicted = self(features, training=False)
        self.mean_loss.update_state(self.squared(target, predicted))
        self.absolute.update_state(target, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


inputs = keras.Input((12,))
plain = PlainStep(inputs, keras.layers.Dense(1)(inputs))
plain.compile(optimizer="adam", loss="mse", metrics=["mae"])
plain_history = plain.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)

inputs = keras.Input((12,))
own = OwnMetrics(inputs, keras.layers.Dense(1)(inputs))
own.compile(optimizer="adam")
own_history = own.fit(x, y, sample_weight=weights, batch_size=16, epochs=2, shuffle=False, verbose=0)
own.evaluate(x, y, batch_size=16, verbose=0)

print(plain_history.history)
print(own_history.history)
