"""The strategies of one process: one device, mirrored, central storage and TPU.

All make a group of one worker (`raytf.distributed.group.SingleWorkerGroup`); they differ in the devices and in where
weights live.
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
    """A strategy's devices; what each has of a sum goes to one of them in one piece, and is added there.

    Args:
        home: where weights belong and sums are made.
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
    """Weights and optimizer in the host's memory, work on all GPUs (or logical CPU devices).

    For models that do not fit a GPU together with the optimizer's slots and the sums of gradients: a GPU has a copy of
    the weights only, while it computes its shards. It costs a way over the bus for the weights and one back for the
    gradients in each step; where everything fits, `mirrored` is faster.
    """
    home = tf.config.list_logical_devices("CPU")[0].name
    strategy = tf.distribute.experimental.CentralStorageStrategy(compute_devices(), home)
    return SingleWorkerGroup(devices_of(strategy, home))


def mirrored() -> SingleWorkerGroup:
    """All GPUs of one machine, or logical CPU devices in their place.

    Each device computes its shards from a copy of the weights of its own. A step copies the weights that it changes,
    and only them: what no step changes (frozen layers) is copied once a call of several steps. The update is made once,
    on the first device, from the sum. TensorFlow's own mirrored variables would make it on every device from a sum that
    is sent to each: as many bytes (gradients then, weights here), and the optimizer's slots once for each device in
    place of once. Keras would also see a strategy then; see `raytf.distributed`.
    """
    names = compute_devices()
    return SingleWorkerGroup(devices_of(tf.distribute.MirroredStrategy(names), home=names[0]))


def one_device() -> SingleWorkerGroup:
    """The first GPU of one worker, else its CPU. No sum, no copies; to debug, and for small models."""
    name = compute_devices()[0]
    return SingleWorkerGroup(devices_of(tf.distribute.OneDeviceStrategy(name), home=name))


def tpu() -> SingleWorkerGroup:
    """The TPU cores of one machine, each as a device. Tried here only as far as the error that none is there.

    Ray gives the worker all chips of a node (its resource `TPU`), and TPUClusterResolver finds those of this machine.

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
    return SingleWorkerGroup(devices_of(strategy, home=strategy.extended.worker_devices[0]))
