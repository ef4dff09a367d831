"""The training loop of every rank, independent of how the steps are trained.

All ranks run it in lockstep: what decides the next action is either arithmetic on the step, or a flag that was summed
over the ranks together with the gradients. Only rank 0 writes logs and talks to the driver. Where ranks can meet again,
the surviving ranks continue from the current step when one is lost.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from raytf.checkpoint import variables
from raytf.config.objective import flat
from raytf.inference import export
from raytf.runs.events import HELD
from raytf.runs.run_log import read_attempts
from raytf.training import startup
from raytf.training.executor import Executor
from raytf.training.model import program_variables
from raytf.training.process.heartbeat import Activity
from raytf.training.regroup import RegroupError
from raytf.training.session import Context, EpochEnd


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
        """Do what follows the last step of an epoch, unless it was done."""
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


def finish(context: Context) -> dict[str, Any] | None:
    """Test and export the model of a run that has trained.

    Returns:
        The run's result on rank 0, None on any other.
    """
    model, state = context.program.model, context.state
    context.pulse.settle(Activity.END, state.step)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    latest = state.history[-1] if state.history else {}
    logs = {name: value for name, value in latest.items() if name not in ("epoch", "step")}
    metrics = flat(logs)
    is_all = context.job.stop_step is None
    if is_all:
        # Before the test: EarlyStopping restores its best weights here.
        context.callbacks.run("on_train_end", logs)
    source = context.program.sources.test if is_all else None
    if source is not None:
        context.show("testing")
        results = context.evaluators.evaluate("test", source, context.pulse.progress)
        metrics |= {f"test_{name}": value for name, value in flat(results).items()}
    if not context.is_first_rank:
        return None
    result = _result(context, metrics)
    if is_all:
        context.show("exporting")
        context.callbacks.keep(context.attempt.storage)
        program_variables.keep(context.attempt.storage, model, context.job.code)
        say = context.reporter.say
        where = context.attempt.storage, state.step, result["weights_sha256"], say
        result["export"] = export.export(model, *where)
        context.reporter.upload()
    return result


def _result(context: Context, metrics: dict[str, float]) -> dict[str, Any]:
    state, storage = context.state, context.attempt.storage
    attempts = read_attempts(storage)
    plan, digest = context.plan, variables.weights_sha256(context.program.model)
    samples, (epoch, inside) = plan.samples(state.step), plan.locate(state.step)
    return {
        "run": context.config.run.name,
        "status": "finished",
        "metrics": metrics,
        "steps": state.step,
        "epochs": epoch + inside / plan.steps_per_epoch,
        "samples": samples,
        "stopped_early": state.stopped_early,
        "train_seconds": state.train_seconds,
        "imbalance_seconds": state.imbalance_seconds,
        "world_sizes": sorted({a["world_size"] for a in attempts}),
        "restarts": max(0, len(attempts) - 1),
        "regroups": sum(a.get("tier") == HELD for a in attempts),
        "weights_sha256": digest,
        "identity": context.program.identity,
        "history": state.history,
    }
