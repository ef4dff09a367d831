"""Intercept what a model does beside its output: the losses that layers add, and the updates of metrics.

Keras is imported when a function is called. Knows nothing of raytf.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: (loss) -> the loss that is added in its place.
ChangeLoss = Callable[[Any], Any]
#: (metric, args, kwargs) of a call of `update_state`.
OnUpdate = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


@contextlib.contextmanager
def changed_losses(change: ChangeLoss) -> Iterator[None]:
    """Apply a function to each tensor that layers add to the loss in this thread while the `with` statement lasts."""
    _install()
    token = _change.set(change)
    try:
        yield
    finally:
        _change.reset(token)


_change: contextvars.ContextVar[ChangeLoss | None] = contextvars.ContextVar("change", default=None)


@functools.cache
def _install() -> None:
    """Have layers ask for `_change`: once for the process, since threads may trace at the same time."""
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
    """Return the metrics of `compile`, each by itself."""
    return list(getattr(getattr(model, "_compile_metrics", None), "metrics", []))


def own_metrics(metrics: Sequence[Any], model: Any) -> list[Any]:
    """Return the program's metrics among some metrics, each by itself, without those that Keras updates with losses."""
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

    with _attributes(metrics, "update_state", lambda metric: noting(metric, metric.update_state)):
        yield


@contextlib.contextmanager
def replaced_results(metrics: Sequence[Any], result: Any) -> Iterator[None]:
    """Replace the result of some metrics while the `with` statement lasts."""
    with _attributes(metrics, "result", lambda metric: lambda: result):
        yield


@contextlib.contextmanager
def _attributes(objects: Sequence[Any], name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Give objects an attribute, which goes before the method of their class, while the `with` statement lasts."""
    before = [vars(item).get(name) for item in objects]
    for item in objects:
        vars(item)[name] = make(item)
    try:
        yield
    finally:
        for item, value in zip(objects, before, strict=True):
            if value is None:
                del vars(item)[name]
            else:
                vars(item)[name] = value


def set_mask(tensor: Any, mask: Any) -> None:
    """Put a mask on a tensor, as a layer does."""
    from keras.src.backend.common.masking import set_keras_mask

    set_keras_mask(tensor, mask)
