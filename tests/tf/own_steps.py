"""Models with a `train_step` of their own, in the shapes of programs on keras.io; without randomness."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

WIDTH = 6


def mlp(inputs: int, *units: int, norm: bool = False) -> keras.Model:
    stack = [keras.Input((inputs,)), *(layers.Dense(n, "tanh") for n in units[:-1])]
    return keras.Sequential([*stack, *([layers.BatchNormalization()] if norm else []), layers.Dense(units[-1])])


class Autoencoder(keras.Model):
    """A VAE without its noise: one optimizer, trackers that the property `metrics` lists, x alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 5, 3), mlp(3, 5, WIDTH)
        self.total, self.part = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="kl")

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.part]

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            z = self.encoder(data, training=True)
            kl = 0.1 * ops.mean(ops.sum(ops.square(z), axis=1))
            loss = ops.mean(ops.sum(ops.square(data - self.decoder(z)), axis=1)) + kl
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.part.update_state(kl)
        return {"loss": self.total.result(), "kl": self.part.result()}


class Distiller(keras.Model):
    """A frozen teacher, losses given to `compile`, and numbers of the last batch as logs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = mlp(WIDTH, 8, 1), mlp(WIDTH, 4, 1, norm=True)
        self.teacher.trainable = False

    def compile(self, optimizer: Any, student_loss: Any, distillation_loss: Any) -> None:
        super().compile(optimizer=optimizer)
        self.student_loss, self.distillation_loss = student_loss, distillation_loss

    def call(self, x: Any, training: bool = False) -> Any:
        return self.student(x, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        taught = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            predicted = self.student(x, training=True)
            hard, soft = self.student_loss(y, predicted), self.distillation_loss(taught, predicted)
            loss = 0.3 * hard + 0.7 * soft
        trainable = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trainable), trainable, strict=True))
        return {"loss": loss, "parts": {"hard": hard, "soft": soft}}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return {"student_loss": self.student_loss(y, self.student(x, training=False))}


class Gan(keras.Model):
    """Two optimizers, of which the second works against what the first has just updated; no `call`."""

    def __init__(self, critic_steps: int = 1, penalty: float = 0.0) -> None:
        super().__init__()
        self.generator, self.critic = mlp(3, 5, WIDTH, norm=True), mlp(WIDTH, 7, 1)
        self.critic_steps, self.penalty = critic_steps, penalty
        self.d_tracker, self.g_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def gradient_penalty(self, real: Any, fake: Any) -> Any:
        middle = 0.5 * (real + fake)
        with tf.GradientTape() as tape:
            tape.watch(middle)
            judged = self.critic(middle, training=True)
        grads = tape.gradient(judged, [middle])[0]
        return ops.mean((ops.sqrt(ops.sum(ops.square(grads), axis=1) + 1e-6) - 1.0) ** 2)

    def train_step(self, data: Any) -> dict[str, Any]:
        latent = data[:, :3]
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                d_loss = ops.mean(ops.softplus(self.critic(fake))) + ops.mean(ops.softplus(-self.critic(data)))
                if self.penalty:
                    d_loss += self.penalty * self.gradient_penalty(data, fake)
            grads = tape.gradient(d_loss, self.critic.trainable_variables)
            self.d_optimizer.apply_gradients(zip(grads, self.critic.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            g_loss = ops.mean(ops.softplus(-self.critic(self.generator(latent, training=True))))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply(grads, self.generator.trainable_weights)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


class Averaged(keras.Model):
    """An average of the weights, statistics included, that follows each update; a counter; a tracker nobody resets."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(WIDTH, 5, WIDTH, norm=True)
        self.ema_network = keras.models.clone_model(self.network)
        self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="seen")
        self.tracker, self.ever = keras.metrics.Mean(name="n_loss"), keras.metrics.Sum(name="ever")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        self.seen.assign_add(1)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.abs(data - self.network(data, training=True)))
        grads = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.network.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        self.ever.update_state(ops.ones_like(data[:, 0]))
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


