"""Where a GPU would keep the tensors of a training step, by TensorFlow's own registry of kernels.

A tensor counts as gradient-size from 256 numbers on. The models here have weights of 256 to 401,408 numbers, and
batches of 2 records, whose labels, bytes of text and seeds (which come from the host and are int32) are far fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

from benchmarks.gpu_placement import PlacementFinding, findings, operations
from jobs import mnist, transformer_text
from raytf.config.flags import StrategySection
from raytf.data import tree
from raytf.data.plan import StepPlan
from raytf.data.sources import Spec
from raytf.distributed import group
from raytf.distributed.allreduce.reduction import Overlap, packed
from raytf.distributed.devices import Devices, LocalDevices, computes_on_gpu
from raytf.distributed.encoding.wire import DEVICE, HOST, WireLayout, WireWords, widen, zeros
from raytf.training.step.step import StepOptions, TrainStep

GRADIENT_SIZE = 256
RECORDS, STEPS, CONTEXT = 2, 2, 8
MODES = ("fixed", "compressed", "exact", "float")


def cnn() -> keras.Model:
    return mnist.build((28, 28, 1), 10)


def normalized() -> keras.Model:
    return mnist.build((8, 8, 1), 10, mnist.Job(batch_norm=True, dropout=0.5))


def transformer() -> keras.Model:
    return transformer_text.build(transformer_text.Job(context=CONTEXT, width=16, layers=1, dropout=0.1))


TEXT = np.zeros((RECORDS, CONTEXT), np.int32)
BATCHES: dict[Any, tuple[np.ndarray, np.ndarray]] = {
    cnn: (np.zeros((RECORDS, 28, 28, 1), np.uint8), np.zeros(RECORDS, np.int32)),
    normalized: (np.zeros((RECORDS, 8, 8, 1), np.uint8), np.zeros(RECORDS, np.int32)),
    transformer: (TEXT, TEXT),
}


def over_gpus(vector: tf.Tensor) -> tf.Tensor:
    """The collective of TensorFlow's strategies, as their graph has it."""
    options = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}
    return tf.raw_ops.CollectiveReduceV2(input=vector, merge_op="Add", final_op="Id", **options)


OVER_GPUS = packed(over_gpus)


@contextmanager
def settings(mode: str) -> Iterator[None]:
    """Those of a process that trains in a mode: Keras and TensorFlow trace other operations for exact mode."""
    if mode == "exact":
        tf.config.experimental.enable_op_determinism()
    try:
        yield
    finally:
        tf_config.disable_op_determinism()


def traced(
    build: Any,
    mode: str,
    shards: int,
    words: WireWords | None = DEVICE,
    all_reduce: Any = OVER_GPUS,
    devices: Devices | None = None,
    overlap: Overlap | None = None,
) -> TrainStep:
    devices = devices or Devices()
    x, y = BATCHES[build]
    with devices.at_home():
        model = build()
        model.optimizer.build(model.trainable_variables)
        predicted = model(x)
        model.compute_loss(x, y, predicted)
        model.compute_metrics(x, y, predicted, None)
    template = (x, y, None)
    specs = [Spec(leaf.shape[1:], leaf.dtype.name) for _, leaf in tree.flatten(template)]
    total = shards if all_reduce is None else 2 * shards
    plan = StepPlan(1024, total * RECORDS, total)
    is_exact, is_small = mode != "float", mode == "compressed"
    options = StepOptions(
        flags=9, fixed_point=is_exact, compress=is_small, devices=devices, words=words, overlap=overlap
    )
    return TrainStep(model, plan, range(shards), all_reduce, template, specs, options)


def of_full_steps(step: TrainStep) -> list[PlacementFinding]:
    """In the graph of a call of full steps, of which all sizes are known."""
    full, _ = step.functions()
    known = [[STEPS if n is None else n for n in spec.shape] for spec in tf.nest.flatten(full.input_signature)]
    specs = [tf.TensorSpec(n, spec.dtype) for n, spec in zip(known, tf.nest.flatten(full.input_signature), strict=True)]
    again = tf.function(full.python_function, autograph=False)
    function = again.get_concrete_function(*tf.nest.pack_sequence_as(full.input_signature, specs))
    assert sum(1 for _ in operations(function.graph)) > 500  # all of the step was seen, whatever it is nested in
    return findings(function, GRADIENT_SIZE)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", BATCHES)
def test_no_gradient_passes_through_the_host(build, mode, shards):
    with settings(mode):
        assert of_full_steps(traced(build, mode, shards)) == []


@pytest.mark.parametrize("mode", ["compressed", "float"])
def test_nor_in_the_last_step_of_an_epoch(mode):
    # Shards have as many records as are left, at most RECORDS, which the graph does not know.
    _, partial = traced(normalized, mode, 4).functions()
    assert findings(partial.get_concrete_function(), GRADIENT_SIZE, unknown=RECORDS) == []


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("mode", ["fixed", "compressed", "float"])
def test_nor_where_it_is_added_while_others_are_computed(mode, shards):
    step = traced(normalized, mode, shards, overlap=Overlap(2000, 4))
    assert of_full_steps(step) == []
    # One for each bucket, and one for rows and flags.
    full, _ = step.functions()
    assert sum(op.type == "CollectiveReduceV2" for op, *_ in operations(full.get_concrete_function().graph)) > 3


@pytest.mark.parametrize("name", ["mirrored", "one-device"])
def test_nor_where_one_process_has_several_devices(name):
    devices = group.make(StrategySection(strategy=name, logical_devices=3)).devices
    assert of_full_steps(traced(normalized, "fixed", 4, all_reduce=None, devices=devices)) == []


# What the same finds where something is wrong.


