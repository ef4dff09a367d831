"""TensorFlow servers in processes of their own on the loopback, and a process that trains with them: no Ray.

python -m tests.tf.servers          prints what test_server_step.py looks at, as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from raytf.checkpoint.variables import seed_states
from raytf.config.flags import ComputeSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.parameter_server import state
from raytf.parameter_server.step import AsyncStep, SyncStep
from raytf.testing.processes import free_port
from raytf.training.model.model import build
from raytf.training.step.learning_rate import LearningRate, RateLaw
from raytf.training.step.step import StepOptions, TrainStep

SERVER = """
import json, os, sys, time
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from raytf.parameter_server import group
server = group.start_server(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 1)
sys.stdin.read()  # ends with the parent
os._exit(0)
"""
RNG = np.random.default_rng(0)
#: 205 records in batches of 32: the last of an epoch has 13, which fill some shards in part and some not at all.
X, Y = RNG.normal(size=(205, 12)).astype("float32"), RNG.integers(0, 4, 205)


def double() -> keras.Model:
    """In 64 bits, where what rounding changes is not to be seen.

    With a loss that is divided by how many labels count, of which no worker knows all.
    """
    kind: Any = {"dtype": "float64"}
    stack = [
        layers.Dense(64, **kind),
        layers.BatchNormalization(**kind),
        layers.ReLU(**kind),
        layers.Dense(4, **kind),
    ]
    model = keras.Sequential([keras.Input((12,), dtype="float64"), *stack])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3, dtype="float64")
    model.compile(keras.optimizers.Adam(4e-3), loss)
    return model


def rich() -> keras.Model:
    """BatchNorm, dropout, clipping, decay, a schedule, and a kernel that is worth cutting."""
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(512),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Dropout(0.2),
            layers.Dense(512, activation="relu"),
            layers.Dense(4),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 40)
    optimizer = keras.optimizers.AdamW(schedule, global_clipnorm=0.5, weight_decay=1e-2)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Penalty(layers.Layer):
    def call(self, h):
        self.add_loss(keras.ops.mean(h**2))
        return h


def added() -> keras.Model:
    """With what layers and regularizers add to the loss."""
    hidden = layers.Dense(16, "relu", kernel_regularizer="l2", activity_regularizer="l1")
    model = keras.Sequential([keras.Input((12,)), hidden, Penalty(), layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


#: Twice the model's own rate, after a warm-up from that.
LAW = RateLaw(2.0, 8)


class Counter(keras.Model):
    """Each update moves the weight by one learning rate, whatever its value: it counts updates."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight(shape=(4,), initializer="zeros", name="count")

    def call(self, x):
        return keras.ops.zeros_like(x[:, :1]) + self.count[0] + self.count[1] + self.count[2] + self.count[3]


def counter() -> keras.Model:
    model = Counter()
    model.compile(keras.optimizers.SGD(0.5), lambda y, p: -p)
    return model


def make(factory: Callable[[], Any], shards: int, batch: int = 32) -> tuple[Any, Pipeline, StepPlan]:
    source = ArraySource(X, Y)
    plan = StepPlan(source.records, batch, shards)
    pipeline = Pipeline(source, plan, range(shards), seed=3)
    model = build(factory, pipeline.sample(), [source], ComputeSection(), seed=3)
    pipeline.prepare(len(seed_states(model)), 4)
    return model, pipeline, plan


def values(model: keras.Model) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(v)) for v in [*model.weights, *model.optimizer.variables]]


def added_losses(coordinator: Any, steps: int) -> dict[str, Any]:
    """How a model of `added` differs from one that Keras trains on the same batches; for both kinds of steps."""
    told = {}
    for name in ("sync", "async"):
        mirror, pipeline, plan = make(added, 4)
        keras.utils.set_random_seed(3)
        theirs = added()
        own = (coordinator, 2, mirror, plan, pipeline.template, pipeline.leaf_specs, False)
        step = SyncStep(*own, parts=2, workers=3) if name == "sync" else AsyncStep(*own, workers=3)
        losses = []
        for s in range(steps):
            call = pipeline.submit(s, s + 1).result()
            row = step.submit(call).result().rows[0]
            x, y = (
                np.concatenate([part[:n] for part, n in zip(leaf[0], call.counts, strict=True)]) for leaf in call.leaves
            )
            losses.append(abs(row[0] - theirs.fit(x, y, batch_size=len(x), verbose=0).history["loss"][0]))
        step.state.pull()
        pairs = zip(mirror.trainable_weights, theirs.trainable_weights, strict=True)
        told[name] = {
            "loss": float(max(losses)),
            "weights": max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs),
        }
    return told


