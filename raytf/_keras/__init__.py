"""The private parts of Keras that raytf uses. They may change with any version.

`SEEN` lists the attributes that imports do not name. `tests/unit/test_private_keras.py` fails when one of them or an
imported name no longer exists, and `tests/unit/test_private_ray.py` when another module of raytf uses private parts.
Keras is imported only when a function is called. This package depends on no other part of raytf.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

#: The latest version of Keras in which all of these parts were verified to exist and to work as expected.
VERSION = "3.15.1"
#: Class or module -> names of its attributes that are used.
SEEN = {
    "keras.src.backend.common.variables.Variable": "_initialize _value",
    "keras.src.callbacks.callback.Callback.on_train_batch_begin": "_is_default",
    "keras.src.callbacks.tensorboard.TensorBoard": "_should_trace",
    "keras.src.layers.layer.Layer": "_flatten_layers _layers _loss_ids _losses _metrics",
    "keras.src.ops.function.Function": "_nodes _nodes_by_depth",
    "keras.src.ops.node.Node": "_keras_history operation",
    "keras.src.ops.operation.Operation": "_inbound_nodes",
    "keras.src.optimizers.adagrad.Adagrad": "_accumulators",
    "keras.src.optimizers.adam.Adam": "_momentums _velocities",
    "keras.src.optimizers.base_optimizer.BaseOptimizer": (
        "_clip_gradients _get_current_learning_rate _get_variable_index _learning_rate _trainable_variables "
        "_trainable_variables_indices _use_weight_decay _var_key apply"
    ),
    "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer": "apply",
    "keras.src.saving.keras_saveable.KerasSaveable": "__reduce__",
    "keras.src.trainers.compile_utils.CompileLoss": "_flat_losses",
    "keras.src.trainers.trainer.Trainer": (
        "_compile_config _compile_loss _compile_metrics _compute_loss _loss_tracker _symbolic_build train_function"
    ),
    "keras.src.utils.backend_utils": "DynamicBackend",
    "keras.src.utils.tracking": "TrackedDict TrackedList TrackedOrderedDict TrackedSet",
    "keras.src.utils.tracking.Tracker": "stored_ids",
}


@contextlib.contextmanager
def with_attributes(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of an object, which hide its class's methods, while the `with` statement lasts."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


# -- settings of the process -------------------------------------------------------------------------------------------


def own_dtype_policy() -> Any:
    """Return the global dtype policy that the program has set; None if it has set none.

    `keras.config.dtype_policy()` would set a default one, and a later `set_floatx` would then have no effect on it.
    """
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("dtype_policy")


def max_epochs() -> int | None:
    """Return the maximum number of epochs of any `fit` in this process; None for no limit."""
    import keras

    return keras.config.max_epochs()


def max_steps_per_epoch() -> int | None:
    """Return the maximum number of steps in an epoch; None for no limit."""
    import keras

    return keras.config.max_steps_per_epoch()


def global_seed_state() -> Any:
    """Return the state of the generator for layers that have no seed of their own."""
    from keras.src.random import seed_generator

    return seed_generator.global_seed_generator().state


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and TensorFlow's generators, and those of Keras's layers."""
    import keras

    keras.utils.set_random_seed(seed)


# -- models ------------------------------------------------------------------------------------------------------------


def layers_within(model: Any) -> list[Any]:
    """Return the model, its layers, their layers, and so on."""
    return list(model._flatten_layers())


def strategy_scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager for the scope of the TensorFlow strategy with which a model was created."""
    strategy = getattr(model, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def has_layers(layer: Any) -> bool:
    """Return whether a layer contains other layers."""
    return bool(layer._layers)


def input_signature(model: Any) -> Any:
    """Return the inputs with which Keras exports the model."""
    from keras.src.export import export_utils

    return export_utils.get_input_signature(model)


def made_by(tensor: Any) -> Any:
    """Return the operation of a functional model whose output is a tensor; None for other tensors."""
    return getattr(getattr(tensor, "_keras_history", None), "operation", None)


def is_default_hook(hook: Any) -> bool:
    """Return whether a callback's method is the empty one of Keras's base class, which Keras skips."""
    return getattr(hook, "_is_default", False)


def profiles(callback: Any) -> bool:
    """Return whether a TensorBoard callback profiles some batches."""
    return callback._should_trace


@contextlib.contextmanager
def with_fit(fit: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Replace `keras.Model.fit` by a function while the `with` statement lasts. Yield Keras's own `fit`."""
    import keras

    own = keras.Model.fit
    keras.Model.fit = fit
    try:
        yield own
    finally:
        keras.Model.fit = own


def history(model: Any, params: dict[str, Any], values: dict[str, list[Any]], epochs: list[int]) -> Any:
    """Return a History as `keras.Model.fit` returns it, and set it as the model's `history`."""
    import keras

    made = keras.callbacks.History()
    made.set_model(model)
    made.set_params(params)
    made.history, made.epoch = values, epochs
    model.history = made
    return made


