"""Builds and checks the user's model, and describes it so that a resumed run can be compared with it."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from raytf import _keras
from raytf._keras import interception
from raytf.checkpoint import variables
from raytf.config import canonical_text, precision
from raytf.config.flags import ComputeSection
from raytf.config.objective import flat
from raytf.config.precision import Precision
from raytf.data import tree
from raytf.data.sources import Source
from raytf.errors import DataError, JobError, ModelError, WholeBatchError, one_line
from raytf.inference import own_run
from raytf.inference.own_run import overrides_step, overrides_test
from raytf.inference.user_model import run_user_code, set_precision, takes_training
from raytf.runs.program_output import ProgramOutput
from raytf.training.model import batch_metrics, losses
from raytf.training.model.notes import notes_of

#: The most records in the sample that a model is built with.
SAMPLE = 8
_NOTHING_TO_TRAIN = "the model has no trainable weights, so training changes no weights, as in Keras."
_TRACED = (
    "the model is compiled with run_eagerly=True, but workers trace its step: its Python code runs only once, so prints"
    " and breakpoints in it are not reached with each batch. Use tf.print, or debug with plain Keras."
)


def build(
    factory: Callable[[], keras.Model],
    sample: tuple[Any, Any, Any],
    sources: list[Source],
    compute: ComputeSection,
    seed: int,
    say: Callable[[str | ProgramOutput], None] = print,
    own: Precision = precision.DEFAULT,
    records: tuple[int, int] = (2, 2),
) -> keras.Model:
    """Call the user's model function, and build all variables of the model, its metrics and its optimizer.

    Args:
        factory: returns a compiled model.
        sample: (x, y, sample_weight) of a few records.
        sources: sources whose labels must fit the model.
        compute: the compute settings, which include mixed precision.
        seed: seed of the initial weights.
        say: called with the function's output and warnings, and with the dtype policy if the job has set one.
        own: the precision that the job has set in Keras, which may differ from the settings of this process.
        records: number of records in a full shard, and in a full batch, for a `train_step` that depends on them.

    Raises:
        ConfigError: --mixed-precision contradicts the job's own setting.
        ModelError, DataError, JobError: the model, the data or the job's code is wrong; the message names the fix.
        WholeBatchError: the model's own step accepts a whole batch, but no shard of it.
    """
    keras.utils.set_random_seed(seed)
    set_precision(precision.choose(compute.mixed_precision, own))
    model = run_user_code("the model function", factory, say)
    if not isinstance(model, keras.Model):
        raise ModelError(f"the model function returned {type(model).__name__}. Expected a compiled keras.Model.")
    if not getattr(model, "compiled", False):
        raise ModelError("the model is not compiled. Call model.compile(optimizer=..., loss=...) before returning it.")
    if model.optimizer is None:
        raise ModelError("the model is compiled without an optimizer. Pass one to model.compile(optimizer=...).")
    if getattr(model, "run_eagerly", False):
        say(_TRACED)
    _check_stateless(model)
    for source in sources:
        _check_rows(model, source)
    if overrides_step(model):
        _build_with_custom_step(model, sample, records, len(sources) > 1)
        _check_policies(model, compute, say)
        model.reset_metrics()
    else:
        _build_with_losses(model, sample, sources, compute, say, records)
    if not model.optimizer.built:  # in a second `fit`, a built LossScaleOptimizer would create its variables again
        model.optimizer.build(model.trainable_variables)
    return model


def _build_with_losses(
    model: keras.Model,
    sample: tuple[Any, Any, Any],
    sources: list[Source],
    compute: ComputeSection,
    say: Callable[[str | ProgramOutput], None],
    records: tuple[int, int],
) -> None:
    """Build the variables of a model that trains with Keras's own step, and note how to treat losses and metrics."""
    x, y, weight = (tree.map_leaves(keras.ops.convert_to_tensor, part) for part in sample)
    try:
        with losses.added() as adds:
            predicted = _predictions(model, x)
    except Exception as error:
        shapes = ", ".join(f"{path or 'x'} {leaf.shape[1:]} {leaf.dtype}" for path, leaf in tree.flatten(sample[0]))
        raise DataError(
            f"the model does not accept the data. One record is {shapes}; the model's input is {_inputs(model)}. "
            f"Keras reported: {one_line(error, 300)}"
        ) from error
    _check_policies(model, compute, say)
    if not _has_own_loss(model) and not _adds_loss(model, x):
        raise ModelError(
            "the model is compiled without a loss, and no layer adds one. Pass one to model.compile(loss=...), call "
            "self.add_loss(...) in a layer, or override compute_loss."
        )
    for source in sources:
        _check_labels(model, source)
    try:
        compute_loss(model, x, y, predicted, weight, training=True)
        if losses.count(model):  # Keras builds its list of compiled losses in the call above
            with losses.measured_divisors(model) as divisors:
                compute_loss(model, x, y, predicted, weight, training=True)
            losses.note_divisors(model, divisors)
        model.compute_metrics(x, y, predicted, weight)
    except Exception as error:
        raise DataError(
            "the loss or a metric does not accept the labels: labels are "
            f"{_shapes(sample[1])}, predictions {_shapes(tree.map_leaves(np.asarray, predicted))}. "
            f"Keras reported: {one_line(error, 300)}"
        ) from error
    model.reset_metrics()
    if not model.trainable_variables:
        say(_NOTHING_TO_TRAIN)
    _note_loss(model, (x, y, weight), predicted, bool(adds), records)
    _note_metrics(model, (x, y, weight), predicted, sources, records[1])


