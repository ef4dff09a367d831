"""OneDeviceStrategy: the first GPU of one worker, else its CPU. No sum, no copies; to debug, and for small models."""

from __future__ import annotations

import tensorflow as tf

from raytf.strategies.alone import Alone, compute_devices, devices_of


def make() -> Alone:
    name = compute_devices()[0]
    return Alone(devices_of(tf.distribute.OneDeviceStrategy(name), home=name))
