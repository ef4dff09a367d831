"""Stands for keras.io/examples/generative/conditional_gan: a GAN that gets the class, then steps between classes."""
# draws: latent vectors

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(1)

LATENT, CLASSES, SIZE = 6, 4, 8

labels = keras.utils.to_categorical(np.random.randint(0, CLASSES, 240), CLASSES)
images = np.random.uniform(size=(240, SIZE, SIZE, 1)).astype("float32") * (1 + labels[:, :1, None, None]) / 2
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(16)

x = [layers.InputLayer(shape=(SIZE, SIZE, 1 + CLASSES)), layers.Conv2D(4, 3, strides=2, padding="same")]
discriminator = keras.Sequential([*x, layers.LeakyReLU(), layers.GlobalMaxPooling2D(), layers.Dense(1)])
x = [layers.InputLayer(shape=(LATENT + CLASSES,)), layers.Dense(24), layers.LeakyReLU(), layers.Reshape((2, 2, 6))]
x = [*x, layers.Conv2DTranspose(6, 4, strides=2, padding="same"), layers.LeakyReLU()]
x = [*x, layers.Conv2DTranspose(4, 4, strides=2, padding="same"), layers.LeakyReLU()]
generator = keras.Sequential([*x, layers.Conv2D(1, 3, padding="same", activation="sigmoid")])


class ConditionalGAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seeds = keras.random.SeedGenerator(7)
        self.g_mean, self.d_mean = keras.metrics.Mean(name="g_loss"), keras.metrics.Mean(name="d_loss")

    @property
    def metrics(self):
        return [self.g_mean, self.d_mean]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, data):
        real, one_hot = data
        count = ops.shape(real)[0]
        planes = ops.reshape(ops.repeat(one_hot[:, None], SIZE * SIZE, axis=1), (-1, SIZE, SIZE, CLASSES))
        latent = [keras.random.normal((count, LATENT), seed=self.seeds) for _ in range(2)]
        fake = self.generator(ops.concatenate([latent[0], one_hot], axis=1))
        both = [ops.concatenate([part, planes], axis=-1) for part in (fake, real)]
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(ops.concatenate(both, axis=0)))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            fake = self.generator(ops.concatenate([latent[1], one_hot], axis=1))
            g_loss = self.loss_fn(labels[count:], self.discriminator(ops.concatenate([fake, planes], axis=-1)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.g_mean.update_state(g_loss)
        self.d_mean.update_state(d_loss)
        return {"g_loss": self.g_mean.result(), "d_loss": self.d_mean.result()}


gan = ConditionalGAN(discriminator, generator)
optimizers = {f"{which}_optimizer": keras.optimizers.Adam(learning_rate=0.0003) for which in "dg"}
gan.compile(**optimizers, loss_fn=keras.losses.BinaryCrossentropy(from_logits=True))
history = gan.fit(dataset, epochs=2, verbose=0)

noise = ops.repeat(keras.random.normal((1, LATENT), seed=3), 5, axis=0)
share, (first, last) = ops.linspace(0.0, 1.0, 5)[:, None], keras.utils.to_categorical([1, 3], CLASSES)
between = gan.generator.predict(ops.concatenate([noise, first * (1 - share) + last * share], axis=1), verbose=0)
assert between.shape == (5, SIZE, SIZE, 1)
print(history.history)