def _predictions(model: keras.Model, x: Any) -> Any:
    """Return a model's predictions for a batch. This builds the model, and leaves its layers' state unchanged."""
    arguments = {"training": False} if takes_training(model) else {}
    if not all(layer.built for layer in _keras.layers_within(model)):
        with contextlib.suppress(Exception):  # the call below raises the error again, with real data
            keras.backend.compute_output_spec(model, x, **arguments)
    with variables.unchanged(model.non_trainable_variables):
        return model(x, **arguments)


def _note_loss(
    model: keras.Model, batch: tuple[Any, Any, Any], predicted: Any, adds: bool, records: tuple[int, int]
) -> None:
    """Note in the model how the loss of a batch follows from its shards' losses, or a warning that it does not."""
    if overrides_loss(model) and sums_over_batch(model):  # its value does not show which parts of it are sums
        return
    try:
        warning = losses.check(model, batch, predicted, overrides_loss(model), adds)
    except Exception:  # a model or loss may refuse another number of records, and then nothing can be compared
        return
    if warning and records[0] < records[1]:
        notes_of(model).remarks.append(warning)


def _note_metrics(
    model: keras.Model, batch: tuple[Any, Any, Any], predicted: Any, sources: list[Source], size: int
) -> None:
    """Note in the model how its metrics follow from the shards' metrics."""
    if not batch_metrics.own_metrics(model):
        return
    x, y, weight = batch
    count = len(tree.flatten(x)[0][1])
    has_lengths = all(spec.has_lengths for source in sources for _, spec in tree.flatten(source.spec))
    values = [(variable, variable.value) for variable in model.variables]
    with keras.StatelessScope(values, collect_losses=True), batch_metrics.noted(model, count) as collected:
        if batch_metrics.needs_call(model):
            predicted = model(x, training=False) if takes_training(model) else model(x)
            compute_loss(model, x, y, predicted, weight, training=True)
        model.compute_metrics(x, y, predicted, weight)
    batch_metrics.note(model, collected, count, size, has_lengths)


