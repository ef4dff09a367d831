"""One way to train one model, in a process of its own, for gpu.py: prints what it found as a line of JSON.

    python -m benchmarks.gpu_way --way fixed --model small --shards 4

Without Ray: what is measured is a step, not a run. raytf's ways build the model, the input and the step as a worker
does. `keras` is the model's own `fit`, `loop` a `tf.function` by hand, as TensorFlow's guide "Writing a training loop
from scratch" has it. Determinism is a setting of a whole process, which is why each way has one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

Way = Literal["fixed", "compressed", "float", "exact", "keras", "loop", "copy"]
#: Name -> (width, hidden layers): so many weights of dense layers, at 4 bytes each, and Adam's two values beside each.
SIZES = {"tiny": (64, 2), "small": (2048, 6), "large": (4096, 20)}
CLASSES = 10
#: Numbers in a tensor from which on it counts as large as a gradient.
LARGE = 4096


@dataclass(frozen=True)
class Arguments:
    """Measure one way."""

    way: Way = "fixed"
    model: Literal["tiny", "small", "large"] = "small"
    shards: int = 1
    """Logical shards, of raytf's ways."""
    jit: bool = False
    """Compile gradients with XLA, in raytf's ways."""
    batch: int = 256
    steps: int = 30
    """Steps of a block."""
    blocks: int = 3


def build(size: str) -> Any:
    """Return a compiled stack of dense layers: 25 M weights are `small`, 335 M `large`."""
    import keras

    width, hidden = SIZES[size]
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(hidden)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(CLASSES)])
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data(size: str, records: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x [n, width] float32 and y [n]."""
    random = np.random.default_rng(0)
    return random.normal(size=(records, SIZES[size][0])).astype(np.float32), random.integers(0, CLASSES, records)


def timed(block: Callable[[], None], blocks: int) -> list[float]:
    """Return the seconds of each block, after one that does not count."""
    found = []
    for _ in range(blocks + 1):
        began = time.perf_counter()
        block()
        found.append(time.perf_counter() - began)
    return found[1:]


def by_raytf(arguments: Arguments) -> dict[str, Any]:
    """Time the step of a single worker; `host_bytes` are those that the traced step would keep in host memory per
    step."""
    import tensorflow as tf

    from benchmarks.gpu_placement import findings
    from raytf.checkpoint.variables import seed_states
    from raytf.config.flags import ComputeSection
    from raytf.data.pipeline import Pipeline
    from raytf.data.plan import StepPlan
    from raytf.data.sources import ArraySource
    from raytf.distributed.devices import Devices, computes_on_gpu
    from raytf.training.model.model import build as built
    from raytf.training.step.step import StepOptions, TrainStep

    if arguments.way == "exact":
        tf.config.experimental.enable_op_determinism()
    source = ArraySource(*data(arguments.model, 4 * arguments.batch))
    plan, shards = StepPlan(source.records, arguments.batch, arguments.shards), range(arguments.shards)
    pipeline = Pipeline(source, plan, shards, seed=0)
    model = built(lambda: build(arguments.model), pipeline.sample(), [source], ComputeSection(), seed=0)
    pipeline.prepare(len(seed_states(model)), None)
    is_fixed = arguments.way != "float"
    leaves = pipeline.template, pipeline.leaf_specs
    options = StepOptions(jit=arguments.jit, fixed_point=is_fixed, compress=arguments.way == "compressed")
    step = TrainStep(model, plan, shards, None, *leaves, options)
    done = [0]

    def block() -> None:
        end = done[0] + arguments.steps
        while done[0] < end:
            stop = plan.call_end(done[0], 10, end)
            outcome = step(pipeline.submit(done[0], stop).result(), np.zeros(1, np.float32))
            np.asarray(outcome.losses)  # which waits for the device
            done[0] = stop

    seconds = timed(block, arguments.blocks)
    large = findings(step._full.get_concrete_function(), LARGE, unknown=64)  # of steps in a call
    told = [f"{f.problem}: {f.kind} {f.tensor}" for f in large]
    weights = hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in model.trainable_variables)).hexdigest()
    on_gpu = computes_on_gpu(Devices())
    return {"seconds": seconds, "on_gpu": on_gpu, "in_host_memory": sorted(set(told)), "weights_sha256": weights}


def by_keras(arguments: Arguments) -> dict[str, Any]:
    import tensorflow as tf

    model = build(arguments.model)
    x, y = data(arguments.model, 4 * arguments.batch)
    model.steps_per_execution = 10
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(arguments.batch, drop_remainder=True).cache().repeat()
    batches = batches.prefetch(tf.data.AUTOTUNE)
    return {
        "seconds": timed(
            lambda: model.fit(batches, steps_per_epoch=arguments.steps, epochs=1, verbose=0), arguments.blocks
        )
    }


def by_loop(arguments: Arguments) -> dict[str, Any]:
    import tensorflow as tf

    model = build(arguments.model)
    x, y = data(arguments.model, 4 * arguments.batch)
    batches = iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(arguments.batch).repeat().prefetch(4))

    @tf.function
    def steps() -> tf.Tensor:
        loss = tf.constant(0.0)
        for _ in tf.range(arguments.steps):
            features, labels = next(batches)
            with tf.GradientTape() as tape:
                loss = model.compute_loss(features, labels, model(features, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    model.optimizer.build(model.trainable_variables)
    return {"seconds": timed(lambda: float(steps()), arguments.blocks)}


def by_copies(arguments: Arguments) -> dict[str, Any]:
    """Measure how long training waits for a copy of the state, and how long the copy takes until it is complete."""
    from raytf.checkpoint import slot_ledger, snapshot_slot, variables

    model = build(arguments.model)
    model.optimizer.build(model.trainable_variables)
    named = {f"v{i}": v for i, v in enumerate([*model.trainable_variables, *model.optimizer.variables])}
    source = variables.Variables(named, list(named))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = f"{folder}/slot"
        Path(path).touch()
        slot = snapshot_slot.Slot(path)
        share = slot_ledger.MemoryShare(1, "20260101T000000.000-aaaaaa", 0, 1)
        waits, seconds = [], []
        for _ in range(arguments.blocks + 1):
            began = time.perf_counter()
            values = source.now()
            waits.append(time.perf_counter() - began)
            slot.copy(share, dict(values.tensors), {}, b"{}")
            seconds.append(time.perf_counter() - began)
        slot.close()
    return {"seconds": seconds[1:], "held_after": waits[1:], "is_held": values.is_held, "state_bytes": source.nbytes}


WAYS: dict[str, Callable[[Arguments], dict[str, Any]]] = {"keras": by_keras, "loop": by_loop, "copy": by_copies}


def main(arguments: Arguments) -> int:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    found = WAYS.get(arguments.way, by_raytf)(arguments)
    print(json.dumps({**dataclasses.asdict(arguments), **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