def step_parts(model: Any) -> dict[str, list[Any]]:
    """Return the objects that the traced step uses, by names for messages."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    return {
        "compile()": [getattr(model, "_compile_config", None)],
        "the optimizer": [optimizer],
        "the learning-rate schedule": [getattr(inner, "_learning_rate", None)],
        "the loss": [getattr(model, "_compile_loss", None), model.loss],
        "the metrics": [getattr(model, "_compile_metrics", None), *model.metrics],
        "the layers": list(model._flatten_layers()),
        "the weights": list(model.weights),
    }


def build_compiled(model: Any, batch: tuple[Any, Any, Any]) -> None:
    """Build the compiled loss and metrics of a built model for a batch (x, y, sample_weight). Nothing is computed."""
    model._symbolic_build(data_batch=batch)


def replaced_parts(before: dict[str, list[Any]], model: Any) -> list[str]:
    """Return the names of the parts that other objects have replaced since `before`."""
    now = step_parts(model)
    return [name for name, own in before.items() if list(map(id, own)) != list(map(id, now[name]))]


def trainable_flags(model: Any) -> dict[str, list[bool]]:
    """Return which layers and variables are trainable, by their order in the model."""
    return {
        "layers": [bool(layer.trainable) for layer in model._flatten_layers()],
        "variables": [bool(variable.trainable) for variable in model.variables],
    }


def set_trainable_flags(model: Any, flags: dict[str, list[bool]]) -> None:
    """Set which layers and variables are trainable, from the result of `trainable_flags`."""
    # Setting a layer's flag also sets those of the layers inside it, which are later in the list and get their own.
    for layer, flag in zip(model._flatten_layers(), flags["layers"], strict=True):
        layer.trainable = flag
    for variable, flag in zip(model.variables, flags["variables"], strict=True):
        if variable.trainable != flag:
            variable.trainable = flag


# -- losses ------------------------------------------------------------------------------------------------------------


def compile_config(model: Any) -> Any:
    """Return the arguments of `compile`, as Keras stores them; None if it was not called."""
    return getattr(model, "_compile_config", None)


def compiled_loss(model: Any) -> Any:
    """Return the object with all losses of `compile`; None if there are none."""
    return getattr(model, "_compile_loss", None)


def losses_of(compiled: Any) -> list[Any]:
    """Return a named tuple with `loss` for each loss of a compiled loss; empty before Keras has listed them."""
    return list(getattr(compiled, "_flat_losses", None) or [])


def with_losses(compiled: Any, entries: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Replace the losses of a compiled loss while the `with` statement lasts; see `losses_of`."""
    return with_attributes(compiled, {"_flat_losses": list(entries)})


def compute_loss(model: Any, x: Any, y: Any, predicted: Any, sample_weight: Any, training: bool) -> Any:
    """Compute the loss as Keras's own steps do, also by an override that does not accept `training`."""
    return model._compute_loss(x, y, predicted, sample_weight, training=training)


def loss_tracker(model: Any) -> Any:
    """Return the metric that tracks the loss, even if the model's `metrics` do not contain it."""
    return model._loss_tracker


def mask_of(tensor: Any) -> Any:
    """Return the mask that a layer has attached to a tensor; None if there is none."""
    from keras.src.backend.common.masking import get_keras_mask

    return get_keras_mask(tensor)


def masked_weight(weight: Any, mask: Any, dtype: str, reduction: str) -> Any:
    """Return a sample weight combined with a mask, as losses combine them; None if there is neither."""
    from keras.src.losses.loss import apply_mask

    return apply_mask(weight, mask, dtype=dtype, reduction=reduction)


# -- optimizers --------------------------------------------------------------------------------------------------------


def given_rate(optimizer: Any) -> Any:
    """Return the learning rate as a schedule or a variable.
    For a schedule, `optimizer.learning_rate` is only its current value."""
    return getattr(optimizer, "_learning_rate", None)


def has_one_rate(optimizer: Any) -> bool:
    """Return whether all weights have the same learning rate, unlike those of a MultiOptimizer."""
    return hasattr(optimizer, "learning_rate")


def rate_of(optimizer: Any) -> Any:
    """Return the learning rate of the next update; for a MultiOptimizer, that of its default optimizer."""
    return (optimizer if has_one_rate(optimizer) else optimizer.optimizers[-1]).learning_rate


def with_rate(optimizer: Any, rate: Any) -> contextlib.AbstractContextManager[None]:
    """Use this rate for the optimizer's updates while the `with` statement lasts."""
    return with_attributes(optimizer, {"_get_current_learning_rate": lambda: rate})


def variable_index(optimizer: Any, variable: Any) -> int:
    """Return the place of a weight among those that the optimizer was built for."""
    return optimizer._get_variable_index(variable)


def adam_moments(adam: Any, variable: Any) -> tuple[Any, Any]:
    """Return the first and the second moment that Adam keeps for a weight."""
    place = variable_index(adam, variable)
    return adam._momentums[place], adam._velocities[place]


def adagrad_sums(adagrad: Any, variable: Any) -> Any:
    """Return the sums of squares that Adagrad keeps for a weight."""
    return adagrad._accumulators[variable_index(adagrad, variable)]


def clipped(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Return the gradients of all weights, clipped by the optimizer's settings."""
    return optimizer._clip_gradients(list(gradients))


def variable_key(optimizer: Any, variable: Any) -> Any:
    """Return the key by which the optimizer distinguishes weights."""
    return optimizer._var_key(variable)


def decays(optimizer: Any, variable: Any) -> bool:
    """Return whether a weight decays."""
    return optimizer._use_weight_decay(variable)


def exclude_from_decay(optimizer: Any, keys: Any) -> None:
    """Exclude exactly the weights with these keys from weight decay. Keras cannot distinguish parts of one by name."""
    optimizer._use_weight_decay = lambda variable: optimizer._var_key(variable) not in keys


@functools.cache
def read_rows() -> None:
    """Make lookups in a weight read only the rows that they need, in this process from now on.

    `tf.gather` uses the method `sparse_read`, which TensorFlow's variables have and Keras's lack. Without it, a lookup
    reads the whole table. Once an optimizer has written single rows, TensorFlow even copies the table for each read.
    """
    from keras.src.backend.tensorflow.core import Variable

    # A cast variable's value is a tensor without `sparse_read`: `tf.gather` then reads the tensor.
    Variable.sparse_read = property(lambda variable: variable.value.sparse_read)
