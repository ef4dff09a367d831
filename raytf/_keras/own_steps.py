"""The parts of Keras that a program's own `train_step` uses: optimizers, metrics, and their updates."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: (optimizer, gradients, variables) that `apply` was called with.
OnApply = Callable[[Any, Sequence[Any], Sequence[Any]], None]


def optimizers_within(model: Any) -> list[Any]:
    """Return the optimizers that a model or its layers have as attributes, or in lists and dicts: the compiled one
    first."""
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
    """Return the metrics in `model.metrics`, then those that are only attributes and are never reset."""
    listed = list(model.metrics)
    others = [metric for layer in model._flatten_layers() for metric in layer._metrics]
    return list({id(metric): metric for metric in [*listed, *others]}.values())


def variable_of(variable: Any) -> Any:
    """Return TensorFlow's variable in Keras's, even in a scope where that holds something else."""
    return variable._value


@contextlib.contextmanager
def held_back(on_apply: OnApply) -> Iterator[None]:
    """Call a function instead of `apply` of every optimizer in this thread while the `with` statement lasts."""
    _install()
    token = _on_apply.set(on_apply)
    try:
        yield
    finally:
        _on_apply.reset(token)


#: What is called in place of `apply`, in this thread.
_on_apply: contextvars.ContextVar[OnApply | None] = contextvars.ContextVar("on_apply", default=None)


@functools.cache
def _install() -> None:
    """Have optimizers ask for `_on_apply`: once for the process, since threads may trace at the same time."""
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
