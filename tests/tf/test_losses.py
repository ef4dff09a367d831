"""Whatever a model's loss is made of, raytf learns from all of it: a table of models against Keras's own fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from raytf.config.flags import ComputeSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.errors import ModelError
from raytf.training.evaluation import Evaluator
from raytf.training.model import model as models
from raytf.training.model.notes import notes_of
from raytf.training.user.callbacks import Callbacks
from tests.tf.ranks import Alone, train

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

RECORDS, STEPS = 24, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(RECORDS, 6)).astype("float32")
Y = RNG.normal(size=(RECORDS, 3)).astype("float32")
LABELS = RNG.integers(0, 3, RECORDS)
WEIGHT = RNG.uniform(0.2, 2, RECORDS).astype("float32")
#: Sequences of 2 to 7 tokens, so that shards have other numbers of them.
TOKENS = np.where(np.arange(7) < RNG.integers(2, 8, RECORDS)[:, None], RNG.integers(1, 9, (RECORDS, 7)), 0)
STEPS_OF_TOKENS = RNG.normal(size=(RECORDS, 7, 1)).astype("float32")
WEIGHT_OF_TOKENS = RNG.uniform(0.2, 2, (RECORDS, 7)).astype("float32")
MASKED = np.where(TOKENS[..., None] > 0, RNG.normal(size=(RECORDS, 7, 2)), 0).astype("float32")


class AddsLoss(layers.Layer):
    """Hands its input on, and adds `loss(input, training)` where that is any."""

    def __init__(self, loss: Callable[[Any, Any], Any]):
        super().__init__()
        self._added = loss

    def call(self, h, training=False):
        added = self._added(h, training)
        if added is not None:
            self.add_loss(added)
        return h


def sgd(rate: float = 0.01) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate)


def plain(*middle: Callable[[], layers.Layer], last: Any = None, rate: float = 0.01, **compiled: Any):
    """A perceptron with some layers in the middle."""

    def make() -> keras.Model:
        head = last() if last else layers.Dense(3)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), *(m() for m in middle), head])
        model.compile(sgd(rate), **{"loss": "mse", **{k: v() if callable(v) else v for k, v in compiled.items()}})
        return model

    return make


def adds(loss: Callable[[Any, Any], Any]) -> Callable[[], layers.Layer]:
    return lambda: AddsLoss(loss)


def mean_square(h: Any, _: Any) -> Any:
    return 100 * ops.mean(h**2) + 1000


def of_nested_models() -> keras.Model:
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(4, activity_regularizer="l2"), AddsLoss(mean_square)])
    middle = keras.Sequential([keras.Input((5,)), inner, layers.Dense(4, kernel_regularizer="l2")])
    x = keras.Input((6,))
    model = keras.Model(x, layers.Dense(3)(middle(layers.Dense(5)(x))))
    model.compile(sgd(), "mse")
    return model


def of_shared_layer() -> keras.Model:
    shared, penalty = layers.Dense(6, activity_regularizer=keras.regularizers.L2(0.3)), AddsLoss(mean_square)
    x = keras.Input((6,))
    model = keras.Model(x, layers.Dense(3)(penalty(shared(penalty(shared(x))))))
    model.compile(sgd(), "mse")
    return model


class Subclassed(keras.Model):
    """Adds what depends on its inputs, twice a call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(5, bias_regularizer="l1"), layers.Dense(3)

    def call(self, x, training=False):
        h = self.first(x)
        self.add_loss(ops.mean(ops.square(h) * x[:, :1]))
        if training:
            self.add_loss([0.5 * ops.mean(ops.abs(h)), ops.mean(ops.sum(h**2, -1))])
        return self.last(h)


