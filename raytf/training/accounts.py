"""What follows each call of the training step: the check for NaN, logs, callbacks and the driver's display."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from raytf.data.pipeline import CallBatch
from raytf.distributed import step_digest
from raytf.errors import NonFiniteLossError
from raytf.training import exact, warm_pool
from raytf.training.context import BatchEnd, Context
from raytf.training.heartbeat import Activity
from raytf.training.step_journal import StepOutcome


def check_finite(context: Context, call: CallBatch, outcome: StepOutcome) -> None:
    """Stop the run if a loss or a gradient of the call is NaN or infinite, and no callback handles that.

    Raises:
        NonFiniteLossError: names the first such step of the call.
    """
    bad = np.flatnonzero(~(np.isfinite(outcome.losses) & outcome.finite))
    if not len(bad) or context.callbacks.batches.take_nan:
        return
    step, loss = call.start + int(bad[0]), outcome.losses[bad[0]]
    what = "a gradient became NaN or infinite" if np.isfinite(loss) else f"the loss became {loss}"
    epoch, inside = context.job.epoch_of(step), context.plan.locate(step)[1]
    durable = context.state.durable_step
    kept = "no checkpoint was written yet" if durable is None else f"the checkpoint of step {durable} is kept"
    raise NonFiniteLossError(
        f"{what} at step {step + 1} (epoch {epoch + 1}, batch {inside + 1}); {kept}. "
        "Lower the learning rate, clip gradients (global_clipnorm), or look at that batch.",
        step + 1,
    )


def after_call(context: Context, call: CallBatch, outcome: StepOutcome, seconds: float) -> None:
    """Record a call that has been trained; from now on the run is at the call's last step.

    Args:
        seconds: duration of the call, more than 0.
    """
    state, callbacks = context.state, context.callbacks
    epoch = context.job.epoch_of(call.start)
    state.step = call.stop
    state.imbalance_seconds += (call.stop - call.start) * context.imbalance_seconds
    told = outcome.losses, outcome.learning_rates, outcome.digests, outcome.norms
    context.live.log.add(call.start + 1, epoch, *told)
    digests = [each.tobytes() for each in outcome.digests]
    values = list(zip(outcome.losses.tolist(), outcome.learning_rates.tolist(), strict=True))
    if state.chain:  # a run that began with a raytf that had none has none
        state.chain = step_digest.chained(state.chain, call.start + 1, values, digests)
    context.batch_end = BatchEnd(call.start, context.plan.locate(call.stop - 1)[1])
    end_batch(context)
    state.stopped_early = callbacks.stopped
    is_first = not context.has_trained
    context.seconds_per_step = seconds / (call.stop - call.start)
    if is_first:
        _after_first_call(context)
    if context.reporter.is_status_due():
        loss, rate = float(outcome.losses[-1]), float(outcome.learning_rates[-1])
        context.reporter.scalars({"batch_loss": loss, "learning_rate": rate}, call.stop)
        context.show("training")


def end_batch(context: Context) -> None:
    """Run the callbacks' `on_train_batch_end`, if they have not been told of it; every rank must call it."""
    callbacks, told = context.callbacks, context.batch_end
    if told is None:
        return
    callbacks.begin("call", told.start)
    # Reading metrics from TensorFlow waits for the step, so they are read only if a callback wants them.
    callbacks.run_batch("on_train_batch_end", told.batch, *([context.logs()] if callbacks.has_batch_hooks else []))
    context.batch_end = None


def _after_first_call(context: Context) -> None:
    """Report that the attempt has started to train."""
    attempt = context.attempt
    if context.is_first_rank and context.config.run.histograms_every:
        context.reporter.graph(context.program.step.probe_function.graph)
    warm_pool.trains()
    attempt.phases.mark("first step")
    if context.is_first_rank:
        step, tier = context.origin
        context.reporter.event(
            "attempt",
            attempt=attempt.name,
            world_size=attempt.workers,
            from_step=step,
            tier=tier,
            lost=attempt.lost,
            machine=exact.machine(),
            node=ray.get_runtime_context().get_node_id(),
            phases=attempt.phases.seconds,
        )
    context.show("training")


def are_histograms_due(context: Context) -> bool:
    """Whether histograms of weights and gradients are due after the step that was trained last."""
    every = context.config.run.histograms_every
    return context.is_first_rank and bool(every) and context.state.step % every == 0


def write_histograms(context: Context, outcome: StepOutcome) -> None:
    """If they are due, let rank 0 write histograms of the weights and of the gradients that the last call returned."""
    if not are_histograms_due(context):
        return
    with context.pulse.doing(Activity.CALLBACK):
        model, step = context.program.model, context.program.step
        values: dict[str, Any] = {f"weights/{w.path}": w.value for w in model.trainable_variables}
        values |= {f"gradients/{path}": gradient for path, gradient in step.named_gradients(outcome).items()}
        context.reporter.histograms(values, context.state.step)
