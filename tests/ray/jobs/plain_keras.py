"""A Keras program that knows nothing of raytf: a base that is frozen first and tuned then, layers and a tensor at
module level, a class without get_config, a loss and a metric of its own, the History; and data as arrays, as a data set
that shuffles and augments with a layer, and as a generator without end for a model with a `train_step` of its own: two
optimizers that work against each other, a table, and an average of weights that follows."""

import hashlib
import json
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

epochs = int(sys.argv[1])
RECORDS, SIZE = 403, 50
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(RECORDS, 8)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int64")

activation = layers.LeakyReLU(0.2)
scale = keras.ops.convert_to_tensor([1.0, 2.0])


class Classifier(keras.Model):
    def __init__(self, base, classes):
        super().__init__()
        self.base, self.head = base, layers.Dense(classes)

    def call(self, inputs):
        return self.head(activation(self.base(inputs))) * scale


class Unequal(keras.metrics.Metric):
    """How far the number of times that a record was seen is from the mean, at the most."""

    def __init__(self):
        super().__init__(name="unequal")
        self.seen = self.add_weight(shape=(RECORDS,), initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = keras.ops.cast(y_true[:, 1], "int32")
        self.seen.assign_add(keras.ops.sum(keras.ops.one_hot(ids, RECORDS), 0))

    def result(self):
        return keras.ops.max(keras.ops.abs(self.seen - keras.ops.mean(self.seen)))


class Adversarial(keras.Model):
    """A critic learns to tell a label from the classifier's scores, and the classifier to be believed by it."""

    def __init__(self, classifier):
        super().__init__()
        self.classifier = classifier
        self.critic = keras.Sequential([keras.Input((2,)), layers.Dense(8, "relu"), layers.Dense(1)])
        self.table = layers.Embedding(2, 2)
        self.slow = keras.models.clone_model(self.critic)
        self.tracker, self.unequal = keras.metrics.Mean(name="critic_loss"), Unequal()

    def compile(self, own, critics):
        super().compile()
        self.own_optimizer, self.critic_optimizer = own, critics

    @property
    def metrics(self):
        return [self.tracker, self.unequal]

    def train_step(self, data):
        x, both = data
        with tf.GradientTape() as tape:
            real, made = self.critic(self.table(both[:, 0])), self.critic(self.classifier(x, training=True))
            critic_loss = tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(tf.nn.softplus(made))
        weights = self.critic.trainable_variables + self.table.trainable_variables
        self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            scores = self.classifier(x, training=True)
            own_loss = tf.reduce_mean(loss(both[:, :1], scores)) + 0.1 * tf.reduce_mean(self.critic(scores) ** 2)
        weights = self.classifier.trainable_variables
        self.own_optimizer.apply_gradients(zip(tape.gradient(own_loss, weights), weights, strict=True))
        for weight, average in zip(self.critic.weights, self.slow.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.tracker.update_state(critic_loss)
        self.unequal.update_state(both, scores)
        return {metric.name: metric.result() for metric in self.metrics}


def loss(labels, scores):
    return keras.losses.sparse_categorical_crossentropy(labels, scores / scale, from_logits=True)


base = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(16)])
model = Classifier(base, 2)
base.trainable = False
model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
first = model.fit(x, y, batch_size=len(x), epochs=6, validation_split=0.25, shuffle=False, verbose=0)

drawn = np.random.random()

base.trainable = True
model.compile(keras.optimizers.Adam(1e-3), lambda both, scores: loss(both[:, :1], scores), metrics=[Unequal()])
numbered = np.stack([y, np.arange(RECORDS)], 1)
noise = layers.GaussianNoise(0.1)
data = tf.data.Dataset.from_tensor_slices((x, numbered))
augmented = data.shuffle(RECORDS).batch(SIZE).map(lambda x, y: (noise(x, training=True), y))
second = model.fit(augmented, epochs=6 + epochs, initial_epoch=6, validation_data=data.batch(100), verbose=0)


def batches():
    draws = np.random.default_rng(7)
    while True:
        order = draws.permutation(RECORDS)
        for i in range(0, RECORDS, SIZE):
            yield x[order[i : i + SIZE]], numbered[order[i : i + SIZE]]


pair = Adversarial(model)
pair.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3))
third = pair.fit(batches(), epochs=epochs, steps_per_epoch=-(-RECORDS // SIZE), verbose=0)

told = {
    "first": first.history,
    "unequal": [max(history.history["unequal"]) for history in (second, third)],
    "losses": [second.history, third.history],
    "drawn": drawn,
    "epochs": [history.epoch for history in (first, second, third)],
    "kind": type(third).__name__,
    "own": third.model is pair and pair.history is third and second.model is model,
    "iterations": [int(each.iterations) for each in (model.optimizer, pair.own_optimizer, pair.critic_optimizer)],
    "evaluated": model.evaluate(x, numbered, verbose=0, return_dict=True),
    "weights": hashlib.sha256(b"".join(w.tobytes() for w in pair.get_weights())).hexdigest(),
}
print("TOLD", json.dumps(told))
