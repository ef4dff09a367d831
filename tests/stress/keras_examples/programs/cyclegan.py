"""Stands for keras.io/examples/generative/cyclegan: four networks with an optimizer each, and one persistent tape."""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(1)

SMALL = {"kernel_initializer": keras.initializers.RandomNormal(mean=0.0, stddev=0.02), "use_bias": False}


def dataset(records, axis):
    images = np.random.uniform(0, 100, (records, 8, 8, 3)) + 100 * (np.indices((8, 8))[axis] % 2)[..., None]
    labelled = tf.data.Dataset.from_tensor_slices((images, np.zeros(records)))
    return labelled.map(lambda image, _: tf.cast(image, "float32") / 127.5 - 1.0).cache().batch(16)


horses, zebras, test_horses = dataset(160, 0), dataset(176, 1), dataset(32, 0)


class ReflectionPadding2D(layers.Layer):
    def call(self, tensor, mask=None):
        return ops.pad(tensor, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="reflect")


def make_generator():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, strides=2, **SMALL)(ReflectionPadding2D()(inputs))
    x = layers.Activation("relu")(layers.GroupNormalization(groups=1)(x))
    x = layers.add([x, layers.Conv2D(4, 3, **SMALL)(ReflectionPadding2D()(x))])
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", **SMALL)(x)
    x = layers.Activation("relu")(layers.GroupNormalization(groups=1)(x))
    return keras.Model(inputs, layers.Conv2D(3, 3, activation="tanh")(ReflectionPadding2D()(x)))


def make_discriminator():
    inputs = keras.Input((8, 8, 3))
    x = layers.LeakyReLU(0.2)(layers.Conv2D(4, 4, strides=2, padding="same")(inputs))
    return keras.Model(inputs, layers.Conv2D(1, 4, padding="same", **SMALL)(x))


class CycleGan(keras.Model):
    def __init__(self, g, f, x, y, of_cycle=10.0, of_identity=5.0):
        super().__init__()
        self.g, self.f, self.x, self.y = g, f, x, y
        self.of_cycle, self.of_identity = of_cycle, of_identity

    def call(self, inputs):
        return self.x(inputs), self.y(inputs), self.g(inputs), self.f(inputs)

    def compile(self, g_optimizer, f_optimizer, x_optimizer, y_optimizer, gen_loss_fn, disc_loss_fn):
        super().compile()
        self.g_optimizer, self.f_optimizer = g_optimizer, f_optimizer
        self.x_optimizer, self.y_optimizer = x_optimizer, y_optimizer
        self.gen_loss_fn, self.disc_loss_fn = gen_loss_fn, disc_loss_fn
        self.absolute = keras.losses.MeanAbsoluteError()

    def train_step(self, data):
        real_x, real_y = data
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.g(real_x, training=True), self.f(real_y, training=True)
            cycled_x, cycled_y = self.f(fake_y, training=True), self.g(fake_x, training=True)
            same_x, same_y = self.f(real_x, training=True), self.g(real_y, training=True)
            of_real_x, of_fake_x = self.x(real_x, training=True), self.x(fake_x, training=True)
            of_real_y, of_fake_y = self.y(real_y, training=True), self.y(fake_y, training=True)
            g_loss = self.gen_loss_fn(of_fake_y) + self.absolute(real_y, cycled_y) * self.of_cycle
            g_loss += self.absolute(real_y, same_y) * self.of_identity
            f_loss = self.gen_loss_fn(of_fake_x) + self.absolute(real_x, cycled_x) * self.of_cycle
            f_loss += self.absolute(real_x, same_x) * self.of_identity
            x_loss, y_loss = self.disc_loss_fn(of_real_x, of_fake_x), self.disc_loss_fn(of_real_y, of_fake_y)
        weights = [network.trainable_variables for network in (self.g, self.f, self.x, self.y)]
        losses = (g_loss, f_loss, x_loss, y_loss)
        gradients = [tape.gradient(loss, part) for loss, part in zip(losses, weights, strict=True)]
        optimizers = (self.g_optimizer, self.f_optimizer, self.x_optimizer, self.y_optimizer)
        for optimizer, found, part in zip(optimizers, gradients, weights, strict=True):
            optimizer.apply_gradients(zip(found, part, strict=True))
        return {"G_loss": g_loss, "F_loss": f_loss, "D_X_loss": x_loss, "D_Y_loss": y_loss}


class Monitor(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        for images in test_horses.take(1):
            assert self.model.g(images)[0].numpy().shape == (8, 8, 3)


squared = keras.losses.MeanSquaredError()


def discriminator_loss(real, fake):
    return (squared(ops.ones_like(real), real) + squared(ops.zeros_like(fake), fake)) * 0.5


model = CycleGan(make_generator(), make_generator(), make_discriminator(), make_discriminator())
model.build((None, 8, 8, 3))
model.compile(
    **{f"{which}_optimizer": keras.optimizers.Adam(learning_rate=2e-4, beta_1=0.5) for which in "gfxy"},
    gen_loss_fn=lambda fake: squared(ops.ones_like(fake), fake),
    disc_loss_fn=discriminator_loss,
)
path = tempfile.mkdtemp() + "/cyclegan_{epoch:03d}.weights.h5"
callbacks = [Monitor(), keras.callbacks.ModelCheckpoint(path, save_weights_only=True)]
history = model.fit(tf.data.Dataset.zip((horses, zebras)), epochs=2, callbacks=callbacks, verbose=0)
model.load_weights(path.format(epoch=2))
assert model.g(next(iter(test_horses)), training=False).shape == (16, 8, 8, 3)
print(history.history)
