"""MultiWorkerMirroredStrategy as raytf uses it: the strategy owns the cluster and the collectives, nothing else.

A worker has one device, so its shards are computed one after another. Model and optimizer variables are plain
`tf.Variable`s, created outside the strategy's scope, and only the reduction runs through `strategy.run`. Every rank
applies the same reduced gradient to the same values, so the copies stay equal without a mirrored container. What that
buys: Keras sees no strategy, so compiled losses keep their scale, metrics and callbacks read local numbers without a
collective, optimizers (clipping, EMA, loss scaling) run the code they run on one machine, and BatchNorm statistics are
reduced with the gradients instead of diverging.

Workers that share a host add their vectors in its memory first (`host_sum`), and only the first of each host meets
those of other hosts in a collective. On one host nothing goes over the network.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import collective_util, cross_device_utils
from tensorflow.python.eager import context

from raytf.devices import Devices, OneDevice
from raytf.reduce import packed
from raytf.sections import Communication
from raytf.strategies.host_sum import HostSum, PeerLostError, host_identity

#: Milliseconds without a sign of life after which TensorFlow takes a worker for dead; they give two in that time. Its
#: default is 10 s. What beats needs no interpreter lock and next to no CPU, so that a loaded machine is no reason.
_HEARTBEAT_TIMEOUT_MS = 6000
#: Far from those that the strategy gives to its own groups of devices.
_GROUP_KEY = 1_000_000
_BITS = 30


class Group:
    """This worker's place among the workers, and their sum.

    Reads TF_CONFIG, which Ray Train's backend has set; create it before any TensorFlow operation.

    Args:
        communication: how collectives are made; only `auto` adds in the memory of a host.
        host: what this process has in common with those that can share memory with it; None shares none.

    Attributes:
        rank, world_size: int.
        on_host: the sum over the workers of this host, where there are several.
    """

    def __init__(self, communication: Communication = "auto", host: Callable[[], str | None] = host_identity) -> None:
        self.devices: Devices = OneDevice()
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        self.rank = int(resolver.task_id or 0)
        self.world_size = max(1, len(resolver.cluster_spec().as_dict().get("worker", [])))
        if self.world_size > 1:
            # The strategy would configure the same service with TensorFlow's time.
            context.context().configure_coordination_service(
                service_type="standalone",
                service_leader="/job:worker/replica:0/task:0",
                heartbeat_timeout_in_ms=_HEARTBEAT_TIMEOUT_MS,
                coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=self.world_size)],
            )
        experimental = tf.distribute.experimental
        options = experimental.CommunicationOptions(
            implementation=experimental.CommunicationImplementation(communication.upper())
        )
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        self.on_host: HostSum | None = None
        self._over_hosts: cross_device_utils.CollectiveReplicaLauncher | None = None
        self._hosts = self.world_size
        self._over_network = tf.function(self._network_sum, reduce_retracing=True, autograph=False)
        self._sum_vector = tf.function(
            lambda vector: self.all_reduce([vector])[0], reduce_retracing=True, autograph=False
        )
        if self.world_size > 1 and communication == "auto":
            self._share_memory(host)

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all workers of tensors of one dtype; call it at the same place on every one. May be traced."""
        if self.world_size == 1:
            return [tf.identity(t) for t in tensors]
        if self.on_host is not None:
            tensors = _by_host(self.on_host.add, tensors)
        if self._over_hosts is not None:
            tensors = packed(self._over_hosts.all_reduce)(tensors)
        elif self._hosts == self.world_size:
            tensors = packed(self._network_sum)(tensors)
        if self.on_host is not None and self._hosts > 1:
            tensors = _by_host(self.on_host.hand_out, tensors)
        return tensors

    def _network_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        return self.strategy.run(_replica_sum, args=(tensor,))

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of an array over all workers, now.

        Raises:
            tf.errors.UnavailableError: or another of TensorFlow's, when one of them is gone.
        """
        if self.world_size == 1:
            return values
        if self.on_host is not None and self._hosts == 1:
            try:
                return self.on_host.add(np.ascontiguousarray(values))[0]
            except PeerLostError as error:  # in a graph TensorFlow makes it one of its own, too
                raise tf.errors.UnavailableError(None, None, str(error)) from None
        return self._sum_vector(tf.convert_to_tensor(values)).numpy()

    def _share_memory(self, host: Callable[[], str | None]) -> None:
        """Find the workers of this host, and meet them; all workers do so, or none."""
        identity = None if tf.config.list_logical_devices("GPU") else host()
        # One that shares nothing is alone on a host of its own.
        digest = hashlib.sha256((identity or secrets.token_hex()).encode()).digest()
        mine, name = int.from_bytes(digest[:8]) >> 64 - 2 * _BITS, secrets.randbits(2 * _BITS)
        table = np.zeros([self.world_size, 4], np.int32)
        table[self.rank] = [part for number in (mine, name) for part in (number >> _BITS, number & (1 << _BITS) - 1)]
        table = self._over_network(tf.constant(table)).numpy()
        hosts: dict[tuple[int, int], list[int]] = {}
        for rank, row in enumerate(table.tolist()):
            hosts.setdefault((row[0], row[1]), []).append(rank)
        if len(hosts) == self.world_size:
            return
        own = next(ranks for ranks in hosts.values() if self.rank in ranks)
        high, low = table[own[0], 2:].tolist()
        on_host, failed = None, 0
        if len(own) > 1:
            try:
                on_host = HostSum(high << _BITS | low, own.index(self.rank), len(own))
            except OSError:
                failed = 1
        if self._over_network(tf.constant([failed])).numpy()[0]:
            if on_host is not None:
                on_host.close()
            return
        self.on_host, self._hosts = on_host, len(hosts)
        if len(hosts) > 1 and self.rank == own[0]:
            device = self.strategy.extended.worker_devices[0]
            keys = cross_device_utils.CollectiveKeys(_GROUP_KEY)
            key = keys.get_group_key([device])
            options = collective_util.Options()
            self._over_hosts = cross_device_utils.CollectiveReplicaLauncher(key, len(hosts), keys, device, options)

    def share(self, data: bytes) -> bytes:
        """Rank 0's bytes, of any length, on every worker."""
        if self.world_size == 1:
            return data
        length = int(self.sum(np.array([len(data) if self.rank == 0 else 0], np.float64))[0])
        own = data if self.rank == 0 else bytes(length)
        return self.broadcast([np.frombuffer(own, np.uint8)])[0].tobytes()

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Rank 0's arrays, bit for bit, on every worker; shapes and dtypes must agree everywhere."""
        if self.world_size == 1:
            return arrays
        raw = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
        words = np.frombuffer(raw + b"\0" * (-len(raw) % 4), np.int32)
        # Adding zeros in integers keeps every bit, NaN payloads included.
        reduced = self.sum(words if self.rank == 0 else np.zeros_like(words)).tobytes()
        out, begin = [], 0
        for a in arrays:
            out.append(np.frombuffer(reduced[begin : begin + a.nbytes], a.dtype).reshape(a.shape))
            begin += a.nbytes
        return out


def _replica_sum(tensor: tf.Tensor) -> Any:
    # The copy is made on the replica's device; the collective asks a tensor for its device, and a traced one has none.
    mine = tf.identity(tensor)
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine)


def _by_host(call: Callable[..., list[np.ndarray]], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    found = tf.numpy_function(call, tensors, [t.dtype for t in tensors])
    return [tf.ensure_shape(each, t.shape) for each, t in zip(found, tensors, strict=True)]
