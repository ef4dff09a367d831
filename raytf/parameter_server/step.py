"""The train step with parameter servers: workers compute gradients of batches that the coordinator hands out.

It is the step of the other strategies (`MicroBatch`, logical shards in a loop, one mean over the batch), except that
weights are read from the servers and updated there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf.data.pipeline import CallBatch
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import Spec
from raytf.distributed.allreduce.reduction import FloatReduction
from raytf.distributed.step_digest import DigestLayout
from raytf.errors import ModelError
from raytf.inference import user_model
from raytf.inference.own_run import overrides_step
from raytf.parameter_server.state import ServerState
from raytf.training.model import batch_metrics
from raytf.training.step.learning_rate import LearningRate
from raytf.training.step.microbatch import MicroBatch, StepValues
from raytf.training.step.shard_loop import (
    ShardBatch,
    ShardSum,
    encoded_specs,
    loop_shards,
    shard_divisors,
    shard_factors,
)
from raytf.training.step.step import StepOutcome

#: Calls under way per worker: the one that it computes, and the next one.
_AHEAD = 2


class ResultLostError(Exception):
    """A call was computed, but its worker died before its result could be fetched."""


def fetch(value: Any) -> Any:
    """Wait for a closure, and fetch its result.

    Raises:
        ResultLostError: the result is lost. Any other error was raised by the closure.
    """
    value.get()
    try:
        return value.fetch()
    except tf.errors.OpError as error:
        raise ResultLostError(str(error)) from error


class Aggregation:
    """Decides which part of a step to compute next, and which gradients count for its update.

    A global batch is divided into N parts. Each part's gradient is computed from the same weights, and the mean of all
    N is one update. Workers beyond N compute parts again, and the first gradient of a part counts. So a slow worker
    does not matter, no record is left out, and an update does not depend on which worker was first.
    """

    def __init__(self, parts: int, workers: int):
        self._parts, self._workers = parts, workers
        self._step = -1
        #: How often each part of the step was handed out, without copies that were lost.
        self._copies = [0] * parts
        #: Parts of the step whose gradient has arrived.
        self._done: set[int] = set()
        #: Number of requested gradients that have not arrived, including those of earlier steps.
        self.under_way = 0

    def begin(self, step: int) -> None:
        """Begin a step. Gradients of all other steps are stale from now on."""
        self._step = step
        self._copies, self._done = [0] * self._parts, set()

    def ask(self) -> int | None:
        """Return the part that the next idle worker computes; None if there is nothing to do, or no worker is idle.
        Parts that no worker has begun are first. Backup workers then repeat the parts begun least often."""
        if self.under_way >= self._workers:
            return None
        waiting = [part for part in range(self._parts) if part not in self._done]
        if not waiting:
            return None
        part = min(waiting, key=lambda p: (self._copies[p], p))
        backups = sum(self._copies) - sum(copies > 0 for copies in self._copies)
        if self._copies[part] and backups >= self._workers - self._parts:
            return None
        self._copies[part] += 1
        self.under_way += 1
        return part

    def lose(self, step: int, part: int) -> None:
        """Record that a gradient was lost with its worker, so that its part is computed again."""
        self.under_way -= 1
        if step == self._step:
            self._copies[part] -= 1

    def arrive(self, step: int, part: int) -> bool:
        """Record that a gradient has arrived, and return whether it counts.

        It does not count if its weights have been updated since, or if its part's gradient arrived before.
        """
        self.under_way -= 1
        if step != self._step or part in self._done:
            return False
        self._done.add(part)
        return True

    @property
    def is_complete(self) -> bool:
        return len(self._done) == self._parts


class ServerStepOutcome(NamedTuple):
    """The result of a call.

    Attributes:
        rows: [K, 1 + M] loss and metrics of each step.
        finite: [K] whether the gradients of each step were finite.
        gradients: the gradients of the last step; empty if they never reached the coordinator.
    """

    rows: np.ndarray
    finite: np.ndarray
    gradients: Sequence[np.ndarray] = ()


class ServerStep:
    """The base of both kinds of steps, with the state on the servers and the gradients of a worker.

    Args:
        coordinator: returned by `state.connect`.
        servers: number of parameter servers, which hold the state.
        model: the mirror.
        plan: sizes of batches and shards.
        template, specs: structure and leaves of a batch.
        jit: compile gradients with XLA.
        rate: learning rate of the mirror's optimizer; by default unchanged.

    Attributes:
        micro: the micro-batch of one logical shard.
        reduction: how gradients are added.
        state: the state on the servers.
        probe_function: the traced micro-batch, a concrete function whose graph has all operations.
        digests: None, since the results of asynchronous workers depend on when they read the weights.
    """

    digests: DigestLayout | None = None

    def __init__(
        self,
        coordinator: Any,
        servers: int,
        model: keras.Model,
        plan: StepPlan,
        template: tuple[Any, Any, Any],
        specs: list[Spec],
        jit: bool,
        rate: LearningRate | None = None,
    ):
        if getattr(model.optimizer, "gradient_accumulation_steps", None):
            raise ModelError(
                "gradient_accumulation_steps is not supported with --strategy parameter-server, where several batches "
                "are under way at once. Use a larger --global-batch-size, or another strategy."
            )
        if overrides_step(model):
            raise ModelError(
                f"{type(model).__name__} overrides train_step, whose updates --strategy parameter-server cannot make "
                "on its servers. Override compute_loss instead, or use another strategy."
            )
        self._coordinator, self._plan, self._specs = coordinator, plan, specs
        batch_metrics.leave_out(model, "which no worker has with --strategy parameter-server")
        self.micro = MicroBatch(model, template, training=True, jit=jit)
        leaves = [tf.TensorSpec([plan.micro_batch_size, *s.shape], s.dtype) for s in specs]
        seeds = tf.TensorSpec([len(self.micro.seeds), 2], tf.int32)
        # Which weights have gradients and which states change is known only after a trace.
        probe = tf.function(lambda x, s: self.micro(x, s, tf.constant(1.0)), autograph=False)
        self.probe_function = user_model.run_user_code("the model", lambda: probe.get_concrete_function(leaves, seeds))
        layout = self.micro.layout()
        self.reduction = FloatReduction(layout, tf.float64 if tf.float64 in layout.dtypes else tf.float32)
        self.state = ServerState(coordinator.strategy, model, self.micro.states, servers, rate)

    def reduction_state(self) -> dict[str, keras.Variable]:
        """Return the state of the reduction, which is empty, since it keeps nothing from step to step."""
        return self.reduction.state(0)

    def trace(self, is_late: bool = False) -> None:
        """Do nothing: each kind of call is traced when it is first made."""

    def named_gradients(self, outcome: StepOutcome) -> dict[str, Any]:
        """Return the gradients that a call returned, by the path of their weight; empty if it returned none."""
        paths = [self.micro.trainable[i].path for i in self.micro.with_gradient]
        return dict(zip(paths, outcome.gradients, strict=True)) if outcome.gradients else {}

    def _signature(self, shards: int) -> list[Any]:
        """Return specs of leaves and seeds for K steps with `shards` shards."""
        head = [None, shards, self._plan.micro_batch_size]
        return [
            [tf.TensorSpec([*head, *s.shape], s.dtype) for s in self._specs],
            tf.TensorSpec([None, shards, len(self.micro.seeds), 2], tf.int32),
        ]

    def _gradients(
        self, leaves: Any, seeds: Any, counts: Any, total: Any, totals: tf.Tensor | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Compute the gradients of some shards of one step.

        Args:
            totals: [n] divisors of the losses that are divided by data, summed over all shards of the step; by default
                summed over the given shards.

        Returns:
            Gradients and layers' updates summed over the shards, the sum of their rows, whether all tensors are finite,
            and the values of the updated states before the step.
        """
        values = StepValues(self.state.weights(), self.state.states())
        micro, factors = self.micro, None
        if micro.divided:
            own = shard_divisors(micro, leaves, seeds, counts, values)
            totals = tf.reduce_sum(own, 0) if totals is None else totals
            factors = shard_factors(own, totals, counts, total, self._plan)
        encode = self.reduction.encoder(tf.zeros([0]))
        how = ShardSum(encode, encoded_specs(micro, self.reduction), self._plan.shards)
        summed, rows, _ = loop_shards(micro, how, ShardBatch(leaves, seeds, counts, total, factors), values)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in summed])
        return summed, tf.reduce_sum(rows, 0), finite, [values.states[i] for i in micro.updated]

    def _apply(self, summed: list[tf.Tensor], before: list[tf.Tensor]) -> None:
        micro = self.micro
        count = len(micro.with_gradient)
        typed = [tf.cast(t, d) for t, d in zip(summed, self.reduction.layout.dtypes, strict=True)]
        self.state.update(micro.with_gradient, typed[:count])
        self.state.add_to_states(micro.updated, before, typed[count:])


