"""Stands for keras.io/examples/generative/vq_vae: a layer of code words with add_loss, then a prior of the codes."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(1)

LATENT, CODES = 4, 8

images = np.random.uniform(0, 0.2, (240, 12, 12, 1)).astype("float32")
for image, row in zip(images, np.random.randint(0, 9, 240), strict=True):
    image[row : row + 3] += 0.8


class Quantizer(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = self.add_weight(shape=(LATENT, CODES), initializer="random_uniform", name="words")

    def call(self, x):
        chosen = ops.one_hot(self.codes(ops.reshape(x, (-1, LATENT))), CODES)
        quantized = ops.reshape(ops.matmul(chosen, ops.transpose(self.words)), ops.shape(x))
        commitment = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
        self.add_loss(0.25 * commitment + ops.mean((quantized - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(quantized - x)

    def codes(self, flat):
        lengths = ops.sum(flat**2, axis=1, keepdims=True) + ops.sum(self.words**2, axis=0)
        return ops.argmin(lengths - 2 * ops.matmul(flat, self.words), axis=1)


x = [layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu") for filters in (4, 6)]
encoder = keras.Sequential([keras.Input((12, 12, 1)), *x, layers.Conv2D(LATENT, 1)], name="encoder")
x = [layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu") for filters in (6, 4)]
decoder = keras.Sequential([keras.Input((3, 3, LATENT)), *x, layers.Conv2DTranspose(1, 3, padding="same")])
inputs = keras.Input((12, 12, 1))
vqvae = keras.Model(inputs, decoder(Quantizer(name="quantizer")(encoder(inputs))))


class Trainer(keras.Model):
    def __init__(self, vqvae, variance, **kwargs):
        super().__init__(**kwargs)
        self.vqvae, self.variance = vqvae, variance
        self.means = [keras.metrics.Mean(name=name) for name in ("total_loss", "reconstruction_loss", "vq_loss")]

    @property
    def metrics(self):
        return self.means

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstruction = ops.mean((x - self.vqvae(x)) ** 2) / self.variance
            total = reconstruction + sum(self.vqvae.losses)
        weights = self.vqvae.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        for mean, loss in zip(self.means, (total, reconstruction, sum(self.vqvae.losses)), strict=True):
            mean.update_state(loss)
        return {mean.name.removeprefix("total_"): mean.result() for mean in self.means}


trainer = Trainer(vqvae, np.var(images))
trainer.compile(optimizer=keras.optimizers.Adam())
first = trainer.fit(images - 0.5, epochs=2, batch_size=16, shuffle=False, verbose=0)

encoded = trainer.vqvae.get_layer("encoder").predict(images - 0.5, verbose=0)
quantizer = trainer.vqvae.get_layer("quantizer")
codes = quantizer.codes(encoded.reshape(-1, LATENT)).numpy().reshape(encoded.shape[:-1])

# Stands for the page's PixelCNN, which pixelcnn.py has.
inputs = keras.Input((3, 3), dtype="int32")
x = layers.Conv2D(6, 3, padding="same", activation="relu")(ops.one_hot(inputs, CODES))
prior = keras.Model(inputs, layers.Conv2D(CODES, 1)(x))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
prior.compile(optimizer=keras.optimizers.Adam(3e-4), loss=loss, metrics=["accuracy"])
second = prior.fit(x=codes, y=codes, batch_size=16, epochs=2, validation_split=0.1, shuffle=False, verbose=0)
drawn = prior.predict(codes[:4], verbose=0).argmax(axis=-1)
quantized = ops.matmul(ops.one_hot(drawn, CODES), ops.transpose(quantizer.words))
assert decoder.predict(quantized, verbose=0).shape == (4, 12, 12, 1)
print(first.history, second.history)
