"""What a checkpoint holds: every variable of model, optimizer and metrics by name, and a small JSON document.

Names do not depend on the number of workers. Random generators are not saved: their seeds are a function of the step.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf import model as models
from raytf.checkpoint.slots import copy_all
from raytf.errors import CheckpointError


def variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Name -> variable, in one order for a given model."""
    return _named(model, model.optimizer.variables, model.metrics_variables)


def weights(model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None) -> dict[str, keras.Variable]:
    """As `variables`, without metrics, for a model that is not compiled; without an optimizer, without that."""
    return _named(model, [] if optimizer is None else optimizer.variables, [])


def _named(model: keras.Model, optimizer: list[Any], metrics: list[Any]) -> dict[str, keras.Variable]:
    seeds = {id(v) for v in models.seed_states(model)}
    named: dict[str, keras.Variable] = {}
    for part, found in (
        ("model", [v for v in model.variables if id(v) not in seeds]),
        ("optimizer", optimizer),
        ("metrics", metrics),
    ):
        taken = {id(v) for v in named.values()}
        own = [v for v in found if id(v) not in taken]
        # Not the path: it holds layer names that count up with every model made in a process.
        named.update({f"{part}/{i:05d}/{v.name}": v for i, v in enumerate(own)})
    return named


class Copies:
    """Copies of variables that later steps do not change, in memory that is used again.

    New memory is slow: the system clears each page of it when it is first written.

    Args:
        named: variables.
        names: of those that are copied.
    """

    def __init__(self, named: dict[str, keras.Variable], names: list[str]):
        self._names = names
        variables = [named[name].value for name in names]
        # One call for all: what it gives are the variables' own buffers, not copies.
        self._read = tf.function(lambda: [v.read_value() for v in variables], autograph=False)
        self._spare: dict[str, np.ndarray] = {}

    def take(self) -> dict[str, np.ndarray]:
        """The present values, by name."""
        into, self._spare = self._spare, {}
        values = [np.asarray(value) for value in self._read()]
        for name, value in zip(self._names, values, strict=True):
            if name not in into:
                into[name] = np.empty(value.shape, value.dtype)
        copy_all([into[name] for name in self._names], values)
        return {name: into[name] for name in self._names}

    def give_back(self, tensors: dict[str, np.ndarray]) -> None:
        """Nobody uses some copies any more; what else is among them is left alone."""
        if all(name in tensors for name in self._names):
            self._spare = {name: tensors[name] for name in self._names}


def restore(named: dict[str, keras.Variable], tensors: dict[str, np.ndarray]) -> None:
    """Assign a checkpoint's tensors to a model's variables.

    Raises:
        CheckpointError: names or shapes differ; nothing is assigned then.
    """
    missing, extra = sorted(set(named) - set(tensors)), sorted(set(tensors) - set(named))
    wrong = [n for n in set(named) & set(tensors) if tuple(named[n].shape) != tensors[n].shape]
    if missing or extra or wrong:
        parts = [
            f"{what} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for what, names in (("it lacks", missing), ("it has in addition", extra), ("of another shape is", wrong))
            if names
        ]
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(parts)}.")
    for name, variable in named.items():
        variable.assign(tensors[name])
