"""Intercepts what a model's own code does in a step: updates by optimizers, losses that layers add, updates of metrics.

Keras is imported only when a function is called. This module depends on nothing else in raytf but `raytf._keras`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raytf._keras import with_attributes

#: Receives the optimizer, gradients and variables of a call of `apply`.
OnApply = Callable[[Any, Sequence[Any], Sequence[Any]], None]


def optimizers_within(model: Any) -> list[Any]:
    """Return the optimizers that a model or its layers have as attributes, or in lists and dicts.
    The compiled one is first."""
    import keras

    candidates = [model.optimizer]
    for layer in model._flatten_layers():
        for value in vars(layer).values():
            if isinstance(value, dict):
                candidates += value.values()
            else:
                candidates += value if isinstance(value, (list, tuple)) else [value]
    unique = {id(optimizer): optimizer for optimizer in candidates if isinstance(optimizer, keras.optimizers.Optimizer)}
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in unique.values()}
    return [optimizer for optimizer in unique.values() if id(optimizer) not in inner]


def metrics_within(model: Any) -> list[Any]:
    """Return the metrics in `model.metrics`, then the metrics that are only attributes and are never reset."""
    listed = list(model.metrics)
    others = [metric for layer in model._flatten_layers() for metric in layer._metrics]
    return list({id(metric): metric for metric in [*listed, *others]}.values())


def variable_of(variable: Any) -> Any:
    """Return the TensorFlow variable of a Keras variable, even in a scope that replaces its value."""
    return variable._value


@contextlib.contextmanager
def held_back(on_apply: OnApply) -> Iterator[None]:
    """Call a function instead of `apply` of every optimizer in this thread while the `with` statement lasts."""
    _install_apply()
    token = _on_apply.set(on_apply)
    try:
        yield
    finally:
        _on_apply.reset(token)


#: The function that replaces `apply`, in this thread.
_on_apply: contextvars.ContextVar[OnApply | None] = contextvars.ContextVar("on_apply", default=None)


@functools.cache
def _install_apply() -> None:
    """Patch optimizers to use `_on_apply`, once per process, since threads may trace at the same time."""
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

    for kind in (BaseOptimizer, LossScaleOptimizer):
        kind.apply = _asking(kind.apply)


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        on_apply = _on_apply.get()
        if on_apply is None:
            return own(optimizer, grads, trainable_variables)
        chosen = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        return on_apply(optimizer, list(grads), list(chosen))

    return apply


#: Receives a loss, and returns the loss that is added in its place.
ChangeLoss = Callable[[Any], Any]
#: Receives the metric, args and kwargs of a call of `update_state`.
OnUpdate = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


@contextlib.contextmanager
def changed_losses(change: ChangeLoss) -> Iterator[None]:
    """Apply a function to each tensor that layers add to the loss in this thread while the `with` statement lasts."""
    _install_add_loss()
    token = _change.set(change)
    try:
        yield
    finally:
        _change.reset(token)


_change: contextvars.ContextVar[ChangeLoss | None] = contextvars.ContextVar("change", default=None)


@functools.cache
def _install_add_loss() -> None:
    """Patch layers to use `_change`, once per process, since threads may trace at the same time."""
    import keras

    own = keras.Layer.add_loss

    @functools.wraps(own)
    def add_loss(layer: Any, loss: Any) -> Any:
        change = _change.get()
        if change is None:
            return own(layer, loss)
        return own(layer, [change(one) if keras.ops.is_tensor(one) else one for one in keras.tree.flatten(loss)])

    keras.Layer.add_loss = add_loss


def compiled_metrics(model: Any) -> list[Any]:
    """Return the individual metrics of `compile`."""
    return list(getattr(getattr(model, "_compile_metrics", None), "metrics", []))


def own_metrics(metrics: Sequence[Any], model: Any) -> list[Any]:
    """Return the program's own metrics among `metrics`, one by one, without those that Keras updates with losses."""
    compiled = getattr(model, "_compile_metrics", None)
    losses = [model._loss_tracker, *getattr(getattr(model, "_compile_loss", None), "metrics", [])]
    expanded: list[Any] = []
    for metric in metrics:
        expanded += compiled.metrics if metric is compiled else [metric]
    return [metric for metric in expanded if not any(metric is loss for loss in losses)]


@contextlib.contextmanager
def noted_updates(metrics: Sequence[Any], on_update: OnUpdate) -> Iterator[None]:
    """Call a function before each update of some metrics while the `with` statement lasts."""

    def noting(metric: Any, own: Callable[..., Any]) -> Callable[..., Any]:
        def update_state(*args: Any, **kwargs: Any) -> Any:
            on_update(metric, args, kwargs)
            return own(*args, **kwargs)

        return update_state

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(with_attributes(metric, {"update_state": noting(metric, metric.update_state)}))
        yield


@contextlib.contextmanager
def replaced_results(metrics: Sequence[Any], result: Any) -> Iterator[None]:
    """Replace the result of some metrics while the `with` statement lasts."""
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(with_attributes(metric, {"result": lambda: result}))
        yield


def set_mask(tensor: Any, mask: Any) -> None:
    """Attach a mask to a tensor, as a layer does."""
    from keras.src.backend.common.masking import set_keras_mask

    set_keras_mask(tensor, mask)