@pytest.mark.parametrize("all_reduce", [OVER_GPUS, None], ids=["several workers", "one worker"])
@pytest.mark.parametrize("mode", ["fixed", "compressed", "exact"])
def test_the_path_of_cpus_is_found(mode, all_reduce):
    with settings(mode):
        found = of_full_steps(traced(normalized, mode, 4, HOST, all_reduce))
    kept = {f.kind for f in found if f.problem == "host memory"}
    # The sum over shards, in their loop, which carries it, and what is decoded in the end.
    assert {"AddV2", "StatelessWhile", "EnsureShape", "Identity"} <= kept
    assert any(f.kind == "Fingerprint" for f in found)  # digests
    assert all(f.tensor.startswith("int32") for f in found if f.kind != "Fingerprint")
    if all_reduce is not None:
        assert {"ConcatV2", "SplitV", "Reshape"} <= kept
        assert [f.kind for f in found if f.problem == "refused"] == ["CollectiveReduceV2"]


VECTOR = tf.TensorSpec([1000], tf.int32)


@tf.function(autograph=False)
def nested(x):
    return tf.bitwise.left_shift(x, 1) + x


MUTANTS: dict[str, tuple[Any, tuple[str, str]]] = {
    "zeros of uint32": (lambda x: tf.zeros([1000], tf.uint32), ("no GPU kernel", "Fill")),
    "split of uint32": (lambda x: tf.split(tf.bitcast(x, tf.uint32), 2), ("no GPU kernel", "Split")),
    "split of int64": (lambda x: tf.split(tf.cast(x, tf.int64), [1, 999]), ("no GPU kernel", "SplitV")),
    "sum of uint32": (lambda x: tf.reduce_sum(tf.bitcast(x, tf.uint32)), ("no GPU kernel", "Sum")),
    "padding of uint32": (lambda x: tf.pad(tf.bitcast(x, tf.uint32), [[0, 1]]), ("no GPU kernel", "Pad")),
    "collective of int32": (lambda x: over_gpus(x[:2]), ("refused", "CollectiveReduceV2")),
    "collective of bfloat16": (lambda x: over_gpus(tf.zeros([2], tf.bfloat16)), ("refused", "CollectiveReduceV2")),
    "Python": (lambda x: tf.numpy_function(abs, [x[:2]], tf.int32), ("no GPU kernel", "PyFunc")),
    "argument of a function": (lambda x: nested(x), ("host memory", "PartitionedCall")),
    "in a function": (lambda x: nested(x), ("host memory", "AddV2")),
    "result of a branch": (
        lambda x: tf.cond(x[0] > 0, lambda: tf.bitwise.left_shift(x, 1), lambda: tf.bitwise.right_shift(x, 1)),
        ("host memory", "StatelessIf"),
    ),
    "carried by a loop": (
        lambda x: tf.while_loop(lambda y: y[0] > 0, lambda y: [tf.bitwise.right_shift(y, 1)], [x]),
        ("host memory", "StatelessWhile"),
    ),
    "in a loop": (
        lambda x: tf.while_loop(
            lambda i, _: i < 3,
            lambda i, y: (i + 1, tf.cast(tf.cast(y, tf.int32) + x, tf.float32)),
            (0, tf.cast(x, tf.float32)),
        ),
        ("host memory", "AddV2"),
    ),
    "constant": (lambda x: tf.bitwise.bitwise_and(x, np.arange(1000, dtype=np.int32)), ("host memory", "Const")),
    "of unknown size": (
        lambda x: tf.boolean_mask(x, tf.cast(x, tf.float32) > 0) + 1,
        ("host memory", "AddV2"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_kind_of_fault_is_found(name):
    make, expected = MUTANTS[name]
    function = tf.function(make, autograph=False).get_concrete_function(VECTOR)
    assert expected in {(f.problem, f.kind) for f in findings(function, GRADIENT_SIZE)}


FINE: dict[str, Any] = {
    "casts and shifts of int32": lambda x: tf.cast(tf.bitwise.right_shift(x, 3), tf.float32),
    "zeros by their bits": lambda x: zeros([1000], tf.uint32) + tf.bitcast(x, tf.uint32),
    "split by its bits": lambda x: WireLayout([(10,), (990,)]).split(tf.bitcast(x, tf.uint32)),
    "uint32 carried by a loop": lambda x: tf.while_loop(
        lambda i, _: i < 3, lambda i, y: (i + 1, y + y), (0, tf.bitcast(x, tf.uint32))
    )[1],
    "few of int32": lambda x: tf.shape(x) + 1,
    "int64 over GPUs": lambda x: over_gpus(widen(tf.bitcast(x, tf.uint32))),
}


@pytest.mark.parametrize("name", FINE)
def test_what_stays_on_the_device_is_not_found(name):
    function = tf.function(FINE[name], autograph=False).get_concrete_function(VECTOR)
    assert findings(function, GRADIENT_SIZE) == []


# Who takes which path.


def on(*names: str) -> LocalDevices:
    return LocalDevices(names, names[0], lambda parts, home: parts[0])


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (Devices(), False),
        (on("/job:localhost/replica:0/task:0/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:1"), False),
        (on("/job:localhost/replica:0/task:0/device:GPU:0"), True),
        (on("/job:localhost/replica:0/task:0/device:TPU:0"), False),
    ],
    ids=["this process's, without a GPU", "CPUs", "a GPU", "a TPU"],
)
def test_gpus_take_the_path_of_gpus(devices, expected):
    assert computes_on_gpu(devices) is expected


def test_without_a_gpu_a_step_takes_the_path_of_cpus():
    assert traced(normalized, "fixed", 4, words=None, all_reduce=None).reductions[0].dtype == tf.int32
