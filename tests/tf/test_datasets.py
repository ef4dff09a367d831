"""Data sets of TensorFlow as streams: which are the same in each pass, and what is drawn from the run's seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf._tensorflow.datasets import DatasetGraph, is_dataset
from raytf.data import tree
from raytf.data.streams import Stream, from_tf_dataset
from raytf.errors import DataError

IMAGES = np.random.default_rng(0).uniform(size=(8, 4, 4, 3)).astype(np.float32)
WORDS = ["a b", "c", "b", "a", "c d", "d"]


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(12)


def images() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(IMAGES)


def looked_up() -> Callable[[Any], Any]:
    words = keras.layers.TextVectorization(output_sequence_length=3)
    words.adapt(WORDS)
    return words


def augmentation() -> Callable[[Any], Any]:
    layers = [keras.layers.RandomFlip(), keras.layers.RandomRotation(0.2), keras.layers.Rescaling(2.0)]
    model = keras.Sequential(layers)
    return lambda image: model(image, training=True)


def noisy(number: Any) -> Any:
    return tf.cast(number, tf.float32) + tf.random.uniform([])


def sometimes_noisy(number: Any) -> Any:
    return tf.cond(number > 3, lambda: noisy(number), lambda: tf.cast(number, tf.float32))


def inner(number: Any) -> tf.data.Dataset:
    return tf.data.Dataset.range(9).shuffle(9)


#: The same in each pass.
FIXED: dict[str, Callable[[], tf.data.Dataset]] = {
    "slices": lambda: numbers().batch(4),
    "mapped": lambda: numbers().map(lambda i: i * 2, num_parallel_calls=4).cache().batch(4).prefetch(2),
    "stateless draws": lambda: numbers().map(lambda i: tf.random.stateless_uniform([2], [i, 2])).batch(4),
    "padded": lambda: numbers().map(lambda i: tf.range(i)).padded_batch(4),
    "time series": lambda: keras.utils.timeseries_dataset_from_array(np.arange(20.0), np.arange(20), 5),
    "words": lambda: tf.data.Dataset.from_tensor_slices(WORDS).batch(2).map(looked_up()),
    "normalized": lambda: images().batch(4).map(keras.layers.Normalization(mean=1.0, variance=2.0)),
}
#: Another one in each pass.
DRAWN: dict[str, Callable[[], tf.data.Dataset]] = {
    "shuffle": lambda: numbers().shuffle(12).batch(4),
    "shuffles": lambda: numbers().shuffle(3).concatenate(numbers().shuffle(4)).batch(3),
    "zipped": lambda: (
        tf.data.Dataset.zip((numbers().shuffle(4), numbers().shuffle(4))).map(lambda a, b: 100 * a + b).batch(4)
    ),
    "in functions": lambda: numbers().flat_map(inner).batch(4),
    "interleaved": lambda: numbers().interleave(inner, num_parallel_calls=4, deterministic=False).batch(4),
    "noise": lambda: numbers().map(noisy, num_parallel_calls=8).batch(4),
    "noise in a branch": lambda: numbers().map(sometimes_noisy, num_parallel_calls=tf.data.AUTOTUNE).batch(4),
    "cached": lambda: numbers().map(lambda i: i * 2).cache().shuffle(5).batch(4).prefetch(2),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets([numbers(), numbers().map(lambda i: i + 100)]).batch(4),
    "words": lambda: tf.data.Dataset.from_tensor_slices(WORDS).shuffle(6).batch(2).map(looked_up()),
    "augmented": lambda: images().shuffle(8).batch(4).map(augmentation(), num_parallel_calls=4),
    "brightness": lambda: images().map(lambda image: tf.image.random_brightness(image, 0.3)).batch(4),
}


def read(stream: Stream, epoch: int) -> Iterator[Any]:
    """All batches of an epoch."""
    for i in itertools.count():
        batch = stream.read(epoch, i)
        if batch is None:
            return
        yield batch


def passes(dataset: tf.data.Dataset, order: list[int], seed: int = 1, steps: int | None = None) -> list[bytes]:
    """All that is read in some epochs, in this order, by a stream that begins with the first of them."""
    stream, found = from_tf_dataset(dataset, "train", steps, seed), []
    for epoch in order:
        found.append(b"".join(leaf.tobytes() for batch in read(stream, epoch) for _, leaf in tree.flatten(batch)))
    return found


@pytest.mark.parametrize("name", FIXED)
def test_what_is_the_same_in_each_pass_is_known(name: str):
    graph = DatasetGraph(FIXED[name]())
    assert (graph.keeps(), graph.draws()) == ("", "")
    assert from_tf_dataset(FIXED[name](), "train", None, 0).changes == ""
    first, second = passes(FIXED[name](), [0, 1])
    assert first == second


@pytest.mark.parametrize("name", DRAWN)
def test_the_nth_pass_is_the_same_in_every_process_and_no_other_one_is(name: str):
    here = passes(DRAWN[name](), [0, 1, 2])
    assert len(set(here)) == 3
    there = passes(DRAWN[name](), [2, 0])  # a program that was started again, and begins in its third epoch
    assert there == [here[2], here[0]]
    assert passes(DRAWN[name](), [0], seed=2) != here[:1]


def test_a_shuffle_that_stays_stays():
    fixed = lambda: numbers().shuffle(12, seed=4, reshuffle_each_iteration=False).batch(4)  # noqa: E731
    first, second = passes(fixed(), [0, 1])
    assert first == second
    assert passes(fixed(), [0], seed=2) != [first]


def test_each_repetition_has_an_order_of_its_own():
    stream = from_tf_dataset(numbers().shuffle(12).repeat().batch(12), "train", 2, 0)
    found = [stream.read(*divmod(i, 2))[0].tolist() for i in range(4)]
    assert all(sorted(batch) == list(range(12)) for batch in found)
    assert len({tuple(batch) for batch in found}) == 4


def test_what_is_cached_is_computed_once():
    computed = tf.Variable(0)

    def count(number: Any) -> Any:
        return tf.py_function(lambda n: n + 0 * tf.cast(computed.assign_add(1), n.dtype), [number], number.dtype)

    # A function of Python, so passes are made one after another; what draws alone has a cache in a file.
    assert DatasetGraph(numbers().map(count)).keeps() == "EagerPyFunc"
    passes(numbers().map(count).cache().shuffle(4).batch(4), [0, 1, 2])
    assert int(computed) == 12


def test_what_keeps_something_in_the_program_is_read_in_order():
    def counted() -> tf.data.Dataset:
        counter = tf.Variable(0)
        return numbers().map(lambda i: tf.cast(i, tf.int32) + 100 * counter.assign_add(1)).batch(4)

    def generated() -> tf.data.Dataset:
        draws = np.random.default_rng(0)
        spec = tf.TensorSpec([2], tf.float64)
        return tf.data.Dataset.from_generator(lambda: (draws.normal(size=2) for _ in range(8)), output_signature=spec)

    for make in (counted, lambda: generated().batch(4)):
        whole = passes(make(), [0, 1, 2])
        assert len(set(whole)) == 3
        assert passes(make(), [2]) == whole[2:]


def test_lengths_that_differ_from_batch_to_batch_are_known():
    stream = from_tf_dataset(FIXED["padded"](), "train", None, 0)
    assert [spec.shape for _, spec in tree.flatten(stream.spec())] == [(-1,)]
    assert [spec.shape for _, spec in tree.flatten(from_tf_dataset(images().batch(2), "x", None, 0).spec())] == [
        (4, 4, 3)
    ]


@pytest.mark.parametrize(
    ("dataset", "steps", "length", "words"),
    [
        (lambda: numbers().batch(5), None, 3, ""),
        (lambda: numbers().batch(5), 2, 2, ""),
        (lambda: numbers().repeat().batch(5), 4, 4, ""),
        (lambda: numbers().repeat().batch(5), None, 0, "has no end. Pass steps_per_epoch"),
        (lambda: numbers().filter(lambda i: i > 3).batch(5), None, None, ""),
    ],
)
def test_how_long_an_epoch_is(dataset: Callable[[], Any], steps: int | None, length: int | None, words: str):
    if words:
        with pytest.raises(DataError, match=words):
            from_tf_dataset(dataset(), "train", steps, 0)
    else:
        assert from_tf_dataset(dataset(), "train", steps, 0).steps == length


def test_sparse_batches_become_dense():
    counter = tf.Variable(0)  # so that passes are made one after another
    sparse = tf.data.Dataset.from_tensor_slices((tf.sparse.eye(4), tf.range(4))).batch(2)
    for made in (sparse, sparse.map(lambda x, y: (x, y + 0 * counter.assign_add(1)), num_parallel_calls=2)):
        stream = from_tf_dataset(made, "train", None, 0)
        found = np.concatenate([batch[0] for batch in read(stream, 0)])
        assert found.tolist() == np.eye(4).tolist()
    assert DatasetGraph(made).keeps()


def test_ragged_batches_are_refused_with_what_makes_them_dense():
    ragged = numbers().map(lambda i: tf.range(i)).ragged_batch(4)
    with pytest.raises(DataError, match=r"train data has a RaggedTensor, .* Pad it first, as with \.map"):
        from_tf_dataset(ragged, "train", None, 0).peek()


CACHED: dict[str, Callable[[], tf.data.Dataset]] = {
    "shuffled": lambda: numbers().shuffle(12).batch(4).cache(),
    "shuffled, of unknown size": lambda: numbers().shuffle(12).filter(lambda i: i < 12).batch(4).cache(),
    "noisy": lambda: numbers().map(noisy).cache().batch(4),
    "zipped": lambda: tf.data.Dataset.zip((numbers().shuffle(12), numbers().shuffle(12))).batch(4).cache().prefetch(2),
}


@pytest.mark.parametrize("name", CACHED)
def test_the_first_pass_is_what_is_cached_also_if_a_run_continues_later(name: str):
    assert len({*passes(CACHED[name](), [0, 1, 2]), *passes(CACHED[name](), [2, 0])}) == 1
    reshuffled = [passes(CACHED[name]().unbatch().shuffle(12).batch(4), order) for order in ([0, 1, 2], [2])]
    assert len(set(reshuffled[0])) == 3
    assert reshuffled[0][2] == reshuffled[1][0]


@pytest.mark.parametrize("in_file", [False, True])
def test_a_cache_of_unknown_size_is_counted_and_read(in_file: bool, tmp_path: Path):
    made = numbers().shuffle(12).filter(lambda i: i < 12).batch(4).cache(*[str(tmp_path / "cache")] * in_file)
    stream = from_tf_dataset(made, "train", None, 0)
    first = stream.peek()[0].tolist()
    assert stream.count() == 3
    epochs = [[batch[0].tolist() for batch in read(stream, epoch)] for epoch in (0, 1)]
    assert epochs[0] == epochs[1]
    assert epochs[0][0] == first
    assert sorted(itertools.chain(*epochs[0])) == list(range(12))


def test_a_data_set_over_a_generator_that_can_be_read_once_has_all_of_it():
    elements = iter(range(12))
    made = tf.data.Dataset.from_generator(lambda: elements, output_signature=tf.TensorSpec([], tf.int64)).batch(4)
    stream = from_tf_dataset(made, "train", None, 0)
    stream.peek()
    assert stream.count() == 3
    assert [batch[0].tolist() for batch in read(stream, 0)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_data_sets_are_known_from_others():
    assert is_dataset(numbers())
    assert not any(is_dataset(other) for other in (IMAGES, [1], iter([]), tf.constant(1)))
