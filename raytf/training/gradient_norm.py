"""The global norm of a step's gradient, as the log of steps has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def square(gradients: Sequence[Any], optimizer: keras.optimizers.Optimizer | None) -> tf.Tensor:
    """The sum of the squares of all elements, float32; to be traced.

    Args:
        gradients: summed over all shards, before they are clipped and before the update, which may change a loss
            scale. Of slices, those of the same row are not added first, as in `tf.linalg.global_norm`.
        optimizer: that applies them.
    """
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    halves = [tf.cast(tf.nn.l2_loss(each), tf.float32) for each in values]
    total = 2.0 * tf.add_n(halves) if halves else tf.constant(0.0)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return total / tf.square(tf.cast(tf.convert_to_tensor(optimizer.dynamic_scale), tf.float32))
    return total
