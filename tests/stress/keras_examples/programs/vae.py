"""Stands for keras.io/examples/generative/vae: an encoder that samples, a decoder, a train_step with two losses."""
# draws: the latent vector that the encoder samples

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(1)

images = np.random.uniform(0, 0.2, (240, 12, 12, 1)).astype("float32")
for image, row in zip(images, np.random.randint(0, 10, 240), strict=True):
    image[row : row + 3] += 0.8


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs):
        mean, log_variance = inputs
        return mean + keras.random.normal(ops.shape(mean), seed=self.seed_generator) * ops.exp(log_variance / 2)


inputs = keras.Input(shape=(12, 12, 1))
x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
x = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(x)
x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
outputs = [layers.Dense(2, name="mean")(x), layers.Dense(2, name="log_variance")(x)]
encoder = keras.Model(inputs, [*outputs, Sampling()(outputs)], name="encoder")

latent = keras.Input(shape=(2,))
x = layers.Reshape((3, 3, 6))(layers.Dense(54, activation="relu")(latent))
x = layers.Conv2DTranspose(6, 3, strides=2, padding="same", activation="relu")(x)
x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(x)
decoder = keras.Model(latent, layers.Conv2DTranspose(1, 3, padding="same", activation="sigmoid")(x), name="decoder")


class VariationalAutoencoder(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.means = [keras.metrics.Mean(name=name) for name in ("total_loss", "reconstruction_loss", "kl_loss")]

    @property
    def metrics(self):
        return self.means

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, sampled = self.encoder(data)
            crossentropy = keras.losses.binary_crossentropy(data, self.decoder(sampled))
            reconstruction = ops.mean(ops.sum(crossentropy, axis=(1, 2)))
            divergence = (ops.square(mean) + ops.exp(log_variance) - log_variance - 1) / 2
            divergence = ops.mean(ops.sum(divergence, axis=1))
            total = reconstruction + divergence
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, loss in zip(self.means, (total, reconstruction, divergence), strict=True):
            tracker.update_state(loss)
        return {tracker.name.removeprefix("total_"): tracker.result() for tracker in self.means}


vae = VariationalAutoencoder(encoder, decoder)
vae.compile(optimizer=keras.optimizers.Adam())
history = vae.fit(images, epochs=2, batch_size=16, shuffle=False, verbose=0)
assert vae.decoder.predict(np.array([[0.5, -1.0]]), verbose=0).shape == (1, 12, 12, 1)
assert vae.encoder.predict(images, verbose=0)[0].shape == (240, 2)
print(history.history)
