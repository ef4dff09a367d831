"""Refuse callbacks that replace parts of the model which the traced step uses."""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from raytf import _keras
from raytf.errors import ModelError

_ADVICE = (
    "Compile before `fit`, and call `fit` twice: once until the change, and again after it (with `initial_epoch`)."
)


class ModelGuard:
    """Compares a model before and after hooks.

    As in Keras, setting `layer.trainable` in a hook does not change the step, which was traced before. Each hook sees
    what earlier hooks have set; between hooks the model has the flags with which training began, so that a step that is
    traced again, on this rank or on another one, is the same.

    Args:
        model: built and compiled, before callbacks are given to it.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._parts = _keras.step_parts(model)
        self._before = _keras.trainable_flags(model)
        #: The flags that callbacks have set.
        self.trainable = self._before

    @property
    def is_changed(self) -> bool:
        """Return whether callbacks have changed `trainable` since training began."""
        return self.trainable != self._before

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Refuse changes to the model that the step does not see.

        Args:
            what: runs meanwhile, for the message.

        Raises:
            ModelError: a part of the model was replaced, also if the hook has raised another error for it.
        """
        if self.is_changed:
            _keras.set_trainable_flags(self._model, self.trainable)
        try:
            yield
        finally:
            names = _keras.replaced_parts(self._parts, self._model)
            if names:
                raise ModelError(_message(what, names))
            self.trainable = _keras.trainable_flags(self._model)
            if self.is_changed:
                _keras.set_trainable_flags(self._model, self._before)


def foreseen(callbacks: Any) -> list[str]:
    """Return a line for each hook whose code will be refused, such as `self.model.compile(...)`.

    The hook may do so under a condition that is never met, so this refuses nothing.

    Args:
        callbacks: a list of Keras callbacks; of anything else nothing is known.
    """
    lines = []
    for callback in callbacks if isinstance(callbacks, (list, tuple)) else ():
        kinds = [kind for kind in type(callback).__mro__ if not kind.__module__.startswith("keras.")]
        functions = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}
        functions |= vars(callback)  # a LambdaCallback has its hooks there
        for name, function in functions.items():
            does = _change_in(getattr(function, "__code__", None))
            if does:
                lines.append(f"{type(callback).__name__}.{name} {does}, which ends the run when it happens. {_ADVICE}")
    return lines


def _change_in(code: Any) -> str:
    """Return what a function does to parts of a model that the traced step uses; empty if that cannot be seen."""
    steps = [] if code is None else [(step.opname, step.argval) for step in dis.get_instructions(code)]
    for (_, owner), (kind, name) in itertools.pairwise(steps):
        if owner == "model" and name == "compile" and kind in ("LOAD_ATTR", "LOAD_METHOD"):
            return "compiles the model again"
        if owner == "model" and name in ("optimizer", "loss") and kind == "STORE_ATTR":
            return f"replaces the model's {name}"
    return ""


def _message(what: str, names: list[str]) -> str:
    done = "compiled the model again" if "compile()" in names else f"replaced {' and '.join(names[:2])} of the model"
    return f"{what} has {done}. Training has traced its step by then, and would not see the change. {_ADVICE}"
