"""The train step: micro-batches of this worker's logical shards, one reduction, one update; a call has several steps.

Shapes in this module: K steps of a call, F flags, L shards of this worker, b records and S seeds of a shard.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf import _keras
from raytf.checkpoint import variables
from raytf.checkpoint.digest import device_sum
from raytf.data import tree
from raytf.data.pipeline import CallBatch
from raytf.data.plan import BatchPlan, StepPlan
from raytf.data.sources import Spec
from raytf.distributed import reduction as reductions
from raytf.distributed import wire
from raytf.distributed.buckets import Overlap
from raytf.distributed.devices import Devices, OneDevice, computes_on_gpu
from raytf.errors import ConfigError
from raytf.inference import user_model
from raytf.inference.own_run import overrides_step
from raytf.training.fused_update import prepared
from raytf.training.learning_rate import LearningRate
from raytf.training.microbatch import MicroBatch
from raytf.training.own_step import OwnStep
from raytf.training.shard_loop import (
    ShardBatch,
    fixed_values,
    full_counts,
    shard_divisors,
    shard_factors,
)
from raytf.training.shard_sums import ShardSums, results
from raytf.training.shard_work import ShardResult


class StepOutcome(NamedTuple):
    """The result of a call.

    Attributes:
        losses, learning_rates: [K] of each step.
        finite: [K] whether the gradients of each step were finite.
        flags: [F] summed over workers.
        gradients: the reduced gradients of the last step; empty if they are not kept.
    """

    losses: np.ndarray
    learning_rates: np.ndarray
    finite: np.ndarray
    flags: np.ndarray
    gradients: list[tf.Tensor]


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed.

    Attributes:
        flags: number of flags that are summed over workers with each step.
        jit: compile gradients with XLA.
        fixed_point: add gradients in fixed point, so that the sum is the same for every number of workers.
        compress: send gradients as 16 bits.
        devices: this process's devices; by default one.
        keeps_gradients: return the gradients of a call's last step.
        words: how devices represent integers, the same on all workers; by default what suits these devices best.
        overlap: all-reduce gradients in buckets, while other gradients are still computed; by default all at once.
    """

    flags: int = 1
    jit: bool = False
    fixed_point: bool = True
    compress: bool = False
    devices: Devices | None = None
    keeps_gradients: bool = False
    words: wire.WireWords | None = None
    overlap: Overlap | None = None


