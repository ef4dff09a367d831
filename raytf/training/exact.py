"""Exact mode: refuses runs that cannot compute the same bits for any number of workers and any restarts.

Three checks precede the first step:

- The settings allow no XLA on CPUs and no float addition, see `TrainConfig.check`.
- The traced graph of a micro-batch has no operation with its own state (stateful random numbers, Python code, variables
  that Keras does not know), which would make a shard's result depend on its worker's earlier computations.
- Every rank computes one micro-batch twice, on a GPU including the update. The bits must be the same both times, on all
  ranks, and on the machines on which the run was started.

TensorFlow itself refuses to run operations without a deterministic kernel, see
`raytf.training.process.process.load_tensorflow`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from raytf import _tensorflow
from raytf._tensorflow import WRITES, TracedOp, ops_of
from raytf.data import tree
from raytf.data.order import step_seeds
from raytf.data.pipeline import Augment, Pipeline
from raytf.distributed import worker_table
from raytf.distributed.allreduce.reduction import FixedPointReduction
from raytf.distributed.gpu import determinism
from raytf.distributed.group import Ranks
from raytf.errors import ExactnessError, WorkerLostError
from raytf.training import run_identity
from raytf.training.step.step import TrainStep

#: Names of TensorFlow's many stateful operations that draw random numbers.
_RANDOM = re.compile(
    "Random|Normal|Uniform|Gamma|Poisson|Multinomial|Binomial|Rng|NonDeterministic|SampleDistorted|Sampler"
)
_PYTHON = re.compile("PyFunc")
_HELP = {
    "random": (
        "Its generator's state depends on what this worker computed before. Use keras.random with a "
        "keras.random.SeedGenerator, or tf.random.stateless_* with the seed that is passed to augment."
    ),
    "python": "It runs Python code, which raytf cannot check. Write it with TensorFlow operations or keras.ops.",
    "writes": (
        "It writes a variable that Keras does not know, so its value would differ between workers. Make it a weight of "
        "the layer with self.add_weight."
    ),
    "xla": "XLA may fuse and order arithmetic differently on each machine. Remove jit_compile=True.",
}


def admit(step: TrainStep, pipeline: Pipeline, seed: int, group: Ranks, augment: Augment | None) -> dict[str, str]:
    """Check that a run can be exact on these machines; every rank must call it, before weights are restored.

    Args:
        step: the training step of the model, whose weights are still those that the seed initializes.
        pipeline: the prepared pipeline of the training data.
        seed: the run's seed.
        group: all ranks.
        augment: the user's augmentation function, if any.

    Returns:
        The entries that exact mode adds to the run's identity, which must not change when the run is resumed.

    Raises:
        ExactnessError: an operation or a machine is not exact.
        WorkerLostError: another rank raised an ExactnessError.
    """
    if not all(isinstance(reduction, FixedPointReduction) for reduction in step.reductions):
        raise ExactnessError(
            "--exact: the model has float64 weights or states, but sums in 32-bit fixed point are less precise. Use "
            "float32 (keras.config.set_floatx), or train without --exact."
        )
    # XLA has a flag for determinism on GPUs (`gpu_exact`), which the probe below checks. No flag controls how XLA
    # fuses operations on CPUs.
    _refuse_inexact(ops_of(step.probe_function), "the model", allows_xla=step.is_on_gpu)
    size = pipeline.plan.micro_batch_size
    sample = pipeline.sample(size)
    if augment is not None:
        traced = tf.function(augment).get_concrete_function(
            tree.map_leaves(tf.convert_to_tensor, sample), tf.TensorSpec([2], tf.int32)
        )
        _refuse_inexact(ops_of(traced), "augment")
    leaves = [np.resize(leaf, (size, *leaf.shape[1:])) for _, leaf in tree.flatten(sample)]
    seeds = step_seeds(seed, np.zeros(1, np.int64), np.zeros(1, np.int64), len(step.micro.seeds))[0, 0]
    compute = step.probe_update if step.is_on_gpu else step.probe
    first, second = (compute(leaves, seeds) for _ in range(2))
    if first != second:
        raise ExactnessError(
            f"--exact: worker {group.rank} ({machine()}) computed different bits when it repeated a micro-batch. Find "
            "the layer whose result varies, or train without --exact."
        )
    digest = hashlib.sha256(first).hexdigest()[:16]
    compare(group, digest)
    # The identity does not name a machine, so any machine that computes the same bits can resume the run.
    if not step.is_on_gpu:
        return {run_identity.FIRST_GRADIENTS: digest}
    settings = determinism.identity(os.environ, tf.config.experimental.tensor_float_32_execution_enabled())
    return {run_identity.FIRST_STEP: digest, **settings}


def compare(group: Ranks, bits: str) -> None:
    """Check that all ranks compute the same bits; every rank must call it.

    Args:
        group: all ranks.
        bits: hash of the bits that this rank computed.

    Raises:
        ExactnessError: this rank computes different bits than rank 0.
        WorkerLostError: another rank raised an ExactnessError.
    """
    everyone = [each.decode() for each in worker_table.gather(group, f"{bits} {machine()}".encode())]
    if len({each.partition(" ")[0] for each in everyone}) == 1:
        return
    first, own = everyone[0].partition(" "), everyone[group.rank].partition(" ")
    if own[0] == first[0]:
        raise WorkerLostError("another rank computes different bits")
    raise ExactnessError(
        f"--exact: worker {group.rank} ({own[2]}) computes different bits than worker 0 ({first[2]}). Use equal "
        "machines with the same software, or train without --exact."
    )


def _refuse_inexact(ops: Iterable[TracedOp], where: str, allows_xla: bool = False) -> None:
    """Raise ExactnessError if the result of an operation in `where` depends on more than its inputs."""
    for op in ops:
        problem = _problem(op, allows_xla)
        if problem:
            raise ExactnessError(
                f"--exact: {where} cannot be computed exactly because of the operation {op.kind} ({op.name}). "
                f"{_HELP[problem]} Or train without --exact."
            )


def explain(error: Exception) -> ExactnessError | None:
    """Convert TensorFlow's error for an operation without a deterministic kernel to an ExactnessError of one line.

    Returns:
        None for any other error.
    """
    text = " ".join(str(error).split())
    if "eterminis" not in text:
        return None
    return ExactnessError(
        f"--exact: TensorFlow cannot compute this model deterministically: {text[-400:]} Use another layer or loss "
        "instead, or train without --exact."
    )


def machine() -> str:
    """Return the processor or GPU and the version of TensorFlow, on which the computed bits depend."""
    devices = tf.config.list_physical_devices("GPU")
    kinds = {tf.config.experimental.get_device_details(d).get("device_name", "GPU") for d in devices}
    return f"{', '.join(sorted(kinds)) or _cpu()}, TensorFlow {tf.__version__}"


def _problem(op: TracedOp, allows_xla: bool) -> str | None:
    if op.compiled and not allows_xla:
        return "xla"
    if _PYTHON.search(op.kind):
        return "python"
    if WRITES.match(op.kind):
        return "writes"
    definition = _tensorflow.operation(op.kind)
    if definition is not None and definition.is_stateful and _RANDOM.search(op.kind):
        return "random"
    return None


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