def main() -> None:
    cluster = {
        "chief": [f"127.0.0.1:{free_port()}"],
        "ps": [f"127.0.0.1:{free_port()}" for _ in range(2)],
        "worker": [f"127.0.0.1:{free_port()}" for _ in range(3)],
    }
    servers = [
        subprocess.Popen([sys.executable, "-c", SERVER, json.dumps(cluster), job, str(i)], stdin=subprocess.PIPE)
        for job in ("ps", "worker")
        for i in range(len(cluster[job]))
    ]
    try:
        coordinator = state.connect(cluster)
        told: dict[str, Any] = {}
        steps = 14

        plain, pipeline, plan = make(rich, 4)
        step = TrainStep(
            plain, plan, range(4), None, pipeline.template, pipeline.leaf_specs, StepOptions(fixed_point=False)
        )
        losses = [float(step(pipeline.submit(s, s + 1).result(), np.zeros(1)).losses[0]) for s in range(steps)]

        for parts in (3, 2):  # of three workers: no backups, and one
            mirror, pipeline, plan = make(rich, 4)
            own = (coordinator, 2, mirror, plan, pipeline.template, pipeline.leaf_specs, False)
            sync = SyncStep(*own, parts=parts, workers=3)
            rows = [sync.submit(pipeline.submit(s, s + 1).result()).result() for s in range(steps)]
            applied = sync.state.pull()
            told[f"sync {parts}"] = {
                "applied": applied,
                "loss difference": max(abs(r.rows[0, 0] - a) for r, a in zip(rows, losses, strict=True)),
                "difference": max(
                    float(np.abs(a - b).max()) for a, b in zip(values(mirror), values(plain), strict=True)
                ),
                "finite": all(bool(r.finite[0]) for r in rows),
            }
        told["places"] = sync.state.places()

        plain, pipeline, plan = make(double, 4)
        step = TrainStep(
            plain, plan, range(4), None, pipeline.template, pipeline.leaf_specs, StepOptions(fixed_point=False)
        )
        mirror, _, _ = make(double, 4)
        own = (coordinator, 2, mirror, plan, pipeline.template, pipeline.leaf_specs, False)
        sync = SyncStep(*own, parts=2, workers=3)
        for s in range(40):
            call = pipeline.submit(s, s + 1).result()
            step(call, np.zeros(1))
            sync.submit(call).result()
        sync.state.pull()
        pairs = zip(values(mirror), values(plain), strict=True)
        told["difference in 64 bits"] = max(float(np.abs(a - b).max()) for a, b in pairs)
        told["steps"] = steps

        told["added"] = added_losses(coordinator, steps)

        mirror, pipeline, plan = make(counter, 1)
        own = (coordinator, 2, mirror, plan, pipeline.template, pipeline.leaf_specs, False)
        counted = AsyncStep(*own, workers=3)
        calls, asked = [], 0
        while asked < 210:
            end = plan.call_end(asked, 2, 210)
            calls.append(counted.submit(pipeline.submit(asked, end).result()))
            asked = end
        for call in calls:
            call.result()
        applied = counted.state.pull()
        told["async"] = {
            "applied": applied,
            "weights": (keras.ops.convert_to_numpy(mirror.count) / 0.5).tolist(),
            "iterations": int(mirror.optimizer.iterations),
        }

        # A rate that a callback sets between two batches.
        mirror.optimizer.learning_rate = 0.25
        counted.state.push_rate()
        counted.submit(pipeline.submit(210, 211).result()).result()
        counted.state.pull()
        told["rate set"] = {
            "moved": float(mirror.count[0]) - 0.5 * 210,
            "rate": float(mirror.optimizer.learning_rate),
        }

        # Scaled and warmed up: a schedule, aggregated, as a plain step has it.
        plain, pipeline, plan = make(rich, 4)
        rate, args = LearningRate(plain.optimizer, LAW), (pipeline.template, pipeline.leaf_specs)
        step = TrainStep(plain, plan, range(4), None, *args, StepOptions(fixed_point=False), rate)
        expected = [step(pipeline.submit(s, s + 1).result(), np.zeros(1)) for s in range(steps)]
        mirror, pipeline, plan = make(rich, 4)
        own = (coordinator, 2, mirror, plan, pipeline.template, pipeline.leaf_specs, False)
        sync = SyncStep(*own, LearningRate(mirror.optimizer, LAW), parts=3, workers=3)
        rows = [sync.submit(pipeline.submit(s, s + 1).result()).result() for s in range(steps)]
        sync.state.pull()
        told["scaled"] = {
            "loss difference": max(abs(r.rows[0, 0] - e.losses[0]) for r, e in zip(rows, expected, strict=True)),
            "difference": max(float(np.abs(a - b).max()) for a, b in zip(values(mirror), values(plain), strict=True)),
            "gradients": {path: list(g.shape) for path, g in sync.named_gradients(rows[-1]).items()},
            "weights": {w.path: list(w.shape) for w in mirror.trainable_variables},
        }

        # A constant rate, asynchronous, and a resume in the middle of the warm-up, into a mirror that is made again.
        told["moved"], saved = [], None
        for begin, end in ((0, 5), (5, 12)):
            mirror, pipeline, plan = make(counter, 1)
            rate = LearningRate(mirror.optimizer, LAW)
            own = (coordinator, 2, mirror, plan, pipeline.template, pipeline.leaf_specs, False)
            counted = AsyncStep(*own, rate, workers=3)
            for variable, value in zip([*mirror.weights, *mirror.optimizer.variables], saved or [], strict=False):
                variable.assign(value)
            counted.state.push()
            for s in range(begin, end):
                counted.submit(pipeline.submit(s, s + 1).result()).result()
                counted.state.pull()
                told["moved"].append(float(mirror.count[0]))
            saved = values(mirror)
        told["law"] = [0.5 * LAW.factor * LAW.share(s) for s in range(12)]

        # What comes back is what was sent, cut and put together.
        mirror, pipeline, plan = make(rich, 4)
        own = (coordinator, 2, mirror, plan, pipeline.template, pipeline.leaf_specs, False)
        step = AsyncStep(*own, workers=3)
        random = np.random.default_rng(1)
        for v in [*mirror.trainable_variables, *mirror.optimizer.variables[2:]]:
            v.assign(random.normal(size=v.shape))
        mirror.optimizer.iterations.assign(7)
        sent = values(mirror)
        step.state.push()
        for v in mirror.trainable_variables:
            v.assign(np.zeros(v.shape))
        step.state.pull()
        told["same"] = all(np.array_equal(a, b) for a, b in zip(values(mirror), sent, strict=True))
        print(json.dumps(told, default=float), flush=True)
    finally:
        for server in servers:
            server.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
