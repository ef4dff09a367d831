"""What becomes of a call of the training step: logs, callbacks, the driver's display, and its results if not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from raytf.data.pipeline import CallBatch
from raytf.errors import NonFiniteLossError
from raytf.training import warm_pool
from raytf.training.context import Context
from raytf.training.heartbeat import Activity
from raytf.training.step import StepOutcome


def check_finite(context: Context, call: CallBatch, outcome: StepOutcome) -> None:
    """Refuse to go on from a loss or a gradient that is not a number.

    Raises:
        NonFiniteLossError: with the first such step of the call.
    """
    bad = np.flatnonzero(~(np.isfinite(outcome.losses) & outcome.finite))
    if not len(bad):
        return
    step, loss = call.start + int(bad[0]), outcome.losses[bad[0]]
    what = "a gradient became NaN or infinite" if np.isfinite(loss) else f"the loss became {loss}"
    epoch, inside = context.plan.locate(step)
    durable = context.state.durable_step
    kept = "no checkpoint was written yet" if durable is None else f"the checkpoint of step {durable} is kept"
    raise NonFiniteLossError(
        f"{what} at step {step + 1} (epoch {epoch + 1}, batch {inside + 1}); {kept}. "
        "Lower the learning rate, clip gradients (global_clipnorm), or look at that batch.",
        step + 1,
    )


def after_call(context: Context, call: CallBatch, outcome: StepOutcome, seconds: float) -> None:
    """Account for a call that has been trained: the run is at its last step from now on.

    Args:
        seconds: that it took, more than 0.
    """
    state, callbacks = context.state, context.callbacks
    epoch, _ = context.plan.locate(call.start)
    state.step = call.stop
    state.imbalance_seconds += (call.stop - call.start) * context.imbalance_seconds
    context.live.log.add(call.start + 1, epoch, outcome.losses, outcome.learning_rates)
    last = context.plan.locate(call.stop - 1)[1]
    # Metrics are read from TensorFlow only for those who want them: it waits for the step.
    callbacks.run_batch("on_train_batch_end", last, *([context.logs()] if callbacks.has_batch_hooks else []))
    state.stopped_early = callbacks.stopped
    is_first = not context.has_trained
    context.seconds_per_step = seconds / (call.stop - call.start)
    if is_first:
        _after_first_call(context)
    if context.reporter.is_status_due():
        loss, rate = float(outcome.losses[-1]), float(outcome.learning_rates[-1])
        context.reporter.scalars({"batch_loss": loss, "learning_rate": rate}, call.stop)
        context.show("training")


def _after_first_call(context: Context) -> None:
    """The attempt has begun to train: tell those who wait for it."""
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
            node=ray.get_runtime_context().get_node_id(),
            phases=attempt.phases.seconds,
        )
    context.show("training")


def are_histograms_due(context: Context) -> bool:
    """Whether histograms of weights and gradients are written after the step that was trained last."""
    every = context.config.run.histograms_every
    return context.is_first_rank and bool(every) and context.state.step % every == 0


def write_histograms(context: Context, outcome: StepOutcome) -> None:
    """Have rank 0 write histograms of the weights, and of the gradients that the last call told, if they are due."""
    if not are_histograms_due(context):
        return
    with context.pulse.doing(Activity.CALLBACK):
        model, step = context.program.model, context.program.step
        values: dict[str, Any] = {f"weights/{w.path}": w.value for w in model.trainable_variables}
        values |= {f"gradients/{path}": gradient for path, gradient in step.named_gradients(outcome).items()}
        context.reporter.histograms(values, context.state.step)
