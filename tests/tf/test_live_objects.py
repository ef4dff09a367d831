"""Keras objects that travel: each computes, trains and is counted in another process as it was here."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from ray import cloudpickle

from raytf.training.user.user_code import Parcel, opened, packed

RNG = np.random.default_rng(0)
X, Y = RNG.random((16, 8), np.float32), RNG.integers(0, 3, 16)
IMAGES = RNG.random((16, 8, 8, 3), np.float32)

pytestmark = pytest.mark.gate


def copied(value):
    """Return what another process would get of a value."""
    return opened(packed(value).body)[0]


def compiled(model: keras.Model, loss: str = "mse", **options) -> keras.Model:
    model.compile(loss=loss, **{"optimizer": "adam", **options})
    return model


class Tower(keras.Model):
    """Of a class without get_config, with layers in lists and dicts, a tracker and a generator of its own."""

    def __init__(self, encoder: keras.Model, units: int):
        super().__init__()
        self.encoder, self.head = encoder, layers.Dense(units)
        self.more = [layers.Dense(4), {"a": layers.Dense(2)}]
        self.tracker = keras.metrics.Mean(name="tracked")
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        y = self.head(self.encoder(x)) + keras.ops.sum(self.more[0](x)) + keras.ops.sum(self.more[1]["a"](x))
        return keras.random.dropout(y, 0.2, seed=self.seeds) if training else y


def frozen() -> keras.Model:
    base = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.BatchNormalization()])
    base.trainable = False
    inputs = keras.Input((8,))
    return compiled(keras.Model(inputs, layers.Dense(3)(base(inputs, training=False))), optimizer="rmsprop")


def recurrent() -> keras.Model:
    inputs = keras.Input((None,))
    x = layers.Bidirectional(layers.LSTM(4))(layers.Embedding(10, 4, mask_zero=True)(inputs))
    return compiled(keras.Model(inputs, layers.Dense(3)(x)))


def shared() -> keras.Model:
    a, b = keras.Input((8,)), keras.Input((8,))
    dense = layers.Dense(4)
    return compiled(keras.Model([a, b], layers.Dense(1)(layers.Add()([dense(a), dense(b)]))))


def attention() -> keras.Model:
    inputs = keras.Input((8, 1))
    x = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(inputs, inputs) + inputs)
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x))))


def augmented() -> keras.Model:
    parts = [layers.RandomFlip(seed=1), layers.RandomRotation(0.1, seed=2), layers.Conv2D(4, 3)]
    parts += [layers.GlobalMaxPooling2D(), layers.Lambda(lambda t: t * 2), layers.Dense(1)]
    return compiled(keras.Sequential([keras.Input((8, 8, 3)), *parts]))


def scaled() -> keras.Model:
    rate = keras.optimizers.schedules.CosineDecay(0.01, 100)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, dtype="mixed_float16"), layers.Dense(3)])
    return compiled(model, optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate)))


def deep() -> keras.Model:
    inputs = x = keras.Input((8,))
    for _ in range(400):
        x = layers.Activation("tanh")(x)
    return compiled(keras.Model(inputs, layers.Dense(3)(x)))


CASES = {
    "sequential": (lambda: compiled(keras.Sequential([keras.Input((8,)), layers.Dense(3)]), metrics=["mae"]), X),
    "a class": (lambda: compiled(Tower(keras.Sequential([layers.Dense(5)]), 3), "sparse_categorical_crossentropy"), X),
    "averages": (lambda: compiled(frozen(), optimizer=keras.optimizers.AdamW(1e-3, use_ema=True)), X),
    "frozen": (frozen, X),
    "recurrent": (recurrent, RNG.integers(0, 10, (16, 5))),
    "shared": (shared, [X, X[::-1].copy()]),
    "attention": (attention, X[..., None]),
    "augmented": (augmented, IMAGES),
    "scaled": (scaled, X),
    "deep": (deep, X),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_goes_on_as_it_would_have_here(name: str):
    make, x = CASES[name]
    ours = make()
    y = Y if ours.loss == "sparse_categorical_crossentropy" else X[:, : ours(x).shape[-1]]
    ours.fit(x, y, batch_size=8, verbose=0)
    theirs = copied(ours)
    assert theirs is not ours
    assert [v.path for v in theirs.variables] == [v.path for v in ours.variables]
    assert [v.path for v in theirs.trainable_variables] == [v.path for v in ours.trainable_variables]
    np.testing.assert_array_equal(theirs.predict(x, verbose=0), ours.predict(x, verbose=0))
    histories = []
    for model in (ours, theirs):
        keras.utils.set_random_seed(1)
        histories.append(model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history)
    assert histories[0] == histories[1]
    for a, b in zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_a_graph_is_described_as_it_was():
    model = shared()
    again = copied(model)
    assert keras.saving.serialize_keras_object(again) == keras.saving.serialize_keras_object(model)
    assert again.layers[2] is again.get_layer(model.layers[2].name)


def test_what_was_set_to_be_trained_later_is_trained():
    model = copied(frozen())
    before = len(model.trainable_variables)
    model.layers[1].trainable = True
    assert len(model.trainable_variables) > before
    model.new = layers.Dense(2)  # tracked as in a model that was made here
    model.new.build((None, 3))
    assert any(v is model.new.kernel for v in model.trainable_variables)


def test_a_function_brings_the_layers_and_tensors_that_it_names():
    dense, scale = layers.Dense(3), tf.constant([1.0, 2.0, 3.0])
    dense.build((None, 8))
    again = copied(lambda x: dense(x) * scale)
    np.testing.assert_array_equal(again(X), dense(X) * scale)


def test_one_object_stays_one():
    model = frozen()
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.name)
    both = copied({"model": model, "callback": callback})
    (cell,) = both["callback"].on_epoch_end.__closure__
    assert cell.cell_contents is both["model"]


def test_vocabularies_come_along():
    words = tf.constant(["a b", "c z"])
    vectors, lookup = layers.TextVectorization(output_sequence_length=3), layers.StringLookup(vocabulary=["a", "c"])
    vectors.adapt(["a b c", "b c d"])
    again = copied((vectors, lookup))
    np.testing.assert_array_equal(again[0](words), vectors(words))
    np.testing.assert_array_equal(again[1](tf.constant(["c", "x"])), lookup(tf.constant(["c", "x"])))
    assert again[0].get_vocabulary() == vectors.get_vocabulary()


@pytest.mark.parametrize(
    "value",
    [
        tf.constant([1, 2]),
        tf.constant(["a"]),
        tf.ragged.constant([[1], [2, 3]]),
        tf.sparse.from_dense([[0, 1]]),
        tf.cast([1.5], tf.bfloat16),
        tf.Variable([1.0, 2.0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_tensorflow(value):
    again = copied(value)
    assert (type(again), again.dtype, again.shape) == (type(value), value.dtype, value.shape)
    dense = [tf.sparse.to_dense(v) if isinstance(v, tf.SparseTensor) else v for v in (value, again)]
    assert repr(dense[0]) == repr(dense[1])


def test_tables():
    filled = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [4]), -1)
    changing = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 9)
    changing.insert(["b"], [7])
    for table, key, value, other in ((filled, "a", 4, -1), (changing, "b", 7, 9)):
        again = copied(table)
        assert again.lookup(tf.constant([key, "x"])).numpy().tolist() == [value, other]


def test_a_tensor_of_a_graph_is_refused_by_name():
    with tf.Graph().as_default():
        tensor = tf.compat.v1.placeholder(tf.float32, name="there")
    with pytest.raises(TypeError, match="'there:0' is part of a graph"):
        packed(tensor)


def test_a_parcel_is_closed_until_it_is_asked(tmp_path: Path):
    mark = tmp_path / "opened"

    class Loud:
        def __reduce__(self):
            return Path.touch, (mark,)

    parcel = cloudpickle.loads(cloudpickle.dumps(Parcel([Loud()])))
    again = cloudpickle.loads(cloudpickle.dumps(parcel))  # one that nobody has opened goes on as it is
    assert not mark.exists()
    assert again.get() == [None]
    assert mark.exists()
    assert again.get() is again.get()


@pytest.mark.parametrize("calls_python", [False, True])
def test_a_callback_brings_its_data_set(calls_python: bool):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), 0)
    data = tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).map(table.lookup).batch(2)
    if calls_python:
        data = data.map(lambda x: tf.numpy_function(lambda y: y + 1, [x], tf.int32))
    found = copied(data)
    assert [batch.numpy().tolist() for batch in found] == [batch.numpy().tolist() for batch in data]
    assert found.cardinality() == 2
    assert found.element_spec == data.element_spec


def test_a_data_set_that_cannot_leave_its_process_says_why():
    endless = tf.data.Dataset.range(3).map(lambda x: tf.numpy_function(lambda y: y, [x], tf.int64)).repeat()
    with pytest.raises(TypeError, match=r"an infinite tf\.data\.Dataset that calls a Python function"):
        packed(endless)


def test_a_function_that_was_traced_is_traced_again_there():
    model = compiled(keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
    model.predict(np.zeros((2, 4)), verbose=0)
    model.twice = tf.function(lambda x: 2 * model(x))
    x = np.ones((3, 4), np.float32)
    expected = model.twice(x).numpy()
    again = copied(model)
    np.testing.assert_array_equal(again.twice(x).numpy(), expected)
    again.layers[0].kernel.assign(2 * again.layers[0].kernel)
    again.layers[0].bias.assign(2 * again.layers[0].bias)
    np.testing.assert_allclose(again.twice(x).numpy(), 2 * expected)
