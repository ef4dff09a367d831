# error: gradient_accumulation_steps
"""A `train_step` that adds gradients up and lets the optimizer apply them at every second batch, under `tf.cond`."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(4)


class Accumulating(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(1)

    def build(self, shape):
        self.head.build(shape)
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")
        self.sums = [self.add_weight(shape=v.shape, initializer="zeros", trainable=False) for v in self.head.variables]

    def call(self, inputs):
        return self.head(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient)
        self.seen.assign_add(1)

        def apply():
            self.optimizer.apply([total / 2 for total in self.sums], self.trainable_variables)
            for total in self.sums:
                total.assign(tf.zeros_like(total))
            self.seen.assign(0)
            return 0

        tf.cond(tf.equal(self.seen.value, 2), apply, lambda: 0)
        return {"loss": loss}


x = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
model = Accumulating()
model.build((None, 5))
model.compile("sgd", "mse")
model.fit(x, x.sum(1, keepdims=True), batch_size=32, epochs=2, shuffle=False, verbose=0)
