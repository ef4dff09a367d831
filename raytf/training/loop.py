"""The training loop of every rank, independent of how the steps are trained.

All ranks run it in lockstep: what decides the next action is either arithmetic on the step, or a flag that was summed
over the ranks together with the gradients. Only rank 0 writes logs and talks to the driver.
"""

from __future__ import annotations

from typing import Any

from raytf.training.context import Context
from raytf.training.epoch_end import end_epoch
from raytf.training.executor import Executor
from raytf.training.heartbeat import Activity
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
            The run's result on rank 0, None on any other.

        Raises:
            NonFiniteLossError: a loss or a gradient is NaN or infinite.
            RaytfError: anything else that ends the run, or that another attempt may recover from.
        """
        context, executor, plan = self._context, self._executor, self._context.plan
        context.pulse.settle(Activity.LOOP, context.state.step)
        context.show("starting")
        while not self._is_over():
            epoch, inside = plan.locate(context.state.step)
            if inside == 0:
                executor.begin_epoch(context.job.epoch_of(context.state.step))
            executor.train_until(min(context.job.total_steps, (epoch + 1) * plan.steps_per_epoch))
            if context.is_at_epoch_end:
                end_epoch(context)
            executor.rest()
        executor.settle()
        context.show("saving")
        context.saving.finish()
        if not context.is_at_epoch_end:
            # The run ends inside an epoch. The checkpoint was saved before this partial epoch end, so that the run can
            # be continued with more steps.
            end_epoch(context)
        context.reporter.finish()
        result = finish(context)
        return None if result is None else result | executor.result()

    def _is_over(self) -> bool:
        state = self._context.state
        return state.step >= self._context.job.total_steps or state.stopped_early
