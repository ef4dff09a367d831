"""The training loop of every rank, independent of how the steps are trained.

All ranks run it in lockstep: what decides the next action is either arithmetic on the step, or a flag that was summed
over the ranks together with the gradients. Only rank 0 writes logs and talks to the driver. Where ranks can meet again,
those that are left when one is lost go on where they are.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from raytf.training import startup
from raytf.training.context import Context
from raytf.training.epoch_end import EpochEnd
from raytf.training.executor import Executor
from raytf.training.heartbeat import Activity
from raytf.training.regroup import RegroupError
from raytf.training.run_end import finish


class TrainLoop:
    """Trains a run to its end.

    Args:
        context: this rank, ready to train.
        executor: trains the steps between the ends of two epochs.
    """

    def __init__(self, context: Context, executor: Executor):
        self._context, self._executor = context, executor

    def train(self) -> dict[str, Any] | None:
        """Train to the end of the run.

        Returns:
            The run's result on rank 0, and on all ranks where they can meet again; None on any other.

        Raises:
            NonFiniteLossError: a loss or a gradient is NaN or infinite.
            RaytfError: anything else that ends the run, or that another attempt may recover from.
        """
        self._context.pulse.settle(Activity.LOOP, self._context.state.step)
        self._context.show("starting")
        while True:
            try:
                return self._go_on()
            except RegroupError:
                pass
            except tf.errors.OpError:
                if not self._context.attempt.group.loss:
                    raise
            self._context = startup.meet_again(self._context, self._executor)

    def _go_on(self) -> dict[str, Any] | None:
        context, executor, plan = self._context, self._executor, self._context.plan
        self._end_epoch()  # if it was interrupted
        if context.saves_again:
            context.saves_again = False
            context.saving.start()
        while not self._is_over():
            epoch, inside = plan.locate(context.state.step)
            if inside == 0:
                executor.begin_epoch(context.job.epoch_of(context.state.step))
            executor.train_until(min(context.job.end_step, plan.epoch_start(epoch + 1)))
            if context.is_at_epoch_end:
                self._end_epoch()
            executor.rest()
        executor.settle()
        context.show("saving")
        context.saving.finish()
        # If the run ends inside an epoch, the checkpoint was saved before this partial epoch end, so that the run can
        # be continued with more steps.
        self._end_epoch(is_partial=context.job.stop_step is None)
        context.reporter.finish()
        context.callbacks.begin("end", context.state.step)
        result = finish(context)
        return executor.ended(None if result is None else result | executor.result())

    def _end_epoch(self, is_partial: bool = False) -> None:
        """What follows the last step of an epoch, unless it was done."""
        context = self._context
        if context.ended == context.state.step or not (is_partial or context.is_at_epoch_end):
            return
        context.callbacks.begin("end of epoch", context.state.step)
        if context.ending is None or context.ending.step != context.state.step:
            context.ending = EpochEnd(context)
        context.ending.run(context)
        context.ended = context.state.step

    def _is_over(self) -> bool:
        state = self._context.state
        return state.step >= self._context.job.end_step or state.stopped_early
