"""Exact mode: what cannot give the same bits for every number of workers and every history is refused by name.

Three things are looked at before the first step. The settings (no XLA on CPUs, no float addition: `TrainConfig.check`).
The traced graph of a micro-batch: an operation that keeps a state of its own (TensorFlow's stateful random numbers,
Python code, variables that Keras does not know) would make a shard's result depend on what its worker computed before.
And the machine: every rank computes one micro-batch twice, on a GPU with its update, and its bits must be those of the
first time, of the other ranks, and of the machines that the run was begun on. Operations without a deterministic kernel
TensorFlow refuses when they run; see `raytf.training.worker.set_up`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from raytf import _tensorflow
from raytf.data import tree
from raytf.data.order import step_seeds
from raytf.data.pipeline import Augment, Pipeline
from raytf.distributed.gpu import determinism
from raytf.distributed.group import Ranks
from raytf.distributed.reduction import FixedPointReduction
from raytf.errors import ExactnessError, WorkerLostError
from raytf.training import run_identity
from raytf.training.step import TrainStep

#: Stateful operations that draw random numbers, of which TensorFlow has many.
_RANDOM = re.compile(
    "Random|Normal|Uniform|Gamma|Poisson|Multinomial|Binomial|Rng|NonDeterministic|SampleDistorted|Sampler"
)
_PYTHON = re.compile("PyFunc")
_WRITES = re.compile("^(Assign.*VariableOp|Resource(Apply|SparseApply|Scatter).*)$")
_HELP = {
    "random": (
        "It draws from a generator whose state depends on what this worker computed before. Draw with keras.random and "
        "a keras.random.SeedGenerator, or with tf.random.stateless_* and the seed that augment gets."
    ),
    "python": (
        "It runs Python code, of which nothing can be known. Write it with operations of TensorFlow or keras.ops."
    ),
    "writes": (
        "It writes a variable that Keras does not know, so every worker would have its own. Make it a weight of the "
        "layer with self.add_weight."
    ),
    "xla": "XLA may fuse and order the same arithmetic in another way on each machine. Leave out jit_compile=True.",
}
#: Bytes that a description of a machine is cut or filled to, so that all ranks send as much.
_MACHINE_BYTES = 160


class TracedOp(NamedTuple):
    """An operation of a traced graph."""

    kind: str
    name: str
    compiled: bool


def admit(step: TrainStep, pipeline: Pipeline, seed: int, group: Ranks, augment: Augment | None) -> dict[str, str]:
    """Let a run begin or go on where it can be exact; every rank must call it, before weights are restored.

    Args:
        step: of the model as the seed made it.
        pipeline: of the training data, prepared.
        seed: the run's.
        group: all ranks.
        augment: the user's.

    Returns:
        What must be the same when the run is resumed.

    Raises:
        ExactnessError: names the operation or the machines.
        WorkerLostError: another rank raises an ExactnessError.
    """
    if not isinstance(step.reduction, FixedPointReduction):
        raise ExactnessError(
            "--exact: the model has float64 weights or states, and 32 bits of fixed point would be less than they ask "
            "for. Use float32 (keras.config.set_floatx), or train without --exact."
        )
    # XLA on a GPU has a flag for it (`gpu_exact`), and the probe below; on CPUs nothing says what it fuses.
    refuse_inexact(ops_of(step.probe_function), "the model", allows_xla=step.is_on_gpu)
    sample = pipeline.sample(pipeline.plan.micro_batch_size)
    if augment is not None:
        traced = tf.function(augment).get_concrete_function(
            tree.map_leaves(tf.convert_to_tensor, sample), tf.TensorSpec([2], tf.int32)
        )
        refuse_inexact(ops_of(traced), "augment")
    size = pipeline.plan.micro_batch_size
    leaves = [np.resize(leaf, (size, *leaf.shape[1:])) for _, leaf in tree.flatten(sample)]
    seeds = step_seeds(seed, np.zeros(1, np.int64), np.zeros(1, np.int64), len(step.micro.seeds))[0, 0]
    compute = step.probe_update if step.is_on_gpu else step.probe
    first, second = (compute(leaves, seeds) for _ in range(2))
    here = machine()
    if first != second:
        raise ExactnessError(
            f"--exact: worker {group.rank} ({here}) computed other bits when it computed a micro-batch a second time. "
            "Train without --exact, or find the layer whose result varies."
        )
    mine = [np.frombuffer(hashlib.sha256(first).digest(), np.uint8), _padded(here)]
    theirs = group.broadcast(mine)
    differs = mine[0].tobytes() != theirs[0].tobytes()
    if group.sum(np.array([differs], np.float32))[0]:
        if not differs:
            raise WorkerLostError("another rank computes other bits")
        raise ExactnessError(
            f"--exact: worker {group.rank} ({here}) computes other bits than worker 0 "
            f"({theirs[1].tobytes().decode(errors='replace').strip()}). Use machines of one kind with the same "
            "software, or train without --exact."
        )
    # Not the machine's name: another one that computes the same bits is as good.
    found = mine[0].tobytes().hex()[:16]
    if not step.is_on_gpu:
        return {run_identity.FIRST_GRADIENTS: found}
    settings = determinism.identity(os.environ, tf.config.experimental.tensor_float_32_execution_enabled())
    return {run_identity.FIRST_STEP: found, **settings}


def ops_of(traced: Any) -> list[TracedOp]:
    """All operations of a concrete function and of the functions that it calls."""
    graph = traced.graph.as_graph_def()
    found = [_op(node) for node in graph.node]
    for function in graph.library.function:
        compiled = function.attr["_XlaMustCompile"].b if "_XlaMustCompile" in function.attr else False
        found += [_op(node, compiled) for node in function.node_def]
    return found


def refuse_inexact(ops: Iterable[TracedOp], where: str, allows_xla: bool = False) -> None:
    """Refuse operations whose result is not a function of their inputs.

    Args:
        where: what was traced, for the message.
        allows_xla: what XLA compiles is no reason.

    Raises:
        ExactnessError: names the operation.
    """
    for op in ops:
        problem = _problem(op, allows_xla)
        if problem:
            raise ExactnessError(
                f"--exact: {where} cannot be computed exactly because of the operation {op.kind} ({op.name}). "
                f"{_HELP[problem]} Or train without --exact."
            )


def explain(error: Exception) -> ExactnessError | None:
    """TensorFlow's refusal of an operation without a deterministic kernel as one line.

    Returns:
        None for any other error.
    """
    text = " ".join(str(error).split())
    if "eterminis" not in text:
        return None
    return ExactnessError(
        f"--exact: TensorFlow cannot compute this model deterministically: {text[-400:]} Use another layer or loss "
        "in its place, or train without --exact."
    )


def machine() -> str:
    """The processor and the software that bits depend on."""
    devices = tf.config.list_physical_devices("GPU")
    kinds = {tf.config.experimental.get_device_details(d).get("device_name", "GPU") for d in devices}
    return f"{', '.join(sorted(kinds)) or _cpu()}, TensorFlow {tf.__version__}"


def _op(node: Any, compiled: bool = False) -> TracedOp:
    compiled = compiled or ("_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b)
    return TracedOp(node.op, node.name, compiled)


def _problem(op: TracedOp, allows_xla: bool) -> str | None:
    if op.compiled and not allows_xla:
        return "xla"
    if _PYTHON.search(op.kind):
        return "python"
    if _WRITES.match(op.kind):
        return "writes"
    definition = _tensorflow.operation(op.kind)
    if definition is not None and definition.is_stateful and _RANDOM.search(op.kind):
        return "random"
    return None


def _padded(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:_MACHINE_BYTES].ljust(_MACHINE_BYTES), np.uint8)


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