class TrainStep:
    """Runs calls of the pipeline on the model.

    Args:
        model: built and compiled.
        plan: sizes of batches and shards.
        shards: this worker's logical shards, at least one.
        all_reduce: sums tensors over workers; None if this is the only worker.
        template, specs: structure and leaves of a batch.
        options: how the step is computed.
        rate: the optimizer's learning rate; by default unchanged.

    Attributes:
        micro: the computation of one logical shard.
        reductions: how the gradients of each phase are added.
        probe_function: the traced micro-batch, a concrete function whose graph has all operations.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: StepPlan,
        shards: range,
        all_reduce: reductions.AllReduce,
        template: tuple[Any, Any, Any],
        specs: list[Spec],
        options: StepOptions,
        rate: LearningRate | None = None,
    ):
        _keras.read_rows()
        self._model, self._plan, self._shards, self._all_reduce = model, plan, shards, all_reduce
        self._devices = options.devices or OneDevice()
        self._words = options.words or (wire.DEVICE if computes_on_gpu(self._devices) else wire.HOST)
        self._rate = rate or LearningRate(model.optimizer, None)
        self._keeps_gradients = options.keeps_gradients
        self._specs = specs
        self.micro = self._make_micro(template, options)
        if isinstance(self.micro, OwnStep) and self.micro.has_other_optimizers and not self._rate.is_unchanged:
            raise ConfigError(
                "--scale-learning-rate and --warmup-epochs change the rate of the compiled optimizer alone, and "
                "train_step uses others. Leave them out, and give those optimizers a schedule."
            )
        #: Leaves of the first records.
        self._first = [np.asarray(leaf) for _, leaf in tree.flatten(template)]
        #: Whether `sample_shard` has run the graph once.
        self._is_probe_ready = False
        self._sums = ShardSums(self._devices, plan, all_reduce, shards, plan.shards, options.overlap is not None)
        self.probe_function = self._trace_probe()
        self.reductions = [
            self._make_reduction(phase.layout(), len(phase.with_gradient), options) for phase in self.micro.phases
        ]
        head = [None, len(shards), plan.micro_batch_size]
        signature = [
            [tf.TensorSpec([*head, *s.signature], s.dtype) for s in specs],
            tf.TensorSpec([None, len(shards), len(self.micro.seeds), 2], tf.int32),
            tf.TensorSpec([options.flags], tf.float32),
        ]
        self._full = tf.function(self._full_steps, input_signature=signature, autograph=False)
        # A program's batches may be larger than the first one, so only full calls know how many records a shard has.
        most = None if isinstance(plan, BatchPlan) else plan.micro_batch_size
        some = [tf.TensorSpec([None, len(shards), most, *s.signature], s.dtype) for s in specs]
        partial = [some, *signature[1:], tf.TensorSpec([len(shards)], tf.int32), tf.TensorSpec([], tf.int32)]
        self._partial = tf.function(self._partial_step, input_signature=partial, autograph=False)
        self._lone = tf.function(self._lone_step, autograph=False)

    def trace(self) -> None:
        """Trace the graph of full steps now, while the state is still being read, and not in the first call."""
        self._full.get_concrete_function()

    @property
    def is_on_gpu(self) -> bool:
        """Whether the step represents integers as GPUs do, which it does by default if it computes on a GPU."""
        return self._words.is_on_gpu

    def reduction_state(self) -> dict[str, keras.Variable]:
        """What must be saved with the weights."""
        named = {}
        for place, reduction in enumerate(self.reductions):
            named.update({name.replace("/00000/", f"/{place:05d}/"): v for name, v in reduction.state().items()})
        return named

    def functions(self) -> tuple[Any, Any]:
        """The `tf.function` of full steps and that of a partial step, for inspection of their graphs."""
        return self._full, self._partial

    def __call__(self, call: CallBatch, flags: np.ndarray) -> StepOutcome:
        """Run the steps of a call. All workers must make the same calls.

        Args:
            call: this worker's input.
            flags: [F] float, this worker's flags; the outcome has their sum over all workers.
        """
        if call.full:
            out = self._full(call.leaves, call.seeds, flags)
        else:
            out = self._partial(call.leaves, call.seeds, flags, call.counts, np.int32(call.records))
        losses, rates, finite, flags_sum, gradients = out
        return StepOutcome(losses.numpy(), rates.numpy(), finite.numpy(), flags_sum.numpy(), gradients)

    def named_gradients(self, outcome: StepOutcome) -> dict[str, tf.Tensor]:
        """The gradients that a call returned, by the path of their weight; empty if they are not kept."""
        paths = [phase.trainable[i].path for phase in self.micro.phases for i in phase.with_gradient]
        return dict(zip(paths, outcome.gradients, strict=True)) if self._keeps_gradients else {}

    def probe(self, leaves: list[np.ndarray], seeds: np.ndarray) -> bytes:
        """The bits that this machine computes for one full micro-batch: gradients, layers' updates and its row.

        Changes nothing. With equal weights, two machines that compute the same bits return the same bytes.

        Args:
            leaves: leaves of the batch, each [b, ...].
            seeds: [S, 2] int32.
        """
        found = self.probe_function([tf.constant(leaf) for leaf in leaves], tf.constant(seeds, tf.int32))
        return b"".join(t.numpy().tobytes() for t in [*found.tensors, found.row, *found.slices])

    def probe_update(self, leaves: list[np.ndarray], seeds: np.ndarray) -> bytes:
        """As `probe`, but for a whole step of one micro-batch: with the loop body that computes shards in training, in
        fixed point, and with the update. Afterwards everything that a step changes is restored.

        On a GPU the kernels of a graph are chosen when it runs, so the bits of a different graph would prove little.
        """
        beside = [*self._model.optimizer.variables, *variables.own_of(self._model)]
        micro, others = self.micro, [*beside, *self.reduction_state().values()]
        changed = [variable.value for variable in (*micro.trainable, *micro.states, *micro.metrics, *others)]
        before = [tf.identity(v) for v in changed]
        try:
            told = self._lone([tf.constant(leaf)[None] for leaf in leaves], tf.constant(seeds, tf.int32)[None])
            # A hash of the weights, computed on their device: it depends on all of their bits without copying them to
            # the host.
            values = [v.read_value() for v in changed if v.dtype.is_floating]
            return b"".join(t.numpy().tobytes() for t in [*told, device_sum(values)])
        finally:
            for variable, value in zip(changed, before, strict=True):
                variable.assign(value)

    def shard_seconds(self) -> float:
        """Seconds that this machine takes for one full micro-batch: the faster of two runs."""
        leaves = self._records()
        seeds = np.zeros([len(self.micro.seeds), 2], np.int32)
        taken = []
        for _ in range(3):  # the first run prepares the graph and is not counted
            began = time.perf_counter()
            self._run_shard(leaves, seeds)
            taken.append(time.perf_counter() - began)
        return min(taken[1:])

    def sample_shard(self, seconds: float) -> tuple[float, float]:
        """Measure how long this machine takes for one full micro-batch of zeros now.

        Args:
            seconds: least duration of the measurement; at least one micro-batch is computed.

        Returns:
            Average seconds of a micro-batch, and seconds that the measurement took.
        """
        leaves = self._records()
        seeds = np.zeros([len(self.micro.seeds), 2], np.int32)
        if not self._is_probe_ready:
            self._run_shard(leaves, seeds)  # the first run prepares the graph
            self._is_probe_ready = True
        began, runs = time.perf_counter(), 0
        while not runs or time.perf_counter() - began < seconds:
            self._run_shard(leaves, seeds)
            runs += 1
        taken = time.perf_counter() - began
        return taken / runs, taken

    def _records(self) -> list[np.ndarray]:
        """A micro-batch of the first records again and again; not every model takes zeros: CTC takes no empty text."""
        count = self._plan.micro_batch_size
        return [np.resize(leaf, (count, *np.shape(leaf)[1:])) for leaf in self._first]

    def _run_shard(self, leaves: list[np.ndarray], seeds: np.ndarray) -> None:
        """Compute one micro-batch to its end. Only its row is fetched, a few bytes: fetching gradients from a GPU would
        take longer than computing them."""
        found = self.probe_function([tf.constant(leaf) for leaf in leaves], tf.constant(seeds, tf.int32))
        found.row.numpy()

    def _make_micro(self, template: tuple[Any, Any, Any], options: StepOptions) -> MicroBatch | OwnStep:
        if overrides_step(self._model):
            return OwnStep(self._model, template, self._shard_specs(), options.jit)
        return MicroBatch(self._model, template, training=True, jit=options.jit, keeps_slices=True)

    def _shard_specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([self._plan.micro_batch_size, *s.signature], s.dtype) for s in self._specs]

    def _trace_probe(self) -> Any:
        # Which weights have gradients and which states change is known only after a trace, and loops need it before.
        phases, seeds = self.micro.phases, tf.TensorSpec([len(self.micro.seeds), 2], tf.int32)

        def probe(leaves: list[tf.Tensor], seeds: tf.Tensor) -> ShardResult:
            found = [phase(leaves, seeds, tf.constant(1.0)) for phase in phases]
            row = found[0].row if len(found) == 1 else tf.concat([each.row for each in found], 0)
            return ShardResult([t for f in found for t in f.tensors], row, [s for f in found for s in f.slices])

        function = tf.function(probe, autograph=False)
        return user_model.run_user_code("the model", lambda: function.get_concrete_function(self._shard_specs(), seeds))

    def _make_reduction(self, layout: wire.WireLayout, gradients: int, options: StepOptions) -> reductions.Reduction:
        if tf.float64 in layout.dtypes:
            if options.compress:
                raise ConfigError(
                    "--compress-gradients: the model has float64 weights or states, and 16 bits are much less precise "
                    "than float64. Use float32 (keras.config.set_floatx), or remove the flag."
                )
            # 32-bit fixed point is less precise than float64.
            return reductions.FloatReduction(layout, tf.float64, options.overlap)
        if not options.fixed_point:
            return reductions.FloatReduction(layout, overlap=options.overlap)
        compressed = gradients if options.compress else 0
        return reductions.FixedPointReduction(layout, self._plan.shards, compressed, self._words, options.overlap)

    def _full_steps(self, leaves, seeds, flags):
        steps = tf.shape(seeds)[0]
        rates = tf.TensorArray(tf.float32, steps, element_shape=[])
        losses = tf.TensorArray(tf.float32, steps, element_shape=[])
        finite = tf.TensorArray(tf.bool, steps, element_shape=[])
        fixed = fixed_values(self._devices, self.micro)
        counts, total = full_counts(self._plan, self._shards)

        def body(k, losses, rates, finite, *_):
            rate, batch = self._rate.value(), [leaf[k] for leaf in leaves]
            loss, ok, flags_sum, kept = self._step(rate, batch, seeds[k], flags, counts, total, fixed)
            return k + 1, losses.write(k, loss), rates.write(k, rate), finite.write(k, ok), flags_sum, kept

        start = (tf.constant(0), losses, rates, finite, tf.zeros_like(flags), self._nothing_kept())
        _, *arrays, flags_sum, kept = tf.while_loop(lambda k, *_: k < steps, body, start, parallel_iterations=1)
        return *(array.stack() for array in arrays), flags_sum, kept

    def _partial_step(self, leaves, seeds, flags, counts, total):
        rate, batch = self._rate.value(), [leaf[0] for leaf in leaves]
        fixed = fixed_values(self._devices, self.micro)
        loss, ok, flags_sum, kept = self._step(rate, batch, seeds[0], flags, counts, total, fixed)
        return loss[None], rate[None], ok[None], flags_sum, kept

    def _lone_step(self, leaves, seeds):
        """A step as if this worker were the only one and had one shard.

        Returns:
            Its loss, and whether its gradients were finite.
        """
        fixed = fixed_values(self._devices, self.micro)
        flags = tf.zeros([1])
        loss, ok, _, _ = self._step(self._rate.value(), leaves, seeds, flags, None, 0, fixed, is_alone=True)
        return loss, ok

    def _nothing_kept(self) -> list[tf.Tensor]:
        kept = []
        for phase, reduction in zip(self.micro.phases, self.reductions, strict=True):
            variables = [phase.trainable[i] for i in phase.with_gradient] if self._keeps_gradients else []
            kept += [tf.zeros(v.shape, d) for v, d in zip(variables, reduction.layout.dtypes, strict=False)]
        return kept

    def _kept(self, gradients: list[Any], optimizer: keras.optimizers.Optimizer | None) -> list[tf.Tensor]:
        if not self._keeps_gradients:
            return []
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = tf.convert_to_tensor(optimizer.dynamic_scale)
            return [g / tf.cast(scale, g.dtype) for g in gradients]
        return gradients

    def _step(
        self, rate, leaves, seeds, flags, counts, total, fixed, is_alone: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        sums = self._sums
        if is_alone:
            sums = replace(sums, all_reduce=None, shards=range(1), total_shards=1)
        kept, finite = [], tf.constant(True)
        with self._devices.at_home():
            factors = self._factors(leaves, seeds, counts, total, sums.all_reduce)
            batch = ShardBatch(leaves, seeds, counts, total, factors)
            self.micro.begin()
            done: list[tf.Tensor] = []
            for phase, reduction in zip(self.micro.phases, self.reductions, strict=True):
                is_last = phase is self.micro.phases[-1]
                # The flags travel with the last phase, whose sums come last.
                told = flags if is_last else tf.zeros_like(flags)
                with tf.control_dependencies(done):  # phases may not depend on each other, and sums need one order
                    reduced, gradients = sums(phase, reduction, batch, told, fixed)
                done = [] if sums.all_reduce is None else results(reduced, gradients)
                kept += self._kept(gradients, phase.optimizer)  # before the update changes the loss scale
                with self._rate.applied(rate), prepared(phase.optimizer):
                    phase.apply(gradients, reduced.tensors[len(gradients) :])
                # With a dynamic loss scale, overflows are expected: the optimizer skips the step and lowers the scale.
                if not isinstance(phase.optimizer, keras.optimizers.LossScaleOptimizer):
                    finite = finite & reduced.finite
            self.micro.add_metrics(reduced.row[1:])
            self.micro.finish(reduced.row)
        return reduced.row[0], finite, reduced.flags, kept

    def _factors(self, leaves, seeds, counts, total, all_reduce) -> tf.Tensor | None:
        """Factors for losses that are divided by data, after all workers have exchanged their divisors.

        Returns:
            None if the model has no such losses.
        """
        micro = self.micro
        if isinstance(micro, OwnStep) or not micro.divided:
            return None
        own = shard_divisors(micro, leaves, seeds, counts, micro.values())
        every = reductions.everyones(all_reduce, own, self._shards, self._plan.shards, self._words)
        return shard_factors(own, tf.reduce_sum(every, 0), counts, total, self._plan)