class Contrastive(keras.Model):
    """A second update whose loss reads weights that the first has made, with Keras's own metrics for the probe."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self.probe = mlp(WIDTH, 5, 4), mlp(4, 3), mlp(4, 1)

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any, **kwargs: Any) -> None:
        super().compile(**kwargs)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.c_tracker, self.p_tracker = keras.metrics.Mean(name="c_loss"), keras.metrics.Mean(name="p_loss")
        self.p_error = keras.metrics.MeanAbsoluteError(name="p_error")

    @property
    def metrics(self) -> list[Any]:
        return [self.c_tracker, self.p_tracker, self.p_error]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            one, other = (self.head(self.encoder(v, training=True), training=True) for v in (x, x[:, ::-1]))
            loss = ops.mean(ops.sum(ops.square(one - other), axis=1)) - 0.1 * ops.mean(ops.abs(one))
        both = self.encoder.trainable_weights + self.head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, both), both, strict=True))
        self.c_tracker.update_state(loss)
        with tf.GradientTape() as tape:
            predicted = self.probe(self.encoder(x, training=False))
            p_loss = ops.mean(ops.square(predicted - y))
        gradients = tape.gradient(p_loss, self.probe.trainable_weights)
        self.probe_optimizer.apply_gradients(zip(gradients, self.probe.trainable_weights, strict=True))
        self.p_tracker.update_state(p_loss)
        self.p_error.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


class ByHand(keras.Model):
    """No optimizer at all: the step assigns the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = mlp(WIDTH, 4, 1)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.dense(x) - y))
        for weight, gradient in zip(self.dense.trainable_weights, tape.gradient(loss, self.dense.trainable_weights)):  # noqa: B905
            weight.assign_sub(0.05 * gradient)
        return {"loss": loss}


class Apart(keras.Model):
    """Networks that know nothing of each other: no update waits for another one, but sums over ranks need one order."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = [mlp(WIDTH, units, 1) for units in (2, 40, 7, 19)]
        self.optimizers = [keras.optimizers.Adam(1e-2) for _ in self.nets]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            losses = [keras.ops.mean(keras.ops.square(net(x, training=True) - y)) for net in self.nets]
        found = [tape.gradient(loss, net.trainable_variables) for loss, net in zip(losses, self.nets, strict=True)]
        for optimizer, gradients, net in zip(self.optimizers, found, self.nets, strict=True):
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return {f"loss_{i}": loss for i, loss in enumerate(losses)}


class AsKeras(keras.Model):
    """What the guide begins with: Keras's own losses and metrics, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = layers.Dense(5, "relu", kernel_regularizer="l2"), layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.dense(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


def autoencoder() -> keras.Model:
    model = Autoencoder()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


def distiller() -> keras.Model:
    model = Distiller()
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError())
    return model


def gan(critic_steps: int = 1, penalty: float = 0.0) -> keras.Model:
    model = Gan(critic_steps, penalty)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, momentum=0.5))
    return model


def wasserstein() -> keras.Model:
    return gan(2, 0.5)


def averaged() -> keras.Model:
    model = Averaged()
    model.compile(keras.optimizers.AdamW(0.01))
    return model


def contrastive() -> keras.Model:
    model = Contrastive()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
    return model


def by_hand() -> keras.Model:
    model = ByHand()
    model.compile()
    return model


def apart() -> keras.Model:
    model = Apart()
    model.compile()
    return model


def as_keras() -> keras.Model:
    model = AsKeras()
    model.compile("sgd", "mse", metrics=["mae"])
    return model


#: The model, and whether its batches have labels.
PROGRAMS: dict[str, tuple[Any, bool]] = {
    "autoencoder": (autoencoder, False),
    "distiller": (distiller, True),
    "GAN": (gan, False),
    "WGAN-GP": (wasserstein, False),
    "averaged weights": (averaged, False),
    "contrastive with a probe": (contrastive, True),
    "by hand": (by_hand, True),
    "apart": (apart, True),
    "as Keras": (as_keras, True),
}
