"""Stands for keras.io/examples/generative/ddim: diffusion with an averaged network, a normalizer, images each epoch."""
# draws: noises and diffusion times

import math
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(1)

SIZE, BATCH, EMA = 8, 16, 0.9

images = tf.data.Dataset.from_tensor_slices(np.random.uniform(0, 255, (160, SIZE, SIZE, 3)).astype("float32"))
images = images.map(lambda image: tf.clip_by_value(image / 255, 0.0, 1.0)).cache()
train, validation = (part.repeat(2).batch(BATCH, drop_remainder=True) for part in (images.take(112), images.skip(112)))


@keras.saving.register_keras_serializable()
def waves(x):
    speeds = 2 * math.pi * ops.exp(ops.linspace(0.0, 4.0, 4))
    return ops.concatenate([ops.sin(speeds * x), ops.cos(speeds * x)], axis=3)


def residual(x, width):
    kept, x = layers.Conv2D(width, 1)(x), layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(width, 3, padding="same", activation="swish")(x)
    return layers.Add()([layers.Conv2D(width, 3, padding="same")(x), kept])


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        noisy, variances = keras.Input((SIZE, SIZE, 3)), keras.Input((1, 1, 1))
        embedded = layers.UpSampling2D(SIZE)(layers.Lambda(waves, output_shape=(1, 1, 8))(variances))
        skip = residual(layers.Concatenate()([layers.Conv2D(4, 1)(noisy), embedded]), 4)
        x = layers.UpSampling2D(2, interpolation="bilinear")(residual(layers.AveragePooling2D(2)(skip), 6))
        x = layers.Conv2D(3, 1, kernel_initializer="zeros")(residual(layers.Concatenate()([x, skip]), 4))
        self.network = keras.Model([noisy, variances], x)
        self.ema_network = keras.models.clone_model(self.network)
        # No call builds this model, and Keras saves none that is not built.
        self.built = True

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.means = [keras.metrics.Mean(name=name) for name in ("n_loss", "i_loss", "distance")]

    @property
    def metrics(self):
        return self.means

    def denoise(self, noisy, times, training):
        network, angles = self.network if training else self.ema_network, 0.3 + 1.2 * times
        noises = network([noisy, ops.sin(angles) ** 2], training=training)
        return noises, (noisy - ops.sin(angles) * noises) / ops.cos(angles)

    def generate(self, count=BATCH, steps=3):
        noisy = keras.random.normal((count, SIZE, SIZE, 3))
        for step in range(steps):
            times = ops.ones((count, 1, 1, 1)) - step / steps
            noises, images = self.denoise(noisy, times, training=False)
            angles = 0.3 + 1.2 * (times - 1 / steps)
            noisy = ops.cos(angles) * images + ops.sin(angles) * noises
        return ops.clip(self.normalizer.mean + images * self.normalizer.variance**0.5, 0.0, 1.0)

    def losses_of(self, images, training):
        # As on the page, noises are drawn for BATCH images, however many there are.
        noises, times = keras.random.normal((BATCH, SIZE, SIZE, 3)), keras.random.uniform((BATCH, 1, 1, 1))
        angles = 0.3 + 1.2 * times
        found = self.denoise(ops.cos(angles) * images + ops.sin(angles) * noises, times, training)
        losses = [self.loss(wanted, one) for wanted, one in zip((noises, images), found, strict=True)]
        for mean, loss in zip(self.means[:2], losses, strict=True):
            mean.update_state(loss)
        return losses

    def train_step(self, images):
        with tf.GradientTape() as tape:
            loss = self.losses_of(self.normalizer(images, training=True), training=True)[0]
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(EMA * average + (1 - EMA) * weight)
        return {mean.name: mean.result() for mean in self.means[:2]}

    def test_step(self, images):
        self.losses_of(self.normalizer(images, training=False), training=False)
        self.means[2].update_state((ops.mean(images, axis=0) - ops.mean(self.generate(), axis=0)) ** 2)
        return {mean.name: mean.result() for mean in self.means}

    def show(self, epoch=None, logs=None):
        assert self.generate(4).shape == (4, SIZE, SIZE, 3)


model = Diffusion()
model.compile(optimizer=keras.optimizers.AdamW(weight_decay=1e-4), loss=keras.losses.mean_absolute_error)
path = f"{tempfile.mkdtemp()}/best.weights.h5"
best = {"save_weights_only": True, "save_best_only": True, "monitor": "val_distance", "mode": "min"}
callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=model.show), keras.callbacks.ModelCheckpoint(path, **best)]
model.normalizer.adapt(train)
history = model.fit(train, epochs=2, validation_data=validation, callbacks=callbacks, verbose=0)
model.load_weights(path)
model.show()
print(history.history)
