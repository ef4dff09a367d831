"""The models and data that benchmarks share: an MLP, the CNN of jobs/mnist.py, a small ResNet and a small transformer.

Each builder is a function of a Keras-like module, `keras` or `tf_keras`, so that a peer on Keras 2 trains the same
network. None is compiled; `compiled` does that, with the optimizer and loss that all peers use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Examples in one step, over all workers together.
BATCH = 128
LEARNING_RATE = 1e-3
#: Of an image, as MNIST has them, and kinds of them.
IMAGE_SHAPE, CLASSES = (28, 28, 1), 10
#: Bytes of a piece of text, and kinds of them.
CONTEXT, VOCABULARY = 32, 256
#: Of the transformer.
WIDTH, HEADS, BLOCKS = 64, 4, 2
#: Of the ResNet's stages, each of one block of two convolutions.
FILTERS = (16, 32, 64)

#: x and y.
Arrays = tuple[np.ndarray, np.ndarray]


def mlp(keras: Any) -> Any:
    """Return a model with one hidden layer of 500 units, 0.4 M weights."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(IMAGE_SHAPE),
            layers.Rescaling(1 / 255),
            layers.Flatten(),
            layers.Dense(500, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def cnn(keras: Any, units: int = 128) -> Any:
    """Return the network of jobs/mnist.py: two convolutions and a hidden layer, 0.4 M weights; 3146 for each of its
    units."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(IMAGE_SHAPE),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(units, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def resnet(keras: Any) -> Any:
    """Return the ResNet-8 of He et al. for small images, with batch normalization, 0.08 M weights."""
    layers = keras.layers

    def convolution(x: Any, filters: int, size: int, stride: int = 1, active: bool = True) -> Any:
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        return layers.ReLU()(x) if active else x

    inputs = keras.Input(IMAGE_SHAPE)
    x = convolution(layers.Rescaling(1 / 255)(inputs), FILTERS[0], 3)
    for stage, filters in enumerate(FILTERS):
        stride = 2 if stage else 1
        shortcut = convolution(x, filters, 1, stride, active=False) if stage else x
        x = convolution(convolution(x, filters, 3, stride), filters, 3, active=False)
        x = layers.ReLU()(layers.Add()([x, shortcut]))
    outputs = layers.Dense(CLASSES, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def transformer(keras: Any) -> Any:
    """Return the model of jobs/transformer_text.py: causal, over bytes, 0.14 M weights, with logits for each
    position."""
    layers = keras.layers

    class Positions(layers.Layer):  # type: ignore[misc, name-defined]
        """Adds to each byte what tells its place."""

        def build(self, shape: Any) -> None:
            self.table = self.add_weight(name="table", shape=(CONTEXT, WIDTH), initializer="random_normal")

        def call(self, inputs: Any) -> Any:
            return inputs + self.table

    inputs = keras.Input((CONTEXT,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH)(inputs))
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normal, normal, use_causal_mask=True)])
        hidden = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(hidden)])
    return keras.Model(inputs, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


def images(records: int, seed: int = 0) -> Arrays:
    """Return images [n, 28, 28, 1] uint8 of ten patterns under noise, which take some steps to learn, and labels
    [n]."""
    random = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).integers(0, 90, (CLASSES, *IMAGE_SHAPE), np.uint8)
    labels = random.integers(0, CLASSES, records)
    pictures = random.integers(0, 166, (records, *IMAGE_SHAPE), np.uint8)
    pictures += patterns[labels]
    return pictures, labels


def text(records: int, seed: int = 0) -> Arrays:
    """Return pieces [n, 32] int32 in which each byte is mostly a function of the byte before, and the bytes that
    follow."""
    random = np.random.default_rng(seed)
    follows = np.random.default_rng(0).permutation(VOCABULARY)
    pieces = random.integers(0, VOCABULARY, (records, CONTEXT + 1), np.int32)
    known = random.random((records, CONTEXT)) < 0.8
    for place in range(CONTEXT):
        column = pieces[:, place + 1]
        pieces[:, place + 1] = np.where(known[:, place], follows[pieces[:, place]], column)
    return np.ascontiguousarray(pieces[:, :-1]), np.ascontiguousarray(pieces[:, 1:])


@dataclass(frozen=True)
class Model:
    """One of the models.

    Attributes:
        title: for tables.
        build: from a Keras-like module to the model, not compiled.
        data: from a number of records, and a seed, to arrays.
        from_logits: whether it gives logits, or probabilities.
        metrics: names, as Keras has them.
    """

    title: str
    build: Callable[[Any], Any]
    data: Callable[..., Arrays]
    from_logits: bool = False
    metrics: tuple[str, ...] = ("accuracy",)


MODELS = {
    "mlp": Model("MLP", mlp, images),
    "cnn": Model("MNIST CNN", cnn, images),
    "resnet": Model("ResNet-8", resnet, images),
    "transformer": Model("transformer", transformer, text, from_logits=True, metrics=()),
}


def compiled(keras: Any, name: str, **more: Any) -> Any:
    """Return a model of `MODELS`, compiled with Adam and cross-entropy.

    Args:
        keras: `keras` or `tf_keras`.
        name: of the model.
        more: for its `compile`, such as steps_per_execution.
    """
    found = MODELS[name]
    model = found.build(keras)
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=found.from_logits),
        metrics=list(found.metrics),
        **more,
    )
    return model