class AsyncStep(ServerStep):
    """A step in which each batch is an update of its own, and no worker waits for another.

    A call of K steps is one closure of TensorFlow's coordinator. If its worker dies, another worker computes it from
    its first step. If only its result was lost, the caller submits it again. Either way, up to K updates are applied
    twice, and the counter of updates counts them twice. At most `window` calls may be under way at once.
    """

    def __init__(self, *args: Any, workers: int):
        super().__init__(*args)
        self.window = _AHEAD * workers
        self._fetch = ThreadPoolExecutor(self.window, thread_name_prefix="raytf-fetch")
        shards = self._plan.shards
        signature = self._signature(shards)
        self._full = tf.function(self._full_steps, input_signature=signature, autograph=False)
        partial = [*signature, tf.TensorSpec([shards], tf.int32), tf.TensorSpec([], tf.int32)]
        self._partial = tf.function(self._partial_step, input_signature=partial, autograph=False)

    def submit(self, call: CallBatch) -> Future[ServerStepOutcome]:
        """Hand out a call to the workers."""
        if call.full:
            value = self._coordinator.schedule(self._full, args=(call.leaves, call.seeds))
        else:
            args = (call.leaves, call.seeds, call.counts, np.int32(call.records))
            value = self._coordinator.schedule(self._partial, args=args)
        return self._fetch.submit(lambda: ServerStepOutcome(*fetch(value)))

    def _full_steps(self, leaves, seeds):
        steps = tf.shape(seeds)[0]
        rows = tf.TensorArray(tf.float32, steps, element_shape=[self.micro.row_width])
        finite = tf.TensorArray(tf.bool, steps, element_shape=[])

        def body(k, rows, finite):
            row, ok = self._one([leaf[k] for leaf in leaves], seeds[k], None, 0)
            return k + 1, rows.write(k, row), finite.write(k, ok)

        out = tf.while_loop(lambda k, *_: k < steps, body, (tf.constant(0), rows, finite), parallel_iterations=1)
        return out[1].stack(), out[2].stack()

    def _partial_step(self, leaves, seeds, counts, total):
        row, ok = self._one([leaf[0] for leaf in leaves], seeds[0], counts, total)
        return row[None], ok[None]

    def _one(self, leaves, seeds, counts, total) -> tuple[tf.Tensor, tf.Tensor]:
        summed, row, finite, before = self._gradients(leaves, seeds, counts, total)
        self._apply(summed, before)
        return row, finite


