"""The result of a finished run, for a program: its numbers, and the model with its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from raytf import _process
from raytf.distributed.gpu import visibility
from raytf.runs.status import number_text
from raytf.runs.timeline import counted
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob, is_function

#: A shorter run spends most of its time starting.
_LONG_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a finished run.

    Attributes:
        metrics: last training and validation metrics, and the test metrics as `test_...`.
        steps: global steps.
        path: the run's folder.
        weights_sha256: hash of all weights; see `raytf.checkpoint.variables.weights_sha256` for the order.
        document: all of `result.json`.
        model: the trained keras.Model, if `fit` got one; otherwise see `load_model`.
        params: the parameters that Keras passes to callbacks: `verbose`, `epochs`, and `steps` per epoch.
    """

    metrics: dict[str, float]
    steps: int
    path: str
    weights_sha256: str
    document: dict[str, Any]
    model: Any = dataclasses.field(default=None, repr=False, compare=False)
    _model: Callable[[], Any] | None = dataclasses.field(default=None, repr=False, compare=False)
    params: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        epochs = len(self.document.get("history", []))
        return (
            f"raytf.Result of {self.path}\n"
            f"  steps:   {self.steps:,} in {epochs} epoch{'s' if epochs != 1 else ''}\n"
            f"  metrics: {metrics or 'none'}\n"
            f"  weights: SHA-256 {self.weights_sha256}\n"
            "  more:    .history, .model, .load_model(), .document"
        )

    @property
    def history(self) -> dict[str, list[Any]]:
        """Return the values of each metric, one per epoch, as in `keras.callbacks.History.history`."""
        values: dict[str, list[Any]] = {}
        for entry in self.document["history"]:
            for name, value in entry.items():
                if name not in ("epoch", "step"):
                    values.setdefault(name, []).append(value)
        return values

    @property
    def epoch(self) -> list[int]:
        """Return the numbers of the epochs of `history`."""
        return [entry["epoch"] for entry in self.document["history"]]

    def load_model(self, model: Callable[[], Any] | None = None) -> Any:
        """Load the trained keras.Model into this process, which imports TensorFlow.

        If Keras cannot rebuild the model by itself (a Lambda layer, a class without get_config), the model function
        builds it, and it gets the run's weights.

        Args:
            model: function that returns the model; by default the function that was passed to `fit`.

        Returns:
            The keras.Model.

        Raises:
            ModelError: the run has no model.
            JobError: the function raised.
        """
        with visibility.unseen():
            _process.load_tensorflow()
        from raytf.inference import trained_model

        return trained_model.load(Storage(self.path), model or self._model)


def result_of(run: Storage, document: dict[str, Any], model: Any, callbacks: Any, job: TrainingJob) -> Result:
    """Return the result of a run from its `result.json`, and copy the trained state into the program's objects."""
    figures = document["metrics"], document["steps"], run.locate(""), document["weights_sha256"], document
    if job.code.variables():
        from raytf.training.model import program_variables  # needs Keras, which is loaded if there are variables

        program_variables.give_back(run, job.code)
    if is_function(model):
        return Result(*figures, None, model, job.params)
    from raytf.inference import trained_model
    from raytf.training.user import later_files
    from raytf.training.user.callbacks import give_back

    trained = trained_model.give_back(run, model)
    if callbacks and not callable(callbacks):
        give_back(run, callbacks, trained, job.params)
    later_files.give_back(run, job.code.files())
    return Result(*figures, trained, lambda: model, job.params)


def load_weights(run: str, model: Any) -> Any:
    """Return a model with a run's weights: the final weights, or those of the newest checkpoint of an unfinished run.

    Args:
        run: the run's folder, `Result.path`.
        model: the job's model function, or a keras.Model of the same layers.

    Returns:
        The keras.Model.

    Raises:
        ModelError: the run has no weights, or they belong to another model.
    """
    with visibility.unseen():
        _process.load_tensorflow()
    from raytf.inference import trained_model

    return trained_model.load_weights(Storage(run), model)


def summary(document: dict[str, Any]) -> str:
    """Return the last lines that the user sees of a run."""
    metrics = ", ".join(f"{name} {number_text(value)}" for name, value in document["metrics"].items())
    rate = document["samples_per_second"]
    waited, restarts = document["imbalance_seconds"], counted(document["restarts"], document.get("regroups", 0))
    return (
        f"finished: {document['steps']} steps, {metrics}\n"
        + (f"{rate:,.0f} samples/s, " if rate else "")
        + f"{restarts}, "
        + _goodput(document)
        + (f"{waited:.1f} s lost to uneven shards, " if waited >= 0.05 else "")
        + _left(document.get("export") or {})
    )


def _goodput(document: dict[str, Any]) -> str:
    """Return a text with the share of time spent on new steps; empty for short runs, which mostly start up."""
    is_long = sum(document.get("seconds", {}).values()) >= _LONG_SECONDS
    return f"goodput {document['goodput']:.0%}, " if is_long and "goodput" in document else ""


def _left(export: dict[str, str]) -> str:
    """Return a text that says where the model is, in the most useful form that exists."""
    kind = next((kind for kind in ("saved_model", "keras", "weights") if kind in export), None)
    if kind is None:
        return "the model is only in the last checkpoint"
    return f"{'weights' if kind == 'weights' else 'model'} in {export[kind]}"
