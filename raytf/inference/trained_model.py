"""The model that a run has trained, made again in this process: whole, or its weights in the job's own model."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras

from raytf.checkpoint import audit, codec, durable, variables
from raytf.checkpoint.audit import Worth
from raytf.checkpoint.variables import weights_sha256
from raytf.errors import CheckpointError, JobError, ModelError, one_line
from raytf.inference import architecture
from raytf.inference.model_files import KERAS_FILE, WEIGHTS_FILE
from raytf.inference.user_model import run_user_code, with_precision
from raytf.runs import run_log
from raytf.storage.storage import Storage


def load(run: Storage, make: Callable[[], keras.Model] | None = None) -> keras.Model:
    """The model as a run left it at its end.

    Args:
        make: the job's model function, for a model that Keras does not make again by itself.

    Raises:
        ModelError: the run left none, or it cannot be made again.
    """
    why = f"the run left no {KERAS_FILE}"
    if run.exists(KERAS_FILE):
        try:
            with _keras_file(run) as file, with_precision(architecture.precision_of(run)):
                return run_user_code("loading the model", lambda: keras.saving.load_model(file))
        except JobError as error:
            why = one_line(error, 300)
    if make is not None:
        return load_weights(run, make)
    raise ModelError(
        f"{run.locate('')} holds no model that Keras makes again by itself: {why}. Give the function that makes it: "
        "Result.load_model(model), or raytf.load_weights(run, model)."
    )


def load_weights(run: Storage, model: keras.Model | Callable[[], keras.Model]) -> keras.Model:
    """A model with the weights that a run ended with, or, where it has not ended, with those of its newest checkpoint.

    Args:
        model: with the layers of the run's own, or the function that makes it.

    Raises:
        ModelError: there are no weights, or they are of another model.
    """
    with with_precision(architecture.precision_of(run)):
        made = model if isinstance(model, keras.Model) else run_user_code("the model function", model)
        if not isinstance(made, keras.Model):
            raise ModelError(f"the model function returned {type(made).__name__}. Expected a keras.Model.")
        architecture.call(made, run)
    result = run_log.read_result(run)
    try:
        _put_weights(made, run)
    except (CheckpointError, JobError) as error:
        raise ModelError(f"the weights of {run.locate('')} are of another model: {one_line(error, 300)}") from error
    wanted = (result or {}).get("weights_sha256")
    if wanted and weights_sha256(made) != wanted:
        raise ModelError(
            f"the model with the weights of {run.locate('')} is not what the run ended with (weights_sha256 {wanted}). "
            "Give the model function of the job."
        )
    return made


def give_back(run: Storage, model: keras.Model) -> keras.Model:
    """Give the model that a run was started with what it has learned: weights, and the state of its optimizer.

    Raises:
        ModelError: the weights are of another model.
    """
    with with_precision(architecture.precision_of(run)):
        architecture.call(model, run)  # one that was not built yet has no weights
        model.optimizer.build(model.trainable_variables)
    load_weights(run, model)
    finding = next((f for f in audit.inspect(run) if f.state is Worth.WHOLE), None)
    if finding is not None:
        named = variables.weights(model, model.optimizer)
        tensors = renamed(durable.load(run, finding.name).tensors, list(named))
        _restore_optimizer(named, tensors)
    return model


def _restore_optimizer(named: dict[str, keras.Variable], tensors: dict[str, Any]) -> None:
    """Leaves the weights alone: at the end of a run they may be averages, or the best ones."""
    parts = ("optimizer/", "own/")
    own = {name: variable for name, variable in named.items() if name.startswith(parts)}
    variables.restore(own, {name: value for name, value in tensors.items() if name.startswith(parts)})


def _put_weights(model: keras.Model, run: Storage) -> None:
    """Give a model a run's weights, from whatever holds them."""
    is_over = run_log.read_result(run) is not None
    if is_over and (data := run.get_or_none(WEIGHTS_FILE)) is not None:
        _restore(model, codec.decode(data))
    elif is_over and run.exists(KERAS_FILE):
        with _keras_file(run) as file:
            run_user_code("loading the weights", lambda: model.load_weights(file))
    else:
        finding = next((f for f in audit.inspect(run) if f.state is Worth.WHOLE), None)
        if finding is None:
            raise ModelError(f"{run.locate('')} holds no weights: it has neither an end nor a whole checkpoint.")
        _restore(model, durable.load(run, finding.name).tensors)


def _restore(model: keras.Model, tensors: dict[str, Any]) -> None:
    named = variables.weights(model)
    variables.restore(named, renamed(tensors, list(named)))


@contextlib.contextmanager
def _keras_file(run: Storage) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        file = os.path.join(folder, KERAS_FILE)
        with open(file, "wb") as out:
            out.write(run.get(KERAS_FILE))
        architecture.check_archive(file)
        yield file


def renamed(tensors: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """Tensors of model and optimizer by the names that they have here, found by their places.

    The names of an optimizer's hold names of layers, which may be others than in the process that trained.
    """
    here = {_place(name): name for name in wanted}
    parts = {part for part, _ in here}
    return {here.get(_place(name), name): value for name, value in tensors.items() if _place(name)[0] in parts}


def _place(name: str) -> tuple[str, str]:
    part, _, rest = name.partition("/")
    return part, rest.partition("/")[0]
