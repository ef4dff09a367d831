"""The train step: micro-batches of this worker's logical shards, a reduction and an update. A call runs several steps.

Shapes in this module: K steps of a call, F flags, L shards of this worker, b records and S seeds of a shard.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf import _keras
from raytf.checkpoint import variables
from raytf.data import tree
from raytf.data.pipeline import CallBatch
from raytf.data.plan import BatchPlan, StepPlan
from raytf.data.sources import Spec
from raytf.distributed.allreduce import reduction as reductions
from raytf.distributed.allreduce.reduction import Overlap
from raytf.distributed.devices import Devices, computes_on_gpu
from raytf.distributed.encoding import wire
from raytf.distributed.encoding.digests import device_sum, of_step
from raytf.distributed.encoding.wire import WorkerPart, in_graph
from raytf.distributed.step_digest import DigestKind, DigestLayout
from raytf.errors import ConfigError
from raytf.inference import user_model
from raytf.inference.own_run import overrides_step
from raytf.training.step import shard_work
from raytf.training.step.custom_train_step import OwnStep
from raytf.training.step.fused_update import prepared
from raytf.training.step.learning_rate import LearningRate
from raytf.training.step.microbatch import MicroBatch
from raytf.training.step.shard_loop import (
    ShardBatch,
    ShardSums,
    ShardTimer,
    StepAudit,
    StepShards,
    fixed_values,
    full_counts,
    results,
    shard_divisors,
    shard_factors,
)
from raytf.training.step.shard_work import KeptGradients, ShardResult

#: Columns of a step's row before its digests: loss, learning rate, whether gradients were finite, and their norm.
_COLUMNS = 4


class StepGraph:
    """The traced steps of a call, each with micro-batches, a reduction and an update.

    Args:
        model: the model, built and compiled.
        plan: sizes of batches and shards.
        all_reduce: sums tensors over workers; None if this is the only worker.
        template, specs: structure and leaves of a batch.
        options: how the step is computed.
        rate: the optimizer's learning rate.

    Attributes:
        micro: the computation of one logical shard.
        reductions: how the gradients of each phase are added.
        probe_function: the traced micro-batch, a concrete function whose graph has all operations.
        gradients: the gradients that are kept.
        is_general: whether one graph works for any shards, so that this worker can take over a lost worker's shards.
        digests: the layout of a step's digests; None if there are none, as for sums of floats.
        journal: the rows of a call's completed steps; None if a call that fails can leave an incomplete step.
        audit: checks steps with a shard that another worker computes, too; None if steps cannot be audited.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: StepPlan,
        all_reduce: reductions.AllReduce,
        template: tuple[Any, Any, Any],
        specs: list[Spec],
        options: StepOptions,
        rate: LearningRate,
    ):
        self._model, self._plan, self._all_reduce, self._specs, self._rate = model, plan, all_reduce, specs, rate
        self._devices = options.devices or Devices()
        self._words = options.words or (wire.DEVICE if computes_on_gpu(self._devices) else wire.HOST)
        host_kind = DigestKind.WHOLE if options.has_old_digests else DigestKind.FOLDED
        self._digest_kind = DigestKind.DEVICE if self.is_on_gpu else host_kind
        self.micro = self._make_micro(template, options)
        if isinstance(self.micro, OwnStep) and self.micro.has_other_optimizers and not rate.is_unchanged:
            raise ConfigError(
                "--scale-learning-rate and --warmup-epochs only change the rate of the compiled optimizer, but "
                "train_step uses others. Remove the flags, and pass schedules to those optimizers."
            )
        self._flags = options.flags
        self.probe_function = self._trace_probe()
        self.reductions = [
            self._make_reduction(phase.layout(), len(phase.with_gradient), options) for phase in self.micro.phases
        ]
        self.gradients = KeptGradients(options.keeps_gradients, self.micro.phases, self.reductions)
        self.is_general = self._is_general_with(options)
        is_digested = all(each.digest_width(0) for each in self.reductions)
        names = [name for phase in self.micro.phases for name in phase.digested()]
        self.digests = DigestLayout(plan.shards, tuple(names), self._digest_kind) if is_digested else None
        self.journal = StepJournal(width_of(self.digest_bytes)) if self.is_general else None
        self.audit = self._make_audit(options.audits)

    @property
    def is_on_gpu(self) -> bool:
        """Return whether the step represents integers as GPUs do, which is the default if it computes on a GPU."""
        return self._words.is_on_gpu

    @property
    def digest_bytes(self) -> int:
        return 0 if self.digests is None else self.digests.bytes

    def _is_general_with(self, options: StepOptions) -> bool:
        # Sums of floats, and sums that overlap with the loop, depend on the number of shards. A step with several
        # phases has changed the model before its last sum.
        is_one = len(self._devices.names) == len(self.reductions) == 1
        is_exact = isinstance(self.reductions[0], reductions.FixedPointReduction) and options.overlap is None
        return self._all_reduce is not None and is_one and is_exact

    def functions(self, shards: range) -> tuple[Any, Any]:
        """Return two `tf.function`s, for full steps and for a partial step of this worker's shards."""
        count, plan = None if self.is_general else len(shards), self._plan

        def leaves(most: int | None) -> list[tf.TensorSpec]:
            return [tf.TensorSpec([None, count, most, *s.signature], s.dtype) for s in self._specs]

        others = [
            tf.TensorSpec([None, count, len(self.micro.seeds), 2], tf.int32),
            tf.TensorSpec([self._flags], tf.float32),
            tf.TensorSpec([], tf.int32),
        ]
        audit = [] if self.audit is None else [tf.TensorSpec([2], tf.int32)]
        full = [leaves(plan.micro_batch_size), *others, *audit]
        # A program's later batches may be larger than its first one, so only full calls have a known shard size.
        most = None if isinstance(plan, BatchPlan) else plan.micro_batch_size
        partial_signature = [leaves(most), *others, tf.TensorSpec([count], tf.int32), tf.TensorSpec([], tf.int32)]
        return (
            tf.function(partial(self._full_steps, shards), input_signature=full, autograph=False),
            tf.function(partial(self._partial_steps, shards), input_signature=partial_signature, autograph=False),
        )

    def lone_step(self, leaves, seeds):
        """Make a step as the only worker, with a single shard. Return its loss, and whether its gradients were
        finite."""
        fixed = fixed_values(self._devices, self.micro.fixed)
        shards = StepShards(WorkerPart(None, range(1), 1), None, 0)
        made, *_ = self._step(self._rate.value(), leaves, seeds, tf.zeros([1]), shards, fixed)
        return made.loss, made.finite

    def _make_micro(self, template: tuple[Any, Any, Any], options: StepOptions) -> MicroBatch | OwnStep:
        if overrides_step(self._model):
            batch, shards = self._plan.global_batch_size, self._plan.shards
            return OwnStep(self._model, template, self._shard_specs(), batch, options.jit, shards)
        return MicroBatch(self._model, template, training=True, jit=options.jit, keeps_slices=True)

    def _shard_specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([self._plan.micro_batch_size, *s.signature], s.dtype) for s in self._specs]

    def _make_audit(self, is_wanted: bool) -> StepAudit | None:
        # A loss that is divided by data needs the divisors of all shards, but a worker only knows its own.
        is_simple = self.digests is not None and self.is_general and not getattr(self.micro, "divided", ())
        if not (is_wanted and is_simple):
            return None
        (reduction,) = self.reductions
        assert isinstance(reduction, reductions.FixedPointReduction)
        return StepAudit(self.micro.phases[0], reduction, self._plan.shards)

    def _trace_probe(self) -> Any:
        # A trace finds the weights with gradients and the states that change, which loops need before their own trace.
        phases, seeds = self.micro.phases, tf.TensorSpec([len(self.micro.seeds), 2], tf.int32)

        def probe(leaves: list[tf.Tensor], seeds: tf.Tensor) -> ShardResult:
            parts = [phase(leaves, seeds, tf.constant(1.0)) for phase in phases]
            row = parts[0].row if len(parts) == 1 else tf.concat([each.row for each in parts], 0)
            return ShardResult([t for f in parts for t in f.tensors], row, [s for f in parts for s in f.slices])

        function = tf.function(probe, autograph=False)
        return user_model.run_user_code("the model", lambda: function.get_concrete_function(self._shard_specs(), seeds))

    def _make_reduction(self, layout: wire.WireLayout, gradients: int, options: StepOptions) -> reductions.Reduction:
        if tf.float64 in layout.dtypes:
            if options.compress:
                raise ConfigError(
                    "--compress-gradients: the model has float64 weights or states, but 16 bits are much less precise. "
                    "Use float32 (keras.config.set_floatx), or remove the flag."
                )
            # 32-bit fixed point is less precise than float64.
            return reductions.FloatReduction(layout, tf.float64, options.overlap)
        if not options.fixed_point:
            return reductions.FloatReduction(layout, overlap=options.overlap)
        compressed = gradients if options.compress else 0
        how = self._words, options.overlap, self._digest_kind if options.digests else None
        return reductions.FixedPointReduction(layout, self._plan.shards, compressed, *how)

    def _full_steps(self, own, leaves, seeds, flags, begin, audit=None):
        span = in_graph(own, self.is_general, begin, seeds, audit)
        places = None if audit is None else wire.audit_places(audit, span, self._plan.shards)
        part = WorkerPart(self._all_reduce, span, self._plan.shards, places)
        return self._steps(leaves, seeds, flags, StepShards(part, *full_counts(self._plan, span, audit)))

    def _partial_steps(self, own, leaves, seeds, flags, begin, counts, total):
        part = WorkerPart(self._all_reduce, in_graph(own, self.is_general, begin, seeds), self._plan.shards)
        return self._steps(leaves, seeds, flags, StepShards(part, counts, total))

    def _steps(self, leaves, seeds, flags, shards):
        steps = tf.shape(seeds)[0]
        rows = tf.TensorArray(tf.float32, steps, element_shape=[width_of(self.digest_bytes)])
        fixed = fixed_values(self._devices, self.micro.fixed)
        journal = self.journal

        def body(k, rows, *_):
            rate, batch = self._rate.value(), [leaf[k] for leaf in leaves]
            made, flags_sum, kept = self._step(rate, batch, seeds[k], flags, shards, fixed)
            row = row_of(made, rate)
            if journal is not None:
                journal.note(k, row)
            return k + 1, rows.write(k, row), flags_sum, kept

        start = (tf.constant(0), rows, tf.zeros_like(flags), self.gradients.nothing())
        _, rows, flags_sum, kept = tf.while_loop(lambda k, *_: k < steps, body, start, parallel_iterations=1)
        return rows.stack(), flags_sum, kept

    def _step(self, rate, leaves, seeds, flags, shards, fixed) -> tuple[StepRow, tf.Tensor, list[tf.Tensor]]:
        """Make a step; return its row, the sum of all flags, and the gradients that are kept."""
        sums = ShardSums(self._devices, shards.part, self._plan.shards)
        kept, finite, digests, square = [], tf.constant(True), [], tf.constant(0.0)
        with self._devices.at_home():
            factors = self._factors(leaves, seeds, shards)
            batch = ShardBatch(leaves, seeds, shards.counts, shards.total, factors)
            self.micro.begin()
            done: list[tf.Tensor] = []
            for phase, reduction in zip(self.micro.phases, self.reductions, strict=True):
                is_last = phase is self.micro.phases[-1]
                # Send the flags with the last phase, whose sums are the last ones.
                votes = flags if is_last else tf.zeros_like(flags)
                with tf.control_dependencies(done):  # phases may be independent, but sums need one order
                    reduced, gradients = sums.add(phase, reduction, batch, votes, fixed)
                done = [] if shards.part.all_reduce is None else results(reduced, gradients)
                if self.audit is not None and reduced.audit is not None:
                    with tf.control_dependencies(done):
                        done = [*done, self.audit.check(reduced.audit)]
                digests += [] if reduced.digests is None else [reduced.digests]
                kept += self.gradients.of(gradients, phase.optimizer)  # before the update changes the loss scale
                square += shard_work.squared_norm(gradients, phase.optimizer)
                # Nothing changes before all sums are done, so the step can be repeated if a worker is lost.
                with tf.control_dependencies(done), self._rate.applied(rate), prepared(phase.optimizer):
                    reduction.settle(reduced)
                    phase.apply(gradients, reduced.tensors[len(gradients) :])
                # With a dynamic loss scale, overflows are expected: the optimizer skips the step and lowers the scale.
                if not isinstance(phase.optimizer, keras.optimizers.LossScaleOptimizer):
                    finite = finite & reduced.finite
            with tf.control_dependencies(done):
                self.micro.update_metrics(reduced.outputs)
                self.micro.add_metrics(reduced.row[1:])
                self.micro.finish(reduced.row)
                loss = tf.identity(reduced.row[0])  # available only after the complete step
            folded = of_step(tf.concat(digests, 1), self._digest_kind) if digests else tf.zeros([0])
        return StepRow(loss, finite, tf.sqrt(square), folded), reduced.flags, kept

    def _factors(self, leaves, seeds, shards) -> tf.Tensor | None:
        """Exchange divisors with all workers, and return the factors of losses that are divided by data; None if the
        model has no such losses."""
        micro = self.micro
        if isinstance(micro, OwnStep) or not micro.divided:
            return None
        own = shard_divisors(micro, leaves, seeds, shards.counts, micro.values())
        every = reductions.everyones(shards.part, own, self._words)
        return shard_factors(own, tf.reduce_sum(every, 0), shards.counts, shards.total, self._plan)


