"""Stands for keras.io/examples/generative/dcgan_overriding_train_step: a GAN with two optimizers, images each epoch."""
# draws: latent vectors and noise of the labels

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

LATENT = 6

images = np.random.uniform(size=(240, 12, 12, 1)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(images).batch(16).prefetch(4)

x = [layers.Conv2D(4, 3, strides=2, padding="same"), layers.LeakyReLU(negative_slope=0.2)]
x = [*x, layers.Conv2D(6, 3, strides=2, padding="same"), layers.LeakyReLU(negative_slope=0.2)]
discriminator = keras.Sequential([keras.Input((12, 12, 1)), *x, layers.GlobalMaxPooling2D(), layers.Dense(1)])
x = [keras.Input(shape=(LATENT,)), layers.Dense(54), layers.LeakyReLU(negative_slope=0.2), layers.Reshape((3, 3, 6))]
x = [*x, layers.Conv2DTranspose(6, 4, strides=2, padding="same"), layers.LeakyReLU(negative_slope=0.2)]
x = [*x, layers.Conv2DTranspose(4, 4, strides=2, padding="same"), layers.LeakyReLU(negative_slope=0.2)]
generator = keras.Sequential([*x, layers.Conv2D(1, 5, padding="same", activation="sigmoid")])


class Adversaries(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seeds = keras.random.SeedGenerator(7)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_mean, self.g_mean = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_mean, self.g_mean]

    def train_step(self, real):
        count = tf.shape(real)[0]
        fake = self.generator(keras.random.normal((count, LATENT), seed=self.seeds))
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(tf.concat([fake, real], axis=0)))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        latent = keras.random.normal((count, LATENT), seed=self.seeds)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((count, 1)), self.discriminator(self.generator(latent)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_mean.update_state(d_loss)
        self.g_mean.update_state(g_loss)
        return {"d_loss": self.d_mean.result(), "g_loss": self.g_mean.result()}


class Monitor(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        made = self.model.generator(keras.random.normal((3, LATENT))).numpy() * 255
        assert keras.utils.array_to_img(made[0]).size == (12, 12)


gan = Adversaries(discriminator, generator)
optimizers = {f"{which}_optimizer": keras.optimizers.Adam(learning_rate=0.0003) for which in "dg"}
gan.compile(**optimizers, loss_fn=keras.losses.BinaryCrossentropy(from_logits=True))
history = gan.fit(dataset, epochs=2, callbacks=[Monitor()], verbose=0)
print(history.history)