class WithSuper(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return 2 * super().compute_loss(x, y, y_pred, sample_weight) + ops.mean(ops.abs(y_pred))


class WithoutSuper(Subclassed):
    """Keras's own example: a tracker of its own, and a list of metrics without Keras's."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="own")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y_pred - y) ** 2) + ops.sum(self.losses)
        self.tracker.update_state(loss)
        return loss

    @property
    def metrics(self):
        return [self.tracker]


class CallsAgain(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        again = self(x, training=training)  # for Keras, what layers add is then that of this call
        return super().compute_loss(x, y, y_pred, sample_weight, training) + ops.mean((again - y) ** 2)


class Scaled(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 3 * super().compute_loss(x, y, y_pred, sample_weight, training)


class OfEach(Scaled):
    """Adds a loss for each record."""

    def call(self, x, training=False):
        h = self.first(x)
        self.add_loss(0.01 * ops.mean(h**2, -1))
        return self.last(h)


def summed(kind: type[keras.Model]) -> Callable[[], keras.Model]:
    """With a loss that is a sum over the batch."""
    return lambda: subclass(kind, loss=keras.losses.MeanSquaredError(reduction="sum"))()


class OfWeights(layers.Layer):
    """Adds losses of its weight alone, in a list."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, h):
        self.add_loss([ops.sum(self.scale**2), 0.5 * ops.mean(ops.abs(self.scale))])
        return h * self.scale


class AddingCell(layers.SimpleRNNCell):
    def call(self, sequence, states, training=False):
        output, after = super().call(sequence, states, training=training)
        self.add_loss(ops.mean(output**2))
        return output, after


def outside_of_a_call() -> keras.Model:
    """Keras forgets what is added outside of `call`."""
    model = plain(adds(mean_square))()
    model.add_loss(ops.sum(model.layers[0].kernel ** 2))
    return model


def sequences(*middle: Callable[[], layers.Layer]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((7, 2)), *(m() for m in middle), layers.Dense(1)])
        model.compile(sgd(), "mse")
        return model

    return make


def subclass(kind: type[keras.Model], **compiled: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = kind()
        model.build((None, 6))
        model.compile(sgd(), **compiled)
        return model

    return make


def outputs(kind: type, **compiled: Any) -> Callable[[], keras.Model]:
    """A model of two outputs, a dict or a list of them."""

    def make() -> keras.Model:
        x = keras.Input((6,))
        h = AddsLoss(mean_square)(layers.Dense(5, activation="tanh", kernel_regularizer="l2")(x))
        a, b = (
            layers.Dense(3, name="a")(h),
            layers.Dense(1, name="b", activity_regularizer="l2", bias_initializer="ones")(h),
        )
        model = keras.Model(x, {"a": a, "b": b} if kind is dict else [a, b])
        made = {k: v() if callable(v) else v for k, v in compiled.items()}
        model.compile(sgd(), **made)
        return model

    return make


def tokens(*middle: Callable[[], layers.Layer], rate: float = 0.1, **compiled: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True)])
        for layer in (*(m() for m in middle), layers.Dense(1)):
            model.add(layer)
        model.compile(sgd(rate), **{"loss": "mse", **{k: v() if callable(v) else v for k, v in compiled.items()}})
        return model

    return make


def two_of_tokens() -> keras.Model:
    x = keras.Input((7,), dtype="int32")
    h = layers.Embedding(9, 4, mask_zero=True)(x)
    each = layers.Dense(1, name="each")(h)
    model = keras.Model(x, {"each": each, "all": layers.Dense(1, name="all")(layers.GlobalAveragePooling1D()(h))})
    model.compile(sgd(0.1), {"each": "mse", "all": "mae"}, loss_weights={"each": 2.0, "all": 0.5})
    return model


class Doubled(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2 * super().compute_loss(x, y, y_pred, sample_weight, training) + ops.mean(ops.abs(y_pred))


def tokens_twice() -> keras.Model:
    x = keras.Input((7,), dtype="int32")
    model = Doubled(x, layers.Dense(1)(layers.Embedding(9, 4, mask_zero=True)(x)))
    model.compile(sgd(0.1), "mse")
    return model


def masking() -> keras.Model:
    model = keras.Sequential([keras.Input((7, 2)), layers.Masking(), layers.SimpleRNN(4, return_sequences=True)])
    model.add(layers.Dense(1, activity_regularizer="l2"))
    model.compile(sgd(0.1), "mae")
    return model


class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred) ** 3, -1)


