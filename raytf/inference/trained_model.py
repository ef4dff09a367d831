"""Loads a run's trained model into this process: the whole model, or its weights into the job's own model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from raytf import _keras
from raytf.checkpoint import codec, durable, variables, verify
from raytf.checkpoint.variables import weights_sha256
from raytf.checkpoint.verify import CheckpointFinding, Worth
from raytf.errors import CheckpointError, JobError, ModelError, one_line
from raytf.inference import architecture
from raytf.inference.architecture import KERAS_FILE, WEIGHTS_FILE
from raytf.inference.user_model import run_user_code, with_precision
from raytf.runs import run_log
from raytf.storage.storage import Storage


def load(run: Storage, make: Callable[[], keras.Model] | None = None) -> keras.Model:
    """Return the model as it was at the end of a run.

    Args:
        make: the job's model function, for a model that Keras cannot load by itself.

    Raises:
        ModelError: the run has no model, or it cannot be loaded.
    """
    why = f"the run wrote no {KERAS_FILE}"
    try:
        with _keras_file(run) as file, with_precision(architecture.precision_of(run)):
            if file is not None:
                return run_user_code("loading the model", lambda: keras.saving.load_model(file))
    except JobError as error:
        why = one_line(error, 300)
    if make is not None:
        return load_weights(run, make)
    raise ModelError(
        f"{run.locate('')} holds no model that Keras can load by itself: {why}. Pass the function that makes it: "
        "Result.load_model(model), or raytf.load_weights(run, model)."
    )


def load_weights(run: Storage, model: keras.Model | Callable[[], keras.Model]) -> keras.Model:
    """Return a model with a run's final weights, or those of its newest checkpoint if the run has not ended.

    Args:
        model: a model with the same layers as the run's, or the function that makes it.

    Raises:
        ModelError: there are no weights, or they belong to another model.
    """
    with with_precision(architecture.precision_of(run)):
        made = model if isinstance(model, keras.Model) else run_user_code("the model function", model)
        if not isinstance(made, keras.Model):
            raise ModelError(f"the model function returned {type(made).__name__}. Expected a keras.Model.")
        with _keras.strategy_scope(made):
            architecture.call(made, run)
            _put_weights(made, run)
    return made


def give_back(run: Storage, model: keras.Model) -> keras.Model:
    """Restore a run's weights, and the states of its optimizer and metrics, into the model that it started with.

    Raises:
        ModelError: the weights belong to another model.
    """
    with with_precision(architecture.precision_of(run)), _keras.strategy_scope(model):
        architecture.call(model, run)  # an unbuilt model has no weights
        architecture.build_metrics(model, run)
        if not model.optimizer.built:  # a LossScaleOptimizer would create its variables again
            model.optimizer.build(model.trainable_variables)
    load_weights(run, model)
    finding = _newest_checkpoint(run)
    if finding is not None:
        named = variables.variables(model)
        tensors = renamed(durable.load(run, finding.name).tensors, list(named))
        with _keras.strategy_scope(model):
            _restore_optimizer(named, tensors)
            _restore_metrics(named, tensors)
    return model


def _restore_optimizer(named: dict[str, keras.Variable], tensors: dict[str, Any]) -> None:
    """Restore only the optimizer: a run's final weights may be averages or the best ones, not the checkpoint's."""
    parts = ("optimizer/", "own/")
    own = {name: variable for name, variable in named.items() if name.startswith(parts)}
    variables.restore(own, {name: value for name, value in tensors.items() if name.startswith(parts)})


def _restore_metrics(named: dict[str, keras.Variable], tensors: dict[str, Any]) -> None:
    """Restore the metrics, unless some have no variables yet because Keras creates them at the first labels."""
    own = {name: variable for name, variable in named.items() if name.startswith("metrics/")}
    stored = {name: value for name, value in tensors.items() if name.startswith("metrics/")}
    if {n: tuple(v.shape) for n, v in own.items()} == {n: v.shape for n, v in stored.items()}:
        variables.restore(own, stored)


def _put_weights(model: keras.Model, run: Storage) -> None:
    """Assign a run's weights to a model.

    For a finished run, try the weights by variable, then the .keras file, then the newest checkpoint, until the model
    has the run's final weights. An older raytf wrote the weights by variable only if Keras could not save the model.
    In a .keras file, a layer (such as one with LoRA) may save other values than its variables hold.

    Raises:
        ModelError: the run has no weights, or they belong to another model.
    """
    result = run_log.read_result(run)
    wanted = (result or {}).get("weights_sha256")
    error: Exception | None = None
    is_other = False
    for put in (_put_variables, _put_keras_file, _put_checkpoint) if result is not None else (_put_checkpoint,):
        try:
            has_some = put(model, run)
        except (CheckpointError, JobError) as problem:
            error = error or problem
            continue
        if has_some and (not wanted or weights_sha256(model) == wanted):
            return
        is_other = is_other or has_some
    where = run.locate("")
    if error is not None:
        raise ModelError(f"the weights of {where} belong to another model: {one_line(error, 300)}") from error
    if is_other:
        raise ModelError(
            f"with the weights of {where}, this model differs from the run's final one (weights_sha256 {wanted}). "
            "Pass the model function of the job."
        )
    raise ModelError(f"{where} holds no weights: the run has neither ended nor saved a whole checkpoint.")


def _put_variables(model: keras.Model, run: Storage) -> bool:
    """Assign the weights that a run wrote by variable at its end; return whether there are any."""
    data = run.get_or_none(WEIGHTS_FILE)
    if data is not None:
        _restore(model, codec.decode(data))
    return data is not None


def _put_keras_file(model: keras.Model, run: Storage) -> bool:
    """Have Keras load the weights of a run's .keras file; return whether there is one."""
    with _keras_file(run) as file:
        if file is not None:
            run_user_code("loading the weights", lambda: model.load_weights(file))
    return file is not None


def _put_checkpoint(model: keras.Model, run: Storage) -> bool:
    """Assign the weights of a run's newest whole checkpoint; return whether there is one."""
    finding = _newest_checkpoint(run)
    if finding is not None:
        _restore(model, durable.load(run, finding.name).tensors)
    return finding is not None


def _newest_checkpoint(run: Storage) -> CheckpointFinding | None:
    return next((f for f in verify.inspect(run) if f.state is Worth.WHOLE), None)


def _restore(model: keras.Model, tensors: dict[str, Any]) -> None:
    named = variables.weights(model)
    variables.restore(named, renamed(tensors, list(named)))


@contextlib.contextmanager
def _keras_file(run: Storage) -> Iterator[str | None]:
    """Yield the path of a local copy of a run's .keras file, or None if it has none."""
    data = run.get_or_none(KERAS_FILE)
    if data is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        file = Path(folder, KERAS_FILE)
        file.write_bytes(data)
        architecture.check_archive(str(file))
        yield str(file)


def renamed(tensors: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """Return tensors of the model and its optimizer under their names in this process, matched by position.

    Names of an optimizer's tensors contain names of layers, which may differ from those in the process that trained.
    """
    here = {_place(name): name for name in wanted}
    parts = {part for part, _ in here}
    return {here.get(_place(name), name): value for name, value in tensors.items() if _place(name)[0] in parts}


def _place(name: str) -> tuple[str, str]:
    part, _, rest = name.partition("/")
    return part, rest.partition("/")[0]
