"""Hooks of callbacks that run for each batch: which callbacks need every one of them, and what the hooks may change.

A call of the training step has several steps, and a batch hook can only run between two calls. So a callback that needs
the hook of every batch makes each call one step long, or as long as `steps_per_execution` or `--steps-per-call` asks
for, which means the same in Keras. Some of Keras's own callbacks define batch hooks without needing
each of them: they are listed in `_PASSIVE`, and calls keep their length with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras

from raytf import _keras

_BEGIN = ("on_train_batch_begin", "on_batch_begin")
_HOOKS = (*_BEGIN, "on_train_batch_end", "on_batch_end")
_TEST = ("on_test_batch_begin", "on_test_batch_end")

#: Keras's callbacks whose batch hooks change nothing and do nothing that depends on their number, and when that is so.
_PASSIVE: list[tuple[type, Callable[[Any], bool]]] = [
    (keras.callbacks.ModelCheckpoint, lambda callback: callback.save_freq == "epoch"),
    (keras.callbacks.OrbaxCheckpoint, lambda callback: callback.save_freq == "epoch"),
    # Its profiler starts and stops at the batches that `profile_batch` names.
    (keras.callbacks.TensorBoard, lambda callback: callback.update_freq == "epoch" and not _keras.profiles(callback)),
]


class BatchHooks(NamedTuple):
    """The properties of the callbacks' batch hooks that every rank needs; only rank 0 has the callbacks.

    Attributes:
        each: some callback needs the hook of every batch.
        steer: the hooks may change something, so the ranks agree after the end of a batch.
        steer_begin: hooks before a batch may change something, too, so the ranks agree after them.
        take_nan: a callback handles a loss that is not finite, which is then no error.
        test: some callback needs the hook of every batch of an evaluation.
    """

    each: bool = False
    steer: bool = False
    steer_begin: bool = False
    take_nan: bool = False
    test: bool = False


def of(callbacks: Iterable[keras.callbacks.Callback]) -> BatchHooks:
    """Return what the ranks must know of the batch hooks of some callbacks."""
    callbacks = list(callbacks)
    active = [callback for callback in callbacks if overridden(callback) and not _is_passive(callback)]
    return BatchHooks(
        each=bool(active),
        steer=bool(active),
        steer_begin=any(overridden(callback, _BEGIN) for callback in active),
        take_nan=any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks),
        test=any(overridden(callback, _TEST) and not _is_passive(callback) for callback in callbacks),
    )


def overridden(callback: keras.callbacks.Callback, hooks: Iterable[str] = _HOOKS) -> bool:
    """Return whether a callback has one of some hooks of its own."""
    return any(not _keras.is_default_hook(getattr(callback, hook)) for hook in hooks)


def _is_passive(callback: keras.callbacks.Callback) -> bool:
    return any(
        isinstance(callback, kind) and is_passive(callback) and not _has_other_hooks(callback, kind)
        for kind, is_passive in _PASSIVE
    )


def _has_other_hooks(callback: keras.callbacks.Callback, kind: type) -> bool:
    return any(
        hook in vars(callback) or getattr(type(callback), hook) is not getattr(kind, hook) for hook in (*_HOOKS, *_TEST)
    )