class TrainStep:
    """Runs the pipeline's calls on the model.

    Args:
        shards: this worker's logical shards, at least one.
        rate: the optimizer's learning rate; by default unchanged.
        model, plan, all_reduce, template, specs, options: as for `StepGraph`.

    Attributes:
        micro, reductions, probe_function, digests, audit: as of `StepGraph`.
        timer: measures the duration of a shard on this machine.
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
        self._model, self._plan, self._shards, self._specs = model, plan, shards, specs
        rate = rate or LearningRate(model.optimizer, None)
        self._graph = graph = StepGraph(model, plan, all_reduce, template, specs, options, rate)
        self.micro, self.reductions, self.probe_function = graph.micro, graph.reductions, graph.probe_function
        self.digests, self.audit = graph.digests, graph.audit
        records = [np.asarray(leaf) for _, leaf in tree.flatten(template)]
        self.timer = ShardTimer(self.probe_function, records, plan.micro_batch_size, len(self.micro.seeds))
        self._flags = options.flags
        self._full, self._partial = graph.functions(shards)
        self._lone = tf.function(graph.lone_step, autograph=False)

    def trace(self, is_late: bool = False) -> None:
        """Trace the graph of full steps now, while the state is still being read. If other workers will wait for this
        worker's first step (`is_late`), also run the graphs of full and partial steps on zeros."""
        self._full.get_concrete_function()
        # The first run optimizes a graph, prepares its kernels and allocates their memory.
        steps = int(is_late)
        with self._unchanged() if steps else nullcontext():
            for full in (True, False) if is_late else (True,):
                with suppress(tf.errors.OpError):  # a model may refuse zeros, unlike its records
                    self.rehearse(full, steps)

    def rehearse(self, full: bool, steps: int = 0) -> bool:
        """Trace and run the graph of full or partial steps on zeros, if there is a general one; return whether."""
        is_there = self._graph.is_general and (full or self._plan.full_steps < self._plan.steps_per_epoch)
        if is_there:
            call = CallBatch.of_zeros(self._specs, self._plan, len(self.micro.seeds), steps, full)
            # A call without steps writes no journal, so a thread may run it beside a call with steps.
            (self if steps else self._run)(call, np.zeros(self._flags, np.float32))
        return is_there

    @property
    def is_on_gpu(self) -> bool:
        """Return whether the step represents integers as GPUs do."""
        return self._graph.is_on_gpu

    def reduction_state(self) -> dict[str, keras.Variable]:
        """Return the variables of the reductions that must be saved with the weights, by name."""
        named = {}
        for place, reduction in enumerate(self.reductions):
            named.update(reduction.state(place))
        return named

    def functions(self) -> tuple[Any, Any]:
        """Return the `tf.function`s of full steps and of a partial step, for inspection of their graphs."""
        return self._full, self._partial

    def __call__(self, call: CallBatch, flags: np.ndarray, audited: int = -1, is_auditor: bool = False) -> StepOutcome:
        """Run the steps of a call. All workers must make the same calls.

        Args:
            call: this worker's input.
            flags: this worker's flags, [F] float; the outcome contains their sum over all workers.
            audited: the shard that two workers compute in the call's only step; -1 for none.
            is_auditor: whether this worker computes that shard in addition to its own; it is the last in the call.

        Raises:
            tf.errors.OpError: the two workers computed different bits, which `audit.take` returns; nothing has changed.
        """
        if self._graph.journal is not None:
            self._graph.journal.begin(len(call.seeds))
        rows, flags_sum, gradients = self._run(call, flags, audited, is_auditor)
        return outcome_of(rows.numpy(), flags_sum.numpy(), gradients, self._graph.digest_bytes)

    def _run(self, call: CallBatch, flags: np.ndarray, audited: int = -1, is_auditor: bool = False) -> Any:
        arguments = call.leaves, call.seeds, flags, np.int32(self._shards.start)
        if call.full:
            return self._full(*arguments, *([] if self.audit is None else [np.array([audited, is_auditor], np.int32)]))
        return self._partial(*arguments, call.counts, np.int32(call.records))

    def take(self, shards: range) -> None:
        """Compute other shards, at least one, from the next call on."""
        self._shards = shards
        if not self._graph.is_general:
            self._full, self._partial = self._graph.functions(shards)

    @property
    def can_go_on(self) -> bool:
        """Return whether a call that fails because a worker is lost leaves only complete steps."""
        return self._graph.journal is not None

    def made(self) -> StepOutcome:
        """Return the outcome, without flags, of the steps that the last call completed before it failed."""
        assert self._graph.journal is not None
        return outcome_of(self._graph.journal.rows(), np.zeros(self._flags, np.float32), [], self._graph.digest_bytes)

    def named_gradients(self, outcome: StepOutcome) -> dict[str, tf.Tensor]:
        """Return the gradients that a call returned, by the path of their weight; empty if they are not kept."""
        return self._graph.gradients.named(outcome.gradients)

    def probe(self, leaves: list[np.ndarray], seeds: np.ndarray) -> bytes:
        """Return the bits that this machine computes for a full micro-batch: gradients, layers' updates and the row.

        This changes nothing. With equal weights, machines that compute the same bits return the same bytes.

        Args:
            leaves: leaves of the batch, each [b, ...].
            seeds: [S, 2] int32.
        """
        parts = self.probe_function([tf.constant(leaf) for leaf in leaves], tf.constant(seeds, tf.int32))
        return b"".join(t.numpy().tobytes() for t in [*parts.tensors, parts.row, *parts.slices])

    def probe_update(self, leaves: list[np.ndarray], seeds: np.ndarray) -> bytes:
        """Return the bits that this machine computes for a complete step of one micro-batch, in fixed point, with the
        loop body of training and the update; then restore everything that the step changed.

        A GPU chooses a graph's kernels when the graph runs, so the bits of another graph would prove little.
        """
        with self._unchanged() as changed:
            made = self._lone([tf.constant(leaf)[None] for leaf in leaves], tf.constant(seeds, tf.int32)[None])
            # A hash on the weights' device covers all of their bits without a copy to the host.
            values = [v.read_value() for v in changed if v.dtype.is_floating]
            return b"".join(t.numpy().tobytes() for t in [*made, device_sum(values)])

    def _unchanged(self) -> AbstractContextManager[list[tf.Variable]]:
        """Return a context manager that restores all variables that a step may change; it needs memory for a copy."""
        beside = [*self._model.optimizer.variables, *variables.own_of(self._model)]
        micro, others = self.micro, [*beside, *self.reduction_state().values()]
        return variables.unchanged([*micro.trainable, *micro.states, *micro.metrics, *others])


