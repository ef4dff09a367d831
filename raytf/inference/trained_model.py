"""Loads what a run has trained into this process: the whole model, or its weights into the job's own model."""

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
    """Return the model as a run left it at its end.

    Args:
        make: the job's model function, for a model that Keras does not make again by itself.

    Raises:
        ModelError: the run left none, or it cannot be made again.
    """
    why = f"the run left no {KERAS_FILE}"
    try:
        with _keras_file(run) as file, with_precision(architecture.precision_of(run)):
            if file is not None:
                return run_user_code("loading the model", lambda: keras.saving.load_model(file))
    except JobError as error:
        why = one_line(error, 300)
    if make is not None:
        return load_weights(run, make)
    raise ModelError(
        f"{run.locate('')} holds no model that Keras makes again by itself: {why}. Pass the function that makes it: "
        "Result.load_model(model), or raytf.load_weights(run, model)."
    )


def load_weights(run: Storage, model: keras.Model | Callable[[], keras.Model]) -> keras.Model:
    """Return a model with the weights that a run ended with, or with the newest checkpoint's where it has not ended.

    Args:
        model: with the layers of the run's own, or the function that makes it.

    Raises:
        ModelError: there are no weights, or they are of another model.
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
    """Restore weights and the optimizer's state of a run into the model that it was started with.

    Raises:
        ModelError: the weights are of another model.
    """
    with with_precision(architecture.precision_of(run)), _keras.strategy_scope(model):
        architecture.call(model, run)  # one that was not built yet has no weights
        architecture.build_metrics(model, run)
        if not model.optimizer.built:  # a LossScaleOptimizer would make its variables again
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
    """Restore the optimizer, not the weights: at the end of a run they may be averages, or the best ones."""
    parts = ("optimizer/", "own/")
    own = {name: variable for name, variable in named.items() if name.startswith(parts)}
    variables.restore(own, {name: value for name, value in tensors.items() if name.startswith(parts)})


def _restore_metrics(named: dict[str, keras.Variable], tensors: dict[str, Any]) -> None:
    """Assign the state of the metrics, unless Keras makes their variables only when they first see labels."""
    own = {name: variable for name, variable in named.items() if name.startswith("metrics/")}
    stored = {name: value for name, value in tensors.items() if name.startswith("metrics/")}
    if {n: tuple(v.shape) for n, v in own.items()} == {n: v.shape for n, v in stored.items()}:
        variables.restore(own, stored)


def _put_weights(model: keras.Model, run: Storage) -> None:
    """Assign a run's weights to a model.

    For a finished run, the weights by variable are tried first, then its .keras file, then its newest checkpoint, until
    the model has the weights with which the run ended: an older raytf wrote the weights by variable only where Keras
    could not save the model, and a layer, such as one with LoRA, may save other values than its variables hold.

    Raises:
        ModelError: the run has no weights, or they are of another model.
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
        raise ModelError(f"the weights of {where} are of another model: {one_line(error, 300)}") from error
    if is_other:
        raise ModelError(
            f"the model with the weights of {where} is not what the run ended with (weights_sha256 {wanted}). "
            "Pass the model function of the job."
        )
    raise ModelError(f"{where} holds no weights: it has neither an end nor a whole checkpoint.")


def _put_variables(model: keras.Model, run: Storage) -> bool:
    """Assign the weights that the end of a run wrote by variable; return whether there are any."""
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
    """Yield the path of a local copy of a run's .keras file, or None where it has none."""
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
    """Return tensors of model and optimizer by the names that they have here, matched by their places.

    The names of an optimizer's hold names of layers, which may be others than in the process that trained.
    """
    here = {_place(name): name for name in wanted}
    parts = {part for part, _ in here}
    return {here.get(_place(name), name): value for name, value in tensors.items() if _place(name)[0] in parts}


def _place(name: str) -> tuple[str, str]:
    part, _, rest = name.partition("/")
    return part, rest.partition("/")[0]
