"""Keras callbacks of trackers, given to `fit` by the program: they run in its process, where it has set them up.

A worker has none of that (the active run of MLflow, `wandb.init`), and a callback that runs there hears again of what
was lost and is computed again. So these hear in the driver of each committed step, and of each epoch, once.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raytf.driver.tracking import known
from raytf.driver.tracking.points import EPOCH_LOSS, LOSS, RATE, Point
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob, is_function

#: Packages whose callbacks report numbers.
_PACKAGES = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "wandb")


def split(callbacks: Any, model: Any) -> tuple[Any, list[Any]]:
    """(callbacks for rank 0, those of trackers).

    One that saves the model needs the weights that rank 0 has. With a function in place of the model, or of the
    callbacks, there is nothing here that could be told.
    """
    if not isinstance(callbacks, list) or is_function(model):
        return callbacks, []
    theirs = [each for each in callbacks if _reports(type(each))]
    return [each for each in callbacks if not _reports(type(each))], theirs


def _reports(kind: type) -> bool:
    named = kind.__mro__[:-1]
    return any(base.__module__.partition(".")[0] in _PACKAGES for base in named) and not any(
        "Checkpoint" in base.__name__ for base in named
    )


class CallbackTracker:
    """Tells callbacks of a run.

    Args:
        run: its folder.
        callbacks: of trackers.
        model: of the program, compiled.
        job: the run.
    """

    def __init__(self, run: Storage, callbacks: Sequence[Any], model: Any, job: TrainingJob):
        self._run, self._callbacks, self._model, self._job = run, callbacks, model, job
        #: The model's own count of updates, before the run; callbacks read from it in which step they are.
        self._before = 0
        self._epoch: int | None = None
        self._mlflow_run = ""

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        self._before = int(self._model.optimizer.iterations)
        for callback in self._callbacks:
            callback.set_params(self._job.params)
            callback.set_model(self._model)
        self._call("on_train_begin")
        active = _mlflow_run()
        self._mlflow_run = active.info.run_id if active is not None else ""

    def told(self, names: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(names, known.read(self._run).heard)

    def tell(self, points: Sequence[Point]) -> None:
        if self._mlflow_run and _mlflow_run() is None:  # each thread has an active run of its own
            sys.modules["mlflow"].start_run(run_id=self._mlflow_run)
        heard = 0
        try:
            for point in points:
                self._tell(point)
                heard = point.step
        finally:  # a callback that fails hears nothing twice
            if heard:
                dataclasses.replace(known.read(self._run), heard=heard).write(self._run)

    def _tell(self, point: Point) -> None:
        self._model.optimizer.iterations.assign(self._before + point.step)
        epoch, batch = self._job.epoch_of(point.step - 1), self._job.plan.locate(point.step - 1)[1]
        if epoch != self._epoch:
            self._call("on_epoch_begin", epoch)
            self._epoch = epoch
        self._call("on_train_batch_begin", batch)
        self._call("on_train_batch_end", batch, {LOSS: point.values[LOSS]})
        if EPOCH_LOSS in point.values:
            self._call("on_epoch_end", epoch, _logs(point))

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(*args)

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Callbacks take no files."""

    def close(self, is_finished: bool) -> None:
        self._model.optimizer.iterations.assign(self._before)  # the weights are still those before the run
        if is_finished:
            self._call("on_train_end")


def _logs(point: Point) -> dict[str, float]:
    """The metrics of an epoch, by the names that Keras gives them."""
    metrics = {name: value for name, value in point.values.items() if name not in (LOSS, RATE, EPOCH_LOSS)}
    return {LOSS: point.values[EPOCH_LOSS], **metrics}


def _mlflow_run() -> Any:
    """The run that is active in this thread.

    Returns:
        None where there is none, or no MLflow.
    """
    mlflow = sys.modules.get("mlflow")
    return None if mlflow is None else mlflow.active_run()
