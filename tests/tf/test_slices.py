"""Gradients of embeddings: optimizers make of them what Keras does on one machine, for every number of ranks."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

from raytf.checkpoint.variables import weights_sha256
from raytf.config.flags import ComputeSection
from raytf.data.sources import ArraySource
from raytf.data.sources.batches import plan_of, recorded
from raytf.data.streams import from_tf_dataset
from raytf.distributed.allreduce.reduction import Overlap
from raytf.distributed.encoding import wire
from raytf.distributed.encoding.sparse_gradients import SliceLayout, gather, unique_rows
from raytf.distributed.encoding.wire import WorkerPart
from raytf.storage.storage import Storage
from tests.tf.ranks import Rank, World, train

RNG = np.random.default_rng(0)
ROWS, RECORDS, BATCH, STEPS = 23, 44, 16, 9  # the last step of an epoch is a part of a batch
IDS = RNG.integers(0, ROWS, (RECORDS, 5)).astype(np.int32)
Y = RNG.normal(size=(RECORDS, 1)).astype(np.float32)


def tower(optimizer: Callable[[], Any], width: int = 3, **options: Any) -> Callable[[], keras.Model]:
    """Two lookups in one table, a table of its own for the first column, and dense layers."""

    def factory() -> keras.Model:
        inputs = keras.Input((5,), dtype="int32")
        table = layers.Embedding(ROWS, width, **options)
        h = layers.Concatenate()([layers.Flatten()(table(inputs[:, :3])), layers.Flatten()(table(inputs[:, 2:]))])
        first = layers.Flatten()(layers.Embedding(ROWS, 2)(inputs[:, :1]))
        model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([layers.Dense(4, "tanh")(h), first])))
        model.compile(optimizer(), "mse", metrics=["mae"])
        return model

    return factory


def lookups_only() -> keras.Model:
    """A model whose every trainable weight is a table."""
    inputs = keras.Input((5,), dtype="int32")
    user, item = layers.Embedding(ROWS, 4)(inputs[:, 0]), layers.Embedding(ROWS, 4)(inputs[:, 1])
    model = keras.Model(inputs, layers.Dot(1)([user, item]))
    model.compile(optimizers.Adam(0.05), "mse")
    return model


def alone(factory: Callable[[], keras.Model]) -> tuple[keras.Model, list[float]]:
    """Plain Keras: the model and the loss of each step."""
    keras.utils.set_random_seed(0)
    model, losses = factory(), []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            model.reset_metrics()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(logs["loss"])

    model.fit(IDS, Y, BATCH, epochs=STEPS // 3, shuffle=False, verbose=0, callbacks=[Losses()])
    return model, losses


def run(factory: Callable[[], keras.Model], shards: int, ranks: int, **options: Any) -> list[tuple[Any, np.ndarray]]:
    """As raytf trains on batches that a program makes: with Keras's records in every step."""
    batches = from_tf_dataset(tf.data.Dataset.from_tensor_slices((IDS, Y)).batch(BATCH), "train", None, 0)
    source = recorded(batches, Storage(tempfile.mkdtemp()), print)  # where it writes nothing
    return train(factory, source, BATCH, shards, STEPS, ranks, **options)


def run_arrays(factory: Callable[[], keras.Model], shards: int, ranks: int, **options: Any) -> list[Any]:
    return train(factory, ArraySource(IDS, Y), BATCH, shards, STEPS, ranks, shuffle=False, **options)


CASES = {
    "Adam": tower(lambda: optimizers.Adam(0.05)),
    "an odd width and clipped norms": tower(lambda: optimizers.AdamW(0.05, global_clipnorm=0.3), 5),
    "SGD": tower(lambda: optimizers.SGD(0.5)),
    "Adagrad": tower(lambda: optimizers.Adagrad(0.5)),
    "a regularizer, which makes the gradient dense": tower(lambda: optimizers.Adam(0.05), embeddings_regularizer="l2"),
    "gradients that are added over two steps": tower(lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2)),
    "nothing but tables": lookups_only,
}


#: For each case how it is run: logical shards, ranks, the data, and whether in fixed point.
FEW = ((1, 1, run_arrays, True), (4, 3, run, True))
RUNS = dict.fromkeys(CASES, FEW) | {"Adam": (*FEW, (4, 1, run, True), (4, 3, run, False))}


#: Cases of which others have all parts: Adagrad squares slices as Adam does.
TWINS = {"Adagrad", "SGD", "an odd width and clipped norms"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TWINS)) for name in CASES])
def test_tables_are_trained_as_in_keras(name: str):
    reference, losses = alone(CASES[name])
    ends = set()
    for shards, ranks, run_on, exact in RUNS[name]:
        for model, own in run_on(CASES[name], shards, ranks, exact=exact):
            np.testing.assert_allclose(own, losses, rtol=1e-5, atol=1e-6)
            for mine, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
            if shards == 4 and exact:
                ends.add(weights_sha256(model))
    assert len(ends) == 1, "the bits depend on the number of ranks"


