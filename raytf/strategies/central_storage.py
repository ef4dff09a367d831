"""CentralStorageStrategy: weights and optimizer in the host's memory, work on all GPUs (or logical CPU devices).

For models that do not fit a GPU together with the optimizer's slots and the sums of gradients: a GPU has a copy of the
weights only, while it computes its shards. It costs a way over the bus for the weights and one back for the gradients
in each step; where everything fits, `mirrored` is faster.
"""

from __future__ import annotations

import tensorflow as tf

from raytf.strategies.alone import Alone, compute_devices, devices_of


def make() -> Alone:
    home = tf.config.list_logical_devices("CPU")[0].name
    strategy = tf.distribute.experimental.CentralStorageStrategy(compute_devices(), home)
    return Alone(devices_of(strategy, home))
