"""MirroredStrategy: all GPUs of one machine, or logical CPU devices in their place.

Each device computes its shards from a copy of the weights of its own. A step copies the weights that it changes, and
only them: what no step changes (frozen layers) is copied once a call of several steps. The update is made once, on the
first device, from the sum. TensorFlow's own mirrored variables would make it on every device from a sum that is sent to
each: as many bytes (gradients then, weights here), and the optimizer's slots once for each device in place of once.
Keras would also see a strategy then; see `raytf.strategies`.
"""

from __future__ import annotations

import tensorflow as tf

from raytf.strategies.alone import Alone, compute_devices, devices_of


def make() -> Alone:
    names = compute_devices()
    return Alone(devices_of(tf.distribute.MirroredStrategy(names), home=names[0]))