@dataclass(frozen=True)
class StepOptions:
    """The options of a step.

    Attributes:
        flags: number of flags that each step sums over workers.
        jit: whether to compile gradients with XLA.
        fixed_point: whether to add gradients in fixed point, so that the sum is the same for any number of workers.
        compress: whether to send gradients as 16 bits.
        devices: this process's devices; by default one.
        keeps_gradients: whether to return the gradients of a call's last step.
        words: how devices represent integers, the same on all workers; by default, what suits these devices best.
        overlap: all-reduce gradients in buckets while other gradients are still computed; by default all at once.
        digests: whether to return digests of each step, if its sums are in fixed point.
        has_old_digests: whether the run started with an early version that does not fold digests; see `DigestKind`.
        audits: whether another worker can compute a shard of a step, too, if this is possible.
    """

    flags: int = 1
    jit: bool = False
    fixed_point: bool = True
    compress: bool = False
    devices: Devices | None = None
    keeps_gradients: bool = False
    words: wire.WireWords | None = None
    overlap: Overlap | None = None
    digests: bool = True
    has_old_digests: bool = False
    audits: bool = False


class StepOutcome(NamedTuple):
    """The result of a call.

    Attributes:
        losses, learning_rates: loss and learning rate of each step, [K].
        finite: whether the gradients of each step were finite, [K].
        flags: the flags summed over workers, [F].
        gradients: the reduced gradients of the last step; empty if they are not kept.
        digests: the digests of each step, [K, B] uint8, see `raytf.distributed.step_digest`; B is 0 without digests.
        norms: the gradients' global norms before clipping, [K]; NaN if unknown.
    """

    losses: np.ndarray
    learning_rates: np.ndarray
    finite: np.ndarray
    flags: np.ndarray
    gradients: list[tf.Tensor]
    digests: np.ndarray
    norms: np.ndarray