@pytest.mark.parametrize(
    "options",
    [
        {"words": wire.DEVICE},
        {"overlap": Overlap(64, 4)},
        {"compress": True},
        {"compute": ComputeSection(jit=True)},
    ],
    ids=["words of GPUs", "overlap", "compressed", "XLA"],
)
def test_every_way_to_reduce_takes_slices(options: dict[str, Any]):
    factory = CASES["Adam"]
    ends = {weights_sha256(model) for ranks in (1, 2) for model, _ in run_arrays(factory, 4, ranks, **options)}
    assert len(ends) == 1
    if "words" in options or "overlap" in options:
        assert ends == {weights_sha256(run_arrays(factory, 4, 1)[0][0])}


class Counted(World):
    """Counts the bytes that are summed."""

    sent = 0

    def all_reduce(self, rank: int) -> Any:
        add = super().all_reduce(rank)

        def note(size: np.ndarray) -> np.ndarray:
            Counted.sent += int(size)
            return size

        def counted(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            size = tf.add_n([tf.size(t) * t.dtype.size for t in tensors])
            with tf.control_dependencies([tf.numpy_function(note, [size], size.dtype)]):
                return add([tf.identity(t) for t in tensors])

        return counted


def test_what_is_sent_does_not_grow_with_the_table(monkeypatch: pytest.MonkeyPatch):
    def factory(rows: int) -> Callable[[], keras.Model]:
        def make() -> keras.Model:
            inputs = keras.Input((5,), dtype="int32")
            model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layers.Embedding(rows, 4)(inputs))))
            model.compile("sgd", "mse")
            return model

        return make

    sent = []
    monkeypatch.setattr("tests.tf.ranks.World", Counted)
    for rows in (ROWS, 1000 * ROWS):
        monkeypatch.setattr(Counted, "sent", 0)
        run_arrays(factory(rows), 2, 2)
        sent.append(Counted.sent)
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_a_step_reads_and_writes_rows_and_no_table(optimizer: str):
    def factory() -> keras.Model:
        inputs = keras.Input((5,), dtype="int32")
        model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layers.Embedding(ROWS, 3)(inputs))))
        model.compile(getattr(optimizers, optimizer)(0.1), "mse")
        return model

    source = ArraySource(IDS, Y)
    plan = plan_of(source, BATCH, 2)
    rank = Rank(factory, source, plan, range(2), None, shuffle=False)
    rank.step.trace()
    rank.train(0, 3)
    operations: Counter[str] = Counter()
    graph = rank.step.functions()[0].get_concrete_function().graph.as_graph_def(add_shapes=True)
    for function in graph.library.function:
        of_table = {n.name for n in function.node_def if [ROWS, 3] in _shapes(n)}
        takers = [n for n in function.node_def if of_table & {i.partition(":")[0].lstrip("^") for i in n.input}]
        # Keras asks for the static shape, and TensorFlow prunes what nobody uses.
        assert not takers, [(n.op, n.name) for n in takers]
        assert not [n for n in function.node_def if n.name in of_table and n.op != "ReadVariableOp"]
        operations.update(n.op for n in function.node_def)
    assert operations["ResourceGather"] == 1 + (optimizer == "Adagrad")
    assert operations["ResourceScatterSub"] == 1


def _shapes(node: Any) -> list[list[int]]:
    return [[d.size for d in shape.dim] for shape in node.attr["_output_shapes"].list.shape]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
@pytest.mark.parametrize("width", [1, 4, 5])
def test_slices_arrive_bit_for_bit(dtype: tf.DType, width: int):
    layout = SliceLayout((1 << 40, width), dtype, None)
    values = tf.cast(RNG.normal(size=(3, width)), dtype)
    values = tf.concat([values, tf.zeros([1, width], dtype), -tf.zeros([1, width], dtype)], 0)
    rows = tf.constant([7, (1 << 40) - 1, 0, 7, 2], tf.int64)
    packed = layout.pack(tf.IndexedSlices(values, rows), tf.constant(1.0))
    assert packed.shape == (5, layout.width)
    found = layout.unpack(packed)
    assert found.values.dtype == dtype
    assert found.values.numpy().tobytes() == values.numpy().tobytes()
    np.testing.assert_array_equal(found.indices, rows)


def test_every_rank_gets_all_occurrences_in_shard_order():
    parts = [np.arange(0, 6), np.arange(6, 6), np.arange(6, 20)]  # a rank without any
    own = [tf.constant(part.reshape(-1, 2), tf.float32) for part in parts]
    world, shards = World(3), [range(0, 1), range(1, 2), range(2, 4)]
    with ThreadPoolExecutor(3) as pool:
        parts = [WorkerPart(world.all_reduce(r), shards[r], 4) for r in range(3)]
        every = list(pool.map(lambda r: gather(parts[r], [own[r]], [None])[0], range(3)))
    for found in every:
        np.testing.assert_array_equal(found, np.arange(20).reshape(-1, 2))


def test_each_row_once():
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 1, 3]), tf.constant([5, 1]))
    np.testing.assert_array_equal(tf.convert_to_tensor(unique_rows(slices)), tf.convert_to_tensor(slices))
    assert sorted(unique_rows(slices).indices.numpy()) == [1, 3]