def _check_policies(model: keras.Model, compute: ComputeSection, say: Callable[[str | ProgramOutput], None]) -> None:
    policies = _layer_policies(model)
    precision.check_made(compute.mixed_precision, precision.of_process(), policies)
    if compute.mixed_precision is None and set(policies) - {"float32"}:
        say(f"dtype policy, as the job has set it: {', '.join(policies)}")


def _layer_policies(model: keras.Model) -> list[str]:
    """Return the names of the dtype policies of all layers that have weights, sorted and without duplicates."""
    layers = [each for each in _keras.layers_within(model) if each.variables and not _keras.has_layers(each)]
    return sorted({each.dtype_policy.name for each in layers})


def scaled_policy(model: keras.Model) -> str:
    """Return the dtype policy for which the model's optimizer scales the loss; empty if it does not scale it."""
    is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return precision.POLICIES["float16"] if is_scaled else ""


def compute_loss(model: keras.Model, x: Any, y: Any, predicted: Any, sample_weight: Any, training: bool) -> Any:
    """Compute the loss as Keras's own steps do: compiled losses, losses that layers have added, and regularizers.

    A model without a compiled loss whose layers add losses only in training has no loss in an evaluation: the result is
    then zero, as with Keras on JAX.
    """
    if not _has_own_loss(model) and not model.losses:
        return keras.ops.zeros(())
    return _keras.compute_loss(model, x, y, predicted, sample_weight, training)


def check_added(model: keras.Model, collected: list[Any]) -> None:
    """Refuse a tensor that two layers add to the loss, since a stateless scope counts each copy for both layers.

    Args:
        collected: the losses of the scope in which the model was called.

    Raises:
        ModelError: two layers add the same tensor.
    """
    if not collected:
        return
    added = {id(loss) for loss in collected}
    if sum(id(loss) in added for loss in model.losses) > len(collected):
        raise ModelError(
            "two layers add the same tensor to the loss, as self.add_loss(self.inner.losses) does. The model's loss "
            "already includes what inner layers add: remove the call, or add 1.0 * loss, which is another tensor."
        )


def overrides_loss(model: keras.Model) -> bool:
    """Return whether the model has a `compute_loss` of its own."""
    return type(model).compute_loss is not keras.Model.compute_loss


def _has_own_loss(model: keras.Model) -> bool:
    return _keras.compiled_loss(model) is not None or overrides_loss(model)


def _adds_loss(model: keras.Model, x: Any) -> bool:
    """Return whether layers or regularizers add a loss in training; tried in a call that changes nothing."""
    with keras.StatelessScope([(v, v.value) for v in model.variables], collect_losses=True):
        run_user_code("the model", lambda: model(x, training=True) if takes_training(model) else model(x))
        return bool(model.losses)


def _check_labels(model: keras.Model, source: Source) -> None:
    classes, span = sparse_classes(model), source.label_range()
    if classes is None or span is None:
        return
    if span[0] < 0 or span[1] >= classes:
        raise DataError(
            f"{source.name}: labels go from {span[0]:.0f} to {span[1]:.0f}, but the model has {classes} outputs, for "
            f"classes 0 to {classes - 1}. Use {int(span[1]) + 1} units in the last layer, or number the classes from 0."
        )


def sparse_classes(model: keras.Model) -> int | None:
    """Return the number of classes, if the only loss is sparse categorical crossentropy.

    Returns:
        None for any other loss, or if the number is not known.
    """
    loss = model.loss
    name = loss if isinstance(loss, str) else type(loss).__name__ if not inspect.isfunction(loss) else loss.__name__
    if name not in ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy"):
        return None
    shape = getattr(model, "output_shape", None)
    return shape[-1] if isinstance(shape, tuple) and shape and isinstance(shape[-1], int) else None