class SyncStep(ServerStep):
    """A step in which a batch is divided into parts, whose gradients from the same weights are summed for one update.

    Workers only compute gradients and send them to the coordinator, which applies the update. So a worker that dies
    changes nothing, and each update is applied once. Workers beyond the number of parts compute backups.
    """

    #: Maximum number of calls under way at once.
    window = 1

    def __init__(self, *args: Any, parts: int, workers: int):
        super().__init__(*args)
        self._ranges = assign(self._plan.shards, parts)
        self._aggregation = Aggregation(parts, workers)
        self._fetch = ThreadPoolExecutor(workers + 1, thread_name_prefix="raytf-fetch")
        self._pending: dict[Future[Any], tuple[int, int]] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._update = tf.function(self._apply, autograph=False)
        # Divisors need all shards of a step, which no worker has. So the coordinator computes them with the mirror. The
        # graph contains only the part of the model that computes masks.
        some = [*self._signature(self._plan.shards), tf.TensorSpec([self._plan.shards], tf.int32)]
        self._divisors = tf.function(self._totals, input_signature=some, autograph=False)
        self._lock = threading.Lock()

    def submit(self, call: CallBatch) -> Future[ServerStepOutcome]:
        """Compute a call of one step and apply its update, in another thread."""
        return self._fetch.submit(self._step, call)

    def _step(self, call: CallBatch) -> ServerStepOutcome:
        with self._lock:
            return self._aggregate(call)

    def _totals(self, leaves, seeds, counts):
        """Return [n] divisors of the losses that are divided by data, summed over all shards of a step."""
        values = self.micro.values()
        return tf.reduce_sum(shard_divisors(self.micro, [leaf[0] for leaf in leaves], seeds[0], counts, values), 0)

    def _aggregate(self, call: CallBatch) -> ServerStepOutcome:
        aggregation, taken = self._aggregation, {}
        totals = np.zeros(0, np.float32)
        if self.micro.divided:
            totals = self._divisors(call.leaves, call.seeds, call.counts).numpy()
        aggregation.begin(call.start)
        while not aggregation.is_complete:
            while (part := aggregation.ask()) is not None:
                self._pending[self._schedule(call, part, totals)] = (call.start, part)
            done, _ = wait(self._pending, return_when=FIRST_COMPLETED)
            for future in done:
                step, part = self._pending.pop(future)
                try:
                    gradients = future.result()
                except ResultLostError:
                    aggregation.lose(step, part)
                    continue
                if aggregation.arrive(step, part):
                    taken[part] = gradients
        # In the order of the parts, not of arrival, so that the sum is always the same.
        summed = [np.sum([taken[p][0][i] for p in sorted(taken)], 0) for i in range(len(taken[0][0]))]
        rows = [taken[p][1] for p in sorted(taken)]
        self._update([tf.constant(t) for t in summed], [tf.constant(b) for b in taken[0][3]])
        finite = np.array([all(taken[p][2] for p in taken)])
        return ServerStepOutcome(np.sum(rows, 0)[None], finite, summed[: len(self.micro.with_gradient)])

    def _schedule(self, call: CallBatch, part: int, totals: np.ndarray) -> Future[Any]:
        shards = self._ranges[part]
        inside = slice(shards.start, shards.stop)
        leaves = [np.ascontiguousarray(leaf[:, inside]) for leaf in call.leaves]
        counts = np.ascontiguousarray(call.counts[inside])
        args = (leaves, np.ascontiguousarray(call.seeds[:, inside]), counts, np.int32(call.records), totals)
        value = self._coordinator.schedule(self._function(len(shards)), args=args)
        return self._fetch.submit(fetch, value)

    def _function(self, shards: int) -> Callable[..., Any]:
        if shards not in self._functions:

            def compute(leaves, seeds, counts, total, totals):
                return self._gradients([leaf[0] for leaf in leaves], seeds[0], counts, total, totals)

            signature = [
                *self._signature(shards),
                tf.TensorSpec([shards], tf.int32),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([len(self.micro.divided)], tf.float32),
            ]
            self._functions[shards] = tf.function(compute, input_signature=signature, autograph=False)
        return self._functions[shards]
