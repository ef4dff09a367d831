"""The evaluation step: loss and metrics of this worker's logical shards, without an update."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf.data.pipeline import CallBatch
from raytf.data.plan import StepPlan
from raytf.data.sources import Spec
from raytf.distributed.devices import Devices, OneDevice
from raytf.inference.own_run import overrides_test
from raytf.training.microbatch import MicroBatch
from raytf.training.own_test import OwnTest
from raytf.training.shard_loop import (
    ShardBatch,
    ShardSum,
    fixed_values,
    full_counts,
    shard_divisors,
    shard_factors,
    spread_shards,
)


class EvalStep:
    """Computes loss and metrics over a whole source, without an update.

    Metrics are added within each shard and then over the shards, always in the same order, so they do not depend on
    the number of workers.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: StepPlan,
        shards: range,
        template: tuple[Any, Any, Any],
        specs: list[Spec],
        devices: Devices | None = None,
    ):
        self._plan, self._shards, self._devices = plan, shards, devices or OneDevice()
        self.micro = self._make_micro(model, template, specs)
        signature = [
            [tf.TensorSpec([None, len(shards), plan.micro_batch_size, *s.shape], s.dtype) for s in specs],
            tf.TensorSpec([None, len(shards), len(self.micro.seeds), 2], tf.int32),
        ]
        some = [*signature, tf.TensorSpec([len(shards)], tf.int32)]
        totals = tf.TensorSpec([None, len(self.micro.divided)], tf.float32)
        self._full = tf.function(self._full_steps, input_signature=[*signature, totals], autograph=False)
        partial = [*some, tf.TensorSpec([], tf.int32), totals]
        self._partial = tf.function(self._partial_step, input_signature=partial, autograph=False)
        self._full_divisors = tf.function(self._divisors_of_steps, input_signature=signature, autograph=False)
        self._partial_divisors = tf.function(self._divisors, input_signature=some, autograph=False)

    def _make_micro(
        self, model: keras.Model, template: tuple[Any, Any, Any], specs: list[Spec]
    ) -> MicroBatch | OwnTest:
        if not overrides_test(model):
            return MicroBatch(model, template, training=False)
        leaves = [tf.TensorSpec([self._plan.micro_batch_size, *s.signature], s.dtype) for s in specs]
        return OwnTest(model, template, leaves)

    def __call__(self, call: CallBatch, totals: np.ndarray | None = None) -> np.ndarray:
        """[L, 1 + M] what the call's records add to loss and metrics, for each shard.

        Args:
            call: K steps of this worker's shards.
            totals: [K, n] `divisors` summed over all shards; by default this worker is assumed to have all of them.
        """
        if totals is None:
            totals = self.divisors(call).sum(1)
        if call.full:
            return self._full(call.leaves, call.seeds, totals).numpy()
        return self._partial(call.leaves, call.seeds, call.counts, np.int32(call.records), totals).numpy()

    def divisors(self, call: CallBatch) -> np.ndarray:
        """[K, L, n] the divisors of the n losses that are divided by a number from the data, per step and shard."""
        if not self.micro.divided:
            return np.zeros((call.stop - call.start, len(self._shards), 0), np.float32)
        if call.full:
            return self._full_divisors(call.leaves, call.seeds).numpy()
        return self._partial_divisors(call.leaves, call.seeds, call.counts).numpy()

    def _divisors_of_steps(self, leaves, seeds):
        count = len(self.micro.divided)
        counts, _ = full_counts(self._plan, self._shards)

        micro = self.micro
        assert isinstance(micro, MicroBatch)

        def one(k: tf.Tensor) -> tf.Tensor:
            return shard_divisors(micro, [leaf[k] for leaf in leaves], seeds[k], counts, micro.values())

        told = tf.TensorSpec([len(self._shards), count], tf.float32)
        return tf.map_fn(one, tf.range(tf.shape(seeds)[0]), fn_output_signature=told, parallel_iterations=1)

    def _divisors(self, leaves, seeds, counts):
        assert isinstance(self.micro, MicroBatch)
        return shard_divisors(self.micro, [leaf[0] for leaf in leaves], seeds[0], counts, self.micro.values())[None]

    def _full_steps(self, leaves, seeds, totals):
        fixed = fixed_values(self._devices, self.micro)  # an evaluation changes nothing, so this is the whole model
        counts, total = full_counts(self._plan, self._shards)

        def body(k, rows):
            return k + 1, rows + self._rows([leaf[k] for leaf in leaves], seeds[k], counts, total, fixed, totals[k])

        start = (tf.constant(0), tf.zeros([len(self._shards), self.micro.row_width]))
        steps = tf.shape(seeds)[0]
        return tf.while_loop(lambda k, *_: k < steps, body, start, parallel_iterations=1)[1]

    def _partial_step(self, leaves, seeds, counts, total, totals):
        fixed = fixed_values(self._devices, self.micro)
        return self._rows([leaf[0] for leaf in leaves], seeds[0], counts, total, fixed, totals[0])

    def _rows(self, leaves, seeds, counts, total, fixed, totals) -> tf.Tensor:
        def encode(tensors: list[tf.Tensor], weight: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
            return [], tf.zeros([0])

        like: tuple[list[tf.TensorSpec], tf.TensorSpec] = [], tf.TensorSpec([self.micro.row_width], tf.float32)
        factors = None
        if isinstance(self.micro, MicroBatch) and self.micro.divided:
            own = shard_divisors(self.micro, leaves, seeds, counts, self.micro.values())
            factors = shard_factors(own, totals, counts, total, self._plan)
        how = ShardSum(encode, like, self._plan.shards)
        batch = ShardBatch(leaves, seeds, counts, total, factors)
        return spread_shards(self._devices, self.micro, how, batch, fixed)[1]