def sums_over_batch(model: keras.Model) -> bool:
    """Return whether the compiled losses are sums, not means, over the batch.

    Raises:
        ModelError: some losses are sums and some are means.
    """
    kinds = {
        getattr(loss, "reduction", "sum_over_batch_size") == "sum"
        for _, loss in tree.flatten(model.loss)
        if loss is not None
    }
    if len(kinds) > 1:
        raise ModelError("some losses are compiled with reduction='sum' and some are not. Use one kind for all.")
    return kinds == {True} or notes_of(model).is_sum


def logs(model: keras.Model) -> dict[str, Any]:
    """Return the logs that Keras would show now: loss and metrics, or the logs of the model's own `train_step`.

    As in Keras, the logs of `train_step` are shown if their names differ from those of the model's metrics.
    """
    own = own_run.last_logs(model)
    if own is None or shows_metrics(model, own[0]):
        return results(model)
    return dict(sorted((name, float(value)) for name, value in zip(own[0], own[1].numpy(), strict=True)))


def numbers(model: keras.Model) -> dict[str, float]:
    """Return the numbers of `logs`, with a vector's numbers under the names `NAME_0`, `NAME_1` and so on."""
    return flat(logs(model))


def shows_metrics(model: keras.Model, names: Sequence[str]) -> bool:
    """Return whether Keras shows the model's metrics instead of the numbers that a step returns under these names."""
    return set(names) == set(model.get_metrics_result())


def results(model: keras.Model) -> dict[str, Any]:
    """Return current loss and metrics, sorted by name as in Keras. A vector, such as F1Score's, becomes a list."""
    return {
        name: np.asarray(value, np.float64).tolist() for name, value in sorted(batch_metrics.results(model).items())
    }


def describe(model: keras.Model) -> dict[str, str]:
    """Describe the properties of the model that must not change when a run is resumed: name -> text."""
    config, compiled = _config_of(model), _keras.compile_config(model)
    layers = [f"{v.name} {tuple(v.shape)} {v.dtype}" for v in model.weights]
    optimizers = interception.optimizers_within(model) if overrides_step(model) else [model.optimizer]
    return {
        "architecture": _digest(config),
        "structure": _digest(canonical_text.canonical(config)),
        "loss weights": _json(getattr(compiled, "config", {}).get("loss_weights")),
        "weights": "; ".join(layers) if len(layers) <= 40 else _digest(layers),
        "optimizer": "; ".join(f"{type(one).__name__} {_json(one.get_config())}" for one in optimizers),
        "loss": _json([_loss_name(loss) for _, loss in tree.flatten(model.loss)]),
        "metrics": _json(sorted(m.name for m in model.metrics)),
        "compiled metrics": _json([_compiled(compiled, key) for key in ("metrics", "weighted_metrics")]),
    }


def config_text(model: keras.Model) -> str:
    """Return the model's configuration without the names that Keras generates; empty if it has none."""
    try:
        return _json(canonical_text.canonical(json.loads(_json(keras.saving.serialize_keras_object(model))), False))
    except Exception:  # a layer's own get_config may raise anything
        return ""


def code(model: keras.Model, more: tuple[Any, ...] = ()) -> str:
    """Hash the job's own code that the model computes with: layers, losses, metrics, schedules, and `more`."""
    functions = [loss for _, loss in tree.flatten(model.loss) if callable(loss)]
    layers = _keras.layers_within(model)
    rate = _keras.given_rate(model.optimizer)
    activations = [getattr(layer, "activation", None) for layer in layers]
    of_layers = [getattr(layer, "function", None) for layer in layers]
    parts = [model, *layers, *activations, *of_layers, *functions, *model.metrics, model.optimizer, rate, *more]
    return canonical_text.code_of(part for part in parts if part is not None)


def _config_of(model: keras.Model) -> Any:
    try:
        return json.loads(model.to_json())["config"]
    except (TypeError, ValueError, NotImplementedError, KeyError):
        return type(model).__name__  # a subclassed model need not have a config; its weights are still compared


