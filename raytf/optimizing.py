"""What a step asks of its optimizer: the learning rate as `raytf.rates` says, and updates in one pass over memory."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

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


#: (gradient, variable, learning rate): an optimizer's `update_step`.
_Update = Callable[[tf.Tensor, tf.Variable, tf.Tensor], None]


@contextlib.contextmanager
def fused(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Have Adam, AdamW and SGD update each weight by one operation of TensorFlow, in what is traced meanwhile.

    Keras writes an update as a dozen operations, each of which goes through memory once: for a small model that takes
    longer than its gradients. TensorFlow's own kernels do the same arithmetic in the same order in one pass, but that
    they round Adam's betas to the weights' type before they take 1 - beta (5e-5 of that at 0.999). Clipping, weight
    decay, averages and loss scales are Keras's as before; so is the update of any other optimizer.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    own, update = type(inner).update_step, None
    if own is keras.optimizers.Adam.update_step and not inner.amsgrad:
        update = _adam(inner)
    elif own is keras.optimizers.SGD.update_step:
        update = _sgd(inner)
    attributes = vars(inner)
    if update is None or "update_step" in attributes:
        yield
        return

    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        dense = isinstance(variable, tf.Variable) and not isinstance(gradient, tf.IndexedSlices)
        chosen = update if dense and variable.dtype in (tf.float32, tf.float64) else functools.partial(own, inner)
        chosen(gradient, variable, learning_rate)

    attributes["update_step"] = update_step  # as an attribute of the one object, as above
    try:
        yield
    finally:
        del attributes["update_step"]


def _adam(adam: Any) -> _Update:
    powers: dict[tuple[int, tf.DType], tuple[tf.Tensor, tf.Tensor]] = {}  # once for all weights of a graph

    def update(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        dtype, place = variable.dtype, adam._get_variable_index(variable)
        key = id(tf.compat.v1.get_default_graph()), dtype
        if key not in powers:
            step = tf.cast(tf.convert_to_tensor(adam.iterations) + 1, dtype)
            powers[key] = tf.pow(tf.cast(adam.beta_1, dtype), step), tf.pow(tf.cast(adam.beta_2, dtype), step)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=_handle(adam._momentums[place]),
            v=_handle(adam._velocities[place]),
            beta1_power=powers[key][0],
            beta2_power=powers[key][1],
            lr=tf.cast(learning_rate, dtype),
            beta1=tf.constant(adam.beta_1, dtype),
            beta2=tf.constant(adam.beta_2, dtype),
            epsilon=tf.constant(adam.epsilon, dtype),
            grad=tf.cast(gradient, dtype),
            use_locking=True,
        )

    return update


def _sgd(sgd: Any) -> _Update:
    def update(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        dtype = variable.dtype
        rate, gradient = tf.cast(learning_rate, dtype), tf.cast(gradient, dtype)
        if not sgd.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient, use_locking=True)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=_handle(sgd.momentums[sgd._get_variable_index(variable)]),
            lr=rate,
            grad=gradient,
            momentum=tf.constant(sgd.momentum, dtype),
            use_locking=True,
            use_nesterov=bool(sgd.nesterov),
        )

    return update


def _handle(variable: Any) -> tf.Tensor:
    return (variable.value if isinstance(variable, keras.Variable) else variable).handle
