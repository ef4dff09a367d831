"""Runs a model's custom `train_step` or `test_step` in a graph, without updating anything.

The step is the user's code. It reads variables, updates metrics and layers' states, takes gradients and passes them to
optimizers. In a `keras.StatelessScope`, the values of variables are tensors that gradient tapes can watch, and the
caller makes the updates that `apply` would have made.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf._keras import interception
from raytf._tensorflow import tracing
from raytf.checkpoint import variables
from raytf.data import tree
from raytf.errors import ModelError
from raytf.inference.user_model import run_user_code


class Parts(NamedTuple):
    """Everything that a custom step of the model may read or change.

    Attributes:
        trainable: weights that may have gradients.
        states: all other variables of the model, except those of random generators and metrics.
        seeds: states of random generators.
        metrics: variables of metrics; those of metrics that are never reset come last.
        optimizers: all optimizers, the compiled one first.
    """

    trainable: list[keras.Variable]
    states: list[keras.Variable]
    seeds: list[keras.Variable]
    metrics: list[keras.Variable]
    optimizers: list[keras.optimizers.Optimizer]


def parts_of(model: keras.Model, seeds: list[keras.Variable]) -> Parts:
    """Return the parts of a built model."""
    metrics = [v for metric in interception.metrics_within(model) for v in metric.variables]
    apart = {id(v) for v in [*seeds, *metrics]}
    states = [v for v in model.non_trainable_variables if id(v) not in apart]
    return Parts(list(model.trainable_variables), states, seeds, metrics, interception.optimizers_within(model))


class Held(Exception):
    """Raised in an update to leave the step."""


class OwnScope(keras.StatelessScope):
    """A stateless scope that records which variables changed, and ignores updates of pinned ones.

    Args:
        mapping: the values of variables.
        pinned: variables whose updates are ignored.
    """

    def __init__(self, mapping: Iterable[tuple[keras.Variable, Any]], pinned: Iterable[keras.Variable] = ()):
        super().__init__(state_mapping=list(mapping), collect_losses=True)
        self._pinned = {id(v) for v in pinned}
        self.changed: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, _ = update
        if id(variable) not in self._pinned:
            self.changed[id(variable)] = variable
            super().add_update(update)

    def hold(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable's value, as an optimizer's update would, and count the variable as unchanged."""
        self.changed.pop(id(variable), None)
        super().add_update((variable, value))


#: (scope, optimizer, gradients, variables): called in place of an optimizer's `apply`; may raise `Held`.
OnApply = Callable[[OwnScope, Any, Sequence[Any], Sequence[Any]], None]


