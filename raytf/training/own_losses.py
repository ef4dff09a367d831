"""Find a loss of the whole batch in a `train_step` of the model's own, before the first step.

The step is tried on a few records and on the same records twice, which changes neither a mean nor the statistics of
BatchNormalization, but adds negatives to a contrastive loss. Where a step is a function of its records alone, two parts
of them are tried as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf.checkpoint import variables
from raytf.data import tree
from raytf.inference import own_run
from raytf.inference.own_run import OwnScope, beginning
from raytf.training.batch_losses import RELATIVE, WARNING

#: With how many seeds a step that draws random numbers is tried.
_SEEDS = 4
#: By how many standard deviations two averages must differ.
_DEVIATIONS = 5.0


def check(model: keras.Model, batch: tuple[Any, Any, Any]) -> str:
    """Compare what a model's own step returns as its loss for a batch, for its parts, and for the batch twice.

    Args:
        model: built; it stays as it is.
        batch: (x, y, sample_weight) of a few records.

    Returns:
        A warning; empty if nothing speaks against cutting the loss into shards.
    """
    leaves = [np.asarray(leaf) for _, leaf in tree.flatten(batch)]
    records = len(leaves[0])
    if records < 2 or len({len(leaf) for leaf in leaves}) > 1:
        return ""
    trial = _Trial(model, batch, leaves)
    once, twice = trial(leaves), trial([np.concatenate([leaf, leaf]) for leaf in leaves])
    spread = max(np.std(once), np.std(twice))
    allowed = RELATIVE * max(abs(np.mean(once)), abs(np.mean(twice))) + 1e-6
    if not np.isfinite([spread, allowed]).all():
        return ""
    if abs(np.mean(twice) - np.mean(once)) > allowed + _DEVIATIONS * spread:
        text = f"{np.mean(once):.4g} for {records} records, {np.mean(twice):.4g} for the same records twice"
        return WARNING.format(text)
    if trial.changes or spread:
        return ""
    cut = max(1, records // 3)
    parts = [float(np.mean(trial([leaf[rows] for leaf in leaves]))) for rows in (slice(cut), slice(cut, None))]
    average = (cut * parts[0] + (records - cut) * parts[1]) / records
    if abs(once[0] - average) <= RELATIVE * max(abs(once[0]), *map(abs, parts)) + 1e-6:
        return ""
    return WARNING.format(f"{once[0]:.4g} for {records} records, {average:.4g} for two parts of them")


class _Trial:
    """A model's own step as a function of its records, without its updates.

    Attributes:
        changes: whether the step changes states of the model, such as the statistics of BatchNormalization.
    """

    def __init__(self, model: keras.Model, batch: tuple[Any, Any, Any], leaves: Sequence[np.ndarray]):
        self.changes = False
        parts = own_run.parts_of(model, variables.seed_states(model))
        metrics = [keras.ops.convert_to_numpy(variable) for variable in parts.metrics]
        self._shape = (len(parts.seeds), 2)

        def run(records: list[tf.Tensor], seeds: tf.Tensor) -> tf.Tensor:
            scope = OwnScope(beginning(parts.seeds, seeds, parts.metrics, metrics))
            data = own_run.data_of(tree.unflatten(batch, records))
            given = model.train_step, data, seeds[-1], scope, parts.trainable
            logs = own_run.run(*given, lambda *update: None)
            states = {id(variable) for variable in parts.states}
            self.changes = any(place in states for place in scope.changed)
            return own_run.loss_of(logs)

        specs = [tf.TensorSpec([None, *leaf.shape[1:]], tf.as_dtype(leaf.dtype)) for leaf in leaves]
        seeds = tf.TensorSpec(self._shape, tf.int32)
        self._run = tf.function(run, autograph=False, input_signature=[specs, seeds])

    def __call__(self, leaves: Sequence[np.ndarray]) -> list[float]:
        """Return the step's loss for some records, with each seed."""
        draw = np.random.default_rng(0)
        drawn = [draw.integers(0, 2**31 - 1, self._shape).astype(np.int32) for _ in range(_SEEDS)]
        return [float(self._run([tf.constant(leaf) for leaf in leaves], seeds)) for seeds in drawn]
