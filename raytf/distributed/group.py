"""The interface of a worker's group, through which training uses a strategy; the groups of one worker; and `make`."""

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
    """Exchanges values between ranks outside of the step. Each rank must make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all workers, computed at once."""

    def share(self, data: bytes, giver: int = 0) -> bytes:
        """Return the bytes of the rank `giver`, of any length, on every worker."""

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        """Return the arrays of the rank `giver`, bit for bit, on every worker. Shapes and dtypes must be equal."""

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        """Overwrite the takers' arrays with those of the givers, and return them, if the ranks can meet again. All
        givers' arrays are equal, and the takers' arrays have the same shapes and dtypes."""


class Group(Ranks, Protocol):
    """This worker's place among the workers, and its devices.

    Attributes:
        devices: devices of this process.
        route: path that gradients take between workers; None for a single worker.
    """

    devices: Devices

    @property
    def route(self) -> SumRoute | None: ...

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of tensors of one dtype over all workers. Can be traced."""


class SingleWorkerGroup:
    """A group of one worker, with one or more devices."""

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


# These strategies all make a `SingleWorkerGroup`. They differ in the devices and in where the weights are.


def devices_of(strategy: tf.distribute.Strategy, home: str) -> LocalDevices:
    """Return a strategy's devices. Each sends its part of a sum in one piece to `home`, which holds the weights."""
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
    """Return the GPUs that this process sees or, if there are none, its logical CPUs."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


def central_storage() -> SingleWorkerGroup:
    """Return a group with weights and optimizer in host memory that computes on all GPUs (or logical CPU devices).

    Use it for models that do not fit on a GPU together with the optimizer's slots and the sums of gradients: a GPU
    holds only a copy of the weights, and only while it computes its shards. Each step sends the weights to the GPU and
    the gradients back over the bus. If everything fits on the GPU, `mirrored` is faster.
    """
    home = tf.config.list_logical_devices("CPU")[0].name
    strategy = tf.distribute.experimental.CentralStorageStrategy(compute_devices(), home)
    return SingleWorkerGroup(devices_of(strategy, home))


def mirrored() -> SingleWorkerGroup:
    """Return a group of all GPUs of one machine or, if there are none, its logical CPU devices.

    Each device computes its shards from its own copy of the weights. A step copies only the weights that it changes:
    weights that no step changes (frozen layers) are copied once in a call of several steps. The update is computed
    once, on the first device, from the sum. With TensorFlow's own mirrored variables, every device would receive the
    sum and compute the update. That would move as many bytes (gradients instead of weights), but each device would hold
    the optimizer's slots, and Keras would see a strategy; see `raytf.distributed`.
    """
    names = compute_devices()
    return SingleWorkerGroup(devices_of(tf.distribute.MirroredStrategy(names), home=names[0]))


def one_device() -> SingleWorkerGroup:
    """Return a group of the first GPU, or else the CPU. It needs no sums or copies; for debugging and small models."""
    name = compute_devices()[0]
    return SingleWorkerGroup(devices_of(tf.distribute.OneDeviceStrategy(name), home=name))


def tpu() -> SingleWorkerGroup:
    """Return a group of the TPU cores of one machine. Never tested with a TPU, only the error without one.

    Ray assigns the worker all chips of a node (its resource `TPU`), and TPUClusterResolver finds this machine's chips.

    Raises:
        ClusterError: there is no TPU, or it does not respond.
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
        gpus: GPUs that the cluster has assigned to this process; a fraction if several processes share one.

    Raises:
        ClusterError: the devices are missing.
        GpuError, WorkerLostError: a worker of multi-worker-mirrored does not have the GPU assigned to it.
    """
    if section.strategy in _OF_ONE_WORKER:
        return _OF_ONE_WORKER[section.strategy]()
    return MultiWorkerGroup(rendezvous.mine(), section.communication, promised=gpus)


def make_again(section: StrategySection, gpus: float = 0.0) -> MultiWorkerGroup:
    """Return the group of a multi-worker-mirrored worker, which is alone until `meet_again` is called, repeatedly."""
    mine = rendezvous.mine()
    alone = rendezvous.Meeting(0, (mine.addresses[mine.rank],), mine.key)
    return MultiWorkerGroup(alone, section.communication, promised=gpus, meets_again=True)
