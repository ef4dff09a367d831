"""Updates of Adam, AdamW and SGD in a single pass over memory, and of Adagrad over only the rows that occur."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from raytf import _keras
from raytf.distributed.encoding.sparse_gradients import unique_rows

#: An optimizer's `update_step`: (gradient, variable, learning rate).
_Update = Callable[[tf.Tensor, tf.Variable, tf.Tensor], None]


@contextlib.contextmanager
def prepared(optimizer: keras.optimizers.Optimizer | None) -> Iterator[None]:
    """Apply `fused` and `repeatable` to an optimizer, if there is one."""
    if optimizer is None:
        yield
        return
    with fused(optimizer), repeatable(optimizer):
        yield


def fused(optimizer: keras.optimizers.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Make Adam, AdamW and SGD update each weight with one TensorFlow operation, in graphs traced in this context.

    Keras composes an update of a dozen operations, each with a pass over memory, which takes longer than the gradients
    of a small model. TensorFlow's kernels do the same arithmetic in the same order in one pass, except that they round
    Adam's betas to the weights' type before they compute 1 - beta (a relative error of 5e-5 at 0.999). For slices,
    Adagrad updates only the rows that occur. Keras still computes clipping, weight decay, averages, loss scales and all
    other updates.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    own, update = type(inner).update_step, None
    if own is keras.optimizers.Adam.update_step and not inner.amsgrad:
        update = _adam(inner)
    elif own is keras.optimizers.SGD.update_step:
        update = _sgd(inner)
    of_rows = _adagrad_rows(inner) if own is keras.optimizers.Adagrad.update_step else None
    if (update is None and of_rows is None) or "update_step" in vars(inner):
        return contextlib.nullcontext()

    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        chosen = of_rows if isinstance(gradient, tf.IndexedSlices) else update
        if chosen is None or not isinstance(variable, tf.Variable) or variable.dtype not in (tf.float32, tf.float64):
            chosen = functools.partial(own, inner)
        chosen(gradient, variable, learning_rate)

    return _keras.with_attributes(inner, {"update_step": update_step})


def repeatable(optimizer: keras.optimizers.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Make an optimizer add each row of slices once to a variable, so that the last bits are reproducible.

    Keras passes repeated rows to kernels that add them in an undefined order.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def of(own: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        return lambda variable, value: own(
            variable, unique_rows(value) if isinstance(value, tf.IndexedSlices) else value
        )

    return _keras.with_attributes(inner, {name: of(getattr(inner, name)) for name in ("assign_add", "assign_sub")})


def _adam(adam: Any) -> _Update:
    powers: dict[tuple[int, tf.DType], tuple[tf.Tensor, tf.Tensor]] = {}  # computed once per graph, for all weights

    def update(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        dtype = variable.dtype
        first, second = _keras.adam_moments(adam, variable)
        key = id(tf.compat.v1.get_default_graph()), dtype
        if key not in powers:
            step = tf.cast(tf.convert_to_tensor(adam.iterations) + 1, dtype)
            powers[key] = tf.pow(tf.cast(adam.beta_1, dtype), step), tf.pow(tf.cast(adam.beta_2, dtype), step)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=_handle(first),
            v=_handle(second),
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
            accum=_handle(sgd.momentums[_keras.variable_index(sgd, variable)]),
            lr=rate,
            grad=gradient,
            momentum=tf.constant(sgd.momentum, dtype),
            use_locking=True,
            use_nesterov=bool(sgd.nesterov),
        )

    return update


def _adagrad_rows(adagrad: Any) -> _Update:
    """Return Adagrad's update of only the rows that occur; Keras takes the root of the whole accumulator first."""

    def update(gradient: Any, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        rate, epsilon = tf.cast(learning_rate, variable.dtype), tf.constant(adagrad.epsilon, variable.dtype)
        sums, values = _keras.adagrad_sums(adagrad, variable), tf.cast(gradient.values, variable.dtype)
        adagrad.assign_add(sums, tf.IndexedSlices(tf.square(values), gradient.indices, gradient.dense_shape))
        # Gather after the root, as in Keras: TensorFlow fuses a / sqrt(b) to an operation with different bits.
        rows, place = tf.unique(gradient.indices)
        roots = tf.gather(tf.sqrt(sums.value.sparse_read(rows) + epsilon), place)
        divided = rate * values / roots
        adagrad.assign_sub(variable, tf.IndexedSlices(divided, gradient.indices, gradient.dense_shape))

    return update


def _handle(variable: Any) -> tf.Tensor:
    return (variable.value if isinstance(variable, keras.Variable) else variable).handle
