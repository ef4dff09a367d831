"""A worker's group, through which the training loop uses a strategy; the groups of one process; and `make`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from raytf import _tensorflow
from raytf.config.flags import StrategySection
from raytf.distributed.allreduce.routes import SumRoute
from raytf.distributed.devices import Devices, LocalDevices
from raytf.distributed.encoding.wire import WireLayout
from raytf.distributed.membership import rendezvous
from raytf.distributed.multi_worker import MultiWorkerGroup
from raytf.errors import ClusterError, one_line


class Ranks(Protocol):
    """The exchange of values between ranks outside of the step. Each rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all workers, computed at once."""

    def share(self, data: bytes, giver: int = 0) -> bytes:
        """Return the bytes of one rank, of any length, on every worker."""

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        """Return the arrays of one rank, bit for bit, on every worker; shapes and dtypes must agree everywhere."""

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        """Return the arrays of some ranks, which all have equal ones, on others, if the ranks can meet again; the
        arrays of the takers have the same shapes and dtypes, and are written over."""


class Group(Ranks, Protocol):
    """This worker's place among the workers, and its devices.

    Attributes:
        devices: of this process.
        route: the path that gradients take between workers; None for a single worker.
    """

    devices: Devices

    @property
    def route(self) -> SumRoute | None: ...

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of tensors of one dtype over all workers; may be traced."""


class SingleWorkerGroup:
    """A group of one worker with some devices."""

    rank, world_size = 0, 1
    route: SumRoute | None = None

    def __init__(self, devices: Devices):
        self.devices = devices

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return tensors

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def share(self, data: bytes, giver: int = 0) -> bytes:
        return data

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        return arrays

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        return arrays


# All of them make a group of one worker (`raytf.distributed.group.SingleWorkerGroup`); they differ in the devices and
# in where the weights live.


def devices_of(strategy: tf.distribute.Strategy, home: str) -> LocalDevices:
    """Return a strategy's devices. Each device's part of a sum goes to `home`, where the weights are, in one piece."""
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
    """Return the GPUs that this process sees; without any, its logical CPUs."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


def central_storage() -> SingleWorkerGroup:
    """Return a group with weights and optimizer in host memory that computes on all GPUs (or logical CPU devices).

    For models that do not fit a GPU together with the optimizer's slots and the sums of gradients: a GPU only has a
    copy of the weights, while it computes its shards. Each step sends the weights to the GPU and the gradients back
    over the bus; where everything fits, `mirrored` is faster.
    """
    home = tf.config.list_logical_devices("CPU")[0].name
    strategy = tf.distribute.experimental.CentralStorageStrategy(compute_devices(), home)
    return SingleWorkerGroup(devices_of(strategy, home))


def mirrored() -> SingleWorkerGroup:
    """Return a group of all GPUs of one machine, or logical CPU devices in their place.

    Each device computes its shards from its own copy of the weights. A step copies only the weights that it changes:
    weights that no step changes (frozen layers) are copied once in a call of several steps. The update is made once, on
    the first device, from the sum. TensorFlow's own mirrored variables would make it on every device from a sum that is
    sent to each: that is as many bytes (gradients there, weights here), but the optimizer's slots would exist on each
    device instead of once. Keras would also see a strategy then; see `raytf.distributed`.
    """
    names = compute_devices()
    return SingleWorkerGroup(devices_of(tf.distribute.MirroredStrategy(names), home=names[0]))


def one_device() -> SingleWorkerGroup:
    """Return a group of one worker's first GPU, else its CPU. No sum, no copies; for debugging and for small models."""
    name = compute_devices()[0]
    return SingleWorkerGroup(devices_of(tf.distribute.OneDeviceStrategy(name), home=name))


def tpu() -> SingleWorkerGroup:
    """Return a group of the TPU cores of one machine. Tested only up to the error that there is no TPU.

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


_OF_ONE_WORKER = {"mirrored": mirrored, "one-device": one_device, "central-storage": central_storage, "tpu": tpu}


def make(section: StrategySection, gpus: float = 0.0) -> Group:
    """Return the group of a synchronous strategy.

    Call it before any TensorFlow operation, in a process that `worker.set_up` has prepared.

    Args:
        section: names the strategy.
        gpus: GPUs that the cluster has given this process; a fraction where several processes share one.

    Raises:
        ClusterError: the devices are not there.
        GpuError, WorkerLostError: a worker of multi-worker-mirrored does not have the GPU that it was given.
    """
    if section.strategy in _OF_ONE_WORKER:
        return _OF_ONE_WORKER[section.strategy]()
    return MultiWorkerGroup(rendezvous.mine(), section.communication, promised=gpus)


def make_again(section: StrategySection, gpus: float = 0.0) -> MultiWorkerGroup:
    """Return the group of a worker of multi-worker-mirrored that is alone until it meets others, again and again."""
    mine = rendezvous.mine()
    alone = rendezvous.Meeting(0, (mine.addresses[mine.rank],), mine.key)
    return MultiWorkerGroup(alone, section.communication, promised=gpus, meets_again=True)
