"""Stands for keras.io/examples/generative/wgan_gp: a critic with several steps and a gradient penalty, on arrays."""
# draws: latent vectors and where the penalty is taken

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

LATENT = 6

images = ((np.random.randint(0, 256, (240, 10, 10, 1)) - 127.5) / 127.5).astype("float32")

inputs = keras.Input(shape=(10, 10, 1))
x = layers.ZeroPadding2D(1)(inputs)
for filters in (4, 6):
    x = layers.LeakyReLU(negative_slope=0.2)(layers.Conv2D(filters, 5, strides=2, padding="same")(x))
critic = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)), name="discriminator")

inputs = keras.Input(shape=(LATENT,))
x = layers.BatchNormalization()(layers.Dense(3 * 3 * 6, use_bias=False)(inputs))
x = layers.Reshape((3, 3, 6))(layers.LeakyReLU(negative_slope=0.2)(x))
for filters, activation in ((4, layers.LeakyReLU(negative_slope=0.2)), (1, layers.Activation("tanh"))):
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(layers.UpSampling2D(2)(x))
    x = activation(layers.BatchNormalization()(x))
generator = keras.Model(inputs, layers.Cropping2D(1)(x), name="generator")


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, extra_steps=3, penalty_weight=10.0):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.extra_steps, self.penalty_weight = extra_steps, penalty_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def penalty(self, real, fake):
        between = real + tf.random.uniform([tf.shape(real)[0], 1, 1, 1]) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            predicted = self.discriminator(between, training=True)
        slopes = tape.gradient(predicted, [between])[0]
        return tf.reduce_mean((tf.sqrt(tf.reduce_sum(slopes**2, axis=[1, 2, 3])) - 1.0) ** 2)

    def train_step(self, real):
        for _ in range(self.extra_steps):
            latent = tf.random.normal((tf.shape(real)[0], LATENT))
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                scores = [self.discriminator(part, training=True) for part in (real, fake)]
                d_loss = self.d_loss_fn(*scores) + self.penalty_weight * self.penalty(real, fake)
            weights = self.discriminator.trainable_variables
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        latent = tf.random.normal((tf.shape(real)[0], LATENT))
        with tf.GradientTape() as tape:
            g_loss = self.g_loss_fn(self.discriminator(self.generator(latent, training=True), training=True))
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


class Monitor(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        made = self.model.generator(tf.random.normal((3, LATENT))).numpy() * 127.5 + 127.5
        assert keras.utils.array_to_img(made[0]).size == (10, 10)


def critic_loss(real, fake):
    return tf.reduce_mean(fake) - tf.reduce_mean(real)


wgan = WGAN(critic, generator)
rates = {"learning_rate": 0.0002, "beta_1": 0.5, "beta_2": 0.9}
optimizers = {f"{which}_optimizer": keras.optimizers.Adam(**rates) for which in "dg"}
wgan.compile(**optimizers, d_loss_fn=critic_loss, g_loss_fn=lambda fake: -tf.reduce_mean(fake))
history = wgan.fit(images, batch_size=16, epochs=2, shuffle=False, callbacks=[Monitor()], verbose=0)
print(history.history)
