"""The training loop of every rank, which does not depend on how steps are trained.

All ranks run it in lockstep: each decides its next action either from the step alone, or from flags that are summed
over the ranks with the gradients. Only rank 0 writes logs and reports to the driver. If ranks can meet again, the
surviving ranks continue from the current step when one is lost.
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
from raytf.training.model import program_variables
from raytf.training.process.heartbeat import Activity
from raytf.training.regroup import RegroupError
from raytf.training.session import EpochEnd, RankSession


class TrainLoop:
    """Trains a run to its end.

    Args:
        session: this rank's session, ready to train.
    """

    def __init__(self, session: RankSession):
        self._session = session

    def train(self) -> dict[str, Any] | None:
        """Train to the end of the run.

        Returns:
            The run's result on rank 0, and on all ranks if they can meet again; otherwise None.

        Raises:
            NonFiniteLossError: a loss or a gradient is NaN or infinite.
            RaytfError: anything else that ends the run, or that another attempt may recover from.
        """
        self._session.heartbeat.settle(Activity.LOOP, self._session.state.step)
        self._session.show("starting")
        while True:
            try:
                return self._train_to_end()
            except RegroupError:
                pass
            except tf.errors.OpError:
                if not self._session.group.loss:
                    raise
            self._session = startup.meet_again(self._session)

    def _train_to_end(self) -> dict[str, Any] | None:
        session, executor, plan = self._session, self._session.executor, self._session.plan
        self._end_epoch()  # completes an epoch end that was interrupted
        if session.saves_again:
            session.saves_again = False
            session.saving.start()
        while not self._is_over():
            epoch, inside = plan.locate(session.state.step)
            if inside == 0:
                executor.begin_epoch(session.job.epoch_of(session.state.step))
            executor.train_until(min(session.job.end_step, plan.epoch_start(epoch + 1)))
            if session.is_at_epoch_end:
                self._end_epoch()
            executor.rest()
        executor.settle()
        session.show("saving")
        session.saving.finish()
        # If the run ends inside an epoch, this partial epoch end follows the save, so that the checkpoint can be
        # continued with more steps.
        self._end_epoch(is_partial=session.job.stop_step is None)
        session.reporter.finish()
        session.callbacks.begin("end", session.state.step)
        result = finish(session)
        return executor.ended(None if result is None else result | executor.result())

    def _end_epoch(self, is_partial: bool = False) -> None:
        """Run the end of an epoch, unless it has been run."""
        session = self._session
        if session.ended == session.state.step or not (is_partial or session.is_at_epoch_end):
            return
        session.callbacks.begin("end of epoch", session.state.step)
        if session.ending is None or session.ending.step != session.state.step:
            session.ending = EpochEnd(session)
        session.ending.run(session)
        session.ended = session.state.step

    def _is_over(self) -> bool:
        state = self._session.state
        return state.step >= self._session.job.end_step or state.stopped_early


def finish(session: RankSession) -> dict[str, Any] | None:
    """Test and export the model after the last step.

    Returns:
        The run's result on rank 0; None on other ranks.
    """
    model, state = session.model, session.state
    session.heartbeat.settle(Activity.END, state.step)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    latest = state.history[-1] if state.history else {}
    logs = {name: value for name, value in latest.items() if name not in ("epoch", "step")}
    metrics = flat(logs)
    is_all = session.job.stop_step is None
    if is_all:
        # Before the test: EarlyStopping restores its best weights here.
        session.callbacks.run("on_train_end", logs)
    source = session.sources.test if is_all else None
    if source is not None:
        session.show("testing")
        results = session.evaluator("test", source).run(session.heartbeat.progress)
        metrics |= {f"test_{name}": value for name, value in flat(results).items()}
    if not session.is_first_rank:
        return None
    result = _result(session, metrics)
    if is_all:
        session.show("exporting")
        session.callbacks.keep(session.storage)
        program_variables.keep(session.storage, model, session.job.code)
        say = session.reporter.say
        where = session.storage, state.step, result["weights_sha256"], say
        result["export"] = export.export(model, *where)
        session.reporter.upload()
    return result


def _result(session: RankSession, metrics: dict[str, float]) -> dict[str, Any]:
    state, storage = session.state, session.storage
    attempts = read_attempts(storage)
    plan, digest = session.plan, variables.weights_sha256(session.model)
    samples, (epoch, inside) = plan.samples(state.step), plan.locate(state.step)
    return {
        "run": session.config.run.name,
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
        "identity": session.identity,
        "history": state.history,
    }