def run(
    step: Callable[[Any], Any],
    data: Any,
    seed: Any,
    scope: OwnScope,
    trainable: Sequence[keras.Variable],
    on_apply: OnApply,
) -> dict[str, Any]:
    """Run a step, and return its logs as scalars by name.

    Args:
        step: the model's `train_step` or `test_step`.
        data: a batch, as Keras's own `fit` would pass it.
        seed: [2] int32, the seed of `tf.random`.
        scope: holds the values that the step reads, and afterwards those that it changed.
        trainable: the variables for which tapes may compute gradients.
        on_apply: called in place of an optimizer's update.

    Raises:
        Held: `on_apply` raised it.
        JobError: the step raised something else.
    """

    def current() -> Mapping[int, Any]:
        tensors = {}
        for variable in trainable:
            tensor = scope.get_current_value(variable)
            if tensor is not None and variable.trainable:
                tensors[id(variable)] = tensors[id(interception.variable_of(variable))] = tensor
        return tensors

    graph = tf.compat.v1.get_default_graph()

    def update(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        _check_unconditional(graph)
        on_apply(scope, optimizer, gradients, variables)

    held, stepping = _as_raised(update, step)

    def call() -> Any:
        try:
            return stepping(data)
        except Held as end:  # not an error of the user's code
            return end

    with scope, interception.held_back(held), tracing.on_tensors(current), tracing.seeded(seed), tracing.inlined():
        logs = run_user_code(f"{step.__name__}", call)
        if isinstance(logs, Held):
            raise logs
        return scalars(logs)


def _as_raised(
    update: Callable[..., None], step: Callable[[Any], Any]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Wrap both functions, so that `step` raises the original exception of `update`, which it calls.

    In the user's code in between, AutoGraph would replace the exception, and Keras would change its text.
    """
    raised: list[Exception] = []

    def noting(*args: Any) -> None:
        try:
            update(*args)
        except Exception as error:
            raised.append(error)
            raise

    def stepping(data: Any) -> Any:
        try:
            return step(data)
        except Exception:
            if raised:
                raise raised[0] from None
            raise

    return noting, stepping


def _check_unconditional(graph: Any) -> None:
    """Refuse an update in a branch of a condition or in the body of a loop, which are graphs of their own.

    Raises:
        ModelError: the update is in such a graph; the message names the line.
    """
    inner = tf.compat.v1.get_default_graph()
    if inner is graph:
        return
    kind = "in a loop (tf.while_loop)" if "while" in inner.name else "under a condition (tf.cond)"
    lines = _lines_of_user_code()
    # The innermost line calls `apply` in the branch; the next line makes the condition.
    place = f" at {lines[1]}" if len(lines) > 1 else ""
    raise ModelError(
        f"train_step calls optimizer.apply {kind}{place}. Expected the same updates in every step, since all "
        "workers sum their gradients for each update. To accumulate the gradients of N batches, call optimizer.apply "
        "in every step without a condition, and compile the model with an optimizer that has "
        "gradient_accumulation_steps=N."
    )


_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (keras, tf))


def _lines_of_user_code() -> list[str]:
    """Return the lines (FILE:LINE) of the user's code on the call stack, the innermost one first."""
    lines: list[str] = []
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_PACKAGE):
            if lines:
                break
        elif not frame.filename.startswith(_LIBRARIES) and "__autograph_generated" not in frame.filename:
            lines.append(f"{frame.filename}:{frame.lineno}")
    return lines


def scalars(logs: Any) -> dict[str, Any]:
    """Return the scalars in a step's logs by name, with nested dicts flattened as Keras does."""
    if logs is None:
        return {}
    if not isinstance(logs, Mapping):
        raise ModelError(
            f"the model's step returned {type(logs).__name__}. Expected a dict of numbers by name, as Keras does."
        )
    numbers: dict[str, Any] = {}
    for name in sorted(logs):
        value = logs[name]
        if isinstance(value, Mapping):
            numbers.update(scalars(value))
            continue
        tensor = tf.cast(keras.ops.convert_to_tensor(value), tf.float32)
        numbers[name] = tensor if tensor.shape.rank == 0 else tf.reduce_mean(tensor)
    return numbers


#: Attribute of a model: the names in its step's logs, and the variable with the latest values.
_LOGS = "_raytf_logs"


def overrides_step(model: keras.Model) -> bool:
    """Return whether the model has a custom `train_step`."""
    return type(model).train_step is not keras.Model.train_step


def overrides_test(model: keras.Model) -> bool:
    """Return whether the model has a custom `test_step`."""
    return type(model).test_step is not keras.Model.test_step


def build(model: keras.Model, sample: tuple[Any, Any, Any]) -> None:
    """Create all variables of a model with a custom step: of layers and optimizers, and the one of `last_logs`.

    Args:
        sample: (x, y, sample_weight) of a few records, as tensors.

    Raises:
        JobError: the step raised an exception.
    """
    updates: list[tuple[Any, list[Any]]] = []
    names: list[str] = []

    def whole(leaves: list[Any]) -> tf.Tensor:
        data = data_of(tree.unflatten(sample, leaves))
        graph = tf.compat.v1.get_default_graph()

        def note(optimizer: Any, _: Sequence[Any], updated: Sequence[Any]) -> None:
            _check_unconditional(graph)
            updates.append((optimizer, list(updated)))

        noting, stepping = _as_raised(note, model.train_step)
        with interception.held_back(noting), tracing.inlined():
            logs = scalars(run_user_code("train_step", lambda: stepping(data)))
        names.extend(logs)
        return loss_of(logs)

    leaves = [leaf for _, leaf in tree.flatten(sample)]
    specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
    tf.function(whole, autograph=False).get_concrete_function(specs)
    for optimizer, updated in updates:
        if not optimizer.built:
            optimizer.build(updated)
    unique = list(dict.fromkeys(names))  # TensorFlow traces a function twice if it makes variables
    numbers = keras.Variable(np.zeros(len(unique), np.float32), trainable=False, name="latest")
    vars(model)[_LOGS] = unique, numbers
    others = [v for optimizer in interception.optimizers_within(model)[1:] for v in optimizer.variables]
    listed = {id(v) for v in model.metrics_variables}
    metrics = [v for metric in interception.metrics_within(model) for v in metric.variables if id(v) not in listed]
    variables.keep(model, [*others, *metrics, numbers])
    model.built = True  # nothing builds a model without a `call`, and Keras loads weights only into built models


def last_logs(model: keras.Model) -> tuple[list[str], keras.Variable] | None:
    """Return the names and a variable [n] with the values of a custom step's latest logs; None for Keras's step."""
    return vars(model).get(_LOGS)


def latest(model: keras.Model) -> keras.Variable:
    """Return the variable of `last_logs`, for a model that `build` has built."""
    return vars(model)[_LOGS][1]


def data_of(template: tuple[Any, Any, Any]) -> Any:
    """Return a batch as `fit` passes it to `train_step`: x alone, or (x, y), or (x, y, sample_weight)."""
    parts = tree.merged(template, lambda leaf: tf.reshape(leaf, [-1, *leaf.shape[2:]]))
    return keras.utils.pack_x_y_sample_weight(*parts)


def loss_of(logs: Mapping[str, Any]) -> tf.Tensor:
    """Return a step's loss, or the first value in its logs if none is named `loss`."""
    if not logs:
        return tf.constant(0.0)
    return logs["loss"] if "loss" in logs else next(iter(logs.values()))


def beginning(
    seeds: Sequence[keras.Variable], drawn: tf.Tensor, metrics: Sequence[keras.Variable], before: Sequence[Any]
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return the values of random generators' states and of metrics' variables when a shard starts.

    Args:
        seeds: states of the generators.
        drawn: [S, 2] int32, the values of `seeds`.
        metrics: variables of metrics.
        before: the values of `metrics`.
    """
    return [
        *((v, tf.cast(drawn[i], v.dtype)) for i, v in enumerate(seeds)),
        *((v, tf.convert_to_tensor(value)) for v, value in zip(metrics, before, strict=True)),
    ]
