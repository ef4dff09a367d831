"""The learning rate of a step as a tensor: the optimizer's own, scaled and warmed up as `raytf.rates` says."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import keras
import tensorflow as tf

from raytf.rates import RateLaw


class LearningRate:
    """Reads an optimizer's rate and applies a law to it.

    A constant rate is scaled once, here, so that callbacks (ReduceLROnPlateau, LearningRateScheduler) see and set the
    scaled one; the warm-up is a share of whatever they have set. A schedule stays as it is, and what it says is
    multiplied. The step is that of the optimizer, which every checkpoint holds, so a resumed run has the same rates.

    Args:
        optimizer: built, and not restored yet.
        law: None leaves the rate alone.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, law: RateLaw | None):
        self._optimizer, self._law = optimizer, law
        #: Of a LossScaleOptimizer: the one that has the rate.
        self._inner = getattr(optimizer, "inner_optimizer", optimizer)
        own = self._inner._learning_rate
        self._is_constant = isinstance(own, keras.Variable)
        if law is not None and self._is_constant:
            own.assign(own * law.factor)

    def of_copy(self, optimizer: keras.optimizers.Optimizer) -> LearningRate:
        """The same law for a copy of the optimizer, made of it as it is now: a constant rate is not scaled again."""
        other = copy.copy(self)
        other._optimizer, other._inner = optimizer, getattr(optimizer, "inner_optimizer", optimizer)
        return other

    def value(self) -> tf.Tensor:
        """The rate of the step that comes next, float32."""
        rate = tf.cast(tf.convert_to_tensor(self._optimizer.learning_rate), tf.float32)
        if self._law is None:
            return rate
        if not self._is_constant:
            rate *= self._law.factor
        if not self._law.warmup_steps:
            return rate
        step, last = tf.convert_to_tensor(self._inner.iterations) + 1, self._law.warmup_steps
        begin = self._law.begin
        share = begin + (1 - begin) * tf.cast(step, tf.float32) / float(last)
        return rate * tf.where(step >= last, 1.0, share)

    @contextlib.contextmanager
    def applied(self, rate: tf.Tensor) -> Iterator[None]:
        """Have the optimizer use this rate in what is traced meanwhile; outside of that it is its own again."""
        if self._law is None:
            yield
            return
        # As an attribute of the one object, which goes before the method of its class.
        attributes = vars(self._inner)
        attributes["_get_current_learning_rate"] = lambda: rate
        try:
            yield
        finally:
            del attributes["_get_current_learning_rate"]