class StepRow(NamedTuple):
    """The numbers that a step records in its graph: the loss, whether its gradients were finite, their norm, and its
    digests as the bits of [n] float32."""

    loss: tf.Tensor
    finite: tf.Tensor
    norm: tf.Tensor
    digests: tf.Tensor


def row_of(step: StepRow, rate: tf.Tensor) -> tf.Tensor:
    """Return a step's row with its learning rate, as float32; to be traced."""
    return tf.concat([tf.stack([step.loss, rate, tf.cast(step.finite, tf.float32), step.norm]), step.digests], 0)


def outcome_of(rows: np.ndarray, flags: np.ndarray, gradients: list[tf.Tensor], digest_bytes: int) -> StepOutcome:
    """Return the outcome of the steps with these rows, [K, n]."""
    losses, rates, finite, norms = rows[:, :_COLUMNS].T
    digests = np.ascontiguousarray(rows[:, _COLUMNS:]).view(np.uint8)[:, :digest_bytes]
    return StepOutcome(losses, rates, finite > 0, flags, gradients, digests, norms)


class StepJournal:
    """A variable in which the graph of a call keeps the rows, of `width` columns, of the completed steps."""

    def __init__(self, width: int) -> None:
        self._width = width
        # The last column is 1 if the step was made.
        self._rows = tf.Variable(tf.zeros([0, width + 1]), shape=[None, width + 1], trainable=False)

    def begin(self, steps: int) -> None:
        self._rows.assign(tf.zeros([steps, self._width + 1]))

    def note(self, k: tf.Tensor, row: tf.Tensor) -> None:
        """Record that step k of the call is complete; to be traced."""
        self._rows.scatter_nd_update([[k]], [tf.concat([row, [1.0]], 0)])

    def rows(self) -> np.ndarray:
        """Return the rows of the steps that were made, in order."""
        rows = self._rows.numpy()
        return rows[rows[:, -1] > 0, :-1]


def width_of(digest_bytes: int) -> int:
    """Return the number of columns of a step's row."""
    return _COLUMNS + -(-digest_bytes // 4)
