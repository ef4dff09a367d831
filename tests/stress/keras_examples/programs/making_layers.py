"""Stands for keras.io/guides/making_new_layers_and_models_via_subclassing: add_loss, nested layers, an autoencoder."""
# draws: the sampling of the autoencoder's code

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)


class Linear(layers.Layer):
    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="random_normal", trainable=True)
        self.b = self.add_weight(shape=(self.units,), initializer="zeros", trainable=True)

    def call(self, inputs):
        return ops.matmul(inputs, self.w) + self.b


class ActivityLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(1e-2 * ops.mean(ops.square(inputs)))
        return inputs


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.activity, self.last = Linear(8), ActivityLoss(), Linear(1)

    def call(self, inputs):
        return self.last(self.activity(ops.relu(self.first(inputs))))


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, mean, log_variance):
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Autoencoder(keras.Model):
    def __init__(self, width, code=3, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.mean, self.log_variance = layers.Dense(8, "relu"), layers.Dense(code), layers.Dense(code)
        self.sampling = Sampling()
        self.decoder = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(width, "sigmoid")])

    def call(self, inputs):
        hidden = self.hidden(inputs)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        self.add_loss(-0.5 * ops.mean(log_variance - ops.square(mean) - ops.exp(log_variance) + 1))
        return self.decoder(self.sampling(mean, log_variance))


x = np.random.uniform(size=(240, 16)).astype("float32")
model = keras.Sequential([Block()])
model.compile(optimizer="sgd", loss="mse")
history = model.fit(x, x.sum(axis=1, keepdims=True) / 8, batch_size=16, epochs=2, shuffle=False, verbose=0)
vae = Autoencoder(16)
vae.compile(optimizer=keras.optimizers.Adam(1e-3), loss=keras.losses.MeanSquaredError())
vae_history = vae.fit(x, x, batch_size=16, epochs=2, shuffle=False, verbose=0)
print(history.history)
print(vae_history.history)
