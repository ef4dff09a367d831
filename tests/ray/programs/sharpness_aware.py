"""SAM, which moves the weights to where the loss is highest nearby, and back before the optimizer updates them."""

import hashlib
import json

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(5)


class SharpnessAware(keras.Model):
    def __init__(self, inner, rho):
        super().__init__()
        self.inner, self.rho = inner, rho

    def call(self, inputs, training=False):
        return self.inner(inputs, training=training)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, weights)
        scale = self.rho / (tf.linalg.global_norm(gradients) + 1e-12)
        moves = [gradient * scale for gradient in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            sharp = self.compute_loss(x, y, predicted)
        gradients = tape.gradient(sharp, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {**self.compute_metrics(x, y, predicted), "loss": loss}


x = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
y = x.sum(1, keepdims=True)
layers = [keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)]
model = SharpnessAware(keras.Sequential(layers), 0.05)
model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0).history
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
print("OUTCOME", json.dumps({"history": history, "weights_sha256": digest}))