def own_function(y_true: Any, y_pred: Any) -> Any:
    return ops.mean((y_true - y_pred) ** 4, -1)


def total_error(y_true: Any, y_pred: Any) -> Any:
    return ops.sum((y_true - y_pred) ** 2)


def autoencoder() -> keras.Model:
    x = keras.Input((6,))
    code = layers.Dense(2)(x)
    mean, spread = layers.Dense(2)(code), layers.Dense(2)(code)
    both = layers.Concatenate()([mean, spread])
    both = AddsLoss(lambda h, _: -0.5 * ops.mean(1 + h[:, 2:] - h[:, :2] ** 2 - ops.exp(h[:, 2:])))(both)
    model = keras.Model(x, layers.Dense(6)(both))
    model.compile(sgd(), "mse")
    return model


def loss(name: str, **options: Any) -> Callable[[], keras.losses.Loss]:
    return lambda: getattr(keras.losses, name)(**options)


class Case(NamedTuple):
    """A model, its data, and more that both ways to train are given."""

    make: Callable[[], keras.Model]
    data: tuple[Any, ...] = (X, Y)
    class_weight: dict[int, float] | None = None


WEIGHTED = {"reduction": "mean_with_sample_weight"}
L2 = {"kernel_regularizer": "l2", "bias_regularizer": "l1", "activity_regularizer": "L1L2", "bias_initializer": "ones"}
TWO = (X, {"a": Y, "b": X[:, :1]})
LISTED = (X, [Y, X[:, :1]])
SPARSE = {"loss": loss("SparseCategoricalCrossentropy", from_logits=True)}
CASES = {
    "add_loss in a layer": Case(plain(adds(mean_square))),
    "add_loss of an input": Case(plain(adds(lambda h, _: ops.mean(h[:, 0] * ops.sum(h, -1))))),
    "add_loss when training": Case(plain(adds(lambda h, t: ops.mean(h**2) if t else None))),
    "add_loss by training": Case(plain(adds(lambda h, t: ops.mean(h**2) * (3 if t else 1)))),
    "add_loss of whole numbers": Case(plain(adds(lambda h, _: ops.cast(7, "int32")))),
    "add_loss of a vector": Case(plain(adds(lambda h, _: ops.mean(h**2, 0)))),
    "add_loss alone": Case(plain(adds(mean_square), loss=None), (X,)),
    "add_loss alone, when training": Case(plain(adds(lambda h, t: ops.mean(h**2) if t else None), loss=None), (X,)),
    "regularizers alone": Case(plain(lambda: layers.Dense(4, **L2), loss=None), (X,)),
    "ActivityRegularization": Case(plain(lambda: layers.ActivityRegularization(l1=0.2, l2=1.0))),
    "activity_regularizer": Case(plain(lambda: layers.Dense(4, activity_regularizer="l2"))),
    "kernel, bias and activity": Case(plain(lambda: layers.Dense(4, **L2), adds(mean_square))),
    "orthogonal": Case(plain(lambda: layers.Dense(4, kernel_regularizer="orthogonal_regularizer"))),
    "nested models": Case(of_nested_models),
    "a layer used twice": Case(of_shared_layer),
    "a subclassed model": Case(subclass(Subclassed, loss="mse")),
    "compute_loss with super": Case(subclass(WithSuper, loss="mse")),
    "compute_loss without super": Case(subclass(WithoutSuper)),
    "one loss weight": Case(plain(adds(mean_square), loss_weights=0.25)),
    "dict of outputs": Case(
        outputs(dict, loss={"a": "mse", "b": "mae"}, loss_weights={"a": 0.5, "b": 3.0}, metrics={"b": ["mae"]}), TWO
    ),
    "list of outputs": Case(outputs(list, loss=["mse", "mae"], loss_weights=[0.5, 3.0]), LISTED),
    "one loss for two outputs": Case(outputs(list, loss="mse"), LISTED),
    "an output without a loss": Case(outputs(dict, loss={"a": "mse", "b": None}), TWO),
    "weights of each output": Case(
        outputs(dict, loss={"a": "mse", "b": "mae"}, weighted_metrics={"a": ["mae"], "b": ["mae"]}),
        (*TWO, {"a": WEIGHT, "b": WEIGHT[::-1].copy()}),
    ),
    "weights for both outputs": Case(outputs(dict, loss={"a": "mse", "b": "mae"}), (*TWO, WEIGHT)),
    "sample weights": Case(plain(adds(mean_square)), (X, Y, WEIGHT)),
    "class weights": Case(plain(adds(mean_square), **SPARSE), (X, LABELS), {0: 0.5, 1: 2.0, 2: 1.0}),
    "class weights of smoothed labels": Case(plain(), (X, np.where(X[:, :3] > 0, 0.9, 0.1)), {0: 0.5, 2: 4.0}),
    "class weights of labels below 0": Case(
        plain(last=lambda: layers.Dense(1)), (X, LABELS[:, None] - 0.9), {0: 0.5, 1: 2.0}
    ),
    "summed": Case(
        plain(
            lambda: layers.Dense(4, **L2), adds(mean_square), loss=loss("MeanSquaredError", reduction="sum"), rate=1e-3
        )
    ),
    "not reduced": Case(plain(loss=loss("MeanSquaredError", reduction=None), rate=1e-3), (X, Y, WEIGHT)),
    "a loss of one's own": Case(plain(adds(mean_square), loss=OwnLoss)),
    "a function": Case(plain(adds(mean_square), loss=lambda: own_function)),
    "autoencoder": Case(autoencoder, (X, X)),
    "weighted mean": Case(plain(adds(mean_square), loss=loss("MeanSquaredError", **WEIGHTED)), (X, Y, WEIGHT)),
    "weighted mean of classes": Case(
        plain(loss=loss("SparseCategoricalCrossentropy", from_logits=True, **WEIGHTED)),
        (X, LABELS),
        {0: 0.5, 1: 2.0, 2: 1},
    ),
    "an ignored class": Case(
        plain(loss=loss("SparseCategoricalCrossentropy", from_logits=True, ignore_class=1)), (X, LABELS)
    ),
    "masks": Case(tokens(adds(mean_square)), (TOKENS, STEPS_OF_TOKENS)),
    "masks and weights": Case(tokens(), (TOKENS, STEPS_OF_TOKENS, WEIGHT_OF_TOKENS)),
    "masks and a weighted mean": Case(
        tokens(loss=loss("MeanSquaredError", **WEIGHTED)), (TOKENS, STEPS_OF_TOKENS, WEIGHT_OF_TOKENS)
    ),
    "masks and a sum": Case(
        tokens(loss=loss("MeanSquaredError", reduction="sum"), rate=1e-3), (TOKENS, STEPS_OF_TOKENS)
    ),
    "Masking before an RNN": Case(masking, (MASKED, STEPS_OF_TOKENS)),
    "masks for one output of two": Case(two_of_tokens, (TOKENS, {"each": STEPS_OF_TOKENS, "all": Y[:, :1]})),
    "masks in compute_loss": Case(tokens_twice, (TOKENS, STEPS_OF_TOKENS)),
}
CASES |= {
    "add_loss of each record": Case(plain(adds(lambda h, _: 0.3 * ops.mean(h**2, -1)))),
    "add_loss of each record and place": Case(plain(adds(lambda h, _: 0.1 * h**2), rate=1e-3)),
    "add_loss of each record, as a mean": Case(
        plain(adds(lambda h, _: h[:, 0] ** 2 / ops.cast(ops.shape(h)[0], "float32")))
    ),
    "add_loss of a sum over records": Case(plain(adds(lambda h, _: 0.1 * ops.sum(h**2)), rate=1e-3)),
    "add_loss of each record when training": Case(
        plain(adds(lambda h, t: ops.mean(h**2, -1) if t else None), rate=1e-3)
    ),
    "add_loss of each record alone": Case(plain(adds(lambda h, _: ops.mean(h**2, -1)), loss=None, rate=1e-3), (X,)),
    "add_loss of each record, and means": Case(
        plain(adds(lambda h, _: [ops.mean(h**2, -1), ops.mean(h**2)]), lambda: layers.Dense(4, **L2), rate=1e-3)
    ),
    "a function that sums": Case(plain(loss=lambda: total_error, rate=1e-3)),
}


