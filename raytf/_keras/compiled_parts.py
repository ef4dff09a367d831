"""The parts of a model that the traced step uses, which a callback must not replace."""

from __future__ import annotations

from typing import Any


def parts(model: Any) -> dict[str, list[Any]]:
    """Return the objects that the traced step uses, by the names under which a person knows them."""
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
    """Build the compiled loss and metrics of a model, which computes nothing.

    Args:
        model: compiled, and itself built.
        batch: (x, y, sample_weight) of any number of records.
    """
    model._symbolic_build(data_batch=batch)


def replaced(before: dict[str, list[Any]], model: Any) -> list[str]:
    """Return which of the parts are other objects now."""
    now = parts(model)
    return [name for name, own in before.items() if list(map(id, own)) != list(map(id, now[name]))]


def trainable(model: Any) -> dict[str, list[bool]]:
    """Return which layers and variables are trainable, by their order in the model."""
    return {
        "layers": [bool(layer.trainable) for layer in model._flatten_layers()],
        "variables": [bool(variable.trainable) for variable in model.variables],
    }


def set_trainable(model: Any, flags: dict[str, list[bool]]) -> None:
    """Set which layers and variables are trainable, as `trainable` returned it."""
    # A layer hands its flag to the layers inside it, which come after it and then get their own.
    for layer, flag in zip(model._flatten_layers(), flags["layers"], strict=True):
        layer.trainable = flag
    for variable, flag in zip(model.variables, flags["variables"], strict=True):
        if variable.trainable != flag:
            variable.trainable = flag