def _loss_name(loss: Any) -> str:
    if loss is None or isinstance(loss, str):
        return str(loss)
    return loss.__name__ if inspect.isfunction(loss) else f"{type(loss).__name__} {_json(loss.get_config())}"


def _compiled(compiled: Any, key: str) -> list[str]:
    metrics = getattr(compiled, "config", {}).get(key)
    names = []
    for _, metric in tree.flatten(metrics):
        try:
            names.append(_loss_name(metric))
        except Exception:  # a metric's own get_config may raise anything
            names.append(type(metric).__name__)
    return names


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(value: Any) -> str:
    return hashlib.sha256(_json(value).encode()).hexdigest()[:16]


def _inputs(model: keras.Model) -> str:
    shape = getattr(model, "input_shape", None)
    return str(shape) if shape is not None else "not declared"


def _shapes(part: Any) -> str:
    return ", ".join(f"{path} {leaf.shape[1:]} {leaf.dtype}".strip() for path, leaf in tree.flatten(part)) or "missing"


def _build_with_custom_step(
    model: keras.Model, sample: tuple[Any, Any, Any], records: tuple[int, int], is_evaluated: bool
) -> None:
    """Build the variables of a model that has its own step.

    Args:
        model: a compiled model.
        sample: (x, y, sample_weight) of a few records.
        records: number of records in a full shard, and in a full batch.
        is_evaluated: whether there is validation or test data.

    Raises:
        ModelError: the model cannot be evaluated.
        WholeBatchError: its step accepts a whole batch, but no shard of it.
        JobError: its step raised an error.
    """
    if is_evaluated and not overrides_test(model) and type(model).call is keras.Model.call:
        raise ModelError(
            f"{type(model).__name__} has neither a test_step nor a call, so it cannot be evaluated. Write one of them, "
            "or leave out the validation and test data."
        )
    try:
        own_run.build(model, _batch(sample, records[0]))
    except JobError as error:
        if _takes(model, _batch(sample, records[1])):
            raise WholeBatchError(
                f"{error} It failed with the {records[0]} records of a logical shard, but accepts a whole batch of "
                f"{records[1]}. Read the batch size from the data (keras.ops.shape(x)[0]), or use --logical-shards 1 "
                "--workers 1."
            ) from error
        raise
    if records[0] < records[1]:
        with contextlib.suppress(Exception):  # a step may refuse another number of records: nothing can be compared
            warning = losses.check_custom_step(model, sample)
            if warning:
                notes_of(model).remarks.append(warning)


def _check_stateless(model: keras.Model) -> None:
    """Refuse a stateful RNN: Keras does not list its state among the model's variables."""
    for layer in _keras.layers_within(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ModelError(
                f"{layer.name} is a stateful RNN (stateful=True), which keeps a state for each record of a batch from "
                "one step to the next. raytf does not support that, because it divides batches among workers. Remove "
                "stateful=True, or train this model with plain Keras."
            )


def _batch(sample: tuple[Any, Any, Any], records: int) -> tuple[Any, Any, Any]:
    return tree.map_leaves(
        lambda leaf: keras.ops.convert_to_tensor(np.resize(leaf, (records, *np.shape(leaf)[1:]))), sample
    )


def _takes(model: keras.Model, batch: tuple[Any, Any, Any]) -> bool:
    try:
        own_run.build(model, batch)
    except JobError:
        return False
    return True


def _check_rows(model: keras.Model, source: Source) -> None:
    """Refuse batches whose parts differ in their number of rows, if Keras's own step reads them."""
    if not tree.has_rows(source.spec) or overrides_step(model) or overrides_test(model):
        return
    listed = ", ".join(f"{path} {spec.shape[0]}" for path, spec in tree.flatten(source.spec))
    raise DataError(
        f"{source.name} data: the parts of a batch differ in their number of rows, in the ratio {listed}. Expected one "
        "row per record in each part, as dataset.batch(32) makes them, or a model with a train_step that accepts such "
        "parts."
    )