PARTS = {"activity_regularizer": "l2", "kernel_regularizer": "l2", "return_sequences": True}
SEQUENCES = (RNG.normal(size=(RECORDS, 7, 2)).astype("float32"), STEPS_OF_TOKENS)
CASES |= {
    "compute_loss scales losses of each record": Case(subclass(OfEach, loss="mse")),
    "sums, and losses of each record": Case(summed(OfEach)),
    "add_loss of weights, in a list": Case(plain(OfWeights)),
    "add_loss outside of a call": Case(outside_of_a_call),
    "a function regularizes": Case(
        plain(lambda: layers.Dense(4, activity_regularizer=lambda h: 0.1 * ops.sum(ops.abs(h))))
    ),
    "compute_loss calls the model again": Case(subclass(CallsAgain, loss="mse")),
    "compute_loss scales": Case(subclass(Scaled, loss="mse")),
    "compute_loss scales sums": Case(summed(Scaled)),
    "compute_loss adds to sums": Case(summed(WithSuper)),
    "add_loss in TimeDistributed": Case(sequences(lambda: layers.TimeDistributed(AddsLoss(mean_square))), SEQUENCES),
    "regularizers in TimeDistributed": Case(
        sequences(lambda: layers.TimeDistributed(layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2"))),
        SEQUENCES,
    ),
    "an RNN": Case(sequences(lambda: layers.LSTM(4, **PARTS, recurrent_regularizer="l2")), SEQUENCES),
    "an RNN in both directions": Case(sequences(lambda: layers.Bidirectional(layers.GRU(4, **PARTS))), SEQUENCES),
    "a cell of an unrolled RNN": Case(
        sequences(lambda: layers.RNN(AddingCell(4), return_sequences=True, unroll=True)), SEQUENCES
    ),
}


def same(ours: Any, theirs: Any, what: str) -> None:
    """To 1e-6 of a tensor's largest number."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max(), f"{what}: {ours} instead of {theirs}"


def reference(case: Case) -> tuple[keras.Model, dict[str, list[float]], dict[str, float]]:
    """Keras's own model, history, and evaluation."""
    keras.utils.set_random_seed(0)
    model = case.make()
    data = dict(zip(("x", "y", "sample_weight"), case.data, strict=False))
    history = model.fit(
        **data, batch_size=RECORDS, epochs=STEPS, shuffle=False, verbose=0, class_weight=case.class_weight
    ).history
    try:
        evaluated = model.evaluate(**data, batch_size=RECORDS, verbose=0, return_dict=True)
    except ValueError:  # no loss but in training
        evaluated = {"loss": 0.0}
    return model, history, evaluated


@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_those_of_keras(name: str):
    check(CASES[name], ((4, 1),))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_three_steps_equal_keras_on_other_numbers_of_shards_and_ranks(name: str):
    check(CASES[name], ((1, 1), (2, 2), (4, 2), (8, 3)))


def check(case: Case, worlds: Sequence[tuple[int, int]]) -> None:
    """Compare with Keras, for pairs of (logical shards, ranks)."""
    model, history, evaluated = reference(case)
    for shards, world_size in worlds:
        ranks = train(
            case.make,
            ArraySource(*case.data),
            RECORDS,
            shards,
            STEPS,
            world_size,
            shuffle=False,
            class_weight=case.class_weight,
        )
        for ours, losses in ranks:
            same(losses[0], history.get("loss", history.get("own"))[0], f"{shards} shards, first loss")
            for mine, theirs in zip(ours.trainable_weights, model.trainable_weights, strict=True):
                same(mine.numpy(), theirs.numpy(), f"{shards} shards, {theirs.path}")
            for key, value in ours.get_metrics_result().items():
                same(float(value), history[key][-1], f"{shards} shards, {key}")
        source = ArraySource(*case.data)
        pipeline = Pipeline(source, StepPlan(RECORDS, RECORDS, shards), range(shards), seed=0, shuffle=False)
        logs = Evaluator(ours, pipeline, Alone(), Callbacks([], ours, Alone(), print, ".", {}, None)).run()
        pipeline.close()
        for key, value in evaluated.items():
            same(logs[key], value, f"{shards} shards, evaluated {key}")


@pytest.mark.parametrize("name", CASES)
def test_no_loss_that_can_be_cut_is_called_one_of_the_whole_batch(name: str):
    assert warnings_of(CASES[name]) == []


def warnings_of(case: Case) -> list[str]:
    """What is said before a model is trained in 4 shards."""
    source = ArraySource(*case.data)
    pipeline = Pipeline(source, StepPlan(RECORDS, RECORDS, 4), range(4), seed=0, class_weight=case.class_weight)
    model = models.build(case.make, pipeline.sample(8), [source], ComputeSection(), 0, records=(6, RECORDS))
    pipeline.close()
    return notes_of(model).take_remarks()


def dice(y_true: Any, y_pred: Any) -> Any:
    return 1 - (2 * ops.sum(y_true * y_pred) + 1) / (ops.sum(y_true) + ops.sum(y_pred) + 1)


def contrastive(y_true: Any, y_pred: Any) -> Any:
    logits = ops.matmul(y_true, ops.transpose(y_pred))
    labels = ops.arange(ops.shape(logits)[0])
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def noisy(*made: Callable[[], layers.Layer], **compiled: Any) -> Callable[[], keras.Model]:
    return plain(layers.BatchNormalization, lambda: layers.Dropout(0.5), *made, **compiled)


OF_THE_BATCH = {
    "Dice": Case(plain(loss=lambda: dice), (X, ops.convert_to_numpy(ops.one_hot(LABELS, 3)))),
    "Dice of Keras": Case(plain(loss=loss("Dice")), (X, ops.convert_to_numpy(ops.one_hot(LABELS, 3)))),
    "contrastive": Case(plain(loss=lambda: contrastive)),
    "add_loss": Case(plain(adds(lambda h, _: ops.logsumexp(ops.matmul(h, ops.transpose(h)))))),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_a_loss_of_the_whole_batch_is_named(name: str):
    (warning,) = warnings_of(OF_THE_BATCH[name])
    assert "looks at the whole batch" in warning
    assert "--logical-shards 1" in warning


def test_layers_that_look_at_the_batch_are_no_such_loss():
    sampled = adds(lambda h, _: ops.mean((h + keras.random.normal(ops.shape(h), seed=1)) ** 2))
    assert warnings_of(Case(noisy())) == []
    assert warnings_of(Case(noisy(sampled, loss="mae"))) == []


def test_a_model_whose_loss_is_nowhere_is_refused():
    source = ArraySource(X)
    with pytest.raises(ModelError, match="no layer adds one"):
        train(plain(loss=None), source, RECORDS, 1, 1)


@pytest.mark.parametrize("is_one_hot", [True, False])
def test_class_weights_of_positions_are_those_of_keras_with_a_dataset(is_one_hot: bool):
    labels, weights = RNG.integers(0, 3, (RECORDS, 7)), {0: 0.5, 2: 4.0}
    y = np.eye(3, dtype="float32")[labels] if is_one_hot else labels[..., None]

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((7, 2)), layers.Dense(3)])
        kind = keras.losses.CategoricalCrossentropy if is_one_hot else keras.losses.SparseCategoricalCrossentropy
        model.compile(sgd(), kind(from_logits=True))
        return model

    keras.utils.set_random_seed(0)
    model = make()
    dataset = tf.data.Dataset.from_tensor_slices((SEQUENCES[0], y)).batch(RECORDS)
    losses = model.fit(dataset, epochs=STEPS, verbose=0, class_weight=weights).history["loss"]
    for shards in (1, 4):
        source = ArraySource(SEQUENCES[0], y)
        [(ours, found)] = train(make, source, RECORDS, shards, STEPS, shuffle=False, class_weight=weights)
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for mine, theirs in zip(ours.trainable_weights, model.trainable_weights, strict=True):
            same(mine.numpy(), theirs.numpy(), f"{shards} shards, {theirs.path}")
