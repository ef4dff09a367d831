"""The strategies of one process: one device, mirrored, central storage and TPU.

All of them make a group of one worker (`raytf.distributed.group.SingleWorkerGroup`); they differ in the devices and in
where the weights live.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from raytf import _tensorflow
from raytf.distributed.devices import LocalDevices
from raytf.distributed.group import SingleWorkerGroup
from raytf.distributed.wire import WireLayout
from raytf.errors import ClusterError, one_line


def devices_of(strategy: tf.distribute.Strategy, home: str) -> LocalDevices:
    """A strategy's devices. Each device's part of a sum goes to `home` in one piece, and is added there.

    Args:
        strategy: that owns the devices.
        home: the device where the weights are and sums are made.
    """
    names = strategy.extended.worker_devices

    def add(parts: list[list[tf.Tensor]], home: str) -> list[tf.Tensor]:
        flat = []
        for name, tensors in zip(names, parts, strict=False):
            with tf.device(name):  # one sum for all tensors
                flat.append(tf.concat([tf.reshape(t, [-1]) for t in tensors], 0))
        reduced = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, _tensorflow.per_replica(flat), home)
        total = strategy.experimental_local_results(reduced)[0]
        return WireLayout([t.shape for t in parts[0]]).split(tf.ensure_shape(total, flat[0].shape))

    return LocalDevices(names, home, add)


def compute_devices() -> Sequence[str]:
    """The GPUs that this process sees; without any, its logical CPUs."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in found]


def central_storage() -> SingleWorkerGroup:
    """Weights and optimizer in host memory, computation on all GPUs (or logical CPU devices).

    For models that do not fit a GPU together with the optimizer's slots and the sums of gradients: a GPU only has a
    copy of the weights, while it computes its shards. Each step sends the weights to the GPU and the gradients back
    over the bus; where everything fits, `mirrored` is faster.
    """
    home = tf.config.list_logical_devices("CPU")[0].name
    strategy = tf.distribute.experimental.CentralStorageStrategy(compute_devices(), home)
    return SingleWorkerGroup(devices_of(strategy, home))


def mirrored() -> SingleWorkerGroup:
    """All GPUs of one machine, or logical CPU devices in their place.

    Each device computes its shards from its own copy of the weights. A step copies only the weights that it changes:
    weights that no step changes (frozen layers) are copied once in a call of several steps. The update is made once, on
    the first device, from the sum. TensorFlow's own mirrored variables would make it on every device from a sum that is
    sent to each: that is as many bytes (gradients there, weights here), but the optimizer's slots would exist on each
    device instead of once. Keras would also see a strategy then; see `raytf.distributed`.
    """
    names = compute_devices()
    return SingleWorkerGroup(devices_of(tf.distribute.MirroredStrategy(names), home=names[0]))


def one_device() -> SingleWorkerGroup:
    """The first GPU of one worker, else its CPU. No sum, no copies; for debugging and for small models."""
    name = compute_devices()[0]
    return SingleWorkerGroup(devices_of(tf.distribute.OneDeviceStrategy(name), home=name))


def tpu() -> SingleWorkerGroup:
    """The TPU cores of one machine, each as a device. Tested only up to the error that there is no TPU.

    Ray gives the worker all chips of a node (its resource `TPU`), and TPUClusterResolver finds those of this machine.

    Raises:
        ClusterError: there is no TPU, or it does not answer.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise ClusterError(
            f"--strategy tpu: TensorFlow finds no TPU on this worker's machine ({one_line(error, 200)}). Run on a TPU "
            "VM with a TensorFlow for TPUs, or use another --strategy."
        ) from None
    return SingleWorkerGroup(devices_of(strategy, home=strategy.extended.worker_devices[0]))
