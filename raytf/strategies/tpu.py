"""TPUStrategy: the TPU cores of one machine, each as a device. Tried here only as far as the error that none is there.

Ray gives the worker all chips of a node (its resource `TPU`), and TPUClusterResolver finds those of this machine.
"""

from __future__ import annotations

import tensorflow as tf

from raytf.errors import ClusterError, one_line
from raytf.strategies.alone import Alone, devices_of


def make() -> Alone:
    """Connect to this machine's TPU.

    Raises:
        ClusterError: there is none, or it does not answer.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise ClusterError(
            f"--strategy tpu: TensorFlow finds no TPU on this worker's machine ({one_line(error, 200)}). Run on a TPU "
            "VM with a TensorFlow for TPUs, or take another --strategy."
        ) from None
    return Alone(devices_of(strategy, home=strategy.extended.worker_devices[0]))
